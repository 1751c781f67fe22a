"""The two nodes and how they reach each other."""

from launcher.settings.setting import PORTS, Setting

KEYS = (
    Setting(
        "HEAD_IP",
        "nodes",
        "ipv4",
        "10.0.0.1",
        "address of this node on the CX7 link; rank 0 and the rendezvous",
        shown=True,
    ),
    Setting(
        "WORKER_IP",
        "nodes",
        "ipv4",
        "10.0.0.2",
        "address of the other node on the CX7 link; rank 1 and the ssh target",
        shown=True,
    ),
    Setting(
        "WORKER_USER",
        "nodes",
        "word",
        "",
        "account on the worker; empty: the same as here",
        shown=True,
    ),
    Setting("WORKER_HOME", "nodes", "path", "", "home on the worker; empty: asked from the worker"),
    Setting(
        "WORKER_SSH",
        "nodes",
        "word",
        "",
        "full ssh destination; empty: WORKER_USER@WORKER_IP",
    ),
    Setting(
        "HEAD_CX7_IF",
        "nodes",
        "word",
        "",
        "network interface of the link, head; empty: found; two rails: a,b",
        shown=True,
    ),
    Setting(
        "WORKER_CX7_IF",
        "nodes",
        "word",
        "",
        "network interface of the link, worker; empty: found; two rails: a,b",
        shown=True,
    ),
    Setting(
        "HEAD_CX7_IB",
        "nodes",
        "word",
        "",
        "RoCE device of the link, head; empty: found; two rails: a,b",
        shown=True,
    ),
    Setting(
        "WORKER_CX7_IB",
        "nodes",
        "word",
        "",
        "RoCE device of the link, worker; empty: found; two rails: a,b",
        shown=True,
    ),
    Setting(
        "NCCL_IB_GID_INDEX",
        "nodes",
        "optional integer",
        "",
        "RoCE v2 GID index of both nodes; empty: found at each start",
        limits=(0, 255),
        shown=True,
    ),
    Setting(
        "HEAD_GID",
        "nodes",
        "optional integer",
        "",
        "GID index of the head; empty: NCCL_IB_GID_INDEX, or found",
        limits=(0, 255),
        shown=True,
    ),
    Setting(
        "WORKER_GID",
        "nodes",
        "optional integer",
        "",
        "GID index of the worker; empty: NCCL_IB_GID_INDEX, or found",
        limits=(0, 255),
        shown=True,
    ),
    Setting(
        "CX7_RAILS",
        "nodes",
        "choice",
        "auto",
        "links used between the nodes; auto: both ports where both have an address in common nets",
        choices=("auto", "1", "2"),
    ),
    Setting(
        "WORKER_SSH_PORT",
        "nodes",
        "optional integer",
        "",
        "ssh port of the worker; empty: as ssh is configured",
        limits=PORTS,
    ),
    Setting(
        "WORKER_SSH_KEY",
        "nodes",
        "path",
        "",
        "private key for the worker; empty: as ssh is configured",
    ),
    Setting(
        "WORKER_KNOWN_HOSTS",
        "nodes",
        "path",
        "",
        "file of the worker's host key; empty: as ssh is configured",
    ),
    Setting(
        "MASTER_PORT", "nodes", "integer", "29521", "rendezvous port on the head", limits=PORTS
    ),
    Setting(
        "PORT", "nodes", "integer", "8888", "port of the API on the head", limits=PORTS, shown=True
    ),
    Setting(
        "BIND",
        "nodes",
        "ipv4",
        "127.0.0.1",
        "address the API listens on; 0.0.0.0 for the whole "
        "network needs VLLM_API_KEY or ALLOW_NO_AUTH=1",
        shown=True,
    ),
    Setting(
        "VLLM_API_KEY", "nodes", "text", "", "bearer token of /v1; /health stays open", secret=True
    ),
    Setting("ALLOW_NO_AUTH", "nodes", "flag", "0", "serve beyond this machine without a key"),
)

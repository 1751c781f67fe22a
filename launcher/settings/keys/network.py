"""NCCL between the nodes."""

from launcher.settings.setting import BYTES, Setting

KEYS = (
    Setting(
        "NCCL_DEBUG",
        "network",
        "choice",
        "WARN",
        "verbosity",
        choices=("VERSION", "WARN", "INFO", "TRACE"),
    ),
    Setting("NCCL_DEBUG_SUBSYS", "network", "text", "", "subsystems of NCCL_DEBUG=INFO"),
    Setting(
        "NCCL_CROSS_NIC", "network", "integer", "0", "rings over different NICs", limits=(0, 2)
    ),
    Setting(
        "NCCL_BUFFSIZE",
        "network",
        "integer",
        "1048576",
        "bytes of a channel buffer; they are pinned and thus GPU memory",
        limits=BYTES,
    ),
    Setting(
        "NCCL_LL128_BUFFSIZE",
        "network",
        "integer",
        "262144",
        "bytes of an LL128 buffer",
        limits=BYTES,
    ),
    Setting("NCCL_PROTO", "network", "text", "^LL128", "protocols"),
    Setting("NCCL_MAX_NCHANNELS", "network", "integer", "8", "channels", limits=(1, 64)),
)

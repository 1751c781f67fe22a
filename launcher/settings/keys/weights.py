"""Model files on both nodes."""

from launcher.settings.setting import Setting

KEYS = (
    Setting("MODEL_HOST", "weights", "path", "./model", "EXL3 checkpoint on the head", shown=True),
    Setting(
        "ENGRAM_DIR",
        "weights",
        "path",
        "./engram-src",
        "original shards 47 and 48, index and config.json; a whole original tree will do",
        shown=True,
    ),
    Setting(
        "HF_MODEL_REPO",
        "weights",
        "word",
        "Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw",
        "where the checkpoint comes from",
    ),
    Setting(
        "HF_ENGRAM_REPO",
        "weights",
        "word",
        "deepseek-ai/DeepSeek-V4.1-Flash",
        "where the Engram tables come from",
    ),
    Setting(
        "AUTO_DOWNLOAD",
        "weights",
        "flag",
        "1",
        "fetch what is missing at start; 0 only verifies",
        shown=True,
    ),
    Setting(
        "HF_MAX_WORKERS",
        "weights",
        "integer",
        "8",
        "files downloaded at once",
        limits=(1, 64),
        one_shot=True,
    ),
    Setting(
        "HF_HUB_ENABLE_HF_TRANSFER",
        "weights",
        "flag",
        "1",
        "all cores for the download (hf-xet) when nothing serves",
    ),
    Setting(
        "WEIGHT_SYNC",
        "weights",
        "choice",
        "nfs",
        "how the worker gets the files",
        "04",
        choices=("nfs", "share", "zfs", "rsync", "auto"),
        shown=True,
    ),
    Setting(
        "SKIP_SYNC",
        "weights",
        "flag",
        "0",
        "trust what the worker has, after checking it",
        "04",
        one_shot=True,
    ),
    Setting(
        "FORCE_SYNC",
        "weights",
        "flag",
        "0",
        "copy again even if nothing changed",
        "04",
        one_shot=True,
    ),
    Setting(
        "ENGRAM_SRC",
        "weights",
        "path",
        "",
        "hard links to the Engram files; empty: in CACHE_ROOT, if needed",
    ),
    Setting("HOST_NFS", "weights", "flag", "0", "export with the head's own nfs-server", "04"),
    Setting(
        "NFS_SERVER_IP", "weights", "ipv4", "", "address the worker mounts; empty: found", "04"
    ),
    Setting("NFS_CLIENTS", "weights", "text", "", "who may mount; empty: the CX7 subnet", "04"),
    Setting(
        "NFS_OPTS",
        "weights",
        "text",
        "ro,sync,no_subtree_check,root_squash,fsid=0,crossmnt",
        "options of the export",
        "04",
    ),
    Setting(
        "NFS_OPTS_CLIENT",
        "weights",
        "text",
        "nfsvers=4.2,ro,nconnect=8,rsize=1048576,wsize=1048576,hard,timeo=600",
        "options of the mount",
        "04",
    ),
    Setting("NFS_IMAGE", "weights", "word", "dsv41-exl3-nfs:local", "image of the exporter", "04"),
    Setting("NFS_CONTAINER", "weights", "word", "dsv41-exl3-nfs", "name of the exporter", "04"),
    Setting(
        "NFS_EXPORT_ROOT", "weights", "path", "", "root of the export; empty: in CACHE_ROOT", "04"
    ),
    Setting(
        "NFS_EXPORT_MODEL",
        "weights",
        "word",
        "dsv41-exl3",
        "name of the checkpoint in the export",
        "04",
    ),
    Setting(
        "NFS_EXPORT_ENGRAM",
        "weights",
        "word",
        "dsv41-engram",
        "name of the tables in the export",
        "04",
    ),
    Setting(
        "NFS_VOLUME_MODEL",
        "weights",
        "word",
        "dsv41-exl3-weights",
        "Docker volume on the worker",
        "04",
    ),
    Setting(
        "NFS_VOLUME_ENGRAM",
        "weights",
        "word",
        "dsv41-exl3-engram",
        "Docker volume on the worker",
        "04",
    ),
    Setting(
        "WORKER_MODEL_DIR",
        "weights",
        "path",
        "~/.cache/dsv41-flash-exl3/model",
        "copy on the worker (zfs, rsync)",
    ),
    Setting(
        "WORKER_ENGRAM_DIR",
        "weights",
        "path",
        "~/.cache/dsv41-flash-exl3/engram-src",
        "copy on the worker (zfs, rsync)",
    ),
    Setting("ZFS_POOL", "weights", "word", "models", "pool on both nodes", "04"),
    Setting(
        "ZFS_HEAD_MODEL_DS", "weights", "word", "", "dataset; empty: ZFS_POOL/dsv41-exl3", "04"
    ),
    Setting(
        "ZFS_HEAD_ENGRAM_DS", "weights", "word", "", "dataset; empty: ZFS_POOL/dsv41-engram", "04"
    ),
    Setting("ZFS_WORKER_MODEL_DS", "weights", "word", "", "dataset; empty: as on the head", "04"),
    Setting("ZFS_WORKER_ENGRAM_DS", "weights", "word", "", "dataset; empty: as on the head", "04"),
    Setting(
        "ZFS_WORKER_IP", "weights", "ipv4", "", "address for the stream; empty: WORKER_IP", "04"
    ),
    Setting(
        "ZFS_SSH", "weights", "word", "", "ssh destination for the stream; empty: WORKER_SSH", "04"
    ),
    Setting("ZFS_SNAP_PREFIX", "weights", "word", "dsv41-sync", "prefix of our snapshots", "04"),
)

"""The rehearsal on this machine."""

from launcher.settings.setting import Setting

KEYS = (
    Setting(
        "REHEARSAL_DIR",
        "rehearsal",
        "path",
        ".rehearsal",
        "engine, checkpoint and tables of `rehearse`, some 8 GB",
    ),
)

"""Sends the head's datasets to the worker, as root of the head: ``zfs_job.py ROOT JSON``.

The rig's users may not mount; what root does is what `sudo -n zfs` does on a Spark.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

root = Path(sys.argv[1])
sys.path.insert(0, str(root))

from launcher.console import Console  # noqa: E402
from launcher.errors import LauncherError  # noqa: E402
from launcher.nodes.endpoint import Endpoint  # noqa: E402
from launcher.nodes.local import LocalNode  # noqa: E402
from launcher.nodes.ssh import SshNode  # noqa: E402
from launcher.record import Record  # noqa: E402
from launcher.settings.load import load  # noqa: E402
from launcher.weights import backend  # noqa: E402
from launcher.weights.manifest import Manifest  # noqa: E402
from launcher.weights.tree import of_tree  # noqa: E402
from launcher.weights.zfs import Zfs  # noqa: E402


def main() -> int:
    told = json.loads(sys.argv[2])
    folder = Path(told["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".env").write_text("")
    settings = load(folder, {}, told["set"], None, say=print)
    sources = told["sources"]
    work = backend.Work(
        settings=settings,
        head=LocalNode("head"),
        worker=SshNode("worker", Endpoint(told["worker"], "root"), folder / "ssh", include=""),
        manifest=Manifest(
            (of_tree("model", Path(sources["model"])), of_tree("engram", Path(sources["engram"])))
        ),
        sources=sources,
        targets=told["targets"],
        address=told["address"],
        prefix=24,
        owner="rig",
        folder=root,
        cache_root=folder,
        far_cache_root="/tmp/zfs-far",
        console=Console(),
        record=Record(folder),
    )
    try:
        backend.bring(work, [Zfs(work)])
    except LauncherError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

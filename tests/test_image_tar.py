"""The image as a tar on its way: saved whole, reused or refused; the pipes it goes through."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.image import pipe, staged


def test_a_platform_is_named_to_daemons_that_know_it() -> None:
    knows = "Options:\n  -o, --output string\n      --platform string   Save only the given"
    assert staged.save_argv("n", "linux/arm64", knows, "1.48\n")[2:4] == [
        "--platform",
        "linux/arm64",
    ]
    assert staged.save_argv("n", "linux/arm64", knows, "1.51\n")[2] == "--platform"
    for help_text, api in ((knows, "1.47"), (knows, "1.9"), ("Options: -o", "1.51"), (knows, "")):
        assert staged.save_argv("n", "linux/arm64", help_text, api) == ["docker", "save", "n"]


def saved(path: Path, *layers: str) -> Path:
    """What ``docker save`` writes, without the layers themselves."""
    with tarfile.open(path, "w") as tar:
        config = json.dumps({"rootfs": {"diff_ids": layers}}).encode()
        manifest = json.dumps([{"Config": "c.json", "RepoTags": ["n:1"]}]).encode()
        for name, data in (("c.json", config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_a_tar_is_saved_whole_and_reused_while_it_is_of_the_image(tmp_path: Path) -> None:
    made = saved(tmp_path / "made", "a", "b")
    tar = tmp_path / "ship" / "i.tar"
    assert staged.reusable(tar, ["a", "b"]) is None
    size = staged.save(["cat", str(made)], tar, ["a", "b"], lambda n: None)
    assert size == made.stat().st_size == staged.reusable(tar, ["a", "b"])
    assert staged.reusable(tar, ["a", "c"]) is None
    with tar.open("ab") as more:
        more.write(b"x")
    assert staged.reusable(tar, ["a", "b"]) is None
    staged.remove(tar)
    assert list(tar.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import sys; sys.exit('write: no space left on device')", "IMAGE_SHIP_DIR"),
        ("import sys; sys.exit('no such image')", "no such image"),
        ("pass", "0 bytes that are no image"),
        ("print('x' * 100000)", "that are no image"),
    ],
)
def test_a_tar_that_could_not_be_made_is_none(tmp_path: Path, program: str, told: str) -> None:
    tar = tmp_path / "i.tar"
    with pytest.raises(LauncherError) as refused:
        staged.save([sys.executable, "-c", program], tar, ["a"], lambda n: None)
    assert told in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tar_of_another_image_is_refused(tmp_path: Path) -> None:
    made = saved(tmp_path / "made", "a", "c")
    with pytest.raises(LauncherError, match="the first 1 are equal"):
        staged.save(["cat", str(made)], tmp_path / "i.tar", ["a", "b"], lambda n: None)


def test_pipes_tell_progress_and_who_failed(tmp_path: Path) -> None:
    seen: list[int] = []
    out = tmp_path / "out"
    write = "import sys; sys.stdout.buffer.write(bytes(3 << 20)); sys.exit({})"
    sink = "import sys; open({!r}, 'wb').write(sys.stdin.buffer.read()); sys.exit({})"

    def run(first: int, second: int) -> pipe.Ended:
        return pipe.through(
            [sys.executable, "-c", write.format(first)],
            [sys.executable, "-c", sink.format(str(out), second)],
            seen.append,
        )

    assert run(0, 0).well and out.stat().st_size == seen[-1] == 3 << 20
    assert run(3, 0).statuses == (3, 0)
    assert run(0, 4).statuses == (0, 4)
    early = pipe.through(
        [sys.executable, "-c", "import time, os\nwhile True: os.write(1, bytes(65536))"],
        [sys.executable, "-c", "import sys; sys.exit('full')"],
        seen.append,
    )
    assert not early.well and early.said[1] == "full"
    lines: list[str] = []
    ended = pipe.follow(
        [sys.executable, "-c", r"print('a 1%\ra 2%\nb'); import sys; sys.exit('why')"], lines.append
    )
    assert lines == ["a 1%", "a 2%", "b"] and ended.statuses == (1,) and ended.said == ("why",)
    with pytest.raises(LauncherError, match="could not be started"):
        pipe.follow(["/nowhere/docker"], lines.append)

"""The steps that install: what they run, in which order, and what an interruption leaves."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import time
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from settings_root import settings_of

from launcher import rehearsal
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.nodes.base import Done
from launcher.nodes.local import LocalNode, memory_available
from launcher.record import open_run
from launcher.settings.rehearsal import PROFILE
from launcher.state import Store
from launcher.steps.base import Context
from launcher.steps.checkpoint import Checkpoint, manifest_sizes
from launcher.steps.engine import MARKER, TORCH, VLLM, Engine, Progress
from launcher.steps.nvcc import Nvcc
from launcher.steps.overlay import Overlay
from launcher.steps.tools import Tools


class Scripted(LocalNode):
    """This machine, but commands are noted instead of run; ``answer`` decides how they end."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[list[str]] = []
        self.free = 10**12
        self.answer: Callable[[list[str]], tuple[int, str]] = lambda argv: (0, "")

    def run(self, argv: Sequence[str], **kind: Any) -> Done:
        words = list(argv)
        self.ran.append(words)
        if words[1:3] == ["-m", "venv"]:
            (Path(words[3]) / "bin").mkdir(parents=True)
        status, said = self.answer(words)
        if kind.get("line"):
            for line in said.splitlines():
                kind["line"](line)
        return Done(tuple(words), status, said.encode(), b"")

    def free_bytes(self, path: Path) -> int:
        return self.free


@pytest.fixture
def node() -> Scripted:
    return Scripted()


@pytest.fixture
def ctx(tmp_path: Path, node: Scripted) -> Context:
    nothing: Any = None
    return Context(
        name="rehearsal",
        root=tmp_path,
        logs=tmp_path / "logs",
        settings=nothing,
        node=node,
        runtime=nothing,
        store=Store(tmp_path / "state.json"),
        record=open_run(tmp_path / "logs"),
        console=Console(StringIO(), StringIO()),
        plan=nothing,
    )


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    lock = tmp_path / "engine.lock"
    lock.write_text("numpy==2.4.6\n")
    return Engine(folder=tmp_path / "engine", lock=lock)


def installs(node: Scripted) -> list[list[str]]:
    """The arguments of each pip install, its own options left out."""
    own = {"--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--no-color"}
    found = [words for words in node.ran if words[1:4] == ["-m", "pip", "install"]]
    return [[word for word in words[4:] if word not in own] for words in found]


def test_torch_comes_with_its_dependencies_and_vllm_without(
    ctx: Context, node: Scripted, engine: Engine
) -> None:
    engine.do(ctx)
    assert installs(node) == [
        [*TORCH],
        ["--no-deps", "-r", str(engine.lock)],
        ["--no-deps", VLLM],
    ]
    assert engine.done(ctx)
    count = len(installs(node))
    engine.do(ctx)  # the launcher's state was lost, the environment was not
    assert len(installs(node)) == count


def test_a_half_made_environment_is_never_taken_and_made_anew(
    ctx: Context, node: Scripted, engine: Engine
) -> None:
    said = "ERROR: no space\nthe last line\n"
    node.answer = lambda argv: (1, said) if VLLM in argv else (0, "")
    with pytest.raises(LauncherError, match="installing vLLM failed with exit code 1") as error:
        engine.do(ctx)
    assert "the last line" in error.value.found
    assert "the last line" in (ctx.record.folder / "log.txt").read_text()
    assert not engine.done(ctx)
    left = engine.folder / "left over"
    left.touch()
    node.answer = lambda argv: (0, "")
    engine.do(ctx)
    assert not left.exists()
    assert engine.done(ctx)


def test_another_lock_or_a_python_that_does_not_run_makes_it_stale(
    ctx: Context, node: Scripted, engine: Engine
) -> None:
    engine.do(ctx)
    node.answer = lambda argv: (127, "") if argv[1:] == ["-c", "pass"] else (0, "")
    assert not engine.done(ctx)
    node.answer = lambda argv: (0, "")
    assert engine.done(ctx)
    engine.lock.write_text("numpy==2.4.7\n")
    assert not engine.done(ctx)
    (engine.folder / MARKER).write_text("{")
    assert not engine.done(ctx)


def test_a_full_disk_is_told_before_anything_is_fetched(
    ctx: Context, node: Scripted, engine: Engine
) -> None:
    node.free = 10**9
    with pytest.raises(LauncherError, match=r"1\.0 GB free"):
        engine.do(ctx)
    assert node.ran == []


def test_the_overlay_is_installed_again_when_it_moved_or_its_project_changed(
    ctx: Context, node: Scripted, engine: Engine, tmp_path: Path
) -> None:
    source = tmp_path / "overlay"
    source.mkdir()
    (source / "pyproject.toml").write_text("[project]\n")
    overlay = Overlay(engine=engine.folder, source=source)
    engine.do(ctx)
    overlay.do(ctx)
    assert installs(node)[-1] == ["--no-deps", "--no-build-isolation", "-e", str(source)]
    assert overlay.done(ctx)
    (source / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert not overlay.done(ctx)
    moved = source.rename(tmp_path / "elsewhere")
    (moved / "pyproject.toml").write_text("[project]\n")
    assert not Overlay(engine=engine.folder, source=moved).done(ctx)


def test_the_overlay_is_installed_again_when_its_native_code_changed(
    ctx: Context, engine: Engine, tmp_path: Path
) -> None:
    source = tmp_path / "overlay"
    (source / "csrc").mkdir(parents=True)
    (source / "pyproject.toml").write_text("[project]\n")
    (source / "csrc" / "rows.cpp").write_text("int a;\n")
    overlay = Overlay(engine=engine.folder, source=source)
    engine.do(ctx)
    overlay.do(ctx)
    (source / "csrc" / "notes.txt").write_text("")
    assert overlay.done(ctx)
    (source / "csrc" / "rows.cpp").write_text("int b;\n")
    assert not overlay.done(ctx)


def test_test_tools_cut_short_never_count_for_the_list_they_replaced(
    ctx: Context, node: Scripted, engine: Engine, tmp_path: Path
) -> None:
    engine.do(ctx)
    lock = tmp_path / "tools.lock"
    lock.write_text("pytest==1\n")
    tools = Tools(engine=engine.folder, lock=lock)
    tools.do(ctx)
    assert tools.done(ctx)
    lock.write_text("pytest==2\n")
    assert not tools.done(ctx)
    node.answer = lambda argv: (1, "cut short")
    with pytest.raises(LauncherError):
        tools.do(ctx)
    lock.write_text("pytest==1\n")
    assert not tools.done(ctx)  # half of another list may be in there


def test_the_compiler_lies_in_a_folder_of_its_own_and_is_whole_or_absent(
    ctx: Context, node: Scripted, engine: Engine, tmp_path: Path
) -> None:
    lock = tmp_path / "nvcc.lock"
    lock.write_text("nvidia-cuda-nvcc==1\n")
    nvcc = Nvcc(python=engine.folder / "bin" / "python", folder=tmp_path / "nvcc", lock=lock)
    assert not nvcc.done(ctx)
    nvcc.do(ctx)
    assert nvcc.done(ctx)
    called = [argv for argv in node.ran if "--target" in argv]
    assert [argv[argv.index("--target") + 1] for argv in called] == [str(tmp_path / "nvcc")]
    lock.write_text("nvidia-cuda-nvcc==2\n")
    node.answer = lambda argv: (1, "cut short")
    with pytest.raises(LauncherError):
        nvcc.do(ctx)
    lock.write_text("nvidia-cuda-nvcc==1\n")
    assert not nvcc.done(ctx)


def test_a_checkpoint_counts_only_with_every_file_at_its_size(
    ctx: Context, node: Scripted, tmp_path: Path
) -> None:
    step = Checkpoint(python=Path("py"), folder=tmp_path / "out", package=tmp_path / "package")

    def make(argv: list[str]) -> tuple[int, str]:
        folder = tmp_path / "out" / "checkpoint"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a").write_bytes(b"12345")
        manifest = {"files": {"checkpoint/a": {"size": 5, "sha256": "…"}}}
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
        return 0, "made"

    assert not step.done(ctx)
    node.answer = make
    step.do(ctx)
    assert node.ran[-1][1:] == [
        "-m",
        "spark_overlay.rehearsal.make",
        "--variant",
        "taught",
        "--out",
        f"{tmp_path}/out",
    ]
    assert step.done(ctx)
    (tmp_path / "out" / "checkpoint" / "a").write_bytes(b"1234")
    assert not step.done(ctx)
    node.answer = lambda argv: (0, "did nothing")
    with pytest.raises(LauncherError, match="does not agree"):
        step.do(ctx)
    assert manifest_sizes({"files": {}}) == {}


def test_the_checkpoint_is_stale_when_its_sources_changed(ctx: Context, tmp_path: Path) -> None:
    step = Checkpoint(package=tmp_path)
    (tmp_path / "rehearsal").mkdir()
    source = tmp_path / "rehearsal" / "make.py"
    source.write_text("one")
    before = step.inputs(ctx)
    assert step.inputs(ctx) == before
    source.write_text("two")
    assert step.inputs(ctx) != before


def test_pips_lines_become_one() -> None:
    progress = Progress()
    progress("Collecting torch==2.13.0")
    assert progress("  Downloading torch-2.13.0.whl (532.1 MB)") == (
        "1 packages, now torch-2.13.0.whl (532.1 MB)"
    )
    assert progress("Processing /some/folder/ninja-1.whl").endswith("2 packages, now ninja-1.whl")
    assert progress("anything else").endswith("2 packages, now ninja-1.whl")
    assert progress("Installing collected packages: a, b, c") == "unpacking 3 packages"


def test_a_local_node_does_files_whole_and_knows_its_machine(tmp_path: Path) -> None:
    node = LocalNode()
    path = tmp_path / "new" / "file"
    assert node.size(path) is None
    assert node.free_bytes(path) > 0
    node.write(path, b"abc", mode=0o600)
    assert (node.read(path), node.size(path), path.stat().st_mode & 0o777) == (b"abc", 3, 0o600)
    node.copy(path, tmp_path / "other" / "copy")
    assert node.read(tmp_path / "other" / "copy") == b"abc"
    node.remove(path.parent)
    node.remove(path)
    assert not node.exists(path)
    facts = node.facts()
    assert facts.memory_available > 0
    assert len(facts.boot_id) == 36
    assert memory_available("MemFree: 1 kB\nMemAvailable:   7 kB\n") == 7168


def test_a_command_that_has_ended_is_not_waited_for() -> None:
    """Whoever comes late sees the ends of both its outputs and its own at once."""
    took = []
    for _ in range(3):  # the quickest: the machine may be busy
        began = time.monotonic()
        LocalNode().run(["sh", "-c", "echo x"], line=lambda line: time.sleep(0.1))
        took.append(time.monotonic() - began)
    assert min(took) < 0.25


@pytest.mark.parametrize(
    ("text", "compiler", "store"),
    [("", True, "file"), ("", False, "plain"), ("ENGRAM_STORE=file\n", False, "file"),
     ("ENGRAM_STORE=memory\n", False, "memory")],
)  # fmt: skip
def test_without_a_compiler_the_rehearsal_reads_plainly_unless_told(
    tmp_path: Path, text: str, compiler: bool, store: str
) -> None:
    said: list[str] = []
    settings = settings_of(tmp_path, text).with_profile("rehearsal", PROFILE)
    found = rehearsal.without_compiler(
        settings, said.append, lambda name: "/usr/bin/g++" if compiler else None
    )
    assert found.text("ENGRAM_STORE") == store
    assert found.int("MAX_MODEL_LEN") == int(PROFILE["MAX_MODEL_LEN"]), "the profile stays"
    assert bool(said) == (store == "plain")

"""What both nodes' self-checks of the image said, and when they are done again."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from settings_root import settings_of

from launcher.image import results
from launcher.steps.parity import LOG, Parity

ROOT = Path(__file__).resolve().parents[1]


def node(*checks: tuple[str, bool], index: str = "abc", done: int | None = None) -> list[str]:
    rows: list[dict[str, Any]] = [
        {"check": results.INDEX, "ok": True, "on": "cpu", "found": index, "limit": ""},
        *({"check": n, "ok": ok, "on": "GB10", "found": 0.3, "limit": 0.1} for n, ok in checks),
    ]
    last = {"done": len(rows) if done is None else done, "failed": 0}
    return ["chatter {", "[1]", *map(json.dumps, [*rows, last])]


def told(head: list[str], worker: list[str], /, **ended: str) -> list[str]:
    both = {"head": results.read(head), "worker": results.read(worker)}
    return results.faults(both, {"head": "", "worker": "", **ended})


def test_two_nodes_that_agree() -> None:
    good = node(("one", True), ("two", True))
    assert told(good, good) == []
    assert results.read(good).devices == ["GB10"]


def test_each_way_not_to_agree() -> None:
    good = node(("one", True), ("two", True))
    assert told(good, node(("one", True), ("two", False))) == ["worker: two (GB10): 0.3, limit 0.1"]
    assert told(good, good[:-1]) == ["worker: the self-check ended without a word, after 3 checks"]
    assert "ended by SIGSEGV" in told(good, good[:3], worker="ended by SIGSEGV")[0]
    assert "exit code 1" in told(good, good, head="ended with exit code 1")[0]
    assert told(good, node(("one", True), ("two", True), done=9)) != []
    assert told(good, node(("one", True))) == ["two was checked on the head alone"]
    other = node(("one", True), ("two", True), index="xyz")
    assert told(good, other) == [
        "the checkpoint's index differs: abc on the head, xyz on the worker"
    ]
    assert len(told([], [])) == 2


def test_what_was_skipped_is_not_proven(tmp_path: Path) -> None:
    def never(*given: Any) -> Any:
        raise AssertionError("a node was asked")

    def done(skip: str) -> bool:
        settings = settings_of(tmp_path, f"SKIP_OVERLAY_VERIFY={skip}\n")
        ctx: Any = SimpleNamespace(logs=tmp_path, settings=settings)
        return parity.done(ctx)

    parity = Parity(runtime=never, image=never, index=never)
    log = tmp_path / LOG
    assert not done("0") and not done("1")  # nothing was ever done
    said: list[str] = []
    ctx: Any = SimpleNamespace(
        logs=tmp_path,
        settings=settings_of(tmp_path, "SKIP_OVERLAY_VERIFY=1\n"),
        console=SimpleNamespace(warn=said.append),
        record=SimpleNamespace(event=lambda *words: None),
    )
    parity.do(ctx)
    assert "NOT checked on either node: EXL3's kernels, Engram's rows" in said[0]
    assert done("1") and not done("0")
    # It is said each time that nothing was checked, and never called done.
    assert parity.found(ctx) == "left out, as before"
    assert len(said) == 2 and said[1] == said[0]
    log.write_text('head: {"check": "one", "ok": true}\n')
    assert done("0") and done("1")
    assert parity.found(ctx) == "already done" and len(said) == 2


def test_the_image_or_the_checkpoint_changed_is_checked_again(tmp_path: Path) -> None:
    index = tmp_path / "index"
    seen = set()
    for layers, text in (("a", "1"), ("b", "1"), ("a", "2")):
        index.write_text(text)
        step = Parity(runtime=lambda ctx: None, image=lambda: layers, index=lambda: index)  # type: ignore  # noqa: B023
        none: Any = None
        seen.add(step.inputs(none))
        assert step.inputs(none) in seen
    assert len(seen) == 3


def test_the_self_check_of_the_overlay_speaks_as_it_is_read() -> None:
    """The names that both sides use stand in two distributions."""
    source = (ROOT / "overlay/spark_overlay/verify/checkpoint.py").read_text()
    assert f'NAME = "{results.INDEX}"' in source
    assert (ROOT / "overlay" / Path(*results.MODULE.split(".")) / "__main__.py").is_file()

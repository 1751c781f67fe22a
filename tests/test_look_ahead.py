"""What the image's step sees before a pair that serves is ended for it."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from settings_root import settings_of

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts.docker import Image
from launcher.image import bring, registry
from launcher.image.bring import Bring
from launcher.image.registry import OutOfReach, Remote
from launcher.record import Unkept
from launcher.steps.base import Step
from launcher.steps.image import ImageStep

NAME, BASE = "r.io/a/kit:1", "r.io/a/base:1"
RECIPE = "s1"
GB = 10**9


def image(stamp: str = RECIPE, *layers: str) -> Image:
    return Image("i", layers or ("sha256:a", "sha256:b"), "arm64", "linux", stamp, GB)


@dataclass
class Store:
    """A daemon's images; ``shut``: why it can pull none."""

    names: dict[str, Image]
    shut: str = ""
    pull: Any = None

    def find(self, name: str) -> Image | None:
        return self.names.get(name)

    def out_of_reach(self, name: str) -> str:
        return self.shut

    def root(self) -> str:
        return "/var/lib/docker"


@dataclass
class Made:
    """A `Bring` of two nodes, its step, and what both said."""

    head: Store
    worker: Store
    tmp: Path
    free: int = 99 * GB
    asked: list[str] = field(default_factory=list)
    shipped: list[str] = field(default_factory=list)
    answers: dict[str, Remote] = field(default_factory=dict)

    def step(self, dotenv: str = "") -> tuple[ImageStep, Any]:
        settings = settings_of(self.tmp, f"IMAGE={NAME}\nBASE_IMAGE={BASE}\n{dotenv}")
        said = StringIO()
        console = Console(said, said)
        way = SimpleNamespace(
            look_ahead=lambda how, image: self.shipped.append(how),
            clean=lambda: self.shipped.append("cleaned"),
        )
        made = Bring(
            root=self.tmp,
            settings=settings,
            head=cast(Any, SimpleNamespace(free_bytes=lambda path: self.free)),
            here=cast(Any, self.head),
            there=cast(Any, self.worker),
            logs=self.tmp,
            record=Unkept(self.tmp),
            console=console,
            machine="aarch64",
            ship=lambda platform: cast(Any, way),
        )
        ctx = SimpleNamespace(settings=settings, console=console, said=said)
        return ImageStep(bring=lambda ctx: made), ctx

    def registry(self, wanted: Any, platform: str, login: Any = None) -> Remote:
        name = f"{wanted.host}/{wanted.repository}:{wanted.tag}"
        self.asked.append(name)
        if name not in self.answers:
            raise OutOfReach("r.io: cannot be connected to")
        return self.answers[name]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Both nodes have one image of the recipe; no registry answers."""
    made = Made(Store({NAME: image()}), Store({NAME: image()}), tmp_path)
    monkeypatch.setattr(bring, "stamp", lambda root, base: RECIPE)
    monkeypatch.setattr(registry, "ask", made.registry)
    return made


@pytest.mark.parametrize(
    ("recipe", "flags", "said"),
    [
        ("s1", "", "already done"),
        ("old", "SKIP_BUILD=1", "kept"),
        ("s1", "PULL=1", "already done"),  # the registry does not answer
        ("old", "SKIP_BUILD=1\nPULL=1", "kept"),
    ],
)
def test_an_image_that_is_kept_undoes_nothing(
    pair: Made, recipe: str, flags: str, said: str
) -> None:
    pair.head.names[NAME] = pair.worker.names[NAME] = image(recipe)
    was, ctx = pair.step()
    step, now = pair.step(flags)
    assert step.inputs(now) == was.inputs(ctx) and step.done(now)
    assert step.found(now) == said
    # That its recipe is another is said each time, and the registry asked once.
    assert ("not of this recipe; SKIP_BUILD=1 keeps it" in now.said.getvalue()) == (said == "kept")
    assert len(pair.asked) <= 1


def test_a_pull_of_what_is_here_undoes_nothing(pair: Made) -> None:
    pair.answers[NAME] = Remote(RECIPE, image().layers, "sha256:d", GB)
    step, ctx = pair.step("PULL=1")
    assert step.done(ctx)
    pair.answers[NAME] = Remote(RECIPE, ("sha256:a", "sha256:new"), "sha256:d", GB)
    step, ctx = pair.step("PULL=1")
    assert not step.done(ctx)


@pytest.mark.parametrize("flags", ["BUILD=1", ""])
def test_what_is_to_be_built_or_copied_is_not_done(pair: Made, flags: str) -> None:
    other = image("old") if not flags else image()
    pair.head.names[NAME] = pair.worker.names[NAME] = other
    step, ctx = pair.step(flags)
    assert not step.done(ctx)
    pair.head.names[NAME], pair.worker.names[NAME] = image(), image(RECIPE, "sha256:x")
    step, ctx = pair.step(flags)
    assert not step.done(ctx)


def refused(step: Step, ctx: Any) -> str:
    with pytest.raises(LauncherError) as told:
        step.look_ahead(ctx)
    return str(told.value)


def test_a_build_needs_a_base_that_is_there_or_can_be_pulled_with_room(pair: Made) -> None:
    pair.head.shut = "manifest unknown"
    step, ctx = pair.step("BUILD=1")
    told = refused(step, ctx)
    assert f"the base {BASE} is not on the head" in told and "manifest unknown" in told
    assert f"docker pull {BASE}" in told
    pair.head.shut = ""
    step.look_ahead(ctx)  # whose size is not known
    pair.answers[BASE] = Remote("", ("sha256:base",), "sha256:d", 10 * GB)
    pair.free = 19 * GB
    assert f"17.7 GiB free in {pair.head.root()}" in refused(step, ctx)
    pair.free = 20 * GB
    step.look_ahead(ctx)
    # Its layers are here already, under what was built on it.
    pair.free, pair.answers[BASE] = 0, Remote("", image().layers[:1], "sha256:d", 10 * GB)
    step.look_ahead(ctx)
    pair.head.shut, pair.head.names[BASE] = "no network", image("")
    step.look_ahead(ctx)


def test_a_pull_needs_room_and_an_image_that_is_forbidden_is_none(pair: Made) -> None:
    pair.answers[NAME] = Remote(RECIPE, ("sha256:new",), "sha256:d", 10 * GB)
    pair.head.names[NAME] = image("old")
    pair.free = GB
    step, ctx = pair.step()
    assert f"for {NAME}" in refused(step, ctx)
    pair.free = 99 * GB
    step.look_ahead(ctx)
    del pair.head.names[NAME], pair.answers[NAME]
    step, ctx = pair.step("SKIP_BUILD=1")
    assert "SKIP_BUILD=1 forbids to build it" in refused(step, ctx)


def test_what_is_to_be_copied_needs_room(pair: Made) -> None:
    pair.step()[0].look_ahead(pair.step()[1])
    assert pair.shipped == []
    pair.worker.names[NAME] = image("old", "sha256:x")
    step, ctx = pair.step("IMAGE_SHIP=auto")
    step.look_ahead(ctx)
    assert pair.shipped == ["auto"]


@pytest.mark.parametrize(
    ("flags", "worker", "pulls", "done"),
    [
        ("", RECIPE, "", ["cleaned"]),  # it has it
        ("", "old", RECIPE, ["pulled", "cleaned"]),
        ("SKIP_SHIP=1", RECIPE, "", []),
    ],
)
def test_what_a_broken_off_copy_left_goes_however_the_worker_got_the_image(
    pair: Made, flags: str, worker: str, pulls: str, done: list[str]
) -> None:
    images = {RECIPE: image(), "old": image("old", "sha256:x")}
    pair.worker.names[NAME] = images[worker]
    pair.answers[NAME] = Remote(RECIPE, image().layers, "sha256:d", GB)

    def pull(name: str, *_: Any) -> None:
        pair.shipped.append("pulled")
        pair.worker.names[name] = images[pulls]

    pair.worker.pull = pull
    step, ctx = pair.step(flags)
    step.do(ctx)
    assert pair.shipped == done

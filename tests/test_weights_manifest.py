"""The manifest's form: what is written is read again, and nothing else is."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LauncherError
from launcher.weights import manifest
from launcher.weights.manifest import Entry, Manifest, Part

HEX = "0123456789abcdef"
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,40}", fullmatch=True)
sha256s = st.text(HEX, min_size=64, max_size=64)
commits = st.text(HEX, min_size=40, max_size=40)
sizes = st.integers(0, 1 << 60)
entries = st.one_of(
    st.builds(Entry, names, sizes),
    st.builds(Entry, names, sizes, sha256=sha256s),
    st.builds(lambda name, size, git: Entry(name, size, git=git), names, sizes, commits),
)
listed = st.lists(entries, min_size=1, max_size=8, unique_by=lambda entry: entry.name).map(tuple)
repos = st.from_regex(r"([A-Za-z0-9][\w.-]{0,20}(/[\w.-]{1,20})?)?", fullmatch=True).filter(
    str.isascii
)
revisions = st.one_of(st.just(""), commits)


def part(role: Any) -> st.SearchStrategy[Part]:
    return st.builds(Part, st.just(role), repos, revisions, listed)


manifests = st.one_of(
    st.tuples(part("model"), part("engram")),
    st.tuples(part("model")),
    st.tuples(part("engram")),
).map(Manifest)

ONE = Manifest(
    (
        Part("model", "a/b", "a" * 40, (Entry("x.json", 3, git="b" * 40),)),
        Part("engram", "", "", (Entry("y", 1),)),
    )
)


@given(manifests)
def test_what_is_written_is_read_again(made: Manifest) -> None:
    again = Manifest.from_json(made.to_json())
    assert again == made and again.key() == made.key()
    assert again.to_json() == made.to_json()


@given(manifests, manifests)
def test_the_key_tells_two_apart(one: Manifest, other: Manifest) -> None:
    assert (one.key() == other.key()) == (one == other)


@given(listed, st.randoms())
def test_the_order_of_the_files_does_not_matter(files: tuple[Entry, ...], random: Any) -> None:
    mixed = list(files)
    random.shuffle(mixed)
    assert Part("model", "", "", files) == Part("model", "", "", tuple(mixed))


@given(st.text() | st.binary())
def test_foreign_text_is_refused_by_name(text: str | bytes) -> None:
    with pytest.raises(LauncherError, match=r"here\.json cannot be used"):
        Manifest.from_json(text, "here.json")


values = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())


def test_a_version_is_a_number() -> None:
    text = Manifest((Part("model", "", "", (Entry("0", 0),)),)).to_json()
    with pytest.raises(LauncherError, match="its version is True"):
        Manifest.from_json(text.replace('"version": 1', '"version": true'))


@given(manifests, st.data())
def test_one_value_changed_by_hand_is_refused(made: Manifest, data: st.DataObject) -> None:
    value = json.loads(made.to_json())
    role = data.draw(st.sampled_from(sorted(value["parts"])))
    place = data.draw(st.sampled_from(["kind", "version", "key", "repo", "revision", "files"]))
    holder = value if place in ("kind", "version", "key") else value["parts"][role]
    if place == "files":
        holder = data.draw(st.sampled_from(holder["files"]))
        place = data.draw(st.sampled_from(sorted(holder)))
    new = data.draw(values.filter(lambda each: each != holder[place] or each is True))
    holder[place] = new
    with pytest.raises(LauncherError, match="cannot be used"):
        Manifest.from_json(json.dumps(value))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "-rf", "a b", "*", "x\n", "ü"]
)
def test_a_name_that_leaves_the_directory_or_is_a_pattern_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="no plain file name"):
        Entry(name, 1)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Entry("x", -1),
        lambda: Entry("x", 1, sha256="A" * 64),
        lambda: Entry("x", 1, sha256="a" * 63),
        lambda: Entry("x", 1, git="a" * 64),
        lambda: Part("model", "a/b", "main", (Entry("x", 1),)),
        lambda: Part("model", "a/b", "", ()),
        lambda: Part("model", "a/b", "", (Entry("x", 1), Entry("x", 2))),
        lambda: Part("model", "a b", "", (Entry("x", 1),)),
        lambda: Part("other", "a/b", "", (Entry("x", 1),)),  # type: ignore[arg-type]
        lambda: Manifest(()),
        lambda: Manifest(tuple(reversed(ONE.parts))),
        lambda: Manifest((ONE.parts[0], ONE.parts[0])),
    ],
)
def test_what_can_be_no_manifest_is_not_made(broken: Any) -> None:
    with pytest.raises(ValueError):
        broken()


def test_a_part_takes_the_place_of_its_role_s(tmp_path: Path) -> None:
    other = Part("model", "c/d", "", (Entry("z", 1),))
    changed = ONE.with_part(other)
    assert changed.part("model") == other and changed.part("engram") == ONE.part("engram")
    only = Manifest((ONE.part("engram"),))
    assert only.with_part(ONE.part("model")) == ONE
    with pytest.raises(LauncherError, match="model"):
        only.part("model")


def test_it_is_kept_whole_and_an_equal_one_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "manifest.json"
    assert manifest.load(path) is None
    manifest.save(path, ONE)
    assert manifest.load(path) == ONE
    before = path.stat()
    manifest.save(path, ONE)
    assert path.stat().st_ino == before.st_ino
    path.write_text(path.read_text().replace('"size": 3', '"size": 4'))
    with pytest.raises(LauncherError) as caught:
        manifest.load(path)
    assert str(path) in caught.value.found and "by hand" in caught.value.found
    assert f"remove {path}" in caught.value.do_next

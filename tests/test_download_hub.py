"""A hub that lies, is not there, or lets nobody in: what the download makes of it."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "huggingface_hub")

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from download_head import ENGRAM, INDEX, LAST, MODEL, Head, fetchers, one_head

from launcher.errors import LauncherError
from launcher.weights import download, fetch
from launcher.weights.download import bring
from launcher.weights.hub import HubError


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with one_head(tmp_path) as made:
        yield made


def test_a_hub_that_sends_other_bytes_is_not_believed(head: Head) -> None:
    head.settle()
    name = LAST
    (head.model / name).unlink()
    head.hub.wrong[name] = bytes(len(head.hub.repos[MODEL][name]))
    with pytest.raises(LauncherError, match=f"{name} has the right size and other bytes"):
        bring(head.job())
    assert head.hub.got().count(name) == download.TRIES
    head.hub.wrong.clear()
    bring(head.job())
    assert head.differs() == []


def test_without_a_hub_a_whole_tree_is_used_and_said_so(head: Head) -> None:
    head.fill()
    head.hub.status = 503
    made = bring(head.job())
    assert made.part("model").revision == ""
    assert all(entry.sha256 for entry in made.part("engram").entries)
    assert "used as it is" in head.said
    head.hub.status = 0
    head.hub.forget()
    assert bring(head.job()) == made  # a start does not ask again
    assert head.hub.asked == []
    asked = bring(head.job(), ask=True)  # ./start.sh download does
    assert asked.part("model").revision == head.hub.commit(MODEL)
    assert head.hub.got() == [INDEX, INDEX]  # the files were right


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (ConnectionError("the cable is drawn"), "network"),
        (OSError(errno.ENOSPC, "the cable is drawn"), "disk"),
        (KeyError("the cable is drawn"), "other"),
    ],
)
def test_what_the_library_s_error_came_from_is_told(cause: Exception, kind: str) -> None:
    try:
        try:
            raise cause
        except Exception as error:
            try:
                {}["something of the library's own"]
            except KeyError:
                raise ValueError("failed due to the above error") from error
    except ValueError as error:
        assert fetch.kind_of(error) == kind
        told = fetch.text_of(error)
    assert "the cable is drawn" in told
    assert "failed due to the above error" in told


def test_without_a_hub_an_incomplete_tree_is_an_error_that_names_both(head: Head) -> None:
    head.fill()
    (head.model / LAST).unlink()
    job = head.job()
    environ = {**job.hub.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    with pytest.raises(HubError) as caught:
        bring(replace(job, hub=replace(job.hub, environ=environ)))
    assert "could not be reached" in caught.value.found
    assert LAST in caught.value.found


def test_a_wrong_token_is_told_and_shown_nowhere(head: Head) -> None:
    head.environ["HF_TOKEN"] = "hf_wrongwrongwrongwrong"
    seen: list[str] = []

    def look() -> None:
        seen.extend(" ".join(process.cmdline()) for process in fetchers())

    head.hub.token = "hf_right"
    with pytest.raises(HubError) as caught:
        bring(head.job())
    assert caught.value.kind == "token"
    assert "HF_TOKEN" in caught.value.do_next
    head.environ["HF_TOKEN"] = "hf_right"
    head.hub.at, head.hub.then = 1000, look
    bring(head.job())
    assert head.differs() == []
    assert seen and "hf_right" in head.hub.tokens
    told = [*seen, head.said, str(caught.value)]
    told += [p.read_text() for p in (head.root / "record").iterdir()]
    assert not any("hf_wrong" in text or "hf_right" in text for text in told)


def test_a_repository_that_is_not_there_is_named(head: Head) -> None:
    job = head.job()
    with pytest.raises(HubError, match="owner/other") as caught:
        bring(replace(job, repos={"model": "owner/other", "engram": ENGRAM}))
    assert "HF_MODEL_REPO" in caught.value.do_next

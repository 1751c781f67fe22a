"""The download against a hub on this machine, by the real huggingface_hub."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "huggingface_hub")

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_hub import LocalHub, git_id

from launcher.console import Console
from launcher.errors import LauncherError, UsageError
from launcher.nodes.local import LocalNode
from launcher.record import Record
from launcher.weights import download, fetch, hub, manifest
from launcher.weights.download import Job, bring
from launcher.weights.hub import Hub, HubError
from launcher.weights.manifest import Entry, Manifest, Part, Role

TESTS = Path(__file__).resolve().parent
MODEL, ENGRAM = "owner/tiny-exl3", "owner/tiny-native"
INDEX = "model.safetensors.index.json"


def safetensors(names: dict[str, int], seed: int) -> bytes:
    """A file with a tensor of so many bytes for each name."""
    at, header = 0, {}
    for name, size in names.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(at)


def model(shards: int = 5, size: int = 60_000) -> dict[str, bytes]:
    names = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    tensors = {f"layers.{n}.attn.wkv.trellis": name for n, name in enumerate(names)}
    index = {"metadata": {"total_size": size * shards}, "weight_map": tensors}
    return {
        "config.json": b'{"model_type": "deepseek_v41"}',
        INDEX: json.dumps(index).encode(),
        "tokenizer.json": b'{"tok": 1}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"not to be fetched",
        "measurement.json": b"the quantizer's",
        **{
            name: safetensors({f"layers.{n}.attn.wkv.trellis": size}, n)
            for n, name in enumerate(names)
        },
    }


def native(size: int = 50_000) -> dict[str, bytes]:
    """Four shards; the last two have tables."""
    files = [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    tables = {1: files[2], 14: files[3]}
    weight_map = {"embed.weight": files[0], "norm.weight": files[1]}
    for layer, file in tables.items():
        for kind in ("weight", "scale"):
            weight_map[f"layers.{layer}.engram.embed.{kind}"] = file
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    made = {"config.json": b'{"engram_layer_ids": [1, 14]}', INDEX: json.dumps(index).encode()}
    for n, file in enumerate(files):
        held = [name for name, where in weight_map.items() if where == file]
        made[file] = safetensors(dict.fromkeys(held, size), 100 + n)
    return made


def needed(held: dict[str, bytes], role: Role) -> list[str]:
    other = {"README.md", "measurement.json"}
    if role == "engram":
        other = {f"model-0000{n}-of-00004.safetensors" for n in (1, 2)}
    return sorted(set(held) - other)


def entry(name: str, data: bytes) -> Entry:
    if name.endswith(".safetensors"):
        return Entry(name, len(data), sha256=hashlib.sha256(data).hexdigest())
    return Entry(name, len(data), git=git_id(data))


NEEDED = {"model": needed(model(), "model"), "engram": needed(native(), "engram")}
LAST = "model-00005-of-00005.safetensors"


@dataclass
class Head:
    """A head's directories, and a download into them."""

    root: Path
    hub: LocalHub
    large: int = 1_000_000_000
    out: io.StringIO = field(default_factory=io.StringIO)
    environ: dict[str, str] = field(default_factory=dict)

    def job(self, **more: Any) -> Job:
        record = self.root / "record"
        record.mkdir(exist_ok=True)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environ = {
            **clean,
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.root / "hf"),
            "NO_PROXY": "127.0.0.1",
            **self.environ,
        }
        said = Record(record)
        the_hub = Hub(
            LocalNode("head"),
            TESTS.parent,
            hub.environment(environ, fast=False),
            workers=2,
            said=lambda line: said.text("download", line),
            large=self.large,
        )
        return Job(
            node=LocalNode("head"),
            hub=the_hub,
            directories={"model": self.model, "engram": self.engram},
            repos={"model": MODEL, "engram": ENGRAM},
            cache_root=self.root / "cache",
            console=Console(self.out, self.out),
            record=said,
            sleep=lambda seconds: None,
            **more,
        )

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def engram(self) -> Path:
        return self.root / "engram-src"

    def fill(self) -> None:
        """As a whole download leaves it, but for the manifest."""
        for folder, repo, names in (
            (self.model, MODEL, NEEDED["model"]),
            (self.engram, ENGRAM, NEEDED["engram"]),
        ):
            folder.mkdir(exist_ok=True)
            for name in names:
                (folder / name).write_bytes(self.hub.repos[repo][name])

    def settle(self, files: bool = True) -> Manifest:
        """As a whole download leaves it, without one."""
        if files:
            self.fill()
        parts = []
        roles: tuple[tuple[Role, str], ...] = (("model", MODEL), ("engram", ENGRAM))
        for role, repo in roles:
            held = self.hub.repos[repo]
            entries = tuple(entry(name, held[name]) for name in needed(held, role))
            parts.append(Part(role, repo, self.hub.commit(repo), entries))
        made = Manifest(tuple(parts))
        manifest.save(self.root / "cache" / "manifest.json", made)
        return made

    def differs(self) -> list[str]:
        """Files that are not what the hub has, or not there, or more than is needed."""
        found = []
        for folder, repo, names in (
            (self.model, MODEL, NEEDED["model"]),
            (self.engram, ENGRAM, NEEDED["engram"]),
        ):
            there = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
            found += [name for name in names if there.get(name) != self.hub.repos[repo][name]]
            found += sorted(set(there) - set(names))
        return found

    @property
    def said(self) -> str:
        return self.out.getvalue()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with LocalHub({MODEL: model(), ENGRAM: native()}) as running:
        yield Head(tmp_path, running)


def test_an_empty_head_gets_the_files_that_are_needed_and_no_other(head: Head) -> None:
    made = bring(head.job())
    assert head.differs() == []
    assert sorted(head.hub.got()) == sorted(
        [*NEEDED["model"], *NEEDED["engram"], INDEX, INDEX]  # the indices were read before
    )
    part = made.part("model")
    assert (part.repo, part.revision) == (MODEL, head.hub.commit(MODEL))
    assert [entry.name for entry in part.entries] == NEEDED["model"]
    assert all(e.sha256 for e in part.entries if e.name.endswith(".safetensors"))
    assert manifest.load(head.root / "cache" / "manifest.json") == made
    assert not list(head.model.glob(".cache/huggingface/download/*.incomplete"))


def test_a_whole_head_is_not_asked_of_the_hub_again(head: Head) -> None:
    first = head.settle()
    head.hub.repos[MODEL]["tokenizer.json"] = b"a newer commit"
    assert bring(head.job()) == first
    assert head.hub.asked == []
    updated = bring(head.job(), update=True)
    assert updated.part("model").revision == head.hub.commit(MODEL) != first.part("model").revision
    assert updated.key() != first.key()
    assert sorted(head.hub.got()) == [INDEX, INDEX, "tokenizer.json"]
    assert (head.model / "tokenizer.json").read_bytes() == b"a newer commit"
    assert not (head.root / "cache" / "replaced").exists()  # it was the hub's before


def break_files(head: Head) -> list[str]:
    """Right size and other bytes, cut off, missing, empty; their names."""
    shards = sorted(head.model.glob("*.safetensors"))
    data = bytearray(shards[0].read_bytes())
    data[-7] ^= 1
    shards[0].write_bytes(data)
    shards[1].write_bytes(shards[1].read_bytes()[:-1000])
    shards[2].unlink()
    (head.model / "tokenizer.json").write_bytes(b'{"tok": 2}')
    table = sorted(head.engram.glob("*.safetensors"))[1]
    table.write_bytes(b"")
    return [*(p.name for p in shards[:3]), "tokenizer.json", table.name]


def test_what_is_bad_is_named_and_only_that_is_fetched_again(head: Head) -> None:
    head.settle()
    bad = break_files(head)
    head.hub.forget()
    head.out.truncate(0)
    bring(head.job())
    assert head.differs() == []
    assert sorted(head.hub.got()) == sorted(bad)
    told = head.said
    assert f"{bad[0]} has the right size and other bytes" in told
    assert f"{bad[1]} is cut off" in told
    assert f"missing: {bad[2]}" in told
    assert (head.root / "cache/replaced/model/tokenizer.json").read_bytes() == b'{"tok": 2}'


def test_a_flipped_bit_that_kept_its_time_is_found_when_all_is_summed_anew(head: Head) -> None:
    head.settle()
    bring(head.job())
    shard = head.model / LAST
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    bring(head.job())
    assert head.differs() == [shard.name]
    bring(head.job(fresh=True))
    assert head.differs() == []


def test_sums_are_made_once_per_file(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    head.settle()
    read: list[dict[str, Any]] = []
    ask = download.proof.ask

    def spy(directory: str, entries: Any, level: Any, known: Any = None, threads: int = 1) -> bytes:
        entries = list(entries)
        if level == "sums":
            read.append({e.name: (known or {}).get(e.name) for e in entries})
        return ask(directory, entries, level, known, threads)

    monkeypatch.setattr(download.proof, "ask", spy)
    bring(head.job())
    assert not any(any(each.values()) for each in read)
    read.clear()
    bring(head.job())
    assert len(read) == 2 and all(all(each.values()) for each in read)


def fetchers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "launcher.weights.fetch" in process.cmdline():
                found.append(process)
    return found


def test_a_download_killed_at_ten_points_goes_on_with_what_is_not_whole(tmp_path: Path) -> None:
    repo = model(shards=12, size=150_000)
    with LocalHub({MODEL: repo, ENGRAM: native()}) as running:
        head = Head(tmp_path, running)
        head.settle(files=False)

        def kill() -> None:
            for process in fetchers():
                process.send_signal(signal.SIGKILL)

        running.then = kill
        whole: set[str] = set()
        broken = 0
        for point in range(10):
            running.forget()
            running.at = 30_000 + 37_000 * point
            try:
                bring(head.job())
            except HubError as error:
                assert "run this again" in error.do_next
                broken += 1
            assert not whole & set(running.got()) - {INDEX}, "a whole file was fetched again"
            now = {p.name for p in head.model.iterdir() if p.is_file()}
            now |= {p.name for p in head.engram.iterdir()} if head.engram.is_dir() else set()
            for name in now - {INDEX}:
                data = (head.model / name) if (head.model / name).exists() else head.engram / name
                assert data.read_bytes() in (repo.get(name), running.repos[ENGRAM].get(name))
            whole = now - {INDEX, "config.json"}  # these two are in both
        assert broken >= 6
        running.at = -1
        bring(head.job())
        for name in sorted(set(repo) - {"README.md", "measurement.json"}):
            assert (head.model / name).read_bytes() == repo[name], name
        assert not list(head.model.glob(".cache/huggingface/download/*.incomplete"))


def big(size: int, **more: Any) -> LocalHub:
    return LocalHub({MODEL: model(shards=2, size=size), ENGRAM: native()}, **more)


def test_a_large_file_of_a_killed_download_is_taken_up_where_it_was(tmp_path: Path) -> None:
    with big(40_000_000) as running:
        head = Head(tmp_path, running, large=1_000_000)
        head.settle(files=False)
        running.then = lambda: [each.kill() for each in fetchers()]  # type: ignore[assignment]
        for point in range(3):
            running.at = running.sent + 26_000_000 + point  # written by 10 MiB
            with pytest.raises(HubError):
                bring(head.job())
        running.at = -1
        bring(head.job())
        name = "model-00002-of-00002.safetensors"
        for shard in ("model-00001-of-00002.safetensors", name):
            assert (head.model / shard).read_bytes() == running.repos[MODEL][shard]
        starts = [start for _, start in running.begun if start]
        assert starts and all(start % 1_000_000 == 0 for start in starts)
        assert list((head.model / download.PARTIAL).iterdir()) == []
        # A token that the hub's own address needs goes with a range, too.
        running.token = head.environ["HF_TOKEN"] = "hf_right"
        (head.model / name).write_bytes(b"cut")
        bring(head.job())
        assert (head.model / name).read_bytes() == running.repos[MODEL][name]


@pytest.mark.parametrize("large", [1_000_000, 1_000_000_000])
def test_hf_xet_brings_large_files_and_takes_them_up(tmp_path: Path, large: int) -> None:
    """By its real client from a store of its own in a folder, by both ways."""
    with big(6_000_000, xet=tmp_path / "store") as running:
        head = Head(tmp_path, running, large=large)
        head.settle(files=False)
        name = "model-00001-of-00002.safetensors"
        digest = hashlib.sha256(running.repos[MODEL][name]).hexdigest()
        begun = head.model / download.PARTIAL / f"{digest}.part"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(bytes(2_345_678))  # it is gone on with, and the sums see what it was
        bring(head.job())
        for shard in (name, "model-00002-of-00002.safetensors"):
            assert (head.model / shard).read_bytes() == running.repos[MODEL][shard]
        assert not [shard for shard, _ in running.begun if "-of-00002" in shard]
        # What was there was gone on with, and the sums saw it; hf-xet's own way begins anew.
        log = (head.root / "record" / "log.txt").read_text()
        assert ("round role=model  came=6  left=1" in log) == (large == 1_000_000)
        begun.write_bytes(running.repos[MODEL][name][:2_345_678])
        (head.model / name).unlink()
        bring(head.job())
        assert (head.model / name).read_bytes() == running.repos[MODEL][name]
        assert "left=1" not in (head.root / "record" / "log.txt").read_text()[len(log) :]


def test_a_lost_connection_is_taken_up_again_within_a_run(head: Head) -> None:
    head.settle(files=False)
    calls = 0

    def drop() -> None:
        nonlocal calls
        calls += 1
        raise ConnectionResetError

    head.hub.at, head.hub.then = 40_000, drop
    bring(head.job())
    assert calls == 1
    assert head.differs() == []


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


def test_auto_download_0_only_verifies(head: Head) -> None:
    with pytest.raises(LauncherError, match="does not exist"):
        bring(head.job(fetch=False))
    head.fill()
    made = bring(head.job(fetch=False))
    assert {part.revision for part in made.parts} == {""}
    shard = head.model / LAST
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(LauncherError, match=f"{shard.name} is cut off"):
        bring(head.job(fetch=False))
    assert head.hub.asked == []


def test_auto_download_0_measures_by_what_was_downloaded(head: Head) -> None:
    head.settle()
    bad = break_files(head)
    head.hub.forget()
    with pytest.raises(LauncherError) as caught:
        bring(head.job(fetch=False))
    assert all(name in caught.value.found for name in bad)
    assert "missing or wrong: " in head.said and "to be fetched" not in head.said
    assert head.hub.asked == []


@pytest.mark.parametrize("how", ["update", "another repository"])
def test_auto_download_0_never_forgets_the_hub_s_checksums(head: Head, how: str) -> None:
    """A tree in their place would be its own measure, and wrong bytes right."""
    settled = head.settle()
    break_files(head)
    job = head.job(fetch=False)
    if how == "another repository":
        job = replace(job, repos={**job.repos, "model": "owner/other"})
    with pytest.raises(UsageError, match=r"AUTO_DOWNLOAD=0|owner/other"):
        bring(job, update=how == "update")
    assert manifest.load(job.manifest) == settled
    assert head.hub.asked == []


def test_a_cache_s_links_are_followed_and_never_written_through(head: Head) -> None:
    head.settle()
    blobs = head.root / "blobs"
    blobs.mkdir()
    for n, path in enumerate(sorted(head.model.iterdir())):
        path.rename(blobs / str(n))
        path.symlink_to(blobs / str(n))
    bring(head.job())
    assert head.hub.asked == []
    blob = (head.model / "tokenizer.json").resolve()
    blob.write_bytes(b"altered")
    bring(head.job())
    assert not (head.model / "tokenizer.json").is_symlink()
    assert blob.read_bytes() == b"altered"
    assert head.differs() == []


@pytest.mark.parametrize("fetch", [True, False])
def test_a_file_where_a_directory_should_be_is_told_before_the_hub_is_asked(
    head: Head, fetch: bool
) -> None:
    head.model.touch()
    with pytest.raises(LauncherError, match=r"MODEL_HOST is .*, and .*/model is no directory"):
        bring(head.job(fetch=fetch))
    assert head.hub.asked == []


class Narrow(LocalNode):
    """A node with so much room."""

    room = 0

    def free_bytes(self, path: Path) -> int:
        return self.room


def test_room_is_counted_before_a_file_is_touched_with_what_is_there(head: Head) -> None:
    head.settle()
    shard = head.model / LAST
    shard.write_bytes(shard.read_bytes()[:-5000])
    node = Narrow("head")
    node.room = download.SPARE - 1
    head.hub.forget()
    with pytest.raises(LauncherError, match="free for"):
        bring(replace(head.job(), node=node))
    assert head.hub.got() == [] and shard.exists()
    node.room = download.SPARE + 12_000  # for what is to come beyond the blocks that come free
    bring(replace(head.job(), node=node))
    assert head.differs() == []


def test_half_files_of_a_killed_download_go_unless_somebody_writes_them(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    ours = tmp_path / download.PARTIAL
    ours.mkdir(parents=True)
    kept, old = ours / f"{'a' * 64}.part", ours / f"{'b' * 64}.part"
    part = Part("model", "", "", (Entry("x", 9, sha256="a" * 64),))
    dead, alive = folder / "a.1.incomplete", folder / "b.2.incomplete"
    for path in (dead, kept, old):
        path.write_bytes(b"x")
    with alive.open("wb"):
        assert download.clean(tmp_path, part) == 2
        assert [p.exists() for p in (dead, alive, kept, old)] == [False, True, True, False]
    assert download.clean(tmp_path, part) == 1

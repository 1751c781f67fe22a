"""Argv and files of NFS, ZFS and rsync, and who may read over the network: mirrored by hand."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settings_root import settings_of

from launcher.commands import nfs, rsync, zfs
from launcher.commands.container import Mount, NodePlace
from launcher.commands.nfs import Export, Volume
from launcher.commands.zfs import Snapshot
from launcher.errors import UsageError
from launcher.nodes.endpoint import Endpoint
from launcher.settings.table import TABLE
from launcher.weights.lanes import SMALL, calls, lanes
from launcher.weights.manifest import Entry

OPTIONS = TABLE["NFS_OPTS"].default
EXPORT = Export(
    "/root of it",
    {"dsv41-exl3": "/srv/model", "dsv41-engram": "/srv/engram"},
    "10.0.0.1",
    ("10.0.0.0/24",),
    OPTIONS,
)
RULE = "ro,sync,no_subtree_check,root_squash"


def test_the_exports_file_has_the_root_and_two_directories_of_their_own_numbers() -> None:
    assert EXPORT.text().splitlines() == [
        f"/export 10.0.0.0/24(crossmnt,{RULE},fsid=0)",
        f"/export/dsv41-exl3 10.0.0.0/24({RULE},fsid=1)",
        f"/export/dsv41-engram 10.0.0.0/24({RULE},fsid=2)",
    ]
    two = replace(EXPORT, clients=("10.0.0.2", "10.0.1.2"))
    told = f"(crossmnt,{RULE},fsid=0)"
    assert two.text("/a b").splitlines()[0] == f'"/a\\040b" 10.0.0.2{told} 10.0.1.2{told}'


def test_equal_exports_have_equal_marks() -> None:
    assert EXPORT.mark() == replace(EXPORT).mark()
    others: tuple[dict[str, object], ...] = (
        {"root": "/x"},
        {"clients": ("10.0.0.2",)},
        {"address": "10.0.0.3"},
        {"directories": {"dsv41-exl3": "/elsewhere"}},
        {"options": OPTIONS + ",x"},
    )
    for other in others:
        assert replace(EXPORT, **other).mark() != EXPORT.mark()  # type: ignore[arg-type]


def test_the_exporter_has_two_directories_read_only_and_our_label() -> None:
    words = nfs.exporter(EXPORT, "image:local", "name", "spark:/kit")
    told = [words[at + 1] for at, word in enumerate(words) if word == "--mount"]
    assert told == [
        "type=bind,source=/root of it,target=/export,bind-propagation=rprivate",
        "type=bind,source=/srv/model,target=/export/dsv41-exl3,readonly",
        "type=bind,source=/srv/engram,target=/export/dsv41-engram,readonly",
        "type=volume,source=name-state,target=/var/lib/nfs",
    ]
    labels = [words[at + 1] for at, word in enumerate(words) if word == "--label"]
    assert labels == ["dsv41.exporter=spark:/kit", f"dsv41.export={EXPORT.mark()}"]
    assert f"EXPORTS={EXPORT.text()}" in words and words[-1] == "image:local"


# Rows of /proc/net/tcp and tcp6: the kernel writes an address's last number first.
OURS = "   0: 0100630A:0801 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0\n"
EVERY = OURS.replace("0100630A", "00000000")
SIX = OURS.replace("0100630A", "0" * 32)
CALLER = OURS.replace(" 0A ", " 01 ").replace("0100630A", "0200630A")
OTHER = EVERY.replace(":0801", ":0016")
HEADING = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
LISTENERS = [
    (HEADING + OTHER + CALLER, frozenset()),
    (HEADING + OTHER + OURS + CALLER, {"10.99.0.1"}),
    (HEADING + EVERY, {"*"}),
    (HEADING + HEADING + SIX, {"*"}),
    (HEADING + OURS + HEADING + SIX, {"10.99.0.1", "*"}),
]


@pytest.mark.parametrize(("tables", "found"), LISTENERS)
def test_whose_server_listens_is_seen_by_its_address(
    tables: str, found: frozenset[str], tmp_path: Path
) -> None:
    """By the launcher, and by the exporter, which ends what a killed one left and nothing else."""
    assert nfs.listening(tables) == found
    entry = (Path(__file__).resolve().parents[1] / "docker/nfs/entrypoint.sh").read_text()
    function = entry[entry.index("left() {") :].partition("\n}\n")[0] + "\n}"
    assert "/proc/net/tcp /proc/net/tcp6" in function

    def left(boot: str, address: str = "10.99.0.1") -> bool:
        (tmp_path / "net").write_text(tables)
        (tmp_path / "boot").write_text(boot + "\n")
        code = function.replace("/proc/net/tcp /proc/net/tcp6", str(tmp_path / "net"))
        code += f"\nset -eu; mine={tmp_path}/boot boot=now NFS_ADDRESS={address}; left || exit 1"
        return subprocess.run(["sh", "-c", code], check=False).returncode == 0

    assert left("now") == (not found - {"10.99.0.1"})
    assert not left("before")
    if found:
        assert not left("now", "10.99.0.3")


def test_an_exporter_is_asked_to_end_before_it_is_removed() -> None:
    """Killed, it leaves the kernel's server running."""
    stop, remove = nfs.end("name")
    assert stop[:2] == ("docker", "stop") and remove == ("docker", "rm", "--force", "name")


def test_the_hosts_own_server_is_told_the_same(tmp_path: Path) -> None:
    commands = nfs.on_host(EXPORT, "dsv41")
    assert commands[-1] == ("exportfs", "-ra")
    told = nfs.as_root(commands)
    assert told.count("sudo ") == len(commands)
    assert subprocess.run(["sh", "-n", "-c", told], check=False).returncode == 0
    written = next(words for words in commands if words[-1] == "/etc/exports.d/dsv41.exports")
    assert written[-2] == EXPORT.text("/root of it")
    # The binding says where, and is a shell's own words.
    bind = next(words for words in commands if "/srv/model" in words)
    assert bind[-1] == "/root of it/dsv41-exl3"
    assert subprocess.run(["sh", "-n", "-c", bind[2]], check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "text", "word"),
    [
        ("NFS_CLIENTS", "*", "never a pattern"),
        ("NFS_CLIENTS", "10.0.0.2 *.local", "never a pattern"),
        ("NFS_CLIENTS", "0.0.0.0/0", "nearly everyone"),
        ("NFS_CLIENTS", "10.0.0.2(rw)", "never a pattern"),
        ("NFS_OPTS", "ro,no_root_squash", "no_root_squash"),
        ("NFS_OPTS", "rw,root_squash", "rw"),
        ("NFS_OPTS", "ro,root_squash,insecure", "insecure"),
        ("NFS_OPTS", "ro,sync", "root_squash"),
        ("NFS_OPTS", "ro,root_squash,x) *(rw", "no option"),
        ("NFS_OPTS_CLIENT", "nfsvers=4.2,ro,soft", "hard"),
        ("NFS_OPTS_CLIENT", "nfsvers=3,ro,hard", "nfsvers=4.2"),
        ("NFS_OPTS_CLIENT", "nfsvers=4.2,hard", "ro"),
    ],
)
def test_who_may_read_and_how_is_refused_where_it_is_too_much(
    tmp_path: Path, key: str, text: str, word: str
) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(tmp_path, f"{key}='{text}'\n")
    assert key in str(error.value) and word in str(error.value)


def test_the_clients_are_the_links_network_unless_they_are_named() -> None:
    assert nfs.clients("", "10.0.0.1", 24) == ("10.0.0.0/24",)
    assert nfs.clients("10.1.0.2, 10.2.0.0/30", "10.0.0.1", 24) == ("10.1.0.2", "10.2.0.0/30")
    assert nfs.wrong_clients("10.1.0.2, 10.2.0.0/30") == ""


def test_a_volume_knows_its_like() -> None:
    volume = Volume.of("weights", "10.0.0.1", "dsv41-exl3", "nfsvers=4.2,ro,hard")
    assert volume.options == {
        "type": "nfs", "device": ":/dsv41-exl3", "o": "addr=10.0.0.1,nfsvers=4.2,ro,hard",
    }  # fmt: skip
    assert volume.same({"Driver": "local", "Options": dict(volume.options)})
    assert not volume.same({"Driver": "local", "Options": None})
    assert not volume.same({"Driver": "local", "Options": {**volume.options, "o": "addr=10.9.9.9"}})
    assert volume.create()[-1] == "weights" and "type=nfs" in volume.create()


def test_a_mount_of_a_volume_can_never_become_an_empty_one() -> None:
    volume = Volume.of("weights", "10.0.0.1", "dsv41-exl3", "ro")
    place = NodePlace("/srv/model", "/srv/engram", "/cache", volumes={"model": volume})
    told = place.mount_of("model").told()
    assert (told["Type"], told["Source"], told["Target"]) == ("volume", "weights", "/model")
    assert told["ReadOnly"] is True
    options = told["VolumeOptions"]
    assert options["DriverConfig"] == {"Name": "local", "Options": dict(volume.options)}
    assert options["NoCopy"] is True
    assert place.mount_of("engram") == Mount("/srv/engram", "/engram-src")
    for bad in (
        lambda: Mount("weights", "/model"),
        lambda: Mount("weights", "/model", False, volume),
        lambda: Mount("other", "/model", True, volume),
        lambda: Mount("weights", "/model", True, Volume("weights")),
    ):
        with pytest.raises(ValueError):
            bad()


def test_zfs_reads_what_it_prints_and_finds_what_both_have() -> None:
    text = "tank/m@a\t1\ntank/m/below@b\t7\ntank/m@c\t3\n"
    head = zfs.listed(text, "tank/m")
    assert head == (Snapshot("tank/m", "a", "1"), Snapshot("tank/m", "c", "3"))
    worker = (Snapshot("far/m", "x", "1"), Snapshot("far/m", "c", "9"))
    assert zfs.newest_common(head, worker) == head[0]  # by guid: a name proves nothing
    assert zfs.newest_common(head, ()) is None
    assert zfs.send(("zfs",), head[1], head[0]) == ("zfs", "send", "-i", "@a", "tank/m@c")
    assert zfs.send(("zfs",), head[1], None) == ("zfs", "send", "tank/m@c")
    assert zfs.values("mountpoint\t/a b\nused\t5\n") == {"mountpoint": "/a b", "used": "5"}
    ours = (Snapshot("m", "sync-1", "1"), Snapshot("m", "sync-2", "2"), Snapshot("m", "mine", "3"))
    assert zfs.outdated(ours, "sync", ["2"]) == (ours[0],)


def test_bulk_names_its_ciphers_and_adds_to_what_is_there() -> None:
    argv = rsync.bulk(Endpoint("spark2"), Path("/c"), "/m/", ["a", "b"], "/far/m")
    assert argv[-3:] == ("/m/a", "/m/b", "spark2:/far/m/")
    assert {"--partial", "--append-verify", "--copy-links", "--timeout=30"} <= set(argv)
    assert "-c aes128-gcm@openssh.com," in argv[3] and "Compression=no" in argv[3]
    assert shlex.split(argv[3])[:3] == ["ssh", "-F", "/c"]
    again = rsync.bulk(Endpoint("spark2"), Path("/c"), "/m", ["a"], "/far/m", again=True)
    assert "--ignore-times" in again and "--append-verify" not in again


@given(st.lists(st.integers(0, 1 << 37), max_size=60), st.integers(1, 16))
def test_lanes_are_disjoint_whole_and_even(sizes: list[int], count: int) -> None:
    entries = [Entry(f"f{at}", size) for at, size in enumerate(sizes)]
    shared = lanes(entries, count)
    assert sorted(e.name for lane in shared for e in lane) == sorted(e.name for e in entries)
    assert len(shared) <= count and all(shared)
    if entries:
        loads = [sum(e.size for e in lane) for lane in shared]
        # The bound of list scheduling: no list is longer than its share and one more file.
        assert max(loads) <= sum(sizes) / count + max(sizes)


def test_small_files_travel_together_and_last() -> None:
    few = [Entry("big", SMALL + 1), Entry("a", 1), Entry("huge", SMALL * 9), Entry("b", 2)]
    (lane,) = lanes(few, 1)
    assert [[e.name for e in call] for call in calls(lane)] == [["huge"], ["big"], ["b", "a"]]
    assert calls(()) == ()

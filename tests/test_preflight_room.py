"""The rules that a pair must meet: its weights, its disks and its memory."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from dataclasses import replace
from pathlib import Path
from typing import Any

from preflight_pair import GIB, HEAD, WORKER, checked, only
from settings_root import settings_of
from spark_facts import GIVEN, OWNER, docker, rank, survey

from launcher.facts.base import Missing
from launcher.facts.trees import CONFIG, Tree
from launcher.preflight import Given, Need
from launcher.preflight.memory import needed
from launcher.survey import Survey

# ---- weights ----


def changed(name: str, kind: str, **change: Any) -> Survey:
    node = survey(name)
    tree = getattr(node, kind)
    return survey(name, **{kind: replace(tree, **change)})


def without(node: Survey, kind: str, *names: str) -> dict[str, int]:
    sizes = getattr(node, kind).sizes
    return {name: size for name, size in sizes.items() if name not in names}


def test_a_shard_that_is_missing_or_a_link_to_nothing() -> None:
    shard = "model-00007-of-00039.safetensors"
    sizes = without(WORKER, "model", shard)
    finding = only(worker=changed("worker", "model", sizes=sizes, broken=(shard,)))
    assert f"lacks {shard} (1 are links to nothing)" in finding.found
    assert "WORKER_MODEL_DIR" in finding.found


def test_config_and_index_are_needed_too() -> None:
    finding = only(changed("head", "engram", sizes=without(HEAD, "engram", CONFIG)))
    assert f"lacks {CONFIG}" in finding.found and "ENGRAM_DIR" in finding.found


def test_an_empty_or_cut_shard() -> None:
    shard = "model-00007-of-00039.safetensors"
    sizes = {**HEAD.model.sizes, shard: 0}  # type: ignore[union-attr]
    assert "has empty files" in only(changed("head", "model", sizes=sizes)).found
    findings = checked(changed("head", "model", sizes=sizes | {shard: 1000}))
    assert "a file is cut off" in findings[0].found and "differs" in findings[1].found


def test_only_the_shards_with_tables_are_needed_of_the_engram_source() -> None:
    node = HEAD.engram
    assert isinstance(node, Tree) and len(node.shards) == 48 and len(node.tables) == 2
    assert checked() == []
    finding = only(changed("head", "engram", sizes=without(HEAD, "engram", node.tables[0])))
    assert node.tables[0] in finding.found


def test_another_revision_on_the_worker() -> None:
    tree = WORKER.model
    assert isinstance(tree, Tree)
    other = {**tree.hashes, CONFIG: "f" * 64}
    assert "differs between the nodes: config.json" in only(
        worker=changed("worker", "model", hashes=other)
    ).found  # fmt: skip


def test_what_a_step_brings_is_not_demanded_before_it() -> None:
    absent = Tree(exists=False)
    head = replace(HEAD, model=absent, engram=absent)
    worker = replace(WORKER, model=absent, engram=absent)
    brought = replace(GIVEN, weights_needed=())
    assert [each for each in checked(head, worker, brought) if each.topic == "weights"] == []
    for given, names in ((("head",), {"head"}), (("worker",), {"worker"})):
        found = checked(head, worker, replace(GIVEN, weights_needed=given))
        told = [each.found for each in found if each.topic == "weights"]
        assert len(told) == 2 and all(f"of the {name}" in t for t in told for name in names)


def test_which_weights_must_be_there_is_a_matter_of_flags(tmp_path: Path) -> None:
    def needed_of(text: str) -> tuple[str, ...]:
        return Given.of(settings_of(tmp_path, text), OWNER).weights_needed

    assert needed_of("") == ()
    assert needed_of("AUTO_DOWNLOAD=0\n") == ("head",)
    copied = "AUTO_DOWNLOAD=0\nSKIP_SYNC=1\nWEIGHT_SYNC="
    assert needed_of(copied + "rsync\n") == ("head", "worker")
    assert needed_of(copied + "nfs\n") == ("head",)  # the worker mounts the head's


def test_a_directory_that_cannot_be_read() -> None:
    assert "does not exist" in only(survey("head", model=Tree(exists=False))).found
    tree = Tree(exists=True, readable=False)
    assert "may not be read" in only(survey("head", model=tree)).found
    assert "no answer" in only(survey("head", engram=Missing("no answer within 5 s"))).found
    assert checked(survey("head", model=None, engram=None)) == []


# ---- disk ----


def test_room_for_what_is_still_to_be_written() -> None:
    low = replace(HEAD.disk("~/cache"), free=10 * GIB)  # type: ignore[type-var]
    needs = (
        Need("~/cache", 8 * GIB, "for caches"),
        Need("~/cache", 30 * GIB, "of image", 25 * GIB),
    )
    head = survey("head", disks=(low,))
    finding = only(head, given=replace(GIVEN, head_needs=needs))
    # Both are on one file system: 8 and 5 do not fit into 10.
    assert "10.0 GiB free on /" in finding.found and "13.0 GiB there" in finding.needed
    there = replace(needs[1], present=30 * GIB)
    assert checked(head, given=replace(GIVEN, head_needs=(needs[0], there))) == []


def test_a_place_that_is_another_users_or_memory() -> None:
    disk = replace(HEAD.disk("~/cache"), writable=False)  # type: ignore[type-var]
    given = replace(GIVEN, worker_needs=(Need("~/cache", 1, "for caches"),))
    finding = only(worker=survey("worker", disks=(disk,)), given=given)
    assert "spark may not write to ~/cache on the worker" in finding.found
    disk = replace(disk, writable=True, fstype="tmpfs")
    assert "gone after a reboot" in only(
        worker=survey("worker", disks=(disk,)), given=given, level="warn"
    ).found  # fmt: skip


def test_disks_that_are_not_known() -> None:
    given = replace(GIVEN, head_needs=(Need("/x", 1, "for x"),))
    assert "did not answer for /x" in only(given=given).found
    assert "hangs" in only(survey("head", disks=Missing("hangs")), given=given).found
    assert checked(survey("head", disks=Missing("hangs"))) == []


# ---- memory ----


def test_what_a_rank_needs(tmp_path: Path) -> None:
    margin = Given.of(settings_of(tmp_path), OWNER).margin
    assert needed(margin, None) == int(98.9 * GIB) + 12 * GIB
    assert needed(margin, 200 * GIB) == int(98.9 * GIB) + 12 * GIB
    assert needed(margin, 3 * GIB) == 15 * GIB
    small = Given.of(settings_of(tmp_path, "DSV41_BOOT_MARGIN_GIB=0.5\n"), OWNER).margin
    assert needed(small, GIB) == int(1.5 * GIB)


def short(name: str, **more: Any) -> Survey:
    memory = survey(name).memory
    assert not isinstance(memory, Missing)
    return survey(name, memory=replace(memory, available=100 * GIB, **more))


def test_memory_on_both_nodes() -> None:
    findings = checked(short("head"), short("worker"))
    assert [each.topic for each in findings] == ["memory", "memory"]
    assert "the worker has 100.0 GiB of memory available" in findings[1].found
    assert "110.1 GiB" in findings[1].needed
    unknown = only(worker=survey("worker", memory=Missing("no answer within 5 s")))
    assert "no answer within 5 s" in unknown.found


def test_before_a_download_only_the_published_checkpoint_s_memory_is_known() -> None:
    absent = Tree(exists=False)
    brought = replace(GIVEN, weights_needed=())

    small = replace(short("head"), model=absent)

    def told(published: bool) -> list[str]:
        return [each.topic for each in checked(small, given=replace(brought, published=published))]

    assert told(True) == ["memory"] and told(False) == []


def test_memory_that_our_own_rank_holds() -> None:
    head = replace(short("head"), docker=docker(rank("head")))
    assert checked(head, replace(short("worker"), docker=docker(rank("worker")))) == []


def test_page_cache_and_pressure_are_warnings() -> None:
    memory = HEAD.memory
    assert not isinstance(memory, Missing)
    full = replace(memory, free=2 * GIB, cached=100 * GIB)
    assert "drop_caches" in only(survey("head", memory=full), level="warn").mend
    assert "wait for memory" in only(
        survey("head", memory=replace(memory, full=35.0)), level="warn"
    ).found  # fmt: skip

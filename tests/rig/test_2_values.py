"""Values with blanks, quotes, `$()` and newlines in every setting: taken as they are, or refused.

Whatever a value says, nothing of it is run on either node or in a container.
"""

from __future__ import annotations

import json

import pytest
from head_clone import HeadClone
from pair import Pair
from rig import USER

from launcher.settings.contract import Violation
from launcher.settings.setting import Setting
from launcher.settings.table import TABLE

pytestmark = pytest.mark.rig

START = 90.0
TOUCH = "touch /tmp/pwned"
HOSTILE = f'it\'s "x" $({TOUCH}) `{TOUCH}` ; {TOUCH} ;\n| {TOUCH} & \\'
# Free text that changes neither where the pair runs nor what it needs: all at once in one start.
HARMLESS = {
    "SERVED_MODEL_NAME", "VLLM_API_KEY", "NCCL_DEBUG_SUBSYS", "NCCL_PROTO", "CACHE_ROOT",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CUDA_ARCH_LIST", "FLASHINFER_CUDA_ARCH_LIST",
    "TRITON_HOST_CACHE", "TILELANG_HOST_CACHE", "WORKER_VLLM_CACHE", "WORKER_TRITON_CACHE",
    "WORKER_TILELANG_CACHE", "REHEARSAL_DIR", "LIMIT_MM",
    "GHCR_USER", "IMAGE_SHIP_DIR", "WORKER_IMAGE_SHIP_DIR", "ENGRAM_SRC", "NFS_EXPORT_ROOT",
}  # fmt: skip


def takes(setting: Setting) -> bool:
    try:
        setting.read(HOSTILE)
    except Violation:
        return False
    return True


FREE = [key for key, setting in TABLE.items() if takes(setting)]
UNREAD = [  # shown only, so far
    key for key in FREE if TABLE[key].reader not in ("now", "03")
]
#: Where packs may come to lie: an absent directory holds none, and the pair serves without.
PACKS = ("HEAD_PACKED_DIR", "WORKER_PACKED_DIR")
TARGETS = [key for key in FREE if key not in (*HARMLESS, *UNREAD, *PACKS)]


def assert_nothing_was_run(clone: HeadClone) -> None:
    for node in (clone.rig.head, clone.rig.worker):
        found = node.run("find", "/tmp", "/home", "/root", "/data", "-name", "pwned", check=False)
        assert found.out == "", f"{node.name}: {found.out}"
        for container in node.docker.containers.list(ignore_removed=True):
            assert container.exec_run(["ls", "/tmp/pwned"]).exit_code != 0


def test_where_a_form_is_needed_every_key_is_named_at_once(clean: HeadClone) -> None:
    formed = {key: HOSTILE for key in TABLE if key not in FREE}
    assert len(formed) > 20
    clean.env(formed)
    ran = clean.start("start")
    assert ran.status == 2, ran.said
    assert [key for key in formed if key not in ran.err] == []
    assert clean.containers() == {}
    assert_nothing_was_run(clean)


def test_free_text_arrives_as_it_was_written(clean: HeadClone) -> None:
    values = {key: HOSTILE for key in [*HARMLESS, *UNREAD] if key in FREE}
    clean.env(values)
    clean.key = HOSTILE.replace("\n", " ")  # a header holds no newline
    clean.env({**values, "VLLM_API_KEY": clean.key})
    try:
        ran = clean.start("start", timeout=START)
        assert ran.status == 0, ran.said
        pair = Pair.of(clean)
        argv = pair.argv("worker")
        assert argv[argv.index("--served-model-name") + 1] == HOSTILE
        env = dict(word.split("=", 1) for word in pair.inspect("worker")["Config"]["Env"])
        assert env["NCCL_DEBUG_SUBSYS"] == env["NCCL_PROTO"] == HOSTILE
        assert pair.completes(HOSTILE)
        told = clean.start("logs", "worker", "--no-follow")
        assert json.dumps(HOSTILE)[1:-1] in told.out
        assert_nothing_was_run(clean)
        assert clean.start("stop").status == 0
    finally:
        clean.key = type(clean).key
        # What was made under that name in the checkout, ENGRAM_SRC for one, must not be there when
        # another key names it.
        clean.rig.head.run("rm", "-rf", f"{clean.at}/{HOSTILE.partition('/')[0]}")


@pytest.mark.parametrize("key", TARGETS)
def test_what_names_a_place_is_refused_in_words(clean: HeadClone, key: str) -> None:
    clean.env({key: HOSTILE})
    ran = clean.start("start", timeout=START)
    assert ran.status in (1, 2), ran.said
    assert "Traceback" not in ran.said
    assert key in ran.err or "it's" in ran.err, ran.said
    assert clean.containers() == {}
    assert_nothing_was_run(clean)


@pytest.mark.parametrize("key", PACKS)
def test_a_pack_directory_of_any_name_may_be_absent(clean: HeadClone, key: str) -> None:
    clean.env({key: HOSTILE})
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert_nothing_was_run(clean)


def test_directories_may_have_any_name(clean: HeadClone) -> None:
    moved = {"MODEL_HOST": ("head", f"{clean.at}/model"),
             "ENGRAM_DIR": ("head", f"{clean.at}/engram-src"),
             "WORKER_MODEL_DIR": ("worker", f"{USER.home}/.cache/dsv41-flash-exl3/model"),
             "WORKER_ENGRAM_DIR": ("worker", f"{USER.home}/.cache/dsv41-flash-exl3/engram-src"),
             }  # fmt: skip
    values = {}
    for key, (role, folder) in moved.items():
        node = clean.rig.head if role == "head" else clean.rig.worker
        values[key] = f"/home/{HOSTILE.replace('/', '-')}/{key}"
        node.run("mkdir", "-p", values[key])
        node.run("cp", "-r", f"{folder}/.", values[key])
    clean.env(values)
    try:
        ran = clean.start("start", timeout=START)
        assert ran.status == 0, ran.said
        mounts = {m["Destination"]: m["Source"] for m in Pair.of(clean).inspect("worker")["Mounts"]}
        assert mounts["/model"] == values["WORKER_MODEL_DIR"]
        assert_nothing_was_run(clean)
    finally:
        clean.forget()
        for node in (clean.rig.head, clean.rig.worker):
            node.run("rm", "-rf", f"/home/{HOSTILE.replace('/', '-')}")

"""Rules for two Sparks that need more than one setting."""

from __future__ import annotations

if __name__ == "__main__":
    import _standalone

    _standalone.run(__file__)

from pathlib import Path

import pytest
from deployment_sites import pair
from settings_root import settings_of

from launcher.commands.vllm import capture_sizes
from launcher.deployment import deploy
from launcher.errors import UsageError
from launcher.settings import pair_rules

FINE = (
    "",
    "MAX_NUM_BATCHED_TOKENS=1025\nLANGUAGE_MODEL_ONLY=0\n",
    "MAX_NUM_BATCHED_TOKENS=1024\nLANGUAGE_MODEL_ONLY=1\n",
    "KV_CACHE_MEMORY_BYTES=\nMAX_MODEL_LEN=1048576\n",
    "KV_CACHE_MEMORY_BYTES=2684354560\nMAX_MODEL_LEN=774400\n",
    "KV_BLOCK_SIZE=32\n",
    "DSV41_EXL3_SERIAL_STREAMS=0\nVLLM_DISABLE_SHARED_EXPERTS_STREAM=0\n",
    "ENGRAM_STORE=plain\nENFORCE_EAGER=1\n",
    "EXTRA_ARGS='--cudagraph-capture-sizes 4 8'\n",
    "EXTRA_ARGS='--cudagraph_capture_sizes 1 2 3'\nSPEC_METHOD=none\n",
    "LONG_PREFILL_TOKEN_THRESHOLD=768\n",
    "MODEL_HOST=/a\nENGRAM_DIR=/a/b\nWORKER_MODEL_DIR=/a\nCONTAINER_WORKER=dsv41-exl3-head\n",
    "ZFS_HEAD_MODEL_DS=a/b\nZFS_WORKER_MODEL_DS=a/b\n",
    "ZFS_POOL=tank/ai\nZFS_HEAD_MODEL_DS=tank/a.b_c-d:e\nZFS_SSH=me@10.0.22.2\nNFS_IMAGE=x:local\n",
)
BROKEN = (
    ("LANGUAGE_MODEL_ONLY=0\nMAX_NUM_BATCHED_TOKENS=1024\n", "MAX_NUM_BATCHED_TOKENS", "1025"),
    ("MAX_MODEL_LEN=774500\n", "KV_CACHE_MEMORY_BYTES", "774500"),
    ("KV_BLOCK_SIZE=128\n", "KV_BLOCK_SIZE", "32 or 64"),
    ("EXTRA_ARGS='--cudagraph-capture-sizes 1 2 4'\n", "EXTRA_ARGS", "no graph for 8 tokens"),
    ("EXTRA_ARGS='--cudagraph-capture-sizes=4'\n", "EXTRA_ARGS", "no graph for 8 tokens"),
    ("CONTAINER_HEAD='bad name!'\n", "CONTAINER_HEAD", "letters"),
    ("NFS_CONTAINER='a; b'\n", "NFS_CONTAINER", "letters"),
    ("NFS_VOLUME_MODEL=/etc\n", "NFS_VOLUME_MODEL", "letters"),
    ("NFS_EXPORT_ENGRAM=../x\n", "NFS_EXPORT_ENGRAM", "without a slash"),
    ("NFS_IMAGE='A B'\n", "NFS_IMAGE", "lower case"),
    ("HF_MODEL_REPO=no-slash\n", "HF_MODEL_REPO", "somebody/something"),
    ("ZFS_POOL='a b'\n", "ZFS_POOL", "pool/name"),
    ("ZFS_WORKER_MODEL_DS=a//b\n", "ZFS_WORKER_MODEL_DS", "pool/name"),
    ("ZFS_SNAP_PREFIX=a@b\n", "ZFS_SNAP_PREFIX", "letters"),
    ("ZFS_SSH='a b'\n", "ZFS_SSH", "user@host"),
    ("MASTER_PORT=8888\n", "MASTER_PORT", "PORT too"),
    ("LONG_PREFILL_TOKEN_THRESHOLD=1792\n", "LONG_PREFILL_TOKEN_THRESHOLD", "256 below"),
    ("ENGRAM_STORE=memory\n", "ENGRAM_STORE", "use file, or ENFORCE_EAGER=1"),
    ("MODEL_HOST=/a/b\nENGRAM_DIR=/a/c/../b\n", "ENGRAM_DIR", "MODEL_HOST too"),
    ("MODEL_HOST=./engram-src\n", "ENGRAM_DIR", "MODEL_HOST too"),
    ("WORKER_MODEL_DIR=~/a\nWORKER_ENGRAM_DIR=a/\n", "WORKER_ENGRAM_DIR", "WORKER_MODEL_DIR too"),
    ("NFS_VOLUME_MODEL=dsv41-exl3-engram\n", "NFS_VOLUME_ENGRAM", "NFS_VOLUME_MODEL too"),
    ("NFS_EXPORT_MODEL=dsv41-engram\n", "NFS_EXPORT_ENGRAM", "NFS_EXPORT_MODEL too"),
    ("NFS_CONTAINER=dsv41-exl3-head\n", "NFS_CONTAINER", "CONTAINER_HEAD too"),
    ("ZFS_HEAD_MODEL_DS=a/b\nZFS_WORKER_ENGRAM_DS=a/b\n", "ZFS_WORKER_ENGRAM_DS", "_MODEL_DS too"),
    ("NFS_IMAGE=x\nIMAGE=docker.io/library/x:latest\n", "NFS_IMAGE", "IMAGE too"),
    ("IMAGE=vllm/vllm-openai:v0.33.0\n", "BASE_IMAGE", "IMAGE too"),
)


@pytest.mark.parametrize("text", FINE)
def test_what_two_sparks_can_serve_is_accepted(tmp_path: Path, text: str) -> None:
    pair_rules.require(settings_of(tmp_path, text))


@pytest.mark.parametrize(("text", "key", "word"), BROKEN)
def test_a_broken_rule_names_the_key_its_place_and_the_way_out(
    tmp_path: Path, text: str, key: str, word: str
) -> None:
    with pytest.raises(UsageError) as error:
        pair_rules.require(settings_of(tmp_path, text))
    assert key in str(error.value) and word in str(error.value)
    assert error.value.exit_code == 2


def test_a_link_to_the_other_directory_is_the_other_directory(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "link").symlink_to("native")
    settings = settings_of(tmp_path, "MODEL_HOST=./link\nENGRAM_DIR=./native\n")
    with pytest.raises(UsageError, match="MODEL_HOST too"):
        pair_rules.require(settings)


def test_all_broken_rules_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        pair_rules.require(settings_of(tmp_path, BROKEN[0][0] + BROKEN[1][0] + BROKEN[2][0]))
    assert "3 problems" in str(error.value) and ".env line 4: KV_BLOCK_SIZE" in str(error.value)


@pytest.mark.parametrize(("seqs", "k"), [(1, 3), (2, 5), (4, 5), (8, 3), (64, 1), (4096, 5)])
def test_our_own_graphs_cover_every_width(tmp_path: Path, seqs: int, k: int) -> None:
    settings = settings_of(tmp_path, f"MAX_NUM_SEQS={seqs}\nDSPARK_TOKENS={k}\n")
    sizes = capture_sizes(settings)
    assert set(sizes) >= {n * (k + 1) for n in range(1, min(seqs, 16) + 1)}
    assert max(sizes) >= seqs * (k + 1) and len(sizes) < 30


@pytest.mark.parametrize("text", ["", "LANGUAGE_MODEL_ONLY=0\nSWA_BOUNDED_REPLAY=0\n"])
def test_every_option_of_ours_is_refused_in_extra_args(tmp_path: Path, text: str) -> None:
    ours = {
        word
        for rank in deploy(settings_of(tmp_path, text), pair(), "l").ranks
        for word in rank.argv
        if word.startswith("--")
    }
    # These two are the user's to bring: the launcher then leaves its own out.
    ours -= {"--cudagraph-capture-sizes", "--no-enable-flashinfer-autotune"}
    for option in sorted(ours):
        with pytest.raises(UsageError):
            settings_of(tmp_path, f"EXTRA_ARGS='{option} x'\n")


def test_an_option_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="twice"):
        settings_of(tmp_path, "EXTRA_ARGS='--max-logprobs 1 --max_logprobs=2'\n")

"""From settings to argv and environment of both ranks: what is equal, what differs, what is out."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
from dataclasses import replace
from pathlib import Path

import pytest
from deployment_sites import pair, rehearsal
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from settings_root import settings_of

from launcher.deployment import PASS_THROUGH, Deployment, Site, deploy
from launcher.settings import dotenv
from launcher.settings.rehearsal import PROFILE

SITES = pytest.mark.parametrize("site", [rehearsal(), pair()], ids=["rehearsal", "pair"])


def deployed(
    tmp_path: Path, site: Site, text: str = "", overrides: tuple[str, ...] = ()
) -> Deployment:
    settings = settings_of(tmp_path, text, overrides=overrides)
    if site.name == "rehearsal":
        settings = settings.with_profile("rehearsal", PROFILE)
    return deploy(settings, site, "launch-1")


def option(argv: tuple[str, ...], name: str) -> str:
    """The one value of an option that stands once."""
    assert argv.count(name) == 1, (name, argv)
    return argv[argv.index(name) + 1]


def options(argv: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Each option with the words that follow it."""
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for word in argv[argv.index("serve") + 2 :]:
        if word.startswith("--"):
            assert word not in found, word
            words = found.setdefault(word, [])
        else:
            words.append(word)
    return {name: tuple(values) for name, values in found.items()}


@SITES
def test_the_ranks_differ_in_rank_fields_only(tmp_path: Path, site: Site) -> None:
    head, worker = deployed(tmp_path, site).ranks
    ours, theirs = options(head.argv), options(worker.argv)
    assert {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} == {
        "--node-rank", "--host", "--port", "--headless",
    }  # fmt: skip
    assert (ours["--node-rank"], theirs["--node-rank"]) == (("0",), ("1",))
    assert "--headless" not in ours
    assert theirs["--headless"] == ()
    assert "--host" not in theirs
    assert "--port" not in theirs
    per_rank = {
        "VLLM_HOST_IP",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
    }
    assert {k: v for k, v in head.env.items() if k not in per_rank} == {
        k: v for k, v in worker.env.items() if k not in per_rank
    }


@SITES
def test_both_ranks_meet_at_the_head(tmp_path: Path, site: Site) -> None:
    deployment = deployed(tmp_path, site)
    for rank, place in zip(deployment.ranks, (site.head, site.worker), strict=True):
        argv = rank.argv
        assert argv[: len(place.program) + 2] == (*place.program, "serve", place.model_dir)
        assert option(argv, "--master-addr") == site.head.host
        assert option(argv, "--master-port") == "29521"
        assert option(argv, "--tensor-parallel-size") == option(argv, "--nnodes") == "2"
        assert option(argv, "--distributed-executor-backend") == "mp"
        assert rank.env["VLLM_HOST_IP"] == place.host
        assert rank.env["GLOO_SOCKET_IFNAME"] == rank.env["NCCL_SOCKET_IFNAME"] == place.interface
        assert rank.env["SPARK_LAUNCH_ID"] == "launch-1"
        assert (rank.node, rank.role) == (place.node, place.role)
    assert deployment.ranks[0].ports == {"api": 8888, "master": 29521}
    assert deployment.ranks[1].ports == {}


@SITES
def test_values_reach_the_options(tmp_path: Path, site: Site) -> None:
    argv = deployed(
        tmp_path, site, "DSPARK_TOKENS=5\nLONG_PREFILL_TOKEN_THRESHOLD=0512\nGPU_MEM_UTIL=.87\n",
        ("MAX_MODEL_LEN=01000", "MAX_NUM_SEQS=3", "MAX_NUM_BATCHED_TOKENS=77", "KV_BLOCK_SIZE=32",
         "KV_CACHE_MEMORY_BYTES=4096", "SERVED_MODEL_NAME=m"),
    ).ranks[1].argv  # fmt: skip
    expected = {
        "--max-model-len": "1000", "--max-num-seqs": "3", "--max-num-batched-tokens": "77",
        "--block-size": "32", "--kv-cache-memory-bytes": "4096", "--served-model-name": "m",
        "--long-prefill-token-threshold": "512", "--gpu-memory-utilization": ".87",
    }  # fmt: skip
    assert {name: option(argv, name) for name in expected} == expected
    draft = json.loads(option(argv, "--speculative-config"))
    assert draft == {"method": "dspark", "num_speculative_tokens": 5}


def test_the_rehearsals_profile_is_what_a_small_machine_can_hold(tmp_path: Path) -> None:
    argv = deployed(tmp_path, rehearsal(), "MAX_MODEL_LEN=600000\nMAX_NUM_BATCHED_TOKENS=1024\n"
                    ).ranks[0].argv  # fmt: skip
    assert option(argv, "--max-model-len") == "4096"
    assert option(argv, "--max-num-batched-tokens") == "128"
    assert option(argv, "--kv-cache-memory-bytes") == str(64 * 1024 * 1024)
    assert "--enforce-eager" in argv
    assert "--cudagraph-capture-sizes" not in argv
    assert option(argv, "--dtype") == "bfloat16"


@SITES
def test_what_must_never_be_passed_is_not(tmp_path: Path, site: Site) -> None:
    for rank in deployed(tmp_path, site).ranks:
        for name in ("--kv-cache-dtype", "--moe-backend", "--api-key", "--quantization"):
            assert name not in rank.argv


def test_optional_options_are_absent_when_unset(tmp_path: Path) -> None:
    argv = deployed(tmp_path, pair(), "KV_CACHE_MEMORY_BYTES=\nSPEC_METHOD=none\n").ranks[0].argv
    for name in (
        "--kv-cache-memory-bytes",
        "--speculative-config",
        "--enforce-eager",
        "--dtype",
        "--long-prefill-token-threshold",
        "--limit-mm-per-prompt",
    ):
        assert name not in argv
    assert "--language-model-only" in argv


def test_quantization_is_forced_only_when_asked(tmp_path: Path) -> None:
    for value, present in (("exl3", True), ("none", False), ("", False)):
        argv = deployed(tmp_path, pair(), f"QUANTIZATION={value}\n").ranks[0].argv
        assert ("--quantization" in argv) is present


def test_images_bring_their_own_options(tmp_path: Path) -> None:
    text = "LANGUAGE_MODEL_ONLY=0\nLIMIT_MM='{\"image\": 4}'\n"
    argv = deployed(tmp_path, pair(), text).ranks[0].argv
    assert "--language-model-only" not in argv
    assert json.loads(option(argv, "--limit-mm-per-prompt")) == {"image": 4}
    assert option(argv, "--mm-encoder-tp-mode") == "data"
    assert "--skip-mm-profiling" in argv


def test_graph_sizes_are_ours_unless_the_user_brings_some(tmp_path: Path) -> None:
    ours = options(deployed(tmp_path, pair()).ranks[0].argv)
    assert ours["--cudagraph-capture-sizes"] == ("1", "2", "3", "4", "6", "8", "12", "18", "24")
    text = "EXTRA_ARGS='--cudagraph_capture_sizes 1 2'\n"
    theirs = deployed(tmp_path, pair(), text).ranks[0].argv
    assert "--cudagraph-capture-sizes" not in theirs
    assert theirs[-3:] == ("--cudagraph_capture_sizes", "1", "2")
    assert "--enforce-eager" in deployed(tmp_path, pair(), "ENFORCE_EAGER=1\n").ranks[0].argv


OWN = "DSV41_INDEXER_PREFILL_FACTOR=\n"  # leaves the workspace to GLM53_INDEXER_WORKSPACE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("DSV41_DROP_PAGE_CACHE=0\n", {"memory_drop_page_cache": False}),
        ("DSV41_PREFILL_EMPTY_CACHE_TOKENS=4096\n", {"memory_release_tokens": 4096}),
        ("DSV41_PREFILL_EMPTY_CACHE_MEMAVAIL_GIB=0\n", {"memory_release_below_gib": 0}),
        ("DSV41_PREFILL_END_EMPTY_CACHE=1\n", {"memory_release_at_end": True}),
        ("DSV41_INDEXER_PREFILL_FACTOR=4\n", {"indexer_prefill_factor": 4}),
        (f"{OWN}GLM53_INDEXER_WORKSPACE=rightsize\n", {"indexer_prefill_factor": 2}),
        (
            f"{OWN}GLM53_INDEXER_WORKSPACE=rightsize\nMAX_NUM_SEQS=99\n",
            {"indexer_prefill_factor": 40},
        ),
        (OWN, {"indexer_prefill_factor": None}),
        (
            "GLM53_INDEXER_WORKSPACE=rightsize\nDSV41_INDEXER_PREFILL_FACTOR=3\n",
            {"indexer_prefill_factor": 3},
        ),
        ("", {}),
    ],
)
def test_the_overlay_learns_how_to_care_for_memory(
    tmp_path: Path, text: str, told: dict[str, object]
) -> None:
    shipped = {
        "memory_drop_page_cache": True,
        "memory_release_tokens": 8192,
        "memory_release_below_gib": 2.5,
        "memory_release_at_end": False,
        "indexer_prefill_factor": 1,
    }
    for rank in deployed(tmp_path, pair(), text).ranks:
        given = json.loads(option(rank.argv, "--additional-config"))["spark_overlay"]
        kept = {key: given[key] for key in given if key.startswith(("memory_", "indexer_"))}
        expected = {k: v for k, v in {**shipped, **told}.items() if v is not None}
        assert kept == expected
        assert option(rank.argv, "--worker-cls") == "spark_overlay.memory.worker.SparkWorker"


def test_the_overlay_learns_where_each_ranks_tables_are_and_how_chats_are_sampled(
    tmp_path: Path,
) -> None:
    site = pair()
    own = {"packed_dir": "/packed", "prepared_dir": "/own"}
    other = replace(site.worker, engram_dir='/other "place"', **own)
    site = replace(site, worker=other)
    text = "ENGRAM_STORE=memory\nAPI_SAMPLING=request\nDSV41_IO_THREADS=96\n"
    text += "DSV41_CACHE_GIB=1.5\nDSV41_STATS_SECONDS=0\n"
    head, worker = deployed(tmp_path, site, text).ranks
    configs = [json.loads(option(rank.argv, "--additional-config")) for rank in (head, worker)]
    told = {
        "engram_store": "memory",
        "engram_io_threads": 96,
        "engram_cache_gib": 1.5,
        "engram_stats_seconds": 0,
        "api_sampling": "request",
        "memory_drop_page_cache": True,
        "memory_release_tokens": 8192,
        "memory_release_below_gib": 2.5,
        "memory_release_at_end": False,
        "indexer_prefill_factor": 1,
    }
    packed = {"engram_packed_dir": "/packed", "weights_prepared_dir": "/own"}
    assert configs == [
        {"spark_overlay": {"engram_dir": "/engram-src", **told}},
        {"spark_overlay": {"engram_dir": '/other "place"', **packed, **told}},
    ]


def test_both_ranks_name_the_plugin_without_which_vllm_serves_its_own_api(tmp_path: Path) -> None:
    assert {r.env["VLLM_PLUGINS"] for r in deployed(tmp_path, pair()).ranks} == {"spark_overlay"}


# ---- environment


def test_a_cpu_rank_has_what_the_interpreter_needs_and_no_fabric(tmp_path: Path) -> None:
    env = deployed(tmp_path, rehearsal()).ranks[1].env
    assert (env["TRITON_INTERPRET"], env["OMP_NUM_THREADS"]) == ("1", "1")
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["TRITON_CACHE_DIR"].startswith("/r/cache/")
    assert not [name for name in env if name.startswith("NCCL_IB")]


def test_a_cuda_rank_has_its_own_fabric_and_no_interpreter(tmp_path: Path) -> None:
    head, worker = deployed(tmp_path, pair(), "NCCL_BUFFSIZE=0002048\n").ranks
    assert (head.env["NCCL_IB_HCA"], worker.env["NCCL_IB_HCA"]) == ("=rocep1s0f1", "=rocep1s0f0")
    assert (head.env["NCCL_IB_GID_INDEX"], worker.env["NCCL_IB_GID_INDEX"]) == ("3", "4")
    assert head.env["NCCL_BUFFSIZE"] == "2048"
    assert head.env["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] == "1"
    assert head.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "TRITON_INTERPRET" not in head.env
    assert "OVERLAY_ATTENTION" not in head.env


def test_both_ranks_are_told_the_attention_that_was_asked_for(tmp_path: Path) -> None:
    from spark_overlay.attention.select import VARIABLE

    ranks = deployed(tmp_path, pair(), "OVERLAY_ATTENTION=portable\n").ranks
    assert [rank.env[VARIABLE] for rank in ranks] == ["portable", "portable"]


def test_rails_whose_indices_differ_are_left_to_nccl_and_none_is_never_empty(
    tmp_path: Path,
) -> None:
    site = pair()
    rails = replace(site.head, hcas=("rocep1s0f1", "roceP2p1s0f1"), gid_index=None)
    env = deployed(tmp_path, replace(site, head=rails)).ranks[0].env
    assert env["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
    assert "NCCL_IB_GID_INDEX" not in env
    assert (env["NCCL_IB_ADDR_FAMILY"], env["NCCL_IB_ROCE_VERSION_NUM"]) == ("AF_INET", "2")
    with pytest.raises(ValueError, match="RoCE device"):
        deployed(tmp_path, replace(site, head=replace(site.head, hcas=())))


@SITES
def test_nothing_leaves_the_machine_by_itself(tmp_path: Path, site: Site) -> None:
    for rank in deployed(tmp_path, site).ranks:
        for name in (
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "VLLM_NO_USAGE_STATS",
            "DO_NOT_TRACK",
        ):
            assert rank.env[name] == "1"


def test_a_process_inherits_the_named_variables_only(tmp_path: Path) -> None:
    rank = deployed(tmp_path, rehearsal(), "VLLM_API_KEY=k\n").ranks[0]
    environ = dict.fromkeys(PASS_THROUGH, "x") | {
        "PYTHONPATH": "/evil", "VLLM_PLUGINS": "y", "OMP_NUM_THREADS": "64", "HTTP_PROXY": "z",
    }  # fmt: skip
    env = rank.process_env(environ)
    assert env.keys() == rank.env.keys() | set(PASS_THROUGH) | {"VLLM_API_KEY"}
    assert env["OMP_NUM_THREADS"] == "1"
    assert rank.process_env({}) == {**rank.env, "VLLM_API_KEY": "k"}


def test_a_sites_extra_variables_add_and_never_replace(tmp_path: Path) -> None:
    site = replace(rehearsal(), extra_env={"PYTHONPATH": "/tree"})
    assert deployed(tmp_path, site).ranks[1].env["PYTHONPATH"] == "/tree"
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        deployed(tmp_path, replace(site, extra_env={"OMP_NUM_THREADS": "9"}))


# ---- secrets, fingerprints, hostile values


@SITES
def test_a_secret_is_in_the_heads_secret_environment_and_nowhere_else(
    tmp_path: Path, site: Site
) -> None:
    deployment = deployed(tmp_path, site, "VLLM_API_KEY=hunter2\n")
    head, worker = deployment.ranks
    assert head.secret_env == {"VLLM_API_KEY": "hunter2"}
    assert worker.secret_env == {}
    seen = repr(deployment) + repr([(r.argv, dict(r.env)) for r in deployment.ranks])
    assert "hunter2" not in seen
    assert deployed(tmp_path, site).ranks[0].secret_env == {}


def test_the_fingerprint_knows_every_input_but_the_launch(tmp_path: Path) -> None:
    base = deployed(tmp_path, pair())
    settings = settings_of(tmp_path)
    assert deploy(settings, pair(), "another").fingerprint == base.fingerprint
    drifted = replace(pair(), head=replace(pair().head, gid_index=5))
    assert deploy(settings, drifted, "l").fingerprint == base.fingerprint
    others = {
        deployed(tmp_path, pair(), "MAX_NUM_SEQS=3\n").fingerprint,
        deployed(tmp_path, pair(), "VLLM_API_KEY=x\n").fingerprint,
        deployed(tmp_path, pair(), "NCCL_PROTO=Simple\n").fingerprint,
        deploy(settings, replace(pair(), master_port=1), "l").fingerprint,
        deploy(settings, replace(pair(), name="rehearsal"), "l").fingerprint,
    }
    assert len(others | {base.fingerprint}) == 6


def test_a_site_is_head_then_worker(tmp_path: Path) -> None:
    site = pair()
    with pytest.raises(ValueError, match="head and one worker"):
        deploy(settings_of(tmp_path), replace(site, head=site.worker), "l")


WORDS = st.text(
    st.characters(exclude_characters="\0\r", exclude_categories=("Cs",)), min_size=1, max_size=20
).filter(lambda text: not text.startswith("-"))


@given(name=WORDS, folder=WORDS)
@hypothesis_settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_arrives_as_one_word(tmp_path: Path, name: str, folder: str) -> None:
    site = rehearsal(f"/{folder}", f"/{folder}")
    argv = deployed(tmp_path, site, f"SERVED_MODEL_NAME={dotenv.quote(name)}\n").ranks[0].argv
    assert argv[argv.index("serve") + 1] == f"/{folder}"
    assert argv[argv.index("--served-model-name") + 1] == name
    overlay = json.loads(argv[argv.index("--additional-config") + 1])["spark_overlay"]
    assert overlay["engram_dir"] == f"/{folder}"


def test_extra_arguments_are_split_as_a_shell_would_and_never_run(tmp_path: Path) -> None:
    extra = """--chat-template-content-format 'a  b' --x '{"k": "$(id)"}' "it's" """
    argv = deployed(tmp_path, pair(), f"EXTRA_ARGS={extra}\n").ranks[1].argv
    assert argv[-5:] == ("--chat-template-content-format", "a  b", "--x", '{"k": "$(id)"}', "it's")

"""The argv of both ranks, at both sites, through the parser of the installed vLLM.

An option that vLLM does not know, or a value it cannot read, ends here and not after a boot.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from deployment_sites import pair, rehearsal
from settings_root import settings_of

from launcher.deployment import Site, deploy
from launcher.settings.rehearsal import PROFILE
from spark_overlay.settings import overlay_settings

pytest.importorskip("vllm", reason="run by the engine's Python: ./start.sh test")
pytestmark = pytest.mark.rehearsal

Parse = Callable[[tuple[str, ...]], argparse.Namespace]
VARIANTS = {
    "as shipped": "",
    "no draft, vLLM measures the pool": "SPEC_METHOD=none\nKV_CACHE_MEMORY_BYTES=\n",
    "images": "LANGUAGE_MODEL_ONLY=0\nMAX_NUM_BATCHED_TOKENS=1536\n",
    "eager, forced exl3": "ENFORCE_EAGER=1\nQUANTIZATION=exl3\nLONG_PREFILL_TOKEN_THRESHOLD=512\n",
    "extra": "EXTRA_ARGS=--no-async-scheduling --max_cudagraph_capture_size 8\n",
    "odd names": "SERVED_MODEL_NAME='my \"own\" $(model)'\nGPU_MEM_UTIL=.87\n",
}


@pytest.fixture(scope="module")
def parse() -> Parse:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))

    def run(argv: tuple[str, ...]) -> argparse.Namespace:
        arguments = parser.parse_args(list(argv[argv.index("serve") :]))
        serve.validate(arguments)
        return arguments

    return run


@pytest.mark.parametrize("text", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("site", [rehearsal("/a b/model"), pair()], ids=["rehearsal", "pair"])
def test_vllm_reads_what_we_mean(tmp_path: Path, parse: Parse, site: Site, text: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = settings_of(tmp_path, text)
    if site.name == "rehearsal":
        settings = settings.with_profile("rehearsal", PROFILE)
    for rank, place in zip(deploy(settings, site, "l").ranks, (site.head, site.worker),
                           strict=True):  # fmt: skip
        read = parse(rank.argv)
        engine = AsyncEngineArgs.from_cli_args(read)
        assert read.model_tag == place.model_dir
        assert read.served_model_name == [settings.text("SERVED_MODEL_NAME")]
        assert read.headless is (rank.rank == 1)
        if rank.rank == 0:
            assert (read.host, read.port) == (site.api_host, site.api_port)
        assert (engine.tensor_parallel_size, engine.nnodes, engine.node_rank) == (2, 2, rank.rank)
        assert (engine.master_addr, engine.master_port) == (site.head.host, site.master_port)
        assert engine.distributed_executor_backend == "mp"
        assert engine.tokenizer_mode == read.tool_call_parser == "deepseek_v41"
        assert read.reasoning_parser == "deepseek_v41"
        assert read.enable_auto_tool_choice is engine.enable_prefix_caching is True
        assert engine.max_model_len == settings.int("MAX_MODEL_LEN")
        assert engine.max_num_seqs == settings.int("MAX_NUM_SEQS")
        assert engine.max_num_batched_tokens == settings.int("MAX_NUM_BATCHED_TOKENS")
        assert engine.block_size == settings.int("KV_BLOCK_SIZE")
        assert engine.kv_cache_memory_bytes == settings.maybe_int("KV_CACHE_MEMORY_BYTES")
        assert engine.gpu_memory_utilization == settings.number("GPU_MEM_UTIL")
        assert engine.enforce_eager is settings.flag("ENFORCE_EAGER")
        assert engine.language_model_only is settings.flag("LANGUAGE_MODEL_ONLY")
        assert engine.quantization == ("exl3" if settings.text("QUANTIZATION") else None)
        assert engine.kv_cache_dtype == "auto"
        told = {"engram_dir": place.engram_dir, "engram_store": "file", "api_sampling": "official"}
        told |= {"engram_io_threads": 32, "engram_cache_gib": 0, "engram_stats_seconds": 60}
        told |= {"memory_drop_page_cache": True, "memory_release_tokens": 8192}
        told |= {"memory_release_below_gib": 2.5, "memory_release_at_end": False}
        told |= {"indexer_prefill_factor": 1}
        assert engine.additional_config == {"spark_overlay": told}
        assert overlay_settings(engine).engram_io_threads == 32
        assert engine.structured_outputs_config.backend == "xgrammar"
        drafted = settings.text("SPEC_METHOD") == "dspark"
        assert engine.speculative_config == (
            {"method": "dspark", "num_speculative_tokens": 3} if drafted else None
        )


def test_an_option_that_vllm_does_not_know_would_be_seen(tmp_path: Path, parse: Parse) -> None:
    settings = settings_of(tmp_path, "EXTRA_ARGS=--no-such-option 1\n")
    with pytest.raises(SystemExit):
        parse(deploy(settings, pair(), "l").ranks[0].argv)

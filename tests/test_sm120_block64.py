"""Pages on SM12x (the GB10): 64 tokens, so that a page keeps 64 or 32 records and no more."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from pathlib import Path

import pytest
from settings_root import settings_of

from launcher.commands.vllm import RankPlace, serve_arguments
from launcher.settings.pair_rules import BLOCKS
from spark_overlay.attention.pages import (
    SM12X_RECORDS,
    WINDOW_PAGE,
    page_bytes,
    stock_sizes,
)
from spark_overlay.hooks import HOOKS

#: Of the compressed caches.
RATIOS = (1, 2)
#: Every class of vLLM 0.33.0 that says 128 on SM12x and is asked there.
BACKENDS = {
    "DeepseekV4SparseMLABackend",
    "DeepseekV4FlashInferMLASparseBackend",
    "DeepseekV41IndexerBackend",
}


def test_a_page_has_64_tokens_on_sm12x_and_what_vllm_says_elsewhere() -> None:
    assert stock_sizes(120) == [64]
    assert stock_sizes(90) == [64]
    assert [stock_sizes(family) for family in (100, 80, None)] == [[128]] * 3


@pytest.mark.parametrize("ratio", RATIOS)
def test_its_index_pages_are_such_as_vllms_index_kernels_take(ratio: int) -> None:
    (tokens,) = stock_sizes(120)
    assert tokens // ratio in SM12X_RECORDS
    # With what vLLM says, one of them would not be.
    assert {128 // each for each in RATIOS} - set(SM12X_RECORDS)


def test_pages_have_the_bytes_that_vllm_gives_them() -> None:
    assert page_bytes(64) == 37440
    assert page_bytes(64, 2) == page_bytes(WINDOW_PAGE) == 19008
    assert page_bytes(128) == 74880
    # FlashInfer wants strides of whole 16 bytes.
    assert all(page_bytes(64, ratio) % 16 == 0 for ratio in RATIOS)


def test_every_backend_that_is_asked_is_hooked() -> None:
    hooked = {
        hook.target.rpartition(":")[2].removesuffix(".get_supported_kernel_block_sizes")
        for hook in HOOKS
        if hook.replacement == "spark_overlay.attention.stock:page_sizes"
    }
    assert hooked == BACKENDS


def test_the_launcher_asks_for_pages_that_fit(tmp_path: Path) -> None:
    place = RankPlace(0, "cuda", "/model", "/engram", "10.0.0.1", 29501, "127.0.0.1", 8000)
    argv = serve_arguments(settings_of(tmp_path, "VLLM_API_KEY=a-secret-of-mine\n"), place)
    assert argv[argv.index("--block-size") + 1] == "64"
    assert set(BLOCKS) == set(SM12X_RECORDS)

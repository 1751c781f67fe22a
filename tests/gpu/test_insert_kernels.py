"""The cache inserts on a GPU, byte for byte the references' work: torch and Triton only.

python3 -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_insert_kernels.py
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu import insert_cases as cases  # noqa: E402  (after torch is known to be there)
from spark_overlay.attention.inserts import ops  # noqa: E402
from spark_overlay.attention.inserts.ops import InsertError  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROWS = (0, 1, 4, 6, 12, 16, 17, 32, 33, 64, 256, 2048)
PAGES = (32, 64, 128)
#: A norm's sum is taken in another order than the reference's: of a value that lies on the border
#: of two codes, both are right.
BORDER = 1e-3


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_latents_become_records(rows: int, ratio: int) -> None:
    for block in PAGES:
        blocks = -(-max(rows, 1) // block) + 2
        given = cases.draw(rows, blocks * block)
        right = cases.latents(given, cases.cache(blocks, block, 584), ratio, False, True)
        pages = cases.cache(blocks, block, 584, "cuda")
        found = cases.latents(given.to("cuda"), pages, ratio, True)
        assert torch.equal(found, right), (block, int((found != right).sum()))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_index_keys(rows: int, ratio: int) -> None:
    for block in PAGES:
        blocks = -(-max(rows, 1) // block) + 2
        given = cases.draw(rows, blocks * block)
        right = cases.keys(given, cases.cache(blocks, block, 132), ratio, False, True)
        pages = cases.cache(blocks, block, 132, "cuda")
        found = cases.keys(given.to("cuda"), pages, ratio, True)
        differ = found != right
        written = int((right != cases.POISON).sum())
        assert int(differ.sum()) <= BORDER * written, (block, int(differ.sum()), written)
        assert ((right != cases.POISON) | ~differ).all()


@pytest.mark.parametrize("heads", [(32, 32), (3, 8), (64, 64), (1, 16)])
@pytest.mark.parametrize("rows", ROWS)
def test_queries_and_the_windows_records(rows: int, heads: tuple[int, int]) -> None:
    real, padded = heads
    if rows * real > 40_000:
        pytest.skip("as long as the smaller ones, and no other path")
    blocks = -(-max(rows, 1) // 32) + 2
    given = cases.draw(rows, blocks * 32, real)
    right_q, right = cases.window(given, cases.cache(blocks, 32, 584), padded, False, True)
    pages = cases.cache(blocks, 32, 584, "cuda")
    found_q, found = cases.window(given.to("cuda"), pages, padded, True)
    assert torch.equal(found, right)
    assert torch.equal(found_q.view(torch.int16), right_q.view(torch.int16))


def test_fewer_slots_than_rows_and_more() -> None:
    """A padded batch: rows behind the last slot are not read."""
    given = cases.draw(33, 128).to("cuda")
    given.slots = given.slots[:20].clone()
    pages = cases.cache(2, 64, 584, "cuda")
    found = cases.latents(given, pages, 1, True)
    given.rows = given.rows.clone()
    given.rows[20:] = torch.nan
    again = cases.latents(given, cases.cache(2, 64, 584, "cuda"), 1, True)
    assert torch.equal(found, again)
    with pytest.raises(InsertError, match="rows for"):
        ops.rope_quant_insert(given.rows[:5], given.positions, given.cos_sin, pages, given.slots, 1)


def test_pages_beyond_four_gigabytes() -> None:
    """Offsets within a cache are 64-bit."""
    free, _ = torch.cuda.mem_get_info()
    if free < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    given = cases.draw(4, 64)
    stride = 1 << 30
    room = torch.zeros(4 * stride + (1 << 20), dtype=torch.uint8, device="cuda")
    far = room.as_strided((5, 64, 584), (stride, 584, 1))
    given.slots = torch.tensor([4 * 64 + 1, 4 * 64 + 9, 3 * 64, -1])
    on = given.to("cuda")
    ops.rope_quant_insert(on.rows, on.positions, on.cos_sin, far, on.slots, 1)
    near = cases.cache(5, 64, 584)
    near.as_strided((near.untyped_storage().nbytes(),), (1,)).zero_()
    cases.latents(given, near, 1, False, True)
    assert torch.equal(far[4].cpu(), near[4]) and torch.equal(far[3].cpu(), near[3])


def test_another_format_is_refused() -> None:
    given = cases.draw(4, 64).to("cuda")
    shown = (given.positions, given.cos_sin)
    with pytest.raises(InsertError, match="528 bytes"):
        ops.rope_quant_insert(given.rows, *shown, cases.cache(1, 64, 528, "cuda"), given.slots, 1)
    with pytest.raises(InsertError, match="68 bytes"):
        ops.indexer_k_norm_rope_store(
            given.keys, *shown, given.weight, 1e-6, cases.cache(1, 64, 68, "cuda"), given.slots, 1,
            False,
        )  # fmt: skip
    with pytest.raises(InsertError, match="FP8"):
        ops.indexer_k_norm_rope_store(
            given.keys, *shown, given.weight, 1e-6, cases.cache(1, 64, 132, "cuda"), given.slots, 1,
            True,
        )  # fmt: skip
    with pytest.raises(InsertError, match="ratio 3"):
        ops.rope_quant_insert(given.rows, *shown, cases.cache(1, 64, 584, "cuda"), given.slots, 3)

"""A rank's share of the rehearsal checkpoint by our reader is what whole tensors give it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from page_cache import resident
from safetensors.torch import load_file
from torch import Tensor, nn

from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.loading import PackedLoader, Rows
from spark_overlay.exl3.modules import OWN_LEAVES, Exl3Facts, scan_modules
from spark_overlay.exl3.packed import PackedStack, Slab
from spark_overlay.exl3.shares import share, share_bytes
from spark_overlay.headers import CheckpointHeaders
from spark_overlay.loading import prepare, prepared, request
from spark_overlay.loading.plan import PAGE
from spark_overlay.loading.prepared import PreparedError
from spark_overlay.loading.staging import Staging
from spark_overlay.loading.stream import stream

pytestmark = pytest.mark.rehearsal

GROUPS = 4
LEAVES = ("trellis", "suh", "svh")


@pytest.fixture(scope="module")
def model_dir(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("standard") / "checkpoint"


def build(found: dict[str, Exl3Facts], rank: int, tp: int) -> nn.Module:
    """Every matrix of a rank; experts of a layer in one slab and a stack for each projection."""
    groups: dict[str, list[Exl3Facts]] = {}
    for key, facts in found.items():
        layer, _, expert = key.partition(".ffn.experts.")
        name = f"{layer}.{expert[-2:]}.{facts.k2}" if expert else key
        groups.setdefault(name, []).append(facts)
    stacks = nn.ModuleList()
    for members in groups.values():
        part = share(members[0], rank, tp, GROUPS)
        if part is not None:
            slab = Slab(sum(share_bytes(facts, part) for facts in members))
            stacks.append(PackedStack(members, part, slab))
    model = nn.Module()
    model.stacks = stacks
    return model


def matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for stack in model.modules():
        if isinstance(stack, PackedStack):
            for index, key in enumerate(stack.keys):
                for leaf in LEAVES:
                    yield f"{key}.{leaf}", getattr(stack, leaf).data[index]


@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (0, 2), (1, 2)])
def test_a_share_is_what_whole_tensors_give(
    model_dir: Path, tmp_path: Path, rank: int, tp: int
) -> None:
    tensors = CheckpointHeaders.scan(model_dir, whole=True).tensors
    found = scan_modules(tensors)
    files = sorted(model_dir.glob("*.safetensors"))
    model, whole = build(found, rank, tp), build(found, rank, tp)
    other = PackedLoader(whole, tensors)
    native = {}
    for file in files:
        native |= dict(other.take(load_file(file).items()))
    rows = native["embed.weight"].shape[0] // tp
    held = torch.full((rows + 3, native["embed.weight"].shape[1]), 7.0, dtype=torch.bfloat16)

    def by_rows(held: Tensor) -> dict[str, Rows]:
        return {"embed.weight": Rows(held, rank * rows, (rank + 1) * rows, "e")}

    loader = PackedLoader(model, tensors, rows=by_rows(held))
    for size in (4 * PAGE, 1 << 20):
        came = dict(stream(loader.wanted(files), loader.device, size=size, slots=3, threads=2))
    compare(loader, other, came, native)
    assert torch.equal(held[:rows], native["embed.weight"][rank * rows : (rank + 1) * rows])
    assert not held[rows:].any(), "rows behind the vocabulary are zero"

    # Once more from the rank's own file, into other memory.
    job = prepare.task(model_dir, tmp_path, rank, tp)
    prepare.prepare(job, lambda line: None)
    again = torch.full_like(held, 7.0)
    loader = PackedLoader(build(found, rank, tp), tensors, rows=by_rows(again))
    own = prepared.find(tmp_path, job.origin)
    assert own is not None
    came = dict(stream(loader.wanted([], own), loader.device))
    compare(loader, other, came, native)
    assert torch.equal(again, held)


def compare(
    loader: PackedLoader, other: PackedLoader, came: dict[str, Tensor], native: dict[str, Tensor]
) -> None:
    """All that came against what whole tensors gave the other."""
    assert loader.finish() == other.finish() | {"e"}
    expected = dict(matrices(other.model))
    assert len(expected) > 1000
    for name, tensor in matrices(loader.model):
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
    assert came.keys() == native.keys() - {"embed.weight"}
    for name, tensor in came.items():
        assert tensor.dtype == native[name].dtype and torch.equal(tensor, native[name]), name


def test_a_rank_reads_its_share_and_little_more(model_dir: Path) -> None:
    """Row cuts and other ranks' groups are left where they lie."""
    tensors = CheckpointHeaders.scan(model_dir, whole=True).tensors
    found = scan_modules(tensors)
    files = sorted(model_dir.glob("*.safetensors"))
    first, second = (PackedLoader(build(found, rank, 2), tensors).wanted(files) for rank in (0, 1))
    packed = [one for one in first if one.name.rpartition(".")[2] in OWN_LEAVES]
    everything = sum(h.nbytes for n, h in tensors.items() if n.rpartition(".")[2] in OWN_LEAVES)
    assert sum(one.left for one in packed) < 0.75 * everything
    mine = {one.name for one in first} - {one.name for one in second}
    assert mine and all(".wo_a.slice." in name for name in mine)


def test_experts_of_a_layer_lie_a_fixed_distance_apart() -> None:
    """In one allocation, as the kernels' table may rely on."""
    members = [Exl3Facts(f"layers.0.ffn.experts.{e}.w1", 256, 256, 6, "mul1") for e in range(4)]
    part = share(members[0], 1, 2)
    assert part is not None
    slab = Slab(2 * sum(share_bytes(facts, part) for facts in members))
    one, two = (PackedStack(members, part, slab) for _ in range(2))
    assert one.trellis.untyped_storage().data_ptr() == two.svh.untyped_storage().data_ptr()
    for stack in (one, two):
        for leaf in LEAVES:
            at = [getattr(stack, leaf).data[i].data_ptr() for i in range(4)]
            assert {b - a for a, b in itertools.pairwise(at)} == {at[1] - at[0]}
            assert at[0] % 64 == 0


def test_a_model_of_other_shapes_is_refused(model_dir: Path) -> None:
    tensors = CheckpointHeaders.scan(model_dir, whole=True).tensors
    key = "layers.2.attn.wq_b"
    facts = scan_modules(tensors)[key]
    part = share(facts, 0, 2)
    assert part is not None
    model = nn.Module()
    model.stack = PackedStack([facts], part)
    model.stack.cut = facts.column_slice(0, facts.out_features)
    with pytest.raises(Exl3FormatError, match=rf"{key}.[a-z]+ in model-.*has room for"):
        PackedLoader(model, tensors).wanted([tensors[f"{key}.trellis"].file])


def test_staging_on_a_cpu_is_plain_memory_of_a_fixed_size() -> None:
    with Staging(torch.device("cpu"), 3, 2 * PAGE) as staging:
        assert [len(view) for view in staging.views] == [2 * PAGE] * 3
        assert not staging._pinned and staging.upload(1, PAGE) is staging.host[1]
        staging.views[1][:4] = b"abcd"
        assert staging.host[1].bytes[:4].tolist() == list(b"abcd")
        assert all(flat.bytes.data_ptr() % PAGE == 0 for flat in staging.host)


def test_portions_are_bounded_and_lose_nothing() -> None:
    weights = [(str(n), torch.zeros(n, dtype=torch.uint8)) for n in (5, 4, 20, 1, 9)]
    found = [[name for name, _ in part] for part in request.portions(iter(weights), 10)]
    assert found == [["5", "4"], ["20"], ["1", "9"]]
    assert list(request.portions(iter([]), 10)) == [[]]


def test_who_asks_is_who_is_loaded() -> None:
    outer, inner = SimpleNamespace(), SimpleNamespace()
    assert request.current() is None
    with request.asking(outer):  # type: ignore[arg-type]
        with request.asking(inner):  # type: ignore[arg-type]
            assert request.current() is inner
        assert request.current() is outer
    assert request.current() is None


@pytest.fixture
def glue(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hook of vLLM's loader as rank 0 of 1 has it; ``told`` are its settings."""
    from spark_overlay.memory import glue as found

    told: dict[str, Any] = {}
    config = SimpleNamespace(additional_config={"spark_overlay": told})
    monkeypatch.setattr(found, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(found, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(found, "get_tensor_model_parallel_world_size", lambda: 1)
    yield SimpleNamespace(iterator=found.safetensors_weights_iterator, told=told)


def test_vllm_s_loader_comes_to_ours(
    glue: Any, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the shards; from the rank's own file where there is one; not from another's."""
    tensors = CheckpointHeaders.scan(model_dir, whole=True).tensors
    found = scan_modules(tensors)
    files = [str(file) for file in sorted(model_dir.glob("*.safetensors"))]
    logging.getLogger("vllm").addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm.spark_overlay.loading")

    def load(**told: Any) -> tuple[dict[str, Tensor], str]:
        caplog.clear()
        glue.told.clear()
        glue.told.update(told)
        loader = PackedLoader(build(found, 0, 1), tensors, native=lambda name: "norm" in name)
        with request.asking(loader):
            came = dict(glue.iterator(files, False))
        loader.finish()
        return came, caplog.text

    shards, said = load()
    assert "[load] rank 0 of 1:" in said and all("norm" in name for name in shards)
    kept, _ = load(memory_drop_page_cache=False)
    assert any(resident(Path(file)) for file in files)
    missing, said = load(weights_prepared_dir=str(tmp_path))
    assert "the checkpoint itself is read (./start.sh prepare makes it)" in said
    job = prepare.task(model_dir, tmp_path, 0, 1)
    prepare.prepare(job, lambda line: None)
    own, said = load(weights_prepared_dir=str(tmp_path))
    assert f"reading {job.path}" in said
    for other in (kept, missing, own):
        assert other.keys() == shards.keys() != set()
        assert all(torch.equal(other[name], tensor) for name, tensor in shards.items())
    raw = job.path.read_bytes()
    job.path.write_bytes(raw.replace(job.origin.index.encode(), b"0" * 64))
    with pytest.raises(PreparedError, match="was made of another checkpoint"):
        load(weights_prepared_dir=str(tmp_path))

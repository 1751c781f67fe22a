"""The rehearsal checkpoint: same bytes from the same seed, legal tensors, V4.1's own structure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_overlay.engram.layout import EngramLayout
from spark_overlay.engram.source import locate_tables
from spark_overlay.exl3 import names
from spark_overlay.exl3.format import Exl3FormatError, dequantize
from spark_overlay.exl3.modules import Exl3Facts, scan_modules
from spark_overlay.headers import CheckpointHeaders, TensorHeader
from spark_overlay.rehearsal import make as making
from spark_overlay.rehearsal import shape
from spark_overlay.rehearsal.bits import bits
from spark_overlay.rehearsal.constructed import successor
from spark_overlay.rehearsal.make import make

pytestmark = pytest.mark.rehearsal

#: SHA-256 over the manifest's file list of seed 0. If a change of it is meant, raise GENERATOR in
#: make.py (the launcher then makes the checkpoint anew) and put the new value here.
GENERATOR = 1
SEED_0 = "149502eaf45faf99b8f99df15387d4f0fac05a9e39733245b76df2615efc4011"

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    done: dict[tuple[int, str], Path] = {}

    def get(seed: int = 0, variant: str = "standard") -> Path:
        key = (seed, variant)
        if key not in done:
            done[key] = tmp_path_factory.mktemp(f"{variant}-{seed}")
            make(done[key], seed, variant)
        return done[key]

    return get


def manifest_of(root: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((root / "manifest.json").read_text())
    return manifest


def config_of(root: Path, part: str = "checkpoint") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((root / part / "config.json").read_text())
    return config


def headers_of(root: Path) -> dict[str, TensorHeader]:
    return dict(CheckpointHeaders.scan(root / "checkpoint").tensors)


def values(header: TensorHeader) -> np.ndarray:
    """A tensor as numpy sees it; BF16 as float32."""
    with header.file.open("rb") as file:
        file.seek(header.begin)
        data = file.read(header.nbytes)
    if header.dtype == "BF16":
        raised = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return raised.view(np.float32).reshape(header.shape)
    kind = {"I16": "<i2", "F16": "<f2", "I32": "<i4", "F32": "<f4"}[header.dtype]
    return np.frombuffer(data, kind).reshape(header.shape)


def weight(headers: dict[str, TensorHeader], key: str) -> np.ndarray:
    trellis, suh, svh = (values(headers[f"{key}.{leaf}"]) for leaf in ("trellis", "suh", "svh"))
    return dequantize(trellis, suh, svh, "mul1")


# The bytes


def test_the_same_seed_gives_the_same_bytes_everywhere(made: Made) -> None:
    files = manifest_of(made())["files"]
    text = json.dumps(files, sort_keys=True).encode()
    assert (making.GENERATOR, hashlib.sha256(text).hexdigest()) == (GENERATOR, SEED_0)


def test_making_it_twice_gives_the_same_files(made: Made, tmp_path: Path) -> None:
    assert make(tmp_path) == manifest_of(made())


def test_another_seed_gives_other_tensors(made: Made) -> None:
    first, second = manifest_of(made())["files"], manifest_of(made(seed=7))["files"]
    assert first.keys() == second.keys()
    shards = [name for name in first if name.endswith(".safetensors")]
    assert len(shards) == 5
    assert all(first[name]["sha256"] != second[name]["sha256"] for name in shards)


def test_the_manifest_vouches_for_every_file_and_nothing_else(made: Made) -> None:
    root = made()
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            entry = {"size": path.stat().st_size, "sha256": digest}
            found[str(path.relative_to(root))] = entry
    assert found == manifest_of(root)["files"]


# The directory


def test_an_earlier_checkpoint_is_replaced_and_its_leftovers_with_it(tmp_path: Path) -> None:
    make(tmp_path, seed=1)
    (tmp_path / ".making" / "checkpoint").mkdir(parents=True)  # as a killed run leaves it
    (tmp_path / "checkpoint" / "old.bin").write_text("old")
    (tmp_path / "engine").mkdir()
    assert make(tmp_path, seed=0)["seed"] == manifest_of(tmp_path)["seed"] == 0
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found == ["checkpoint", "engine", "engram-src", "manifest.json"]
    assert not (tmp_path / "checkpoint" / "old.bin").exists()


def test_a_failed_run_leaves_the_earlier_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make(tmp_path, seed=1)
    monkeypatch.setattr(making, "write_sharded", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        make(tmp_path, seed=0)
    assert manifest_of(tmp_path) == before
    assert not (tmp_path / ".making").exists()


def test_a_run_stopped_between_two_renames_leaves_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, seed=1)
    rename = Path.rename

    def stop_at_engram(self: Path, target: Path) -> Path:
        if target == tmp_path / "engram-src":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop_at_engram)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, seed=0)
    assert not (tmp_path / "manifest.json").exists()
    monkeypatch.undo()
    assert make(tmp_path, seed=0) == manifest_of(tmp_path)


def test_a_directory_that_is_not_ours_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "checkpoint" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_text("a week of training")
    assert making.main(["--out", str(tmp_path)]) == 1
    assert f"{tmp_path / 'checkpoint'} holds something that is no rehearsal" in (
        capsys.readouterr().err
    )
    assert theirs.read_text() == "a week of training"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


# The tensors


@pytest.fixture(scope="module")
def packed(made: Made) -> dict[str, Exl3Facts]:
    return scan_modules(headers_of(made()))


def test_every_packed_matrix_has_its_declared_shape_and_k(packed: dict[str, Exl3Facts]) -> None:
    declared = {linear.key: linear for linear in shape.linears()}
    assert packed.keys() == declared.keys()
    for key, facts in packed.items():
        linear = declared[key]
        assert (facts.in_features, facts.out_features) == (linear.n_in, linear.n_out), key
        assert (facts.bits, facts.codebook) == (bits(key), "mul1"), key


def test_k_is_mixed_as_in_the_real_pack(packed: dict[str, Exl3Facts]) -> None:
    def rates(pattern: str) -> set[float]:
        prefix, _, suffix = pattern.partition("*")
        return {f.bits for k, f in packed.items() if k.startswith(prefix) and k.endswith(suffix)}

    assert {facts.bits for facts in packed.values()} == {2, 2.5, 3, 4, 5, 6, 8}
    for layer in range(shape.LAYERS):
        assert len(rates(f"layers.{layer}.ffn.experts.*")) == 1, "one K for a layer's experts"
    assert rates("layers.4.ffn.experts.*") == {2}
    assert rates("layers.7.ffn.experts.*") == {2.5}
    assert rates("mtp.*") == {4}
    assert rates("head*") == {6}
    assert rates("layers.*indexer.wk") == {8}
    assert [packed[f"layers.6.ffn.shared_experts.w{i}"].bits for i in (1, 3, 2)] == [4, 4, 5]
    mixed = {
        facts.module
        for facts, group in _by_module(packed).items()
        if len({f.bits for f in group}) > 1
    }
    assert mixed == {
        "attn.fused_wqa_wkv",
        "attn.compressor.fused_wkv_wgate",
        "ffn.shared_experts.gate_up_proj",
    }


def _by_module(packed: dict[str, Exl3Facts]) -> dict[names.Target, list[Exl3Facts]]:
    groups: dict[names.Target, list[Exl3Facts]] = {}
    for key, facts in packed.items():
        place = names.parse(key)
        if place.expert is None and place.slice is None:
            module = names.Target(place.stage, place.layer, place.module)
            groups.setdefault(module, []).append(facts)
    return groups


def test_two_ranks_can_share_it_and_four_cannot(packed: dict[str, Exl3Facts]) -> None:
    for linear in shape.linears():
        facts = packed[linear.key]
        if linear.split == "columns":
            assert all(lo % 128 == hi % 128 == 0 for lo, hi in facts.column_ranges(2))
        if linear.split == "rows":
            assert all(lo % 128 == hi % 128 == 0 for lo, hi in facts.row_ranges(2))
    shape.check_ranks(2)
    with pytest.raises(Exl3FormatError, match="128"):
        shape.check_ranks(4)


def test_native_tensors_are_native_and_the_tables_stay_outside(
    made: Made, packed: dict[str, Exl3Facts]
) -> None:
    headers = headers_of(made())
    native = {name: h for name, h in headers.items() if name.rpartition(".")[0] not in packed}
    declared = {n.name: n for n in shape.natives()}
    assert native.keys() == declared.keys()
    for name, header in native.items():
        assert (header.dtype, header.shape) == (declared[name].dtype, declared[name].shape), name
        assert np.isfinite(values(header)).all(), name


def test_weights_have_the_intended_size(made: Made) -> None:
    headers = headers_of(made())
    picked = ["layers.1.engram.wkv", "layers.0.attn.wq_b", "head", "mtp.0.main_proj"]
    picked += [f"layers.{layer}.ffn.experts.31.w2" for layer in (0, 4, 7)]
    gains = {linear.key: linear.gain for linear in shape.linears()}
    for key in picked:
        found = weight(headers, key)
        assert found.std() * math.sqrt(len(found)) == pytest.approx(gains[key], rel=0.06), key
    deviations = {n.name: n for n in shape.natives() if math.prod(n.shape) > 2000}
    for name, native in deviations.items():
        found = values(headers[name])
        assert found.std() == pytest.approx(native.std, rel=0.06), name
        assert found.mean() == pytest.approx(native.mean, abs=native.std / 10), name


def test_no_two_matrices_are_alike(made: Made, packed: dict[str, Exl3Facts]) -> None:
    headers = headers_of(made())
    for leaf in ("trellis", "suh", "svh"):
        seen = {values(headers[f"{key}.{leaf}"]).tobytes() for key in packed}
        assert len(seen) == len(packed), leaf


def test_the_ledger_tells_what_the_headers_tell(made: Made, packed: dict[str, Exl3Facts]) -> None:
    path = made() / "checkpoint" / "quantization_config.json"
    ledger = json.loads(path.read_text())
    storage = ledger.pop("tensor_storage")
    assert ledger == config_of(made())["quantization_config"]
    assert {k: e["bits_per_weight"] for k, e in storage.items()} == {
        k: f.bits for k, f in packed.items()
    }
    headers = headers_of(made())
    for entry in storage.values():
        for name, stored in entry["stored_tensors"].items():
            assert (stored["shape"], stored["dtype"]) == (
                list(headers[name].shape),
                headers[name].dtype,
            )


# Engram


def test_the_tables_follow_the_prime_rule_and_lie_in_shards_47_and_48(made: Made) -> None:
    root = made() / "engram-src"
    layout = EngramLayout.from_config(config_of(made()))
    tables = locate_tables(root, layout)
    assert {layer: t.file.name for layer, t in tables.items()} == {
        1: "model-00047-of-00048.safetensors",
        3: "model-00048-of-00048.safetensors",
    }
    assert not CheckpointHeaders.scan(root).unlisted


def test_table_rows_are_finite_and_near_one(made: Made) -> None:
    torch = pytest.importorskip("torch")
    for table in locate_tables(made() / "engram-src").values():
        data = table.file.read_bytes()
        size = table.rows * table.dim
        codes = np.frombuffer(data, np.uint8, size, table.weight_begin)
        scales = np.frombuffer(data, np.uint8, size // 32, table.scale_begin)
        assert len(np.unique(codes)) == 254
        rows = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).double().numpy()
        rows = rows.reshape(-1, 32) * np.exp2(scales.astype(np.float64) - 127)[:, None]
        assert np.isfinite(rows).all()
        assert 0.5 < np.sqrt((rows**2).mean()) < 2


# The variant whose draft is always right


def test_the_constructed_draft_knows_the_target(made: Made) -> None:
    root = made(variant="constructed")
    headers = headers_of(root)
    noise = config_of(root)["text_config"]["dspark_noise_token_id"]
    embed, norm = values(headers["embed.weight"]), values(headers["norm.weight"])
    target = (embed * norm) @ weight(headers, "head")
    markov = "mtp.2.markov_head"
    draft = values(headers[f"{markov}.embed.weight"]) @ values(headers[f"{markov}.head.weight"]).T
    expected = [successor(token) for token in range(shape.VOCAB) if token != noise]
    for logits in (target, draft):
        said = np.delete(logits, noise, axis=0)
        assert said.argmax(axis=1).tolist() == expected
        best = np.sort(said, axis=1)
        # Ten times what bfloat16 can err at a logit of 22.
        assert (best[:, -1] - best[:, -2]).min() > 1
        assert not logits[noise].any()


def test_the_constructed_layers_add_nothing(made: Made) -> None:
    plain, changed = headers_of(made()), headers_of(made(variant="constructed"))
    assert plain.keys() == changed.keys()
    silent = set()
    for key in scan_modules(changed):
        if not values(changed[f"{key}.svh"]).any():
            silent.add(key)
    last = (".attn.wo_b", ".w2", ".engram.wkv")
    assert silent == {linear.key for linear in shape.linears() if linear.key.endswith(last)}


def test_the_constructed_text_runs_through_every_ordinary_token() -> None:
    token, seen = 3, set()
    while token not in seen:
        seen.add(token)
        token = successor(token)
    assert seen == set(range(3, shape.VOCAB - 15))


def test_a_seed_that_cannot_be_constructed_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert making.main(["--out", str(tmp_path), "--variant", "constructed", "--seed", "1"]) == 1
    assert "Choose another seed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

"""Safetensors headers: what is whole is read, what is damaged is named and never crashes."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _packs import write_index, write_safetensors
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.headers import (
    INDEX_NAME,
    CheckpointHeaders,
    HeaderError,
    TensorHeader,
    read_header,
    read_index,
)

TWO = {"a": ("I16", (2, 3), bytes(range(12))), "b.scale": ("F8_E8M0", (4,), b"wxyz")}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """One directory for all examples of a hypothesis test."""
    root = Path(tempfile.mkdtemp())
    yield root
    shutil.rmtree(root)


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def test_offsets_are_absolute_and_point_to_the_data(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, TWO, pad=3)
    headers = read_header(path)
    assert {name: (h.dtype, h.shape) for name, h in headers.items()} == {
        "a": ("I16", (2, 3)),
        "b.scale": ("F8_E8M0", (4,)),
    }
    content = path.read_bytes()
    for name, (_, _, data) in TWO.items():
        found = headers[name]
        assert content[found.begin : found.end] == data and found.file == path
        assert found.nbytes == len(data)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"s": ("I32", (), b"\1\0\0\0"), "none": ("F16", (0, 5), b"")})
    assert read_header(path)["s"].shape == ()
    assert read_header(path)["none"].nbytes == 0


def entry(dtype: object = "I16", shape: object = (1,), offsets: object = (0, 2)) -> dict:
    return {"t.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


DAMAGED = [
    (b"", "not hold readable JSON"),
    (b"\xff\xfe", "not hold readable JSON"),
    (b"[" * 200_000, "not hold readable JSON"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not hold readable JSON"),
    ([], "not an object"),
    (b'{"t": 1, "t": 2}', "names 't' twice"),
    ({"t.weight": 7}, "tensor t.weight by int"),
    (entry(dtype="I17"), "tensor t.weight the unknown dtype 'I17'"),
    (entry(dtype=None), "unknown dtype None"),
    (entry(shape=(-1,)), "the shape"),
    (entry(shape=(1.0,)), "the shape"),
    (entry(shape=(True,)), "the shape"),
    (entry(shape="1"), "the shape"),
    (entry(shape=(1 << 63,)), "the shape"),
    (entry(shape=(1 << 62,) * 300), "not those of I16"),
    (entry(offsets=(2, 0)), "the offsets"),
    (entry(offsets=(0,)), "the offsets"),
    (entry(offsets=(0, 4)), "t.weight ends at byte .* truncated"),
    (entry(shape=(2,)), "not those of I16"),
    (entry(dtype="I8", offsets=(1, 2)), "leaves a gap before: tensor t.weight"),
    (entry(dtype="I8", offsets=(0, 1)), "1 bytes that belong to no tensor"),
    ({"a": entry()["t.weight"], "b": entry()["t.weight"]}, "overlaps .*: tensor b"),
]


@pytest.mark.parametrize(("header", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_header_names_tensor_file_and_mend(tmp_path: Path, header, message) -> None:
    path = raw_file(tmp_path / "shard.safetensors", header, b"\0\0")
    with pytest.raises(HeaderError, match=rf"(?s)shard\.safetensors: .*{message}.*To mend: "):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is 0 bytes long"),
        (b"\1\2\3", "is 3 bytes long"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((50).to_bytes(8, "little") + b"{}", "header of 50 bytes but is 10 bytes long"),
    ],
)
def test_a_file_without_a_whole_header_is_named(tmp_path: Path, content, message) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=message):
        read_header(path)


def test_missing_and_unreadable_files_are_header_errors(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=r"nothing\.safetensors: is missing"):
        read_header(tmp_path / "nothing.safetensors")
    with pytest.raises(HeaderError, match="cannot be read"):
        read_header(tmp_path)


@given(cut=st.integers(0, 400))
def test_every_truncation_is_noticed(scratch: Path, cut: int) -> None:
    path = scratch / "cut.safetensors"
    write_safetensors(path, TWO)
    whole = path.read_bytes()
    cut %= len(whole)
    path.write_bytes(whole[:cut])
    with pytest.raises(HeaderError):
        read_header(path)


@given(at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_flipped_byte_is_an_error_or_another_valid_header(scratch: Path, at, byte) -> None:
    path = scratch / "flip.safetensors"
    write_safetensors(path, TWO)
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content)
    try:
        headers = read_header(path)
    except HeaderError:
        return
    assert all(8 <= h.begin <= h.end <= len(content) for h in headers.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": JSON | st.sampled_from(["I16", "F8_E4M3", "F4"]),
        "shape": JSON | st.lists(st.integers(-1, 5), max_size=3),
        "data_offsets": JSON | st.lists(st.integers(-1, 9), min_size=2, max_size=2),
    },
)


@given(
    header=st.dictionaries(st.text(max_size=6), JSON | ENTRY, max_size=3) | JSON,
    data=st.binary(max_size=8),
)
def test_garbage_raises_nothing_but_a_header_error(scratch: Path, header, data) -> None:
    path = raw_file(scratch / "garbage.safetensors", header, data)
    try:
        read_header(path)
    except HeaderError as error:
        assert "garbage.safetensors" in str(error)


@given(content=st.binary(max_size=64), length=st.integers(0, 64) | st.none())
def test_random_bytes_raise_nothing_but_a_header_error(scratch: Path, content, length) -> None:
    path = scratch / "random.safetensors"
    prefix = b"" if length is None else length.to_bytes(8, "little")
    path.write_bytes(prefix + content)
    try:
        assert all(isinstance(h, TensorHeader) for h in read_header(path).values())
    except HeaderError as error:
        assert "random.safetensors" in str(error)


@given(JSON | st.fixed_dictionaries({"weight_map": JSON}))
def test_a_garbage_index_raises_nothing_but_a_header_error(scratch: Path, index) -> None:
    (scratch / INDEX_NAME).write_text(json.dumps(index))
    try:
        assert read_index(scratch)
    except HeaderError as error:
        assert INDEX_NAME in str(error)


def two_shards(root: Path) -> dict[str, str]:
    write_safetensors(root / "m-1.safetensors", {"a": ("U8", (1,), b"a")})
    write_safetensors(root / "m-2.safetensors", {"b": ("U8", (1,), b"b")})
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    write_index(root, weight_map)
    return weight_map


def test_scan_joins_shards_with_or_without_an_index(tmp_path: Path) -> None:
    two_shards(tmp_path)
    assert set(CheckpointHeaders.scan(tmp_path).tensors) == {"a", "b"}
    (tmp_path / INDEX_NAME).unlink()
    assert set(CheckpointHeaders.scan(tmp_path).tensors) == {"a", "b"}


def test_scan_tells_of_files_that_the_index_does_not_name(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_safetensors(tmp_path / "old.safetensors", {"a": ("U8", (1,), b"x")})
    found = CheckpointHeaders.scan(tmp_path)
    assert found.unlisted == ("old.safetensors",)
    assert found.tensors["a"].file.name == "m-1.safetensors"


def test_scan_refuses_a_tensor_in_two_shards(tmp_path: Path) -> None:
    two_shards(tmp_path)
    both = {"a": ("U8", (1,), b"a"), "b": ("U8", (1,), b"b")}
    write_safetensors(tmp_path / "m-2.safetensors", both)
    with pytest.raises(HeaderError, match=r"m-2\..* tensor a, which m-1\.safetensors holds too"):
        CheckpointHeaders.scan(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": "m-2.safetensors"}, "places tensor c in m-2.safetensors, but no file holds it"),
        ({"a": "m-2.safetensors", "b": "m-1.safetensors"}, r"a in m-2\..*, but m-1\..* holds it"),
        ({"c": "m-3.safetensors"}, r"m-3\.safetensors: is missing"),
        ({"c": "../m-1.safetensors"}, "places tensor c in .* no file name"),
        ({"c": 3}, "places tensor c in 3, which is no file name"),
    ],
)
def test_scan_refuses_an_index_that_does_not_fit(tmp_path: Path, change, message) -> None:
    write_index(tmp_path, two_shards(tmp_path) | change)
    with pytest.raises(HeaderError, match=message):
        CheckpointHeaders.scan(tmp_path)


def test_scan_refuses_an_empty_directory_and_an_empty_index(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=r"holds no \*\.safetensors file"):
        CheckpointHeaders.scan(tmp_path)
    write_index(tmp_path, {})
    with pytest.raises(HeaderError, match="holds no weight_map"):
        CheckpointHeaders.scan(tmp_path)

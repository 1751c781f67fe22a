"""Where the Engram tables lie: a directory with config.json, the index and the shards it names.

Only the table tensors' own shards are opened, and of these only the headers: the directory may be
a whole native checkpoint, or a slim one with nothing else in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from spark_overlay.engram.layout import SCALE_GROUP, EngramError, EngramLayout
from spark_overlay.headers import INDEX_NAME, TensorHeader, read_header, read_index


@dataclass(frozen=True, slots=True)
class TableSource:
    """One layer's table inside a file.

    Row i has ``dim`` e4m3 bytes at ``weight_begin + i * dim`` and ``dim / 32`` scale bytes at
    ``scale_begin + i * dim / 32``; offsets are absolute.
    """

    layer_id: int
    file: Path
    rows: int
    dim: int
    weight_begin: int
    scale_begin: int

    @property
    def scale_dim(self) -> int:
        return self.dim // SCALE_GROUP


def locate_tables(root: Path, expected: EngramLayout | None = None) -> dict[int, TableSource]:
    """Tables of all Engram layers by layer id.

    ``expected`` is the layout of the model that will read them. Raises EngramError (or HeaderError
    for a damaged shard) if something is missing or does not fit.
    """
    layout = read_layout(root)
    if expected is not None and expected != layout:
        raise EngramError(
            f"{root / 'config.json'}: describes other Engram tables than the model's own config "
            f"(layers {list(layout.layer_ids)} with {list(layout.num_embeddings)} rows, expected "
            f"{list(expected.layer_ids)} with {list(expected.num_embeddings)}). "
            "Point to the tables of the model that is served"
        )
    index = read_index(root)
    if index is None:
        raise EngramError(
            f"{root / INDEX_NAME}: missing; it says which shards hold the tables. "
            "Copy it from the native checkpoint into this directory"
        )
    return {layer_id: _locate(root, layout, index, layer_id) for layer_id in layout.layer_ids}


def read_layout(root: Path) -> EngramLayout:
    """Layout by the directory's config.json. Raises EngramError if it has none."""
    path = root / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngramError(
            f"{path}: missing; it gives the layout of the tables. "
            "Copy it from the native checkpoint into this directory"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise EngramError(f"{path}: cannot be read ({error}). Copy it again") from None
    layout = EngramLayout.from_config(config)
    if layout is None:
        raise EngramError(
            f"{path}: names no engram_layer_ids. Copy config.json from the checkpoint that the "
            "tables belong to"
        )
    return layout


def _locate(root: Path, layout: EngramLayout, index: dict[str, str], layer_id: int) -> TableSource:
    rows = layout.num_embeddings[layout.index_of(layer_id)]
    names = [f"layers.{layer_id}.engram.embed.{leaf}" for leaf in ("weight", "scale")]
    for name in names:
        if name not in index:
            raise EngramError(
                f"{root / INDEX_NAME}: does not name {name}. Use the native checkpoint's index; "
                "an EXL3 tree holds no tables"
            )
    files = [index[name] for name in names]
    if files[0] != files[1]:
        raise EngramError(
            f"{root / INDEX_NAME}: {names[0]} is in {files[0]} but {names[1]} in {files[1]}; a "
            "table must lie in one shard. Use the native checkpoint's own shards and index"
        )
    path = root / files[0]
    headers = read_header(path)
    for name in names:
        if name not in headers:
            raise EngramError(
                f"{path}: holds no {name}, though the index says so. Download the shard and the "
                "index from the same revision"
            )
    weight, scale = (headers[name] for name in names)
    _check(path, names[0], weight, ("F8_E4M3",), (rows, layout.dim))
    _check(path, names[1], scale, ("F8_E8M0", "U8"), (rows, layout.dim // SCALE_GROUP))
    return TableSource(layer_id, path, rows, layout.dim, weight.begin, scale.begin)


def _check(
    path: Path, name: str, header: TensorHeader, dtypes: tuple[str, ...], shape: tuple[int, int]
) -> None:
    if header.dtype not in dtypes or header.shape != shape:
        raise EngramError(
            f"{path}: {name} is {header.dtype} {list(header.shape)}, but its config.json needs "
            f"{' or '.join(dtypes)} {list(shape)}. Tables and config.json are of different models"
        )

"""Large files, taken up where an earlier run was broken off: in the process of `fetch`.

huggingface_hub begins a file anew after a run that ended, which for an Engram shard may be 100 GB.
Its parts can do better: hf-xet streams a file from any byte on, and http_get takes a range. What
has come of a file is kept under its sha256 until it is whole; whether it is right, the sums tell.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import hf_xet  # type: ignore[import-untyped]
import httpx2
from huggingface_hub import HfFileMetadata, constants, errors, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers
from tqdm.auto import tqdm

FOLDER = ".cache/dsv41-partial"  # in the directory of the weights, so that a rename is enough
PIECE = 256 << 20  # bytes; what was not synced to the drive may be zeros after a power cut
TRIES = 5  # without a byte
PAUSE = 1.0  # seconds

Counter = Callable[[int], None]


@dataclass(frozen=True)
class Large:
    """A file to come: its size in bytes, and its sha256 as the manifest has it."""

    name: str
    size: int
    sha256: str


def partial(directory: Path, sha256: str) -> Path:
    return directory / FOLDER / f"{sha256}.part"


def large(files: dict[str, list[object]], least: int) -> list[Large]:
    """Those of a job's ``{NAME: [SIZE, SHA256]}`` that are taken up again."""
    return [
        Large(name, size, sha256)
        for name, (size, sha256) in files.items()
        if isinstance(size, int) and isinstance(sha256, str) and sha256 and size >= least
    ]


def fetch_all(
    repo: str,
    commit: str,
    directory: Path,
    files: Sequence[Large],
    workers: int,
    count: Counter,
    piece: int = PIECE,
) -> None:
    """Bring ``files`` whole into ``directory``. ``count`` gets bytes as they come, and those that
    were there already; ``piece``: multiples of so many bytes are taken up. Raises what the library
    raises, after all that can come has come."""

    def one(file: Large) -> BaseException | None:
        try:
            _fetch(repo, commit, directory, file, count, piece)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(workers) as pool:
        failed = [error for error in pool.map(one, files) if error is not None]
    if failed:
        raise failed[0]


def _fetch(
    repo: str, commit: str, directory: Path, file: Large, count: Counter, piece: int
) -> None:
    headers = build_hf_headers()
    (directory / file.name).unlink(missing_ok=True)  # a bad one, whose room is needed
    place = partial(directory, file.sha256)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("ab") as out:
        here = out.tell()
        if here != file.size:
            here = here // piece * piece if here < file.size else 0
            out.truncate(here)
        count(here)
        vain = 0
        while here < file.size:
            try:
                url = hf_hub_url(repo, file.name, revision=commit)
                found = get_hf_file_metadata(url, headers=headers)
                if found.etag != file.sha256:
                    raise OSError(f"{file.name}: the hub has {found.etag}, not {file.sha256}")
                _append(found, headers, out, file.size, count)
            except (httpx2.HTTPError, errors.XetDownloadError, ConnectionError, RuntimeError) as no:
                if isinstance(no, errors.HfHubHTTPError):
                    raise
                vain = vain + 1 if _end(out) == here else 0
                if vain >= TRIES:
                    raise ConnectionError(f"{file.name}: {type(no).__name__}: {no}") from no
                print(f"{file.name}: {type(no).__name__}: {no}; goes on", file=sys.stderr)
                time.sleep(PAUSE)
            here = _end(out)
        os.fsync(out.fileno())
    os.replace(place, directory / file.name)


def _end(out: BinaryIO) -> int:
    return out.seek(0, os.SEEK_END)


def _append(
    found: HfFileMetadata, headers: dict[str, str], out: BinaryIO, size: int, count: Counter
) -> None:
    """Write what is still to come, as far as it comes."""
    at = _end(out)
    bare = {key: text for key, text in headers.items() if key.lower() != "authorization"}
    if found.xet_file_data is None:
        if urlsplit(found.location).netloc != urlsplit(constants.ENDPOINT).netloc:
            headers = bare  # a token is for the hub alone
        http_get(
            found.location,
            out,
            resume_size=at,
            headers=headers,
            expected_size=size,
            tqdm_class=_counting(count),
        )
        return
    group = hf_xet.XetSession().new_download_stream_group(
        token_refresh_url=found.xet_file_data.refresh_route,
        token_refresh_headers=headers,
        custom_headers=bare,
    )
    info = hf_xet.XetFileInfo(found.xet_file_data.file_hash, size)
    synced = at
    for data in group.download_stream(info, start=at):
        out.write(data)
        at += len(data)
        count(len(data))
        if at - synced >= PIECE:
            out.flush()
            os.fsync(out.fileno())
            synced = at
    if at != size:
        raise ConnectionError(f"the stream ended at byte {at} of {size}")


def _counting(count: Counter) -> type[tqdm[object]]:
    class Counting(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs.pop("name", None)
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> bool | None:
            count(int(n or 0))
            return None

    return Counting

"""The part of the download that talks to the hub: a process of its own, by huggingface_hub.

    python -m launcher.weights.fetch        one JSON job on stdin, JSON lines on stdout

A process, because huggingface_hub and hf-xet read their environment when they are imported, and
because threads of theirs that wait for a dead connection can only be ended with it. Tokens come
from where the library looks for them (HF_TOKEN, or what ``hf auth login`` left), never by argv.

    {"do": "resolve", "repo": R, "role": "model" | "engram", "revision": REVISION or null}
        → {"commit": C, "files": [[NAME, SIZE, SHA256, GIT], …]}
    {"do": "fetch", "repo": R, "commit": C, "directory": D, "files": {NAME: [SIZE, SHA256], …},
     "workers": N, "large": BYTES}
        → {"bytes": N} as they come, then {"fetched": true}
    whatever goes wrong → {"failed": KIND, "text": TEXT}, and the exit status 1
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download
from tqdm.auto import tqdm

from launcher.errors import LauncherError
from launcher.facts.trees import INDEX
from launcher.weights import resume
from launcher.weights.choice import chosen
from launcher.weights.manifest import Role

BEAT = 0.5  # seconds between two lines of progress
_said, _counted = threading.Lock(), threading.Lock()


def say(value: Mapping[str, Any]) -> None:
    with _said:
        print(json.dumps(value), flush=True)


class Bytes(tqdm):  # type: ignore[type-arg]
    """Tells how many bytes have come, in the place of a progress bar.

    huggingface_hub makes one bar for files, one for bytes received and one for bytes written; the
    one of bytes that is farthest is told.
    """

    most = 0
    last = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        self.of_bytes = kwargs.get("unit") == "B"
        super().__init__(*args, **{**kwargs, "file": sys.stderr, "disable": True})

    def update(self, n: float | None = 1) -> bool | None:
        if self.of_bytes:
            self.n += n or 0  # a disabled bar does not count
            with _counted:
                Bytes.most = max(Bytes.most, int(self.n))
            Bytes.tell()
        return None

    @staticmethod
    def more(count: int) -> None:
        """Bytes beside those of a bar."""
        with _counted:
            Bytes.most += count
        Bytes.tell()

    @staticmethod
    def tell() -> None:
        if (now := time.monotonic()) - Bytes.last >= BEAT:
            Bytes.last = now
            say({"bytes": Bytes.most})


def resolve(job: Mapping[str, Any]) -> dict[str, Any]:
    repo: str = job["repo"]
    role: Role = job["role"]
    info = HfApi().model_info(repo, revision=job.get("revision"), files_metadata=True)
    assert info.sha is not None and info.siblings is not None
    found = {each.rfilename: each for each in info.siblings}
    with tempfile.TemporaryDirectory() as folder:
        index = Path(hf_hub_download(repo, INDEX, revision=info.sha, local_dir=folder)).read_bytes()
    where = f"{INDEX} of {repo}"
    names, missing = chosen(role, index, found, where)
    if missing:
        raise LauncherError(
            f"{repo} lacks {', '.join(missing[:3])}, which {where} names",
            "a whole checkpoint",
            "see the repository's page: it may be half uploaded, or another one than meant",
        )
    files = []
    for name in names:
        each = found[name]
        sha256 = each.lfs.sha256 if each.lfs is not None else ""
        size = each.lfs.size if each.lfs is not None else each.size
        files.append([name, size, sha256, "" if sha256 else each.blob_id or ""])
    return {"commit": info.sha, "files": files}


def fetch(job: Mapping[str, Any]) -> dict[str, Any]:
    repo, commit, directory = job["repo"], job["commit"], Path(job["directory"])
    files: dict[str, list[Any]] = job["files"]

    def snapshot(names: Iterable[str], **more: Any) -> Any:
        return snapshot_download(
            repo,
            revision=commit,
            local_dir=directory,
            allow_patterns=list(names),
            max_workers=job["workers"],
            # Only files that are known to be bad or absent are asked for.
            force_download=True,
            tqdm_class=Bytes,
            **more,
        )

    # A bad file goes before its successor comes: first it is seen whether the hub will send that.
    found = {each.filename: each.file_size for each in snapshot(files, dry_run=True)}
    wanted = {name: size for name, (size, _) in files.items()}
    if found != wanted:
        odd = sorted(set(found.items()) ^ set(wanted.items()))[0][0]
        raise LauncherError(
            f"the hub would send {found.get(odd, 'no')} bytes of {odd}, not {wanted.get(odd)}",
            "the files as the manifest has them",
            "remove manifest.json in CACHE_ROOT, then run this again: whole files are kept",
        )
    Bytes.most = 0
    large = resume.large(files, job["large"])
    if small := set(files) - {each.name for each in large}:
        snapshot(small)
    Bytes.more(0)
    piece = min(resume.PIECE, job["large"])
    resume.fetch_all(repo, commit, directory, large, job["workers"], Bytes.more, piece)
    return {"fetched": True, "bytes": Bytes.most}


def kind_of(error: BaseException) -> str:
    """Which sort of failure it is; the launcher has the words for each."""
    return _cause(error)[0]


def text_of(error: BaseException) -> str:
    """What is said, and by whom; with what that came from, which the library leaves out."""
    told = f"{type(error).__name__}: {error}"
    _, cause = _cause(error)
    if cause is error or str(cause) in told:
        return told
    return f"{type(cause).__name__}: {cause} (told as {told})"


def _cause(error: BaseException) -> tuple[str, BaseException]:
    """The kind, and which of the errors that led to this one tells it."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    for each in chain:
        if kind := _kind(each):
            return kind, each
    return "other", chain[-1]


def _kind(error: BaseException) -> str:
    """Of this error alone; empty: none that is known."""
    match error:
        case errors.OfflineModeIsEnabled():
            return "offline"
        case errors.GatedRepoError():
            return "gated"
        case errors.HfHubHTTPError():
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403):
                return "token"
            if isinstance(error, errors.RevisionNotFoundError | errors.RemoteEntryNotFoundError):
                return "revision"
            if isinstance(error, errors.RepositoryNotFoundError):
                return "repository"
            return "busy" if status == 429 else "hub"
        case httpx2.HTTPError() | errors.XetDownloadError() | ConnectionError():
            return "network"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return "disk"
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS):
            return "permission"
        case errors.HFValidationError():
            return "repository"
        case _:
            return ""


def main() -> int:
    job = json.load(sys.stdin)
    ways = {"resolve": resolve, "fetch": fetch}
    try:
        say(ways[job["do"]](job))
    except LauncherError as error:
        words = {"found": error.found, "needed": error.needed, "mend": error.do_next}
        say({"failed": "told", "text": error.found, **words})
        return 1
    except Exception as error:
        say({"failed": kind_of(error), "text": text_of(error)})
        # Threads of the library that still wait must not hold up the end.
        sys.stdout.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Reads blocks of files ahead of their taker, several at once, into memory of a fixed size."""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from spark_overlay.loading.plan import PAGE, Block


class LoadError(RuntimeError):
    """A checkpoint that could not be read; the message names the file and what to do."""


def ring(slots: int, size: int) -> tuple[mmap.mmap, list[memoryview]]:
    """Memory of a reader: ``slots`` pieces of ``size`` bytes, page-aligned, of no file."""
    memory = mmap.mmap(-1, slots * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    return memory, [view[at : at + size] for at in range(0, slots * size, size)]


class _File:
    """One open file. ``direct`` reads go past the page cache where the file system allows it."""

    def __init__(self, path: Path, direct: bool, told: Callable[[str], object]) -> None:
        self.path, self.direct, self._told = path, direct, told
        self._lock = Lock()
        try:
            self.fd = self._open()
        except OSError as error:
            raise _unreadable(path, error) from error

    def _open(self) -> int:
        if self.direct:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refused()
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def _refused(self) -> None:
        self.direct = False
        self._told(
            f"[load] the file system of {self.path} refuses direct reads: it is read through the "
            "page cache, which is dropped behind the reader"
        )

    def read(self, into: memoryview, begin: int) -> int:
        """Bytes read from ``begin`` on; fewer than asked for only where the file ends."""
        got = 0
        while got < len(into):
            direct = self.direct
            try:
                count = os.preadv(self.fd, [into[got:]], begin + got)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._go_on_buffered()
                    continue
                raise _unreadable(self.path, error) from error
            got += count
            if count == 0 or (direct and count % PAGE):
                break
        return got

    def _go_on_buffered(self) -> None:
        with self._lock:
            if self.direct:
                self._refused()
                plain = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(plain, self.fd, inheritable=False)
                os.close(plain)

    def drop(self, end: int = 0) -> None:
        """Give the pages up to ``end`` (0: all) back, if reads left any. From the front each time:
        a large page that reaches beyond a range stays with it."""
        if not self.direct:
            os.posix_fadvise(self.fd, 0, end, os.POSIX_FADV_DONTNEED)


class Reader:
    """Hands out ``blocks`` in order, each with the number of the slot that it lies in.

    ``slots`` are writable, page-aligned and as long as the longest block; the taker gives each back
    by ``release``. Raises LoadError for a file that cannot be read or is shorter than it was.
    ``keep`` leaves what is read in the page cache, and reads through it.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        slots: Sequence[memoryview],
        *,
        threads: int,
        direct: bool = True,
        keep: bool = False,
        told: Callable[[str], object] = print,
    ) -> None:
        self._blocks = iter(blocks)
        self._slots = slots
        self._free = deque(range(len(slots)))
        self._direct, self._keep, self._told = direct and not keep, keep, told
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="load")
        self._coming: deque[tuple[Block, int, Future[None]]] = deque()
        self._files: dict[Path, _File] = {}
        self._out: dict[int, Block] = {}

    def __iter__(self) -> Generator[tuple[Block, int], None, None]:
        try:
            while True:
                self._ask()
                if not self._coming:
                    return
                block, slot, future = self._coming.popleft()
                future.result()
                self._out[slot] = block
                yield block, slot
        finally:
            self.close()

    def release(self, slot: int) -> None:
        """The slot may be written again."""
        block = self._out.pop(slot)
        if not self._keep:
            self._files[block.file].drop(block.end)
        self._free.append(slot)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            if not self._keep:
                file.drop()
            os.close(file.fd)
        self._files.clear()

    def _ask(self) -> None:
        while self._free:
            block = next(self._blocks, None)
            if block is None:
                return
            slot = self._free.popleft()
            file = self._files.get(block.file)
            if file is None:
                file = self._files[block.file] = _File(block.file, self._direct, self._told)
            self._coming.append((block, slot, self._pool.submit(self._read, file, block, slot)))

    def _read(self, file: _File, block: Block, slot: int) -> None:
        got = file.read(self._slots[slot][: block.length], block.begin)
        if got < block.needed:
            raise LoadError(
                f"{block.file}: ended at byte {block.begin + got}, needed "
                f"{block.begin + block.needed}: it was changed while it was read. Download this "
                "file again"
            )


def _unreadable(path: Path, error: OSError) -> LoadError:
    return LoadError(
        f"{path}: cannot be read ({error.strerror or error}). Check the disk, or the share that "
        "the file comes from, and the kernel's log (dmesg)"
    )

"""Writing a long file fast: past the page cache, from two buffers of which one is filled while the other is on its way.

Buffered writes copy every byte into fresh pages of the page cache, push out what others keep there, and wait for all of
it at the fsync; on fast disks that is what costs the time. With ``O_DIRECT`` the disk takes the bytes from the buffer.
It wants addresses, offsets and lengths that are multiples of a block, hence the buffers; the end of the file, and
everything on a file system that does not do it, is written the ordinary way.
"""

from __future__ import annotations

import errno
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

import numpy as np

from checkpoint.fileops import FileOps, write_all

BLOCK = 4096
BUFFER = 16 << 20  # bytes; there are two


class Stream:
    """Appends to an empty file of a known size. One thread of its own writes, in order; errors come up in the next call.

    Use it in a ``with`` statement; :meth:`finish` before its end, or the file is not whole.
    """

    def __init__(self, ops: FileOps, file: BinaryIO, size: int) -> None:
        room = max(BLOCK, min(BUFFER, -(-size // BLOCK) * BLOCK))
        self._ops, self._file = ops, file
        self._buffers = [np.frombuffer(mmap.mmap(-1, room), dtype=np.uint8) for _ in range(2 if size > room else 1)]
        self._busy: list[Future[None] | None] = [None] * len(self._buffers)
        self._at = self._used = 0  # the buffer being filled, and how far
        self._direct = ops.direct(file, True)
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def append(self, data: memoryview) -> None:
        """Copy ``data`` to the end. It may change afterwards."""
        source = np.frombuffer(data, dtype=np.uint8) if len(data) else np.empty(0, np.uint8)
        while len(source):
            buffer = self._buffers[self._at]
            if self._used == 0:
                self._wait(self._at)
            n = min(len(source), len(buffer) - self._used)
            np.copyto(buffer[self._used : self._used + n], source[:n])
            source, self._used = source[n:], self._used + n
            if self._used == len(buffer):
                self._send()

    def finish(self) -> None:
        """Return when everything was handed to the file system (not: is on the disk; fsync comes after it)."""
        if self._used:
            self._send()
        for at in range(len(self._busy)):
            self._wait(at)

    def _send(self) -> None:
        self._busy[self._at] = self._pool.submit(self._write, self._buffers[self._at][: self._used].data)
        self._at, self._used = (self._at + 1) % len(self._buffers), 0

    def _wait(self, at: int) -> None:
        busy, self._busy[at] = self._busy[at], None
        if busy is not None:
            busy.result()

    def _write(self, data: memoryview) -> None:
        while self._direct and len(data) >= BLOCK:
            try:
                written = self._ops.write(self._file, data[: len(data) // BLOCK * BLOCK])
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                written = 0  # the flag was accepted and the write is not: larger blocks, say
            data = data[written:]
            if written == 0 or written % BLOCK:
                self._ordinary()
        if len(data):
            self._ordinary()
            write_all(self._ops, self._file, data)

    def _ordinary(self) -> None:
        if self._direct:
            self._direct = self._ops.direct(self._file, False)

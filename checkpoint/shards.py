"""One rank's file: the safetensors format, written as a stream and read by byte ranges.

The layout is the published one (https://huggingface.co/docs/safetensors): eight bytes little-endian header
length, a JSON header, then the tensors' bytes without gaps. It is written here and not by the library because
each slice is hashed while it is written, piece by piece, through :class:`~checkpoint.fileops.FileOps`; any
safetensors reader opens the result. Reading goes by the offsets in the manifest, so nothing in a file is trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint.digests import PIECE, combined, fill, pieces, writers
from checkpoint.fileops import FileOps, naming
from checkpoint.layout import CheckpointError
from checkpoint.stream import Stream

# torch's name (used in the manifest) → the tag in the shard's own header
DTYPE_TAGS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``. Raises :class:`CheckpointError` for dtypes the format does not
    hold.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_TAGS:
        raise CheckpointError(f"dtype {name} cannot be saved; the format holds {', '.join(DTYPE_TAGS)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`, for names out of ``DTYPE_TAGS``."""
    return getattr(torch, name)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage seen as integers of the same size, so that copies and comparisons are of bits.

    Works on strided views and 0-dim tensors; ``-0.0`` and each NaN keep their patterns.
    """
    return tensor.detach().view(_SAME_SIZE_INTEGER[tensor.element_size()])


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a CPU tensor in row-major order as bytes; no copy when it is contiguous."""
    return _view(_flat(tensor))


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The same in pieces of ``PIECE`` bytes. Of a GPU's tensor one piece after the other comes to the host; of a CPU's
    nothing is copied, unless it is not contiguous.
    """
    flat = _flat(tensor)
    for at, n in pieces(len(flat)):
        yield _view(flat[at : at + n].cpu())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = as_integers(tensor).contiguous()
    # one element can be "contiguous" with any stride
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset()).view(torch.uint8)


def _view(flat: torch.Tensor) -> memoryview:
    """The storage of a flat uint8 tensor, which memoryview cannot express when there is none."""
    return flat.numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True)
class Segment:
    """One slice in a shard: its key, dtype name, shape, and where its bytes begin *in the data part*."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @property
    def header_entry(self) -> bytes:
        """This slice's piece of the header, byte for byte."""
        span = [self.begin, self.begin + self.nbytes]
        entry = {"dtype": DTYPE_TAGS[self.dtype], "shape": list(self.shape), "data_offsets": span}
        return f"{json.dumps(self.key)}:{json.dumps(entry, separators=(',', ':'))}".encode()


def header(segments: Sequence[Segment]) -> bytes:
    """Length and JSON header, padded with spaces so that the data part starts at a multiple of 8."""
    entries = [b'"__metadata__":{"format":"pt"}', *(segment.header_entry for segment in segments)]
    text = b"{" + b",".join(entries) + b"}"
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Shard:
    """A shard on the disk: its size, the length and SHA-256 of its header, and the digest of each slice."""

    size: int
    header: int
    header_sha256: str
    digests: list[str]


def write_shard(ops: FileOps, path: Path, segments: Sequence[Segment], tensors: Iterable[torch.Tensor]) -> Shard:
    """Write and fsync one shard; ``tensors`` may be made one after the other, and then none is kept longer than it takes.

    The digests are of the bytes in memory, never of what the file system gives back; they are made on threads
    (:func:`~checkpoint.digests.writers`) while the bytes are written. Memory beyond the tensors' own: two buffers of
    ``stream.BUFFER`` bytes, and of tensors on a GPU some pieces of ``PIECE`` bytes, two per thread; a strided tensor is copied
    whole. Raises :class:`CheckpointError` naming ``path`` and the cause.
    """
    head = header(segments)
    size = len(head) + sum(segment.nbytes for segment in segments)
    kept = isinstance(tensors, Sequence)
    with naming("write", path):
        file = ops.create(path)
        try:
            with ThreadPoolExecutor(writers()) as pool, Stream(ops, file, size) as stream:
                stream.append(memoryview(head))
                waiting: deque[Future[Any]] = deque()
                made = []
                for tensor in tensors:
                    parts = []
                    for piece in host_pieces(tensor):
                        parts.append(pool.submit(hashlib.sha256, piece))
                        stream.append(piece)
                        if tensor.device.type != "cpu" or not kept:  # a copy of ours: no more than the threads need
                            waiting.append(parts[-1])
                            if len(waiting) > 2 * writers():
                                waiting.popleft().result()
                    made.append(parts)
                    del tensor, piece  # before the next one is made
                stream.finish()
                digests = [combined([part.result().digest() for part in parts]) for parts in made]
            ops.fsync(file)
        finally:
            file.close()
    return Shard(size, len(head), hashlib.sha256(head).hexdigest(), digests)


def read_block(descriptor: int, offset: int, shape: Sequence[int], take: Sequence[slice], out: torch.Tensor) -> bool:
    """Copy ``take`` (indices per dimension) of the slice of ``shape`` at ``offset`` into ``out``; False where the file
    ends early.

    Rows that are wanted whole go straight into ``out`` when it is a contiguous CPU tensor. Else they come through a
    buffer of at most ``PIECE`` bytes, or of one element.
    """
    if not out.numel():
        return True
    if out.device.type == "cpu" and out.is_contiguous() and _whole(shape[1:], take[1:]):
        view = _view(_flat(out))
        return fill(descriptor, offset + (take[0].start if shape else 0) * _row(shape, out), view) == len(view)
    if not shape:
        return _through(descriptor, offset, shape, take, out)
    row, first = _row(shape, out), take[0].start
    step = PIECE // row
    if step == 0:  # not even one row: row by row, each in pieces
        return all(
            read_block(descriptor, offset + (first + i) * row, shape[1:], take[1:], out[i]) for i in range(out.shape[0])
        )
    for i in range(0, out.shape[0], step):
        n = min(step, out.shape[0] - i)
        inside = (slice(0, n), *take[1:])
        if not _through(descriptor, offset + (first + i) * row, (n, *shape[1:]), inside, out[i : i + n]):
            return False
    return True


def _through(descriptor: int, offset: int, shape: Sequence[int], take: Sequence[slice], out: torch.Tensor) -> bool:
    raw = torch.empty(math.prod(shape) * out.element_size(), dtype=torch.uint8)
    if fill(descriptor, offset, _view(raw)) != raw.numel():
        return False
    out.copy_(raw.view(out.dtype).reshape(tuple(shape))[tuple(take)])
    return True


def _row(shape: Sequence[int], out: torch.Tensor) -> int:
    return math.prod(shape[1:]) * out.element_size()


def _whole(shape: Sequence[int], take: Sequence[slice]) -> bool:
    return all(one.start == 0 and one.stop == size for one, size in zip(take, shape, strict=True))

"""One rank's file: the safetensors format, written as a stream and read by byte ranges.

The layout is the published one (https://huggingface.co/docs/safetensors): eight bytes little-endian header
length, a JSON header, then the tensors' bytes without gaps. It is written here and not by the library because
each slice and the file are hashed while they are written, one tensor at a time, through
:class:`~checkpoint.fileops.FileOps`; any safetensors reader opens the result. Reading goes by the offsets in
the manifest, so nothing in a file is trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from checkpoint.fileops import FileOps, naming, write_all
from checkpoint.layout import CheckpointError

CHUNK = 8 << 20  # bytes hashed and written at a time

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
    """The tensor's elements in row-major order as bytes on the host; no copy for contiguous CPU tensors."""
    dense = as_integers(tensor).cpu().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # one element can be "contiguous" with any stride
    return _view(flat.view(torch.uint8))


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


def write_shard(
    ops: FileOps, path: Path, segments: Sequence[Segment], tensors: Sequence[torch.Tensor]
) -> tuple[int, str, list[str]]:
    """Write and fsync one shard; returns (file size, SHA-256 of the file, SHA-256 of each slice).

    The digests are of the bytes handed to the file system, never of what it gives back. Raises
    :class:`CheckpointError` naming ``path`` and the cause.
    """
    head = header(segments)
    whole = hashlib.sha256(head)
    size = len(head)
    digests = []
    with naming("write", path):
        file = ops.create(path)
        try:
            write_all(ops, file, memoryview(head))
            for tensor in tensors:
                data = host_bytes(tensor)
                digest = hashlib.sha256()
                for at in range(0, len(data), CHUNK):
                    chunk = data[at : at + CHUNK]
                    write_all(ops, file, chunk)
                    digest.update(chunk)
                    whole.update(chunk)
                size += len(data)
                digests.append(digest.hexdigest())
            ops.fsync(file)
        finally:
            file.close()
    return size, whole.hexdigest(), digests


def chunks(file: BinaryIO, offset: int, nbytes: int) -> Iterator[bytes]:
    """The bytes ``[offset, offset + nbytes)``, fewer where the file ends early."""
    file.seek(offset)
    while nbytes > 0:
        piece = file.read(min(CHUNK, nbytes))
        if not piece:
            return
        nbytes -= len(piece)
        yield piece


def range_sha256(file: BinaryIO, offset: int, nbytes: int) -> str:
    """SHA-256 (hex) of a byte range."""
    digest = hashlib.sha256()
    for piece in chunks(file, offset, nbytes):
        digest.update(piece)
    return digest.hexdigest()


def read_segment(
    file: BinaryIO, offset: int, dtype: str, shape: tuple[int, ...], sha256: str
) -> torch.Tensor | None:
    """The slice at ``offset`` (from the file's beginning) as a new CPU tensor, or None when its bytes do not
    match.
    """
    nbytes = math.prod(shape) * torch_dtype(dtype).itemsize
    raw = torch.empty(nbytes, dtype=torch.uint8)
    view = _view(raw)
    at = 0
    for piece in chunks(file, offset, nbytes):
        view[at : at + len(piece)] = piece
        at += len(piece)
    if at != nbytes or hashlib.sha256(view).hexdigest() != sha256:
        return None
    return raw.view(torch_dtype(dtype)).reshape(shape)

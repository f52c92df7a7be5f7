"""Token files in Megatron's ``.bin``/``.idx`` format (version 1), byte for byte.

``PREFIX.bin`` holds the tokens of all sequences one after the other. ``PREFIX.idx``, little-endian:

    bytes  content
    9      magic ``MMIDIDX\\0\\0``
    8      version, uint64: 1
    1      dtype code, uint8: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
    8      number of sequences n, uint64
    8      number of document indices d, uint64 (documents + 1)
    4 n    tokens per sequence, int32
    8 n    offset of each sequence in the .bin, in bytes, int64
    8 d    document indices, int64: document i is sequences [index[i], index[i + 1])

Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``. Its optional trailing ``sequence modes``
(multimodal data) are refused.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from qeffect_lm.data.files import fsync_directory, sha256_of_files, temporary_name, write_atomic, write_errors
from qeffect_lm.errors import UsageError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_MAX_SEQUENCE = 2**31 - 1
_BLOCK = 1 << 22  # tokens, or entries of the index, at a time


def bin_path(prefix: Path | str) -> Path:
    """The token file of ``prefix``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """The index file of ``prefix``."""
    return Path(f"{prefix}.idx")


def dtype_for_vocab(vocab_size: int) -> np.dtype:
    """uint16 where every id in ``[0, vocab_size)`` fits (vocabularies up to 65536), else int32, as Megatron
    does."""
    if not 0 < vocab_size <= 2**31:
        raise UsageError(f"vocabulary size {vocab_size} cannot be stored: it must be 1 to 2147483648")
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<i4")


def sequence_offsets(sizes: npt.NDArray[np.int32], itemsize: int) -> npt.NDArray[np.int64]:
    """Byte offset of each sequence in the ``.bin``, int64 ``[sequences]``, for ``sizes`` in tokens, int32."""
    offsets = np.zeros(len(sizes), dtype=np.int64)
    # Summed in int64 from the start: int32 wraps at 2 GiB.
    np.cumsum(sizes[:-1], dtype=np.int64, out=offsets[1:])
    return offsets * np.int64(itemsize)


class IndexedWriter:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx``; a context manager.

    Leaving the ``with`` block normally commits: both files are complete, synced and renamed into place, the
    index last. An exception, or a crash, leaves no new pair (a crash between the renames leaves no index,
    which a reader names). ``vocab_size`` fixes the dtype; ids outside it are refused.
    """

    def __init__(self, prefix: Path | str, *, vocab_size: int) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = dtype_for_vocab(vocab_size)
        self._sizes = array("i")
        self._documents = array("q", [0])
        self._temporary = temporary_name(bin_path(prefix))
        with write_errors(self.prefix):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._temporary, "wb")

    @property
    def num_documents(self) -> int:
        """Documents written so far, empty ones included."""
        return len(self._documents) - 1

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document of one sequence, ``tokens`` [n]; with n = 0 it is a document without a
        sequence."""
        values = np.asarray(tokens)
        if values.size:
            self._append(values)
        self._documents.append(len(self._sizes))

    def extend(self, dataset: IndexedDataset) -> None:
        """Appends all documents of ``dataset``, with their sequences and boundaries."""
        first = len(self._sizes)
        for start in range(0, dataset.num_tokens, _BLOCK):
            self._write(dataset.tokens[start : start + _BLOCK])
        self._sizes.frombytes(dataset.sizes.astype(np.int32).tobytes())
        self._documents.frombytes((dataset.document_index[1:] + first).astype(np.int64).tobytes())

    def add_documents(self, documents: Sequence[np.ndarray], end: np.ndarray | None = None) -> None:
        """:meth:`add_document` of each of integers ``[n]``, followed by ``end``; one check and one write for all."""
        more = [] if end is None or not len(end) else [end]
        pieces = [piece for document in documents for piece in (document, *more)]
        if pieces:
            self._write(np.concatenate(pieces))
        for document in documents:
            size = len(document) + sum(map(len, more))
            if size > _MAX_SEQUENCE:
                raise _too_long(size)
            if size:
                self._sizes.append(size)
            self._documents.append(len(self._sizes))

    def close(self) -> None:
        """Commits both files; raises QEffectError when they cannot be written (then nothing is left
        behind)."""
        if self._file.closed:
            return
        target = bin_path(self.prefix)
        try:
            with write_errors(target):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                # Without its old index a half-replaced pair is incomplete, never an old index over new
                # tokens.
                idx_path(self.prefix).unlink(missing_ok=True)
                os.replace(self._temporary, target)
                fsync_directory(target.parent)
            write_atomic(idx_path(self.prefix), self._index_bytes())
        finally:
            self.discard()

    def discard(self) -> None:
        """Drops what was written and is not committed."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _append(self, values: np.ndarray) -> None:
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise UsageError(
                f"tokens must be a list of integers, not {values.ndim}-dimensional {values.dtype}"
            )
        if len(values) > _MAX_SEQUENCE:
            raise _too_long(len(values))
        self._write(values)
        self._sizes.append(len(values))

    def _write(self, values: np.ndarray) -> None:
        """Tokens at the end of the file, checked."""
        if len(values):
            for extreme in (int(values.min()), int(values.max())):
                if not 0 <= extreme < self.vocab_size:
                    raise UsageError(
                        f"token id {extreme} does not fit {self.prefix}: its vocabulary has "
                        f"{self.vocab_size} ids (0 to {self.vocab_size - 1}, stored as {self.dtype.name}); "
                        "give the writer the tokenizer's vocabulary size"
                    )
        with write_errors(self._temporary):
            self._file.write(values.astype(self.dtype, copy=False).tobytes())

    def _index_bytes(self) -> bytes:
        sizes = np.array(self._sizes, dtype="<i4")
        code = next(code for code, dtype in _CODES.items() if dtype == self.dtype)
        header = HEADER.pack(MAGIC, VERSION, code, len(sizes), len(self._documents))
        offsets = sequence_offsets(sizes, self.dtype.itemsize).astype("<i8")
        return header + sizes.tobytes() + offsets.tobytes() + np.array(self._documents, dtype="<i8").tobytes()


class IndexedDataset:
    """A memory-mapped token set, read from ``PREFIX.bin`` and ``PREFIX.idx``.

    Attributes: ``tokens`` [num_tokens], the whole stream, read-only, of the file's dtype; ``sizes`` int32 and ``offsets`` int64
    (bytes) per sequence; ``document_index`` int64 [num_documents + 1], in sequences; all of them mapped. ``dataset[i]`` is
    sequence i and ``document(i)`` the tokens of document i, both views of ``tokens``. Pickled, it is opened again.

    Args:
        empty: take a set without tokens too.

    Raises UsageError, naming the file, where one is missing, is of another format or version, contradicts itself, or is shorter
    or longer than the index says, and where there are no tokens.
    """

    def __init__(self, prefix: Path | str, *, empty: bool = False) -> None:
        self.prefix = Path(prefix)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        missing = [str(path) for path in (self._idx, self._bin) if not path.is_file()]
        if missing:
            raise UsageError(
                f"dataset {prefix}: {' and '.join(missing)} not found; give the prefix of a .bin/.idx pair, "
                "or make one with python -m tools.preprocess"
            )
        try:
            self._read_index()
            length, expected = self._bin.stat().st_size, self.num_tokens * self.dtype.itemsize
            if length != expected:
                raise self._bad(
                    self._bin,
                    f"has {length} bytes where its index lists {self.num_tokens} tokens of "
                    f"{self.dtype.itemsize} bytes, {expected} bytes",
                )
            if not self.num_tokens and not empty:
                raise UsageError(
                    f"dataset {prefix} is empty: {self._idx} lists no tokens; check the input of the "
                    "preprocessing"
                )
            self.tokens: np.ndarray = _mapped(self._bin, self.dtype, self.num_tokens)
        except OSError as error:
            raise UsageError(f"dataset {prefix} cannot be read: {error}") from error
        self._hash: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix,)

    @property
    def num_sequences(self) -> int:
        """Number of sequences; also ``len(dataset)``."""
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_index) - 1

    @property
    def files(self) -> tuple[Path, Path]:
        """The index file and the token file."""
        return self._idx, self._bin

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, i: int) -> np.ndarray:
        size = int(self.sizes[i])
        start = int(self.offsets[i]) // self.dtype.itemsize
        return self.tokens[start : start + size]

    def document(self, i: int) -> np.ndarray:
        """The tokens of document ``i`` [n], its sequences joined."""
        first, last = int(self.document_index[i]), int(self.document_index[i + 1])
        if first == last:
            return self.tokens[:0]
        start = int(self.offsets[first]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[first:last].sum(dtype=np.int64))]

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Where each document begins in ``tokens``, and where the last one ends: int64 ``[num_documents + 1]``."""
        starts = np.array(self.document_index)
        for block in range(0, len(starts), _BLOCK):
            part = starts[block : block + _BLOCK]
            ends = part == self.num_sequences
            part[~ends] = self.offsets[part[~ends]] // self.dtype.itemsize
            part[ends] = self.num_tokens
        return starts

    def content_hash(self) -> str:
        """SHA-256 (hex) of the index file followed by the token file; read once per object."""
        if self._hash is None:
            self._hash = sha256_of_files([self._idx, self._bin])
        return self._hash

    def _read_index(self) -> None:
        length = self._idx.stat().st_size
        with open(self._idx, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise self._bad(self._idx, f"has {len(header)} bytes, fewer than the header's {HEADER.size}")
        magic, version, code, sequences, documents = HEADER.unpack(header)
        if magic != MAGIC:
            raise self._bad(self._idx, "does not begin with MMIDIDX: it is no index of this format")
        if version != VERSION:
            raise self._bad(
                self._idx, f"has format version {version}; this program reads version {VERSION}"
            )
        if code not in _CODES:
            raise self._bad(
                self._idx, f"has dtype code {code}, which is none of the integer types {sorted(_CODES)}"
            )
        expected = HEADER.size + 12 * sequences + 8 * documents
        if length != expected:
            raise self._bad(
                self._idx,
                f"has {length} bytes where its counts ({sequences} sequences, {documents} "
                f"document indices) make {expected}",
            )
        self.dtype = _CODES[code]
        at = HEADER.size
        self.sizes = _mapped(self._idx, np.dtype("<i4"), sequences, at)
        self.offsets = _mapped(self._idx, np.dtype("<i8"), sequences, at + 4 * sequences)
        self.document_index = _mapped(self._idx, np.dtype("<i8"), documents, at + 12 * sequences)
        self._check_index()

    def _check_index(self) -> None:
        """Counts the tokens; block by block, so that the memory it takes does not grow with the index."""
        self.num_tokens = 0
        for start in range(0, self.num_sequences, _BLOCK):
            sizes, offsets = self.sizes[start : start + _BLOCK], self.offsets[start : start + _BLOCK]
            if sizes.min() < 0:
                raise self._bad(self._idx, f"sequence {start + int(sizes.argmin())} has a negative size")
            due = sequence_offsets(sizes, self.dtype.itemsize) + self.num_tokens * self.dtype.itemsize
            wrong = np.flatnonzero(offsets != due)
            if len(wrong):
                raise self._bad(
                    self._idx, f"the offset of sequence {start + int(wrong[0])} is not where the one before it ends"
                )
            self.num_tokens += int(sizes.sum(dtype=np.int64))
        index, n = self.document_index, self.num_sequences
        falls = any((np.diff(index[start : start + _BLOCK + 1]) < 0).any() for start in range(0, len(index), _BLOCK))
        if not len(index) or index[0] != 0 or index[-1] != n or falls:
            raise self._bad(
                self._idx, f"the document indices do not rise from 0 to its {n} sequences"
            )

    @staticmethod
    def _bad(path: Path, problem: str) -> UsageError:
        return UsageError(
            f"{path}: {problem}; the file is damaged or incomplete: copy it again or repeat the preprocessing"
        )


def _too_long(size: int) -> UsageError:
    return UsageError(
        f"a sequence of {size} tokens is too long for the format: split the document (at most {_MAX_SEQUENCE})"
    )


def _mapped(path: Path, dtype: np.dtype, count: int, offset: int = 0) -> np.ndarray:
    """``count`` numbers of a file, read-only; nothing of it is read yet."""
    if not count:  # nothing to map
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))

"""Token files: Megatron's format byte for byte, its limits, and every way a pair can be damaged."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.data.files import write_atomic
from qeffect_lm.data.indexed import (
    IndexedDataset,
    IndexedWriter,
    bin_path,
    dtype_for_vocab,
    idx_path,
    sequence_offsets,
)
from qeffect_lm.errors import QEffectError, UsageError


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 100) -> IndexedDataset:
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def documents_of(dataset: IndexedDataset) -> list[list[int]]:
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]


def test_index_bytes_are_megatrons(tmp_path: Path) -> None:
    """The reference pair: 82 bytes of index with Megatron's digest, and the tokens little-endian."""
    dataset = write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    index = idx_path(tmp_path / "a").read_bytes()
    assert len(index) == 82
    assert (
        hashlib.sha256(index).hexdigest()
        == "416ba3f8d9601192c5b0c9424ce7e61d6ac2d9d464dba8e5ee55deb8247de3aa"
    )
    assert bin_path(tmp_path / "a").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert documents_of(dataset) == [[1, 2, 3], [4, 5]]
    assert (dataset.num_tokens, dataset.num_sequences, len(dataset), dataset.dtype) == (5, 2, 2, np.uint16)


@given(
    documents=st.lists(st.lists(st.integers(0, 70000), max_size=5), min_size=1, max_size=8),
    wide=st.booleans(),
)
@settings(max_examples=60)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], wide: bool) -> None:
    vocab_size = 70001 if wide else 65536
    documents = [[t if wide else t % 65536 for t in d] for d in documents]
    prefix = tmp_path_factory.mktemp("data") / "a"
    if not any(documents):
        with pytest.raises(UsageError, match="lists no tokens"):
            write(prefix, documents, vocab_size)
        return
    dataset = write(prefix, documents, vocab_size)
    assert documents_of(dataset) == documents
    assert [dataset[i].tolist() for i in range(len(dataset))] == [d for d in documents if d]
    assert dataset.tokens.tolist() == [t for d in documents for t in d]


def test_empty_documents_and_merge(tmp_path: Path) -> None:
    """D1: [[], [1, 2]] merged with [[3]] keeps every boundary, the empty first document included."""
    first = write(tmp_path / "a", [[], [1, 2]])
    second = write(tmp_path / "b", [[3]])
    assert first.document_index.tolist() == [0, 0, 1]
    with IndexedWriter(tmp_path / "c", vocab_size=100) as writer:
        writer.extend(first)
        writer.extend(second)
        assert writer.num_documents == 3
    merged = IndexedDataset(tmp_path / "c")
    assert documents_of(merged) == [[], [1, 2], [3]]
    assert merged.document_index.tolist() == [0, 0, 1, 2]
    assert (
        idx_path(tmp_path / "c").read_bytes()
        == idx_path(write(tmp_path / "d", [[], [1, 2], [3]])._idx.with_suffix("")).read_bytes()
    )


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Files of Megatron's preprocessing can have several sequences in a document; merging keeps them
    apart."""
    write(tmp_path / "a", [[1, 2, 3], [4, 5], [6]])
    raw = bytearray(idx_path(tmp_path / "a").read_bytes())
    raw[34 + 3 * 12 :] = struct.pack("<3q", 0, 2, 3)
    raw[26:34] = struct.pack("<Q", 3)
    idx_path(tmp_path / "a").write_bytes(bytes(raw[: 34 + 36 + 24]))
    dataset = IndexedDataset(tmp_path / "a")
    assert documents_of(dataset) == [[1, 2, 3, 4, 5], [6]]
    with IndexedWriter(tmp_path / "b", vocab_size=100) as writer:
        writer.add_document([7])
        writer.extend(dataset)
    merged = IndexedDataset(tmp_path / "b")
    assert documents_of(merged) == [[7], [1, 2, 3, 4, 5], [6]]
    assert merged.sizes.tolist() == [1, 3, 2, 1]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65535, "uint16"), (65536, "uint16"), (65537, "int32")])
def test_dtype_holds_the_largest_id(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    """D2: ids 65535 and 65536 get a dtype that holds them."""
    assert dtype_for_vocab(vocab_size).name == dtype
    dataset = write(tmp_path / "a", [[0, vocab_size - 1]], vocab_size)
    assert dataset.dtype.name == dtype
    assert dataset.tokens.tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("token", [65536, -1, 2**40])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, token: int) -> None:
    """D2: an id outside the vocabulary is refused and named, never wrapped."""
    with pytest.raises(UsageError, match=str(token)):
        write(tmp_path / "a", [[1, token]], 65536)
    assert list(tmp_path.iterdir()) == []


def test_tokens_that_are_no_ids_are_refused(tmp_path: Path) -> None:
    for tokens in ([1.5, 2.0], [[1, 2], [3, 4]], [True]):
        with pytest.raises(UsageError, match="list of integers"):
            write(tmp_path / "a", [tokens])  # type: ignore[list-item]
    for vocab_size in (0, 2**31 + 1):
        with pytest.raises(UsageError, match="vocabulary size"):
            IndexedWriter(tmp_path / "a", vocab_size=vocab_size)


def test_offsets_past_two_gigabytes() -> None:
    """D3: offsets are summed and stored in 64 bits."""
    sizes = np.full(5, 2**30, dtype=np.int32)
    offsets = sequence_offsets(sizes, 4)
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [i * 2**32 for i in range(5)]
    assert sequence_offsets(np.zeros(0, dtype=np.int32), 2).tolist() == []


def test_reading_past_two_gigabytes(tmp_path: Path) -> None:
    """D3: a (sparse) token file of 4 GiB and a little is read at its end."""
    sizes = np.array([2**30, 2**30, 3], dtype="<i4")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    offsets = sequence_offsets(sizes, 2)
    index = header + sizes.tobytes() + offsets.tobytes() + np.arange(4, dtype="<i8").tobytes()
    idx_path(tmp_path / "a").write_bytes(index)
    with open(bin_path(tmp_path / "a"), "wb") as file:
        try:
            file.seek(2**32)
            file.write(struct.pack("<3H", 7, 8, 9))
            file.flush()
        except OSError as error:
            pytest.skip(f"no sparse files of 4 GiB here: {error}")
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset[2].tolist() == [7, 8, 9]
    assert dataset.document(2).tolist() == [7, 8, 9]
    assert dataset.tokens[2**31 - 1 :].tolist() == [0, 7, 8, 9]


def test_content_hash_sees_index_and_tokens(tmp_path: Path) -> None:
    base = write(tmp_path / "a", [[1, 2], [3]]).content_hash()
    assert base == write(tmp_path / "b", [[1, 2], [3]]).content_hash()
    index, tokens = idx_path(tmp_path / "a").read_bytes(), bin_path(tmp_path / "a").read_bytes()
    assert base == hashlib.sha256(index + tokens).hexdigest()
    assert write(tmp_path / "c", [[1], [2, 3]]).content_hash() != base  # same tokens, other documents
    assert write(tmp_path / "d", [[1, 2], [4]]).content_hash() != base


def test_an_exception_leaves_the_old_pair(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "a", vocab_size=100) as writer:
        writer.add_document([3, 4, 5])
        raise RuntimeError
    assert documents_of(IndexedDataset(tmp_path / "a")) == [[1, 2]]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", [[1, 2]])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = IndexedWriter(tmp_path / "a", vocab_size=100)
    writer.add_document([3])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QEffectError, match=r"a\.bin: No space left on device.*free space") as caught:
        writer.close()
    assert not isinstance(caught.value, UsageError)
    assert documents_of(IndexedDataset(tmp_path / "a")) == [[1, 2]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_crash_between_the_renames_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old index never ends up over new tokens of the same length."""
    write(tmp_path / "a", [[1, 2], [3]])
    writer = IndexedWriter(tmp_path / "a", vocab_size=100)
    writer.add_document([4, 5, 6])
    monkeypatch.setattr("qeffect_lm.data.indexed.write_atomic", lambda path, data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.close()
    with pytest.raises(UsageError, match=r"a\.idx not found"):
        IndexedDataset(tmp_path / "a")


def test_a_failing_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "a", b"o", memoryview(b"ld"))

    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(QEffectError, match="a: Disk quota exceeded"):
        write_atomic(tmp_path / "a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QEffectError, match="cannot write"):
        IndexedWriter(tmp_path / "file" / "a", vocab_size=100)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.idx and .*a\.bin not found.*tools\.preprocess"):
        IndexedDataset(tmp_path / "a")
    write(tmp_path / "a", [[1]])
    bin_path(tmp_path / "a").unlink()
    with pytest.raises(UsageError, match=r"a\.bin not found"):
        IndexedDataset(tmp_path / "a")


def replaced(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


DAMAGE = {
    "empty": (lambda raw: b"", "fewer than the header"),
    "short header": (lambda raw: raw[:20], "fewer than the header"),
    "truncated": (lambda raw: raw[:-1], "has 81 bytes where its counts"),
    "longer": (lambda raw: raw + b"\0", "has 83 bytes where its counts"),
    "magic": (lambda raw: b"X" + raw[1:], "does not begin with MMIDIDX"),
    "version": (lambda raw: replaced(raw, 9, struct.pack("<Q", 2)), "format version 2"),
    "dtype": (lambda raw: replaced(raw, 17, b"\x09"), "dtype code 9"),
    "floats": (lambda raw: replaced(raw, 17, b"\x07"), "dtype code 7"),
    "counts": (lambda raw: replaced(raw, 18, struct.pack("<Q", 2**60)), "where its counts"),
    "negative size": (
        lambda raw: replaced(raw, 34, struct.pack("<2i", -3, 8)),
        "sequence 0 has a negative size",
    ),
    "offset": (lambda raw: replaced(raw, 50, struct.pack("<q", 4)), "offset of sequence 1"),
    "document start": (lambda raw: replaced(raw, 58, struct.pack("<q", 1)), "document indices"),
    "document order": (lambda raw: replaced(raw, 66, struct.pack("<q", 3)), "document indices"),
    "document end": (lambda raw: replaced(raw, 74, struct.pack("<q", 1)), "document indices"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_index_is_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    damage, message = DAMAGE[kind]
    path = idx_path(tmp_path / "a")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=rf"a\.idx: .*{message}.*damaged or incomplete"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("change", [-1, 1, -10])
def test_a_token_file_of_wrong_length_is_named(tmp_path: Path, change: int) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    path = bin_path(tmp_path / "a")
    raw = path.read_bytes() + b"\0"
    path.write_bytes(raw[: 10 + change])
    with pytest.raises(UsageError, match=rf"a\.bin: has {10 + change} bytes where its index lists 5 tokens"):
        IndexedDataset(tmp_path / "a")

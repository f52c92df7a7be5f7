"""Packing: every pair of neighbours in a document is a target once, nothing else is; and the indices that this takes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.data import index as module
from qeffect_lm.data.index import IndexCache, content_hash, document_starts
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from qeffect_lm.data.packing import Samples
from qeffect_lm.errors import QEffectError, UsageError


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 10_000) -> IndexedDataset:
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        writer.add_documents([np.array(document, dtype=np.int64) for document in documents])
    return IndexedDataset(prefix)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths, in which every token is another one."""
    at = np.cumsum([0, *lengths])
    return [list(range(at[i], at[i + 1])) for i in range(len(lengths))]


def pairs_of(samples: Samples) -> Counter[tuple[int, int]]:
    """(input, target) of all targets that count."""
    rows = samples.read(np.arange(samples.size))
    row, place = np.nonzero(rows.mask)
    return Counter(zip(rows.tokens[row, place].tolist(), rows.tokens[row, place + 1].tolist(), strict=True))


def check_starts(rows: object, places: dict[int, int], tokens: np.ndarray, starts: np.ndarray) -> None:
    """``starts`` is where the run of tokens of one document begins; padding is a document of its own."""
    for row, begin in zip(tokens, starts, strict=True):
        document = [places[int(token)] if token else -1 for token in row[:-1]]
        expected, first = [], 0
        for t, this in enumerate(document):
            if t and this != document[t - 1]:
                first = t
            expected.append(first)
        assert begin.tolist() == expected


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=14),
    seq_len=st.integers(1, 9),
    packing=st.sampled_from(["stream", "whole"]),
)
@settings(max_examples=150, deadline=None)
def test_every_pair_of_a_document_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, packing: str
) -> None:
    """With documents apart the targets are the documents' pairs, each once; the stream leaves out those of its
    remainder. ``starts`` says where each document begins, and ``counted`` needs no tokens to know how many count."""
    documents = [[token + 1 for token in document] for document in numbered(lengths)]
    if sum(lengths) < seq_len + 1 or max(lengths) < 2:
        return
    dataset = write(tmp_path_factory.mktemp("data") / "a", documents)
    samples = Samples(dataset, seq_len, packing, reset=True)
    expected = Counter(pair for document in documents for pair in zip(document, document[1:], strict=False))
    if packing == "stream":
        last = samples.size * seq_len
        expected = Counter({pair: count for pair, count in expected.items() if pair[1] <= last + 1})
    assert pairs_of(samples) == expected
    places = {token: i for i, document in enumerate(documents) for token in document}
    rows = samples.read(np.arange(samples.size))
    assert rows.starts is not None
    check_starts(rows, places, rows.tokens, rows.starts)
    joined = Samples(dataset, seq_len, packing)
    assert joined.read(np.arange(joined.size)).starts is None
    assert set(pairs_of(joined)) >= set(expected)
    for one in (samples, joined):
        numbers = np.arange(one.size)[::-1]
        assert one.counted(numbers) == int(one.read(numbers).mask.sum())
        assert np.array_equal(one.read(numbers[:1]).tokens[0], one.read(np.arange(one.size)).tokens[-1])


def test_whole_documents_are_packed_in_order(tmp_path: Path) -> None:
    """Rows of 7 tokens: as many documents as fit, long ones in pieces that share a token, none of a single token."""
    documents = numbered([3, 4, 1, 0, 5, 16, 2])
    dataset = write(tmp_path / "a", [[t + 1 for t in document] for document in documents])
    rows = Samples(dataset, 6, "whole", reset=True).read(np.arange(5))
    assert rows.tokens.tolist() == [
        [1, 2, 3, 4, 5, 6, 7],
        [9, 10, 11, 12, 13, 0, 0],
        [14, 15, 16, 17, 18, 19, 20],
        [20, 21, 22, 23, 24, 25, 26],
        [26, 27, 28, 29, 30, 31, 0],
    ]
    assert rows.mask.tolist() == [
        [1, 1, 0, 1, 1, 1],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 1, 0],
    ]
    with pytest.raises(UsageError, match="no document of two tokens"):
        Samples(write(tmp_path / "b", [[1], [2]]), 6, "whole")


def test_masks(tmp_path: Path) -> None:
    """PREFIX.mask counts by target, in both packings; another pair's mask is refused."""
    documents = numbered([5, 6, 3])
    dataset = write(tmp_path / "a", documents)
    write(tmp_path / "a.mask", [[token % 2 for token in document] for document in documents])
    for packing in ("stream", "whole"):
        samples = Samples(dataset, 6, packing, reset=True)
        found = pairs_of(samples)
        assert found and all(target % 2 for _, target in found)
        assert samples.counted(np.arange(samples.size)) == sum(found.values())
        assert samples.sha256() == f"{dataset.content_hash()}+{IndexedDataset(tmp_path / 'a.mask').content_hash()}"
    write(tmp_path / "a.mask", [[1] * 5, [1] * 9])
    with pytest.raises(UsageError, match=r"a\.mask is not the mask of"):
        Samples(dataset, 6)


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_entries_are_made_once_and_never_stale(tmp_path: Path) -> None:
    """A second opening makes nothing; other content, another length and a damaged entry do."""
    cache, made = IndexCache(tmp_path / "cache"), []
    real = module._pack

    def counted(starts: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
        made.append(seq_len)
        return real(starts, seq_len)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_pack", counted)
        dataset = write(tmp_path / "a", numbered([5, 6, 3]))
        first = Samples(dataset, 6, "whole", True, cache).read(np.arange(3))
        again = Samples(IndexedDataset(tmp_path / "a"), 6, "whole", True, cache).read(np.arange(3))
        assert made == [6] and np.array_equal(first.tokens, again.tokens)
        Samples(dataset, 5, "whole", True, cache)
        assert made == [6, 5]
        for path in (tmp_path / "cache").glob("*.index"):
            data = bytearray(path.read_bytes())
            data[-70] ^= 1
            path.write_bytes(data[: len(data) - (path.stat().st_size % 2)])
        assert Samples(dataset, 6, "whole", True, cache).size == 3 and made == [6, 5, 6]
        # A sound entry under another's name.
        Samples(dataset, 5, "whole", True, cache)
        assert made.pop() == 5
        entries = (tmp_path / "cache").glob("*.index")
        lengths = {path: path.read_bytes()[:400].partition(b'seq_len\\": ')[2][:1] for path in entries}
        six, five = (next(path for path, length in lengths.items() if length == size) for size in (b"6", b"5"))
        six.write_bytes(five.read_bytes())
        assert Samples(dataset, 6, "whole", True, cache).size == 3 and made.pop() == 6 and made == [6, 5, 6]
        # The same name, sizes and number of tokens, other documents.
        other = write(tmp_path / "a", numbered([6, 5, 3]))
        changed = Samples(other, 6, "whole", True, cache).read(np.arange(3))
        assert made == [6, 5, 6, 6] and not np.array_equal(changed.tokens, first.tokens)


def test_the_digest_follows_the_files(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache")
    dataset = write(tmp_path / "a", [[1, 2, 3]])
    first = content_hash(dataset, cache)
    assert first == dataset.content_hash()
    path = bin_path(tmp_path / "a")
    data = bytearray(path.read_bytes())
    data[0] ^= 4
    path.write_bytes(data)
    assert content_hash(IndexedDataset(tmp_path / "a"), cache) == IndexedDataset(tmp_path / "a").content_hash() != first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexedDataset, "content_hash", lambda self: 1 / 0)  # nothing is read again
        assert content_hash(IndexedDataset(tmp_path / "a"), cache) != first


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    """A folder that cannot be made (a file is in its place): everything is there all the same."""
    (tmp_path / "file").write_text("")
    dataset = write(tmp_path / "a", numbered([5, 6, 3]))
    assert Samples(dataset, 6, "whole", True, IndexCache(tmp_path / "file" / "cache")).size == 3


def _make_slowly(folder: str, count: str) -> None:
    def make() -> dict[str, np.ndarray]:
        with open(count, "a") as file:
            file.write("x")
        time.sleep(1.0)
        return {"values": np.arange(5)}

    assert IndexCache(Path(folder)).get({"what": "test"}, make)["values"].tolist() == [0, 1, 2, 3, 4]


def test_one_process_makes_what_the_others_wait_for(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_make_slowly, args=(str(tmp_path / "c"), str(tmp_path / "n"))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "n").read_text() == "x"


def test_waiting_ends(tmp_path: Path) -> None:
    """Another process holds the lock and does not finish: an error that names it. Its death frees the lock."""
    entered, leave = threading.Event(), threading.Event()

    def stuck() -> dict[str, np.ndarray]:
        entered.set()
        leave.wait()
        return {"values": np.arange(3)}

    thread = threading.Thread(target=lambda: IndexCache(tmp_path).get({"what": "x"}, stuck))
    thread.start()
    entered.wait()
    with pytest.raises(QEffectError, match=rf"not made within 0\.2 s \(data\.cache_timeout\) by process {os.getpid()} on"):
        IndexCache(tmp_path, 0.2).get({"what": "x"}, lambda: {})
    leave.set()
    thread.join()
    assert IndexCache(tmp_path, 0.2).get({"what": "x"}, lambda: {})["values"].tolist() == [0, 1, 2]


def test_document_starts_of_several_sequences(tmp_path: Path) -> None:
    """Documents of several sequences, empty ones, and one at the end."""
    dataset = write(tmp_path / "a", [[1, 2, 3], [], [4, 5], [6], []])
    assert dataset.document_starts().tolist() == [0, 3, 3, 5, 6, 6]
    assert document_starts(dataset, "x", IndexCache()).tolist() == [0, 3, 5, 6]
    raw = bytearray(idx_path(tmp_path / "a").read_bytes())
    raw[-6 * 8 :] = np.array([0, 0, 1, 1, 3, 3], dtype="<i8").tobytes()
    idx_path(tmp_path / "a").write_bytes(bytes(raw))
    assert document_starts(IndexedDataset(tmp_path / "a"), "x", IndexCache()).tolist() == [0, 3, 6]

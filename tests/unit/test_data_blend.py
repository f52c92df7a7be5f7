"""Blends: shares that are exact, an order that any process finds from a number, and changes that are kept."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.data import prefetch
from qeffect_lm.data.blend import Order, Segment, whole_weights
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter, bin_path
from qeffect_lm.data.loader import StepBatch, StepLoader, StepShape
from qeffect_lm.data.packing import Samples
from qeffect_lm.errors import QEffectError, UsageError


def segment(weights: list[int], first: int = 0) -> Segment:
    return Segment(first, tuple(f"s{i}" for i in range(len(weights))), tuple(weights), (0,) * len(weights))


@given(weights=st.lists(st.integers(1, 60), min_size=1, max_size=6), first=st.integers(0, 1000), length=st.integers(1, 700))
@settings(max_examples=150)
def test_shares_are_exact(weights: list[int], first: int, length: int) -> None:
    """In every period each source occurs as often as its weight, in between its share is off by (1 + sources) / 2 at most; its
    samples come in order, each once; and ``used`` counts without listing."""
    order, period = Order(segment(weights, first)), sum(weights)
    numbers = first + np.arange(max(length, 2 * period))
    source, sample = order(numbers)
    for s, weight in enumerate(weights):
        counts = np.cumsum(source == s)
        assert counts[period - 1] == weight and counts[2 * period - 1] == 2 * weight
        ideal = weight / period * np.arange(1, len(numbers) + 1)
        assert np.abs(counts - ideal).max() <= (1 + len(weights)) / 2 + 1e-9
        assert np.array_equal(sample[source == s], np.arange(counts[-1]))
    place = first + length - 1
    before = source[: place - first]
    assert order.used(place) == {f"s{s}": int((before == s).sum()) for s in range(len(weights))}
    some = numbers[::7][::-1]
    assert np.array_equal(order(some)[0], source[some - first])  # any number by itself


def test_weights_are_taken_exactly() -> None:
    assert whole_weights(["0.7", "0.3"]) == [7, 3]
    assert whole_weights([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert whole_weights(["3", "1.5"]) == [2, 1] and whole_weights([5]) == [1]
    assert Order(segment([2, 1]))(np.arange(6))[0].tolist() == [0, 1, 0, 0, 1, 0]
    for weights in (["0", "1"], ["-1", "2"]):
        with pytest.raises(UsageError, match="each must be above 0"):
            whole_weights(weights)
    with pytest.raises(UsageError, match="fewer decimals"):
        whole_weights(["0.12345678", "0.87654321"])


# ---- the loader of a blend ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    """Three corpora of 100, 40 and 12 tokens, in documents of 5; each token says which and where."""
    folder = tmp_path_factory.mktemp("data")
    for name, first, tokens in (("a", 0, 100), ("b", 1000, 40), ("c", 2000, 12)):
        with IndexedWriter(folder / name, vocab_size=4000) as writer:
            writer.add_documents([np.arange(first + i, min(first + i + 5, first + tokens)) for i in range(0, tokens, 5)])
    return [IndexedDataset(folder / name) for name in "abc"]


def loader(corpora: list[IndexedDataset], weights: list[Any], workers: int = 0, **shape: int) -> StepLoader:
    sources = [Samples(corpus, 4, reset=True) for corpus in corpora]
    return StepLoader(
        sources, StepShape(**{"microbatch_size": 1, "microbatches": 1, **shape}), weights=weights, seed=3, workers=workers
    )


def rows(batches: list[StepBatch]) -> dict[int, tuple[int, list[int]]]:
    """Sample number → (source, inputs)."""
    found: dict[int, tuple[int, list[int]]] = {}
    for batch in batches:
        assert batch.sources is not None
        columns = batch.sample_ids.flatten().tolist(), batch.sources.flatten().tolist(), batch.inputs.reshape(-1, 4)
        for number, source, tokens in zip(*columns, strict=True):
            assert number not in found
            found[number] = source, tokens.tolist()
    return found


@given(
    layouts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), min_size=1,
    max_size=4)
)
@settings(max_examples=40, deadline=None)
def test_the_order_is_a_function_of_the_number(
    corpora: list[IndexedDataset], layouts: list[tuple[int, int, int, int]]
) -> None:
    """C2, C3: whatever width, microbatch size and number of microbatches run for some steps and restart, sample n is what it is
    in a run of one sample a step; every source comes round in epochs of its own."""
    state, seen = None, {}
    for dp, size, microbatches, steps in layouts:
        batches = []
        for rank in range(dp):
            part = loader(corpora, [0.5, 0.3, 0.2], microbatch_size=size, microbatches=microbatches, dp_rank=rank, dp_size=dp)
            if state is not None:
                part.load_state(json.loads(json.dumps(state)))
            batches += [part.next_step() for _ in range(steps)]
            after = part.state()
        assert all(b.tokens == sum(int(o.loss_mask.sum()) for o in batches[i::steps]) for i, b in enumerate(batches[:steps]))
        state = after
        seen |= rows(batches)
    assert sorted(seen) == list(range(len(seen)))
    alone = loader(corpora, [0.5, 0.3, 0.2])
    assert seen == rows([alone.next_step() for _ in range(len(seen))])
    for source, (first, size) in enumerate(((0, 24), (1000, 9), (2000, 2))):
        starts = [tokens[0] for _, (s, tokens) in sorted(seen.items()) if s == source]
        assert all(first <= start < first + 4 * size for start in starts)
        assert all(len(set(starts[i : i + size])) == len(starts[i : i + size]) for i in range(0, len(starts), size))


def test_another_blend_is_explicit_and_recorded(corpora: list[IndexedDataset]) -> None:
    """Refused unless told; then sources that stay go on where they were, and a restart finds the same order from the record."""
    first = loader(corpora[:2], [0.5, 0.5])
    old = rows([first.next_step() for _ in range(10)])
    changed = loader([corpora[2], corpora[0]], [0.5, 0.5])
    with pytest.raises(UsageError, match=r"saved a x 1, [0-9a-f]{12} x 1; now c x 1, a x 1.*data\.accept_blend=true"):
        changed.load_state(first.state())
    assert changed.next_sample == 0
    assert changed.load_state(first.state(), accept_blend=True)
    new = rows([changed.next_step() for _ in range(8)])
    state = json.loads(json.dumps(changed.state()))
    assert [one["first"] for one in state["blends"]] == [0, 10]
    assert [source["offset"] for source in state["blends"][1]["sources"]] == [0, 5]
    again = loader([corpora[2], corpora[0]], [0.5, 0.5])
    assert again.load_state(state) == []
    later = rows([again.next_step() for _ in range(38)])
    of_a = [tokens[0] for runs in (old, new, later) for _, (source, tokens) in sorted(runs.items()) if tokens[0] < 1000]
    assert len(set(of_a[:24])) == 24 and len(of_a) > 24  # an epoch of a, over the change and the restart
    for damage in ([], None, [{"first": 0}], [{"first": 99, "sources": [{"sha256": "x", "weight": 1, "offset": 0}]}]):
        with pytest.raises(UsageError, match="cursor"):
            again.load_state(state | {"blends": damage})


def test_a_blend_and_a_batch_that_change_twice(corpora: list[IndexedDataset]) -> None:
    """Also without a step in between: each source's samples are counted over all that came before, and what held for no sample
    is not kept."""
    state, used, place = loader(corpora[:2], [0.5, 0.5]).state(), {}, 0
    steps: list[tuple[list[int], list[float], int, int]] = [
        ([0, 1], [0.5, 0.5], 10, 1),
        ([2, 0], [0.5, 0.5], 0, 2),
        ([0, 1], [0.75, 0.25], 8, 3),
        ([1, 0], [0.5, 0.5], 6, 1),
    ]
    for which, weights, count, size in steps:
        part = loader([corpora[i] for i in which], weights, microbatch_size=size)
        part.load_state(state, accept_blend=True)
        names = [one.sha256() for one in part.sources]
        last = part.state()["blends"][-1]
        assert last["first"] == place and [one["offset"] for one in last["sources"]] == [used.get(name, 0) for name in names]
        for source, _ in rows([part.next_step() for _ in range(count)]).values():
            used[names[source]] = used.get(names[source], 0) + 1
        state, place = json.loads(json.dumps(part.state())), place + count * size
    assert [one["first"] for one in state["blends"]] == [0, 10, 34]
    assert state["batches"] == [[0, 1], [10, 3], [34, 1]]


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_workers_change_nothing_and_their_death_is_an_error(corpora: list[IndexedDataset]) -> None:
    """Steps read ahead are those read when asked for, also after the cursor was set back; a killed worker ends the run; what a
    worker meets is raised as itself."""
    plain, ahead = loader(corpora, [2, 1, 1], microbatches=2), loader(corpora, [2, 1, 1], workers=2, microbatches=2)
    before = torch.get_rng_state()
    try:
        for _ in range(4):
            want, got = plain.next_step(), ahead.next_step()
            for name in ("inputs", "targets", "loss_mask", "sample_ids", "starts", "sources"):
                assert torch.equal(getattr(want, name), getattr(got, name)), name
            assert want.tokens == got.tokens
        assert torch.equal(torch.get_rng_state(), before)  # checkpoints hold it
        assert ahead.next_sample == plain.next_sample and ahead._ahead is not None
        for worker in ahead._ahead._steps._workers:
            os.kill(worker.pid, signal.SIGTERM)  # asks the job to stop, not its workers
        assert ahead.next_step().sample_ids.flatten().tolist() == [8, 9]
        os.kill(ahead._ahead._steps._workers[0].pid, signal.SIGKILL)
        with pytest.raises(QEffectError, match="a process that reads data died"):
            for _ in range(50):
                ahead.next_step()
        ahead.vocab_size = 1500
        ahead.load_state(ahead.state() | {"next_sample": 2})
        with pytest.raises(UsageError, match=r"^the corpus holds token id 20\d\d, but model.vocab_size is 1500"):
            for _ in range(9):
                ahead.next_step()
    finally:
        ahead.close()


class _Unit:
    """torch's iterator over workers, and what comes from them."""

    def __init__(self, made: list[Any]) -> None:
        self._made = iter(made)

    def __next__(self) -> Any:
        found = next(self._made)
        if isinstance(found, RuntimeError):
            raise found
        return found

    def _shutdown_workers(self) -> None:
        self._made = iter([])


def test_what_prefetching_tells(corpora: list[IndexedDataset], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are the reader's, an error is the reader's own, a death is named, and the cursor decides what comes next."""
    part = loader(corpora, [1, 1, 1], workers=1)
    begun: list[int] = []

    def made(steps: Any, sampler: Any, **rest: Any) -> list[Any]:
        numbers = iter(sampler)
        begun.append(first := next(numbers))
        return [steps[first], steps[next(numbers)], RuntimeError("worker (pid 7) is killed by signal: Killed.\nmore")]

    monkeypatch.setattr(prefetch, "DataLoader", lambda *args, **rest: _Loaded(made(*args, **rest)))
    plain = loader(corpora, [1, 1, 1])
    assert all(torch.equal(part.next_step().inputs, plain.next_step().inputs) for _ in range(2))
    with pytest.raises(QEffectError, match=r"reads data died \(worker \(pid 7\) is killed by signal: Killed\.\).*SIGBUS"):
        part.next_step()
    with pytest.raises(QEffectError, match="have ended with an error"):  # and no waiting for what nobody reads
        part.next_step()
    part.load_state(part.state() | {"next_sample": 5})
    part.vocab_size = 10
    with pytest.raises(UsageError, match="^the corpus holds token id"):
        part.next_step()
    assert begun == [0, 5]


class _Loaded:
    def __init__(self, made: list[Any]) -> None:
        self._made = made

    def __iter__(self) -> Any:
        return _Unit(self._made)


def test_a_truncated_file_is_named(corpora: list[IndexedDataset], tmp_path: Path) -> None:
    for path in corpora[0].files:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bin_path(tmp_path / "a").write_bytes(bin_path(tmp_path / "a").read_bytes()[:-2])
    with pytest.raises(UsageError, match=r"a\.bin: has 198 bytes where its index lists 100 tokens"):
        IndexedDataset(tmp_path / "a")

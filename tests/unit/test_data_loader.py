"""The loader: the order is a pure function of (seed, sample number), whatever the layout and the restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter
from qeffect_lm.data.loader import StepLoader, StepShape, sequential_batches
from qeffect_lm.data.packing import Samples, num_windows
from qeffect_lm.data.permutation import Permutation
from qeffect_lm.errors import UsageError

SEQ = 4


def make(prefix: Path, tokens: int, vocab_size: int = 1000) -> IndexedDataset:
    """Tokens 0, 1, 2, ... in documents of 7, so that windows cross documents."""
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for start in range(0, tokens, 7):
            writer.add_document(np.arange(start, min(start + 7, tokens)))
    return IndexedDataset(prefix)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """203 tokens: 50 windows of 4."""
    return make(tmp_path_factory.mktemp("data") / "a", 203)


def loader(dataset: IndexedDataset, seq_len: int = SEQ, seed: int = 5, reset: bool = False, **changes: Any) -> StepLoader:
    shape = StepShape(**{"microbatch_size": 1, "microbatches": 1, **changes})
    return StepLoader(Samples(dataset, seq_len, reset=reset), shape, seed=seed)


# ---- permutation
# -----------------------------------------------------------------------------------------------


@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), stream=st.integers(0, 1000))
def test_permutation_is_a_bijection(size: int, seed: int, stream: int) -> None:
    images = Permutation(size, seed, stream)(np.arange(size))
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(size))


def test_permutation_is_fixed() -> None:
    """Golden values: another order would make every saved cursor wrong, so it needs another algorithm
    name."""
    assert Permutation(10, 1234)(np.arange(10)).tolist() == [9, 3, 2, 5, 6, 4, 7, 8, 0, 1]
    assert Permutation(10, 1234, 1)(np.arange(10)).tolist() == [9, 6, 7, 1, 3, 8, 4, 2, 5, 0]
    large = np.array([0, 1, 10**12 - 1])
    assert Permutation(10**12, 7, 3)(large).tolist() == [139410625773, 683651496672, 937168688671]


def test_permutation_spreads() -> None:
    """Each element lands everywhere about equally often over seeds, and neighbours do not stay neighbours."""
    size, seeds = 20, 2000
    counts = np.zeros((size, size))
    steps = []
    for seed in range(seeds):
        images = Permutation(size, seed)(np.arange(size))
        counts[np.arange(size), images] += 1
        steps.append(np.abs(np.diff(images)).mean())
    expected = seeds / size
    chi_square = ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert 0.8 < chi_square < 1.25
    assert abs(np.mean(steps) - (size + 1) / 3) < 0.1  # the mean distance of two random places


def test_permutation_refuses_what_is_outside() -> None:
    for bad in ([-1], [10]):
        with pytest.raises(ValueError, match="outside range"):
            Permutation(10, 1)(np.array(bad))
    with pytest.raises(ValueError, match="at least 1"):
        Permutation(0, 1)


# ---- one step
# --------------------------------------------------------------------------------------------------


def test_step_batch(dataset: IndexedDataset) -> None:
    batch = loader(dataset, microbatch_size=2, microbatches=3).next_step()
    assert batch.inputs.shape == batch.targets.shape == batch.loss_mask.shape == (3, 2, SEQ)
    assert (batch.inputs.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert (batch.loss_mask.dtype, batch.sample_ids.dtype) == (torch.float32, torch.int64)
    assert batch.sample_ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(batch.targets, batch.inputs + 1)  # the stream is 0, 1, 2, ...
    assert torch.equal(batch.inputs[..., 0] % SEQ, torch.zeros(3, 2, dtype=torch.int64))
    assert batch.loss_mask.eq(1).all() and batch.tokens == 3 * 2 * SEQ


def test_epochs_cover_every_window_once(dataset: IndexedDataset) -> None:
    """Every window occurs once per epoch; epochs and seeds have orders of their own; 50 windows, steps of
    4."""
    first = loader(dataset, microbatch_size=2, microbatches=2)
    assert first.sources[0].size == 50
    starts = torch.cat([first.next_step().inputs[..., 0].flatten() for _ in range(25)]) // SEQ
    epochs = starts.reshape(2, 50).tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1] and epochs[0] != list(range(50))
    other = loader(dataset, seed=6).reader.places(np.arange(50))[1].tolist()
    assert sorted(other) == list(range(50)) and other != epochs[0]


def test_window_count() -> None:
    class Stream:
        prefix = "x"

        def __init__(self, num_tokens: int) -> None:
            self.num_tokens = num_tokens

    counts = [num_windows(Stream(n), SEQ) for n in (5, 8, 9, 12, 13)]  # type: ignore[arg-type]
    assert counts == [1, 1, 2, 2, 3]


def test_masked_targets(tmp_path: Path) -> None:
    """G4: a token of mask 0 does not count as a target, and the token count is over all data-parallel ranks."""
    tokens = np.array([1, 9, 9, 2, 3, 4, 9, 5, 6, 7, 8, 9, 1, 2, 3, 9, 9])
    for name, values in (("a.mask", tokens != 9), ("a", tokens)):
        with IndexedWriter(tmp_path / name, vocab_size=10) as writer:
            writer.add_document(values.astype(np.int64))
    dataset = IndexedDataset(tmp_path / "a")
    parts = [loader(dataset, microbatches=2, dp_rank=r, dp_size=2).next_step() for r in range(2)]
    for part in parts:
        assert torch.equal(part.loss_mask, (part.targets != 9).float())
    assert parts[0].tokens == parts[1].tokens == sum(int(p.loss_mask.sum()) for p in parts) == 10
    assert parts[0].loss_mask.sum() != parts[1].loss_mask.sum()
    for path in (tmp_path / "a.mask.idx", tmp_path / "a.mask.bin"):
        path.unlink()
    plain = loader(dataset, microbatches=2, dp_size=2).next_step()
    assert plain.tokens == 16 and plain.loss_mask.eq(1).all()


# ---- data parallelism and restarts
# -----------------------------------------------------------------------------


def test_rank_rule(dataset: IndexedDataset) -> None:
    """Microbatch j of rank r, row k, is sample (j * dp + r) * b + k."""
    for rank in range(2):
        step = loader(dataset, microbatch_size=2, microbatches=3, dp_rank=rank, dp_size=2)
        step.next_step()
        expected = [[12 + (j * 2 + rank) * 2 + k for k in range(2)] for j in range(3)]
        assert step.next_step().sample_ids.tolist() == expected


@given(
    layouts=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_global_sequence_does_not_depend_on_the_layout(
    dataset: IndexedDataset, layouts: list[tuple[int, int, int, int]]
) -> None:
    """C3: whatever (dp, microbatch size, microbatches) run for some steps each, sample n has n's window,
    once."""
    state: dict[str, Any] | None = None
    seen: dict[int, list[int]] = {}
    for dp, size, microbatches, steps in layouts:
        ranks = [
            loader(dataset, microbatch_size=size, microbatches=microbatches, dp_rank=r, dp_size=dp)
            for r in range(dp)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state(json.loads(json.dumps(state)))
        for _ in range(steps):
            for rank in ranks:
                batch = rank.next_step()
                for number, row in zip(
                    batch.sample_ids.flatten().tolist(), batch.inputs.reshape(-1, SEQ), strict=True
                ):
                    assert number not in seen
                    seen[number] = row.tolist()
        states = [rank.state() for rank in ranks]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert sorted(seen) == list(range(len(seen)))
    alone = loader(dataset)
    assert [seen[n] for n in range(len(seen))] == [
        alone.next_step().inputs[0, 0].tolist() for _ in range(len(seen))
    ]


def test_width_four_two_four(dataset: IndexedDataset) -> None:
    """C3: DP 4, then 2, then 4 with one global batch of 8: each step takes the samples that one rank
    would."""

    def steps(widths: list[int]) -> list[list[int]]:
        state, taken = loader(dataset).state(), []
        for dp in widths:
            ids = []
            for rank in range(dp):
                part = loader(dataset, microbatches=8 // dp, dp_rank=rank, dp_size=dp)
                part.load_state(state)
                ids += part.next_step().sample_ids.flatten().tolist()
            state = part.state()
            taken.append(sorted(ids))
        return taken

    assert steps([4, 2, 4]) == steps([1, 1, 1]) == [list(range(8 * i, 8 * i + 8)) for i in range(3)]


def test_save_resume_save_resume(dataset: IndexedDataset) -> None:
    """C2: save at 2, resume, save at 4, resume: samples 0 to 5 once each, with the tokens of an unbroken
    run."""
    unbroken = loader(dataset)
    expected = [unbroken.next_step() for _ in range(6)]
    got = []
    state: dict[str, Any] | None = None
    for _ in range(3):
        part = loader(dataset)
        if state is not None:
            part.load_state(json.loads(json.dumps(state)))
        got += [part.next_step() for _ in range(2)]
        state = part.state()
    assert [int(b.sample_ids) for b in got] == list(range(6))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(got, expected, strict=True))
    assert state is not None and state["next_sample"] == 6


def test_state_of_another_run_is_refused(dataset: IndexedDataset, tmp_path: Path) -> None:
    """Each key that fixes the order is checked and named, and a refused state changes nothing."""
    state = loader(dataset).state() | {"next_sample": 40}
    other = make(tmp_path / "b", 210)
    refusals: dict[str, StepLoader] = {
        "seed": loader(dataset, seed=6),
        "seq_len": loader(dataset, seq_len=SEQ + 1),
        "documents": loader(dataset, reset=True),
    }
    for key, part in refusals.items():
        with pytest.raises(UsageError, match=f"has {key} "):
            part.load_state(state)
        assert part.next_sample == 0
    part = loader(other)
    with pytest.raises(UsageError, match=r"of other data than this run's.*saved [0-9a-f]{12} x 1; now b x 1.*accept_blend"):
        part.load_state(state)
    assert part.next_sample == 0
    part = loader(dataset)
    for key in ("version", "algorithm"):
        with pytest.raises(UsageError, match=f"has {key} "):
            part.load_state(state | {key: "other"})
    for key in state:
        with pytest.raises(UsageError, match=f"'{key}'"):
            part.load_state({k: v for k, v in state.items() if k != key})
    for bad in (-1, 1.0, "3", None, True):
        with pytest.raises(UsageError, match="next_sample"):
            part.load_state(state | {"next_sample": bad})
    assert part.next_sample == 0
    part.load_state(state)
    assert part.next_sample == 40


def test_the_cursor_of_an_older_checkpoint(dataset: IndexedDataset) -> None:
    """Version 1: one source, cut as a stream. It goes on at the same sample of the same order."""
    now = loader(dataset)
    old = {"version": 1, "next_sample": 8, "mask_token_id": None, "dataset_sha256": dataset.content_hash()}
    old |= {key: now.state()[key] for key in ("algorithm", "seed", "seq_len")}
    now.load_state(old)
    assert now.next_step().sample_ids.item() == 8 and now.state()["version"] == 2
    with pytest.raises(UsageError, match="'dataset_sha256'"):
        now.load_state({key: value for key, value in old.items() if key != "dataset_sha256"})
    with pytest.raises(UsageError, match="of other data"):
        now.load_state(old | {"dataset_sha256": "0" * 64})
    with pytest.raises(UsageError, match="has seed"):
        loader(dataset, seed=6).load_state(old)


def test_another_batch_is_explicit_and_recorded(dataset: IndexedDataset) -> None:
    state = loader(dataset, microbatches=4).state() | {"next_sample": 12}
    part = loader(dataset, microbatches=6)
    with pytest.raises(UsageError, match=r"6 samples now, 4 before \(from sample 12 on\): set data.accept_batch=true"):
        part.load_state(state, accept_batch=False)
    assert part.next_sample == 0
    assert part.load_state(state) and part.state()["batches"] == [[0, 4], [12, 6]]
    again = loader(dataset, microbatches=2, microbatch_size=3)  # as many samples: nothing to tell
    assert again.load_state(part.state(), accept_batch=False) == []


# ---- evaluation
# ------------------------------------------------------------------------------------------------


def test_sequential_batches_are_fixed_and_spread(dataset: IndexedDataset) -> None:
    batch = sequential_batches(Samples(dataset, SEQ), 2, 5)
    assert batch.inputs.shape == (5, 2, SEQ) and batch.tokens == 40
    assert batch.sample_ids.flatten().tolist() == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert torch.equal(batch.inputs[..., 0], batch.sample_ids * SEQ)
    again = sequential_batches(Samples(dataset, SEQ), 2, 5)
    assert torch.equal(batch.inputs, again.inputs) and torch.equal(batch.targets, again.targets)


def test_sequential_batches_of_a_small_set(dataset: IndexedDataset) -> None:
    """50 windows fill 16 microbatches of 3, each window at most once."""
    batch = sequential_batches(Samples(dataset, SEQ), 3, 1000)
    assert batch.inputs.shape == (16, 3, SEQ)
    assert len(set(batch.sample_ids.flatten().tolist())) == 48
    apart = sequential_batches(Samples(dataset, SEQ, reset=True), 50, 1)
    assert apart.tokens == int(apart.loss_mask.sum()) == 200 - 28  # 28 documents begin after the first one


# ---- errors
# ----------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[IndexedDataset], Any], str]] = {
    "corpus too small": (lambda d: loader(d, seq_len=203), r"203 tokens.*seq_len 203 needs 204.*at most 202"),
    "no microbatches": (lambda d: loader(d, microbatches=0), "microbatches must be at least 1"),
    "no sequences": (lambda d: loader(d, microbatch_size=0), "microbatch_size must be at least 1"),
    "no ranks": (lambda d: loader(d, dp_size=0), "dp_size must be at least 1"),
    "rank outside": (lambda d: loader(d, dp_rank=2, dp_size=2), "dp_rank 2 is outside the 2"),
    "negative rank": (lambda d: loader(d, dp_rank=-1, dp_size=2), "dp_rank -1 is outside"),
    "seq_len": (lambda d: loader(d, seq_len=0), "seq_len must be at least 1"),
    "evaluation count": (lambda d: sequential_batches(Samples(d, SEQ), 2, 0), "count must be at least 1"),
    "evaluation too small": (
        lambda d: sequential_batches(Samples(d, SEQ), 51, 1),
        "50 samples.*too few.*microbatch of 51",
    ),
    "evaluation window": (lambda d: sequential_batches(Samples(d, 300), 1, 1), "203 tokens.*needs 301"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_numbers(dataset: IndexedDataset, case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(UsageError, match=message):
        call(dataset)


def test_one_window_is_enough(tmp_path: Path) -> None:
    part = loader(make(tmp_path / "a", SEQ + 1))
    assert [part.next_step().inputs.flatten().tolist() for _ in range(2)] == [[0, 1, 2, 3]] * 2

"""The loader: whole optimizer steps, and one number as the cursor.

*Sample number* n, counted from 0 and never reset, belongs to a source and is one of its samples, number k
(:mod:`qeffect_lm.data.blend`), and that is sample ``permutation(seed, epoch)(k mod N)`` of the source's N
(:mod:`qeffect_lm.data.packing`), with ``epoch = k div N``: a pure function of (seed, n). What a run has consumed is therefore
all samples below one number, whatever the data-parallel width, the microbatch size, the workers and the restarts were.

A step takes the next ``microbatches * dp_size * microbatch_size`` numbers. Microbatch j of rank r holds, in
its row k,

    n = next_sample + (j * dp_size + r) * microbatch_size + k

so the ranks' j-th microbatches together are consecutive numbers, as in Megatron-LM's sampler; and two layouts
with equal global batch take the same samples in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from qeffect_lm.data.blend import LARGEST, Order, Segment, continued, whole_weights
from qeffect_lm.data.packing import Numbers, Rows, Samples
from qeffect_lm.data.permutation import ALGORITHM, Permutation
from qeffect_lm.errors import UsageError, shown

if TYPE_CHECKING:
    from qeffect_lm.data.prefetch import Prefetch

STATE_VERSION = 2
FIRST_SINGLE = 1  # the version of cursors before there were blends: one source


@dataclass(frozen=True)
class StepBatch:
    """One data-parallel rank's part of one optimizer step: m microbatches of b sequences of s tokens.

    ``inputs``, ``targets`` int64 [m, b, s]; ``loss_mask`` float32 [m, b, s], 1 where the target counts and 0
    where not; ``sample_ids`` int64 [m, b], the global sample numbers (the set's own in an evaluation batch);
    ``tokens``, the number of counted targets over all data-parallel ranks, the one divisor of the step's loss
    (0 is possible when everything is masked); ``starts`` int32 [m, b, s], where each token's document begins in its row (None:
    documents see each other); ``sources`` int64 [m, b], which source each sequence is from (None: there is one).
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    sample_ids: torch.Tensor
    tokens: int
    starts: torch.Tensor | None = None
    sources: torch.Tensor | None = None

    def pin_memory(self) -> StepBatch:
        """The same in page-locked memory, from where a GPU copies by itself."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        pinned: dict[str, Any] = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        return StepBatch(**pinned)


@dataclass(frozen=True)
class StepShape:
    """How a step's samples lie on the ranks. Raises UsageError for sizes that are not positive, a rank outside."""

    microbatch_size: int
    microbatches: int
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        _check_positive(microbatch_size=self.microbatch_size, microbatches=self.microbatches, dp_size=self.dp_size)
        if not 0 <= self.dp_rank < self.dp_size:
            raise UsageError(f"dp_rank {self.dp_rank} is outside the {self.dp_size} data-parallel ranks")

    @property
    def samples(self) -> int:
        """Samples of one step over all data-parallel ranks."""
        return self.microbatches * self.dp_size * self.microbatch_size

    def numbers(self, first: int) -> Numbers:
        """Those of the step that begins with sample ``first``: int64 ``[microbatches, dp_size, microbatch_size]``."""
        shape = self.microbatches, self.dp_size, self.microbatch_size
        return first + np.arange(self.samples, dtype=np.int64).reshape(shape)


class StepReader:
    """Steps by their first sample's number: no state, so that any process reads any step.

    Args:
        vocab_size: ids outside it are an error; None: not looked at.
    """

    def __init__(
        self, sources: Sequence[Samples], segment: Segment, shape: StepShape, seed: int, vocab_size: int | None = None
    ) -> None:
        self.sources, self.shape, self.seed, self.vocab_size = list(sources), shape, seed, vocab_size
        self.order = Order(segment)

    def places(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(source, sample in the source's own order) of each sample number, same shape."""
        source, number = self.order(samples)
        place = np.empty_like(number)
        for s, one in enumerate(self.sources):
            mine = source == s
            epochs, within = np.divmod(number[mine], one.size)
            here = np.empty_like(within)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                here[now] = Permutation(one.size, self.seed, int(epoch))(within[now])
            place[mine] = here
        return source, place

    def step(self, first: int) -> StepBatch:
        """This rank's part of the step that begins with sample ``first``.

        Raises:
            UsageError: a token id outside the vocabulary.
        """
        numbers = self.shape.numbers(first)
        source, place = self.places(numbers)
        # Each rank counts the whole step's targets, so that all know the divisor without talking.
        tokens = sum(one.counted(place[source == s]) for s, one in enumerate(self.sources))
        own, sources, places = (part[:, self.shape.dp_rank] for part in (numbers, source, place))
        rows = _read(self.sources, sources, places)
        batch = _batch(rows, own, tokens)
        if len(self.sources) > 1:
            batch = replace(batch, sources=torch.from_numpy(np.ascontiguousarray(sources)))
        if self.vocab_size is not None:
            check_tokens(batch, self.vocab_size)
        return batch


class StepLoader:
    """Yields the steps of one data-parallel rank; the order is the module docstring's.

    Args:
        weights: of the sources in the blend.
        workers: processes that read ahead (:mod:`qeffect_lm.data.prefetch`); 0: steps are read when they are asked for.
        pinned: batches lie in page-locked memory.
    """

    def __init__(
        self,
        sources: Samples | Sequence[Samples],
        shape: StepShape,
        *,
        seed: int = 1234,
        weights: Sequence[float | str] | None = None,
        vocab_size: int | None = None,
        workers: int = 0,
        pinned: bool = False,
    ) -> None:
        self.sources = [sources] if isinstance(sources, Samples) else list(sources)
        self.weights = whole_weights(weights or [1] * len(self.sources))
        self.shape, self.seed, self.vocab_size = shape, seed, vocab_size
        self.next_sample = 0
        self._workers, self._pinned = workers, pinned
        self._ahead: Prefetch | None = None
        self._digests: list[str] | None = None
        self._blends: list[Segment] | None = None
        self._batches = [[0, shape.samples]]
        self._reader: StepReader | None = None

    @property
    def samples_per_step(self) -> int:
        """Samples of one step over all data-parallel ranks."""
        return self.shape.samples

    @property
    def names(self) -> list[str]:
        """A short name of each source."""
        short = [one.dataset.prefix.name for one in self.sources]
        pairs = zip(short, self.sources, strict=True)
        return [name if short.count(name) == 1 else str(one.dataset.prefix) for name, one in pairs]

    @property
    def blends(self) -> list[Segment]:
        """The blends of the run so far; the last one holds now."""
        if self._blends is None:
            if self._digests is None:
                self._digests = [one.sha256() for one in self.sources]
                _check_apart(self.sources, self._digests)
            self._blends = [Segment(0, tuple(self._digests), tuple(self.weights), (0,) * len(self.sources))]
        return self._blends

    @property
    def reader(self) -> StepReader:
        """What reads steps now."""
        if self._reader is None:
            self._reader = StepReader(self.sources, self.blends[-1], self.shape, self.seed, self.vocab_size)
        return self._reader

    def peek(self) -> StepBatch:
        """The next step's part; the cursor stays."""
        return self.reader.step(self.next_sample)

    def next_step(self) -> StepBatch:
        """This rank's part of the next step; advances the cursor by ``samples_per_step``."""
        if not self._workers:
            batch = self.peek()
            batch = batch.pin_memory() if self._pinned else batch
        else:
            batch = self._ahead_of(self.next_sample)
        self.next_sample += self.samples_per_step
        return batch

    def _ahead_of(self, first: int) -> StepBatch:
        from qeffect_lm.data.prefetch import Prefetch  # torch's loader takes a while to import

        if self._ahead is None or self._ahead.following != first:
            self.close()
            self._ahead = Prefetch(self.reader, first, self._workers, self._pinned)
        return self._ahead.next()

    def close(self) -> None:
        """End the workers."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    # ---- the cursor -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The cursor as a JSON object: the same on every rank."""
        return {
            "next_sample": self.next_sample,
            **self._identity(),
            "blends": [segment.to_json() for segment in self.blends],
            "batches": [list(pair) for pair in self._batches],
        }

    def load_state(
        self, state: dict[str, Any], *, accept_blend: bool = False, accept_batch: bool = True
    ) -> list[str]:
        """Continues at ``state``'s sample; the data-parallel width and the microbatch size may differ from the saved ones.

        Args:
            accept_blend: sources or weights may be others than the saved ones; from here on these hold, and that is recorded.
            accept_batch: a step may take another number of samples than the saved ones; that is recorded.

        Returns: what changed, in words.

        Raises UsageError, naming the key, where a value is missing or would give another sample order: version, seed, seq_len,
        packing, algorithm, data (unless accepted). Nothing changes then.
        """
        if state.get("version") == FIRST_SINGLE:
            state = _from_single(state, self)
        for key, value in self._identity().items():
            if key not in state:
                raise UsageError(f"the saved data cursor has no {key!r}: the checkpoint is incomplete")
            if state[key] != value:
                raise UsageError(
                    f"the saved data cursor has {key} {shown(repr(state[key]))}, this run has {value!r} "
                    f"(dataset {self.sources[0].dataset.prefix}): resume with the saved value, or start a new run"
                )
        position = _count(state.get("next_sample"), "next_sample")
        blends, changed = self._blends_after(state, position, accept_blend)
        batches = _batches_of(state)
        if batches[-1][1] != self.samples_per_step:
            told = f"a step takes {self.samples_per_step} samples now, {batches[-1][1]} before (from sample {position} on)"
            if not accept_batch:
                raise UsageError(f"{told}: set data.accept_batch=true to go on so, or keep dp x microbatches x microbatch_size")
            changed.append(told)
            batches = [*(pair for pair in batches if pair[0] < position), [position, self.samples_per_step]]
        self.close()
        self.next_sample, self._blends, self._batches, self._reader = position, blends, batches, None
        return changed

    def _blends_after(self, state: dict[str, Any], position: int, accept: bool) -> tuple[list[Segment], list[str]]:
        saved = state.get("blends")
        if not isinstance(saved, list) or not saved:
            raise UsageError("the saved data cursor has no 'blends': the checkpoint is incomplete")
        blends = [Segment.from_json(one) for one in saved]
        last, mine = blends[-1], self.blends[0]
        firsts = [*(one.first for one in blends), position]
        if firsts != sorted(firsts):
            told = shown(str(firsts[:-1]))
            raise UsageError(f"the saved data cursor's blends begin at samples {told}, not one after another up to {position}")
        if (last.sources, last.weights) == (mine.sources, mine.weights):
            return blends, []
        told = _difference(last, mine, self.names)
        if not accept:
            raise UsageError(
                f"the saved data cursor is of other data than this run's (dataset_sha256): {told}; resume with the saved "
                "data, or set data.accept_blend=true to go on with this data from here"
            )
        kept = [one for one in blends if one.first < position]
        return [*kept, continued(blends, position, mine.sources, mine.weights)], [f"{told} (from sample {position} on)"]

    def _identity(self) -> dict[str, Any]:
        first = self.sources[0]
        return {
            "version": STATE_VERSION,
            "algorithm": ALGORITHM,
            "seed": self.seed,
            "seq_len": first.seq_len,
            "packing": first.packing,
            "documents": "reset" if first.reset else "joined",
        }


def _from_single(state: dict[str, Any], loader: StepLoader) -> dict[str, Any]:
    """A cursor of version 1, of one source cut as a stream, as one of today's."""
    if state.get("mask_token_id") is not None:
        raise UsageError(f"the saved data cursor has mask_token_id {shown(repr(state['mask_token_id']))}, which is no more")
    if "dataset_sha256" not in state:
        raise UsageError("the saved data cursor has no 'dataset_sha256': the checkpoint is incomplete")
    source = {"sha256": state["dataset_sha256"], "weight": 1, "offset": 0}
    more = {"packing": "stream", "documents": "joined", "version": STATE_VERSION}
    blends = [{"first": 0, "sources": [source]}]
    return {**state, **more, "blends": blends, "batches": [[0, loader.samples_per_step]]}


def _batches_of(state: dict[str, Any]) -> list[list[int]]:
    found = state.get("batches")
    right = isinstance(found, list) and found and all(isinstance(pair, list) and len(pair) == 2 for pair in found)
    if not right:
        raise UsageError("the saved data cursor has no 'batches': the checkpoint is incomplete")
    assert isinstance(found, list)
    return [[_count(first, "batches"), _count(size, "batches")] for first, size in found]


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise UsageError(f"the saved data cursor's {name!r} is {shown(repr(value))}, not a sample number")
    return value


def _difference(before: Segment, now: Segment, names: list[str]) -> str:
    def told(segment: Segment, called: Sequence[str]) -> str:
        return ", ".join(f"{name} x {weight}" for name, weight in zip(called, segment.weights, strict=True))

    known = dict(zip(now.sources, names, strict=True))
    return f"saved {told(before, [known.get(sha, shown(sha[:12])) for sha in before.sources])}; now {told(now, names)}"


def sequential_batches(samples: Samples, microbatch_size: int, count: int) -> StepBatch:
    """``count`` microbatches for evaluation, the same at each call: inputs [count, microbatch_size, seq_len].

    Their ``M = count * microbatch_size`` samples are spread evenly over the set's N: sample ``floor(i * N / M)`` for i = 0, 1,
    ... Where N is smaller than M, as many whole microbatches as N fills. Raises UsageError for sizes that are not positive and
    for a set too small for one microbatch.
    """
    _check_positive(microbatch_size=microbatch_size, count=count)
    available = samples.size
    count = min(count, available // microbatch_size)
    if count == 0:
        raise UsageError(
            f"dataset {samples.dataset.prefix} has {samples.dataset.num_tokens} tokens, {available} samples of seq_len "
            f"{samples.seq_len}, too few for one microbatch of {microbatch_size}: use more text, a smaller seq_len "
            "or a smaller microbatch_size"
        )
    places = np.arange(count * microbatch_size, dtype=np.int64)
    numbers = (places * available // len(places)).reshape(count, microbatch_size)
    rows = _read([samples], np.zeros_like(numbers), numbers)
    return _batch(rows, numbers, int(np.count_nonzero(rows.mask)))


def check_tokens(batch: StepBatch, vocab_size: int) -> None:
    """Raise :class:`UsageError` when the data holds token ids that the model has no row for."""
    largest = int(torch.maximum(batch.inputs.max(), batch.targets.max()))
    smallest = int(torch.minimum(batch.inputs.min(), batch.targets.min()))
    if largest >= vocab_size or smallest < 0:
        raise UsageError(
            f"the corpus holds token id {smallest if smallest < 0 else largest}, but model.vocab_size is {vocab_size}: use the "
            "tokenizer the corpus was made with, or set model.vocab_size to its vocabulary"
        )


def _check_apart(sources: Sequence[Samples], digests: Sequence[str]) -> None:
    """Raise UsageError for a corpus that is in a blend twice: its samples would be used, and told, as two corpora's."""
    for number, sha in enumerate(digests):
        if (first := digests.index(sha)) < number:
            raise UsageError(
                f"{sources[first].dataset.prefix} and {sources[number].dataset.prefix} are the same corpus, twice in the "
                "blend: name it once, with the sum of the weights"
            )


def _read(sources: Sequence[Samples], source: Numbers, place: Numbers) -> Rows:
    """Samples of any shape, as rows ``[*shape, …]``."""
    flat, which = place.reshape(-1), source.reshape(-1)
    seq_len, shape = sources[0].seq_len, source.shape
    tokens = np.empty((len(flat), seq_len + 1), dtype=np.int64)
    mask = np.empty((len(flat), seq_len), dtype=np.float32)
    starts = np.empty((len(flat), seq_len), dtype=np.int32) if sources[0].reset else None
    for s in np.unique(which):
        mine = which == s
        rows = sources[s].read(flat[mine])
        tokens[mine], mask[mine] = rows.tokens, rows.mask
        if starts is not None:
            starts[mine] = rows.starts
    parts: list[npt.NDArray[Any] | None] = [
        None if part is None else part.reshape(*shape, part.shape[-1]) for part in (tokens, mask, starts)
    ]
    return Rows(*parts)  # type: ignore[arg-type]


def _batch(rows: Rows, numbers: Numbers, tokens: int) -> StepBatch:
    """A batch from rows [m, b, …]."""
    return StepBatch(
        inputs=torch.from_numpy(np.ascontiguousarray(rows.tokens[..., :-1])),
        targets=torch.from_numpy(np.ascontiguousarray(rows.tokens[..., 1:])),
        loss_mask=torch.from_numpy(rows.mask),
        sample_ids=torch.from_numpy(np.ascontiguousarray(numbers)),
        tokens=tokens,
        starts=None if rows.starts is None else torch.from_numpy(rows.starts),
    )


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")

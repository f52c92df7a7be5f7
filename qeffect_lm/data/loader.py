"""The loader: whole optimizer steps, and one number as the cursor.

The token stream (all documents joined; the preprocessing ends each with an end-of-sequence token) is cut into
windows of ``seq_len + 1`` tokens at multiples of ``seq_len``: the inputs are a window's first ``seq_len``
tokens, the targets its last. *Sample number* n, counted from 0 and never reset, is window ``permutation(seed,
epoch)(n mod N)`` of the N windows, with ``epoch = n div N``: a pure function of (seed, n). What a run has
consumed is therefore all samples below one number, whatever the data-parallel width, the microbatch size and
the restarts were.

A step takes the next ``microbatches * dp_size * microbatch_size`` numbers. Microbatch j of rank r holds, in
its row k,

    n = next_sample + (j * dp_size + r) * microbatch_size + k

so the ranks' j-th microbatches together are consecutive numbers, as in Megatron-LM's sampler; and two layouts
with equal global batch take the same samples in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.permutation import ALGORITHM, Permutation
from qeffect_lm.errors import UsageError, shown

STATE_VERSION = 1


@dataclass(frozen=True)
class StepBatch:
    """One data-parallel rank's part of one optimizer step: m microbatches of b sequences of s tokens.

    ``inputs``, ``targets`` int64 [m, b, s]; ``loss_mask`` float32 [m, b, s], 1 where the target counts and 0
    where not; ``sample_ids`` int64 [m, b], the global sample numbers (window numbers in an evaluation batch);
    ``tokens``, the number of counted targets over all data-parallel ranks, the one divisor of the step's loss
    (0 is possible when everything is masked).
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    sample_ids: torch.Tensor
    tokens: int


def num_windows(dataset: IndexedDataset, seq_len: int) -> int:
    """Number of windows of ``seq_len + 1`` tokens (neighbours share one); UsageError when there is not even
    one."""
    if seq_len < 1:
        raise UsageError(f"seq_len must be at least 1, not {seq_len}")
    windows = (dataset.num_tokens - 1) // seq_len
    if windows < 1:
        raise UsageError(
            f"dataset {dataset.prefix} has {dataset.num_tokens} tokens, but one sample of seq_len {seq_len} "
            f"needs {seq_len + 1}: use more text or a seq_len of at most {dataset.num_tokens - 1}"
        )
    return windows


class StepLoader:
    """Yields the steps of one data-parallel rank; the order is the module docstring's.

    ``microbatch_size`` counts sequences; ``mask_token_id`` names a token (padding) whose loss mask is 0 as a
    target, or None. Raises UsageError for sizes that are not positive, a rank outside ``range(dp_size)``, and
    a dataset shorter than one window.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        *,
        seq_len: int,
        microbatch_size: int,
        microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 1234,
        mask_token_id: int | None = None,
    ) -> None:
        _check_positive(microbatch_size=microbatch_size, microbatches=microbatches, dp_size=dp_size)
        if not 0 <= dp_rank < dp_size:
            raise UsageError(f"dp_rank {dp_rank} is outside the {dp_size} data-parallel ranks")
        self.dataset = dataset
        self.seq_len = seq_len
        self.microbatch_size = microbatch_size
        self.microbatches = microbatches
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.mask_token_id = mask_token_id
        self.windows = num_windows(dataset, seq_len)
        self.next_sample = 0

    @property
    def samples_per_step(self) -> int:
        """Samples of one step over all data-parallel ranks."""
        return self.microbatches * self.dp_size * self.microbatch_size

    def window_numbers(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The window of each sample number, same shape; a pure function of the seed and the number."""
        epochs, places = np.divmod(samples, self.windows)
        result = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = Permutation(self.windows, self.seed, int(epoch))(places[here])
        return result

    def next_step(self) -> StepBatch:
        """This rank's part of the next step; advances the cursor by ``samples_per_step``."""
        shape = (self.microbatches, self.dp_size, self.microbatch_size)
        numbers = self.next_sample + np.arange(self.samples_per_step, dtype=np.int64).reshape(shape)
        own = numbers[:, self.dp_rank]
        if self.mask_token_id is None:
            tokens = numbers.size * self.seq_len
        else:
            # Each rank reads the whole step's targets, so that all know the divisor without talking.
            targets = _read(self.dataset, self.window_numbers(numbers), self.seq_len)[..., 1:]
            tokens = int(np.count_nonzero(targets != self.mask_token_id))
        batch = _batch(
            _read(self.dataset, self.window_numbers(own), self.seq_len),
            own,
            self.mask_token_id,
            tokens=tokens,
        )
        self.next_sample += self.samples_per_step
        return batch

    def state(self) -> dict[str, Any]:
        """The cursor as a JSON object: the same on every rank."""
        return {"next_sample": self.next_sample, **self._identity()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues at ``state``'s sample; the batch size and the data-parallel width may differ from the
        saved ones.

        Raises UsageError, naming the key, where a value is missing or would give another sample order:
        version, seed, seq_len, dataset hash, algorithm, mask token. Nothing changes then.
        """
        for key, value in self._identity().items():
            if key not in state:
                raise UsageError(f"the saved data cursor has no {key!r}: the checkpoint is incomplete")
            if state[key] != value:
                raise UsageError(
                    f"the saved data cursor has {key} {shown(repr(state[key]))}, this run has {value!r} "
                    f"(dataset {self.dataset.prefix}): resume with the saved value, or start a new run"
                )
        position = state.get("next_sample")
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise UsageError(f"the saved data cursor's 'next_sample' is {shown(repr(position))}, not a sample number")
        self.next_sample = position

    def _identity(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "algorithm": ALGORITHM,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "mask_token_id": self.mask_token_id,
            "dataset_sha256": self.dataset.content_hash(),
        }


def sequential_batches(
    dataset: IndexedDataset,
    seq_len: int,
    microbatch_size: int,
    count: int,
    *,
    mask_token_id: int | None = None,
) -> StepBatch:
    """``count`` microbatches for evaluation, the same at each call: inputs [count, microbatch_size, seq_len].

    Their ``M = count * microbatch_size`` windows share no target and are spread evenly over the dataset's N:
    window ``floor(i * N / M)`` for i = 0, 1, ... Where N is smaller than M, as many whole microbatches as N
    fills. Raises UsageError for sizes that are not positive and for a dataset too small for one microbatch.
    """
    _check_positive(microbatch_size=microbatch_size, count=count)
    available = num_windows(dataset, seq_len)
    count = min(count, available // microbatch_size)
    if count == 0:
        raise UsageError(
            f"dataset {dataset.prefix} has {dataset.num_tokens} tokens, {available} windows of seq_len "
            f"{seq_len}, too few for one microbatch of {microbatch_size}: use more text, a smaller seq_len "
            "or a smaller microbatch_size"
        )
    places = np.arange(count * microbatch_size, dtype=np.int64)
    numbers = (places * available // len(places)).reshape(count, microbatch_size)
    return _batch(_read(dataset, numbers, seq_len), numbers, mask_token_id, tokens=None)


def _read(dataset: IndexedDataset, windows: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """Tokens of ``windows`` (any shape), int64 [..., seq_len + 1]."""
    places = windows[..., None] * seq_len + np.arange(seq_len + 1, dtype=np.int64)
    return np.asarray(dataset.tokens[places], dtype=np.int64)


def _batch(
    tokens_read: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    mask_token_id: int | None,
    tokens: int | None,
) -> StepBatch:
    """A batch from windows [m, b, s + 1]; ``tokens`` None counts this batch's own targets."""
    inputs, targets = tokens_read[..., :-1], tokens_read[..., 1:]
    mask = np.ones(targets.shape, dtype=np.float32)
    if mask_token_id is not None:
        mask[targets == mask_token_id] = 0.0
    return StepBatch(
        inputs=torch.from_numpy(np.ascontiguousarray(inputs)),
        targets=torch.from_numpy(np.ascontiguousarray(targets)),
        loss_mask=torch.from_numpy(mask),
        sample_ids=torch.from_numpy(np.ascontiguousarray(numbers)),
        tokens=int(np.count_nonzero(mask)) if tokens is None else tokens,
    )


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")

"""Statistics of a token set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.errors import UsageError

_BLOCK = 1 << 22


def token_counts(dataset: IndexedDataset, vocab: int) -> npt.NDArray[np.int64]:
    """How often each id in ``[0, vocab)`` occurs, int64 [vocab]; UsageError when the set has an id
    outside."""
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, dataset.num_tokens, _BLOCK):
        block = dataset.tokens[start : start + _BLOCK].astype(np.int64)
        for extreme in (int(block.min()), int(block.max())):
            if not 0 <= extreme < vocab:
                raise UsageError(
                    f"dataset {dataset.prefix} holds token id {extreme}, outside the vocabulary of {vocab}: "
                    "it was made with another tokenizer; preprocess it again, or set the vocabulary size to "
                    "that tokenizer's"
                )
        counts += np.bincount(block, minlength=vocab)
    return counts


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution that ``counts`` [n] (not all zero) is proportional to."""
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def unigram_entropy(dataset: IndexedDataset, vocab: int) -> float:
    """Empirical entropy of the token distribution, in nats per token: the loss of the best model without
    context.

    Raises UsageError when an id is outside ``[0, vocab)``.
    """
    return entropy(token_counts(dataset, vocab))

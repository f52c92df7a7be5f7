"""Perplexity: every token counted once, the numbers of a direct computation in float64, and ``transformers``'."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate import Evaluator
from qeffect_lm.app.assemble import assemble
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.loader import sequential_batches
from qeffect_lm.data.packing import Samples
from qeffect_lm.errors import UsageError
from qeffect_lm.inference import perplexity
from qeffect_lm.inference.model import InferenceModel
from qeffect_lm.inference.perplexity import Score, score, windows_of
from tests.hf_models import CONTEXT, VOCAB, make
from tests.random_model import random_model
from tests.runs import run_here, write_config
from tests.unit.test_generate_hf import imported


@pytest.fixture(scope="module")
def model() -> InferenceModel:
    return random_model(model__num_layers=2, data__seq_len=12)


def tokens_of(count: int, vocab: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, vocab, count).astype(np.uint16)


@settings(max_examples=300)
@given(tokens=st.integers(2, 200), context=st.integers(1, 40), data=st.data())
def test_every_token_is_counted_once_with_enough_before_it(tokens, context, data):
    stride = data.draw(st.integers(1, context))
    windows = windows_of(tokens, context, stride)
    counted = [place for window in windows for place in range(window.first, window.end)]
    assert counted == list(range(1, tokens))
    for number, window in enumerate(windows):
        assert window.start == number * stride and 0 <= window.start < window.first < window.end
        assert window.end - 1 - window.start <= context
        for place in range(window.first, window.end):
            assert place - window.start >= min(place, context - stride + 1)


def directly(model: InferenceModel, tokens: np.ndarray, stride: int) -> list[float]:
    """Nats of each token by the definition: a pass for each window, a sum in Python for each token."""
    ids, found = torch.from_numpy(tokens.astype(np.int64)), {}
    for start in range(0, len(tokens) - 1, stride):
        part = ids[start : start + model.context_length + 1]
        logits = model.logits(part[None, :-1])[0].double()
        for place, (row, wanted) in enumerate(zip(logits.tolist(), part[1:].tolist(), strict=True)):
            top = max(row)
            nats = top + math.log(math.fsum(math.exp(value - top) for value in row)) - row[wanted]
            found.setdefault(start + place + 1, nats)
    return [found[place] for place in range(1, len(tokens))]


@pytest.mark.parametrize("stride", [1, 5, 12])
@pytest.mark.parametrize("count", [2, 13, 14, 40])
def test_a_direct_computation_in_float64(model, count, stride):
    tokens = tokens_of(count)
    wanted = directly(model, tokens, stride)
    for batch in (1, 3):
        found = score(model, tokens, stride=stride, batch=batch)
        assert found.tokens == count - 1 == len(wanted)
        assert found.nats == pytest.approx(math.fsum(wanted), rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(math.fsum(wanted) / (count - 1)), rel=1e-12)
    assert found.bits_per_byte(7) == pytest.approx(math.fsum(wanted) / math.log(2) / 7, rel=1e-12)


def test_logits_in_parts_change_nothing(model, monkeypatch):
    tokens = tokens_of(60)
    whole = score(model, tokens)
    monkeypatch.setattr(perplexity, "LOGITS_AT_ONCE", 64 * 5)
    assert score(model, tokens).nats == pytest.approx(whole.nats, rel=1e-13)


def test_progress_adds_up(model):
    done: list[int] = []
    found = score(model, tokens_of(100), stride=4, batch=3, progress=done.append)
    assert sum(done) == found.windows == 23 and max(done) == 3


@pytest.mark.parametrize("name", ["llama", "qwen3-window-biases", "gpt2"])
@pytest.mark.parametrize("stride", [5, CONTEXT])
def test_theirs(name, stride):
    """Their loss over each window, of the labels that the window counts; float32 logits within 1e-6."""
    theirs = make(name)
    tokens = tokens_of(70, VOCAB, seed=3)
    total, ids = 0.0, torch.from_numpy(tokens.astype(np.int64))
    for window in windows_of(len(tokens), CONTEXT, stride):
        labels = ids[window.start : window.end].clone()
        labels[: window.first - window.start] = -100
        with torch.no_grad():
            logits = theirs(input_ids=ids[None, window.start : window.end - 1]).logits
        loss = torch.nn.functional.cross_entropy(logits[0].double(), labels[1:], reduction="sum", ignore_index=-100)
        total += float(loss)
    assert score(imported(theirs), tokens, stride=stride, batch=4).nats == pytest.approx(total, rel=1e-6)


def test_without_overlap_it_is_the_evaluation_of_training(tmp_path):
    """FP8, delayed scaling: the loss that training's own evaluation gives over the same windows; nothing is changed."""
    write_config(tmp_path)
    assert run_here(tmp_path, "run", "train.steps=3")[0] == 0
    loaded = load_for_inference(tmp_path / "run" / "checkpoints")
    dataset = IndexedDataset(tmp_path / "held_out")
    batch = sequential_batches(Samples(dataset, 16), 2, 63)
    tokens = dataset.tokens[: 63 * 2 * 16 + 1]
    before = {name: tensor.clone() for name, tensor in loaded.model.tensors.items() if tensor.dtype.itemsize > 1}
    found = score(loaded.model, tokens, batch=2)
    assert all(torch.equal(loaded.model.tensors[name], tensor) for name, tensor in before.items())

    from checkpoint.load import load_into
    from checkpoint.resume import PARAMETERS, SCALES

    assembly = assemble(loaded.config)
    load_into(loaded.checkpoint, [item for item in assembly.logical_tensors() if item.role in (*PARAMETERS, *SCALES)])
    assembly.rebuild_caches()
    assembly.ledger.begin_step(0)
    windows = [w for m in batch.sample_ids.tolist() for w in m]
    assert windows == list(range(126)), "the same windows"
    assert found.nats_per_token == pytest.approx(Evaluator(assembly.engine).run(batch), rel=1e-6)


def test_current_scaling_takes_windows_one_by_one():
    model = random_model("float32", precision__fp8__recipe="current")
    tokens = tokens_of(50)
    assert score(model, tokens, batch=4) == score(model, tokens, batch=1)


def test_beyond_all_numbers():
    assert Score(1e6, 10, 1).perplexity == math.inf


@pytest.mark.parametrize(
    ("tokens", "keys", "message"),
    [
        (10, {"stride": 0}, "--stride is 0; it must lie between 1 and the context of 12"),
        (10, {"stride": 13}, "--stride is 13"),
        (1, {}, "there are 1 tokens"),
        (10, {"batch": 0}, "--batch-size is 0"),
    ],
)
def test_wrong_requests(model, tokens, keys, message):
    with pytest.raises(UsageError, match=message):
        score(model, tokens_of(tokens), **keys)


def test_unknown_tokens_are_refused(model):
    with pytest.raises(UsageError, match="token id 64, the model knows 0 to 63"):
        score(model, np.array([1, 64, 2], dtype=np.uint16))
    with pytest.raises(UsageError, match="token id -1"):
        score(model, np.array([1, -1, 2], dtype=np.int32))

"""Greedy generation of imported models equals ``transformers.generate`` token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint.hf import import_tensors, model_section
from qeffect_lm.app.inference import build
from qeffect_lm.config import Config
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.inference.generator import Generator
from qeffect_lm.inference.model import InferenceModel
from qeffect_lm.inference.sampling import Sampling
from tests.hf_models import CONTEXT, MODELS, VOCAB, make, tensors

PROMPTS = [[3, 50, 7, 1], [12], [9, 9, 30, 2, 41, 0, 5, 6, 1], [VOCAB - 1, 20]]


class Imported:
    """Parameters of one of their models, under our names."""

    def __init__(self, made: dict[str, torch.Tensor]) -> None:
        self._made = made

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert tuple(self._made[name].shape) == shape
        return self._made[name].to(dtype)

    def cached(self, name: str) -> None:
        return None


def imported(theirs: Any) -> InferenceModel:
    section = model_section(theirs.config.to_diff_dict()).section
    config = {"run": {"device": "cpu"}, "model": section, "data": {"seq_len": CONTEXT}, "train": {"steps": 1}}
    return build(Config.from_dict(config), Imported(import_tensors(section, tensors(theirs))))


def their_tokens(theirs: Any, prompt: list[int], **keys: Any) -> list[int]:
    """Alone, without padding, as long as the context has room."""
    made = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=CONTEXT - len(prompt), pad_token_id=0, **keys,
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()


def our_tokens(model: InferenceModel, sampling: Sampling, **keys: Any) -> list[list[int]]:
    """All prompts as one batch, each as long as the context has room."""
    made: list[list[int]] = [[] for _ in PROMPTS]
    generator = Generator(model, sampling, 3, **keys)
    for new in generator.run(PROMPTS, CONTEXT - 1):
        made[new.prompt].append(new.token)
        if len(PROMPTS[new.prompt]) + len(made[new.prompt]) == CONTEXT:
            generator.stop(new.prompt)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_theirs(name):
    """Every family and rope scaling, through windows, past lengths where frequencies change; with a penalty too, under which
    random models do not repeat themselves."""
    theirs = make(name)
    model = imported(theirs)
    assert our_tokens(model, Sampling(temperature=0)) == [their_tokens(theirs, prompt) for prompt in PROMPTS]
    made = our_tokens(model, Sampling(temperature=0, repetition_penalty=1.7))
    assert made == [their_tokens(theirs, prompt, repetition_penalty=1.7) for prompt in PROMPTS]
    assert len({token for tokens in made for token in tokens}) > 5, "worth comparing"


@pytest.mark.parametrize("name", ["llama-dynamic", "gpt2", "qwen3-window-biases"])
def test_captured_too(name):
    theirs = make(name)
    made = our_tokens(imported(theirs), Sampling(temperature=0, repetition_penalty=1.7), graphs=HostReplay())
    assert made == [their_tokens(theirs, prompt, repetition_penalty=1.7) for prompt in PROMPTS]


def test_another_models_tokens_differ():
    theirs, other = make("llama"), make("llama", seed=1)
    assert our_tokens(imported(other), Sampling(temperature=0)) != [their_tokens(theirs, prompt) for prompt in PROMPTS]

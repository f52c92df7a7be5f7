"""Generation on a real GPU: a captured step gives the eager one's tokens, a cached pass the full one's logits.

    python -m pytest -q tests/gpu/test_generate_gpu.py
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from qeffect_lm.app.inference import build
from qeffect_lm.graphs.cuda_graphs import CudaGraphs
from qeffect_lm.inference.generator import Generator
from qeffect_lm.inference.model import InferenceModel
from qeffect_lm.inference.sampling import Sampling
from tests.random_model import RandomWeights
from tests.tiny import config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SIZES = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 2, "ffn_size": 512}
PROMPTS = [[1, 2, 3], [7] * 300, [40, 5], list(range(60)), [9]]


class SmallWeights(RandomWeights):
    """At this width the other tests' weights would let activations grow."""

    def parameter(self, name, shape, dtype):
        values = super().parameter(name, shape, dtype)
        return values if len(shape) == 1 else values / 4


@lru_cache
def model(dtype: str, recipe: str) -> InferenceModel:
    sizes = {f"model__{name}": value for name, value in SIZES.items()}
    settings = config(run__device="cuda", precision__dtype=dtype, precision__fp8__recipe=recipe, data__seq_len=600, **sizes)
    return build(settings, SmallWeights())


@pytest.mark.parametrize(("dtype", "recipe"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "delayed")])
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, 20, 0.9, 1.1)], ids=["greedy", "sampled"])
def test_captured_steps_are_the_eager_ones(dtype, recipe, sampling):
    """Rows of different lengths, more prompts than rows, steps over 256, 512 and all places, past the context."""
    made = []
    for graphs in (None, CudaGraphs(torch.cuda.Stream())):
        made.append(list(Generator(model(dtype, recipe), sampling, 3, graphs=graphs).run(PROMPTS, 320)))
    assert made[0] == made[1] and len(made[0]) == 5 * 320


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """``|a - b| / |b|``."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("dtype", "recipe"), [("float32", "none"), ("bfloat16", "delayed")])
def test_cached_passes_give_the_logits_of_full_ones(dtype, recipe):
    """In float32 within 1e-4 of their norm. In FP8, where other kernels of attention round other elements to other values, they
    are nearer to each other than either is to float32; those of the place before are not."""
    prompt, subject = PROMPTS[3], model(dtype, recipe)
    generator, made = Generator(subject, Sampling(0)), []
    chosen = generator._choose

    def spy(logits, rows):
        made.append(logits[0].clone())
        chosen(logits, rows)

    generator._choose = spy
    tokens = [*prompt, *(new.token for new in generator.run([prompt], 40))]
    places = torch.tensor([tokens[:-1]], device=subject.device)
    full, exact = (one.logits(places)[0, len(prompt) - 1 :] for one in (subject, model("float32", "none")))
    bound = 1e-4 if recipe == "none" else distance(full, exact)
    assert distance(torch.stack(made), full) <= bound < 0.5
    assert distance(torch.stack(made)[:-1], full[1:]) > 2 * bound

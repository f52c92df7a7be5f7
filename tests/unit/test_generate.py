"""Generation: the KV cache gives what full passes give, scales stay, sampling options do what they say."""

from __future__ import annotations

import pytest
import torch

from qeffect_lm.app.generate import Generator, Sampling, choose, load_for_inference
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.attention import KVCache
from tests.runs import run_here, write_config
from tests.tiny import differing


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    write_config(folder)
    assert run_here(folder, "run")[0] == 0
    return folder


def test_loads_what_was_saved(trained):
    """Masters, scales and rebuilt caches equal the checkpoint's, and generating changes none of them."""
    from tests.runs import checkpoint_of

    assembly, step = load_for_inference(trained / "run" / "checkpoints")
    saved = checkpoint_of(trained, "run")
    assert step == 12

    def now() -> dict[str, torch.Tensor]:
        items = {item.name: item.tensor.clone() for item in assembly.logical_tensors()}
        loaded = {n: t for n, t in items.items() if not n.startswith(("moment", "opt"))}
        return {n: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for n, t in loaded.items()}

    before = now()
    as_saved = {n: saved.read(n) for n in before}
    as_saved = {n: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for n, t in as_saved.items()}
    assert differing(as_saved, before) == []
    assert len(list(Generator(assembly).stream([1, 2, 3], 40, Sampling()))) == 40  # past the context of 16
    assert differing(before, now()) == []


def test_cache_equals_full_passes(trained):
    """One token at a time with the cache against one pass over all: equal up to float32 rounding in the attention's sums."""
    assembly, _ = load_for_inference(trained / "run" / "checkpoints")
    generator = Generator(assembly)
    tokens = torch.arange(12)[None] * 5 % 64
    full = generator.logits(tokens)
    cache = KVCache({})
    pieces = [generator.logits(tokens[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, 9), (9, 12))]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-4, atol=1e-4)


def test_same_seed_same_text(trained):
    assembly, _ = load_for_inference(trained / "run" / "checkpoints")
    generator = Generator(assembly)
    texts = [list(generator.stream([7], 12, Sampling(seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_choose():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    draw = torch.Generator().manual_seed(0)
    assert choose(logits, Sampling(temperature=0), draw) == 1
    assert {choose(logits, Sampling(temperature=5, top_k=2), draw) for _ in range(60)} == {1, 2}
    assert {choose(logits, Sampling(temperature=5, top_k=0), draw) for _ in range(200)} == {0, 1, 2, 3}
    assert {choose(logits, Sampling(temperature=1, top_k=0, top_p=0.6), draw) for _ in range(60)} == {1}
    with pytest.raises(UsageError, match="temperature"):
        Sampling(temperature=-1)
    with pytest.raises(UsageError, match="top-p"):
        Sampling(top_p=0)

"""Generation: the cache gives what full passes give, sequences do not know their neighbours, captured steps are eager ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.app import inference
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.errors import UsageError
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.inference import generator as module
from qeffect_lm.inference.generator import Generator, NewToken
from qeffect_lm.inference.model import InferenceModel
from qeffect_lm.inference.sampling import Sampling, choose
from tests.random_model import RandomWeights, random_model
from tests.runs import checkpoint_of, run_here, write_config
from tests.tiny import config, differing
from tests.tiny import logits_of as training_logits

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model() -> InferenceModel:
    return random_model(model__num_layers=2)  # float64: what rounding changes is far below what decides between two tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    write_config(folder)
    assert run_here(folder, "run", "train.steps=3")[0] == 0
    return folder


def tokens_of(made: Sequence[NewToken], prompts: int) -> list[list[int]]:
    return [[new.token for new in made if new.prompt == number] for number in range(prompts)]


def without_cache(model: InferenceModel, prompt: Sequence[int], sampling: Sampling, count: int, copy: int = 0) -> list[int]:
    """The definition: a full pass over what the model may see, for each token."""
    tokens, first = list(prompt), max(0, len(prompt) - model.context_length)
    for number in range(count):
        if len(tokens) - first > model.context_length:
            first = len(tokens) - model.context_length // 2
        logits = model.logits(torch.tensor([tokens[first:]]))[:, -1]
        held = torch.zeros(logits.shape, dtype=torch.bool)
        held[0, tokens] = True
        key = torch.tensor([sampling.key(prompt, copy)])
        tokens.append(int(choose(logits, sampling, key, torch.tensor([number]), held)))
    return tokens[len(prompt) :]


PROMPTS = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=4)


@settings(max_examples=15)
@given(
    prompts=PROMPTS,
    rows=st.integers(1, 4),
    count=st.integers(1, 22),
    sampling=st.sampled_from([GREEDY, Sampling(1.0, 0), Sampling(1.3, 10, 0.9, 1.2, seed=5)]),
    places=st.sampled_from([2, 256]),
)
def test_cached_and_batched_is_the_definition(model, prompts, rows, count, sampling, places):
    """Prompts of different lengths, side by side or waiting for a row, past the context of 16 and past the places that a
    step looks at: each gets the tokens that full passes over it alone give."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PLACES", places)
        made = list(Generator(model, sampling, rows).run(prompts, count))
    copies = [prompts[:number].count(prompt) for number, prompt in enumerate(prompts)]
    wanted = [without_cache(model, p, sampling, count, copy) for p, copy in zip(prompts, copies, strict=True)]
    assert tokens_of(made, len(prompts)) == wanted
    assert [new.reason for new in made if new.reason] == ["length"] * len(prompts)


def test_a_model_without_a_cache_gets_full_passes(monkeypatch):
    """Its attention says nothing of a cache, and sees none."""
    from qeffect_lm.layers.attention import Attention

    plain = Attention.forward

    def forward(self, x, context, norm=None, *, residual=False):
        assert context.cache is None
        return plain(self, x, context, norm, residual=residual)

    monkeypatch.setattr(Attention, "caches", False)
    monkeypatch.setattr(Attention, "forward", forward)
    model = random_model(model__num_layers=2)
    assert not model.caches
    prompts, sampling = [[1, 2, 3], [9] * 20, [5]], Sampling(1.0, 0)
    made = tokens_of(list(Generator(model, sampling, 2, graphs=HostReplay()).run(prompts, 19)), 3)
    assert made == [without_cache(model, prompt, sampling, 19) for prompt in prompts]


def test_equal_prompts_draw_their_own(model):
    made = tokens_of(list(Generator(model, Sampling(1.0, 0), 2).run([[1, 2], [3], [1, 2]], 12)), 3)
    assert made[0] != made[2] and made[0] == without_cache(model, [1, 2], Sampling(1.0, 0), 12)


def logits_of(model: InferenceModel, prompts: list[list[int]], rows: int, which: int, count: int = 20) -> torch.Tensor:
    """What the tokens of prompt ``which`` were chosen from; the prompts must all have a row from the start."""
    generator, seen, found = Generator(model, GREEDY, rows), {}, []
    chosen = generator._choose

    def spy(logits: torch.Tensor, part: slice) -> None:
        seen.update(dict(zip(range(rows)[part], logits.clone(), strict=True)))
        chosen(logits, part)

    generator._choose = spy
    for new in generator.run(prompts, count):
        if new.prompt == which:
            found.append(seen[which])
    return torch.stack(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_as_many_rows_the_bits_do_not_depend_on_the_neighbours(dtype):
    """Alone, beside shorter prompts, beside one of 600 tokens, in another row: equal bits, since every step has the same shape
    and masked places add zeros. With another number of rows only the sums' rounding differs (float32: 1e-5 of the largest
    logit; it was 2e-6)."""
    model = random_model(dtype, data__seq_len=700, model__hidden_size=64, model__ffn_size=96)
    long = [number * 7 % 64 for number in range(600)]
    prompt = [5, 9, 33, 2, 60]
    alone = logits_of(model, [prompt], 4, 0)
    assert torch.equal(logits_of(model, [prompt, [1], [2, 3, 4]], 4, 0), alone)
    assert torch.equal(logits_of(model, [[1] * 30, long, prompt], 4, 2), alone)
    if dtype == "float32":
        single = logits_of(model, [prompt], 1, 0)
        assert float((single - alone).abs().max()) <= 1e-5 * float(alone.abs().max())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.2, 20, 0.95, 1.1)], ids=["greedy", "sampled"])
def test_captured_is_eager(sampling, monkeypatch):
    """Steps as graphs, one for each number of places: equal tokens, several graphs, each given back."""
    monkeypatch.setattr(module, "PLACES", 4)
    model = random_model("float32")
    prompts = [[1, 2, 3], [4], [5] * 9, [6, 7]]
    eager = list(Generator(model, sampling, 3).run(prompts, 20))
    captured, reset = [], []

    class Backend(HostReplay):
        def capture(self, label, work, **kwargs):
            graph = super().capture(label, work, **kwargs)
            captured.append(label)
            graph.reset = lambda: reset.append(label)
            return graph

    made = list(Generator(model, sampling, 3, graphs=Backend()).run(prompts, 20))
    assert made == eager
    assert captured == reset and sorted(captured) == [f"generation over {n} places" for n in (16, 4, 8)]


def test_nothing_in_a_step_reads_on_the_host():
    """A capture refuses it; here one that asks the device for a length."""
    model = random_model("float32")
    model.hidden = lambda tokens, cache, hidden=model.hidden: hidden(tokens[:, : int(cache.lengths.max()) + 1], cache)
    with pytest.raises(CaptureError, match="generation over 256 places"):
        list(Generator(model, GREEDY, 2, graphs=HostReplay()).run([[1, 2]], 3))


def test_ends(model):
    """End tokens are given out as the last; a prompt that is stopped gets no further token, and its row goes to the next."""
    whole = without_cache(model, [3, 1], GREEDY, 16)
    end = whole[5]
    at = whole.index(end) + 1
    made = list(Generator(model, GREEDY, end={end}).run([[3, 1]], 16))
    assert tokens_of(made, 1) == [whole[:at]] and made[-1].reason == "eos"

    generator, made = Generator(model, GREEDY, 2), []
    for new in generator.run([[3, 1], [2], [8, 8]], 10):
        made.append(new)
        if new.prompt == 0 and len(tokens_of(made, 1)[0]) == 4:
            generator.stop(0)
    assert [len(tokens) for tokens in tokens_of(made, 3)] == [4, 10, 10]
    assert tokens_of(made, 3)[2] == without_cache(model, [8, 8], GREEDY, 10)


def test_only_known_ids_are_chosen(model):
    made = list(Generator(model, Sampling(5.0, 0), 2, vocab=7).run([[1], [60, 2]], 30))
    assert {new.token for new in made} == set(range(7))


def test_current_scaling_runs_one_sequence_at_a_time():
    """A scale of a whole tensor would depend on who else is in it."""
    model = random_model("float32", precision__fp8__recipe="current")
    assert model.alone and Generator(model, GREEDY, 4).rows == 1
    prompts = [[1, 2, 3], [40, 5]]
    both = tokens_of(list(Generator(model, GREEDY, 4).run(prompts, 8)), 2)
    assert both == [tokens_of(list(Generator(model, GREEDY).run([prompt], 8)), 1)[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "count", "rows", "message"),
    [
        ([[1], []], 3, 1, "prompt 2 has no token"),
        ([[1, 64]], 3, 1, "prompt 1 has token id 64, the model knows 0 to 63"),
        ([[1]], 0, 1, "--max-new-tokens is 0"),
        ([[1]], 1, 0, "--batch-size is 0"),
    ],
)
def test_wrong_requests(model, prompts, count, rows, message):
    with pytest.raises(UsageError, match=message):
        list(Generator(model, GREEDY, rows).run(prompts, count))


# ---- loading -------------------------------------------------------------------------------------------------------


def test_loads_what_was_saved_and_changes_nothing(trained):
    """FP8: cached weights and scales are the checkpoint's bytes, before generating and after."""
    saved, loaded = checkpoint_of(trained, "run"), load_for_inference(trained / "run" / "checkpoints")
    assert loaded.checkpoint.step == 3 and loaded.model.context_length == 16

    def live() -> dict[str, torch.Tensor]:
        return {n: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).clone() for n, t in loaded.model.tensors.items()}

    before = live()
    fp8 = [name for name in before if name.endswith("/rows")]
    assert len(fp8) == 16
    for name in fp8:
        assert before[name].equal(saved.read(f"cached_weight/{name[:-5]}").view(torch.uint8))
    assert before["head.weight"].equal(saved.read("master/head.weight"))
    scales = {n.removeprefix("scale/"): float(saved.read(n)) for n in saved.names() if n.startswith("scale/")}
    assert set(scales.values()) <= set(before["scale"].tolist()) and len(set(scales.values())) > 5
    assert len(list(Generator(loaded.model, Sampling(), 2).run([[1, 2, 3], [5]], 40))) == 80
    assert differing(before, live()) == []


def test_fp8_generation_reads_the_scales_that_training_left(trained):
    """The same tokens as the training's own model gives in evaluation, cache rebuilt from its masters."""
    from checkpoint.load import load_into
    from checkpoint.resume import PARAMETERS, SCALES
    from qeffect_lm.app.assemble import assemble

    loaded, saved = load_for_inference(trained / "run" / "checkpoints"), checkpoint_of(trained, "run")
    assembly = assemble(loaded.config)
    load_into(saved, [item for item in assembly.logical_tensors() if item.role in (*PARAMETERS, *SCALES)])
    assembly.rebuild_caches()
    tokens = torch.arange(15)[None] * 5 % 64
    wanted = training_logits(assembly, tokens)
    assert torch.equal(loaded.model.logits(tokens), wanted)
    high = load_for_inference(trained / "run" / "checkpoints", fp8=False).model.logits(tokens)
    assert 0 < float((high - wanted).abs().max()) < 0.2 * float(wanted.abs().max())


def test_a_model_that_does_not_fit_is_refused(trained, monkeypatch):
    """Before anything is allocated; a byte more would do."""
    needed = []
    monkeypatch.setattr(inference, "check_memory", lambda size, *_: needed.append(size))
    loaded = load_for_inference(trained / "run" / "checkpoints")
    monkeypatch.undo()
    tables = ("scale", ".cos", ".sin", "/scale_inv")
    held = [t.numel() * t.element_size() for n, t in loaded.model.tensors.items() if not n.endswith(tables)]
    assert needed == [sum(held)]
    monkeypatch.setattr(inference, "free_bytes", lambda device: needed[0] - 1)
    with pytest.raises(UsageError, match=r"the model needs .* on cpu, where .* are free"):
        load_for_inference(trained / "run" / "checkpoints")
    monkeypatch.setattr(inference, "free_bytes", lambda device: needed[0])
    load_for_inference(trained / "run" / "checkpoints")


def test_context(trained):
    """A shorter context takes the same tables; a longer one lets positions beyond the trained ones be used."""
    path = trained / "run" / "checkpoints"
    short, long = load_for_inference(path, context=5).model, load_for_inference(path, context=41).model
    tokens = torch.arange(16)[None]
    assert (short.context_length, long.context_length) == (5, 41)
    assert torch.equal(short.logits(tokens), long.logits(tokens))
    assert long.logits(torch.arange(41)[None]).shape == (1, 41, 64)
    with pytest.raises(UsageError, match="--context is 0"):
        load_for_inference(path, context=0)


def test_float16_weights_of_an_imported_model_are_widened():
    """What a conversion saves may have another dtype than the passes."""
    model = random_model("float32")
    weights = RandomWeights()

    class Half:
        def parameter(self, name, shape, dtype):
            return weights.parameter(name, shape, torch.float16).to(dtype)

        cached = weights.cached

    half = inference.build(config(precision__fp8__recipe="none"), Half())
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(half.logits(tokens), model.logits(tokens), rtol=0.05, atol=0.05)

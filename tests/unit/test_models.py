"""The decoder: parameter specs equal what chunks hold for every split, initial weights do not depend on the
layout, FP8 where it belongs, and the whole model's gradients against float64 autograd of a plain
formulation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

from models import build_model
from models.spec import layer_range
from qeffect_lm.app.assemble import assemble
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.base import direct_layers, named_parameters, split_layers
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.dropout import KeyedDropout
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.runtime.init import initialise_
from tests.decoders import llama_decoder
from tests.tiny import config, differing, local_plan
from tests.unit.layer_harness import Harness, plain_attention

LAYERS = 5


def decoder(**overrides):
    sizes = {
        "vocab_size": 11,
        "hidden_size": 8,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,  # H4: not hidden / heads
        "ffn_size": 10,
        "max_positions": 7,
        "dtype": torch.float64,
    }
    return llama_decoder(**{**sizes, **overrides})


SPLITS = [(5,), (3, 2), (1, 4), (2, 2, 1), (0, 5), (5, 0), (2, 0, 3), (0, 0, 5, 0), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_specs_equal_what_chunks_hold(counts):
    """G6: any split, uneven or with empty stages: the chunks together hold each parameter of the specs once,
    in global order, with its shape; a meta chunk says the same without storage."""
    model = decoder()
    specs = model.parameters()
    chunks = [model.chunk(i, counts) for i in range(len(counts))]
    held = [(name, tuple(p.shape)) for chunk in chunks for name, p in named_parameters(chunk)]
    assert held == [(spec.name, spec.shape) for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs) == 6 * LAYERS + 3
    for i, chunk in enumerate(chunks):
        meta = model.meta_chunk(i, counts)
        assert [n for n, _ in named_parameters(meta)] == [n for n, _ in named_parameters(chunk)]
        assert all(p.is_meta for p in meta.parameters())
        assert (chunk.first, chunk.last) == (i == 0, i == len(counts) - 1)
        for layer in layer_range(i, counts):
            wanted = [spec.name for spec in model.parameters([layer])]
            assert wanted == [n for n, _ in named_parameters(chunk) if n.startswith(f"layers.{layer}.")]
        assert {layer.weight_name for layer in direct_layers(chunk)} == {n for n, _ in named_parameters(chunk)}
        matrices = [n for n, p in named_parameters(chunk) if p.dim() == 2]
        assert len(split_layers(chunk)) == len(matrices) - (i == 0)


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_layer_range(counts):
    ranges = [layer_range(i, counts) for i in range(len(counts))]
    assert [i for r in ranges for i in r] == list(range(sum(counts))) and [len(r) for r in ranges] == counts


def test_specs_say_how_to_initialise_and_decay():
    """Norms are ones and do not decay; what writes to the residual stream starts smaller; axes fit the
    shapes."""
    for spec in decoder(init_std=0.5).parameters():
        norm = "norm" in spec.name
        assert (spec.init_std is None, spec.decay) == (norm, not norm)
        assert len(spec.axes) == len(spec.shape) and (not norm or spec.axes == (None,))
        if not norm:
            into_residual = spec.name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert spec.init_std == pytest.approx(0.5 / math.sqrt(2 * LAYERS) if into_residual else 0.5)
            assert spec.axes == ((None, "tp") if into_residual else ("tp", None))


# ---- initial weights ---------------------------------------------------------------------------------------


def initial(names: list[str] | None = None, seed: int = 1234, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    specs = {spec.name: spec for spec in decoder().parameters()}
    names = list(specs) if names is None else names
    made = {name: torch.full(specs[name].shape, torch.nan, dtype=dtype) for name in names}
    initialise_({name: (made[name], specs[name].init_std) for name in names}, seed)
    return made


@settings(max_examples=20)
@given(data=st.data())
def test_initial_weights_do_not_depend_on_the_layout(data):
    """Any subset in any order gets the values of the whole; another seed others; each parameter its own."""
    whole = initial()
    names = data.draw(st.lists(st.sampled_from(sorted(whole)), unique=True, min_size=1))
    assert differing(initial(names), {name: whole[name] for name in names}) == []


def test_initial_weights():
    whole = initial()
    matrices = [n for n, t in whole.items() if t.dim() == 2]
    assert all((t == 1).all() for n, t in whole.items() if t.dim() == 1)
    assert all(not torch.equal(whole[n], other) for n in matrices for other in [initial([n], seed=1)[n]])
    qkv = [whole[f"layers.{i}.attention.qkv.weight"] for i in range(LAYERS)]
    assert len({float(t.sum()) for t in qkv}) == LAYERS
    wide = initial(dtype=torch.float64)
    assert all(torch.equal(wide[n].float(), whole[n]) for n in whole), "the same values in any dtype"
    every = torch.cat([t.flatten() for n, t in whole.items() if n.endswith(("qkv.weight", "gate_up.weight"))])
    assert abs(every.std().item() / 0.02 - 1) < 0.05 and abs(every.mean().item()) < 0.002


def test_assembly_starts_equal_on_every_layout():
    """The same through assembly: masters and caches of one, two and three stages are bitwise equal."""
    runs = []
    for plan in (None, local_plan(2, 4), local_plan(3, 4)):
        assembly = assemble(config(), plan=plan)
        assembly.rebuild_caches()
        runs.append(
            {
                t.name: t.tensor.view(torch.uint8) if t.tensor.dtype.itemsize == 1 else t.tensor
                for t in assembly.logical_tensors()
            }
        )
    assert differing(runs[0], runs[1]) == [] and differing(runs[0], runs[2]) == []
    assert differing(runs[0], {t.name: t.tensor for t in assemble(config(run__seed=2)).logical_tensors()}) != []


# ---- FP8, dropout, family ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 0), (0, 2), (2, 1), (5, 0), (3, 3)])
def test_where_fp8_is(first, last):
    """Decoder linears only, less the kept layers at both ends; never embedding and head; on every split
    alike."""
    model = decoder(recipe=DelayedScaling(), high_precision_first=first, high_precision_last=last)
    wanted = {f"layers.{i}" for i in range(first, LAYERS - last)}
    for counts in SPLITS:
        linears = [m for i in range(len(counts)) for m in model.chunk(i, counts).modules() if isinstance(m, SplitLinear)]
        in_fp8 = [m.name for m in linears if m.recipe is not None]
        assert len(linears) == 4 * LAYERS + 1 and len(in_fp8) == 4 * len(wanted)
        assert {".".join(name.split(".")[:2]) for name in in_fp8} == wanted


def test_dropout_layers_have_their_own_names():
    """Each draws with its own role: two equal names would share a mask."""
    chunk = decoder(dropout=0.1).chunk(0, (LAYERS,))
    layers = [m for m in chunk.modules() if isinstance(m, KeyedDropout)]
    assert len(layers) == 2 * LAYERS + 1 == len({layer.role for layer in layers})
    assert all(layer.p == 0.1 for layer in layers)


def test_family():
    """The configuration's sizes reach the model; an unknown family is refused by name."""
    sizes = {
        "model__head_dim": 10,
        "model__rope_theta": 77.0,
        "model__norm_eps": 0.25,
        "model__init_std": 0.5,
    }
    settings_ = config(**sizes, precision__fp8__recipe="none")
    model = build_model(settings_, None, torch.float32)
    chunk = model.chunk(0, [4])
    attention = chunk.blocks[1].attention
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (4, 2, 10)
    assert attention.cos.shape == (16, 5) and attention.cos[1, 1].item() == pytest.approx(math.cos(77.0**-0.2))
    assert chunk.blocks[1].attention_norm.eps == 0.25 and model.parameters()[0].init_std == 0.5
    broken = settings_.model_copy(update={"model": settings_.model.model_copy(update={"family": "gpt"})})
    with pytest.raises(UsageError, match="'gpt'; the families are llama"):
        build_model(broken, None, torch.float32)


# ---- the whole model ---------------------------------------------------------------------------------------


def plain_loss(p: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, layers: int):
    """The decoder as one function of its parameters, and its logits."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * p[f"{name}.weight"]

    x = p["embedding.weight"][tokens]
    rows = ([0, 1, 4, 5], [2, 2, 6, 6], [3, 3, 7, 7])
    for i in range(layers):
        at = f"layers.{i}"
        weights = p[f"{at}.attention.qkv.weight"], p[f"{at}.attention.out.weight"]
        x = x + plain_attention(norm(x, f"{at}.attention_norm"), *weights, rows, 6, 10000.0)
        gate, up = (norm(x, f"{at}.mlp_norm") @ p[f"{at}.mlp.gate_up.weight"].t()).split(10, dim=-1)
        x = x + (functional.silu(gate) * up) @ p[f"{at}.mlp.down.weight"].t()
    logits = norm(x, "final_norm") @ p["head.weight"].t()
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum(), logits


def test_model_against_plain_autograd():
    """Loss and the gradient of every parameter over two microbatches, within 1e-12 of the largest; in
    evaluation without targets the same chunk gives the logits."""
    model = decoder(num_layers=2)
    chunk = model.chunk(0, [2])
    harness = Harness(chunk, first=True, last=True)
    harness.fill(1, scale=0.5)
    harness.divisor.fill_(20.0)
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, 11, (2, 2, 7), generator=generator) for _ in range(2))
    mask = (torch.rand(2, 2, 7, generator=generator) > 0.3).float()
    one = torch.ones((), dtype=torch.float64)
    microbatches = [harness.microbatch(i, tokens[i], one, targets=targets[i], mask=mask[i]) for i in range(2)]
    harness.run(microbatches)

    wide = {name: p.detach().clone().requires_grad_() for name, p in harness.parameters.items()}
    results = [plain_loss(wide, tokens[i], targets[i], mask[i], 2) for i in range(2)]
    for m, (loss, _) in zip(microbatches, results, strict=True):
        assert abs(m.out.item() - loss.item() / 20) < 1e-12 * loss.item()
    grads = torch.autograd.grad((results[0][0] + results[1][0]) / 20, list(wide.values()))
    for name, grad in zip(wide, grads, strict=True):
        assert grad.count_nonzero() > 0
        assert (harness.grads[name] - grad).abs().max() < 1e-12 * max(1.0, grad.abs().max().item()), name
    with torch.no_grad():
        logits = chunk(tokens[0], LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64)))
    assert (logits - results[0][1]).abs().max() < 1e-12 * logits.abs().max()

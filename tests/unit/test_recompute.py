"""Activation recompute: the same bits on or off (S3), F run once more in I and never again (L8), and less kept in between."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from models.decoder import DecoderBlock
from models.spec import Chunk
from pipeline.measure import saved_tensors
from qeffect_lm.app.dry_run import describe
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Scope
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.linear import SplitLinear
from tests.tiny import Trained, assert_moved, batch, config, differing, local_plan, train
from tests.unit.layer_harness import Harness, check, pairs

MODES = ("full", "selective")
RECIPES: dict[str, dict[str, Any]] = {
    "step": {},
    "microbatch": {"precision__fp8": {"recipe": "delayed", "window": "microbatch", "history": 3}},
    "current": {"precision__fp8": {"recipe": "current"}},
    "none": {"precision__fp8": {"recipe": "none"}},
    "bfloat16": {"precision": {"dtype": "bfloat16"}},
}


def two(seed: int):
    return batch(seed, microbatches=2)


def run(steps: int = 3, plan=None, **keys: Any) -> Trained:
    settings = {"model__dropout": 0.1, "pipeline__microbatches": 2, **keys}
    return train(config(**settings), steps, plan=plan, batches=two)


def same(a: Trained, b: Trained) -> None:
    assert a.losses == b.losses and a.norms == b.norms and differing(a.tensors, b.tensors) == []
    assert a.assembly.timeline.state() == b.assembly.timeline.state(), "as many commits and rolls"


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_or_off_the_same_bits(recipe):
    """Losses, weights, moments, scales, histories, open slots and caches, with dropout; a list of layers too."""
    off = run(**RECIPES[recipe])
    if recipe == "step":
        assert_moved(off)
    for mode in MODES:
        same(run(**RECIPES[recipe], model__recompute=mode), off)
    same(run(**RECIPES[recipe], model__recompute="full", model__recompute_layers=(1, 3)), off)
    assert run(1, **RECIPES[recipe], model__dropout=0.2).losses[0] != off.losses[0], "dropout is in it"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "how",
    [
        {"graphs__backend": "host_replay"},
        {"graphs": {"backend": "host_replay", "scope": "step"}},
        {"pipeline__coalesce_w": 2},
        {"contract__poison": True},
        {"stages": 3},
    ],
    ids=["captured", "captured step", "W coalesced", "poison", "three stages"],
)
def test_however_it_runs(mode, how):
    keys = {key: value for key, value in how.items() if key != "stages"}
    plan = local_plan(3, 2) if "stages" in how else None
    coalesced = {"pipeline__coalesce_w": 2} if "pipeline__coalesce_w" in how else {}
    same_as = run(**coalesced)
    same(run(**keys, plan=plan, model__recompute=mode), same_as)


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"num_kv_heads": 4, "tie_word_embeddings": True},
    "qwen3": {"attention_bias": "all"},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, mode):
    """Biases and norms that autograd differentiates, q/k norm, a window."""
    keys = {"model__family": family, **{f"model__{key}": value for key, value in FAMILIES[family].items()}}
    same(run(2, **keys, model__recompute=mode), run(2, **keys))


CALLS = ("read_scale", "report_amax", "retain", "input_grad_done", "take_weight_grad", "write_grad")


def test_forward_runs_twice_and_effects_once(monkeypatch):
    """L8: per microbatch every block runs in F and once in I, before its own I; W runs none. The contract hears of each effect
    as often as without."""
    blocks: list[tuple[str, str]] = []
    effects: list[tuple[str, ...]] = []
    forward = DecoderBlock.forward

    def spied_forward(self, x, context):
        blocks.append((context.active_scope().kind if context.training else "calibration", self.name))
        return forward(self, x, context)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderBlock, "forward", spied_forward)
        for name in CALLS:
            original = getattr(Scope, name)

            def spy(self, *arguments, _name=name, _original=original):
                effects.append((self.kind, str(self.microbatch), _name, *(a for a in arguments if isinstance(a, str))))
                return _original(self, *arguments)

            patch.setattr(Scope, name, spy)

        def counted(mode: str) -> tuple[list, list]:
            blocks.clear()
            effects.clear()
            run(1, model__recompute=mode, model__dropout=0.0)
            return [call for call in blocks if call[0] in "FIW"], sorted(effects)

        (plain, wanted), (twice, heard), (selected, also) = (counted(mode) for mode in ("none", *MODES))
    names = [f"layers.{i}" for i in range(4)]
    assert sorted(plain) == sorted(("F", name) for name in names for _ in range(2)) == sorted(selected)
    assert sorted(twice) == sorted((kind, name) for kind in "FI" for name in names for _ in range(2))
    assert [name for kind, name in twice if kind == "I"] == names[::-1] * 2, "each right before its own I"
    assert heard == wanted and also == wanted and len(wanted) > 100


@pytest.mark.parametrize(("mode", "more"), [("none", 0), ("full", 3), ("selective", 0)])
def test_which_products_run_again(mode, more, monkeypatch):
    """full: qkv, out and gate_up of each layer, not down, whose value nobody reads; selective: none."""
    from qeffect_lm.layers import linear

    original, count = linear.scaled_mm, []
    monkeypatch.setattr(linear, "scaled_mm", lambda *a, **k: (count.append(1), original(*a, **k))[1])
    run(1, model__recompute=mode)
    assert len(count) == 2 * 4 * (4 + 4 + more)  # microbatches, layers, products of F and I


def kept(mode: str, recipe: str) -> tuple[int, int]:
    """Bytes that a microbatch holds after F (autograd's and the leases'), and after I."""
    assembly = run(1, **RECIPES[recipe], model__recompute=mode, model__dropout=0.0).assembly
    stage, ledger = assembly.engine.stages[0], assembly.ledger
    slot, slots = stage.slots[0], (Slot("I", 0, 0), Slot("W", 0, 0))

    def held(saved) -> int:
        payloads = [t for payload in ledger.leases.payloads(0, 0).values() for t in payload.tensors()]
        found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*payloads, *saved)}
        return sum(size for storage, size in found.items() if storage not in known)

    known = {p.untyped_storage()._cdata for p in assembly.flat.__dict__.values() if isinstance(p, torch.Tensor)}
    known |= {t.untyped_storage()._cdata for t in (assembly.timeline.scale, *slot.tensors().values())}
    known |= {b.untyped_storage()._cdata for b in stage.chunk.buffers()}
    ledger.begin_step(5)
    with ledger.action("F", 0, 0, slots=slots) as scope:
        stage.forward(slot, scope)
    after_f = held(saved_tensors(slot.saved[1]))
    with ledger.action("I", 0, 0, beta=0) as scope:
        stage.input_grad(slot, scope)
    after_i = held(())
    ledger.abandon_step()
    return after_f, after_i


@pytest.mark.parametrize("recipe", ["step", "none"])
def test_less_is_kept(recipe):
    """After F full keeps each layer's input, selective also the projection, the MLP's input and its first product, exactly (but
    for a few scales); after I all keep what W needs."""
    (off, w), (full, w_full), (selective, w_selective) = (kept(mode, recipe) for mode in ("none", *MODES))
    assert w == w_full == w_selective > 0
    bytes_of_one = 4 * 2 * 16  # of a feature: float32, 2 sequences of 16 tokens
    hidden, qkv, gate_up, vocab = 32, 64, 96, 64
    rest = bytes_of_one * (hidden + hidden + vocab)  # of final norm, head and loss, whatever the mode
    for got, features in ((full, hidden), (selective, 2 * hidden + qkv + gate_up)):
        assert 0 <= got - rest - 4 * bytes_of_one * features < 512, (off, full, selective)
    assert off > 1.4 * selective


def test_the_dry_run_says_what_it_saves():
    """Of bfloat16 activations, per layer and microbatch; with some layers only those; W's operands from I on."""

    def page(**keys: Any) -> str:
        model = {f"model__{key}": value for key, value in keys.items()}
        return describe(config(**RECIPES["bfloat16"], data__seq_len=1024, **model))

    def held(text: str) -> float:
        row = next(line.split() for line in text.splitlines() if len(line.split()) == 7 and line.split()[0] == "0")
        return float(row[5])

    off, full, two_of_them = page(), page(recompute="full"), page(recompute="full", recompute_layers=(0, 2))
    assert "model.recompute full, 4 of 4 layers" in full and "model.recompute full, 2 of 4 layers" in two_of_them
    assert "model.recompute" not in off
    assert held(full) <= held(two_of_them) < held(off)  # the peak is where W's operands wait, whichever layers made them
    for text in (full, two_of_them, page(recompute="selective")):
        kept, instead = (float(found) for found in re.findall(r"(?:keeps|instead of) ([\d.]+) MiB", text))
        assert kept < 0.6 * instead


class _Outer(Layer):
    """A block that asks for it, of a model of one's own."""

    recompute = True

    def __init__(self) -> None:
        super().__init__("outer")
        self.linear = SplitLinear("outer.linear", 4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return torch.tanh(self.linear(torch.sin(x), context))


def test_any_block_may_ask_for_it():
    """Without a tail all of it runs again; against float64 autograd."""
    harness = Harness(Chunk([_Outer()]))
    harness.fill(1)
    data = pairs(2, (3, 4), (3, 4), torch.float64)
    check(harness, lambda p, x: torch.tanh(torch.sin(x) @ p["outer.linear.weight"].t()), data)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recompute_layers": (1,)}, r"model.recompute_layers \[1\] has no meaning with model.recompute none"),
        ({"recompute": "full", "recompute_layers": (1, 1)}, r"recompute_layers \[1, 1\]: different numbers from 0 to 3"),
        ({"recompute": "full", "recompute_layers": (4,)}, r"recompute_layers \[4\]: different numbers from 0 to 3"),
        ({"recompute": "all"}, "model.recompute"),
    ],
)
def test_what_is_refused(keys, words):
    with pytest.raises(UsageError, match=words):
        config(**{f"model__{key}": value for key, value in keys.items()})


def test_te_refuses_it():
    te = {"model__backend": "te", "precision__dtype": "bfloat16", "run__device": "cuda"}
    with pytest.raises(UsageError, match="model.recompute full: Transformer Engine's layers keep their own activations"):
        config(**te, model__recompute="full")

"""Families beside Llama: parts agree with their parameters, the contract's promises hold for each, and what one does not have
is refused by key."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from models import build_model
from models.families import FAMILIES, GROUP
from qeffect_lm.app.assemble import assemble, make_recipe
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.base import named_parameters
from qeffect_lm.layers.linear import SplitLinear
from tests.tiny import assert_moved, batch, config, differing, local_plan, train

# Every feature once: biases, q/k norm, a window in some layers, LayerNorm, learned positions, tied heads, odd head sizes.
KEYS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": "all", "mlp_bias": True},
    "mistral": {"sliding_window": 5, "head_dim": 16},
    "mixtral": {"moe": {"num_experts": 5, "aux_loss_coef": 0.05, "z_loss_coef": 0.01}, "sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True, "sliding_window": 7, "max_window_layers": 2},
    "qwen3": {"head_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "gpt2": {"num_kv_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 24},
}


def settings(family: str, **keys: Any):
    model = {f"model__{key}": value for key, value in KEYS[family].items()}
    return config(model__family=family, model__dropout=0.1, **{**model, **keys})


@pytest.mark.parametrize("family", KEYS)
@pytest.mark.parametrize("counts", [(4,), (1, 3), (0, 4, 0)], ids=str)
def test_specs_equal_what_chunks_hold(family, counts):
    """Names, shapes and order; biases are zeros that do not decay, on the axis of their rows."""
    tiny = settings(family)
    model = build_model(tiny, make_recipe(tiny), torch.float32)
    specs = {spec.name: spec for spec in model.parameters()}
    chunks = [model.chunk(i, counts) for i in range(len(counts))]
    held = [(name, tuple(p.shape)) for chunk in chunks for name, p in named_parameters(chunk) if name not in model.ties]
    assert held == [(spec.name, spec.shape) for spec in specs.values()]
    for name, spec in specs.items():
        assert len(spec.axes) == len(spec.shape) and spec.decay == (len(spec.shape) == 2)
        if name.endswith(".bias"):
            assert spec.init_std == 0 and spec.axes[0] == specs[name.replace(".bias", ".weight")].axes[0]
    assert {"position_embeddings" in name for name in specs} == {False}
    assert ("positions.weight" in specs) == (family == "gpt2")
    fresh = assemble(tiny).flat
    assert all(same_zeros(fresh.master(name)) for name in specs if name.endswith(".bias"))


def two(seed: int):
    return batch(seed, microbatches=2)


def same_zeros(tensor: torch.Tensor) -> bool:
    """No sign bits either."""
    return not bool(tensor.view(torch.int32).any())


@pytest.mark.parametrize("family", KEYS)
def test_captured_equals_eager_on_any_number_of_stages(family):
    """Promises 1 and 3, FP8 with delayed scaling and dropout: losses, scales and all logical tensors, bit for bit."""
    few = {"pipeline__microbatches": 2}
    eager = train(settings(family, **few), 3, batches=two)
    assert_moved(eager)
    captured = train(settings(family, graphs__backend="host_replay", **few), 3, batches=two)
    assert captured.losses == eager.losses and differing(captured.tensors, eager.tensors) == []
    stages = train(settings(family, **few), 3, plan=local_plan(3, 2), batches=two)
    assert stages.losses == eager.losses and stages.norms == eager.norms
    assert differing(stages.tensors, eager.tensors) == []
    assert train(settings(family, run__seed=2, **few), 1, batches=two).losses[0] != eager.losses[0]


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral"])
def test_muon_takes_every_matrix(family):
    """Each matrix of the decoder layers says which logical matrices it holds; biases and norms are AdamW's."""
    run = train(settings(family, optim__name="muon"), 2)
    assert all(norm > 0 for norm in run.norms)


def test_learned_positions_get_their_gradient():
    """Positions that no sequence reaches get exactly nothing, the others the sum over the batch."""
    run = train(settings("gpt2", precision__fp8__recipe="none"), 1)
    grad = run.assembly.flat.grad("positions.weight")
    assert grad.shape == (24, 32) and bool(grad[:16].any(dim=1).all()) and not bool(grad[16:].any())


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("llama", {"qk_norm": True}, "model.qk_norm true: family llama has false"),
        ("llama", {"attention_bias": "qkv"}, "model.attention_bias qkv: family llama has none or all"),
        ("llama", {"sliding_window": 4}, "model.sliding_window 4: family llama has no window"),
        ("llama", {"activation": "gelu"}, "model.activation gelu: family llama has silu"),
        ("mistral", {"mlp_bias": True}, "model.mlp_bias true: family mistral has false"),
        ("qwen2", {"attention_bias": "none"}, "model.attention_bias none: family qwen2 has qkv"),
        ("qwen3", {"qk_norm": False}, "model.qk_norm false: family qwen3 has true"),
        ("llama", {"moe": {"num_experts": 4}}, "model.moe.num_experts 4: family llama has no experts"),
        ("mixtral", {}, "model.moe.num_experts is null: family mixtral needs it"),
        ("gpt2", {}, "model.num_kv_heads 2: family gpt2 has a key and a value for each of model.num_heads 4"),
        ("gpt2", {"num_kv_heads": 4, "rope_theta": 5.0}, "model.rope_theta 5.0: family gpt2 has no rotary positions"),
        (
            "gpt2",
            {"num_kv_heads": 4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "model.rope_scaling.type linear: family gpt2 has no rotary positions",
        ),
    ],
)
def test_what_a_family_does_not_have(family, keys, words):
    tiny = config(model__family=family, **{f"model__{key}": value for key, value in keys.items()})
    with pytest.raises(UsageError, match=words):
        build_model(tiny, None, torch.float32)


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("llama", {"attention_bias": "all"}, "model.attention_bias all"),
        ("qwen3", {}, "model.qk_norm true"),
        ("mistral", {"sliding_window": 5}, "model.sliding_window 5"),
        ("llama", {"mlp_bias": True}, "model.mlp_bias true"),
        ("gpt2", {"num_kv_heads": 4}, "a family with LayerNorm"),
        ("mixtral", {"moe": {"num_experts": 4}}, r"a mixture of experts \(model.moe.num_experts\)"),
    ],
)
def test_what_transformer_engine_does_not_run(family, keys, words):
    """A window that hides nothing is no window."""
    te = {"model__backend": "te", "precision__dtype": "bfloat16", "run__device": "cuda"}
    tiny = config(model__family=family, **te, **{f"model__{key}": value for key, value in keys.items()})
    with pytest.raises(UsageError, match=f"model.backend te does not run {words}: set model.backend=native"):
        build_model(tiny, None, torch.bfloat16)
    build_model(config(model__family="mistral", model__sliding_window=16, **te), None, torch.bfloat16)


# ---- families of one's own ---------------------------------------------------------------------------------------


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine_ok.py").write_text("from models.llama import llama as build\nnumber = 3\n")
    (tmp_path / "mine_broken.py").write_text("import nothing_of_the_kind\n")
    (tmp_path / "mine_raises.py").write_text("1 / 0\n")
    (tmp_path / "mine_other.py").write_text("def build(config, recipe, dtype):\n    return 'a text'\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def built(family: str):
        return build_model(config(model__family=family), None, torch.float32)

    assert built("mine_ok:build").num_layers == 4
    for family, words in (
        ("mine_ok:nothing", "mine_ok.py has no nothing"),
        ("mine_ok:number", "is a int, not a function of"),
        ("mine_absent:build", "there is no module 'mine_absent' in this folder or on PYTHONPATH"),
        ("mine_broken:build", "there is no module 'nothing_of_the_kind'"),
        ("mine_raises:build", "cannot be imported: ZeroDivisionError: division by zero"),
        ("mine_other:build", "gave a str without hidden_size: a family gives a models.decoder.Decoder"),
        (":build", "module:function is needed"),
        ("nothing", "the families are llama, mistral, mixtral, qwen2, qwen3, gpt2, or module:function"),
    ):
        with pytest.raises(UsageError, match=words):
            built(family)
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_family_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Entry points of other distributions; ours come first."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nothers = other_family:build\nllama = other_family:build\n")
    (tmp_path / "other_family.py").write_text("from models.llama import llama as build\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build_model(config(model__family="others"), None, torch.float32).num_layers == 4
    assert FAMILIES["llama"].__module__ == "models.llama"
    with pytest.raises(UsageError, match="the families are llama, mistral, mixtral, qwen2, qwen3, gpt2, others, or"):
        build_model(config(model__family="absent"), None, torch.float32)
    assert isinstance(sys.modules.pop("other_family"), ModuleType)


def test_fp8_covers_the_linears_of_all_families():
    for family in KEYS:
        tiny = settings(family)
        chunk = build_model(tiny, make_recipe(tiny), torch.float32).chunk(0, [4])
        linears = [m for m in chunk.modules() if isinstance(m, SplitLinear)]
        count = 4 * (2 + 2 * 5) if family == "mixtral" else 16
        assert len([m for m in linears if m.recipe is not None]) == count and linears[-1].recipe is None

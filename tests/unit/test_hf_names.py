"""config.json and tensor names of Hugging Face: what is read, what is refused by name, which rows go where (cases H1 to H7)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint.hf import (
    choose_tensors,
    config_json,
    describe,
    export_tensors,
    import_tensors,
    model_section,
    tensor_groups,
)
from models import build_model
from qeffect_lm.app.assemble import assemble
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from tests.tiny import local_plan, logits_of, same_bits

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "torch_dtype": "bfloat16",
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}


def refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(UsageError) as error:
        model_section(config)
    assert all(word in str(error.value) for word in words), str(error.value)


def settings(section: dict[str, Any]) -> Config:
    data = {"seq_len": 16, "microbatch_size": 1}
    return Config.from_dict({"run": {"device": "cpu"}, "model": section, "data": data, "train": {"steps": 1}})


def counted(section: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Their tensors, every element another number."""
    made, first = {}, 0
    for group in tensor_groups(section):
        for name, shape in group.theirs:
            size = int(torch.Size(shape).numel())
            made[name] = torch.arange(first, first + size, dtype=torch.float64).view(shape)
            first += size
    return made


# ---- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [2, 6])  # H4: 6 is not hidden / heads
def test_grouped_rows(head_dim):
    """H2, H3: rows q0 q1 k0 v0 q2 q3 k1 v1, of the weight and of the bias."""
    section = model_section({**LLAMA, "head_dim": head_dim, "attention_bias": True}).section
    theirs = counted(section)
    ours = import_tensors(section, theirs)
    q, k, v = (theirs[f"model.layers.1.self_attn.{part}_proj.weight"].split(head_dim) for part in "qkv")
    want = torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])
    assert torch.equal(ours["layers.1.attention.qkv.weight"], want)
    q, k, v = (theirs[f"model.layers.1.self_attn.{part}_proj.bias"].split(head_dim) for part in "qkv")
    assert torch.equal(ours["layers.1.attention.qkv.bias"], torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]))
    gate, up = (theirs[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(ours["layers.2.mlp.gate_up.weight"], torch.cat([gate, up]))


def test_gpt2_rows():
    """``Conv1D`` is transposed, its columns are all q, all k, all v."""
    section = model_section(GPT2).section
    theirs = counted(section)
    ours = import_tensors(section, theirs)
    columns = theirs["transformer.h.1.attn.c_attn.weight"].split(4, dim=1)  # q0 q1 k0 k1 v0 v1
    assert torch.equal(ours["layers.1.attention.qkv.weight"], torch.cat([columns[i] for i in (0, 2, 4, 1, 3, 5)], dim=1).t())
    assert torch.equal(ours["layers.0.mlp.up.weight"], theirs["transformer.h.0.mlp.c_fc.weight"].t())


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
        {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        GPT2,
        {**GPT2, "tie_word_embeddings": False},
    ],
    ids=lambda config: f"{config['model_type']}{len(config)}",
)
def test_names_and_shapes_are_the_models(config):
    """What nulls of the section mean is what the family makes of them: the same parameters, in the same order."""
    section = model_section(config).section
    model = build_model(settings(section), None, torch.float32)
    assert [(group.ours, group.shape) for group in tensor_groups(section)] == [
        (spec.name, spec.shape) for spec in model.parameters()
    ]
    saved = settings(section).to_dict()["model"]  # every key written out, as a manifest has it
    assert describe(saved) == describe(section)


def test_dtypes_stay_and_may_not_mix():
    """H6."""
    section = model_section(LLAMA).section
    theirs = {name: tensor.bfloat16() for name, tensor in counted(section).items()}
    theirs["model.norm.weight"] = theirs["model.norm.weight"].float()
    ours = import_tensors(section, theirs)
    assert ours["final_norm.weight"].dtype is torch.float32 and ours["embedding.weight"].dtype is torch.bfloat16
    theirs["model.layers.0.self_attn.k_proj.weight"] = theirs["model.layers.0.self_attn.k_proj.weight"].float()
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.k_proj\.weight is torch\.float32"):
        import_tensors(section, theirs)


# ---- names -------------------------------------------------------------------------------------------------------


def test_names_missing_unknown_and_of_another_shape():
    section = model_section(LLAMA).section
    theirs = counted(section)
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(UsageError, match=f"{norm} is missing"):
        choose_tensors(section, [name for name in theirs if name != norm])
    with pytest.raises(UsageError, match="layers.0.self_attn.q_proj.bias is not known for family llama"):
        choose_tensors(section, [*theirs, "model.layers.0.self_attn.q_proj.bias"])
    with pytest.raises(UsageError, match=r"input_layernorm\.weight has the shape \[7\], the config\.json makes it \[8\]"):
        import_tensors(section, {**theirs, norm: torch.zeros(7)})
    ours = import_tensors(section, theirs)
    with pytest.raises(UsageError, match="layers.0.mlp.down.bias is not known"):
        export_tensors(section, {**ours, "layers.0.mlp.down.bias": torch.zeros(8)})
    with pytest.raises(UsageError, match="head.weight is missing"):
        export_tensors(section, {name: tensor for name, tensor in ours.items() if name != "head.weight"})


def test_buffers_of_older_files_are_dropped():
    section = model_section(LLAMA).section
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert choose_tensors(section, [*counted(section), old]).dropped == (old,)
    section = model_section(GPT2).section
    bare = [name.removeprefix("transformer.") for name in counted(section)]  # as the published model is saved
    chosen = choose_tensors(section, [*bare, "h.0.attn.bias"])
    assert chosen.names["transformer.wte.weight"] == "wte.weight" and chosen.dropped == ("h.0.attn.bias",)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads(tied, head, stages):
    """H1: only what is consistent loads, on any number of stages."""
    section = model_section({**LLAMA, "tie_word_embeddings": tied}).section
    theirs = {name: tensor.float() / 100 for name, tensor in counted(section).items()}
    theirs.pop("lm_head.weight", None)
    if head != "absent":
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"] + (head == "different")
    consistent = {("absent", True), ("equal", True), ("equal", False), ("different", False)}
    if (head, tied) not in consistent:
        with pytest.raises(UsageError, match="lm_head.weight"):
            import_tensors(section, theirs)
        return
    assembly = assemble(settings(section), plan=local_plan(stages, 4))
    for name, tensor in import_tensors(section, theirs).items():
        assembly.flat.master(name).copy_(tensor)
    assembly.flat.gather()
    for copy in assembly.flat.tied_param_buffers:
        assembly.flat.param(copy).copy_(assembly.flat.master("embedding.weight"))
    head_block = assembly.engine.stages[stages - 1].chunk.blocks[-1]
    assert same_bits(head_block.weight.detach(), theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"]))
    assert logits_of(assembly, torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 11)


# ---- config.json -------------------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16.0, "truncate": False},
    "longrope": {"short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 8, "factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scalings_under_both_keys(kind):
    """H5: the newer key and the older two say the same, alone or together; the round trip keeps what came."""
    new = {**LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **ROPES[kind]}}
    old = {**LLAMA, "rope_theta": 500.0, "rope_scaling": {"type": kind, **ROPES[kind]}}
    section = model_section(new).section
    assert section["rope_scaling"]["type"] == kind and section["rope_theta"] == 500.0
    for other in (old, {**old, "rope_scaling": {"rope_type": kind, **ROPES[kind]}}, {**new, **old}):
        assert model_section(other).section == section
        assert config_json(section, other) == other
    assert model_section(config_json(section)).section == section
    changed = config_json({**section, "rope_theta": 600.0}, old)
    assert model_section(changed).section["rope_theta"] == 600.0 and changed["torch_dtype"] == "bfloat16"
    refused({**new, **old, "rope_scaling": {"type": kind, **ROPES[kind], "factor": 3.0}}, "rope_parameters", "disagree")
    refused({**new, "rope_theta": 400.0}, "rope_theta = 400.0", "disagree")
    refused({**old, "rope_scaling": {"type": kind, "rope_type": "default", **ROPES[kind]}}, "rope_type and type disagree")
    refused({**old, "rope_scaling": {"type": kind, **ROPES[kind], "short_mscale": 1.0}}, "rope_scaling.short_mscale")
    for name in ROPES[kind]:
        if name not in ("original_max_position_embeddings", "beta_fast", "truncate") and (kind, name) != ("longrope", "factor"):
            rest = {key: value for key, value in ROPES[kind].items() if key != name}
            refused({**old, "rope_scaling": {"type": kind, **rest}}, f"needs {name}")


def test_what_is_refused():
    refused({**LLAMA, "rope_scaling": {"type": "ntk"}}, "rope_type 'ntk' is not known")
    refused({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor")
    refused({**LLAMA, "model_type": "bert"}, "model_type 'bert'", "qwen3")
    refused({**LLAMA, "attention_sinks": 4}, "attention_sinks = 4 is not known for model_type llama")
    refused({**LLAMA, "sliding_window": 4}, "sliding_window = 4 is not known for model_type llama")
    refused({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config")
    refused({**LLAMA, "pretraining_tp": 2}, "pretraining_tp = 2: only 1")
    refused({**LLAMA, "hidden_act": "gelu"}, "hidden_act = 'gelu'")
    refused({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "architectures", "LlamaForCausalLM")
    refused({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "config.json has no hidden_size")
    refused({**LLAMA, "num_attention_heads": 3}, "hidden_size 8 is not divisible")
    refused({**GPT2, "n_ctx": 32}, "n_ctx = 32 and n_positions = 16", "disagree")
    refused({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx")
    qwen = {**LLAMA, "model_type": "qwen2", "architectures": None, "use_sliding_window": True, "max_window_layers": 1}
    refused({**qwen, "layer_types": ["sliding_attention"] * 3}, "layer_types disagrees")
    with pytest.raises(UsageError, match="family 'mine:build': Hugging Face's names are known for llama"):
        describe({"family": "mine:build"})


def test_what_is_left_out_is_said():
    found = model_section({**GPT2, "attn_pdrop": 0.1, "resid_pdrop": 0.0})
    assert "dropout" not in found.section
    assert found.notes == ("attn_pdrop 0.1: dropout is a setting of training; model.dropout is 0",)


def test_windows_of_qwen():
    """Layers from ``max_window_layers`` on, if ``use_sliding_window`` says so."""
    qwen = {**LLAMA, "model_type": "qwen2", "architectures": None, "sliding_window": 4, "max_window_layers": 2}
    assert model_section(qwen).section["sliding_window"] is None
    section = model_section({**qwen, "use_sliding_window": True}).section
    assert (section["sliding_window"], section["max_window_layers"]) == (4, 2)
    assert config_json(section)["layer_types"] == ["full_attention", "full_attention", "sliding_attention"]
    chunk = build_model(settings(section), None, torch.float32).chunk(0, [3])
    assert [block.attention.window for block in chunk.blocks[1:4]] == [None, None, 4]

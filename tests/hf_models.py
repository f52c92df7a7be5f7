"""Tiny random models made by ``transformers``, one per family and feature: what a conversion has to agree with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

VOCAB, HIDDEN, LAYERS, FFN, CONTEXT = 53, 32, 3, 48, 16

# Three steps from an imported model.
RUN = """
base: {base}
run: {{device: cpu}}
pipeline: {{microbatches: 2, w_delay: 1}}
data: {{seq_len: 8, microbatch_size: 2}}
optim: {{lr: 1.0e-2, warmup_steps: 0}}
train: {{steps: 3}}
checkpoint: {{every: 2, keep: 0}}
logging: {{progress: 'off'}}
"""

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FFN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "rms_norm_eps": 1e-5,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": CONTEXT,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


DIVISORS = [1.0, 1.1, 1.3, 1.8], [1.0, 1.5, 2.5, 4.0]  # longrope's short and long ones; a head has four pairs
ROPES: dict[str, dict[str, Any]] = {
    "linear": _rope("linear", factor=2.0),
    "dynamic": {**_rope("dynamic", factor=2.0), "max_position_embeddings": 8},
    "yarn": {
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0),
        "max_position_embeddings": 256,
    },
    "longrope-short": _rope("longrope", short_factor=DIVISORS[0], long_factor=DIVISORS[1], original_max_position_embeddings=16),
    "longrope-long": _rope(
        "longrope", short_factor=DIVISORS[0], long_factor=DIVISORS[1], original_max_position_embeddings=8, factor=2.0
    ),
    "llama3": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8),
}
_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

# name → (configuration class, keys)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "llama-biases": ("LlamaConfig", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {**_SIZES, "head_dim": 12}),
    "llama-tied": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True}),
    **{f"llama-{name}": ("LlamaConfig", {**_SIZES, **keys}) for name, keys in ROPES.items()},
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": None}),
    "mistral-window": ("MistralConfig", {**_SIZES, "sliding_window": 5, "head_dim": 12}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.05}),
    "mixtral-window": ("MixtralConfig", {**_SIZES, "sliding_window": 5, "head_dim": 12, "num_local_experts": 11}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen2-window-tied": ("Qwen2Config", {**_SIZES, **_WINDOW, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 12}),
    "qwen3-window-biases": ("Qwen3Config", {**_SIZES, **_WINDOW, "head_dim": 8, "attention_bias": True}),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt2-untied": ("GPT2Config", {**_GPT2, "tie_word_embeddings": False, "n_inner": FFN, "activation_function": "gelu"}),
}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """The model with random parameters: norms and biases too, so that swapping any two would show."""
    kind, keys = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**keys)
    config.architectures = [kind.replace("Config", "LMHeadModel" if kind == "GPT2Config" else "ForCausalLM")]
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(5.0)  # the usual 0.02 would make every logit near zero
    return model.eval()


def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a saved model holds: a tied head is the embedding, and is not saved beside it."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return apart(state)


_STACKS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names and tensors as files have them: in memory a layer's experts are stacked."""
    made = {}
    for name, tensor in state.items():
        at, found, kind = name.partition(".mlp.experts.")
        if not found:
            made[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
            continue
        names = _STACKS[kind]
        for e, expert in enumerate(tensor):
            for part, rows in zip(names, expert.chunk(len(names)), strict=True):
                made[f"{at}.block_sparse_moe.experts.{e}.{part}.weight"] = rows.clone()
    return made


def together(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse, for ``load_state_dict`` of ``model``."""
    made = {}
    for name in model.state_dict():
        at, found, kind = name.partition(".mlp.experts.")
        if found:
            experts = [f"{at}.block_sparse_moe.experts.{e}" for e in range(model.config.num_local_experts)]
            made[name] = torch.stack([torch.cat([state[f"{e}.{part}.weight"] for part in _STACKS[kind]]) for e in experts])
        elif (there := name.replace(".mlp.gate.", ".block_sparse_moe.gate.")) in state:
            made[name] = state[there]
    return made


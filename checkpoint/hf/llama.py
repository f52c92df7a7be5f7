"""Llama (``LlamaForCausalLM``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint.hf.mapping import Keys, Link, fused_qkv, same, stacked
from qeffect_lm.errors import UsageError

# What the keys below have in common: they say nothing about what the model computes.
NEUTRAL = (
    "model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "max_position_embeddings",
    "return_dict", "output_attentions", "output_hidden_states", "pretraining_tp",
)  # fmt: skip


class Llama:
    """RMSNorm, RoPE, grouped queries, SwiGLU, no biases."""

    name = "llama"
    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def dropped(self, name: str) -> bool:
        return name.endswith(".rotary_emb.inv_freq")  # files of 2023 hold the frequencies, which follow from the configuration

    def to_model(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        keys = Keys(config, where)
        keys.ignore(*NEUTRAL)
        keys.only("attention_bias", False)
        keys.only("mlp_bias", False)
        keys.only("hidden_act", "silu")
        keys.only("attention_dropout", 0.0, 0)
        hidden, heads = keys.need("hidden_size", int), keys.need("num_attention_heads", int)
        model = {
            "family": self.name,
            "vocab_size": keys.need("vocab_size", int),
            "hidden_size": hidden,
            "num_layers": keys.need("num_hidden_layers", int),
            "num_heads": heads,
            "num_kv_heads": keys.take("num_key_value_heads", heads, int),
            "head_dim": keys.take("head_dim", hidden // max(heads, 1), int),
            "ffn_size": keys.need("intermediate_size", int),
            "norm_eps": float(keys.take("rms_norm_eps", 1e-6, (int, float))),
            "init_std": float(keys.take("initializer_range", 0.02, (int, float))),
            "tie_word_embeddings": keys.take("tie_word_embeddings", False, bool),
            **_rope(keys),
        }
        keys.finish()
        return model

    def to_config(self, model: Mapping[str, Any], dtype: str, max_positions: int) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": dtype,
            "head_dim": model["head_dim"],
            "hidden_act": "silu",
            "hidden_size": model["hidden_size"],
            "initializer_range": model["init_std"],
            "intermediate_size": model["ffn_size"],
            "max_position_embeddings": max_positions,
            "mlp_bias": False,
            "model_type": self.model_type,
            "num_attention_heads": model["num_heads"],
            "num_hidden_layers": model["num_layers"],
            "num_key_value_heads": model["num_kv_heads"],
            "rms_norm_eps": model["norm_eps"],
            "rope_parameters": {"rope_theta": model["rope_theta"], "rope_type": "default"},
            "rope_theta": model["rope_theta"],  # where transformers before 5 looks
            "tie_word_embeddings": model["tie_word_embeddings"],
            "use_cache": True,
            "vocab_size": model["vocab_size"],
        }

    def links(self, model: Mapping[str, Any]) -> list[Link]:
        h, d, ffn, vocab = model["hidden_size"], model["head_dim"], model["ffn_size"], model["vocab_size"]
        heads, kv_heads = model["num_heads"], model["num_kv_heads"]
        links = [same("embedding.weight", "model.embed_tokens.weight", (vocab, h))]
        for i in range(model["num_layers"]):
            at, theirs = f"layers.{i}", f"model.layers.{i}"
            projections = [f"{theirs}.self_attn.{which}_proj.weight" for which in "qkv"]
            halves = [f"{theirs}.mlp.{which}_proj.weight" for which in ("gate", "up")]
            links += [
                fused_qkv(f"{at}.attention.qkv.weight", projections, heads, kv_heads, d, h),
                same(f"{at}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight", (h, heads * d)),
                stacked(f"{at}.mlp.gate_up.weight", halves, ffn, h),
                same(f"{at}.mlp.down.weight", f"{theirs}.mlp.down_proj.weight", (h, ffn)),
                same(f"{at}.attention_norm.weight", f"{theirs}.input_layernorm.weight", (h,)),
                same(f"{at}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", (h,)),
            ]
        links.append(same("final_norm.weight", "model.norm.weight", (h,)))
        if not model["tie_word_embeddings"]:
            links.append(same("head.weight", "lm_head.weight", (vocab, h)))
        return links

    def order(self, model: Mapping[str, Any]) -> list[str]:
        return [part.name for link in self.links(model) for part in link.parts]

    def aliases(self, model: Mapping[str, Any]) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if model["tie_word_embeddings"] else {}


def _rope(keys: Keys) -> dict[str, Any]:
    """``rope_theta``, from where transformers 4 and 5 keep it; what scales positions is refused."""
    old, new = keys.take("rope_theta", None, (int, float)), keys.take("rope_parameters", {}, dict)
    scaling = keys.take("rope_scaling", {}, dict)
    for label, values in (("rope_parameters", new), ("rope_scaling", scaling)):
        for key in sorted(set(values) - {"rope_theta", "rope_type", "type"}):
            raise UsageError(f"{keys.where}: {label} has the key {key}, which is not supported")
        if not isinstance(values.get("rope_theta", 0), (int, float)):
            raise UsageError(f"{keys.where}: {label}.rope_theta is {values['rope_theta']!r}, which is not a number")
        for key in ("rope_type", "type"):
            if values.get(key, "default") != "default":
                raise UsageError(f"{keys.where}: {label}.{key} is {values[key]!r}, which is not supported; 'default' is")
    places = {"rope_theta": old, "rope_parameters.rope_theta": new.get("rope_theta")}
    theta = keys.agree("the base of RoPE", **places, **{"rope_scaling.rope_theta": scaling.get("rope_theta")})
    return {"rope_theta": float(10000.0 if theta is None else theta)}

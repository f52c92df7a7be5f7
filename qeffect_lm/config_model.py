"""The configuration's model section, and what its keys must agree on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from qeffect_lm.config_sections import Section, _key

if TYPE_CHECKING:
    from qeffect_lm.config import Config

# Per type of rope scaling: the keys that it needs, and those that it may have.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}


class RopeScalingConfig(Section):
    """scaling of the rotary frequencies, in Hugging Face's words (docs/families.md)"""

    type: Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3"] = _key(
        "none",
        "Which scaling. dynamic and longrope depend on the sequence's length: training uses the frequencies of data.seq_len.",
        on_resume="refuse",
    )
    factor: float | None = _key(
        None, "By how much the context grows; longrope: null is the ratio of the two contexts.", on_resume="refuse", ge=1
    )
    original_max_position_embeddings: int | None = _key(
        None, "yarn, longrope, llama3: the context before it grew.", on_resume="refuse", unit="tokens", ge=2
    )
    attention_factor: float | None = _key(
        None, "yarn, longrope: factor on cos and sin; null: the paper's.", on_resume="refuse", ge=0
    )
    beta_fast: float | None = _key(
        None, "yarn: frequencies that turn more often over the original context stay; null: 32.", on_resume="refuse",
        unit="turns", gt=0,
    )  # fmt: skip
    beta_slow: float | None = _key(
        None, "yarn: those that turn less often are divided; null: 1.", on_resume="refuse", unit="turns", gt=0
    )
    mscale: float | None = _key(None, "yarn: with mscale_all_dim another attention factor.", on_resume="refuse", ge=0)
    mscale_all_dim: float | None = _key(None, "yarn: see mscale.", on_resume="refuse", ge=0)
    truncate: bool | None = _key(None, "yarn: round the ramp's ends to whole pairs; null: true.", on_resume="refuse")
    low_freq_factor: float | None = _key(
        None, "llama3: waves that fit fewer times into the original context are divided by factor.", on_resume="refuse", gt=0
    )
    high_freq_factor: float | None = _key(
        None, "llama3: waves that fit more often stay.", on_resume="refuse", gt=0
    )
    short_factor: tuple[float, ...] | None = _key(
        None, "longrope: a divisor for each pair, within the original context.", on_resume="refuse", strict=False
    )
    long_factor: tuple[float, ...] | None = _key(
        None, "longrope: the same for longer sequences.", on_resume="refuse", strict=False
    )


class MoEConfig(Section):
    """mixture of experts in every decoder layer (docs/moe.md)"""

    num_experts: int | None = _key(
        None, "Experts of a layer, each with the width model.ffn_size; null: none, a dense MLP.", on_resume="refuse",
        unit="experts", ge=1,
    )  # fmt: skip
    top_k: int = _key(2, "Experts of a token; none drops any.", on_resume="refuse", unit="experts", ge=1)
    norm_top_k: bool = _key(
        True, "Whether the weights of a token's experts are divided by their sum.", on_resume="refuse"
    )
    aux_loss_coef: float = _key(
        0.001, "Coefficient of the load-balancing loss, a mean over layers; 0: none.", on_resume="warn", ge=0
    )
    z_loss_coef: float = _key(
        0.0, "Coefficient of the z-loss, the mean squared logsumexp of router logits, a mean over layers; 0: none.",
        on_resume="warn", ge=0,
    )  # fmt: skip


class ModelConfig(Section):
    """the decoder"""

    family: str = _key(
        "llama",
        "Model family: llama, mistral, mixtral, qwen2, qwen3, gpt2, one of an installed package, or module:function of "
        "your own (docs/extending.md).",
        on_resume="refuse",
        min_length=1,
    )
    backend: Literal["native", "te"] = _key(
        "native",
        "Who runs the decoder layers. native: torch and the framework's own kernels. te: Transformer Engine, on a GPU, in "
        "bfloat16 (docs/transformer-engine.md). Parameters, names and checkpoints are the same.",
        on_resume="warn",
    )
    vocab_size: int = _key(
        ..., "Size of the vocabulary; must equal the tokenizer's.", on_resume="refuse", unit="tokens", ge=1
    )
    hidden_size: int = _key(..., "Width of the residual stream.", on_resume="refuse", unit="features", ge=1)
    num_layers: int = _key(..., "Number of decoder layers over all stages.", on_resume="refuse", ge=1)
    num_heads: int = _key(..., "Number of query heads.", on_resume="refuse", unit="heads", ge=1)
    num_kv_heads: int = _key(
        ...,
        "Number of key/value heads (grouped-query attention); divides num_heads.",
        on_resume="refuse",
        unit="heads",
        ge=1,
    )
    head_dim: int = _key(
        None,
        "Width of one head; null: hidden_size / num_heads. Even, because RoPE turns pairs.",
        on_resume="refuse",
        unit="features",
        ge=1,
    )
    ffn_size: int = _key(..., "Inner width of the MLP, or of one expert.", on_resume="refuse", unit="features", ge=1)
    activation: Literal["silu", "gelu", "gelu_new", "relu"] | None = _key(
        None, "The MLP's activation, in Hugging Face's words; null: the family's.", on_resume="refuse"
    )
    attention_bias: Literal["none", "qkv", "all"] | None = _key(
        None, "Which of attention's products have a bias: none, q, k and v, or the output too; null: the family's.",
        on_resume="refuse",
    )  # fmt: skip
    mlp_bias: bool | None = _key(None, "Whether the MLP's products have a bias; null: the family's.", on_resume="refuse")
    qk_norm: bool | None = _key(
        None, "RMSNorm of every q and k head before RoPE; null: the family's.", on_resume="refuse"
    )
    sliding_window: int | None = _key(
        None,
        "Tokens that a token sees, itself included; null: all before it. mistral, mixtral, qwen2, qwen3.",
        on_resume="refuse",
        unit="tokens",
        ge=1,
    )
    max_window_layers: int = _key(
        0, "With sliding_window: the first so many decoder layers see all.", on_resume="refuse", unit="layers", ge=0
    )
    max_position_embeddings: int | None = _key(
        None,
        "Context that the model declares: gpt2's learned positions, where rope scaling starts or ends; null: data.seq_len.",
        on_resume="refuse",
        unit="tokens",
        ge=1,
    )
    rope_theta: float = _key(10000.0, "Base of the RoPE frequencies.", on_resume="refuse", gt=0)
    rope_scaling: RopeScalingConfig = Field(default_factory=RopeScalingConfig)
    moe: MoEConfig = Field(default_factory=MoEConfig)
    norm_eps: float = _key(1e-5, "Added to the mean square (LayerNorm: the variance) inside a norm.", on_resume="refuse", gt=0)
    dropout: float = _key(
        0.0, "Probability of dropping a feature of a residual branch.", on_resume="warn", ge=0, lt=1
    )
    init_std: float = _key(
        0.02, "Standard deviation of fresh weights; read at the first start only.", on_resume="free", gt=0
    )
    tie_word_embeddings: bool = _key(
        False, "The head's weight is the embedding's (docs/gradients.md).", on_resume="refuse"
    )

    recompute: Literal["none", "full", "selective"] = _key(
        "none",
        "Activations that I makes again instead of F keeping them; results are the same bits. full: whole decoder layers. "
        "selective: all but the matrix products (docs/recompute.md).",
        on_resume="warn",
    )
    recompute_layers: tuple[int, ...] | None = _key(
        None, "Decoder layers that recompute is for, from 0; null: all.", on_resume="warn", unit="layer numbers", strict=False
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_head_dim(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("head_dim") is not None:
            return data
        hidden, heads = data.get("hidden_size"), data.get("num_heads")
        filled = {k: v for k, v in data.items() if k != "head_dim"}
        if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
            if hidden % heads:
                raise ValueError(
                    f"model.hidden_size {hidden} is not divisible by model.num_heads {heads}: "
                    "change one of them or set model.head_dim"
                )
            filled["head_dim"] = hidden // heads
        return filled


def check_model(config: Config) -> Iterator[str]:
    """Contradictions between the model's keys, each as one sentence with its remedy."""
    model, tp = config.model, config.parallel.tp
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_kv_heads {model.num_kv_heads} does not divide model.num_heads {model.num_heads}: "
            "each key/value head serves the same number of query heads"
        )
    if model.head_dim % 2:
        yield f"model.head_dim {model.head_dim} is odd: RoPE turns pairs of features, so make it even"
    for name in ("num_heads", "ffn_size") if model.moe.num_experts is None else ("num_heads",):  # an expert is cut by no rank
        if getattr(model, name) % tp:
            yield f"model.{name} {getattr(model, name)} is not divisible by parallel.tp {tp}: change one of them"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield (
            f"model.num_kv_heads {model.num_kv_heads} and parallel.tp {tp}: one of them must divide the other, so that a rank "
            "has whole KV heads, or as many ranks share each: change one of them"
        )
    if model.vocab_size < tp:
        yield f"model.vocab_size {model.vocab_size} is less than parallel.tp {tp}: each rank holds a part of it: lower that"
    if model.max_window_layers and model.sliding_window is None:
        yield (
            f"model.max_window_layers {model.max_window_layers} has no meaning without model.sliding_window: set that, "
            "or this to 0"
        )
    if model.max_window_layers > model.num_layers:
        yield f"model.max_window_layers {model.max_window_layers} is more than model.num_layers {model.num_layers}: lower it"
    declared = model.max_position_embeddings
    if declared is not None and config.data.seq_len > declared and model.rope_scaling.type != "dynamic":
        yield (
            f"data.seq_len {config.data.seq_len} is longer than model.max_position_embeddings {declared}: shorten it, "
            "raise that, or scale with model.rope_scaling.type=dynamic"
        )
    experts = model.moe.num_experts
    if experts is not None and model.moe.top_k > experts:
        yield f"model.moe.top_k {model.moe.top_k} is more than model.moe.num_experts {experts}: lower it"
    yield from _check_rope(model)
    yield from _check_recompute(model)


def _check_recompute(model: ModelConfig) -> Iterator[str]:
    layers = model.recompute_layers
    if layers is not None:
        shown = f"model.recompute_layers {list(layers)}"
        if model.recompute == "none":
            yield f"{shown} has no meaning with model.recompute none: set that to full or selective, or this to null"
        if len(set(layers)) < len(layers) or any(not 0 <= layer < model.num_layers for layer in layers):
            yield f"{shown}: different numbers from 0 to {model.num_layers - 1} are needed, below model.num_layers"
    if model.recompute != "none" and model.backend == "te":
        yield (
            f"model.recompute {model.recompute}: Transformer Engine's layers keep their own activations: set "
            "model.recompute=none, or model.backend=native"
        )


def _check_rope(model: ModelConfig) -> Iterator[str]:
    """Which keys a scaling has, and how they go together."""
    scaling = model.rope_scaling
    needed, optional = ROPE_KEYS[scaling.type]
    given = {name: value for name, value in scaling.model_dump().items() if name != "type" and value is not None}
    at, kind = "model.rope_scaling", f"type {scaling.type}"
    for name in given:
        if name not in (*needed, *optional):
            yield f"{at}.{name} has no meaning with {kind}: set it to null, or another type"
    missing = [name for name in needed if name not in given]
    for name in missing:
        yield f"{at} {kind} needs {at}.{name}: give it"
    if missing:
        return
    original, declared = scaling.original_max_position_embeddings, model.max_position_embeddings
    if scaling.type == "dynamic" and declared is None:
        yield f"{at} {kind} grows from model.max_position_embeddings: give that"
    if scaling.type == "dynamic" and model.head_dim <= 2:
        yield f"model.head_dim {model.head_dim}: {at} {kind} needs more than one pair of features"
    if original is not None and declared is not None and declared < original:
        yield f"{at}.original_max_position_embeddings {original} exceeds model.max_position_embeddings {declared}"
    if scaling.type == "longrope":
        for name in ("short_factor", "long_factor"):
            divisors = given[name]
            if len(divisors) != model.head_dim // 2 or min(divisors) <= 0:
                yield f"{at}.{name} has {len(divisors)} entries: one above 0 for each of {model.head_dim // 2} pairs is needed"
        if scaling.factor is None and scaling.attention_factor is None and declared is None:
            yield f"{at} {kind} needs {at}.factor, or model.max_position_embeddings to make it from"
    if scaling.type == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        yield f"{at}.high_freq_factor {given['high_freq_factor']} must exceed low_freq_factor {given['low_freq_factor']}"
    if (scaling.beta_fast or 32) < (scaling.beta_slow or 1):
        yield f"{at}.beta_fast {scaling.beta_fast or 32} is below beta_slow {scaling.beta_slow or 1}"

"""Which rows of Hugging Face's tensors are which of ours, and which keys of a ``config.json`` are refused."""

from __future__ import annotations

import pytest
import torch

from checkpoint.hf import family_named, family_of
from checkpoint.hf.mapping import Link, Part, Rows, fused_qkv, stacked
from qeffect_lm.errors import UsageError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 259,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}


def test_rows_of_grouped_queries() -> None:
    """H2, H3: four query heads, two KV heads: q0 q1 k0 v0 q2 q3 k1 v1, for weights and biases alike."""
    for rest in ((3,), ()):
        link = fused_qkv("qkv", ("q", "k", "v"), 4, 2, 2, *rest)
        q, k, v = (100 * i + torch.arange(n)[:, None].expand(n, 3) for i, n in ((1, 8), (2, 4), (3, 4)))
        parts = [x if rest else x[:, 0] for x in (q, k, v)]
        ours = link.join(parts)
        rows = (ours if not rest else ours[:, 0]).tolist()
        assert rows == [100, 101, 102, 103, 200, 201, 300, 301, 104, 105, 106, 107, 202, 203, 302, 303]
        assert all(torch.equal(a, b) for a, b in zip(link.split(ours), parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn])
def test_join_and_split_keep_bits(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    other = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    link = stacked("gate_up", ("gate", "up"), 6, 4)
    parts = link.split(link.join([raw, other]))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(parts, (raw, other), strict=True))
    assert torch.equal(link.join([raw, other])[6:].view(torch.uint8), other.view(torch.uint8))


def test_transposed_parts() -> None:
    """GPT-2 stores ``[in, out]``; rows of ours are columns there."""
    link = Link("x", (4, 3), (Part("theirs", (3, 4)),), (Rows(0, 2, 2), Rows(0, 0, 2)), transposed=True)
    theirs = torch.arange(12.0).reshape(3, 4)
    ours = link.join([theirs])
    assert ours.tolist() == theirs.t()[[2, 3, 0, 1]].tolist()
    assert torch.equal(link.split(ours)[0], theirs)


def test_llama_config_both_ways() -> None:
    family = family_of(CONFIG, "config.json")
    model = family.to_model(CONFIG, "config.json")
    assert (model["rope_theta"], model["head_dim"], model["num_kv_heads"], model["norm_eps"]) == (500000.0, 8, 2, 1e-5)
    written = family.to_config(model, "bfloat16", 64)
    assert family_named("llama").to_model(written, "ours") == model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 4096}, "unknown key sliding_window"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "disagree about the base of RoPE"),
        ({"rope_scaling": {"type": "tilted", "factor": 2.0}}, "rope_scaling"),
        ({"vocab_size": "259"}, "vocab_size is '259', which is not a whole number"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"model_type": "martian"}, "model_type is 'martian'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"auto_map": {"AutoModel": "x.py"}}, "unknown key auto_map"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', which is not a boolean"),
    ],
)
def test_what_is_refused(change: dict, said: str) -> None:
    config = {**CONFIG, **change}
    with pytest.raises(UsageError, match=said):
        family_of(config, "config.json").to_model(config, "config.json")


@pytest.mark.parametrize("tied", [False, True])
def test_links_are_the_model(tied: bool) -> None:
    """Every parameter of ours comes out of the links, with its shape."""
    from qeffect_lm.app.shapes import model_shapes

    model = family_of(CONFIG, "c").to_model({**CONFIG, "tie_word_embeddings": tied}, "c")
    links = family_named("llama").links(model)
    assert {link.name: link.shape for link in links} == model_shapes({"model": model, "train": {"steps": 1}})
    assert sorted(family_named("llama").order(model)) == sorted(part.name for link in links for part in link.parts)
    assert ("lm_head.weight" in family_named("llama").aliases(model)) is tied

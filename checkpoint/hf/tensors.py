"""Our tensors ↔ Hugging Face's: names, shapes, and the order of rows.

One :class:`Group` is one of our tensors and those of theirs that hold the same numbers, so that a converter needs memory for
one group at a time. Nothing computes: rows are taken apart and put together, and dtypes stay (case H6).

    ours                                   theirs (llama and its kin)                    gpt2 (``Conv1D``: transposed)
    attention.qkv  per KV head q… k v      q_proj, k_proj, v_proj: all heads each        c_attn: all q, all k, all v
    mlp.gate_up    gate's rows, up's       gate_proj, up_proj                            (mlp.up: c_fc)
    moe.experts.E.gate_up, down            block_sparse_moe.experts.E.w1 and w3, w2      (mixtral)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint.hf.description import Description, describe
from qeffect_lm.errors import UsageError

Shape = tuple[int, ...]
HEAD, EMBEDDING = "head.weight", "embedding.weight"
_GPT2_PREFIX = "transformer."
# Buffers that older versions saved: the layers make them themselves.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Group:
    """One of our tensors, and theirs.

    Attributes:
        ours, shape: logical name and shape.
        theirs: names and shapes, in the order that ``join`` takes them and ``cut`` gives them.
        join: their tensors → ours; ``cut``: the inverse.
    """

    ours: str
    shape: Shape
    theirs: tuple[tuple[str, Shape], ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    cut: Callable[[torch.Tensor], list[torch.Tensor]]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of their tensors."""
        return tuple(name for name, _ in self.theirs)


@dataclass(frozen=True)
class Chosen:
    """Which of a source's tensors are read.

    Attributes:
        names: their name in a :class:`Group` → the source's own name.
        dropped: names of the source that are not needed.
        head: the source's own name of a tied model's head that must equal the embedding (:func:`check_tied`), if it is there.
    """

    names: dict[str, str]
    dropped: tuple[str, ...]
    head: str | None


def tensor_groups(section: Mapping[str, Any], seq_len: int | None = None) -> list[Group]:
    """All groups of a model section, in the order of our parameters; a tied head has none.

    Raises:
        UsageError: as :func:`checkpoint.hf.description.describe`.
    """
    model = describe(section, seq_len)
    return list(_gpt2(model) if model.family == "gpt2" else _llama(model))


def choose_tensors(section: Mapping[str, Any], names: Iterable[str], seq_len: int | None = None) -> Chosen:
    """Match the names of a source with those that the model needs.

    Raises:
        UsageError: a name is missing, or one is there that no group knows; names them.
    """
    model, groups = describe(section, seq_len), tensor_groups(section, seq_len)
    given, present = list(names), set(names)
    wanted = [name for group in groups for name in group.names]
    prefix = ""
    if model.family == "gpt2" and not any(name.startswith(_GPT2_PREFIX) for name in given):
        prefix = _GPT2_PREFIX  # a base model saved by itself, as the published one is
    own = {name: name.removeprefix(prefix) for name in wanted}
    missing = sorted(set(own.values()) - present)
    if missing:
        raise UsageError(f"{missing[0]} is missing ({len(missing)} of {len(own)} tensors are not there)")
    rest = [name for name in given if name not in set(own.values())]
    head = "lm_head.weight" if model.tie_word_embeddings and "lm_head.weight" in present else None
    unknown = [name for name in rest if name != head and not name.endswith(_BUFFERS)]
    if unknown:
        raise UsageError(f"{unknown[0]} is not known for family {model.family} ({len(unknown)} such tensors)")
    return Chosen(own, tuple(rest), head)


def check_tied(embedding: torch.Tensor, head: torch.Tensor) -> None:
    """Raises UsageError where a tied model's head, saved beside its embedding, is another tensor (case H1)."""
    same = embedding.dtype == head.dtype and embedding.shape == head.shape
    if not same or not torch.equal(embedding.contiguous().view(torch.uint8), head.contiguous().view(torch.uint8)):
        raise UsageError(
            "tie_word_embeddings is true, and lm_head.weight differs from the embedding: set tie_word_embeddings to false, or "
            "remove lm_head.weight"
        )


def to_ours(group: Group, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Our tensor of a group's, by their names.

    Raises:
        UsageError: a wrong shape, or several dtypes in one group; names the tensor.
    """
    parts: list[torch.Tensor] = []
    for name, shape in group.theirs:
        part = tensors[name]
        if tuple(part.shape) != shape:
            raise UsageError(f"{name} has the shape {list(part.shape)}, the config.json makes it {list(shape)}")
        if parts and part.dtype != parts[0].dtype:
            first = group.names[0]
            raise UsageError(f"{name} is {part.dtype}, {first} {parts[0].dtype}, and here they are one tensor, {group.ours}")
        parts.append(part)
    return group.join(parts).contiguous()


def to_theirs(group: Group, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Their tensors of ours, by name.

    Raises:
        UsageError: a wrong shape.
    """
    if tuple(tensor.shape) != group.shape:
        raise UsageError(f"{group.ours} has the shape {list(tensor.shape)}, the model section makes it {list(group.shape)}")
    return {name: part.contiguous() for name, part in zip(group.names, group.cut(tensor), strict=True)}


def import_tensors(
    section: Mapping[str, Any], source: Mapping[str, torch.Tensor], seq_len: int | None = None
) -> dict[str, torch.Tensor]:
    """All of ours from all of theirs, in memory. Raises UsageError as the functions above."""
    chosen = choose_tensors(section, source, seq_len)
    read = {name: source[own] for name, own in chosen.names.items()}
    made = {group.ours: to_ours(group, read) for group in tensor_groups(section, seq_len)}
    if chosen.head is not None:
        check_tied(made[EMBEDDING], source[chosen.head])
    return made


def export_tensors(
    section: Mapping[str, Any], source: Mapping[str, torch.Tensor], seq_len: int | None = None
) -> dict[str, torch.Tensor]:
    """All of theirs from all of ours, in memory.

    Raises:
        UsageError: one of ours is missing or too many, or has another shape; names it.
    """
    groups = tensor_groups(section, seq_len)
    odd = sorted(set(source) ^ {group.ours for group in groups})
    if odd:
        raise UsageError(f"{odd[0]} is {'missing' if odd[0] not in source else 'not known for this model section'}")
    return {name: part for group in groups for name, part in to_theirs(group, source[group.ours]).items()}


# ---- rows ------------------------------------------------------------------------------------------------------


def _same(ours: str, theirs: str, shape: Shape) -> Group:
    return Group(ours, shape, ((theirs, shape),), lambda parts: parts[0], lambda tensor: [tensor])


def _transposed(ours: str, theirs: str, shape: Shape) -> Group:
    """``Conv1D`` keeps ``[in, out]``."""
    return Group(ours, shape, ((theirs, shape[::-1]),), lambda parts: parts[0].t(), lambda tensor: [tensor.t()])


def _stacked(ours: str, theirs: Sequence[str], rows: int, rest: Shape) -> Group:
    """The same number of rows each, one below the other."""
    return Group(
        ours,
        (len(theirs) * rows, *rest),
        tuple((name, (rows, *rest)) for name in theirs),
        lambda parts: torch.cat(list(parts)),
        lambda tensor: list(tensor.split(rows)),
    )


def group_heads(model: Description, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """q, k and v, head after head each → per KV head its query heads, then k, then v (cases H2, H3); a weight or a bias."""
    kv, rest = model.num_kv_heads, parts[0].shape[1:]
    return torch.cat([part.reshape(kv, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def ungroup_heads(model: Description, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The inverse of :func:`group_heads`."""
    kv, d, rest = model.num_kv_heads, model.head_dim, tensor.shape[1:]
    query = model.num_heads // kv * d
    parts = tensor.reshape(kv, query + 2 * d, *rest).split([query, d, d], dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def _qkv(model: Description, ours: str, theirs: Sequence[str], rest: Shape) -> Group:
    rows = model.num_heads * model.head_dim, *2 * (model.num_kv_heads * model.head_dim,)
    return Group(
        ours,
        (sum(rows), *rest),
        tuple((name, (count, *rest)) for name, count in zip(theirs, rows, strict=True)),
        lambda parts: group_heads(model, parts),
        lambda tensor: ungroup_heads(model, tensor),
    )


# ---- families --------------------------------------------------------------------------------------------------


def _llama(model: Description) -> Iterator[Group]:
    h, f = model.hidden_size, model.ffn_size
    yield _same(EMBEDDING, "model.embed_tokens.weight", (model.vocab_size, h))
    for i in range(model.num_layers):
        at, there = f"layers.{i}", f"model.layers.{i}"
        attention = f"{there}.self_attn"
        yield _same(f"{at}.attention_norm.weight", f"{there}.input_layernorm.weight", (h,))
        for kind, rest in _kinds(model.attention_bias != "none", h):
            yield _qkv(model, f"{at}.attention.qkv.{kind}", [f"{attention}.{p}_proj.{kind}" for p in "qkv"], rest)
        for kind, rest in _kinds(model.attention_bias == "all", model.num_heads * model.head_dim):
            yield _same(f"{at}.attention.out.{kind}", f"{attention}.o_proj.{kind}", (h, *rest))
        if model.qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield _same(f"{at}.attention.{norm}.weight", f"{attention}.{norm}.weight", (model.head_dim,))
        yield _same(f"{at}.mlp_norm.weight", f"{there}.post_attention_layernorm.weight", (h,))
        if model.num_experts is not None:
            yield from _experts(model, at, there)
            continue
        for kind, rest in _kinds(model.mlp_bias, h):
            yield _stacked(f"{at}.mlp.gate_up.{kind}", [f"{there}.mlp.{part}_proj.{kind}" for part in ("gate", "up")], f, rest)
        for kind, rest in _kinds(model.mlp_bias, f):
            yield _same(f"{at}.mlp.down.{kind}", f"{there}.mlp.down_proj.{kind}", (h, *rest))
    yield _same("final_norm.weight", "model.norm.weight", (h,))
    if not model.tie_word_embeddings:
        yield _same(HEAD, "lm_head.weight", (model.vocab_size, h))


def _experts(model: Description, at: str, there: str) -> Iterator[Group]:
    """As files hold them, one tensor an expert; in memory ``transformers`` stacks them."""
    assert model.num_experts is not None
    h, f, moe = model.hidden_size, model.ffn_size, f"{there}.block_sparse_moe"
    yield _same(f"{at}.moe.router.weight", f"{moe}.gate.weight", (model.num_experts, h))
    for e in range(model.num_experts):
        mine, theirs = f"{at}.moe.experts.{e}", f"{moe}.experts.{e}"
        yield _stacked(f"{mine}.gate_up.weight", [f"{theirs}.w1.weight", f"{theirs}.w3.weight"], f, (h,))
        yield _same(f"{mine}.down.weight", f"{theirs}.w2.weight", (h, f))


def _kinds(bias: bool, inputs: int) -> list[tuple[str, Shape]]:
    """A linear's tensors, with their shape behind the rows."""
    return [("weight", (inputs,)), ("bias", ())] if bias else [("weight", (inputs,))]


def _gpt2(model: Description) -> Iterator[Group]:
    h, f = model.hidden_size, model.ffn_size
    yield _same(EMBEDDING, f"{_GPT2_PREFIX}wte.weight", (model.vocab_size, h))
    yield _same("positions.weight", f"{_GPT2_PREFIX}wpe.weight", (model.max_position_embeddings, h))
    for i in range(model.num_layers):
        at, there = f"layers.{i}", f"{_GPT2_PREFIX}h.{i}"
        yield from _gpt2_norm(f"{at}.attention_norm", f"{there}.ln_1", h)
        yield Group(
            f"{at}.attention.qkv.weight",
            (3 * h, h),
            ((f"{there}.attn.c_attn.weight", (h, 3 * h)),),
            lambda parts: group_heads(model, parts[0].t().split(h)),
            lambda tensor: [torch.cat(ungroup_heads(model, tensor)).t()],
        )
        yield Group(
            f"{at}.attention.qkv.bias",
            (3 * h,),
            ((f"{there}.attn.c_attn.bias", (3 * h,)),),
            lambda parts: group_heads(model, parts[0].split(h)),
            lambda tensor: [torch.cat(ungroup_heads(model, tensor))],
        )
        yield from _conv1d(f"{at}.attention.out", f"{there}.attn.c_proj", (h, h))
        yield from _gpt2_norm(f"{at}.mlp_norm", f"{there}.ln_2", h)
        yield from _conv1d(f"{at}.mlp.up", f"{there}.mlp.c_fc", (f, h))
        yield from _conv1d(f"{at}.mlp.down", f"{there}.mlp.c_proj", (h, f))
    yield from _gpt2_norm("final_norm", f"{_GPT2_PREFIX}ln_f", h)
    if not model.tie_word_embeddings:
        yield _same(HEAD, "lm_head.weight", (model.vocab_size, h))


def _gpt2_norm(ours: str, theirs: str, size: int) -> Iterator[Group]:
    for kind in ("weight", "bias"):
        yield _same(f"{ours}.{kind}", f"{theirs}.{kind}", (size,))


def _conv1d(ours: str, theirs: str, shape: Shape) -> Iterator[Group]:
    yield _transposed(f"{ours}.weight", f"{theirs}.weight", shape)
    yield _same(f"{ours}.bias", f"{theirs}.bias", shape[:1])

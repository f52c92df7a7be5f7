"""What the single fields of the configuration cannot check, and what a user is told about a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from qeffect_lm import config_help
from qeffect_lm.config_yaml import COMMAND_LINE, Layered

if TYPE_CHECKING:
    from qeffect_lm.config import Config

FP8_MULTIPLE = 16  # FP8 tensor cores want 16-byte rows, which are 16 FP8 values


def cross_check(config: Config) -> list[str]:
    """All contradictions between keys, each as one sentence with its remedy."""
    return [
        *_check_model(config),
        *_check_fp8(config),
        *_check_pipeline(config),
        *_check_optim(config),
        *_check_train(config),
    ]


def _check_model(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_kv_heads {model.num_kv_heads} does not divide model.num_heads {model.num_heads}: "
            "each key/value head serves the same number of query heads"
        )
    if model.head_dim % 2:
        yield f"model.head_dim {model.head_dim} is odd: RoPE turns pairs of features, so make it even"
    if model.tie_word_embeddings:
        yield "model.tie_word_embeddings: true is not supported yet; set it to false"
    for name in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size"):
        if getattr(model, name) % tp:
            yield f"model.{name} {getattr(model, name)} is not divisible by parallel.tp {tp}"


def _check_fp8(config: Config) -> Iterator[str]:
    fp8, model, tp = config.precision.fp8, config.model, config.parallel.tp
    if fp8.recipe == "none":
        return
    outside = fp8.high_precision_first + fp8.high_precision_last
    if outside > model.num_layers:
        yield (
            f"precision.fp8.high_precision_first {fp8.high_precision_first} + high_precision_last "
            f"{fp8.high_precision_last} exceed model.num_layers {model.num_layers}"
        )
    cut = f" / parallel.tp {tp}" if tp > 1 else ""
    widths = {
        "model.hidden_size": model.hidden_size,
        f"model.num_heads x model.head_dim{cut}": model.num_heads * model.head_dim // tp,
        f"model.num_kv_heads x model.head_dim{cut}": model.num_kv_heads * model.head_dim // tp,
        f"model.ffn_size{cut}": model.ffn_size // tp,
        "data.seq_len x data.microbatch_size": config.data.seq_len * config.data.microbatch_size,
    }
    for name, value in widths.items():
        if value % FP8_MULTIPLE:
            yield (
                f"{name} = {value} is not a multiple of {FP8_MULTIPLE}, which FP8 matrix products need: "
                "change it or set precision.fp8.recipe=none"
            )


def _check_pipeline(config: Config) -> Iterator[str]:
    pp, layers, stages = config.parallel.pp, config.model.num_layers, config.pipeline.stage_layers
    if stages is None:
        if pp > layers:
            yield (
                f"parallel.pp {pp} is more than model.num_layers {layers}: lower it, or say in "
                "pipeline.stage_layers which stages hold no layer"
            )
        return
    shown = list(stages)
    if any(count < 0 for count in stages):
        yield f"pipeline.stage_layers {shown} has a negative number of layers"
    if len(stages) != pp:
        yield f"pipeline.stage_layers {shown} has {len(stages)} entries, parallel.pp is {pp}: one per stage"
    if sum(stages) != layers:
        yield f"pipeline.stage_layers {shown} adds up to {sum(stages)}, model.num_layers is {layers}"


def _check_optim(config: Config) -> Iterator[str]:
    optim, steps = config.optim, config.train.steps
    if optim.schedule != "wsd":
        if optim.wsd_decay_steps is not None:
            yield (
                f"optim.wsd_decay_steps {optim.wsd_decay_steps} has no meaning with optim.schedule "
                f"{optim.schedule}: set it to null, or the schedule to wsd"
            )
    elif optim.wsd_decay_steps is None:
        yield "optim.schedule wsd needs optim.wsd_decay_steps (optimizer steps of the final decay)"
    elif optim.warmup_steps + optim.wsd_decay_steps > steps:
        yield (
            f"optim.warmup_steps {optim.warmup_steps} + optim.wsd_decay_steps {optim.wsd_decay_steps} exceed "
            f"train.steps {steps}"
        )


def _check_train(config: Config) -> Iterator[str]:
    if config.train.eval_every and config.data.valid is None:
        yield (
            f"train.eval_every {config.train.eval_every} needs a held-out corpus: set data.valid, or "
            "train.eval_every=0"
        )


def explain(error: ValidationError, model: type[BaseModel], layers: Layered | None = None) -> str:
    """A validation error in a user's words, one line per problem.

    ``layers`` tells where each value was written. Unknown keys name the nearest known one; wrong values name
    the key, what was given and what is expected, with the unit.
    """
    keys = config_help.describe(model)
    problems: list[str] = []
    for item in error.errors(include_url=False):
        for problem in _problems(dict(item), keys, model, layers):
            if problem not in problems:
                problems.append(problem)
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems in the configuration:", *(f"  - {p}" for p in problems)])


def _problems(
    item: dict[str, Any],
    keys: dict[str, config_help.KeyInfo],
    model: type[BaseModel],
    layers: Layered | None,
) -> Iterator[str]:
    path = tuple(part for part in item["loc"] if isinstance(part, str))
    name = ".".join(path)
    source = layers.source_of(path) if layers is not None else None
    where = "" if source is None else f" (on the {source})" if source == COMMAND_LINE else f" (in {source})"
    kind = item["type"]
    if kind == "extra_forbidden":
        yield from _unknown(name, item["input"], where, keys)
    elif kind == "missing":
        info = keys[name]
        yield f"{name} is missing; {info.expected} is expected: {_lower_first(info.description)}"
    elif kind == "value_error":
        yield from str(item["ctx"]["error"]).splitlines()
    elif name in keys:
        given = item["input"]
        yield f"{name}{where}: {_show(given)} given, expected {keys[name].expected}{_hint(given, keys[name])}"
    else:
        yield (
            f"{name}{where}: {_show(item['input'])} given, expected a section with keys such as "
            + ", ".join([k for k in keys if k.startswith(f"{name}.")][:3])
        )


def _unknown(name: str, value: Any, where: str, keys: dict[str, config_help.KeyInfo]) -> Iterator[str]:
    """The nearest known key; for a whole unknown section, the nearest section."""
    while isinstance(value, dict) and len(value) == 1:
        inner, value = next(iter(value.items()))
        name = f"{name}.{inner}"
    sections = sorted({k.rpartition(".")[0] for k in keys})
    if isinstance(value, dict) and value:
        nearest = config_help.nearest_key(name, sections)
        yield f"unknown section {name}{where}; the nearest known section is {nearest}"
        return
    yield f"unknown key {name}{where}; the nearest known key is {config_help.nearest_key(name, list(keys))}"


def _show(value: Any) -> str:
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "text",
        list: "list",
        dict: "section",
    }
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a section"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return f"{text} ({names.get(type(value), type(value).__name__)})"


def _hint(given: Any, info: config_help.KeyInfo) -> str:
    if isinstance(given, (int, float)) and info.kind.startswith("text"):
        return "; put it in quotes"
    numeric = info.kind.startswith(("integer", "number"))
    if isinstance(given, str) and given[:1].isdigit() and info.unit and numeric:
        return "; write the bare number, without a unit"
    return ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]

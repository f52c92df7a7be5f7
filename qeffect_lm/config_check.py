"""What the single fields of the configuration cannot check, and what a user is told about a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from qeffect_lm import config_help
from qeffect_lm.config_model import check_model
from qeffect_lm.config_yaml import COMMAND_LINE, Layered
from qeffect_lm.errors import shown
from qeffect_lm.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from qeffect_lm.config import Config

FP8_MULTIPLE = 16  # FP8 tensor cores want 16-byte rows, which are 16 FP8 values
FP8_BLOCK = 128  # block scaling: one scale per tile of 128 values
# Chunks per rank that a schedule can have; () is any number. The schedules themselves are in pipeline.schedules, which the
# configuration does not import; a test keeps the two equal.
CHUNKS: dict[str, tuple[int, ...]] = {
    "1f1b": (1,),
    "gpipe": (1,),
    "interleaved-1f1b": (),
    "zb-h1": (1,),
    "zb-h2": (1,),
    "zb-v": (2,),
    "dualpipev": (2,),
    "auto": (1, 2),
}
LEAST_DECAY = 2**-8  # a bfloat16 less this part of it always rounds to a smaller one
OWN_LAG = ("zb-h1", "zb-h2", "zb-v", "dualpipev", "auto")


def cross_check(config: Config) -> list[str]:
    """All contradictions between keys, each as one sentence with its remedy."""
    return [
        *check_model(config),
        *_check_fp8(config),
        *_check_tensor(config),
        *_check_experts(config),
        *_check_context(config),
        *_check_backend(config),
        *_check_pipeline(config),
        *_check_optim(config),
        *_check_moments(config),
        *_check_main_grads(config),
        *_check_train(config),
        *_check_data(config),
        *_check_start(config),
    ]


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
    cut, whole = f" / parallel.tp {tp}" if tp > 1 else "", model.moe.num_experts is not None  # no rank has a part of an expert
    cp, data = config.parallel.cp, config.data
    part = f" / parallel.cp {cp}" if cp > 1 else ""
    # What does not divide is told as that, elsewhere.
    widths = {
        "model.hidden_size": (model.hidden_size, 1),
        f"model.num_heads x model.head_dim{cut}": (model.num_heads * model.head_dim, tp),
        f"model.num_kv_heads x model.head_dim{cut}": (max(tp, model.num_kv_heads) * model.head_dim, tp),
        f"model.ffn_size{cut * (not whole)}": (model.ffn_size, 1 if whole else tp),
        f"data.seq_len x data.microbatch_size{part}": (data.seq_len * data.microbatch_size, cp),
    }
    multiple, what = FP8_MULTIPLE, "FP8 matrix products need"
    if fp8.recipe == "block":
        multiple, what = FP8_BLOCK, "block scaling needs"
    for name, (size, ranks) in widths.items():
        value, rest = divmod(size, ranks)
        if not rest and value % multiple:
            yield f"{name} = {value} is not a multiple of {multiple}, which {what}: change it or set precision.fp8.recipe=none"


def _check_tensor(config: Config) -> Iterator[str]:
    """What layers that are cut over ranks do not go with."""
    parallel, tp, alone = config.parallel, config.parallel.tp, "or parallel.tp=1"
    if tp == 1:
        return
    what = f"parallel.tp {tp}"
    tokens, cp = config.data.seq_len * config.data.microbatch_size // parallel.cp, parallel.cp
    if parallel.sequence_parallel and tokens % tp and config.data.seq_len * config.data.microbatch_size % cp == 0:
        part = f" / parallel.cp {cp}" if cp > 1 else ""
        yield (
            f"data.seq_len x data.microbatch_size{part} = {tokens} tokens are not divisible by parallel.tp {tp}: change one of "
            "them, or set parallel.sequence_parallel=false"
        )
    if config.precision.fp8.recipe in ("current", "block"):
        recipe = config.precision.fp8.recipe
        yield f"{what}: precision.fp8.recipe {recipe} scales each rank's piece by itself: set recipe=delayed or none, {alone}"
    if config.optim.name == "muon":
        yield f"{what}: optim.name muon updates whole matrices, and each rank has a piece: set optim.name=adamw, {alone}"
    if config.pipeline.schedule == "auto" and config.pipeline.costs.t_f is None:
        yield f"{what}: schedule auto measures whole layers only: give pipeline.costs, or choose a named schedule"


def _check_experts(config: Config) -> Iterator[str]:
    """What experts on several ranks do not go with."""
    parallel, experts = config.parallel, config.model.moe.num_experts
    ranks = parallel.ep * parallel.tp
    if experts is None or ranks == 1:
        return
    what = " x ".join(f"parallel.{axis} {size}" for axis, size in (("ep", parallel.ep), ("tp", parallel.tp)) if size > 1)
    if experts % ranks:
        yield f"model.moe.num_experts {experts} is not divisible by {what}, the ranks that share them: change one of them"
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield f"{what}: ranks that share experts route their own tokens: set parallel.sequence_parallel=true, or parallel.tp=1"
    if parallel.tp == 1 and config.pipeline.schedule == "auto" and config.pipeline.costs.t_f is None:
        yield f"{what}: schedule auto measures all experts on one rank: give pipeline.costs, or choose a named schedule"


def _check_context(config: Config) -> Iterator[str]:
    """What sequences that are cut over ranks do not go with."""
    cp, row = config.parallel.cp, config.data.seq_len
    if cp == 1:
        return
    what = f"parallel.cp {cp}"
    if row % (2 * cp):
        yield (
            f"data.seq_len {row} is not divisible by 2 x parallel.cp = {2 * cp}, the chunks of a sequence: change one of them "
            f"(data.seq_len={-(-row // (2 * cp)) * 2 * cp} does)"
        )
    if config.model.backend == "te":
        yield f"{what}: model.backend te runs without context parallelism so far: set 1, or model.backend=native"
    if config.pipeline.schedule == "auto" and config.pipeline.costs.t_f is None:
        yield f"{what}: schedule auto measures whole sequences only: give pipeline.costs, or choose a named schedule"


def _check_backend(config: Config) -> Iterator[str]:
    """What the decoder layers' backend takes."""
    fp8, native = config.precision.fp8, "or model.backend=native"
    if config.model.backend == "native":
        if fp8.recipe == "block":
            yield "precision.fp8.recipe block exists with model.backend te only: set that, or recipe=delayed or current"
        return
    if config.run.device == "cpu":
        yield f"model.backend te needs a GPU, run.device is cpu: set run.device=cuda, {native}"
    if config.graphs.backend == "host_replay":
        yield f"graphs.backend host_replay cannot repeat the kernels of model.backend te: set cuda_graphs or eager, {native}"
    if config.precision.dtype != "bfloat16":
        yield f"precision.dtype {config.precision.dtype}: model.backend te computes in bfloat16: set that, {native}"
    if fp8.recipe != "delayed" and fp8.recipe != "none" and fp8.margin:
        yield f"precision.fp8.margin {fp8.margin}: recipe {fp8.recipe} of model.backend te has no margin: set it to 0"


def _check_data(config: Config) -> Iterator[str]:
    data = config.data
    if data.train is not None and data.blend is not None:
        yield "data.train and data.blend are both set: put data.train among the corpora of data.blend, or unset one"
    if data.blend is not None and len(data.blend) == 0:
        yield "data.blend is empty: name corpora as 'WEIGHT PATH', or set data.train"
    if data.documents == "reset" and config.model.backend == "te":
        yield "data.documents reset: model.backend te does not keep documents apart: set joined, or model.backend=native"


def _check_pipeline(config: Config) -> Iterator[str]:
    pipeline, pp, layers = config.pipeline, config.parallel.pp, config.model.num_layers
    chunks, schedule, stages = pipeline.chunks, pipeline.schedule, pipeline.stage_layers
    allowed = CHUNKS[schedule]
    if chunks is not None and allowed and chunks not in allowed:
        numbers = " or ".join(map(str, allowed))
        yield (
            f"pipeline.chunks {chunks}: schedule {schedule} has {numbers} per rank; leave it null, or set "
            "pipeline.schedule=interleaved-1f1b, which takes any number"
        )
        return
    if schedule in OWN_LAG and pipeline.w_delay:
        yield f"pipeline.w_delay {pipeline.w_delay}: schedule {schedule} itself sets when W runs: set pipeline.w_delay=0"
    yield from _check_coalescing(config)
    yield from _check_layers(stages, pp, layers, (chunks,) if chunks else allowed or (2,))
    yield from _check_auto(config)


def _check_coalescing(config: Config) -> Iterator[str]:
    """What W of several microbatches as one product needs."""
    number, fp8 = config.pipeline.coalesce_w, config.precision.fp8
    if number == 1:
        return
    what, otherwise = f"pipeline.coalesce_w {number}", "or pipeline.coalesce_w=1"
    if number > config.pipeline.microbatches:
        yield f"{what} is more than pipeline.microbatches {config.pipeline.microbatches}: lower it"
    if fp8.recipe != "delayed":
        why = "no linear is in FP8" if fp8.recipe == "none" else "each microbatch has a scale of its own"
        yield f"{what}: with precision.fp8.recipe {fp8.recipe} {why}: set recipe=delayed, {otherwise}"
    elif fp8.window != "step":
        why = f"in precision.fp8.window {fp8.window} each microbatch has a scale of its own"
        yield f"{what}: {why}: set window=step, {otherwise}"
    if config.model.backend != "native":
        why = f"model.backend {config.model.backend} cannot place its saved tensors side by side"
        yield f"{what}: {why}: set native, {otherwise}"
    if config.pipeline.schedule == "auto":
        yield f"{what}: schedule auto itself places each W: choose a named schedule, {otherwise}"


def _check_layers(stages: tuple[int, ...] | None, pp: int, layers: int, chunks: tuple[int, ...]) -> Iterator[str]:
    """``chunks``: the numbers of chunks per rank that may come out."""
    if stages is None:
        least = pp * min(chunks)
        if least > layers:
            what = f"parallel.pp {pp}" + (f" x {min(chunks)} chunks per rank = {least}" if min(chunks) > 1 else "")
            yield (
                f"{what} is more than model.num_layers {layers}: lower it, take a schedule with fewer chunks, or say in "
                "pipeline.stage_layers which chunks hold no layer"
            )
        return
    shown = list(stages)
    if any(count < 0 for count in stages):
        yield f"pipeline.stage_layers {shown} has a negative number of layers"
    wanted = [pp * number for number in chunks]
    if len(stages) not in wanted:
        each = "one per stage" if chunks == (1,) else f"{' or '.join(map(str, wanted))} are needed, one per chunk"
        yield f"pipeline.stage_layers {shown} has {len(stages)} entries, parallel.pp is {pp}: {each}"
    if sum(stages) != layers:
        yield f"pipeline.stage_layers {shown} adds up to {sum(stages)}, model.num_layers is {layers}"


def _check_auto(config: Config) -> Iterator[str]:
    """What only ``auto`` takes."""
    pipeline, pp = config.pipeline, config.parallel.pp
    costs = pipeline.costs
    given = {name: value for name, value in costs.model_dump().items() if value is not None}
    if pipeline.schedule != "auto":
        wrong = [f"pipeline.costs.{name}" for name in given] + ["pipeline.memory_limit"] * (pipeline.memory_limit is not None)
        if wrong:
            schedule = pipeline.schedule
            yield f"{wrong[0]} has no meaning with pipeline.schedule {schedule}: set it to null, or the schedule to auto"
        return
    for name, value in given.items():
        if name != "t_comm" and (len(value) not in (1, pp) or min(value) < 0 or not sum(value) < float("inf")):
            yield f"pipeline.costs.{name} {list(value)}: one number from 0 on is needed, or one for each of {pp} ranks"
            return
    times = [name for name in ("t_f", "t_i", "t_w") if name in given]
    if len(times) in (1, 2):
        yield f"pipeline.costs has {' and '.join(times)} alone: give t_f, t_i and t_w, or none of them to have them measured"
    elif times and not sum(map(sum, (given[name] for name in times))):
        yield "pipeline.costs: t_f, t_i and t_w are all zero: there is nothing to schedule"
    elif not times and "t_comm" in given:
        yield "pipeline.costs.t_comm needs t_f, t_i and t_w in the same unit: give them, or none to have them measured"
    yield from _check_limit(pipeline.memory_limit, costs.m_b, costs.m_w)


def _check_limit(text: str | None, m_b: tuple[float, ...] | None, m_w: tuple[float, ...] | None) -> Iterator[str]:
    if m_w is not None and m_b is None:
        yield "pipeline.costs.m_w needs pipeline.costs.m_b"
    elif m_b is not None and (min(m_b) <= 0 or any(after > before for before, after in _pairs(m_b, m_w or m_b))):
        yield f"pipeline.costs: 0 < m_b and m_w <= m_b are needed, not m_b {list(m_b)}, m_w {list(m_w or m_b)}"
    if text is None:
        return
    limit = memory_limit(text)
    if limit is None:
        yield f"pipeline.memory_limit {text!r}: a number of M_B such as '2.5', or bytes with a unit such as '40GiB', is needed"
        return
    number, in_bytes = limit
    if not in_bytes and number < 1:
        yield f"pipeline.memory_limit {text} is below one microbatch (1 M_B), without which no schedule runs; raise it"
    elif in_bytes and m_b is not None and number < max(m_b):
        yield (
            f"pipeline.memory_limit {text} is below one microbatch, which holds pipeline.costs.m_b = {format_bytes(max(m_b))}: "
            "raise it, or lower data.microbatch_size or data.seq_len"
        )


def _pairs(a: tuple[float, ...], b: tuple[float, ...]) -> Iterator[tuple[float, float]]:
    """Two numbers per rank; one number stands for all ranks."""
    ranks = max(len(a), len(b))
    return zip(a * (ranks if len(a) == 1 else 1), b * (ranks if len(b) == 1 else 1), strict=True)


def memory_limit(text: str) -> tuple[float, bool] | None:
    """(number, whether it is bytes) of ``pipeline.memory_limit``; None where it is neither."""
    size = parse_bytes(text)
    if size is not None:
        return size, True
    try:
        number = float(text)
    except ValueError:
        return None
    return (number, False) if 0 <= number < float("inf") else None


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


def _check_moments(config: Config) -> Iterator[str]:
    """What Muon, the optimizer's backend and narrow moments take."""
    optim = config.optim
    if optim.name == "muon" and optim.zero:
        yield f"optim.zero {optim.zero}: optim.name muon updates whole matrices: set optim.zero=0, or optim.name=adamw"
    if optim.backend in ("te", "apex"):
        if config.run.device == "cpu":
            yield f"optim.backend {optim.backend} needs a GPU, run.device is cpu: set run.device=cuda, or optim.backend=native"
        if config.precision.dtype == "float64":
            yield f"optim.backend {optim.backend} takes float32 masters, not float64: set optim.backend=native"
    if optim.moments == "float32":
        return
    if optim.backend in ("apex", "torch"):
        yield f"optim.backend {optim.backend} keeps float32 moments: set optim.moments=float32, or optim.backend=native or te"
    for key in ("beta1", "beta2"):
        beta = getattr(optim, key)
        if 1 - beta < LEAST_DECAY:
            yield (
                f"optim.{key} {beta} with optim.moments bfloat16: a moment would not decay, since {beta} times a bfloat16 can "
                f"round back to it; set it to {1 - LEAST_DECAY} or less, or optim.moments=float32"
            )


def _check_main_grads(config: Config) -> Iterator[str]:
    """What narrow main gradients go with."""
    if config.precision.main_grads == "float32":
        return
    wide = "set precision.main_grads=float32"
    if config.precision.dtype == "float64":
        yield f"precision.main_grads bfloat16 with precision.dtype float64, which is for exact comparisons: {wide}"
    if config.optim.backend != "native":
        yield f"optim.backend {config.optim.backend} takes gradients in the masters' type: {wide}, or optim.backend=native"


def _check_train(config: Config) -> Iterator[str]:
    if config.train.eval_every and config.data.valid is None:
        yield (
            f"train.eval_every {config.train.eval_every} needs a held-out corpus: set data.valid, or "
            "train.eval_every=0"
        )
    profiled = config.train.profile.ranges()
    if profiled and profiled[-1][1] > config.train.steps:
        yield (
            f"train.profile.steps {config.train.profile.steps} goes beyond train.steps {config.train.steps}: choose steps that "
            "the run has"
        )


def _check_start(config: Config) -> Iterator[str]:
    """Where a run begins."""
    checkpoint = config.checkpoint
    if checkpoint.init_from is not None and checkpoint.resume not in ("auto", "never"):
        yield (
            f"checkpoint.init_from {checkpoint.init_from} and checkpoint.resume {checkpoint.resume} both say where the run "
            "begins: set init_from=null to go on with that training, or resume=auto to begin another with those weights"
        )
    if checkpoint.init_from is None and checkpoint.init_state != "weights":
        yield f"checkpoint.init_state {checkpoint.init_state} says what checkpoint.init_from gives, which is null: set that too"


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
    name = shown(name)
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

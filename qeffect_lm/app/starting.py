"""A fresh run that starts from a checkpoint's weights (``checkpoint.init_from``), and the files that travel with a model.

Unlike a resume nothing but the parameters has to be there, and what runs (recipe, optimizer, layout, data) may be anything:
each value is read under its logical name and cast to the run's types. ``checkpoint.init_state=training`` takes a training's
state too, as a conversion from Megatron brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checkpoint import Checkpoint, CheckpointError, open_checkpoint, resolve
from checkpoint.comm import Communicator
from checkpoint.layout import natural_key
from checkpoint.load import load_into
from checkpoint.native import MODEL_FILE
from checkpoint.resume import OPTIMIZER, SCALES
from models.decoder import Decoder
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.config import Config, config_diff_on_resume
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.state import Role

TOKENIZER, TOKENIZER_SETTINGS, HF_TOKENIZER = "tokenizer.model", "tokenizer.settings.json", "tokenizer.json"
_TOKENIZER_FILES = ("tokenizer", "vocab.json", "merges.txt", "added_tokens", "special_tokens", "chat_template")


@dataclass(frozen=True)
class Start:
    """Where a run began.

    Attributes:
        step, tokens: of the training that goes on; 0 with weights alone.
        next_sample: the position in the data.
        calibrated: scales came along, and need no calibration.
        origin: what the checkpoint says about where it comes from, kept in those of the run.
    """

    step: int = 0
    tokens: int = 0
    next_sample: int = 0
    calibrated: bool = False
    origin: dict[str, Any] | None = None


def open_start(config: Config) -> Checkpoint | None:
    """The checkpoint of ``checkpoint.init_from``, which describes the configuration's model; None where none is asked for.

    Raises:
        UsageError: it is not there, or of another model; names the keys.
    """
    given = config.checkpoint.init_from
    if given is None:
        return None
    try:
        checkpoint = open_checkpoint(resolve(Path(given)))
    except CheckpointError as error:
        raise UsageError(f"checkpoint.init_from={given}: {error}") from None
    saved = checkpoint.meta.get("config")
    if not isinstance(saved, dict):
        raise UsageError(f"checkpoint.init_from={given}: {checkpoint.path} holds no configuration")
    differ = [
        change
        for change in config_diff_on_resume(saved, config)
        if change.key.startswith("model.") and change.severity == "refuse"
    ]
    if differ:
        lines = "\n".join(f"  {change}" for change in differ)
        beside = checkpoint.path / MODEL_FILE
        hint = f"\nits model section is in {beside}" if MODEL_FILE in checkpoint.manifest.files else ""
        raise UsageError(f"checkpoint.init_from={given} is another model than the configuration's:\n{lines}{hint}")
    return checkpoint


def start_from(checkpoint: Checkpoint, assembly: Assembly, comm: Communicator) -> Start:
    """Give the assembled run its first values; collective over ``comm``.

    Raises:
        UsageError, CheckpointError, ResumeError: something is missing or damaged; every rank raises.
    """
    fault: Exception | None = None
    start = Start()
    try:
        check_parameters(checkpoint, assembly.model)
        fill_parameters(checkpoint, assembly.flat)
        if assembly.config.checkpoint.init_state == "training":
            start = _training_state(checkpoint, assembly)
    except (QEffectError, OSError) as error:
        fault = error
    faults = comm.gather(fault)
    fault = comm.broadcast(None if faults is None else next((one for one in faults if one is not None), None))
    if fault is not None:
        raise fault
    return replace(start, origin=checkpoint.meta.get("origin"))


def check_parameters(checkpoint: Checkpoint, model: Decoder) -> None:
    """Whether the checkpoint has the model's parameters, all of them and no others, in their shapes. Raises
    :class:`UsageError` naming the first that does not fit."""
    wanted = {spec.name: tuple(spec.shape) for spec in model.parameters()}
    there = {full.partition("/")[2] for full in checkpoint.manifest.tensors if full.startswith(("param/", "master/"))}
    for name in sorted(set(wanted) ^ there, key=natural_key):
        what = "lacks the parameter" if name in wanted else "has a parameter that the model lacks,"
        raise UsageError(f"{checkpoint.path} {what} {name}")
    for name, shape in wanted.items():
        found = checkpoint.entry(source_of(checkpoint, name)).shape
        if found != shape:
            raise UsageError(f"{checkpoint.path}: {name} has the shape {list(found)}, the model's is {list(shape)}")


def source_of(checkpoint: Checkpoint, name: str) -> str:
    """Under which full name a parameter's most exact values are."""
    master = f"master/{name}"
    return master if master in checkpoint.manifest.tensors else f"param/{name}"


@torch.no_grad()
def fill_parameters(checkpoint: Checkpoint, flat: FlatBuffers) -> None:
    """Masters and parameters from a checkpoint's, cast to the storages' types; one parameter in memory at a time."""
    for name in flat.names:
        flat.fill_(name, checkpoint.read(source_of(checkpoint, name)).to(flat.master_buffer.dtype))
    for name in flat.tied_param_buffers:
        source = flat.tied[name].tied_to
        assert source is not None
        flat.fill_(name, checkpoint.read(source_of(checkpoint, source)).to(flat.master_buffer.dtype))


def _training_state(checkpoint: Checkpoint, assembly: Assembly) -> Start:
    """Moments, step counter and, where the run's scales have a history, those and the scales."""
    if not any(entry.role is Role.MOMENT for entry in checkpoint.manifest.tensors.values()):
        raise UsageError(
            f"checkpoint.init_state=training, but {checkpoint.path} holds no optimizer state: set checkpoint.init_state=weights"
        )
    items = assembly.logical_tensors()
    load_into(checkpoint, [item for item in items if item.role in OPTIMIZER and item.role is not Role.STATISTIC], strict=False)
    scales = [item for item in items if item.role in SCALES]
    calibrated = False
    if scales and any(entry.role in SCALES for entry in checkpoint.manifest.tensors.values()):
        length = next(entry.shape[0] for entry in checkpoint.manifest.tensors.values() if entry.role is Role.AMAX_HISTORY)
        if length != assembly.config.precision.fp8.history:
            raise UsageError(f"{checkpoint.path} has amax histories of {length} windows: set precision.fp8.history={length}")
        load_into(checkpoint, scales, strict=False)
        window = assembly.timeline.window
        assembly.timeline.load_state({"epochs": dict.fromkeys(map(str, Direction), 1), "commits": 1, "window": window})
        calibrated = True
    meta = checkpoint.meta
    samples = meta.get("samples")
    if samples is None:
        samples = (meta.get("data") or {}).get("next_sample", 0)
    return Start(checkpoint.step, int(meta.get("tokens", 0)), int(samples), calibrated)


def companions_of(config: Config, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> dict[str, bytes]:
    """What travels with the run's checkpoints: what the one it began from had, and the tokenizer of the configuration.

    A configured tokenizer that is not the one that came along replaces it, with all that belonged to it.
    """
    files = {} if checkpoint is None else {n: raw for n, raw in checkpoint.companions().items() if n != MODEL_FILE}
    if config.data.tokenizer is None:
        return files
    path = Path(config.data.tokenizer)
    model = path.read_bytes()
    called = HF_TOKENIZER if path.suffix == ".json" else TOKENIZER
    if files.get(called) == model:
        return files
    replaced = [name for name in files if name.startswith(_TOKENIZER_FILES)]
    if replaced:
        say(f"data.tokenizer {path} is not the tokenizer that came with the model: {', '.join(replaced)} no longer travel")
    files = {name: raw for name, raw in files.items() if name not in replaced} | {called: model}
    settings = path.with_suffix(".json")
    if settings.exists() and settings != path:
        files[TOKENIZER_SETTINGS] = settings.read_bytes()
    return files


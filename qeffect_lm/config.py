"""The configuration: typed, frozen, from YAML plus ``section.key=value`` overrides.

    config = load_config("models/configs/demo.yaml", ["optim.lr=1e-3"])
    config.optim.lr                      # 0.001
    print(config.dump_yaml())            # the resolved configuration, which load_config reads back as equal

Every field (:mod:`qeffect_lm.config_sections`, :mod:`qeffect_lm.config_model`) says what it means, in which unit,
and whether it may change when a run resumes (``on_resume``: free, warn or refuse). Wrong input raises
:class:`UsageError` that names the key, where it was written, what was given and what is expected. This module does
not import torch.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from qeffect_lm import config_help
from qeffect_lm.config_check import cross_check, explain
from qeffect_lm.config_help import KeyInfo, OnResume
from qeffect_lm.config_model import ModelConfig
from qeffect_lm.config_sections import (
    CheckpointConfig,
    ContractConfig,
    DataConfig,
    FP8Config,
    GraphsConfig,
    LaunchConfig,
    LoggingConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RunConfig,
    Section,
    TrainConfig,
)
from qeffect_lm.config_yaml import COMMAND_LINE, Layered, dump_yaml, parse_yaml, read_layers, split_overrides
from qeffect_lm.errors import UsageError, shown

__all__ = [
    "ABSENT",
    "Change",
    "CheckpointConfig",
    "Config",
    "ContractConfig",
    "DataConfig",
    "FP8Config",
    "GraphsConfig",
    "LaunchConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RunConfig",
    "Section",
    "TrainConfig",
    "config_diff_on_resume",
    "help_text",
    "load_config",
]


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    graphs: GraphsConfig = Field(default_factory=GraphsConfig)
    contract: ContractConfig = Field(default_factory=ContractConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @model_validator(mode="after")
    def _check(self) -> Config:
        problems = cross_check(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @staticmethod
    def from_dict(data: Mapping[str, Any], layers: Layered | None = None) -> Config:
        """Validate nested plain data. Raises :class:`UsageError` that lists every problem found."""
        filled = _with_sections(Config, data)
        try:
            return Config.model_validate(filled)
        except ValidationError as error:
            raise UsageError(explain(error, Config, layers)) from None

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data (JSON types only), for a manifest or a YAML file."""
        return self.model_dump(mode="json")

    def dump_yaml(self) -> str:
        """The resolved configuration as YAML; :func:`load_config` reads it back as an equal Config."""
        return dump_yaml(self.to_dict())

    def checkpoint_dir(self) -> Path:
        """``checkpoint.dir``, or its default inside ``run.dir``."""
        return Path(self.checkpoint.dir) if self.checkpoint.dir else Path(self.run.dir) / "checkpoints"

    def chunk_layers(self, num_chunks: int) -> list[int]:
        """Decoder layers of each of the model's ``num_chunks`` chunks over all ranks, in the model's order.

        Raises:
            UsageError: ``pipeline.stage_layers`` is written for another number of chunks.
        """
        given = self.pipeline.stage_layers
        if given is None:
            each, more = divmod(self.model.num_layers, num_chunks)
            return [each + (chunk < more) for chunk in range(num_chunks)]
        if len(given) != num_chunks:
            raise UsageError(f"pipeline.stage_layers {list(given)} has {len(given)} entries, the plan has {num_chunks} chunks")
        return list(given)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file, what it inherits by ``base:``, and ``section.key=value`` overrides, in that order.

    Values of overrides are YAML; for keys that hold a text they are taken as written, except ``null``.
    Raises :class:`UsageError` for anything wrong with the files, keys, values or their combination.
    """
    layers = read_layers(path)
    keys = config_help.describe(Config)
    for override_path, text in split_overrides(overrides):
        info = keys.get(".".join(override_path))
        value = parse_yaml(text, f"argument {'.'.join(override_path)}={text}") if text.strip() else None
        if info is not None and _is_text(info) and value is not None:
            value = text
        layers.set(override_path, value, COMMAND_LINE)
    return Config.from_dict(layers.data, layers)


def help_text(width: int = 100) -> str:
    """Every key with type, default, unit, resume rule and meaning, for a terminal ``width`` columns wide."""
    return config_help.help_text(Config, width)


@dataclass(frozen=True)
class Change:
    """One key that differs between a saved run and its resumption."""

    key: str
    old: Any
    new: Any
    severity: OnResume

    def __str__(self) -> str:
        return f"{shown(self.key)}: {shown(repr(self.old))} -> {self.new!r}"  # a checkpoint's key and value may be anything


ABSENT = "(no such key)"


def config_diff_on_resume(saved: Mapping[str, Any], new: Config) -> list[Change]:
    """Keys whose value differs from the ``saved`` ``Config.to_dict()``, in the order of the configuration.

    A key that ``saved`` lacks (it is newer than the checkpoint) counts with its default. One that only
    ``saved`` has is reported as a warning with ``new=ABSENT``. The caller decides by ``severity``.
    """
    old_values = _flatten(saved)
    new_values = _flatten(new.to_dict())
    keys = config_help.describe(Config)
    changes = []
    for name, info in keys.items():
        missing = ABSENT if info.required else new_values[name] if name == "model.head_dim" else info.default
        old = old_values.pop(name, missing)
        if _plain(old) != new_values[name] or isinstance(old, bool) != isinstance(new_values[name], bool):
            changes.append(Change(name, old, new_values[name], info.on_resume))
    changes += [Change(name, old, ABSENT, "warn") for name, old in old_values.items()]
    return changes


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_text(info: KeyInfo) -> bool:
    members = {info.annotation, *typing.get_args(info.annotation)}
    return str in members


def _with_sections(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with an empty mapping for each absent or empty section: missing keys are then named singly."""
    filled = dict(data)
    for name, info in model.model_fields.items():
        section = config_help.section_class(info)
        if section is not None:
            inner = filled.get(name)
            if inner is None or isinstance(inner, Mapping):
                filled[name] = _with_sections(section, inner or {})
    return filled

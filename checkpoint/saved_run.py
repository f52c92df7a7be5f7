"""What a training run keeps in a checkpoint's meta data, as types: checked once, before a resume reads any of it."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from checkpoint.layout import MANIFEST, CheckpointError
from checkpoint.manifest import Count
from checkpoint.reader import Checkpoint
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.errors import shown


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Positive = Annotated[int, Field(ge=1, lt=2**31, strict=True)]


class _Timeline(_Part):
    epochs: dict[Direction, Count]
    commits: Count


class _Weights(_Part):
    versions: dict[str, Count]
    cache_version: dict[str, Count]
    cache_epoch: dict[str, Count]


class _Contract(_Part):
    timeline: _Timeline
    weights: _Weights


class _Parallel(_Part):
    dp: Positive


class _Pipeline(_Part):
    microbatches: Positive
    schedule: StrictStr


class _Data(_Part):
    microbatch_size: Positive


class _Train(_Part):
    steps: Count
    threads: Positive = 1


class _Config(BaseModel):
    """Sections, and in them what is read before the configuration is compared with a run's."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]

    parallel: _Parallel
    pipeline: _Pipeline
    data: _Data
    train: _Train


class _SavedRun(_Part):
    tokens: Count
    config: _Config
    data: dict[str, Any]
    layout: dict[str, Positive]
    plan: StrictStr
    contract: _Contract
    graph_fingerprints: tuple[StrictStr, ...]
    branch: StrictStr | None = None
    wandb: dict[str, Any] | None = None
    save_id: StrictStr | None = None


def check_saved_run(checkpoint: Checkpoint) -> None:
    """Raises :class:`CheckpointError`, naming the value, unless a training run saved this, whole and of the right types.

    What the values say is checked where they are used: the configuration, the plan, the data cursor, versions.
    """
    where = f"{checkpoint.path / MANIFEST} is not of a training run"
    try:
        saved = _SavedRun.model_validate(checkpoint.meta)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CheckpointError(
            f"{where}: meta.{shown('.'.join(map(str, first['loc'])))}: {shown(first['msg'])}"
        ) from None
    ranks = len(checkpoint.manifest.ranks)
    if len(saved.graph_fingerprints) != ranks or math.prod(saved.layout.values()) != ranks:
        raise CheckpointError(
            f"{where}: {ranks} ranks wrote it, and meta has {len(saved.graph_fingerprints)} graph fingerprints and the layout "
            f"{shown(str(saved.layout))}"
        )

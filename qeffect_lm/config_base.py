"""What every section of the configuration is made with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from qeffect_lm.config_help import OnResume


class Section(BaseModel):
    """What all sections share: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def key(default: Any, description: str, *, on_resume: OnResume, unit: str = "", **bounds: Any) -> Any:
    return Field(
        default, description=description, json_schema_extra={"unit": unit, "on_resume": on_resume}, **bounds
    )


def per_rank(description: str, unit: str) -> Any:
    return key(None, description, on_resume="warn", unit=unit, strict=False)

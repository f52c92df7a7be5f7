"""What a device can do: constants and tables of ``devices.json``, measured or assumed, and profiles of a run's own layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from qeffect_lm.app.links import Links
from qeffect_lm.app.profile import Part, Profile
from qeffect_lm.app.rates import Products, Rates
from qeffect_lm.errors import UsageError

TABLE = Path(__file__).with_name("devices.json")


@dataclass(frozen=True)
class Ceilings(Links):
    """A device, and what joins it to others.

    Attributes:
        memory_tb_s: bandwidth of its memory; ``touches``: how often a byte that a layer makes crosses it beside products.
        layer_overhead_us: launches of one layer and microbatch; ``routing_us``: what experts add to that, the tiles that their
            uneven rows leave part empty among it.
        products, experts, attention, row_attention: as measured (:mod:`qeffect_lm.app.rates`); ``row_attention`` is of the
            kernels for packed documents and for sequences cut over ranks.
        expert_imbalance: rows of the busiest rank's experts over the mean of all ranks.
        sources: what was measured, and by what.
        assumed: constant → what it is, of those that nobody measured.
    """

    key: str
    name: str
    memory_gib: float
    memory_tb_s: float
    touches: float
    layer_overhead_us: float
    routing_us: float
    expert_imbalance: float
    products: Mapping[str, Products]
    experts: Mapping[str, Rates]
    attention: Rates
    row_attention: Rates
    sources: tuple[str, ...]
    assumed: Mapping[str, str]

    def said(self) -> list[str]:
        """What is measured, and every constant that is not, with its value."""
        lines = [f"{self.name}, measured: {source}" for source in self.sources]
        given = (f"{name} = {getattr(self, name):g} ({why})" for name, why in self.assumed.items())
        return [*lines, *(f"assumed, not measured: {line}; another value: --device FILE" for line in given)]


CONSTANTS = tuple(field.name for field in fields(Ceilings) if field.type in ("float", "int"))


def devices() -> list[str]:
    """The devices with ceilings."""
    return sorted(json.loads(TABLE.read_text(encoding="utf-8")))


def ceilings(device: str) -> Ceilings:
    """Of the table, or of a YAML file that names one of them as ``base`` and gives constants other values.

    Raises:
        UsageError: no such device, or a file that says something else.
    """
    if device.endswith((".yaml", ".yml")):
        return _from_file(Path(device))
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if device not in table:
        raise UsageError(
            f"no ceilings of device {device!r}: use one of {', '.join(table)}, a YAML file with base: and other constants, "
            "or --profile FILE"
        )
    entry: dict[str, Any] = dict(table[device])
    measured: dict[str, Any] = {
        "products": {kind: Products.of(one) for kind, one in entry.pop("products").items()},
        "experts": {kind: Rates.of(one, "rows") for kind, one in entry.pop("experts").items()},
        "attention": Rates.of(entry.pop("attention"), "sequence"),
        "row_attention": Rates.of(entry.pop("row_attention"), "sequence"),
        "sources": tuple(entry.pop("measured")),
    }
    return Ceilings(key=device, **entry, **measured)


def _from_file(path: Path) -> Ceilings:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not isinstance(found.get("base"), str) or found["base"].endswith((".yaml", ".yml")):
        raise UsageError(f"{path}: 'base: NAME' is needed, one of {', '.join(devices())}, and constants that differ from its")
    base = ceilings(found.pop("base"))
    name = str(found.pop("name", f"{base.name} as {path.name} has it"))
    for key, value in found.items():
        if key not in CONSTANTS:
            raise UsageError(f"{path}: there is no constant {key!r}; there are {', '.join(CONSTANTS)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            if not (key.endswith("_us") and value == 0):
                raise UsageError(f"{path}: {key} is a number above 0, not {value!r}")
    given = {key: f"of {path.name}" for key in found}
    return replace(base, name=name, assumed={**base.assumed, **given}, **found)


def write_profile(path: Path, profile: Profile, about: dict[str, Any]) -> None:
    """A profile as a file for :func:`read_profile`; ``about`` says of what."""
    parts = {"embedding": asdict(profile.embedding), "head": asdict(profile.head), "t_comm": profile.t_comm}
    layers = {"fp8" if fp8 else "plain": asdict(part) for fp8, part in profile.layers.items()}
    path.write_text(json.dumps({"format": 1, "about": about, **parts, "layers": layers}, indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> tuple[Profile, dict[str, Any]]:
    """Raises UsageError: no file of :func:`write_profile`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        layers = {name == "fp8": Part(**part) for name, part in found["layers"].items()}
        profile = Profile(Part(**found["embedding"]), layers, Part(**found["head"]), float(found["t_comm"]))
        return profile, dict(found["about"])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is no profile: write one with `python -m tools.plan CONFIG.yaml --measure FILE`") from None

"""Show what is in a checkpoint: step, tokens, layout, epochs, versions, sizes, and how every FP8 scale is doing.

    python -m tools.inspect PATH [--layer 'layers.3.*'] [--json] [--picture scales.png]

PATH is a ``step_…`` folder, the folder above it (then the one that ``latest`` names) or a run's folder. Exit code 0: shown,
1: damaged, 2: no checkpoint there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, CheckpointError, open_checkpoint, resolve
from checkpoint.scales import ScaleRow, scale_rows
from checkpoint.sums import of_checkpoint, state_digest
from qeffect_lm.errors import QEffectError, UsageError, shown
from qeffect_lm.state import Role
from qeffect_lm.units import format_bytes
from tools.common import add_traceback, json_plain, run_tool

PICTURES = (".png", ".svg", ".pdf")
WIDTH = 160  # of a table that goes to no terminal
CONFIG = (  # of the configuration, what says which run this is
    "run.name",
    "run.seed",
    "model.family",
    "model.hidden_size",
    "model.num_layers",
    "model.vocab_size",
    "model.backend",
    "precision.dtype",
    "precision.fp8.recipe",
    "precision.fp8.window",
    "precision.fp8.history",
    "precision.fp8.amax",
    "data.seq_len",
    "data.microbatch_size",
    "pipeline.microbatches",
    "optim.name",
    "optim.lr",
    "optim.zero",
    "train.steps",
    "graphs.backend",
    "graphs.scope",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    arguments = _parser().parse_args(argv)
    return run_tool(lambda: _run(arguments), arguments.traceback, arguments.json, os_error=2)


def _run(arguments: argparse.Namespace) -> int:
    picture: Path | None = arguments.picture
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise UsageError(f"--picture {picture}: the name has to end in one of {', '.join(PICTURES)}")
    try:
        checkpoint = open_checkpoint(resolve(arguments.path))
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    try:
        return _look(checkpoint, arguments, picture)
    except QEffectError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:  # meta data are free JSON
        what = f"{type(error).__name__}: {shown(str(error))}"
        raise UsageError(f"{checkpoint.path}: its meta data are not those of a training run ({what})") from error


def _look(checkpoint: Checkpoint, arguments: argparse.Namespace, picture: Path | None) -> int:
    rows = scale_rows(checkpoint, arguments.layer)
    if not rows and arguments.layer != "*":
        known = scale_rows(checkpoint)
        hint = f"there is {known[0].name}, say" if known else "there are no scales in it"
        raise UsageError(f"--layer {arguments.layer!r} fits none of the scales of {checkpoint.path}: {hint}")
    if picture is not None and not rows:
        raise UsageError(f"{checkpoint.path} holds no scale history to draw: its run had no delayed scaling")
    if picture is not None:
        from qeffect_lm.runtime.scale_picture import draw

        draw([(row.layer, row.kind, row.history, row.headroom) for row in rows], picture, title=_title(checkpoint))
    about = overview(checkpoint)
    if arguments.digest:
        about["state_digest"] = state_digest(of_checkpoint(checkpoint))
    if arguments.json:
        print(json.dumps(json_plain({**about, "scales": [row.document() for row in rows]}), indent=1))
    else:
        show(about, rows)
        if picture is not None:
            print(f"picture: {picture}")
    return 0


def overview(checkpoint: Checkpoint) -> dict[str, Any]:
    """All but the scales, as plain data. What the checkpoint's writer did not save is None."""
    meta, manifest = checkpoint.meta, checkpoint.manifest
    contract = checkpoint.within("contract")
    return {
        "path": str(checkpoint.path),
        "format": manifest.format,
        "step": checkpoint.step,
        "tokens": meta.get("tokens"),
        "ranks": len(manifest.ranks),
        "layout": meta.get("layout"),
        "schedule": meta.get("schedule"),
        "plan": _plan(meta),
        "graph_fingerprints": meta.get("graph_fingerprints"),
        "cursor": checkpoint.within("data"),
        "dataset_sha256": meta.get("dataset_sha256"),
        "contract": contract.get("timeline"),
        "weights": _weights(contract.get("weights")),
        "wandb": meta.get("wandb"),
        "branch": meta.get("branch"),
        "config": _chosen(checkpoint.within("config")),
        "tensors": _sizes(checkpoint),
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "libraries": dict(manifest.versions),
    }


def _plan(meta: dict[str, Any]) -> dict[str, Any] | None:
    try:
        plan = json.loads(meta["plan"])
        said = {key: plan[key] for key in ("schedule", "microbatches", "placement", "window")}
        return {**said, "actions": sum(map(len, plan["actions"])), "fingerprint": meta.get("plan_fingerprint")}
    except (KeyError, TypeError, ValueError, RecursionError):  # not saved by a training run
        return None


def _weights(weights: dict[str, dict[str, int]] | None) -> dict[str, Any] | None:
    """Versions of all parameters and of the caches made from them: the least and the largest, and caches that are behind."""
    if not weights:
        return None
    versions, cached = weights.get("versions", {}), weights.get("cache_version", {})
    return {
        "parameters": len(versions),
        "versions": _range(versions),
        "caches": len(cached),
        "cache_versions": _range(cached),
        "cache_epochs": _range(weights.get("cache_epoch", {})),
        "stale": sorted(name for name, version in cached.items() if versions.get(name) != version),
    }


def _range(numbers: dict[str, int]) -> list[int] | None:
    return [min(numbers.values()), max(numbers.values())] if numbers else None


def _chosen(config: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key in CONFIG:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[key] = value
    return found


def _sizes(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Per role and dtype: tensors, elements, bytes, slices."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for entry in checkpoint.manifest.tensors.values():
        count, elements = counts.setdefault((entry.role.value, entry.dtype), Counter()), math.prod(entry.shape)
        count.update(tensors=1, elements=elements, bytes=elements * entry.itemsize, slices=len(entry.slices))
    order = [role.value for role in Role]
    kinds = sorted(counts, key=lambda kind: (order.index(kind[0]), kind[1]))
    return [{"role": role, "dtype": dtype, **counts[role, dtype]} for role, dtype in kinds]


def _title(checkpoint: Checkpoint) -> str:
    name = checkpoint.within("config", "run").get("name")
    return f"{name + ', ' if name else ''}step {checkpoint.step:,}"


# ---- for people ------------------------------------------------------------------------------------------------------


def show(about: dict[str, Any], rows: Sequence[ScaleRow]) -> None:
    """Tables on standard output: as wide as the terminal, or :data:`WIDTH`."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console = Console(width=WIDTH, highlight=False, emoji=False, markup=False)
    for line in head(about):
        console.print(line, overflow="fold")
    console.print(_size_table(about))
    if rows:
        console.print(scale_table(rows))
        odd = Counter(re.split(r" by |:|(?<=history's) ", note)[0] for row in rows for note in row.notes)
        said = ", ".join(f"{count} × {note}" for note, count in odd.items()) or "nothing odd"
        console.print(f"{len(rows)} scales: {said}")
    else:
        console.print("no scale histories: its run had no delayed scaling")


def head(about: dict[str, Any]) -> list[str]:
    """One line for each thing that is known."""
    lines = [f"{about['path']}  (format {about['format']})"]

    def say(name: str, value: str | None) -> None:
        if value:
            lines.append(f"  {name:<10} {value}")

    tokens = about["tokens"]
    say("step", f"{about['step']:,}" + (f" after {tokens:,} tokens" if isinstance(tokens, int) else ""))
    layout = " ".join(f"{axis}={size}" for axis, size in (about["layout"] or {}).items())
    say("layout", f"{about['ranks']} rank{'s' if about['ranks'] != 1 else ''}" + (f": {layout}" if layout else ""))
    plan = about["plan"]
    if plan is not None:
        where = f"chunks on ranks {', '.join(map(str, plan['placement']))}" if len(plan["placement"]) > 1 else "one chunk"
        microbatches, fingerprint = plan["microbatches"], _short(plan["fingerprint"])
        say("plan", f"{plan['schedule']}, {microbatches} microbatches, {where}, fingerprint {fingerprint}")
    prints = about["graph_fingerprints"] or []
    say("graphs", ", ".join(_short(one) for one in prints) + (" (one per rank)" if len(prints) > 1 else "") if prints else None)
    say("digest", about.get("state_digest"))
    timeline = about["contract"]
    if timeline is not None:
        epochs = ", ".join(f"{direction} {epoch}" for direction, epoch in timeline["epochs"].items())
        say("epochs", f"{epochs}; {timeline['commits']} commits, window {timeline['window']}")
    say("weights", _weights_text(about["weights"]))
    cursor = about["cursor"]
    say("cursor", _cursor_text(cursor) if cursor else None)
    say("wandb", json.dumps(about["wandb"]) if about["wandb"] else None)
    say("branch of", about["branch"])
    groups: dict[str, list[str]] = {}
    for key, value in about["config"].items():
        section, _, rest = key.partition(".")
        groups.setdefault(section, []).append(f"{rest}={value}")
    for section, values in groups.items():
        say(section, " ".join(values))
    say("libraries", ", ".join(f"{name} {version}" for name, version in about["libraries"].items()))
    return lines


def _weights_text(weights: dict[str, Any] | None) -> str | None:
    if weights is None:
        return None

    def span(pair: list[int] | None) -> str:
        return "none" if pair is None else str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}…{pair[1]}"

    text = f"{weights['parameters']} parameters at version {span(weights['versions'])}"
    if weights["caches"]:
        versions, epochs = span(weights["cache_versions"]), span(weights["cache_epochs"])
        text += f"; {weights['caches']} FP8 caches of version {versions}, epoch {epochs}"
    if weights["stale"]:
        text += f"; STALE: {', '.join(weights['stale'])}"
    return text


def _cursor_text(cursor: dict[str, Any]) -> str:
    """The data cursor; of blends and batches, which change while a run lasts, from which sample on each holds."""
    said = [f"{key} {_short(value)}" for key, value in cursor.items() if not isinstance(value, (list, dict))]
    try:
        for blend in cursor.get("blends", ()):
            count = len(blend["sources"])
            said.append(f"{count} source{'s' if count != 1 else ''} from sample {blend['first']} on")
        said += [f"{size} samples a step from sample {first} on" for first, size in cursor.get("batches", ())]
    except (KeyError, TypeError, ValueError):  # of another program
        said += sorted(key for key, value in cursor.items() if isinstance(value, (list, dict)))
    return ", ".join(said)


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) >= 40 else text


def _size_table(about: dict[str, Any]) -> Any:
    table = _table("what", "dtype", "tensors", "elements", "bytes", "slices", left=2)
    for row in about["tensors"]:
        numbers = (f"{row['tensors']:,}", f"{row['elements']:,}", format_bytes(row["bytes"]), f"{row['slices']:,}")
        table.add_row(row["role"], row["dtype"], *numbers)
    total = sum(row["bytes"] for row in about["tensors"])
    count = sum(row["tensors"] for row in about["tensors"])
    table.add_row("all", "", f"{count:,}", "", format_bytes(total), f"in {len(about['files'])} files")
    return table


def scale_table(rows: Sequence[ScaleRow]) -> Any:
    """One line for each scale; amax are those of the history that were seen."""
    table = _table("layer", "of", "scale", "latest amax", "min", "median", "max", "headroom", "zeros", "notes", left=2)
    table.columns[-1].justify = "left"
    before = None
    for row in rows:
        seen = row.seen
        numbers = (row.latest, min(seen, default=None), row.middle, max(seen, default=None))
        headroom = "" if row.headroom is None else f"{row.headroom:.2f} bits"
        zeros = f"{row.zeros}/{len(row.history)}"
        layer, before = "" if row.layer == before else row.layer, row.layer
        table.add_row(layer, row.kind, _number(row.scale), *map(_number, numbers), headroom, zeros, "; ".join(row.notes))
    return table


def _table(*columns: str, left: int) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.inspect",
        description="Show what is in a checkpoint: step, layout, plan, epochs, versions, sizes, FP8 scales, histories. "
        "Exit code 0: shown, 1: damaged, 2: no checkpoint.",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a step_… folder, the folder above it, or a run's folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, histories included")
    parser.add_argument("--digest", action="store_true", help="also the digest of the logical state, the same in every layout")
    parser.add_argument("--layer", metavar="GLOB", default="*", help="only scales of these layers, such as 'layers.3.*'")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the histories: .png, .svg, .pdf (needs matplotlib)")
    add_traceback(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The hidden-state register as a table: what a dataflow graph does not see, who owns it, and which rules it follows.

``docs/contract.md`` prints it (a test compares). At run time the tensors behind it are those of
:class:`qeffect_lm.graphs.register.HiddenStateRegister`; their owners are the ones named here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HiddenState:
    """One item: its owner (as registered), what its version is, and its capture and checkpoint rules."""

    item: str
    owner: str
    version: str
    capture: str
    checkpoint: str


HIDDEN_STATE: tuple[HiddenState, ...] = (
    HiddenState(
        "masters, compute-dtype parameters",
        "flat",
        "integer per parameter",
        "fixed storage, loads in place",
        "saved",
    ),
    HiddenState(
        "main gradients",
        "flat",
        "writers per step",
        "fixed storage, beta baked",
        "not saved: beta 0 starts a step",
    ),
    HiddenState(
        "copies of tied weights on another rank",
        "flat",
        "of the parameter",
        "fixed storage, received after STEP",
        "compared, loaded as the parameter",
    ),
    HiddenState("Adam moments, step counter", "flat, optimizer", "optimizer step", "fixed storage", "saved"),
    HiddenState("scales, amax histories", "timeline", "epoch", "fixed storage, rolled by COMMIT only", "saved"),
    HiddenState("open amax slots", "timeline", "window", "max-merged in place", "saved"),
    HiddenState(
        "cached FP8 weights",
        "cache",
        "(version, epoch)",
        "fixed storage, one refresh per step",
        "saved, rebuilt, compared",
    ),
    HiddenState(
        "learning rate, clip factor, skip flag",
        "optimizer, step_end",
        "optimizer step",
        "device tensors",
        "follow from the step",
    ),
    HiddenState(
        "running statistics of loss and norm",
        "step_end",
        "optimizer step",
        "device tensors, written in place",
        "saved; begun anew where the checkpoint has none",
    ),
    HiddenState("loss divisor", "engine", "step", "device tensor, written before F", "not saved: data"),
    HiddenState(
        "microbatch inputs, keys, targets, document starts",
        "stage",
        "slot generation",
        "written into the slot, never replaced",
        "not saved: data",
    ),
    HiddenState(
        "retained operands of I and W",
        "graphs' pools",
        "slot generation",
        "one pool per slot pair",
        "not saved: none is left",
    ),
    HiddenState(
        "operands of W side by side (pipeline.coalesce_w)",
        "stage",
        "slot generation",
        "fixed storage, made before any capture; a place for each W-slot",
        "not saved: none is left",
    ),
    HiddenState(
        "Transformer Engine's workspace, sequence offsets, evaluation's amax",
        "transformer_engine",
        "constant",
        "made before any capture, declared by each of its operations",
        "not saved: scratch",
    ),
    HiddenState(
        "router sums: losses, tokens of each expert",
        "step_end",
        "writers per step",
        "fixed storage, beta baked",
        "not saved: beta 0 starts a step",
    ),
    HiddenState(
        "addresses of experts' weights, caches and gradients",
        "layers",
        "constant",
        "made before any capture; what they point to stays",
        "not saved: follow from the storages",
    ),
    HiddenState("RoPE tables", "layers", "constant", "fixed storage", "not saved: from the config"),
    HiddenState("random generators", "process", "position", "drawing is a CaptureError", "saved, restored last"),
    HiddenState(
        "dropout keys",
        "stage",
        "(seed, step, microbatch's place over all replicas)",
        "device tensor, mask from its value",
        "follow from the step",
    ),
    HiddenState("data order", "loader", "sample number", "outside graphs", "one number saved"),
    HiddenState("plan and graphs", "engine", "fingerprint", "captured again on start", "fingerprint saved, compared"),
    HiddenState(
        "Python scalars and branches",
        "none",
        "frozen at capture",
        "part of the graph's digest",
        "fingerprint compared",
    ),
    HiddenState("kernel choice, thread count", "process", "config", "fixed before torch is imported", "config compared"),
    HiddenState(
        "process groups, order of operations",
        "mesh, transport",
        "plan",
        "outside graphs (scope action)",
        "plan saved",
    ),
)

COLUMNS = ("item", "owner", "version", "capture", "checkpoint")


def markdown_table() -> str:
    """The table for the docs."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows += ["| " + " | ".join(getattr(state, column) for column in COLUMNS) + " |" for state in HIDDEN_STATE]
    return "\n".join(rows)


def owners() -> set[str]:
    """All owners named in the table."""
    return {owner.strip() for state in HIDDEN_STATE for owner in state.owner.split(",")}

"""What a captured graph does to contract state, recorded once and applied at each replay."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from qeffect_lm.contract.leases import Joint
from qeffect_lm.contract.timeline import Direction


@dataclass(frozen=True)
class Summary:
    """What a graph does to contract state, relative to its microbatch; recorded at capture, applied at replay."""

    kind: str
    scales: frozenset[Direction] = frozenset()
    roles: tuple[str, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()
    layers: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    beta: int | None = None
    empty: tuple[str, ...] = ()  # those of roles that had no work
    joint: Joint | None = None  # where W of several microbatches is one product
    idle: tuple[str, ...] = ()  # main gradients that a later W writes for this one too
    joined: tuple[str, ...] = ()  # main gradients that the product of several is written to
    collectives: tuple[str, ...] = ()  # exchanges with tensor-parallel peers, in order


@dataclass(frozen=True)
class BodySummary:
    """What F, I, W and the commits between them do together, of all microbatches of a step: a graph of them all.

    Attributes:
        weights: (parameter, layout) of every cached weight that is read.
        grads: main gradient → its number of writers.
        idle: main gradient → how often a W left it to a later one.
        contributors: direction → who reports an amax.
        commits: direction → commits between the actions (window ``microbatch``).
    """

    weights: tuple[tuple[str, str], ...]
    grads: Mapping[str, int]
    contributors: Mapping[Direction, tuple[Hashable, ...]]
    commits: Mapping[Direction, int]
    idle: Mapping[str, int] = field(default_factory=dict)

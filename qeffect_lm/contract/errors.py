"""Contract violations: one name per kind of illegal action.

Every violation says *what* (the action and the resource), *where* (layer, microbatch, chunk, stream) and *since when*
(the generations, versions or epochs that disagree). The place is also machine-readable in :attr:`ContractViolation.place`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from qeffect_lm.errors import QEffectError


class ContractViolation(QEffectError):
    """The first illegal action on contract state. ``place`` holds layer, microbatch, versions, ... by name."""

    traced = False  # whether a trace has it already

    def __init__(self, message: str, **place: object) -> None:
        self.message = message
        self.place = {key: value for key, value in place.items() if value is not None}
        where = ", ".join(f"{key}={value}" for key, value in self.place.items())
        super().__init__(f"{message} [{where}]" if where else message)


class ScaleOrderError(ContractViolation):
    """I1: a scale read, an amax report or a commit out of its order of time."""


class LeaseError(ContractViolation):
    """I2: a retained backward resource used out of its life cycle."""


class WeightGradBeforeInputGradError(LeaseError):
    """W of a microbatch before its I."""


class WeightGradTwiceError(LeaseError):
    """W of a microbatch run, or its handle consumed, a second time."""


class InputGradTwiceError(LeaseError):
    """I of a microbatch run a second time (after its W included)."""


class NotForwardedError(LeaseError):
    """I or W of a microbatch that was never forwarded."""


class LeaseRetainedError(LeaseError):
    """A slot or lease claimed while another microbatch still holds it."""


class LeaseLeakError(LeaseError):
    """A lease left at the end of the step."""


class StaleHandleError(LeaseError):
    """A read through a handle of an older generation than the slot's."""


class StaleWeightError(ContractViolation):
    """I3: a cached weight whose version or epoch is not the one its reader needs."""


class AccessSite(NamedTuple):
    """One access: the work that made it, ``read``, ``write`` or ``max_merge``, its stream, and bytes [lo, hi) of a buffer."""

    who: str
    access: str
    stream: str
    buffer: Hashable
    lo: int
    hi: int


class StreamOrderError(ContractViolation):
    """I4: an access (``later``) that no recorded edge orders after the last conflicting one (``earlier``)."""

    def __init__(
        self, message: str, *, earlier: AccessSite | None = None, later: AccessSite | None = None, **place: object
    ) -> None:
        super().__init__(message, **place)
        self.earlier, self.later = earlier, later


class GradSlotError(ContractViolation):
    """A main-gradient slot written too often, too rarely, or with the wrong beta."""


class CollectiveError(ContractViolation):
    """An exchange of F or I with its peers left out, in another order than before, or not the peers'."""


class PlanError(ContractViolation):
    """A plan that breaks a rule; names rank, position, action and reason."""


class CaptureError(ContractViolation):
    """A capture that would freeze something the register does not know, or a replay over moved storages."""


class ResumeError(ContractViolation):
    """A checkpoint that does not give back the state the run needs."""

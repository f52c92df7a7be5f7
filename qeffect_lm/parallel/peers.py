"""Losing a peer: one error that names who and during what, for every collective and transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qeffect_lm.errors import QEffectError


class PeerLostError(QEffectError):
    """A peer died or did not answer within the time-out."""


@contextmanager
def naming(peers: Sequence[int], what: str, timeout: float | None = None) -> Iterator[None]:
    """Turn the communication library's failure into a :class:`PeerLostError` that names the peers' ranks and the work."""
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL have no class of their own for it
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {', '.join(map(str, peers))}"
        limit = "" if timeout is None else f" within {timeout:g} s (launch.timeout_seconds)"
        raise PeerLostError(
            f"{who} was lost during {what}: it died or did not answer{limit}. All ranks end; start again to resume from the "
            f"last checkpoint ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.split(". This is typically")[0][-160:]

"""What several GPU tests ask of captures."""

from __future__ import annotations

import torch

from qeffect_lm.app.assemble import Assembly


def assert_same_captures(assembly: Assembly, times: int = 5) -> None:
    """So many captures in a row: one fingerprint, and from the second on no memory grows."""
    prints, held = set(), []
    for _ in range(times):
        assembly.capture()
        prints.add(assembly.graph_fingerprint())
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert len(prints) == 1
    assert max(held[2:]) <= held[1]

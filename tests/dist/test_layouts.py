"""``tools.parity --parallel``: every product of tp, pp, dp, ep and cp in twos that fits four processes, by ``train.py``."""

from __future__ import annotations

import math

import pytest

from qeffect_lm.parallel.mesh import AXES
from tests.dist.test_tools import tool
from tools.proofs.layouts import LAYOUTS, PROCESSES, chosen


def test_no_product_is_left_out() -> None:
    """Five axes alone and ten pairs of them; with experts wherever ep is."""
    found = {tuple(dict(layout.sizes).get(axis, 1) for axis in AXES) for layout in LAYOUTS if not layout.note}
    assert len(found) == 15 and all(1 < math.prod(sizes) <= PROCESSES for sizes in found)
    assert all(any("num_experts" in key for key in layout.model) for layout in LAYOUTS if "ep" in dict(layout.sizes))


def test_axes_in_any_order() -> None:
    assert chosen(["tp 2 x pp 2"]) == chosen(["pp 2 x tp 2"]) != chosen(["tp 2"])


@pytest.mark.long
@pytest.mark.parametrize("layout", [layout.name for layout in LAYOUTS])
def test_the_table_of_layouts(layout: str) -> None:
    """Losses near one process's; killed equals whole, captured equals eager, checkpoints there and back."""
    done = tool("parity", "--parallel", "--layout", layout, timeout=1500)
    assert done.returncode == 0 and "1 layouts within the bounds" in done.stdout, done.stdout + done.stderr

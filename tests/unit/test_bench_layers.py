"""What the benchmark of layers computes without a GPU."""

from __future__ import annotations

import pytest

from tools.benchmarks.layers import union_of_last


def test_busy_time_is_the_union_of_the_last_rounds_intervals():
    """Rounds of two kernels, the first slow; overlapping kernels count once, gaps do not."""
    spans = [(0.0, 9.0), (9.0, 20.0), (30.0, 33.0), (32.0, 35.0), (40.0, 41.0), (45.0, 47.0)]
    assert union_of_last(spans, 3, 1) == pytest.approx(3.0)
    assert union_of_last(spans, 3, 2) == pytest.approx(8.0)
    assert union_of_last(list(reversed(spans)), 3, 3) == pytest.approx(28.0)

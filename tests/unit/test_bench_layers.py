"""What the benchmark of layers computes without a GPU."""

from __future__ import annotations

import pytest
import torch

from qeffect_lm.graphs.host_replay import HostReplay
from tools.benchmarks import layers
from tools.benchmarks.layers import union_of_last


def test_busy_time_is_the_union_of_the_last_rounds_intervals():
    """Rounds of two kernels, the first slow; overlapping kernels count once, gaps do not."""
    spans = [(0.0, 9.0), (9.0, 20.0), (30.0, 33.0), (32.0, 35.0), (40.0, 41.0), (45.0, 47.0)]
    assert union_of_last(spans, 3, 1) == pytest.approx(3.0)
    assert union_of_last(spans, 3, 2) == pytest.approx(8.0)
    assert union_of_last(list(reversed(spans)), 3, 3) == pytest.approx(28.0)


def test_a_round_is_the_same_eager_from_graphs_and_from_one():
    """Gradients of the middle chunk have the same bits each time, made anew."""
    size = layers.Size(64, 16, layers=1, device="cpu")
    assembly = layers.assembled(size, "native")
    assembly.prepare(layers.batch(size))
    layers.fill(assembly)
    stage = assembly.engine.stages[layers.CHUNK]
    gradients = {name: stage._main_grads[name] for name in stage.gradients}

    def results(once: layers.Round) -> list[torch.Tensor]:
        for gradient in gradients.values():
            gradient.fill_(float("nan"))
        once()
        return [gradient.clone() for gradient in gradients.values()]

    want = results(layers.round_of(assembly, commit=False))
    assembly.config = size.config("native", "host_replay")
    assembly.capture()
    layers.fill(assembly)
    from_graphs = results(layers.round_of(assembly, commit=False))
    assembly.release()
    graph = layers.one_graph(assembly, HostReplay(), commit=False)
    layers.fill(assembly)
    from_one = results(layers.replaying(assembly, graph))
    for a, b, c in zip(want, from_graphs, from_one, strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b) and torch.equal(a, c)

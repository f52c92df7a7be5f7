"""A hand-written loop over graphed callables: what goes wrong silently there is refused here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qeffect_lm.contract.errors import LeaseError, LeaseLeakError, StaleWeightError, StreamOrderError
from qeffect_lm.errors import UsageError
from qeffect_lm.integrations.graphed import guard_callables


class Static(torch.autograd.Function):
    """As a captured graph computes: through buffers that every call uses again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Graphed) -> torch.Tensor:
        ctx.layer = layer
        layer.static.copy_(x)
        return layer.static @ layer.cast.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        return dy @ ctx.layer.cast, dy.t() @ ctx.layer.static, None


class Graphed(nn.Module):
    """A linear with the flaws that a graphed FP8 linear has: one static input, a cast that is made when it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.static, self.cast = torch.zeros(3, 4), torch.zeros(4, 4)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        if is_first_microbatch is not False:
            self.cast = self.weight.detach().clone()
        made: torch.Tensor = Static.apply(x, self.weight, self)
        return made


def made(**options: Any) -> tuple[Any, Any, Graphed]:
    layer = Graphed()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    (guarded,), contract = guard_callables((layer,), optimizer, **options)
    return guarded, contract, layer


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("grad", [False, True])
def test_a_right_loop_runs_and_computes_what_it_did(grad):
    results = []
    for guarded in (False, True):
        layer = Graphed()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        (call,), contract = guard_callables((layer,), optimizer)
        for step in range(3):
            optimizer.zero_grad()
            if not guarded:
                for m in range(2):
                    layer(batch(m).requires_grad_(grad), is_first_microbatch=m == 0).square().sum().backward()
                optimizer.step()
                continue
            with contract.step():
                for m in range(2):
                    call(batch(m).requires_grad_(grad), is_first_microbatch=m == 0).square().sum().backward()
                contract.optimizer_step()
            with torch.no_grad():
                call(batch(9), is_first_microbatch=True)
            assert contract.guard.timeline.commits == step + 1
        results.append(layer.weight.detach().clone())
    assert torch.equal(*results) and call.weight is layer.weight


def test_two_forwards_before_a_backward():
    """Unguarded the first backward takes the second batch: a wrong gradient, silently."""
    guarded, contract, layer = made()
    first = layer(batch(0))
    layer(batch(1))
    first.sum().backward()
    alone = Graphed()
    alone(batch(0)).sum().backward()
    assert not torch.equal(layer.weight.grad, alone.weight.grad)
    with pytest.raises(LeaseError, match="is claimed while"), contract.step():
        guarded(batch(0))
        guarded(batch(1))
    with contract.step():  # abandoned: the next step is clean
        guarded(batch(0)).sum().backward()
        contract.optimizer_step()


def test_a_cast_of_old_weights():
    guarded, contract, layer = made()
    with pytest.raises(StaleWeightError, match="is_first_microbatch=False and its weights were never"):
        guarded(batch(0), is_first_microbatch=False)
    with contract.step():
        guarded(batch(0), is_first_microbatch=True).sum().backward()
        guarded(batch(1), is_first_microbatch=False).sum().backward()
        contract.optimizer_step()
    with pytest.raises(StaleWeightError, match="were written since they were cast"), contract.step():
        guarded(batch(0), is_first_microbatch=False)


def test_a_microbatch_without_its_backward():
    guarded, contract, _ = made()
    with pytest.raises(LeaseLeakError, match="while call 0 of callable 0 has had no backward"), contract.step():
        guarded(batch(0))
        contract.optimizer_step()
    with pytest.raises(UsageError, match="optimizer_step"), contract.step():
        guarded(batch(0)).sum().backward()


def test_a_batch_nobody_waited_for():
    guarded, contract, _ = made(streams=("compute", "copy"))
    x = batch(0)
    with contract.step():
        for m in range(2):
            with contract.work("copy", "batch", writes=[x]):
                x.copy_(batch(m))
            contract.edge("copy", "compute")
            guarded(x).sum().backward()
            contract.edge("compute", "copy")
        contract.optimizer_step()
    with pytest.raises(StreamOrderError, match="callable 0 .* is not ordered after batch"), contract.step():
        with contract.work("copy", "batch", writes=[x]):
            x.copy_(batch(2))
        guarded(x)


def test_what_is_refused_and_what_off_means():
    with pytest.raises(UsageError, match="stream 'main' is not among the streams 'compute'"):
        made(stream="main")
    with pytest.raises(UsageError, match="callable 0 is a function, no module"):
        guard_callables((lambda x: x,), torch.optim.SGD([torch.zeros(1)], 0.1))
    guarded, contract, _ = made(contract="off")
    with contract.step():
        guarded(batch(0), is_first_microbatch=False)
        guarded(batch(1)).sum().backward()

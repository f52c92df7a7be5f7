"""The guarded loop over real graphs: torch's make_graphed_callables, and Transformer Engine's where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from qeffect_lm.contract.errors import LeaseError, StaleWeightError, StreamOrderError
from qeffect_lm.integrations.graphed import guard_callables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
WIDTH, TOKENS = 64, 32


def batch(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def train(call: Any, optimizer: Any, first: Any, steps: int = 3) -> list[float]:
    """Two microbatches a step, batches copied in on a stream of their own, edges by hand."""
    compute, copy = torch.cuda.current_stream(), torch.cuda.Stream()
    x, losses = torch.zeros(TOKENS, WIDTH, device="cuda", requires_grad=True), []
    for step in range(steps):
        optimizer.zero_grad()
        for m in range(2):
            source = batch(10 * step + m)
            torch.cuda.synchronize()
            with torch.cuda.stream(copy), torch.no_grad():
                copy.wait_stream(compute)
                x.copy_(source)
            compute.wait_stream(copy)
            loss = call(x, **first(m)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def guarded_train(call: Any, optimizer: Any, first: Any, steps: int = 3) -> list[float]:
    copy, losses = torch.cuda.Stream(), []
    (guarded,), contract = guard_callables(
        (call,), optimizer, streams={"compute": torch.cuda.current_stream(), "copy": copy}
    )
    x = torch.zeros(TOKENS, WIDTH, device="cuda", requires_grad=True)
    for step in range(steps):
        optimizer.zero_grad()
        with contract.step():
            for m in range(2):
                source = batch(10 * step + m)
                torch.cuda.synchronize()
                with contract.work("copy", "batch", writes=[x]), torch.no_grad():
                    x.copy_(source)
                contract.edge("copy", "compute")
                loss = guarded(x, **first(m)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
                contract.edge("compute", "copy")
            contract.optimizer_step()
    with pytest.raises(LeaseError, match="is claimed while"), contract.step():
        guarded(x, **first(0))
        guarded(x, **first(1))
    with pytest.raises(StreamOrderError), contract.step():
        with contract.work("copy", "batch", writes=[x]), torch.no_grad():
            x.copy_(source)
        guarded(x, **first(0))
    if first(1):
        with contract.step():
            guarded(x, **first(0)).float().square().mean().backward()
            contract.optimizer_step()
        with pytest.raises(StaleWeightError), contract.step():
            guarded(x, **first(1))
    return losses


def plain() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sample = torch.zeros(TOKENS, WIDTH, device="cuda", requires_grad=True)
    return torch.cuda.make_graphed_callables(model, (sample,)), optimizer, lambda m: {}


def test_torchs_graphs() -> None:
    assert guarded_train(*plain()) == train(*plain())


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
def test_transformer_engines_graphs() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    recipe = DelayedScaling(amax_history_len=4)

    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sample = torch.zeros(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        graphed = te.make_graphed_callables(model, (sample,), fp8_enabled=True, fp8_recipe=recipe, fp8_weight_caching=True)

        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = graphed

            def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
                with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                    out: torch.Tensor = self.inner(x.bfloat16(), **kwargs)
                return out

        return Cast(), optimizer, lambda m: {"is_first_microbatch": m == 0}

    want = train(*made())
    assert guarded_train(*made()) == want and len(set(want)) == 6

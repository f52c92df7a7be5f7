"""AdamW by torch's kernel and by FusedAdam classes: against our own, the skip, capture, resume, messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.errors import UsageError
from qeffect_lm.optim import apex_adam, te_adam
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.build import make_optimizer
from qeffect_lm.optim.fused_adam import FusedAdamW
from qeffect_lm.optim.muon import Muon
from tests.tiny import differing
from tests.unit.optim_support import (
    SCHEDULE,
    SETTINGS,
    SHAPES,
    assert_capture_equals_eager,
    assert_resumes,
    assert_skip_keeps_every_byte,
    make_flat,
    run,
    state,
)


class FusedAdam(torch.optim.Optimizer):
    """The interface that Transformer Engine and apex document, in torch operations: counts up by what the last step found,
    unscales gradients, leaves a step alone where the scaler found an infinity."""

    def __init__(self, params: Any, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, capturable=False, **more: Any) -> None:  # fmt: skip
        assert capturable and adam_w_mode and bias_correction
        defaults = {"lr": torch.tensor(lr), "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)
        self._scales: dict[Any, Any] = {}
        self.more = more

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        assert not torch.is_grad_enabled()
        for group in self.param_groups:
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            (p,) = group["params"]
            self._dummy_overflow_buf.copy_(grad_scaler._check_inf_per_device(self)[p.device])
            inverse = grad_scaler._get_scale_async().double().reciprocal().float()
            m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
            beta1, beta2 = group["betas"]
            go = self._dummy_overflow_buf[0] != 1
            g = p.grad * inverse
            new_m, new_v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            bias1, bias2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            update = (new_m / bias1) / ((new_v / bias2).sqrt() + group["eps"]) + group["weight_decay"] * p
            for old, new in ((m, new_m), (v, new_v), (p.data, p - group["lr"] * update)):
                old.copy_(torch.where(go, new.to(old.dtype), old))


def made_by(kind: str, moments: torch.dtype | None = None, with_muon: bool = False, **change: Any) -> Optimizer:
    flat = make_flat(param_dtype=torch.bfloat16, moment_dtype=moments)
    muon = Muon(flat, {"down": ((1, 0, 8),)}, momentum=0.9) if with_muon else None
    settings = {**SETTINGS, "schedule": SCHEDULE, "muon": muon, **change}
    if kind == "fused":
        narrow = {"exp_avg_dtype": torch.bfloat16}
        return FusedAdamW(flat, fused=FusedAdam, name="a library", narrow=narrow, **settings)
    return make_optimizer(kind, flat, **settings)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("with_muon", [False, True])
@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_equals_native(kind: str, clip: float | None, decay: float, with_muon: bool) -> None:
    """20 steps with skips: moments and masters within 20 roundings of float32 (values about 1, moments relative to their
    largest), since operations come in another order; what Muon updates has the same bits."""
    mine, native = (made_by(k, with_muon=with_muon, clip_norm=clip, weight_decay=decay) for k in (kind, "native"))
    for optimizer in (mine, native):
        run(optimizer, range(20))
    assert torch.equal(mine.step, native.step) and int(mine.step) == 15 and torch.equal(mine.lr, native.lr)
    for name in SHAPES:
        for one, other in ((mine.flat.master, native.flat.master), (mine.flat.moment1, native.flat.moment1),
                           (mine.flat.moment2, native.flat.moment2)):  # fmt: skip
            bound = 20 * 2**-23 * max(float(other(name).abs().max()), 1e-20)
            assert float((one(name) - other(name)).abs().max()) <= bound, name
        assert torch.equal(mine.flat.param(name), mine.flat.master(name).to(torch.bfloat16))
    assert not with_muon or torch.equal(mine.flat.master("down"), native.flat.master("down"))
    assert [item.name for item in mine.logical_tensors()] == ["optimizer/step"], "the state is the same, whichever ran"


@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_the_same_bits_every_time_skip_and_resume(kind: str) -> None:
    def make() -> Optimizer:
        return made_by(kind)

    one, two = make(), make()
    for optimizer in (one, two):
        run(optimizer, range(8))
    assert differing(state(one), state(two)) == []
    assert_skip_keeps_every_byte(make())
    assert_resumes(make)


def test_torch_s_is_captured() -> None:
    """The learning rate, the count and the flag are tensors: live in a replay."""
    assert_capture_equals_eager(lambda: made_by("torch"))
    assert_capture_equals_eager(lambda: made_by("torch", clip_norm=None))


def test_a_capture_hears_of_kernels_that_the_dispatcher_does_not_see() -> None:
    with pytest.raises(CaptureError, match="a library FusedAdam"):
        assert_capture_equals_eager(lambda: made_by("fused"))


def test_a_checkpoint_of_one_backend_goes_on_with_another() -> None:
    """State is in the flat buffers under the same names: native, then torch, then native, against native throughout."""
    through, saved = made_by("native"), {}
    run(through, range(9))
    for kind, steps in (("native", range(3)), ("torch", range(3, 6)), ("native", range(6, 9))):
        optimizer = made_by(kind)
        for item in [*optimizer.flat.logical_tensors(), *optimizer.logical_tensors()]:
            item.tensor.copy_(saved.get(item.name, item.tensor))
        run(optimizer, steps)
        saved = state(optimizer)
    assert set(saved) == set(state(through)) and int(saved["optimizer/step"]) == 7
    for name in SHAPES:
        torch.testing.assert_close(saved[f"master/{name}"], through.flat.master(name), rtol=0, atol=1e-5)


def test_narrow_moments_of_a_fused_adam() -> None:
    """Views of the bfloat16 buffers are the class's state; its extra arguments are passed."""
    optimizer = made_by("fused", moments=torch.bfloat16)
    assert isinstance(optimizer, FusedAdamW) and optimizer._fused.more == {"exp_avg_dtype": torch.bfloat16}
    assert all(len(scales) == 2 for scales in optimizer._fused._scales.values()) and len(optimizer._fused._scales) == 2
    run(optimizer, range(3))
    assert optimizer.flat.moment1("qkv").dtype is torch.bfloat16 and optimizer.flat.moment1("qkv").any()


def test_dtypes_that_a_backend_does_not_take() -> None:
    with pytest.raises(UsageError, match="optim.moments=float32, or set optim.backend=native"):
        made_by("torch", moments=torch.bfloat16)
    with pytest.raises(UsageError, match="optim.moments=float32"):
        FusedAdamW(make_flat(moment_dtype=torch.bfloat16), fused=FusedAdam, name="apex", **SETTINGS, schedule=SCHEDULE)
    with pytest.raises(UsageError, match="float32 masters"):
        FusedAdamW(make_flat(torch.float64), fused=FusedAdam, name="apex", **SETTINGS, schedule=SCHEDULE)


def test_a_class_of_another_interface_is_refused() -> None:
    class Other(FusedAdam):
        def __init__(self, params: Any, lr: float) -> None:
            pass

    with pytest.raises(UsageError, match="this apex has a FusedAdam of another interface .*optim.backend=native"):
        FusedAdamW(make_flat(), fused=Other, name="apex", **SETTINGS, schedule=SCHEDULE)


def nvidia(site: Path) -> None:
    (site / "apex/optimizers").mkdir(parents=True)
    (site / "apex/__init__.py").write_text("")
    (site / "apex/optimizers/fused_adam.py").write_text("")


def with_extension(site: Path) -> None:
    nvidia(site)
    (site / "amp_C.py").write_text("multi_tensor_adam")


def unrelated(site: Path) -> None:
    (site / "apex").mkdir()
    (site / "apex/__init__.py").write_text("raise SystemExit('imported')")
    (site / "apex-0.9.10.dist-info").mkdir()
    (site / "apex-0.9.10.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    (site / "apex-0.9.10.dist-info/RECORD").write_text("apex/__init__.py,,\n")


@pytest.mark.parametrize(
    ("install", "message"),
    [
        (lambda site: None, "NVIDIA's apex, which is not installed"),
        (nvidia, "without its CUDA extension amp_C"),
        (unrelated, r"distribution apex 0.9.10\) is not NVIDIA's apex"),
        (with_extension, "optim.backend=apex needs a GPU"),
    ],
)
def test_apex_is_recognised_by_its_files(tmp_path: Path, install: Callable[[Path], None], message: str) -> None:
    """Absent, half built, another package of that name (named with its owner, never imported), and a CPU."""
    install(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        apex_adam.make(make_flat(), search_path=[str(tmp_path)], **SETTINGS, schedule=SCHEDULE)
    assert "optim.backend=native" in str(caught.value) and "apex" not in sys.modules


def test_transformer_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU; and, as if on one, absent and without the class."""
    flat = make_flat()
    with pytest.raises(UsageError, match="optim.backend=te needs a GPU"):
        te_adam.make(flat, **SETTINGS, schedule=SCHEDULE)
    monkeypatch.setattr(flat, "device", SimpleNamespace(type="cuda"))
    for module in ({}, {"transformer_engine.pytorch.optimizers": ModuleType("no FusedAdam in here")}):
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            monkeypatch.setitem(sys.modules, name, None if not module else ModuleType(name))  # type: ignore[arg-type]
        for name, value in module.items():
            monkeypatch.setitem(sys.modules, name, value)
        with pytest.raises(UsageError, match="needs Transformer Engine's FusedAdam.*optim.backend=native"):
            te_adam.make(flat, **SETTINGS, schedule=SCHEDULE)

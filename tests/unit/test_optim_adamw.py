"""AdamW on flat buffers: against torch, the skip, position independence, and that it can be taped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.adamw import AdamW
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.state import Role

SHAPES = {"a": (33, 7), "b": (129,), "c": (5, 5, 5), "d": (1,)}
DECAY = {"a", "c"}
FINITE = torch.tensor(1, dtype=torch.uint8)
NOT_FINITE = torch.tensor(0, dtype=torch.uint8)


def _flat(dtype: torch.dtype = torch.float64, seed: int = 0, **kwargs: Any) -> FlatBuffers:
    specs = [ParamSpec(name, shape, name in DECAY) for name, shape in SHAPES.items()]
    kwargs = {"master_dtype": dtype, "param_dtype": dtype, "grad_dtype": dtype, **kwargs}
    flat = FlatBuffers(specs, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in SHAPES.items():
        flat.master(name).copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
    flat.gather()
    return flat


def _adamw(flat: FlatBuffers, **change: Any) -> AdamW:
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
    settings |= {"schedule": Schedule(1e-2, 30, "cosine", 5), "chunk": 50}
    return AdamW(flat, **(settings | change))


def _gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    scale = 10.0 ** (step % 5 - 2)  # norms on both sides of the clip limit
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _load(flat: FlatBuffers, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    for name, grad in gradients.items():
        flat.grad(name).copy_(grad)
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in gradients.values()]))


def _bytes(flat: FlatBuffers, adamw: AdamW) -> dict[str, bytes]:
    tensors = {item.name: item.tensor for item in [*flat.logical_tensors(), *adamw.logical_tensors()]}
    return {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 5e-15), (torch.float32, 5e-6)])
def test_equals_torch_adamw(dtype: torch.dtype, bound: float, clip: float | None) -> None:
    """40 steps against torch.optim.AdamW in float64, clip_grad_norm_ and the schedule.

    At most ``bound`` apart, values being about 1: some 20 units of float64, or 40 roundings of float32.
    """
    flat = _flat(dtype)
    adamw = _adamw(flat, clip_norm=clip)
    reference = {name: torch.nn.Parameter(flat.master(name).double().clone()) for name in SHAPES}
    groups = [
        {"params": [reference[name] for name in SHAPES if name in DECAY], "weight_decay": 0.1},
        {"params": [reference[name] for name in SHAPES if name not in DECAY], "weight_decay": 0.0},
    ]
    torch_adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    schedule = Schedule(1e-2, 30, "cosine", 5)
    clipped, worst = 0, 0.0
    for step in range(40):
        gradients = _gradients(step)
        for name, grad in gradients.items():
            reference[name].grad = grad.double()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(reference.values(), clip)
            clipped += int(norm > clip)
        for group in torch_adamw.param_groups:
            group["lr"] = schedule.closed_form(step)
        torch_adamw.step()
        adamw.step_(_load(flat, gradients), FINITE)
        assert adamw.lr.item() == schedule.closed_form(step)
        for name in SHAPES:
            worst = max(worst, (flat.master(name).double() - reference[name]).abs().max().item())
    assert worst <= bound
    assert adamw.step.item() == 40
    assert clip is None or 5 < clipped < 35
    start = _flat(dtype)
    assert all((flat.master(name) - start.master(name)).abs().max() > 1e-3 for name in SHAPES)


@pytest.mark.parametrize("flag_dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_skip_leaves_every_byte(flag_dtype: torch.dtype, bad: float) -> None:
    """S8: on a skip masters, moments, params and counter keep their bytes, whatever the gradients hold.

    Negative zeros and denormal numbers are among them. The next good step equals one with no skip before it.
    """
    states = []
    for with_skip in (False, True):
        flat = _flat(torch.float32, param_dtype=torch.bfloat16)
        adamw = _adamw(flat)
        adamw.step_(_load(flat, _gradients(0)), FINITE)
        flat.master("b")[:2] = torch.tensor([-0.0, 1e-42])
        flat.moment1("a")[0, :2] = torch.tensor([-0.0, -1e-42])
        flat.moment2("a")[0, 0] = 1e-42
        flat.gather()
        if with_skip:
            before = _bytes(flat, adamw)
            norm = _load(flat, {name: torch.full(shape, bad) for name, shape in SHAPES.items()})
            adamw.step_(norm, torch.zeros((), dtype=flag_dtype))
            assert _bytes(flat, adamw) == before
            assert adamw.skipped.item() is True and adamw.step.item() == 1
            lr = adamw.lr.item()
        norm = _load(flat, _gradients(1))
        before = _bytes(flat, adamw)
        adamw.step_(norm, torch.ones((), dtype=flag_dtype))
        assert adamw.skipped.item() is False and adamw.step.item() == 2
        after = _bytes(flat, adamw)
        moved = [name for name in before if not name.startswith("param/")] + ["param/a"]
        assert all(after[name] != before[name] for name in moved), "a good step moves everything"
        states.append(after)
        assert not with_skip or adamw.lr.item() == lr == Schedule(1e-2, 30, "cosine", 5).closed_form(1)
    assert states[0] == states[1]


def test_decay_segments() -> None:
    """With zero gradients only the decayed parameters shrink, by exactly 1 - lr * decay."""
    flat = _flat()
    adamw = _adamw(flat, schedule=Schedule(1e-2, 10, "linear", 0), weight_decay=0.5)
    before = {name: flat.master(name).clone() for name in SHAPES}
    adamw.step_(_load(flat, {name: torch.zeros(shape) for name, shape in SHAPES.items()}), FINITE)
    for name in SHAPES:
        factor = 1 - 1e-2 * 0.5 if name in DECAY else 1.0
        assert torch.equal(flat.master(name), before[name] * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_position_does_not_matter(dtype: torch.dtype) -> None:
    """One parameter at many offsets, chunkings and vector alignments: bitwise the same trajectory."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(1003, generator=generator, dtype=torch.float64).to(dtype)
    results = set()
    for before in (0, 1, 65, 1000, 3001):
        for chunk in (37, 64, 1001, 1 << 16):
            specs = [
                ParamSpec("x", (before,), True),
                ParamSpec("w", (1003,), True),
                ParamSpec("y", (11,), True),
            ]
            flat = FlatBuffers(specs, master_dtype=dtype, param_dtype=dtype, grad_dtype=dtype)
            flat.master("w").copy_(values)
            adamw = _adamw(flat, chunk=chunk)
            for step in range(3):
                flat.grad("w").copy_(torch.randn(1003, generator=torch.Generator().manual_seed(step)))
                adamw.step_(torch.tensor(2.5, dtype=torch.float64), FINITE)
            results.add(flat.master("w").numpy().tobytes() + flat.moment2("w").numpy().tobytes())
    assert len(results) == 1


def test_padding_stays_zero() -> None:
    """Nothing is ever written between parameters."""
    flat = _flat(torch.float32, param_dtype=torch.bfloat16)
    adamw = _adamw(flat)
    for step in range(3):
        adamw.step_(_load(flat, _gradients(step)), FINITE)
    total = sum(flat.entry(name).numel for name in SHAPES)
    for buffer in (flat.master_buffer, flat.param_buffer, flat.moment1_buffer, flat.moment2_buffer):
        assert buffer.numel() > total and buffer.count_nonzero() <= total
        for name in SHAPES:
            entry = flat.entry(name)
            buffer[entry.offset : entry.offset + entry.numel].zero_()
        assert buffer.count_nonzero() == 0 and not buffer.signbit().any()


def test_frozen_parameter_is_untouched() -> None:
    """G6: a frozen parameter does not decay and does not move; the others do."""
    specs = [ParamSpec("f", (9,), True, trainable=False), ParamSpec("w", (9,), True)]
    flat = FlatBuffers(specs, param_dtype=torch.bfloat16)
    flat.master_buffer.fill_(1.5)
    adamw = _adamw(flat)
    flat.grad("w").fill_(1.0)
    adamw.step_(torch.tensor(3.0, dtype=torch.float64), FINITE)
    assert torch.equal(flat.master("f"), torch.full((9,), 1.5)) and (flat.master("w") != 1.5).all()
    assert torch.equal(flat.param("f"), torch.full((9,), 1.5, dtype=torch.bfloat16))


class _Tape(TorchDispatchMode):
    """Takes down every dispatched operation, as the CPU stand-in for a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_can_be_taped() -> None:
    """A taped step, replayed over changed storages, equals eager steps: rate, clip, skip and counter stay
    live."""
    norm, flag = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.uint8)
    flats = [_flat(torch.float32, param_dtype=torch.bfloat16) for _ in range(2)]
    eager, taped = (_adamw(flat) for flat in flats)
    with _Tape() as tape:
        taped.step_(norm, flag)  # the flag is 0: taping leaves no trace
    names = {str(func) for func, _, _ in tape.calls}
    assert not any("local_scalar" in name or "item" in name or "rand" in name for name in names), names
    for step in range(12):
        finite = step % 4 != 2
        for flat in flats:
            norm.copy_(_load(flat, _gradients(step)))
        flag.fill_(finite)
        eager.step_(norm, flag)
        for func, args, kwargs in tape.calls:
            func(*args, **kwargs)
        assert _bytes(flats[0], eager) == _bytes(flats[1], taped), step
        assert torch.equal(eager.lr, taped.lr) and torch.equal(eager.clip_factor, taped.clip_factor)
        assert taped.skipped.item() is not finite
    assert taped.step.item() == 9


def test_addresses_stay() -> None:
    """Steps write in place: no buffer and no owned tensor moves."""
    flat = _flat(torch.float32, param_dtype=torch.bfloat16)
    adamw = _adamw(flat)
    owned = [adamw.step, adamw.lr, adamw.clip_factor, adamw.skipped]
    before = [item.tensor.data_ptr() for item in flat.logical_tensors()] + [t.data_ptr() for t in owned]
    adamw.step_(_load(flat, _gradients(0)), FINITE)
    owned = [adamw.step, adamw.lr, adamw.clip_factor, adamw.skipped]
    assert before == [item.tensor.data_ptr() for item in flat.logical_tensors()] + [
        t.data_ptr() for t in owned
    ]


def test_state_and_clip_factor() -> None:
    """The counter is saved once for all ranks; the clip factor is torch's."""
    flat = _flat()
    adamw = _adamw(flat, clip_norm=0.5)
    (item,) = adamw.logical_tensors()
    assert (item.name, item.role, item.replicated) == (
        "optimizer/step",
        Role.COUNTER,
        ("pp", "dp", "ep", "cp", "tp"),
    )
    for norm, factor in ((0.25, 1.0), (2.0, 0.5 / (2.0 + 1e-6))):
        adamw.step_(torch.tensor(norm, dtype=torch.float64), FINITE)
        assert adamw.clip_factor.item() == factor


def test_stage_without_parameters() -> None:
    """G6: a stage that holds nothing still counts steps."""
    adamw = _adamw(FlatBuffers([]))
    adamw.step_(torch.tensor(1.0, dtype=torch.float64), FINITE)
    adamw.step_(torch.tensor(1.0, dtype=torch.float64), NOT_FINITE)
    assert adamw.step.item() == 1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"betas": (1.0, 0.9)}, "beta1"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"clip_norm": 0.0}, "clip_norm"),
    ],
)
def test_errors_name_the_key(change: dict[str, Any], key: str) -> None:
    """Impossible hyperparameters are usage errors that name the configuration key."""
    with pytest.raises(UsageError, match=f"optim.{key}"):
        _adamw(_flat(), **change)

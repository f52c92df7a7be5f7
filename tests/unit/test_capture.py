"""Around the tape: the hidden-state register, the capture transaction, and captures of a real engine that
fail."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.capture import capture
from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.fp8.recipes import roles_of
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.graphs.register import HiddenStateRegister, Rule, digest
from qeffect_lm.graphs.transaction import checksum, transaction
from qeffect_lm.runtime.rng import save_generators
from tests.tiny import Trained, batch, config, differing, train


def register(**tensors: torch.Tensor) -> HiddenStateRegister:
    result = HiddenStateRegister()
    for name, tensor in tensors.items():
        result.add(name, tensor, owner="test")
    return result


# ---- the register ------------------------------------------------------------------------------------------


class Part:
    """Pretends to be one of our own objects."""

    __module__ = "qeffect_lm.test"

    def __init__(self) -> None:
        self.buffer = torch.zeros(8)
        self.views = {"a": self.buffer[:4], "b": [self.buffer[4:]]}
        halves = torch.ones(6)
        self.left, self.right = halves[:3].detach(), halves[3:].detach()
        self.me, self.number, self.nothing = self, 3, None


def test_register_finds_whole_storages():
    """add_object walks attributes, containers and cycles; two detached halves of one storage are both rolled
    back."""
    part, known = Part(), HiddenStateRegister()
    known.add_object("part", part)
    assert [(e.name, e.tensor.numel()) for e in known.entries] == [("part/buffer", 8), ("part/left", 6)]
    for tensor in (part.buffer, part.buffer[2:3], part.right, part.left):
        assert known.knows(tensor) and known.may_write(tensor)
    assert not known.knows(torch.zeros(8)) and known.name_of(torch.zeros(1)) is None
    assert known.name_of(part.views["b"][0]) == "part/buffer"
    with pytest.raises(ValueError, match="'part/buffer' is registered already"):
        known.add("part/buffer", torch.zeros(1), owner="x")
    known.add("table", torch.ones(2), owner="layers", rule=Rule.CONSTANT)
    assert [e.name for e in known.under(Rule.RESTORED)] == ["part/buffer", "part/left"]
    lines = known.table().splitlines()
    assert len(lines) == 4 and "constant" in lines[3] and "restored" in lines[1] and "float32" in lines[1]
    with pytest.raises(RuntimeError, match="boom"), transaction(known, make_ledger()):
        part.right.fill_(9.0)
        raise RuntimeError("boom")
    assert (part.right == 1).all() and (part.left == 1).all()


def test_check_addresses():
    """In-place writes pass; a tensor given other data, a storage that moved and an attribute that was
    replaced are named."""
    x, part = torch.zeros(4), Part()
    known = register(x=x)
    known.add_object("part", part)
    known.check_addresses()
    x.copy_(torch.ones(4))
    part.buffer.mul_(2)
    known.check_addresses()
    old = x.data
    x.data = torch.zeros(4)
    with pytest.raises(CaptureError, match="'x' moved"):
        known.check_addresses()
    x.data = old
    known.check_addresses()
    whole, part.buffer = part.buffer, torch.zeros(8)
    with pytest.raises(CaptureError, match="'part/buffer' moved") as caught:
        known.check_addresses()
    assert caught.value.place["tensor"] == "part/buffer"
    part.buffer = whole
    known.check_addresses()
    x.resize_(100000)
    with pytest.raises(CaptureError, match="'x' moved"):
        known.check_addresses()


# ---- the transaction ---------------------------------------------------------------------------------------


def make_ledger() -> Ledger:
    timeline = ScaleTimeline(roles_of("a"), history=2)
    return Ledger(timeline, WeightVersions(["a.weight"]), GradSlots([GradSlot("a.weight", torch.zeros(2))]))


def account(ledger: Ledger) -> dict[str, object]:
    """The ledger's whole host-side account, as plain values."""
    parts = {
        "timeline": ledger.timeline,
        "versions": ledger.versions,
        "grads": ledger.grads,
        "leases": ledger.leases,
    }
    values: dict[str, object] = {"step": ledger.step, "mode": str(ledger.mode), "current": ledger._current}
    for part, owner in parts.items():
        for name, value in vars(owner).items():
            if not isinstance(value, torch.Tensor) and name not in ("slots", "roles", "index"):
                values[f"{part}.{name}"] = repr(value)
    return values


@pytest.mark.parametrize("fails", [False, True])
def test_transaction_rolls_everything_back(fails):
    """Tensors of all dtypes, the generators of torch, NumPy and Python, the ledger's account; on both ways
    out."""
    ledger = make_ledger()
    ledger.begin_step(3)
    ledger.end_step()
    ledger.refreshed({"a.weight": "a"}, ("rows",))
    tensors = {
        "f32": torch.randn(3),
        "bf16": torch.randn(3).bfloat16(),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "int": torch.arange(3),
        "flag": torch.tensor(True),
        "anchor": torch.zeros((), requires_grad=True),
        "nan": torch.tensor([float("nan"), -0.0]),
        "part": torch.ones(3, 4).t()[1:],
    }
    known = register(**tensors)
    before = {name: digest(tensor) for name, tensor in tensors.items()}
    generators, host = save_generators(), account(ledger)

    def body() -> None:
        with transaction(known, ledger):
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype).zero_()
            torch.rand(5)
            np.random.rand(3)
            random.gauss(0, 1)
            ledger.begin_step(99)
            ledger.versions.bump()
            ledger.timeline.epochs.update(dict.fromkeys(ledger.timeline.epochs, 7))
            ledger.refreshed({"a.weight": "a"}, ("rows", "columns"))
            ledger.grads.write("a.weight", 0)
            ledger.grads.report_empty("a.weight")
            assert any(digest(tensor) != before[name] for name, tensor in tensors.items())
            assert account(ledger) != host
            if fails:
                raise MemoryError("out of memory")

    if fails:
        with pytest.raises(MemoryError):
            body()
    else:
        body()
    assert {name: digest(tensor) for name, tensor in tensors.items()} == before
    after = save_generators()
    assert torch.equal(after.torch, generators.torch) and after.python == generators.python
    assert all(np.array_equal(a, b) for a, b in zip(after.numpy, generators.numpy, strict=True))
    assert account(ledger) == host
    ledger.begin_step(4)
    ledger.end_step()


def test_transaction_proves_its_rollback():
    """Something that cannot be put back is named, not passed over."""
    x = torch.zeros(4)
    known = register(x=x)
    with (
        pytest.raises(CaptureError, match="'x' \\(test\\) was not rolled back"),
        transaction(known, make_ledger()) as s,
    ):
        s._copies[0] = torch.ones(4)
        s.restore = lambda: None  # type: ignore[method-assign]


# ---- the engine --------------------------------------------------------------------------------------------


def state_of(assembly) -> dict[str, torch.Tensor]:
    """Everything the register rolls back or guards, as bytes by name."""
    tensors = {e.name: e.tensor.detach() for e in assembly.register.entries if e.rule is not Rule.SCRATCH}
    return {n: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).clone() for n, t in tensors.items()}


class Failing(HostReplay):
    """Calls ``act`` in the capture of graph number ``at``, after its work ran."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.at, self.act, self.count = at, act, 0

    def capture(self, label, work, *, register, shares=()):
        self.count += 1

        def inside() -> None:
            work()
            if self.count - 1 == self.at:
                self.act()

        return super().capture(label, inside, register=register, shares=shares)


def out_of_memory() -> None:
    raise MemoryError("out of memory")


@pytest.fixture(scope="module")
def reference() -> Trained:
    """Four eager steps, never captured."""
    return train(config(), steps=4)


@pytest.mark.parametrize("where", ["F", "I", "W", "end", "random draw"])
def test_failing_capture_leaves_nothing_behind(where, reference):
    """L10: out of memory in the middle of a capture (in F, I, W or the step's end), or a refused operation:
    scales, slots, gradients, weights, generators and ledger have the bytes they had, and the engine trains on
    eagerly, bitwise as if it had never been captured."""
    run = train(config(), steps=2)
    assembly = run.assembly
    keys = assembly.plan.graph_keys(0)
    first = {kind: next(i for i, key in enumerate(keys) if str(key.kind) == kind) for kind in "FIW"}
    at = {**first, "end": len(keys) + 3, "random draw": 2}[where]
    act, error = (lambda: torch.rand(3), CaptureError) if where == "random draw" else (out_of_memory, MemoryError)
    before, host, generators = state_of(assembly), account(assembly.ledger), save_generators()
    backend = Failing(at, act)
    with pytest.raises(error):
        capture(assembly.engine, backend, assembly.register)
    assert backend.count == at + 1, "it raised half way"
    assert differing(before, state_of(assembly)) == []
    assert account(assembly.ledger) == host
    assert torch.equal(save_generators().torch, generators.torch)
    assert assembly.engine.captured is None
    assert all(slot.saved is None for stage in assembly.engine.stages.values() for slot in stage.slots)

    losses = [float(assembly.engine.step(step, batch(step)).loss) for step in (2, 3)]
    assert run.losses + losses == reference.losses
    assert differing(run.tensors, reference.tensors) == []


def test_capture_after_a_failed_one(reference):
    """The same engine can be captured after all, and replays what eager computes."""
    run = train(config(), steps=2)
    assembly = run.assembly
    with pytest.raises(MemoryError):
        capture(assembly.engine, Failing(4, out_of_memory), assembly.register)
    before = state_of(assembly)
    capture(assembly.engine, HostReplay(), assembly.register)
    assert differing(before, state_of(assembly)) == []
    losses = [float(assembly.engine.step(step, batch(step)).loss) for step in (2, 3)]
    assert run.losses + losses == reference.losses and differing(run.tensors, reference.tensors) == []
    assembly.register.check_addresses()


def test_registered_state_stays_in_place():
    """Eager steps, captured steps, evaluation and a refresh move no registered storage."""
    for backend in ("eager", "host_replay"):
        run = train(config(graphs__backend=backend), steps=2)
        run.assembly.evaluator.run(batch(50))
        run.assembly.rebuild_caches()
        run.assembly.register.check_addresses()


def test_changing_a_layer_after_capture_has_no_effect():
    """A flag of a real model, changed after capture: the graphs do not see it; a written weight they do."""
    run = train(config(graphs__backend="host_replay", model__dropout=0.1), steps=1)
    control = train(config(graphs__backend="host_replay", model__dropout=0.1), steps=1)
    for stage in run.assembly.engine.stages.values():
        for module in stage.chunk.modules():
            if hasattr(module, "p"):
                module.p = 0.9
            if hasattr(module, "eps"):
                module.eps = 100.0
    losses = [float(r.assembly.engine.step(1, batch(1)).loss) for r in (run, control)]
    assert losses[0] == losses[1]
    with torch.no_grad():
        run.assembly.flat.master("final_norm.weight").mul_(1.5)
    losses = [float(r.assembly.engine.step(2, batch(2)).loss) for r in (run, control)]
    assert losses[0] != losses[1]


def test_an_unregistered_tensor_in_a_layer_is_refused():
    """A user's layer that holds a plain tensor: named at capture, and the engine trains on eagerly."""
    run = train(config(), steps=1)
    stage = run.assembly.engine.stages[0]
    hidden = torch.ones(32)
    block = stage.chunk.blocks[1]
    plain = block.forward
    block.forward = lambda x, context: plain(x * hidden, context)  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="register it") as caught:
        capture(run.assembly.engine, HostReplay(), run.assembly.register)
    assert "mul" in str(caught.value.place["operation"]) and "0F" in str(caught.value.place["graph"])
    assert run.assembly.engine.captured is None
    assert not bool(run.assembly.engine.step(1, batch(1)).skipped)


# ---- rules of large tensors --------------------------------------------------------------------------------


def test_checksum_sees_every_change():
    """Any bit of any byte, a swap of two words, another length; not the layout in memory."""
    base = torch.randint(0, 255, (1003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sums = {int(checksum(base))}
    for position in (0, 7, 8, 500, 999, 1000, 1002):
        for bit in (1, 128):
            changed = base.clone()
            changed[position] ^= bit
            sums.add(int(checksum(changed)))
    swapped = base.clone()
    swapped[:8], swapped[8:16] = base[8:16], base[:8]
    sums |= {int(checksum(swapped)), int(checksum(base[:-1])), int(checksum(base[1:]))}
    assert len(sums) == 1 + 14 + 3
    assert int(checksum(base[1:])) == int(checksum(base[1:].clone()))
    wide = torch.randn(12, 10)
    assert int(checksum(wide.t())) == int(checksum(wide.t().contiguous())) != int(checksum(wide))
    assert int(checksum(torch.tensor(-0.0))) != int(checksum(torch.tensor(0.0)))


def test_checksum_of_several_chunks(monkeypatch):
    """Chunks are told apart: equal chunks swapped with others change the sum."""
    monkeypatch.setattr("qeffect_lm.graphs.transaction._CHUNK", 16)
    words = torch.arange(40)
    other = torch.cat([words[16:32], words[:16], words[32:]])
    assert int(checksum(words)) != int(checksum(other))


def test_transaction_guards_what_it_does_not_copy():
    """GUARDED without a copy: a change is an error with the tensor's name; with a copy it is put back. SCRATCH stays."""
    for copied in (True, False):
        known = HiddenStateRegister()
        guarded, scratch = torch.ones(100), torch.ones(100)
        known.add("flat/master", guarded, owner="flat", rule=Rule.GUARDED)
        known.add("flat/grad", scratch, owner="flat", rule=Rule.SCRATCH)
        with transaction(known, make_ledger(), copy_guarded=copied):
            scratch.zero_()
        assert (scratch == 0).all()
        if copied:
            with transaction(known, make_ledger(), copy_guarded=True):
                guarded[50] = 2
            assert (guarded == 1).all()
        else:
            with pytest.raises(CaptureError, match="'flat/master'.*no copy") as caught:
                with transaction(known, make_ledger(), copy_guarded=False):
                    guarded[50] = 2
            assert caught.value.place["tensor"] == "flat/master"
    with pytest.raises(ValueError, match="'part/nothing' holds no tensor"):
        HiddenStateRegister().add_object("part", Part(), {"nothing": Rule.SCRATCH})


def test_rehearsed_optimizer_moves_nothing():
    """The step's end, run before a capture: vetoed, it leaves masters, moments, parameters and the step as they are."""
    run = train(config(), 2)
    end, flat, optimizer = run.assembly.engine.end, run.assembly.flat, run.assembly.optimizer
    kept = (flat.master_buffer, flat.param_buffer, flat.moment1_buffer, flat.moment2_buffer, optimizer.step)
    before = [int(checksum(tensor)) for tensor in kept]
    with torch.no_grad():
        end.veto_()
        end.local_sums_()
        end.optimizer_step_()
    assert [int(checksum(tensor)) for tensor in kept] == before
    with torch.no_grad():
        end.gather_()
        end.optimizer_step_()
    assert all(int(checksum(tensor)) != old for tensor, old in zip(kept, before, strict=True))


def test_every_storage_has_one_rule():
    """What two owners share is registered once: a second entry under another rule would copy what is guarded."""
    register = train(config(precision__dtype="bfloat16"), 1).assembly.register
    rules: dict[int, set[Rule]] = {}
    for entry in register.entries:
        rules.setdefault(entry.tensor.untyped_storage()._cdata, set()).add(entry.rule)
    assert all(len(found) == 1 for found in rules.values())
    guarded = [entry.name for entry in register.under(Rule.GUARDED)]
    assert any(name.startswith("cache/") for name in guarded) and "flat/master_buffer" in guarded
    assert not any(entry.name.startswith(("step_end/_cache", "optimizer/flat")) for entry in register.entries)


def test_a_wrapper_tensor_is_left_to_its_owner():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("nothing is asked of it")

    part = Part()
    part.wrapped = torch.Tensor._make_wrapper_subclass(Wrapper, (4,), dtype=torch.float32)
    known = HiddenStateRegister()
    known.add_object("part", part)
    assert [entry.name for entry in known.entries] == ["part/buffer", "part/left"]

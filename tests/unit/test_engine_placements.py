"""The engine where a rank holds several chunks, on a V or interleaved: slots, messages, failures, frozen parts."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch

from models.decoder import Decoder
from pipeline.actions import RECEIVES, Kind
from qeffect_lm.app.assemble import assemble
from qeffect_lm.errors import UsageError
from tests.tiny import Batch, assert_moved, batch, config, differing, merged, train
from tests.unit.in_process import Ranks

PLACEMENTS = [("zb-v", 2), ("interleaved-1f1b", 3)]
LAYERS = {2: [1, 0, 2, 1], 3: [1, 1, 0, 1, 0, 1]}


def settings(schedule: str, chunks: int, pp: int = 2, **more: Any) -> dict[str, Any]:
    layers = LAYERS[chunks] if pp == 2 else None
    keys = {"schedule": schedule, "chunks": chunks, "microbatches": 4, "stage_layers": layers}
    return {"parallel__pp": pp, "pipeline": keys, "model__dropout": 0.1, **more}


def tensors(part: Any) -> dict[str, torch.Tensor]:
    items = ((item.name, item.tensor) for item in part.logical_tensors())
    return {n: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).clone() for n, t in items}


@pytest.mark.parametrize(("schedule", "chunks"), PLACEMENTS)
def test_receives_land_where_the_graph_reads(schedule, chunks, monkeypatch):
    """Every receive goes into the input (or output gradient) of the planned slot, whose storage the slot's graph was captured
    over; no buffer is made during a step.
    """
    ranks = Ranks(config(**settings(schedule, chunks, graphs__backend="host_replay")), monkeypatch)
    ranks.prepare(batch(0))
    landed: dict[tuple[int, str, int, int], list[int]] = {}
    for part in ranks.parts:
        transport: Any = part.engine._transport
        receive = transport.receive

        def noting(tensor, peer, direction, chunk, microbatch, rank=part.mesh.rank, receive=receive):
            landed.setdefault((rank, direction, chunk, microbatch), []).append(tensor.data_ptr())
            return receive(tensor, peer, direction, chunk, microbatch)

        transport.receive = noting
    for step in range(2):
        ranks.step(step, batch(step))
    expected = 0
    for part in ranks.parts:
        engine = part.engine
        for action in engine.actions:
            if action.kind not in RECEIVES:
                continue
            chunk, microbatch = action.key
            forward = action.kind is Kind.RECV_F
            consumer = next(a for a in engine.actions if a.kind is (Kind.F if forward else Kind.I) and a.key == action.key)
            key = engine.plan.graph_key(consumer)
            slot = engine.stages[chunk].slots[key.i_slot]
            buffer = slot.x if forward else slot.dy
            source = chunk - 1 if forward else chunk + 1
            assert landed.pop((part.mesh.rank, "F" if forward else "B", source, microbatch)) == [buffer.data_ptr()] * 2
            graph: Any = engine.captured.actions[key][0]
            assert buffer.untyped_storage().data_ptr() in read_by(graph), f"{key} does not read what {action} received"
            expected += 1
    assert not landed and expected == 2 * 4 * (sum(a != b for a, b in zip(ranks_of(ranks), ranks_of(ranks)[1:], strict=False)))


def ranks_of(ranks: Ranks) -> tuple[int, ...]:
    return ranks.parts[0].plan.placement.ranks


def read_by(graph: Any) -> set[int]:
    """Storages among the arguments of a recorded graph's operations."""
    leaves = torch.utils._pytree.tree_flatten([(op.args, op.kwargs) for op in graph._operations])[0]
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}


@pytest.mark.parametrize(("schedule", "chunks"), PLACEMENTS)
def test_nothing_is_left_and_each_forward_runs_once(schedule, chunks, monkeypatch):
    """L6, L8: leases, live tensors, pending transfers and events are flat; one forward per chunk and microbatch."""
    ranks = Ranks(config(**settings(schedule, chunks)), monkeypatch)
    ranks.prepare(batch(0))
    forwards: Counter[int] = Counter()
    for part in ranks.parts:
        for index, stage in part.engine.stages.items():

            def counted(slot, scope, index=index, forward=stage.forward):
                forwards[index] += 1
                forward(slot, scope)

            monkeypatch.setattr(stage, "forward", counted)
    counts = []
    for step in range(6):
        ranks.step(step, batch(step))
        assert all(forwards[chunk] == 4 * (step + 1) for chunk in range(2 * chunks))
        engines = [part.engine for part in ranks.parts]
        assert all(engine.ledger.leases.counts() == {"groups": 0, "slots": 0} for engine in engines)
        assert all(not engine._pending and not engine._events for engine in engines)
        gc.collect()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(set(counts[2:])) == 1, counts


@pytest.mark.parametrize(
    ("at", "kind", "backend"), [(1, Kind.F, "eager"), (2, Kind.I, "host_replay"), (0, Kind.W, "eager")]
)
def test_an_exception_on_a_v_then_a_clean_step(backend, at, kind, monkeypatch):
    """L7: with both arms of the V on one rank the next step is clean: bitwise as if it had not happened."""
    chosen = config(**settings("zb-v", 2, pp=1, graphs__backend=backend, model__num_layers=2))
    plain = train(chosen, 3)
    assert_moved(plain)
    assembly = assemble(chosen)
    assembly.prepare(batch(0))
    losses = []
    for step in range(3):
        if step:
            with monkeypatch.context() as patch:
                handler = assembly.engine._handlers[kind]

                def broken(action: Any, handler: Any = handler) -> None:
                    handler(action)
                    if action.key == (1, at):
                        raise RuntimeError("in the middle")

                patch.setitem(assembly.engine._handlers, kind, broken)
                with pytest.raises(RuntimeError, match="in the middle"):
                    assembly.engine.step(step, batch(70))
        losses.append(float(assembly.engine.step(step, batch(step)).loss))
    assert losses == plain.losses and differing(tensors(assembly), plain.tensors) == []


@pytest.mark.parametrize(("schedule", "chunks"), PLACEMENTS)
def test_frozen_parameters_and_uneven_token_counts(schedule, chunks, monkeypatch):
    """G4, G6: a frozen matrix and a frozen norm; microbatches with 32, 20, 8 and 0 valid tokens: one process's bits."""
    frozen = ("layers.1.mlp.down.weight", "layers.3.attention_norm.weight")
    chunk = Decoder.chunk

    def with_frozen(self: Decoder, index: int, stage_layers: Any) -> Any:
        made = chunk(self, index, stage_layers)
        for layer in made.modules():
            for name, parameter in getattr(layer, "_parameters", {}).items():
                if parameter is not None and f"{getattr(layer, 'name', '')}.{name}" in frozen:
                    parameter.requires_grad_(False)
        return made

    monkeypatch.setattr(Decoder, "chunk", with_frozen)
    valid = (32, 20, 8, 0)

    def masked(step: int) -> Batch:
        made = batch(step)
        made.loss_mask = torch.stack([(torch.arange(32) < n).float().view(2, 16) for n in valid])
        made.tokens = sum(valid)
        return made

    one = train(config(model__dropout=0.1), 3, batches=masked)
    assert set(frozen).isdisjoint(one.assembly.flat.trainable_names) and set(frozen) <= set(one.assembly.flat.names)
    assert len(set(one.losses)) == 3 and not any(one.skipped)
    ranks = Ranks(config(**settings(schedule, chunks)), monkeypatch)
    ranks.prepare(masked(0))
    losses = [{float(result.loss) for result in ranks.step(step, masked(step))} for step in range(3)]
    assert losses == [{loss} for loss in one.losses]
    assert differing(merged([tensors(part) for part in ranks.parts]), one.tensors) == []


def test_a_rank_without_any_scale_is_calibrated_through(monkeypatch):
    """G6: the middle rank holds no layer, so no role of its own: its neighbours' calibration still goes through it."""
    keys = {"schedule": "1f1b", "microbatches": 2, "stage_layers": [2, 0, 2]}
    one = train(config(pipeline__microbatches=2, pipeline__w_delay=0), 2, batches=lambda step: batch(step, 2))
    ranks = Ranks(config(parallel__pp=3, pipeline=keys), monkeypatch)
    assert [len(part.timeline.roles) for part in ranks.parts] == [24, 0, 24]
    ranks.prepare(batch(0, 2))
    losses = [{float(result.loss) for result in ranks.step(step, batch(step, 2))} for step in range(2)]
    assert losses == [{loss} for loss in one.losses]
    assert differing(merged([tensors(part) for part in ranks.parts]), one.tensors) == []
    assert len({tuple(part.timeline.epochs.items()) for part in ranks.parts}) == 1


def test_nothing_depends_on_the_placement_but_the_place():
    """Initial weights, names and their order: of one process, of a V and of an interleaved placement. (That the norm's blocks
    are added in one order everywhere shows in the bits of every other test.)
    """
    from qeffect_lm.parallel.mesh import Mesh

    one = assemble(config())
    for schedule, chunks in PLACEMENTS:
        held: dict[str, torch.Tensor] = {}
        for rank in range(2):
            part = assemble_alone(config(**settings(schedule, chunks)), Mesh({"pp": 2}, rank))
            names = part.flat.names
            assert names == [name for name in one.flat.names if name in set(names)]  # the model's order on each rank
            assert not set(names) & set(held)
            held |= {name: part.flat.master(name) for name in names}
        assert set(held) == set(one.flat.names)
        assert differing(held, {name: one.flat.master(name) for name in held}) == []


def assemble_alone(chosen: Any, mesh: Any) -> Any:
    """A rank without its peers: nothing is sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qeffect_lm.app.assemble.Transport", lambda *_: None)
        return assemble(chosen, mesh)


def test_evaluation_refuses_another_shape():
    """P4: a microbatch of another shape would be spread over the buffers or not fit; it is named."""
    assembly = assemble(config())
    with pytest.raises(UsageError, match=r"microbatches of \[1, 16\] tokens, the pipeline's buffers hold \[2, 16\]"):
        assembly.evaluator.run(batch(0, size=1))

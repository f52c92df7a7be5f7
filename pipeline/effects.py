"""The effects of a plan: which buffers each piece of the engine's work accesses, and the whole program of a step.

One source: the engine launches its work with the access lists made here (:class:`Effects`), and :func:`program` writes down
everything it does in one step, edges and transfers included. A test records what the engine really does and compares.

Library workspaces (cuBLAS, cuDNN) are one resource for each stream that computes: every launch on it writes the stream's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.actions import RECEIVES, SENDS, Action, Kind
from pipeline.coalesce import members_of
from pipeline.plan import Plan
from pipeline.program import (
    BEGIN,
    COLLECTIVE,
    COMPLETE,
    COMPUTE,
    END,
    LAUNCH,
    RECORD,
    WAIT,
    Buffer,
    BufferAccesses,
    Op,
    Program,
)
from pipeline.schedules import Placement
from pipeline.slots import Key
from qeffect_lm.contract.streams import Access
from qeffect_lm.errors import UsageError

READ, WRITE, MERGE = Access.READ, Access.WRITE, Access.MAX_MERGE
_SCALES = {"F": "forward", "I": "backward"}
# What peers do together: a communicator runs one such work after the other, in one order on all of them.
_AMONG_PEERS = frozenset(("F", "I", "REDUCE", "REDUCE_F", "REDUCE_I", "REDUCE_G", "GATHER", "REFRESH"))


class Effects:
    """The access lists of one rank's work, made once for each launch and kept.

    Args:
        placement: which rank holds which chunk.
        rank: the rank.
        i_slots, w_slots: (chunk, microbatch) → slot.
        replicas: there are some: the gradients of a chunk are reduced as soon as they are there, and not by REDUCE.
        tied: the rank holds a layer of a tied weight, whose gradients REDUCE adds and reduces.
        coalesce_w, microbatches: how many microbatches' W are one product; of how many that a step has.
        peers: there are ranks with which F and I exchange: those and what reduces use their communicators, and REFRESH
            merges amax.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        i_slots: Mapping[Key, int],
        w_slots: Mapping[Key, int],
        replicas: bool = False,
        tied: bool = False,
        coalesce_w: int = 1,
        microbatches: int = 1,
        peers: bool = False,
    ) -> None:
        self._peers = peers
        self._reduced_early = replicas and not tied
        self._placement, self._chunks = placement, placement.chunks(rank)
        self._i, self._w = i_slots, w_slots
        self._coalesce_w, self._microbatches = coalesce_w, microbatches
        # Gradients of W, those of a product of several microbatches and those that I finishes are of different parameters.
        self._gradients = ("grads_W", "grads_I") if coalesce_w == 1 else ("grads_W", "grads_J", "grads_I")
        self._made: dict[tuple, Op] = {}

    def launch(self, work: str, chunk: int | None = None, microbatch: int | None = None, stream: str = COMPUTE) -> Op:
        """The launch of a piece of work; ``stream`` is where computation goes (transfers and collectives have their own)."""
        key = work, chunk, microbatch, stream
        op = self._made.get(key)
        if op is None:
            op = self._made[key] = self._make(work, chunk, microbatch, stream)
        return op

    def _make(self, work: str, chunk: int | None, microbatch: int | None, stream: str) -> Op:
        if work in ("GATHER", "REDUCE", "REDUCE_F", "REDUCE_I", "REDUCE_G"):
            stream, scratch = COLLECTIVE, False
        elif work.startswith(("SEND", "RECV")):
            stream, scratch = work.lower().replace("_f", "_F").replace("_b", "_B"), False
        else:
            scratch = True
        if chunk is None or microbatch is None:
            accesses = self._of_rank(work)
        else:
            accesses = self._of_chunk(work, chunk, microbatch)
        if self._peers and work in _AMONG_PEERS:
            accesses = (*accesses, (("communicator", "peers"), WRITE))
        if scratch:
            accesses = (*accesses, (("workspace", stream), WRITE))
        return Op(LAUNCH, stream, work, chunk, microbatch, accesses)

    def _of_chunk(self, work: str, chunk: int, microbatch: int) -> BufferAccesses:
        key = chunk, microbatch
        i, w = self._i[key], self._w[key]
        first, last = chunk == 0, chunk == self._placement.num_chunks - 1

        def mine(role: str) -> Buffer:
            return role, chunk, i

        def neighbour(role: str, other: int) -> Buffer:
            return role, other, self._i[other, microbatch]

        # What only the model's ends have: tokens, and targets with the loss divisor.
        loss: BufferAccesses = ((mine("targets"), READ), ("divisor", READ)) if last else ()
        retained: BufferAccesses = ((("retained_W", chunk, w), WRITE),)
        if work == "INPUT":
            written = ["key", *["x"] * first, *["targets"] * last]
            return tuple((mine(role), WRITE) for role in written)
        if work == "F":
            reads: BufferAccesses = ((mine("x"), READ), (mine("key"), READ), *loss)
            writes = ((mine("retained_I"), WRITE), *retained, (mine("out"), WRITE))
            return (*reads, *writes, *_weights("forward"), ("amax_forward", MERGE))
        if work == "I":
            reads = ((mine("dy"), READ), (mine("x"), READ), (mine("retained_I"), READ), *loss)
            grads = ("amax_backward", MERGE), (("grads_I", chunk), WRITE)
            dx: BufferAccesses = () if first else ((mine("dx"), WRITE),)
            return (*reads, *retained, *_weights("backward"), *grads, *dx)
        if work == "W":
            return self._weight_grad(chunk, microbatch, w)
        if work == "REDUCE_G":
            return tuple(((part, chunk), WRITE) for part in self._gradients)
        if work in ("REDUCE_F", "REDUCE_I"):
            return ((f"amax_{_SCALES[work[-1]]}", WRITE),)  # read, exchanged, written back: it does not commute with a merge
        if work in ("COMMIT_F", "COMMIT_I"):
            return (f"amax_{_SCALES[work[-1]]}", WRITE), (f"scales_{_SCALES[work[-1]]}", WRITE)
        one: dict[str, BufferAccesses] = {
            "LOSS": ((mine("out"), READ), ("losses", WRITE)),
            "SEND_F": ((mine("out"), READ),),
            "SEND_B": ((mine("dx"), READ),),
            "RECV_F": ((mine("x"), WRITE),),
            "RECV_B": ((mine("dy"), WRITE),),
        }
        if work in one:
            return one[work]
        if work == "PASS_F":
            return (mine("out"), READ), (neighbour("x", chunk + 1), WRITE)
        assert work == "PASS_B", work
        return (mine("dx"), READ), (neighbour("dy", chunk - 1), WRITE)

    def _weight_grad(self, chunk: int, microbatch: int, w: int) -> BufferAccesses:
        members = 0 if self._coalesce_w == 1 else members_of(microbatch, self._coalesce_w, self._microbatches)
        reads: BufferAccesses = tuple((("retained_W", chunk, place), READ) for place in range(w + 1 - max(members, 1), w + 1))
        product: BufferAccesses = ((("grads_J", chunk), WRITE),) if members else ()
        return (*reads, (("grads_W", chunk), WRITE), *product)

    def _of_rank(self, work: str) -> BufferAccesses:
        names: list[Buffer] = [(part, chunk) for chunk in self._chunks for part in self._gradients]
        reduced = () if self._reduced_early else names
        both = "amax_forward", "amax_backward"
        table: dict[str, BufferAccesses] = {
            "DIVISOR": (("divisor", WRITE),),
            "SUM": (("losses", READ), *((amax, READ) for amax in both), ("row", WRITE)),
            "REDUCE": (*((name, WRITE) for name in reduced), *((amax, WRITE) for amax in both), ("row", WRITE)),
            "NORM": (*((name, READ) for name in names), ("row", WRITE)),
            "GATHER": (("row", READ), ("rows", WRITE)),
            "STEP": (
                *(("rows", READ), *((name, READ) for name in names)),
                *(("parameters", WRITE), ("optimizer", WRITE), ("skip", WRITE)),
            ),
            "COMMIT": (
                *(("skip", READ), *((amax, WRITE) for amax in both)),
                *(("scales_forward", WRITE), ("scales_backward", WRITE)),
            ),
            "REFRESH": (
                *(("parameters", READ), ("scales_forward", READ), ("caches", WRITE)),
                ("amax_forward", WRITE if self._peers else MERGE),
            ),
        }
        return table[work]


def _weights(direction: str) -> BufferAccesses:
    return ("parameters", READ), ("caches", READ), (f"scales_{direction}", READ)


def last_writers(actions: Sequence[Action]) -> dict[Action, int]:
    """The action that completes the gradients of a chunk → the chunk."""
    last = {action.chunk: action for action in actions if action.kind in (Kind.I, Kind.W) and action.chunk is not None}
    return {action: chunk for chunk, action in last.items()}


def effects_of(plan: Plan, rank: int, replicas: bool = False, tied: bool = False, peers: bool = False) -> Effects:
    """The access lists of a plan's rank."""
    i_slots, w_slots = plan.slots[rank].i_slots.index, plan.slots[rank].w_slots.index
    return Effects(plan.placement, rank, i_slots, w_slots, replicas, tied, plan.coalesce_w, plan.microbatches, peers)


def program(plan: Plan, caches: bool = True, replicas: bool = False) -> Program:
    """The engine's program of a plan: every operation of one step, on all ranks.

    Args:
        plan: of I and W; its B must have been split.
        caches: False where no weight is kept in FP8, so that none is refreshed.
        replicas: whether there are data-parallel replicas to reduce gradients over.

    Raises:
        UsageError: it holds a B.
    """
    rows = tuple(rank_program(plan, rank, caches, replicas) for rank in range(plan.num_ranks))
    unordered, joined = plan.allow_unordered, plan.coalesce_w
    return Program(plan.schedule, plan.placement, plan.microbatches, plan.window, rows, unordered, joined)


def rank_program(
    plan: Plan, rank: int, caches: bool = True, replicas: bool = False, tied: bool = False, peers: bool = False
) -> tuple[Op, ...]:
    """One rank's part of :func:`program`."""
    if any(action.kind is Kind.B for action in plan.actions[rank]):
        raise UsageError("the engine runs I and W, this plan holds B: split it first")
    return _Row(plan, rank, replicas, tied, peers).write(plan.actions[rank], caches)


class _Row:
    """One rank's program while it is written; mirrors :mod:`pipeline.engine`, action by action."""

    def __init__(self, plan: Plan, rank: int, replicas: bool, tied: bool, peers: bool) -> None:
        self._plan, self._placement = plan, plan.placement
        self._completes = last_writers(plan.actions[rank]) if replicas else {}
        self._slots = plan.slots[rank]
        self._chunks = set(plan.placement.chunks(rank))
        self._effects = effects_of(plan, rank, replicas, tied, peers)
        self._ops: list[Op] = []
        self._events = 0
        self._pending: dict[tuple[str, int, int], tuple[Op, int]] = {}
        self._epochs = {"F": 0, "I": 0}
        self._input_grads: dict[tuple[int, int], int] = {}  # (chunk, microbatch) → the event after its I
        self._peers, self._reducing = peers, False

    def write(self, actions: Sequence[Action], caches: bool) -> tuple[Op, ...]:
        self._ops.append(Op(BEGIN))
        self._launch("DIVISOR")
        handlers = {Kind.F: self._forward, Kind.I: self._input_grad, Kind.W: self._weight_grad, Kind.COMMIT: self._commit}
        handlers |= {Kind.REDUCE: self._reduce, Kind.STEP: self._step} | dict.fromkeys(SENDS | RECEIVES, self._transfer)
        for action in actions:
            handlers[action.kind](action)
            if action in self._completes:
                self._edge(COMPUTE, COLLECTIVE)
                self._launch("REDUCE_G", *action.key)
                self._reducing = self._peers
        if caches:
            self._launch("REFRESH", epoch=self._epochs["F"], version=1)
        self._settle()
        self._ops.append(Op(END))
        return tuple(self._ops)

    def _launch(self, work: str, chunk: int | None = None, microbatch: int | None = None, **fields: int | None) -> Op:
        if self._reducing and work in ("F", "I"):
            self._edge(COLLECTIVE, COMPUTE)
            self._reducing = False
        op = replace(self._effects.launch(work, chunk, microbatch), **fields)  # type: ignore[arg-type]
        self._ops.append(op)
        return op

    def _record(self, stream: str) -> int:
        self._ops.append(Op(RECORD, stream, event=self._events))
        self._events += 1
        return self._events - 1

    def _edge(self, source: str, target: str) -> None:
        self._ops.append(Op(WAIT, target, event=self._record(source)))

    def _complete(self, key: tuple[str, int, int]) -> None:
        if key in self._pending:
            op, event = self._pending.pop(key)
            self._ops += [Op(COMPLETE, work=op.work, chunk=op.chunk, microbatch=op.microbatch), Op(WAIT, COMPUTE, event=event)]

    def _settle(self) -> None:
        for key in list(self._pending):
            self._complete(key)

    def _account(self, action: Action) -> dict[str, int | None]:
        graph = self._plan.graph_key(action)
        account: dict[str, int | None] = {"i_slot": graph.i_slot, "w_slot": graph.w_slot, "beta": graph.beta}
        if action.kind is not Kind.W:
            return account | {"epoch": self._epochs[str(action.kind)], "version": 0}
        joint = self._plan.joint(action)
        return account if joint is None else account | {"members": joint.members, "joint_beta": joint.beta}

    def _forward(self, action: Action) -> None:
        chunk, microbatch = action.key
        self._complete(("RECV_F", chunk, microbatch))
        self._complete(("SEND_F", chunk, self._slots.i_slots.index[action.key]))
        self._launch("INPUT", chunk, microbatch)
        self._launch("F", chunk, microbatch, **self._account(action))
        if chunk == self._placement.num_chunks - 1:
            self._launch("LOSS", chunk, microbatch)
        elif chunk + 1 in self._chunks:
            self._launch("PASS_F", chunk, microbatch)

    def _input_grad(self, action: Action) -> None:
        chunk, microbatch = action.key
        self._complete(("RECV_B", chunk, microbatch))
        self._complete(("SEND_B", chunk, self._slots.i_slots.index[action.key]))
        self._launch("I", chunk, microbatch, **self._account(action))
        self._input_grads[action.key] = self._record(COMPUTE)
        if chunk and chunk - 1 in self._chunks:
            self._launch("PASS_B", chunk, microbatch)

    def _weight_grad(self, action: Action) -> None:
        self._ops.append(Op(WAIT, COMPUTE, event=self._input_grads.pop(action.key)))
        self._launch("W", *action.key, **self._account(action))

    def _transfer(self, action: Action) -> None:
        chunk, microbatch = action.key
        forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        sends = action.kind in SENDS
        peer = self._placement.ranks[chunk + 1 if forward == sends else chunk - 1]
        op = self._effects.launch(str(action.kind), chunk, microbatch)
        self._edge(COMPUTE, op.stream)
        op = self._launch(op.work, chunk, microbatch, peer=peer)
        place = self._slots.i_slots.index[action.key] if sends else microbatch
        self._pending[op.work, chunk, place] = op, self._record(op.stream)

    def _reduce(self, action: Action) -> None:
        self._settle()
        self._launch("SUM")
        self._edge(COMPUTE, COLLECTIVE)
        self._launch("REDUCE")
        self._edge(COLLECTIVE, COMPUTE)

    def _step(self, action: Action) -> None:
        self._launch("NORM")
        self._edge(COMPUTE, COLLECTIVE)
        self._launch("GATHER")
        self._edge(COLLECTIVE, COMPUTE)
        self._launch("STEP", version=1)

    def _commit(self, action: Action) -> None:
        if action.chunk is None:
            self._launch("COMMIT", epoch=self._epochs["F"])
            self._epochs = {part: epoch + 1 for part, epoch in self._epochs.items()}
            return
        assert action.detail is not None
        self._edge(COMPUTE, COLLECTIVE)
        self._launch(f"REDUCE_{action.detail}", *action.key)
        self._edge(COLLECTIVE, COMPUTE)
        self._launch(f"COMMIT_{action.detail}", *action.key, epoch=self._epochs[action.detail])
        self._epochs[action.detail] += 1

"""Sequences cut over ranks, which are threads here: every layer gives a rank what one process gives for its tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models import build_model
from models.decoder import Decoder
from qeffect_lm import kernels
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.attention import Attention
from qeffect_lm.layers.base import direct_layers, split_layers
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.dropout import KeyedDropout
from qeffect_lm.layers.embedding import LearnedPositions
from qeffect_lm.layers.rope import Rope, RopeScaling
from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.context_attention import ContextAttention
from tests.tiny import config, same_bits
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401  (kernels_run is a fixture)
from tests.unit.test_documents import attention, rows

ROW = 24


@dataclass
class Meeting:
    """Where threads hand each other their tensors, in one order."""

    size: int
    barrier: threading.Barrier = field(init=False)
    given: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.given = threading.Barrier(self.size, timeout=60), [None] * self.size

    def all(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        found = [part.clone() for part in self.given]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Threads(ContextParallel):
    """A rank in a thread."""

    meeting: Meeting | None = field(default=None, compare=False)
    told: list[str] = field(default_factory=list, compare=False)

    def gather(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        assert self.meeting is not None
        self.told.append(f"{who}.gather")
        return torch.cat(self.meeting.all(self.rank, x.detach()))

    def scatter_sum(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        assert self.meeting is not None
        self.told.append(f"{who}.scatter")
        parts = self.meeting.all(self.rank, x.detach())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.chunk(self.size)[self.rank].clone()


def ranks_of(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """What ``work`` gives on each of ``size`` ranks."""
    meeting, found, failed = Meeting(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            found[rank] = work(Threads(size, rank, meeting=meeting))
        except BaseException as error:  # noqa: BLE001  (told below)
            failed.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), None)
    if failed:
        raise first or failed[0]
    return found


def whole_of(parts: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """The ranks' parts of rows, in the rows' order."""
    halves = [part.chunk(2, dim=dim) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim=dim)


def context(**more: Any) -> LayerContext:
    return LayerContext(Phase.TRAIN, key=torch.tensor(7), **more)


def local_starts(cp: ContextParallel, starts: torch.Tensor | None) -> torch.Tensor | None:
    return None if starts is None else cp.local(starts)


# Documents that cross borders of chunks, begin in a second chunk, are one token, or padding that fills a rank's chunk.
STARTS = rows([[5, 14, 5], [1, 9, 2, 12]]).cpu()


# ---- which tokens are where ----------------------------------------------------------------------------------------


def test_a_rank_has_an_early_and_a_late_chunk() -> None:
    row = torch.arange(12)
    assert [ContextParallel(3, rank).local(row).tolist() for rank in range(3)] == [
        [0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7],
    ]  # fmt: skip
    for size in (2, 3, 4, 6):
        parts = [ContextParallel(size, rank).local(torch.arange(24)[None]) for rank in range(size)]
        assert torch.equal(whole_of(parts), torch.arange(24)[None])
        work = [sum(ContextParallel(size, rank).local(torch.arange(1, 25)).tolist()) for rank in range(size)]
        assert len(set(work)) == 1, "a causal row is as much work on every rank"
        assert [ContextParallel(size, r).positions(24 // size).tolist() for r in range(size)] == [p[0].tolist() for p in parts]
    assert ContextParallel(2, 1).tokens(2, 4).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    for row_length in (10, 0, 6):
        with pytest.raises(UsageError, match=rf"{row_length} tokens \(data.seq_len\) cannot be cut into 4 .* parallel.cp 2"):
            ContextParallel(2, 0).runs(row_length)


def test_rows_are_put_together_and_sums_taken_apart() -> None:
    """What one rank sends comes to its place; gradients of all ranks are added."""
    x = torch.randn(2, ROW, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def work(cp: Threads) -> tuple[torch.Tensor, torch.Tensor]:
        mine = cp.local(x.movedim(1, -1)).movedim(-1, 1)
        whole = cp.whole(mine, context(), "a")
        return whole, cp.part_of_sum(whole * (cp.rank + 1), context(), "a")

    for size in (2, 3, 4):
        found = ranks_of(size, work)
        assert all(same_bits(whole, x) for whole, _ in found)
        total = size * (size + 1) // 2
        torch.testing.assert_close(whole_of([part for _, part in found]), x * total, rtol=1e-14, atol=0)


# ---- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
def test_masked_attention(starts: torch.Tensor | None, window: int | None) -> None:
    """Float64, on explicit masks: result and gradient of one process."""
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(2, ROW, 2, 4, 6, generator=generator, dtype=torch.float64)
    dy = torch.randn(2, ROW, 2, 2, 6, generator=generator, dtype=torch.float64)
    leaf = qkv.clone().requires_grad_()
    want = attention(leaf, torch.zeros(2, ROW, dtype=torch.int32) if starts is None else starts, window)
    want.backward(dy)
    assert leaf.grad is not None

    def work(cp: Threads) -> tuple[torch.Tensor, torch.Tensor]:
        library = ContextAttention(cp, "a", context(starts=local_starts(cp, starts)), window)
        mine, wanted = (cp.local(x.movedim(1, -1)).movedim(-1, 1) for x in (qkv, dy))
        y, lse = library.forward(mine)
        first, again = (library.backward(mine, y, lse, wanted) for _ in range(2))
        assert same_bits(first, again)
        return y, first

    for size in (2, 3, 4, 12):
        found = ranks_of(size, work)
        torch.testing.assert_close(whole_of([y for y, _ in found]), want.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(whole_of([dqkv for _, dqkv in found]), leaf.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("kind", "gathers"), [("F", 2), ("I", 1)])
def test_what_i_runs_again_is_gathered_once(kind: str, gathers: int) -> None:
    """F leaves nothing gathered behind; a forward in I does, for the backward right after it and no other."""
    qkv = torch.randn(2, ROW, 1, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def work(cp: Threads) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        about = context(scope=SimpleNamespace(kind=kind))
        library, mine = ContextAttention(cp, "a", about), cp.local(qkv.movedim(1, -1)).movedim(-1, 1)
        y, lse = library.forward(mine)
        first = library.backward(mine, y, lse, torch.ones_like(y))
        told = list(cp.told)
        return told, first, library.backward(mine, y, lse, torch.ones_like(y))

    for told, first, again in ranks_of(2, work):
        assert told == [*["a.gather"] * gathers, "a.scatter"] and same_bits(first, again)


LENGTHS = [[50, 1, 60, 17], [3, 90, 35]]


@pytest.mark.parametrize(
    ("lengths", "window", "size"),
    [(LENGTHS, None, 2), ([[128], [128]], None, 2), (LENGTHS, 40, 2), ([[128], [128]], 23, 4)],
)
def test_the_kernels_of_two_runs(lengths: list[list[int]], window: int | None, size: int) -> None:
    """Queries of two runs of places against keys of the whole row, chunks smaller and larger than a block: in float32 within a
    hundred roundings of masked attention in float64, and twice the same bits. The dk and dv of the ranks are parts of a sum."""
    from qeffect_lm.kernels import document_attention as kernel

    starts = rows(lengths)
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(2, 128, 1, 4, 16, generator=generator).to(DEVICE)
    dy = torch.randn(2, 128, 1, 2, 16, generator=generator).to(DEVICE)
    leaf = qkv.double().requires_grad_()
    want = attention(leaf, starts, window)
    (wanted,) = torch.autograd.grad(want, leaf, dy.double())
    total = torch.zeros_like(qkv[:, :, :, -2:])
    for rank in range(size):
        cp = ContextParallel(size, rank)
        places = cp.positions(128 // size, qkv.device)
        mine, kv, first = qkv[:, places].contiguous(), qkv[:, :, :, -2:].contiguous(), starts[:, places].contiguous()
        run, second = cp.runs(128)
        queries = kernel.Queries(64 // size, run.start, second.start - 64 // size)
        q = mine[:, :, :, :-2]
        y, lse = kernel.forward(q, kv, first, queries, window)
        made = []
        for _ in range(2):
            dqkv, dkv = torch.empty_like(mine), torch.empty_like(kv)
            kernel.backward(q, kv, first, queries, window, y, lse, dy[:, places], dqkv[:, :, :, :-2], dkv)
            made.append((dqkv[:, :, :, :-2].clone(), dkv))
        assert same_bits(made[0][0], made[1][0]) and same_bits(made[0][1], made[1][1])
        torch.testing.assert_close(y.double(), want.detach()[:, places], rtol=0, atol=1e-5 * float(want.detach().abs().max()))
        bound = 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(made[0][0].double(), wanted[:, places][:, :, :, :-2], rtol=0, atol=bound)
        total += made[0][1]
    torch.testing.assert_close(total.double(), wanted[:, :, :, -2:], rtol=0, atol=2 * bound)


@dataclass(frozen=True)
class Told(ContextParallel):
    """A rank whose peers' tensors are given beforehand, and whose part of a sum is kept (the interpreter knows no threads)."""

    parts: tuple[torch.Tensor, ...] = ()
    summands: list[torch.Tensor] = field(default_factory=list, compare=False)

    def gather(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        assert same_bits(x, self.parts[self.rank])
        return torch.cat(self.parts)

    def scatter_sum(self, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
        self.summands.append(x.clone())
        return x.chunk(self.size)[self.rank].clone()


def test_attention_by_kernels_is_that_by_masks() -> None:
    """The library on either path, results, gradients and parts of sums: within roundings of float32."""
    generator = torch.Generator().manual_seed(2)
    qkv, dy = (torch.randn(2, ROW, 1, parts, 16, generator=generator).to(DEVICE) for parts in (4, 2))
    places = [ContextParallel(2, rank).positions(ROW // 2, qkv.device) for rank in range(2)]
    keys = tuple(qkv[:, mine, :, -2:].contiguous() for mine in places)

    def made(rank: int) -> list[torch.Tensor]:
        cp = Told(2, rank, parts=keys)
        library = ContextAttention(cp, "a", context(starts=STARTS.to(DEVICE)[:, places[rank]].contiguous()))
        mine = qkv[:, places[rank]]
        y, lse = library.forward(mine)
        assert (lse.numel() > 0) is kernels.usable(mine)
        return [y, library.backward(mine, y, lse, dy[:, places[rank]]), *cp.summands]

    for rank in range(2):
        with reference():
            expected = made(rank)
        assert len(expected) == 3
        for got, want in zip(made(rank), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


ROPES = {
    "plain": Rope(8, 1e4),
    "none": None,
    "dynamic": Rope(8, 1e4, RopeScaling("dynamic", factor=2.0), max_position_embeddings=16),
    "longrope": Rope(
        8, 1e4,
        RopeScaling(
            "longrope", factor=2.0, original_max_position_embeddings=16, short_factor=(1.0, 1.0, 1.0, 1.0),
            long_factor=(1.0, 2.0, 3.0, 4.0),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
@pytest.mark.parametrize("scaling", ROPES)
def test_positions_are_those_of_the_whole_row(scaling: str, starts: torch.Tensor | None) -> None:
    """Rotation tables of a rank: the rows of one process's, at the frequencies of the whole length."""
    made: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 8, "max_positions": ROW, "rope": ROPES[scaling]}
    none: Any = None
    one = Attention("a", none, none, **made)
    whole = one.training_tables(ROW, context(starts=starts))
    for rank in range(3):
        cp = ContextParallel(3, rank)
        part = Attention("a", none, none, cp=cp, **made).training_tables(ROW // 3, context(starts=local_starts(cp, starts)))
        for table, mine in zip(whole, part, strict=True):
            wide = table.view(-1, ROW, 4)[:, cp.positions(ROW // 3)]
            assert torch.equal(mine, wide.reshape(-1, 4))


# ---- dropout and learned positions ---------------------------------------------------------------------------------


def test_a_rank_draws_its_part_of_the_mask() -> None:
    """Alone, and where tokens are cut once more (sequence parallelism): the masks of one process, bit for bit."""
    x = torch.ones(2, ROW, 5)
    whole = KeyedDropout("drop", 0.5)(x, context())
    for size in (2, 3):
        parts = []
        for rank in range(size):
            cp = ContextParallel(size, rank)
            mine = KeyedDropout("drop", 0.5, cp=cp)(x[:, : ROW // size], context())
            grid, flat = (2, ROW // size), x[:, : ROW // size].reshape(-1, 5)
            cut = [KeyedDropout("drop", 0.5, t, cp)(part, context(grid=grid)) for t, part in enumerate(flat.chunk(4))]
            assert same_bits(torch.cat(cut).view_as(mine), mine)
            parts.append(mine)
        assert same_bits(whole_of(parts), whole) and not torch.equal(parts[0], parts[1])


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
def test_learned_positions_of_a_part(starts: torch.Tensor | None) -> None:
    x = torch.randn(2, ROW, 3, generator=torch.Generator().manual_seed(1))
    whole = LearnedPositions("p", ROW, 3)
    torch.nn.init.normal_(whole.weight)
    expected = whole(x, context(starts=starts))
    for rank in range(3):
        cp = ContextParallel(3, rank)
        about: dict[str, Any] = {"starts": local_starts(cp, starts)}
        here = cp.local(x.movedim(1, -1)).movedim(-1, 1)
        wanted = cp.local(expected.movedim(1, -1)).movedim(-1, 1)
        part = LearnedPositions("p", ROW, 3, cp=cp)
        part.weight.data = whole.weight.data
        assert torch.equal(part(here, context(**about)), wanted)
        for t in range(2):  # sequence parallelism beside it
            cut = LearnedPositions("p", ROW, 3, before=t, cp=cp)
            cut.weight.data = whole.weight.data
            mine = slice(8 * t, 8 * t + 8)
            grid = context(grid=(2, ROW // 3), **about)
            assert torch.equal(cut(here.reshape(-1, 3)[mine], grid), wanted.reshape(-1, 3)[mine])
        with pytest.raises(ValueError, match="position 48 is past the table of 24"):
            part(x[:, :16], context())


# ---- models --------------------------------------------------------------------------------------------------------


def test_a_part_that_does_not_know_of_parts_is_refused() -> None:
    class Own:
        parallel = True

    model = build_model(config(), None, torch.float32)
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    with pytest.raises(UsageError, match="parallel.cp 2: Own does not say that it knows of sequences cut over ranks"):
        Decoder(**{**fields, "attention": Own(), "cp": ContextParallel(2)})
    assert Decoder(**{**fields, "mlp": Own(), "cp": ContextParallel(2)}).cp is not None
    chunk = build_model(config(), None, torch.float32, cp=ContextParallel(2)).meta_chunk(0, [4])
    assert len(split_layers(chunk)) > 8 and len(direct_layers(chunk)) > 8

"""Matrix products alone, by shape: what ``tools.plan`` knows a layer's products by where tensor parallelism makes them narrow.

As in :mod:`tools.benchmarks.kernels`: captured over rotating random inputs into one CUDA graph, replays timed with events.

    F    [tokens, out]  in bfloat16  from E4M3 [tokens, in] and E4M3 [out, in], fast accumulation
    I    [tokens, in]   in bfloat16  from E5M2 [tokens, out] and E4M3 [in, out]
    W    [out, in]      in float32, added in place, from E5M2 [out, tokens] and E4M3 [in, tokens]

In bfloat16 the same products of the head; and of all experts of a layer at once, rows in equal parts, in FP8 and in bfloat16,
and as routing may deal them (drawn at random with equal chances), in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from qeffect_lm.fp8.grouped import Groups, Matrices, Rows, Scales, accumulate_grouped_mm, addresses, grouped_mm, quantise_groups
from qeffect_lm.fp8.quantise import E4M3, E5M2, Format, quantise
from qeffect_lm.kernels.cublaslt import CublasLt
from tools.benchmarks.kernels import new, scalar, time_us

TOKENS = (512, 1024, 2048, 4096, 8192)
WIDTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_WIDTHS, HEAD_OUT = (1024, 4096, 8192), (4096, 16384, 65536)
ROWS, EXPERTS, EXPERT_SHAPES = (4096, 16384), (2, 8, 16), ((2048, 4096), (4096, 2048), (8192, 4096), (16384, 4096))
ROTATED, REPLAYS = 96 << 20, 3  # there are hundreds of products
DRAWN = (4096, 8, 5632, 2048), (4096, 8, 2048, 2816), (8192, 8, 8192, 4096), (65536, 8, 5632, 2048)  # rows, experts, out, in
KINDS = "fp8", "bf16", "experts", "experts-bf16", "experts-drawn"
Made = Callable[[], object]


def measure(say: Callable[[str], object], kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Everything of ``kinds``, as ``{"rows": [{"kind", "work", "tokens", "out", "in", "experts", "us", "tflop_s"}]}``."""
    library = CublasLt("cuda")
    every = dict(zip(KINDS, (_fp8(library), _bf16(library), _experts(True), _experts(False), _drawn()), strict=True))
    rows: list[dict[str, Any]] = []
    for kind, pieces in ((kind, every[kind]) for kind in kinds):
        before = len(rows)
        for about, size, made in pieces:
            us = time_us(made, size, ROTATED, REPLAYS)
            flop = 2 * about["tokens"] * about["out"] * about["in"]
            rows.append({"kind": kind, **about, "us": round(us, 3), "tflop_s": round(flop / us / 1e6, 1)})
            torch.cuda.empty_cache()
        say(f"{kind}: {len(rows) - before} products")
    return {"rows": rows}


def table(report: dict[str, Any]) -> str:
    """One line a product."""
    lines = [f"{'kind':12} {'work':4} {'experts':>7} {'tokens':>7} {'out':>7} {'in':>7} {'us':>9} {'TFLOP/s':>8}"]
    for row in report["rows"]:
        shape = f"{row.get('experts', 1):>7} {row['tokens']:>7} {row['out']:>7} {row['in']:>7}"
        lines.append(f"{row['kind']:12} {row['work']:4} {shape} {row['us']:>9.1f} {row['tflop_s']:>8.0f}")
    return "\n".join(lines)


_Piece = tuple[dict[str, Any], int, Callable[[], Made]]


def _about(work: str, tokens: int, out: int, inner: int, **more: int) -> dict[str, Any]:
    return {"work": work, "tokens": tokens, "out": out, "in": inner, **more}


def _fp8(library: CublasLt) -> Iterator[_Piece]:
    for tokens in TOKENS:
        for n in WIDTHS:
            for k in WIDTHS:
                size = tokens * k + n * k
                yield _about("F", tokens, n, k), size, _product(library, (tokens, n, k), E4M3, fast_accumulation=True)
                yield _about("I", tokens, n, k), tokens * n + n * k, _product(library, (tokens, k, n), E5M2)
                yield _about("W", tokens, n, k), tokens * (n + k), _product(library, (n, k, tokens), E5M2, beta=1)


def _operand(rows: int, k: int, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    made = quantise(new(rows, k), scalar(20.0), fmt, columns=False)
    assert made.rows is not None
    return made.rows, made.scale_inv


def _product(library: CublasLt, shape: tuple[int, int, int], fmt: Format, **options: Any) -> Callable[[], Made]:
    """``[m, k] x [n, k]``; with ``beta`` 1 added into float32."""
    m, n, k = shape

    def made() -> Made:
        (a, a_scale), (b, b_scale) = _operand(m, k, fmt), _operand(n, k, E4M3)
        out = torch.zeros(m, n, dtype=torch.float32 if options.get("beta") else torch.bfloat16, device="cuda")
        return lambda: library.matmul(out, a, b, a_scale_inv=a_scale, b_scale_inv=b_scale, **options)

    return made


def _bf16(library: CublasLt) -> Iterator[_Piece]:
    def forward(m: int, n: int, k: int) -> Made:
        a, b = new(m, k), new(n, k).t()
        return lambda: torch.mm(a, b)

    def weight(n: int, k: int, m: int) -> Made:
        a, b, out = new(m, n).t(), new(m, k).t(), torch.zeros(n, k, device="cuda")
        return lambda: library.matmul(out, a, b, beta=1)

    for m in TOKENS:
        for n in HEAD_OUT:
            for k in HEAD_WIDTHS:
                yield _about("F", m, n, k), 2 * (m * k + n * k), partial(forward, m, n, k)
                yield _about("I", m, n, k), 2 * (m * n + n * k), partial(forward, m, k, n)
                yield _about("W", m, n, k), 2 * m * (n + k), partial(weight, n, k, m)


def _experts(fp8: bool) -> Iterator[_Piece]:
    """Rows of a layer's experts in equal parts."""
    for m in ROWS:
        for e in EXPERTS:
            for n, k in EXPERT_SHAPES:
                size, layer = (m * k + e * n * k) * (1 if fp8 else 2), _Layer(m, e, n, k)
                for work, name in zip("FIW", ("forward", "input_grad", "weight_grad"), strict=True):
                    yield _about(work, m, n, k, experts=e), size, getattr(layer, name if fp8 else f"{name}_bf16")


def _drawn() -> Iterator[_Piece]:
    for m, e, n, k in DRAWN:
        layer = _Layer(m, e, n, k, drawn=True)
        for work, made in zip("FIW", (layer.forward, layer.input_grad, layer.weight_grad), strict=True):
            yield _about(work, m, n, k, experts=e), m * k + e * n * k, made


class _Layer:
    """One linear of ``experts``, ``rows`` rows in equal parts, or drawn (the same ones every time)."""

    def __init__(self, rows: int, experts: int, out: int, inner: int, *, drawn: bool = False) -> None:
        self.rows, self.experts, self.out, self.inner, self.drawn = rows, experts, out, inner, drawn

    @property
    def groups(self) -> Groups:
        counts = torch.full((self.experts,), self.rows // self.experts)
        if self.drawn:
            generator = torch.Generator().manual_seed(1)
            numbers = torch.multinomial(torch.ones(self.experts), self.rows, replacement=True, generator=generator)
            counts = numbers.bincount(minlength=self.experts)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().cuda()
        return Groups(offsets, torch.arange(self.experts).repeat_interleave(counts).cuda())

    def _matrices(self, made: Callable[[], torch.Tensor]) -> Matrices:
        tensors = tuple(made() for _ in range(self.experts))
        return Matrices(tensors, addresses(tensors))

    def _product(self, out: int, inner: int, fmt: Format) -> Made:
        groups, scales = self.groups, self._matrices(lambda: scalar(0.05))
        x = self._quantised(inner, fmt, columns=False)
        w = self._matrices(lambda: _operand(out, inner, E4M3)[0])
        fast = fmt is E4M3
        return lambda: grouped_mm(x, w, groups, torch.bfloat16, weight_scale_inv=scales, fast_accumulation=fast)

    def _quantised(self, width: int, fmt: Format, *, columns: bool) -> Rows:
        scales = Scales.of(torch.full((self.experts,), 20.0, device="cuda"))
        return quantise_groups(new(self.rows, width), scales, fmt, self.groups, rows=not columns, columns=columns)

    def forward(self) -> Made:
        return self._product(self.out, self.inner, E4M3)

    def input_grad(self) -> Made:
        return self._product(self.inner, self.out, E5M2)

    def weight_grad(self) -> Made:
        dy, x = self._quantised(self.out, E5M2, columns=True), self._quantised(self.inner, E4M3, columns=True)
        return self._accumulated(dy, x)

    def _accumulated(self, dy: Rows, x: Rows) -> Made:
        groups, grads = self.groups, self._matrices(lambda: torch.zeros(self.out, self.inner, device="cuda"))
        return lambda: accumulate_grouped_mm(grads, dy, x, groups, 1)

    def forward_bf16(self) -> Made:
        x, w, groups = Rows(new(self.rows, self.inner)), self._matrices(lambda: new(self.out, self.inner)), self.groups
        return lambda: grouped_mm(x, w, groups, torch.bfloat16)

    def input_grad_bf16(self) -> Made:
        dy, w, groups = Rows(new(self.rows, self.out)), self._matrices(lambda: new(self.out, self.inner)).t, self.groups
        return lambda: grouped_mm(dy, w, groups, torch.bfloat16)

    def weight_grad_bf16(self) -> Made:
        return self._accumulated(Rows(new(self.rows, self.out)), Rows(new(self.rows, self.inner)))

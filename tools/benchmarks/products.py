"""Matrix products alone, by shape: what ``tools.plan`` knows a layer's products by where tensor parallelism makes them narrow.

As in :mod:`tools.benchmarks.kernels`: captured over rotating random inputs into one CUDA graph, replays timed with events.

    F    [tokens, out]  in bfloat16  from E4M3 [tokens, in] and E4M3 [out, in], fast accumulation
    I    [tokens, in]   in bfloat16  from E5M2 [tokens, out] and E4M3 [in, out]
    W    [out, in]      in float32, added in place, from E5M2 [out, tokens] and E4M3 [in, tokens]

In bfloat16 the same products of the head, and of all experts of a layer at once (rows in equal parts, FP8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from qeffect_lm.fp8.grouped import Groups, Matrices, Rows, accumulate_grouped_mm, addresses, grouped_mm, quantise_groups
from qeffect_lm.fp8.quantise import E4M3, E5M2, Format, quantise
from qeffect_lm.kernels.cublaslt import CublasLt
from tools.benchmarks.kernels import new, scalar, time_us

TOKENS = (512, 1024, 2048, 4096, 8192)
WIDTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_WIDTHS, HEAD_OUT = (1024, 4096, 8192), (4096, 16384, 65536)
ROWS, EXPERTS, EXPERT_SHAPES = (4096, 16384), (2, 8, 16), ((2048, 4096), (4096, 2048), (8192, 4096), (16384, 4096))
ROTATED, REPLAYS = 96 << 20, 3  # there are hundreds of products
Made = Callable[[], object]


def measure(say: Callable[[str], object]) -> dict[str, Any]:
    """Everything, as ``{"rows": [{"kind", "work", "tokens", "out", "in", "experts", "us", "tflop_s"}]}``."""
    library = CublasLt("cuda")
    rows: list[dict[str, Any]] = []
    for kind, pieces in (("fp8", _fp8(library)), ("bf16", _bf16(library)), ("experts", _experts())):
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
    lines = [f"{'kind':8} {'work':4} {'experts':>7} {'tokens':>7} {'out':>7} {'in':>7} {'us':>9} {'TFLOP/s':>8}"]
    for row in report["rows"]:
        shape = f"{row.get('experts', 1):>7} {row['tokens']:>7} {row['out']:>7} {row['in']:>7}"
        lines.append(f"{row['kind']:8} {row['work']:4} {shape} {row['us']:>9.1f} {row['tflop_s']:>8.0f}")
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


def _experts() -> Iterator[_Piece]:
    """Rows of a layer's experts in equal parts."""

    def groups(rows: int, count: int) -> Groups:
        offsets = torch.arange(count + 1, dtype=torch.int32, device="cuda") * (rows // count)
        return Groups(offsets, torch.arange(count, device="cuda").repeat_interleave(rows // count))

    def operand(rows: int, k: int, count: int, fmt: Format) -> Rows:
        return Rows(_operand(rows, k, fmt)[0], torch.full((count,), 0.05, device="cuda"))

    def weights(n: int, k: int, count: int) -> tuple[Matrices, Matrices]:
        tensors = [_operand(n, k, E4M3)[0] for _ in range(count)]
        scales = [scalar(0.05) for _ in range(count)]
        return Matrices(tuple(tensors), addresses(tensors)), Matrices(tuple(scales), addresses(scales))

    def forward(rows: int, n: int, k: int, count: int, fmt: Format) -> Made:
        x, (w, scales), of = operand(rows, k, count, fmt), weights(n, k, count), groups(rows, count)
        fast = fmt is E4M3
        return lambda: grouped_mm(x, w, of, torch.bfloat16, weight_scale_inv=scales, fast_accumulation=fast)

    def weight(rows: int, n: int, k: int, count: int) -> Made:
        of, scale = groups(rows, count), torch.full((count,), 20.0, device="cuda")
        dy, x = (quantise_groups(new(rows, w), scale, fmt, of, rows=False, columns=True) for w, fmt in ((n, E5M2), (k, E4M3)))
        outs = [torch.zeros(n, k, device="cuda") for _ in range(count)]
        grads = Matrices(tuple(outs), addresses(outs))
        return lambda: accumulate_grouped_mm(grads, dy, x, of, 1)

    for m in ROWS:
        for e in EXPERTS:
            for n, k in EXPERT_SHAPES:
                size = m * k + e * n * k
                f, i = (m, n, k, e, E4M3), (m, k, n, e, E5M2)
                yield _about("F", m, n, k, experts=e), size, partial(forward, *f)
                yield _about("I", m, n, k, experts=e), size, partial(forward, *i)
                yield _about("W", m, n, k, experts=e), size, partial(weight, m, n, k, e)

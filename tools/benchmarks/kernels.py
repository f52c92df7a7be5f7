"""The GPU kernels and products of one decoder layer, timed alone.

Each is captured many times over rotating inputs (together larger than the cache) into one CUDA graph, and the graph's replays
are timed with events: neither launches nor a warm cache are in the figures. Bytes are the fewest that the work needs, each
input read once and each output written once; GB/s of a device copy stand beside them. Data are random: zeros run faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from qeffect_lm.fp8.quantise import E4M3, E5M2, Quantised, quantise
from qeffect_lm.kernels import loss, norm, rope, swiglu, transpose
from qeffect_lm.kernels.cublaslt import CublasLt
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.kernels.weights import Weight, WeightRefresh

HIDDEN = TOKENS = (1024, 2048, 4096)
VOCAB, HEAD_DIM = 32000, 128
_ROTATED_BYTES = 192 << 20  # of the inputs that take turns: several times the L2
_REPLAYS = 7


class Bench:
    """Rows of one (hidden, tokens)."""

    def __init__(self, hidden: int, tokens: int, library: CublasLt, copy_gb_s: float) -> None:
        self.hidden, self.tokens, self.library, self.copy_gb_s = hidden, tokens, library, copy_gb_s
        self.rows: list[dict[str, Any]] = []

    def moved(self, name: str, size: int, made: Callable[[], Callable[[], object]]) -> None:
        """A memory-bound kernel that moves ``size`` bytes; ``made`` makes a call over inputs of its own."""
        us = time_us(made, size)
        rate = size / us / 1e3
        self._row(name, us, gb_s=rate, of_copy=rate / self.copy_gb_s)

    def multiplied(self, name: str, shape: tuple[int, int, int], made: Callable[[], Callable[[], object]]) -> None:
        """A product ``[m, k] x [n, k]``."""
        m, n, k = shape
        us = time_us(made, m * k + n * k)
        self._row(name, us, tflop_s=2 * m * n * k / us / 1e6)

    def _row(self, name: str, us: float, **rates: float) -> None:
        self.rows.append({"hidden": self.hidden, "tokens": self.tokens, "kernel": name, "us": us, **rates})


def measure() -> dict[str, Any]:
    """Everything, as ``{"copy_gb_s": …, "rows": […]}``."""
    library = CublasLt("cuda")
    copy = copy_rate()
    rows = []
    for hidden in HIDDEN:
        for tokens in TOKENS:
            bench = Bench(hidden, tokens, library, copy)
            quantising(bench)
            elementwise(bench)
            products(bench)
            rows += bench.rows
            torch.cuda.empty_cache()
    return {"copy_gb_s": copy, "rows": rows}


def copy_rate() -> float:
    """GB/s of a device copy, bytes read plus bytes written."""
    size = 1 << 30
    return 2 * size / time_us(lambda: _copy(size), 2 * size) / 1e3


def _copy(size: int) -> Callable[[], object]:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def time_us(
    made: Callable[[], Callable[[], object]], size: int, rotated: int = _ROTATED_BYTES, replays: int = _REPLAYS
) -> float:
    """Median microseconds of one call."""
    calls = [made() for _ in range(min(max(rotated // size, 2), 64))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 16 // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for call in calls * rounds:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (len(calls) * rounds))
    return statistics.median(times)


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device="cuda")


def outputs(m: int, k: int, fmt=E4M3, columns: bool = True) -> Outputs:
    places = {} if not columns else {"columns_out": torch.empty(k, m, dtype=fmt.dtype, device="cuda")}
    return Outputs(
        (m, k), scalar(20.0), fmt, rows=True, columns=columns, amax_out=scalar(-1.0),
        rows_out=torch.empty(m, k, dtype=fmt.dtype, device="cuda"), scale_inv_out=scalar(0.0), **places,
    )  # fmt: skip


def quantising(bench: Bench) -> None:
    """What writes FP8."""
    from qeffect_lm.kernels import quantise as kernel

    m, h, f = bench.tokens, bench.hidden, 4 * bench.hidden
    weight = new(h)

    def plain(columns: bool) -> Callable[[], object]:
        x, places = new(m, h), outputs(m, h, columns=columns)
        return lambda: kernel.quantise(x, places)

    def normed() -> Callable[[], object]:
        x, places = new(m, h), outputs(m, h)
        return lambda: norm.quantise(x, weight, norm.inverse_rms(x, 1e-5), places)

    def activation() -> Callable[[], object]:
        x, places = new(m, 2 * f), outputs(m, f, columns=False)
        return lambda: swiglu.quantise(x, places)

    def activation_back() -> Callable[[], object]:
        x, dy, places = new(m, 2 * f), new(m, f), outputs(m, 2 * f, E5M2)
        beside = swiglu.Activation.like(x, scalar(1.0))
        return lambda: swiglu.backward_quantise(x, dy, places, beside)

    def refresh() -> Callable[[], object]:
        weights = []
        for out_features, in_features in ((3 * h, h), (h, h), (2 * f, h), (h, f)):
            rows = torch.empty(out_features, in_features, dtype=E4M3.dtype, device="cuda")
            columns = torch.empty(in_features, out_features, dtype=E4M3.dtype, device="cuda")
            master = new(out_features, in_features, dtype=torch.float32)
            weights.append(Weight(master, rows, columns, scalar(9.0), scalar(-1.0), scalar(1.0)))
        together = WeightRefresh(weights)
        keep = weights  # the refresh itself holds addresses only

        def run() -> object:
            together.run()
            return keep

        return run

    def turned() -> Callable[[], object]:
        made = quantise(new(m, h), scalar(20.0), E4M3)
        assert made.rows is not None and made.columns is not None
        rows, columns = made.rows, made.columns
        return lambda: transpose.transpose(rows, columns)

    bench.moved("transpose", 2 * m * h, turned)
    bench.moved("quantise, both layouts", 4 * m * h, lambda: plain(True))
    bench.moved("quantise, rows", 3 * m * h, lambda: plain(False))
    bench.moved("norm + quantise", 4 * m * h, normed)
    bench.moved("swiglu + quantise, rows", 5 * m * f, activation)
    bench.moved("swiglu back + quantise", 11 * m * f, activation_back)
    if bench.tokens == TOKENS[0]:
        bench.moved("weights of a layer", 6 * (4 * h * h + 3 * h * f), refresh)


def elementwise(bench: Bench) -> None:
    """What stays in 16 bits."""
    m, h = bench.tokens, bench.hidden
    heads = h // HEAD_DIM
    weight = new(h)
    cos, sin = torch.rand(m, HEAD_DIM // 2, device="cuda"), torch.rand(m, HEAD_DIM // 2, device="cuda")

    def norm_back() -> Callable[[], object]:
        x, dy, residual, dweight = new(m, h), new(m, h), new(m, h), torch.zeros(h, device="cuda")
        rstd = norm.inverse_rms(x, 1e-5)
        return lambda: norm.backward(x, weight, rstd, dy, residual, (dweight, 1))

    def rotate() -> Callable[[], object]:
        qkv = new(1, m, heads, 3, HEAD_DIM)
        return lambda: rope.rotate_(qkv, cos, sin)

    def gather() -> Callable[[], object]:
        dq, dk, dv = (new(1, m, heads, HEAD_DIM).transpose(1, 2) for _ in range(3))
        return lambda: rope.gather(dq[:, :, None], dk, dv, cos, sin)

    def gather_quantise() -> Callable[[], object]:
        dq, dk, dv = (new(1, m, heads, HEAD_DIM).transpose(1, 2) for _ in range(3))
        places = outputs(m, 3 * h, E5M2)
        return lambda: rope.backward_quantise(dq[:, :, None], dk, dv, cos, sin, places)

    targets, mask = torch.randint(0, VOCAB, (m,), device="cuda"), torch.ones(m, device="cuda")

    def loss_forward() -> Callable[[], object]:
        logits = new(m, VOCAB)
        return lambda: loss.forward(logits, targets, mask)

    def loss_backward() -> Callable[[], object]:
        logits = new(m, VOCAB)
        _, lse = loss.forward(logits, targets, mask)
        one = scalar(1.0)
        return lambda: loss.backward_(logits, targets, mask, lse, one, one)

    bench.moved("norm back, residual", 8 * m * h, norm_back)
    bench.moved("rotary, in place", 8 * m * h, rotate)
    bench.moved("rotary back, fused", 12 * m * h, gather)
    bench.moved("rotary back + quantise", 12 * m * h, gather_quantise)
    if bench.hidden == HIDDEN[0]:
        bench.moved(f"cross-entropy, {VOCAB}", 2 * m * VOCAB, loss_forward)
        bench.moved(f"cross-entropy back, {VOCAB}", 4 * m * VOCAB, loss_backward)


def products(bench: Bench) -> None:
    """F, I and W of the gate_up linear ``[8 hidden, hidden]``, and bfloat16's beside them."""
    m, h, n = bench.tokens, bench.hidden, 8 * bench.hidden
    library = bench.library

    def fp8(rows: int, k: int, fmt=E4M3) -> Quantised:
        return quantise(new(rows, k), scalar(20.0), fmt, columns=False)

    def product(shape, fmt, out_dtype, **options) -> Callable[[], object]:
        a, b = fp8(shape[0], shape[2], fmt), fp8(shape[1], shape[2])
        out = torch.zeros(shape[0], shape[1], dtype=out_dtype, device="cuda")
        assert a.rows is not None and b.rows is not None
        a_rows, b_rows = a.rows, b.rows
        return lambda: library.matmul(out, a_rows, b_rows, a_scale_inv=a.scale_inv, b_scale_inv=b.scale_inv, **options)

    def torch_product(shape) -> Callable[[], object]:
        a, b = fp8(shape[0], shape[2]), fp8(shape[1], shape[2])
        assert a.rows is not None and b.rows is not None
        a_rows, b_columns = a.rows, b.rows.t()
        scales = {"scale_a": a.scale_inv, "scale_b": b.scale_inv}
        return lambda: torch._scaled_mm(a_rows, b_columns, out_dtype=torch.bfloat16, use_fast_accum=True, **scales)

    def wide_product(shape) -> Callable[[], object]:
        a, b = new(shape[0], shape[2]), new(shape[1], shape[2]).t()
        return lambda: torch.mm(a, b)

    def wide_accumulated(shape) -> Callable[[], object]:
        a, b = new(shape[2], shape[0]).t(), new(shape[2], shape[1]).t()
        out = torch.zeros(shape[0], shape[1], device="cuda")
        return lambda: library.matmul(out, a, b, beta=1)

    forward, back, weight = (m, n, h), (m, h, n), (n, h, m)
    bench.multiplied("F", forward, lambda: product(forward, E4M3, torch.bfloat16, fast_accumulation=True))
    bench.multiplied("F, torch._scaled_mm", forward, lambda: torch_product(forward))
    bench.multiplied("F, bfloat16 torch.mm", forward, lambda: wide_product(forward))
    bench.multiplied("I", back, lambda: product(back, E5M2, torch.bfloat16))
    bench.multiplied("W, beta 0", weight, lambda: product(weight, E5M2, torch.float32))
    bench.multiplied("W, beta 1", weight, lambda: product(weight, E5M2, torch.float32, beta=1))
    bench.multiplied("W, bfloat16, beta 1", weight, lambda: wide_accumulated(weight))


def table(report: dict[str, Any]) -> str:
    """One line per kernel and (hidden, tokens)."""
    lines = [f"device copy: {report['copy_gb_s']:.0f} GB/s", ""]
    lines.append(f"{'hidden':>6} {'tokens':>6}  {'kernel':28} {'us':>9} {'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8}")
    for row in report["rows"]:
        moved = f"{row['gb_s']:>7.0f} {row['of_copy']:>8.2f} {'':>8}" if "gb_s" in row else f"{'':>16} {row['tflop_s']:>8.0f}"
        lines.append(f"{row['hidden']:>6} {row['tokens']:>6}  {row['kernel']:28} {row['us']:>9.1f} {moved}")
    return "\n".join(lines)

"""Chooses kernel configurations by measuring them, for :mod:`qeffect_lm.kernels.tables`.

Per layer shape (hidden, MLP size, tokens of a microbatch): the algorithm of each product of F, I and W out of cuBLASLt's first
answers, the tiles of the quantising kernels, and the runs of a norm's backward. Every candidate has to give what the first one
gives (tiles: its bytes; products: nearly) and the same bytes again and again; the fastest one is taken if it saves more than
the noise. Times are those of :mod:`tools.benchmarks.kernels`: captured, inputs taking turns.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from qeffect_lm.errors import QEffectError
from qeffect_lm.fp8.quantise import E4M3, E5M2, quantise
from qeffect_lm.kernels import norm, rope, swiglu, tables
from qeffect_lm.kernels import quantise as quantise_kernel
from qeffect_lm.kernels.cublaslt import CublasLt
from tools.benchmarks.kernels import HEAD_DIM, VOCAB, new, outputs, scalar, time_us

SHAPES = ("1024:2816:1024", "2048:5632:2048", "4096:11264:2048", "4096:11264:4096")
PARTS = ("products", "tiles", "norm")
ANSWERS = 24  # of cuBLASLt's heuristic
GAIN = 0.985  # what a candidate's time may be of the first one's, to be worth a line in the table
REPEATS = 8

TILES = (  # the default first
    (64, 64, 8), (64, 64, 4), (32, 64, 4), (64, 32, 4), (32, 128, 8), (128, 32, 8), (128, 64, 8), (128, 64, 16), (64, 128, 16),
)  # fmt: skip
WHOLE_ROWS = tuple((rows, warps) for rows in (4, 8, 16, 32) for warps in (4, 8, 16, 32))  # of a norm in one launch
_ROWS = ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8))  # at a time, and warps
RUNS = tuple((runs, rows, warps) for runs in (128, 256, 512) for rows, warps in _ROWS)


@dataclass(frozen=True)
class Layer:
    """A layer's sizes."""

    hidden: int
    ffn: int
    tokens: int

    @classmethod
    def of(cls, text: str) -> Layer:
        """``hidden:ffn:tokens``; a ValueError for anything else."""
        hidden, ffn, tokens = (int(word) for word in text.split(":"))
        return cls(hidden, ffn, tokens)


@dataclass(frozen=True)
class Found:
    """A candidate's result: microseconds, and whether it agrees and repeats."""

    choice: Any
    us: float
    valid: bool = True


def chosen(found: list[Found]) -> Found | None:
    """The fastest valid candidate, if it saves more than the noise against the first one; None: keep the first."""
    best = min((one for one in found if one.valid), key=lambda one: one.us, default=None)
    return best if best is not None and best is not found[0] and best.us < GAIN * found[0].us else None


def refined(found: list[Found], timed: Callable[[Any, int], float]) -> list[Found]:
    """The first candidate and the three fastest valid ones measured again, more thoroughly; the others as they are."""
    fastest = sorted((place for place, one in enumerate(found) if one.valid), key=lambda place: found[place].us)[:3]
    again = {0, *fastest}
    return [replace(one, us=timed(one.choice, 3)) if place in again else one for place, one in enumerate(found)]


def tune(shapes: Iterable[Layer], parts: Iterable[str], say: Callable[[str], None]) -> dict[str, Any]:
    """The committed table with what was measured written over it."""
    table = copy.deepcopy(json.loads(tables.FILE.read_text()))
    parts = list(parts)
    library = CublasLt("cuda", {})
    for layer in shapes:
        say(f"hidden {layer.hidden}, MLP {layer.ffn}, {layer.tokens} tokens")
        if "products" in parts:
            device = torch.cuda.get_device_name()
            entry = _entry(table["products"], device, library.version)
            for name, algorithm in products(library, layer, say).items():
                _write(entry, name, algorithm)
        if "tiles" in parts:
            for kernel, shape, tile in tiles(layer, say):
                _write(table["tiles"].setdefault(kernel, {}), shape, tile)
        if "norm" in parts:
            _write(table["norm_rows"], *norm_rows(layer, say))
            _write(table["norm_backward"], *norms(layer, say))
    library.close()
    return table


def _entry(products: list[dict[str, Any]], device: str, version: int) -> dict[str, str]:
    for entry in products:
        if entry["device"] == device and entry["cublaslt"] == version:
            return entry["algorithms"]
    products.append({"device": device, "cublaslt": version, "algorithms": {}})
    return products[-1]["algorithms"]


def _write(held: dict[str, Any], name: str, choice: Any) -> None:
    """None means that the default is as good."""
    if choice is None:
        held.pop(name, None)
    else:
        held[name] = choice


# ---- products ----------------------------------------------------------------------------------------------


@dataclass
class Product:
    """Operands of one product and how it is made."""

    out: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    options: dict[str, Any]
    beta: int = 0

    def run(self, library: CublasLt) -> None:
        library.matmul(self.out, self.a, self.b, beta=self.beta, **self.options)


def products_of(layer: Layer) -> dict[str, Callable[[], Product]]:
    """Every product of F, I and W of a layer and of the head: a name and what makes fresh operands."""
    h, f, m = layer.hidden, layer.ffn, layer.tokens
    linears = {"qkv": (3 * h, h), "out": (h, h), "gate_up": (2 * f, h), "down": (h, f)}

    def fp8(rows: int, k: int, fmt: Any) -> Any:
        return quantise(new(rows, k), scalar(20.0), fmt, columns=False)

    def product(shape: tuple[int, int, int], fmt: Any, dtype: torch.dtype, beta: int, residual: bool, fast: bool) -> Product:
        a, b = fp8(shape[0], shape[2], fmt), fp8(shape[1], shape[2], E4M3)
        options: dict[str, Any] = {"a_scale_inv": a.scale_inv, "b_scale_inv": b.scale_inv, "fast_accumulation": fast}
        if residual:
            options["residual"] = new(shape[0], shape[1])
        return Product(torch.zeros(shape[0], shape[1], dtype=dtype, device="cuda"), a.rows, b.rows, options, beta)

    made: dict[str, Callable[[], Product]] = {}
    for name, (n, k) in linears.items():
        adds = name in ("out", "down")
        made[f"F {name}"] = partial(product, (m, n, k), E4M3, torch.bfloat16, 0, adds, True)
        made[f"I {name}"] = partial(product, (m, k, n), E5M2, torch.bfloat16, 0, False, False)
        made[f"W {name}"] = partial(product, (n, k, m), E5M2, torch.float32, 1, False, False)
    logits, dx = (torch.zeros(m, n, dtype=torch.bfloat16, device="cuda") for n in (VOCAB, h))
    made["F head"] = lambda: Product(logits, new(m, h), new(VOCAB, h), {})
    made["I head"] = lambda: Product(dx, new(m, VOCAB), new(VOCAB, h).t(), {})
    out = torch.zeros(VOCAB, h, device="cuda")
    made["W head"] = lambda: Product(out, new(m, VOCAB).t(), new(m, h).t(), {}, 1)
    return made


def products(library: CublasLt, layer: Layer, say: Callable[[str], None]) -> dict[str, str | None]:
    """Product name → the chosen algorithm in hex, None for the heuristic's first."""
    choices: dict[str, str | None] = {}
    for label, make in products_of(layer).items():
        one = make()
        fast = bool(one.options.get("fast_accumulation", False))
        name = tables.product_name(one.out, one.a, one.b, "residual" in one.options, fast)
        candidates = library.candidates(one.out, one.a, one.b, ANSWERS, **one.options)
        found = refined(*_measured(library, name, [c.algorithm for c in candidates], one, make))
        library.choose({})
        best = chosen(found)
        choices[name] = None if best is None else best.choice.hex()
        order = sorted(range(len(found)), key=lambda place: found[place].us)
        flop = 2 * one.a.shape[0] * one.a.shape[1] * one.b.shape[0]
        tops = ", ".join(f"#{p} {found[p].us:.1f}{'' if found[p].valid else ' (does not repeat)'}" for p in order[:4])
        taken = found[0] if best is None else best
        say(f"  {label:10} {name:60} first {found[0].us:7.1f} us; {tops}; taken {flop / taken.us / 1e6:.0f} TFLOP/s")
    return choices


def _measured(
    library: CublasLt, name: str, algorithms: list[bytes], one: Product, make: Callable[[], Product]
) -> tuple[list[Found], Callable[[bytes, int], float]]:
    """Each candidate's time, and whether it repeats and agrees with the heuristic's first; and what times one of them."""
    start = one.out.clone()

    def result() -> torch.Tensor:
        one.out.copy_(start)
        one.run(library)
        return one.out.clone()

    def timed(algorithm: bytes, times: int) -> float:
        library.choose({name: algorithm})
        return _time(lambda: partial(Product.run, make(), library), one.a.numel() + one.b.numel(), times)

    library.choose({})
    want = result()
    found = []
    for algorithm in algorithms:
        library.choose({name: algorithm})
        try:
            results = [result() for _ in range(REPEATS)]
            repeats = all(torch.equal(results[0], again) for again in results[1:])
            near = ((results[0].float() - want.float()).norm() <= 2e-2 * want.float().norm()).item()
            found.append(Found(algorithm, timed(algorithm, 1), repeats and near))
        except QEffectError:  # the check or the launch refuses what the heuristic offered
            found.append(Found(algorithm, float("inf"), False))
    return found, timed


def _time(made: Callable[[], Callable[[], object]], size: int, times: int) -> float:
    """The median of ``times`` measurements."""
    return statistics.median(time_us(made, size) for _ in range(times))


# ---- kernels -----------------------------------------------------------------------------------------------


def tiles(layer: Layer, say: Callable[[str], None]) -> Iterable[tuple[str, str, list[int] | None]]:
    """(kernel, shape, tile or None for the default) of every quantising kernel."""
    m, h, f = layer.tokens, layer.hidden, layer.ffn
    weight = new(h)
    heads = h // HEAD_DIM
    cos, sin = (torch.rand(m, HEAD_DIM // 2, device="cuda").bfloat16() for _ in range(2))

    def normed(places: Any) -> Callable[[], object]:
        x = new(m, h)
        rstd = norm.inverse_rms(x, 1e-5)
        return lambda: norm.quantise(x, weight, rstd, places)

    def plain(places: Any) -> Callable[[], object]:
        x = new(m, h)
        return lambda: quantise_kernel.quantise(x, places)

    def activation(places: Any) -> Callable[[], object]:
        x = new(m, 2 * f)
        return lambda: swiglu.quantise(x, places)

    def activation_back(places: Any) -> Callable[[], object]:
        x, dy = new(m, 2 * f), new(m, f)
        beside = swiglu.Activation.like(x, torch.ones((), device="cuda"))
        return lambda: swiglu.backward_quantise(x, dy, places, beside)

    def rope_back(places: Any) -> Callable[[], object]:
        dqkv = rope.heads(new(1, m, heads, 3, HEAD_DIM))
        return lambda: rope.backward_quantise(*dqkv, cos, sin, places)

    cases = (
        ("quantise", (m, h), partial(outputs, m, h, E5M2), 4 * m * h, plain),
        ("norm", (m, h), partial(outputs, m, h, E4M3), 4 * m * h, normed),
        ("swiglu", (m, f), partial(outputs, m, f, E4M3, columns=False), 5 * m * f, activation),
        ("swiglu_backward", (m, f), partial(outputs, m, 2 * f, E5M2), 11 * m * f, activation_back),
        ("rope_backward", (m, 3 * h), partial(outputs, m, 3 * h, E5M2), 12 * m * h, rope_back),
    )
    for kernel, key, places, size, make in cases:
        found = _tiles_of(make, places, size)
        yield kernel, f"{key[0]}x{key[1]}", _reported(f"{kernel} {key[0]}x{key[1]}", found, say)


def _tiles_of(make: Callable[[Any], Callable[[], object]], outputs_of: Callable[[], Any], size: int) -> list[Found]:
    """Every tile's time, and whether it gives the first one's bytes."""
    places = outputs_of()
    call = make(places)
    written = [place for place in (places.rows, places.columns, places.amax) if place is not None]
    assert len(written) >= 2

    def patched(tile: Sequence[int]) -> Any:
        return mock.patch.object(tables, "tile", lambda *_: tables.Tile(*tile))

    def result(tile: Sequence[int]) -> list[torch.Tensor]:
        for place in written:
            place.view(torch.uint8 if place.dim() else torch.float32).fill_(0x55 if place.dim() else -1.0)
        with patched(tile):
            call()
        return [place.view(torch.uint8).clone() if place.dim() else place.clone() for place in written]

    def timed(tile: list[int], times: int) -> float:
        with patched(tile):
            return _time(lambda: make(outputs_of()), size, times)

    first = result(TILES[0])
    found = []
    for tile in TILES:
        same = all(torch.equal(a, b) for a, b in zip(first, result(tile), strict=True))
        found.append(Found(list(tile), timed(list(tile), 1), same))
    return refined(found, timed)


def norm_rows(layer: Layer, say: Callable[[str], None]) -> tuple[str, list[int] | None]:
    """(shape, rows and warps of the norm in one launch or None for two launches)."""
    m, h = layer.tokens, layer.hidden
    weight, block = new(h), 1 << (h - 1).bit_length()

    def make() -> Callable[[], object]:
        x, places = new(m, h), outputs(m, h)
        return lambda: norm.forward_quantise(x, weight, 1e-5, places)

    def timed(cut: list[int] | None, times: int) -> float:
        with mock.patch.object(tables, "norm_rows", lambda *_: None if cut is None else tables.Tile(cut[0], h, cut[1])):
            return _time(make, 4 * m * h, times)

    fitting = [list(cut) for cut in WHOLE_ROWS if 16 <= cut[0] * block // (32 * cut[1]) <= 64]
    found = [Found(cut, timed(cut, 1)) for cut in (None, *fitting)]
    return f"{m}x{h}", _reported(f"norm in one launch {m}x{h}", refined(found, timed), say)


def norms(layer: Layer, say: Callable[[str], None]) -> tuple[str, list[int] | None]:
    """(shape, runs or None for the default) of a norm's backward."""
    m, h = layer.tokens, layer.hidden
    weight = new(h)

    def make() -> Callable[[], object]:
        x, dy, residual, dweight = new(m, h), new(m, h), new(m, h), torch.zeros(h, device="cuda")
        rstd = norm.inverse_rms(x, 1e-5)
        return lambda: norm.backward(x, weight, rstd, dy, residual, (dweight, 1))

    block = 1 << (h - 1).bit_length()
    default = tables.default_runs(m, norm.RUNS, block)
    fitting = [runs for runs in RUNS if 4 <= runs[1] * block // (32 * runs[2]) <= 16]  # values per thread

    def timed(runs: list[int], times: int) -> float:
        with mock.patch.object(tables, "norm_runs", lambda *_: tables.Runs(*runs)):
            return _time(make, 8 * m * h, times)

    found = [Found(list(runs), timed(list(runs), 1)) for runs in ((default.runs, default.rows, default.warps), *fitting)]
    return f"{m}x{h}", _reported(f"norm backward {m}x{h}", refined(found, timed), say)


def _reported(label: str, found: list[Found], say: Callable[[str], None]) -> list[int] | None:
    best = chosen(found)
    order = sorted(found, key=lambda one: one.us)[:5]
    tops = ", ".join(f"{one.choice} {one.us:.1f}{'' if one.valid else ' (differs)'}" for one in order)
    say(f"  {label:40} default {found[0].choice} {found[0].us:7.2f} us; {tops}")
    return None if best is None else best.choice

"""Kernel configurations by shape, out of the committed file ``tables.json``: no timing decides anything at run time.

``python -m tools.bench kernels --tune`` measures configurations on a GPU and writes the file. What it holds:

    tiles           kernel → "MxK" (the matrix) → [tile rows, tile columns, warps]
    norm_rows       "MxK" → [rows, warps]: norm and quantise in one launch, so many whole rows a program
    norm_backward   "MxK" → [runs of rows, rows at a time, warps]
    products        per GPU and version of cuBLASLt: product (see :func:`product_name`) → its 64-byte algorithm, in hex

A shape that is not there takes the defaults below, a product cuBLASLt's own first choice. Tiles change no number. The runs of
``norm_backward`` are the order in which the weight's gradient is summed, and algorithms of products are orders of summation
too: with the file they are part of what a run computes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("tables.json")
_TABLES: dict[str, Any] = json.loads(FILE.read_text())  # read once, never written


@dataclass(frozen=True)
class Tile:
    """What one program of a quantising kernel takes of a matrix, and with how many warps."""

    rows: int
    columns: int
    warps: int

    def grid(self, m: int, k: int) -> tuple[int]:
        """One program per tile of ``[m, k]``."""
        return (-(-m // self.rows) * -(-k // self.columns),)


# 64 tokens by 64 features: both layouts leave in runs of 64 bytes (two whole sectors), 1024 x 1024 still gives every
# multiprocessor work, and 16 values per thread leave registers for several blocks at a time.
DEFAULT_TILE = Tile(64, 64, 8)


@dataclass(frozen=True)
class Runs:
    """How a norm's backward cuts its rows: ``runs`` programs, each ``rows`` at a time."""

    runs: int
    rows: int
    warps: int


def tile(kernel: str, m: int, k: int) -> Tile:
    """The tile of a quantising kernel for a matrix ``[m, k]``."""
    found = _TABLES["tiles"].get(kernel, {}).get(f"{m}x{k}")
    return DEFAULT_TILE if found is None else Tile(*found)


def norm_rows(m: int, k: int) -> Tile | None:
    """Whole rows of a norm with its quantisation in one launch; None: in two, by tiles."""
    found = _TABLES["norm_rows"].get(f"{m}x{k}")
    return None if found is None else Tile(found[0], k, found[1])


def norm_runs(m: int, k: int, runs: int, block: int) -> Runs:
    """How a norm's backward cuts ``[m, k]``; ``runs`` and ``block`` (the power of two that holds a row) make the default."""
    found = _TABLES["norm_backward"].get(f"{m}x{k}")
    return default_runs(m, runs, block) if found is None else Runs(*found)


def default_runs(m: int, runs: int, block: int) -> Runs:
    """For a shape that the file does not have."""
    of_a_run = 1 << (-(-m // runs) - 1).bit_length()
    rows = of_a_run if of_a_run * block <= 4096 else 1  # all at once where registers hold them, else each awaits the next
    return Runs(runs, rows, min(max(rows * block // 512, 1), 16))


def algorithms(device: str, version: int) -> dict[str, bytes]:
    """The chosen algorithms of one GPU (by its name) under one version of cuBLASLt: they mean nothing under another one."""
    for entry in _TABLES["products"]:
        if entry["device"] == device and entry["cublaslt"] == version:
            return {name: bytes.fromhex(algorithm) for name, algorithm in entry["algorithms"].items()}
    return {}


def product_name(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, residual: bool, fast_accumulation: bool) -> str:
    """A product's name in the file: sizes, dtypes, which operands are transposed in memory, what is added."""

    def operand(matrix: torch.Tensor) -> str:
        return str(matrix.dtype).removeprefix("torch.") + ("" if matrix.stride(1) == 1 else ".T")

    (m, k), n = a.shape, b.shape[0]
    how = (" fast" if fast_accumulation else "") + (" residual" if residual else "")
    return f"{m}x{n}x{k} {operand(a)} {operand(b)} {operand(out)}{how}"

"""The kernels of experts, and the one that turns FP8, compiled for an H200 (no GPU is needed for that): what makes them fast is
in the code that comes out.

A table of addresses tells the compiler nothing about alignment. Where it is not told, the tensor cores wait for loads of single
bytes: a sixth of the speed on an H200, and every number right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

pytest.importorskip("triton", reason="needs Triton (extra test)")

CODE = """
import itertools, json, re, subprocess
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qeffect_lm.kernels import experts, grouped, router, scales, transpose

POINTERS = {"x", "table", "like", "x_scale_inv", "scale_table", "out", "offsets", "dy", "dy_scale_inv", "hidden", "row_weights",
            "d_weighted", "group_of_row", "d_hidden", "of_rows", "amax", "rows", "role_rows", "held",
            "history", "open_amax", "scale", "scale_inv", "logits", "numbers", "weights", "d_weights", "sums", "d_logits"}


def ptx(kernel, tiles, types, **constants):
    if isinstance(tiles, dict):
        options = tiles | {"num_stages": 3}
    else:
        options = tiles.options() if isinstance(tiles, grouped._Tiles) else experts._cut(tiles) | {"num_stages": 3}
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    constants |= options
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    sizes = {"f", "n", "k", "pitch", "places", "stride_n", "stride_k"} - set(constants)
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in names if n in POINTERS | sizes}
    source = ASTSource(kernel, signature, values, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    return made.asm["ptx"]


def counted(text):
    return {name: len(re.findall(pattern, text)) for name, pattern in (
        ("wgmma", r"wgmma\\.mma_async"), ("mma", r"\\bmma\\.sync"), ("async", r"cp\\.async\\.cg"),
        ("narrow", r"(ld|st)\\.global[.\\w]*\\.[bsu](8|16)\\b"), ("vectors", r"(ld|st)\\.global\\.v4\\.b32"))}


def assembled(text):
    # what the assembler makes of it: bytes of registers that did not fit, products that wait for each other, and two products
    # of float32 made one, by 1/2 to 1/8 or 2 to 8
    Path("made.ptx").write_text(text)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    command = [tools / "ptxas", "-v", "--gpu-name", "sm_90a", "made.ptx", "-o", "made.cubin"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    read = subprocess.run([tools / "nvdisasm", "made.cubin"], check=True, capture_output=True, text=True).stdout
    return {"spilled": sum(map(int, re.findall(r"(\\d+) bytes spill stores", said))), "serial": said.count("are serialized"),
            "products": len(re.findall(r"\\bFMUL", read)), "joined": len(re.findall(r"\\bFMUL\\.[DM][248]\\b", read))}


base = dict(table="*i64", offsets="*i32", x_scale_inv="*fp32", dy_scale_inv="*fp32", scale_table="*i64", out="*bf16")
found = {}
for name, tiles, element, inner, fast in (
    ("F", grouped._FAST, "fp8e4nv", True, True), ("I", grouped._FP8, "fp8e5", True, False),
    ("F bfloat16", grouped._BF16, "bf16", True, False), ("I bfloat16", grouped._BF16, "bf16", False, False),
):
    like = "bf16" if element == "bf16" else "fp8e4nv"
    found[name] = counted(ptx(
        grouped._product_kernel, tiles, base | {"x": f"*{element}", "like": f"*{like}"}, FP8=element != "bf16", FAST=fast,
        WIDE=False, ALIGNED=ALIGNED, INNER=inner, COUNT=16, PARTS=False, **{"stride_k" if inner else "stride_n": 1}))
made = ptx(
    grouped._product_kernel, grouped._ROUTER, base | {"x": "*bf16", "like": "*bf16", "out": "*fp32"}, FP8=False, FAST=False,
    WIDE=False, ALIGNED=ALIGNED, INNER=True, COUNT=2, PARTS=True, stride_k=1)
found["F of a router"] = counted(made) | assembled(made)
for members, tiles, spacing in itertools.product((1, 2), ("_FP8_W", "_FP8_W_LONG"), (16, 128)):
    made = ptx(
        grouped._accumulate_columns_kernel, getattr(grouped, tiles),
        base | {"dy": "*fp8e5", "x": "*fp8e4nv", "like": "*fp32"},
        BETA=1, WIDE=False, ALIGNED=ALIGNED, COUNT=16, SPACING=spacing, MEMBERS=members)
    found[f"W {members} {tiles} {spacing}"] = counted(made) | assembled(made)
found["W bfloat16"] = counted(ptx(
    grouped._accumulate_rows_kernel, grouped._BF16_W, base | {"dy": "*bf16", "x": "*bf16", "like": "*fp32"},
    BETA=1, WIDE=False, ALIGNED=ALIGNED))
between = {}
types = dict.fromkeys(("hidden", "d_weighted", "d_hidden", "out", "x", "rows"), "*bf16") | dict.fromkeys(
    ("row_weights", "of_rows", "amax"), "*fp32") | {"group_of_row": "*i64", "places": "*i64"}
for name, kernel, tile, constants in (
    ("forward", experts._forward_kernel, experts.FORWARD, {"MERGE": True}),
    ("backward", experts._backward_kernel, experts.BACKWARD, {"MERGE": True}),
    ("amax", experts._amax_kernel, experts.AMAX, {}), ("added", experts._added_kernel, experts.ADDED, {"PARTS": 2}),
):
    between[name] = counted(ptx(kernel, tile, types, **constants))
text = ptx(
    scales._scales_kernel, {"TILE_G": scales.GROUPS, "TILE_H": 16, "num_warps": scales.WARPS},
    {"role_rows": "*i64"} | dict.fromkeys(("amax", "held", "history", "open_amax", "scale", "scale_inv"), "*fp32"),
    HELD=True, MERGE=True, LARGEST=448.0, MARGIN=8.0)
rounded = {name: len(re.findall(pattern, text)) for name, pattern in (
    ("quotients", r"\\b(div|rcp)\\.[\\w.]*f32"), ("exact", r"\\bdiv\\.rn\\.f32"), ("flushed", r"\\.ftz"),
    ("fused", r"\\bfma\\."))} | assembled(text)
types = dict.fromkeys(("logits", "weights", "d_weights", "mask", "divisor", "sums", "told", "d_logits"), "*fp32") | {
    "numbers": "*i64", "statistics": "*fp64", "balance": "fp32", "z": "fp32"}
losses = dict.fromkeys(("LOSSES", "MASKED", "RECORD", "ADDS"), True)
routers = {name: counted(ptx(kernel, router._cut(8), types, K=2, **constants)) for name, kernel, constants in (
    ("choice", router._choose_kernel, {"NORMALISE": True}), ("sums", router._sums_kernel, {"MASKED": True}),
    ("way back", router._backward_kernel, {"NORMALISE": True} | losses))}
tile = {"TILE_M": transpose.TILE.rows, "TILE_K": transpose.TILE.columns, "num_warps": transpose.TILE.warps}
POINTERS |= {"columns", "m"}
turned = ptx(transpose._transpose_kernel, tile, {"rows": "*u8", "columns": "*i16"})
turned = counted(turned) | {"trans": len(re.findall(r"ldmatrix[.\\w]*\\.trans", turned))}
print(json.dumps([found, between, rounded, routers, turned]))
"""


def compiled(folder: Path, aligned: bool) -> list[dict[str, Any]]:
    """How many of which instructions each kernel has: products, what stands between them, quotients of scales, routers, the
    one that turns FP8."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    (folder / "compiled.py").write_text(CODE.replace("ALIGNED=ALIGNED", f"ALIGNED={aligned}"))
    command, paths = [sys.executable, str(folder / "compiled.py")], {"PYTHONPATH": str(ROOT)}
    made = subprocess.run(command, env=environment | paths, cwd=folder, check=True, timeout=170, stdout=subprocess.PIPE)
    return json.loads(made.stdout)


def test_tensor_cores_and_whole_loads(tmp_path):
    """Hopper's warpgroup products, fed by copies of 16 bytes past the registers; nothing is loaded or stored by the byte.
    W of one microbatch and of two keeps its sums in registers, and its products wait only where the program says so."""
    products, between, scales, routers, turned = compiled(tmp_path, True)
    for name, count in products.items():
        assert count["wgmma"] >= 4 and count["mma"] == 0 and count["async"] >= 12 and count["narrow"] == 0, (name, count)
        assert not count.get("spilled") and not count.get("serial"), (name, count)
    for name, count in between.items():
        assert count["vectors"] >= 4 and count["narrow"] == 0, (name, count)
    for name, count in routers.items():
        assert count["vectors"] >= 1 and count["narrow"] == 0, (name, count)
    assert turned["vectors"] == 8 and turned["narrow"] == 0 and turned["trans"] == 4, turned
    assert scales["quotients"] == scales["exact"] >= 2 and not scales["flushed"] + scales["fused"], "as torch rounds"
    assert scales["products"] >= 1 and not scales["joined"], "what overflows between two products does not in one"


@pytest.mark.long
def test_an_address_of_no_alignment_is_what_it_costs(tmp_path):
    """The control: without the promise about addresses the weights come byte by byte."""
    found, *_ = compiled(tmp_path, False)
    assert found["F"]["narrow"] >= 32 and found["I"]["narrow"] >= 32 and found["F bfloat16"]["narrow"] >= 32

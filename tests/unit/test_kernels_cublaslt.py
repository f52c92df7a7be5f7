"""The cuBLASLt binding against a stand-in for the library that reads the same memory and descriptors, on CPU."""

from __future__ import annotations

import ctypes
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from qeffect_lm.errors import QEffectError
from qeffect_lm.fp8.gemm import accumulate_mm, scaled_mm
from qeffect_lm.fp8.quantise import E4M3, E5M2, dequantise, quantise
from qeffect_lm.kernels import cublaslt, tables
from qeffect_lm.layers.linear import SplitLinear, bind_products
from tests.unit.layer_harness import random

DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}


class Library:
    """cuBLASLt as its documentation describes it: column-major operands, ``D = alpha * op(A) op(B) + beta * C``."""

    def __init__(self) -> None:
        self.objects: dict[int, dict] = {}
        self.heuristics = self.launches = 0
        self.found, self.needs = 1, 0
        self.checked: list[int] = []
        self.algorithms: list[int] = []
        self.preferences: dict[int, int] = {}
        self.fast = None
        self.cublasLtGetVersion = _Function(lambda: 130000)

    def _new(self, out, **values) -> int:
        number = len(self.objects) + 1
        self.objects[number] = values
        out._obj.value = number
        return 0

    def cublasLtCreate(self, out):
        return self._new(out)

    def cublasLtMatmulDescCreate(self, out, compute, scale):
        assert (compute, scale) == (68, 0), "accumulated in float32, alpha and beta float32"
        return self._new(out)

    def cublasLtMatmulPreferenceCreate(self, out):
        return self._new(out)

    def cublasLtMatrixLayoutCreate(self, out, dtype, rows, cols, ld):
        return self._new(out, dtype=DTYPES[dtype], rows=rows.value, cols=cols.value, ld=ld.value)

    def cublasLtMatmulDescSetAttribute(self, desc, attribute, value, size):
        assert size.value == {3: 4, 4: 4, 17: 8, 18: 8, 25: 1}[attribute] == ctypes.sizeof(value._obj)
        self.objects[desc.value][attribute] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        assert size.value == {1: 8, 5: 4, 6: 4, 7: 4, 8: 4}[attribute] == ctypes.sizeof(value._obj)
        self.preferences[attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, desc, a, b, c, d, preference, wanted, result, count):
        assert {**self.objects[c.value], "ld": 0} == {**self.objects[d.value], "ld": 0}
        self.heuristics += 1
        for place in range(min(wanted.value, self.found)):
            result[place].algo.data[0], result[place].workspace_size = 4711 + self.heuristics + 100 * place, 64
        count._obj.value = min(wanted.value, self.found)
        return 0

    def cublasLtMatmulAlgoCheck(self, handle, desc, a, b, c, d, algo, result):
        self.checked.append(algo._obj.data[0])
        result._obj.workspace_size, result._obj.state = self.needs, 0
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference):
        return 0

    cublasLtMatrixLayoutDestroy = cublasLtMatmulDescDestroy = cublasLtDestroy = cublasLtMatmulPreferenceDestroy

    def cublasLtMatmul(self, handle, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace, size, stream):
        attributes = self.objects[desc.value]
        self.algorithms.append(algo._obj.data[0])
        assert algo._obj.data[0] > 4711 and workspace.value and size.value == cublaslt.WORKSPACE_BYTES and stream.value == 7
        assert c.value == d.value or beta._obj.value, "what beta 0 does not read may not lie elsewhere"
        left = self._read(a, la, attributes[3], attributes.get(17))
        right = self._read(b, lb, attributes[4], attributes.get(18))
        layout = self.objects[ld.value]
        out = _memory(d, layout, layout["ld"] * (layout["cols"] - 1) + layout["rows"])
        out = out.as_strided((layout["rows"], layout["cols"]), (1, layout["ld"]))
        added = self._read(c, lc, 0, None)
        product = left @ right
        out.copy_(alpha._obj.value * product + (added if beta._obj.value else 0))
        self.launches += 1
        self.fast = attributes.get(25)
        return 0

    def _read(self, pointer, layout, op, scale) -> torch.Tensor:
        form = self.objects[layout.value]
        flat = _memory(pointer, form, form["ld"] * (form["cols"] - 1) + form["rows"])
        matrix = flat.as_strided((form["rows"], form["cols"]), (1, form["ld"])).float()
        if scale is not None:
            matrix = matrix * ctypes.c_float.from_address(scale).value
        return matrix.t() if op else matrix


class _Function:
    restype = None

    def __init__(self, body) -> None:
        self.body = body

    def __call__(self, *arguments):
        return self.body(*arguments)


def _memory(pointer, layout, count) -> torch.Tensor:
    dtype = layout["dtype"]
    size = torch.empty((), dtype=dtype).element_size()
    raw = (ctypes.c_uint8 * (count * size)).from_address(pointer.value)
    return torch.frombuffer(raw, dtype=dtype)


@pytest.fixture
def library(monkeypatch) -> Library:
    made = Library()
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", lambda path: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.fixture
def products(library) -> cublaslt.CublasLt:
    return cublaslt.CublasLt("cpu:0")


def operands(m, n, k, a_fmt=E4M3):
    a = quantise(random(m, k, seed=1), torch.tensor(9.0), a_fmt)
    b = quantise(random(n, k, seed=2), torch.tensor(30.0), E4M3)
    return a.rows, a.scale_inv, b.rows, b.scale_inv


@pytest.mark.parametrize("a_fmt", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_fp8_product(products, library, a_fmt, out_dtype):
    """``[m, k] x [n, k]`` → ``[m, n]`` with each operand's own scale; m may be any number; fast accumulation when asked."""
    a, a_inv, b, b_inv = operands(7, 48, 32, a_fmt)
    out = torch.full((7, 48), torch.nan, dtype=out_dtype)
    products.matmul(out, a, b, a_scale_inv=a_inv, b_scale_inv=b_inv, fast_accumulation=out_dtype is torch.bfloat16)
    rtol = 1e-5 if out_dtype is torch.float32 else 2**-7
    torch.testing.assert_close(out, scaled_mm(a, a_inv, b, b_inv, out_dtype), rtol=rtol, atol=1e-5)
    assert library.fast == (out_dtype is torch.bfloat16)


def test_beta_and_place(products):
    """beta 0 forgets a NaN, beta 1 adds in place, in a view inside a larger storage, and touches nothing around it."""
    a, a_inv, b, b_inv = operands(16, 32, 48, E5M2)
    flat = torch.full((3, 16, 32), 7.0)
    out = flat[1]
    out.fill_(torch.nan)
    once = dequantise(a, a_inv) @ dequantise(b, b_inv).t()
    for beta, times in ((0, 1), (1, 2), (1, 3), (0, 1)):
        products.matmul(out, a, b, beta=beta, a_scale_inv=a_inv, b_scale_inv=b_inv)
        torch.testing.assert_close(out, once * times, rtol=1e-5, atol=1e-5)
    assert (flat[0] == 7).all() and (flat[2] == 7).all()


def test_residual(products):
    """Added before the one rounding, from a storage of its own, which keeps its bytes; with other strides too."""
    a, a_inv, b, b_inv = operands(16, 48, 32)
    for residual in (random(16, 48, seed=3, dtype=torch.bfloat16), random(16, 64, seed=4, dtype=torch.bfloat16)[:, :48]):
        before, out = residual.clone(), torch.full((16, 48), torch.nan, dtype=torch.bfloat16)
        products.matmul(out, a, b, a_scale_inv=a_inv, b_scale_inv=b_inv, residual=residual)
        want = scaled_mm(a, a_inv, b, b_inv, torch.bfloat16, residual=residual)
        exact = dequantise(a, a_inv).double() @ dequantise(b, b_inv).double().t() + residual.double()
        torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-5)
        assert ((want.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all() and torch.equal(residual, before)


def test_alignments_are_told(products, library):
    """The library assumes 256 bytes unless told: b, a and out as they lie, and another configuration for another alignment."""
    storage = torch.zeros(4096, dtype=torch.bfloat16)
    start = -storage.data_ptr() % 256 // 2
    a, b = (storage[start + n : start + n + 256].view(16, 16) for n in (8, 512 + 64))
    out = torch.zeros(4096)[: 16 * 16].view(16, 16)
    products.matmul(out, a, b)
    assert (library.preferences[5], library.preferences[6]) == (128, 16)
    assert library.preferences[7] == library.preferences[8] == min(256, out.data_ptr() & -out.data_ptr())
    products.matmul(out, b, b)
    assert library.heuristics == 2


def test_scales_are_the_calls_own(products):
    """Two calls of one shape share a plan, never a scale."""
    a, _, b, _ = operands(16, 16, 16)
    for factor in (1.0, 2.0, 8.0):
        out = torch.empty(16, 16)
        products.matmul(out, a, b, a_scale_inv=torch.tensor(factor), b_scale_inv=torch.tensor(0.5))
        torch.testing.assert_close(out, 0.5 * factor * (a.float() @ b.float().t()))


@pytest.mark.parametrize("turn_a", [False, True])
@pytest.mark.parametrize("turn_b", [False, True])
def test_bfloat16_from_either_layout(products, turn_a, turn_b):
    """Operands contiguous along either dimension, as the transposed views of the unquantised layers are."""
    m, n, k = 5, 7, 11
    a = random(k, m, seed=3, dtype=torch.bfloat16).t() if turn_a else random(m, k, seed=3, dtype=torch.bfloat16)
    b = random(k, n, seed=4, dtype=torch.bfloat16).t() if turn_b else random(n, k, seed=4, dtype=torch.bfloat16)
    out = torch.ones(m, n)
    products.matmul(out, a, b, beta=1)
    torch.testing.assert_close(out, 1 + a.float() @ b.float().t())


def test_configurations_are_asked_once_and_workspaces_kept(products, library, monkeypatch):
    a, a_inv, b, b_inv = operands(16, 32, 48)
    out = torch.zeros(16, 32)  # one storage: another's alignment may ask for another configuration
    for _ in range(3):
        products.matmul(out, a, b, a_scale_inv=a_inv, b_scale_inv=b_inv, beta=1)
    assert library.heuristics == 1 and library.launches == 3
    assert library.preferences[1] == cublaslt.WORKSPACE_BYTES
    (workspace,) = products.workspaces.values()
    assert workspace.numel() == 32 << 20 and products.workspace(SimpleNamespace(cuda_stream=7)) is workspace
    assert products.workspace(SimpleNamespace(cuda_stream=9)) is not workspace
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    products.matmul(out, a, b, a_scale_inv=a_inv, b_scale_inv=b_inv)
    with pytest.raises(QEffectError, match=r"no configuration yet for \[16, 48\] x \[32, 48\].* before it is captured"):
        products.matmul(out, a, b, a_scale_inv=a_inv, b_scale_inv=b_inv, fast_accumulation=True)
    with pytest.raises(QEffectError, match="stream 0xb has no cuBLASLt workspace"):
        products.workspace(SimpleNamespace(cuda_stream=11))


def algorithm(number: int) -> bytes:
    return bytes(cublaslt.Algo((ctypes.c_uint64 * 8)(number)))


def test_the_table_comes_before_the_heuristic(library):
    """An algorithm of the table serves the product of its name and no other; operands that lie otherwise ask the heuristic."""
    a, a_inv, b, b_inv = operands(16, 32, 48, E5M2)
    storage = torch.zeros(4096)
    start = -storage.data_ptr() % 256 // 4
    out, elsewhere = (storage[start + n :][: 16 * 32].view(16, 32) for n in (0, 1024 + 8))
    a, b = (_aligned(matrix) for matrix in (a, b))
    name = tables.product_name(out, a, b, False, False)
    assert name == "16x32x48 float8_e5m2 float8_e4m3fn float32"
    products = cublaslt.CublasLt("cpu:0", {name: algorithm(9000)})
    scales = {"a_scale_inv": a_inv, "b_scale_inv": b_inv}
    for beta in (0, 1):
        products.matmul(out, a, b, beta=beta, **scales)
    assert library.algorithms == [9000, 9000] and library.checked == [9000] and library.heuristics == 0
    products.matmul(elsewhere, a, b, **scales)
    products.matmul(out, a, b, fast_accumulation=True, **scales)
    assert library.algorithms[2:] == [4712, 4713]
    library.needs = cublaslt.WORKSPACE_BYTES + 1
    products.choose({name: algorithm(9001)})
    with pytest.raises(QEffectError, match=r"16x32x48 .* that this GPU does not take"):
        products.matmul(out, a, b, **scales)
    products.choose({})
    products.matmul(out, a, b, **scales)
    assert library.algorithms[4:] == [4714]


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    raw = torch.zeros(matrix.numel() + 256, dtype=torch.uint8)
    lying = raw[-raw.data_ptr() % 256 :][: matrix.numel()].view(matrix.dtype).view(matrix.shape)
    lying.view(torch.uint8).copy_(matrix.view(torch.uint8))
    return lying


def test_candidates(products, library):
    library.found = 3
    a, a_inv, b, b_inv = operands(16, 32, 48)
    found = products.candidates(torch.zeros(16, 32), a, b, 8, a_scale_inv=a_inv, b_scale_inv=b_inv)
    assert [c.algorithm for c in found] == [algorithm(4712 + 100 * n) for n in range(3)]
    assert [c.workspace_bytes for c in found] == [64] * 3 and library.launches == 0


def test_the_committed_table():
    """Every entry is well formed; a shape that is not there takes the default."""
    held = json.loads(tables.FILE.read_text())
    assert set(held) == {"tiles", "norm_rows", "norm_backward", "products"}
    for by_shape in held["tiles"].values():
        assert all(len(numbers) == 3 and all(n & (n - 1) == 0 for n in numbers[:2]) for numbers in by_shape.values())
    assert all(rows & (rows - 1) == 0 and warps in (1, 2, 4, 8, 16, 32) for rows, warps in held["norm_rows"].values())
    for shape, (runs, rows, warps) in held["norm_backward"].items():
        assert runs > 0 and rows & (rows - 1) == 0 and warps in (1, 2, 4, 8, 16), shape
    for entry in held["products"]:
        assert entry["device"] and entry["cublaslt"] > 0
        assert all(len(bytes.fromhex(algorithm)) == 64 for algorithm in entry["algorithms"].values())
    assert tables.tile("quantise", 3, 5) == tables.DEFAULT_TILE and tables.algorithms("no such GPU", 1) == {}


def test_what_it_refuses(products, library):
    a, a_inv, b, b_inv = operands(16, 32, 48)
    scales = {"a_scale_inv": a_inv, "b_scale_inv": b_inv}
    out = torch.zeros(16, 32)
    with pytest.raises(ValueError, match=r"does not give \[32, 16\]"):
        products.matmul(torch.zeros(32, 16), a, b, **scales)
    products.matmul(out, a, b, **scales)
    with pytest.raises(ValueError, match="inverse scales"):
        products.matmul(out, a, b, a_scale_inv=a_inv)
    with pytest.raises(ValueError, match="not to both"):
        products.matmul(out, a, b, beta=1, residual=torch.zeros(16, 32), **scales)
    with pytest.raises(ValueError, match=r"a residual torch.float32 \[16, 16\] is not added to torch.float32 \[16, 32\]"):
        products.matmul(out, a, b, residual=torch.zeros(16, 16), **scales)
    with pytest.raises(ValueError, match="contiguous along the summed"):
        products.matmul(torch.zeros(48, 48), a.t(), a.t(), **scales)
    with pytest.raises(ValueError, match="multiples of 16, not a sum over 24 into 32"):
        products.matmul(out, a[:, :24].contiguous(), b[:, :24].contiguous(), **scales)
    with pytest.raises(ValueError, match="two E5M2"):
        products.matmul(torch.zeros(16, 16), a.view(E5M2.dtype), a.view(E5M2.dtype), **scales)
    library.found = 0
    with pytest.raises(QEffectError, match="has no kernel for"):
        products.matmul(out, a, b, fast_accumulation=True, **scales)
    library.found = 1
    library.cublasLtMatmul = lambda *arguments: 15
    with pytest.raises(QEffectError, match=r"cublasLtMatmul: status 15 \(not supported\)"):
        products.matmul(out, a, b, **scales)


def test_binding_reaches_every_linear():
    module = torch.nn.ModuleList([SplitLinear("a", 2, 2), torch.nn.Sequential(SplitLinear("b", 2, 2))])
    library = object()
    bind_products(module, library)
    assert all(m.library is library for m in module.modules() if isinstance(m, SplitLinear))


def test_unbound_products_say_so():
    """What a GPU tensor would meet: the meta device has no kernels either, so the check is asked directly."""
    from qeffect_lm.fp8.gemm import _bound

    with pytest.raises(RuntimeError, match=r"bind_products\(module, CublasLt\(device\)\)"):
        _bound(None)
    accumulate_mm(out := torch.full((2, 2), torch.nan), torch.eye(2), torch.eye(2), 0)
    assert torch.equal(out, torch.eye(2))

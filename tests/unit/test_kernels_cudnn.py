"""Attention by cuDNN's Python package against a stand-in that computes on the same memory, on CPU: layouts, slices, dispatch,
captures, and what is said where the package is of no use."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qeffect_lm import kernels
from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.errors import QEffectError
from qeffect_lm.kernels import cudnn_attention
from qeffect_lm.layers import sdpa
from qeffect_lm.layers.attention import Attention, bind_attention
from tests.unit.cudnn_fake import Cudnn
from tests.unit.layer_harness import random

BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """What torch says of the GPU; tests change it."""
    state = SimpleNamespace(stream=7, capturing=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=state.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(kernels, "usable", lambda tensor: True)
    return state


@pytest.fixture
def package(gpu, monkeypatch) -> Cudnn:
    made = Cudnn()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    return made


@pytest.fixture
def library(package) -> cudnn_attention.CudnnAttention:
    made = cudnn_attention.load("cpu:0")
    assert made is not None
    return made


def projection(batch=1, sequence=8, kv_heads=2, group=2, head_dim=8, seed=1, dtype=BF16) -> torch.Tensor:
    return random(batch, sequence, kv_heads, group + 2, head_dim, seed=seed, dtype=dtype)


def exact(qkv: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the log-sum-exp and d(qkv) in float64."""
    leaf = qkv.double().requires_grad_()
    heads = leaf.permute(0, 2, 3, 1, 4)
    q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
    scores = q @ k.transpose(-1, -2) * qkv.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    y = (torch.softmax(scores, dim=-1) @ v).permute(0, 3, 1, 2, 4)
    return y.detach(), scores.logsumexp(dim=-1).detach(), torch.autograd.grad(y, leaf, dy.double())[0]


CASES = [
    ((1, 8, 2, 2, 8), 1 << 20, (1, 1)),  # one sequence: its KV heads are the batch
    ((2, 8, 4, 3, 8), 1 << 20, (2, 2)),  # several query heads per KV head: a launch for each sequence
    ((3, 8, 4, 1, 16), 1 << 20, (1, 1)),  # as many KV heads as query heads: the whole batch at once
    ((2, 8, 6, 1, 8), 4 * 32768, (1, 4)),  # the limit holds three KV heads of 128 x 128 each: four do not divide six
    ((1, 8, 3, 2, 8), 1, (1, 3)),  # a head needs more than the limit: one at a time
]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("shape", "limit", "launches"), CASES)
def test_against_float64(library, package, shape, limit, launches, dtype):
    """Every element of result, log-sum-exp and gradient, read and written where it lies; launches as the workspace allows."""
    library.workspace_limit = limit
    qkv = projection(*shape, dtype=dtype)
    batch, sequence, kv_heads, group, head_dim = shape
    dy = random(batch, sequence, kv_heads, group, head_dim, seed=2, dtype=dtype)
    assert library.takes(qkv)
    y, lse = library.forward(qkv)
    dqkv = library.backward(qkv, y, lse, dy)
    for got, want in zip((y, lse, dqkv), exact(qkv, dy), strict=True):
        assert got.shape == want.shape and got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=2.0**-7, atol=2.0**-7)
    assert (y.dtype, lse.dtype, dqkv.dtype) == (dtype, torch.float32, dtype)
    count = [sum(graph is wanted for graph, *_ in package.launches) for wanted in package.graphs]
    assert tuple(count) == launches
    largest = max(workspace.numel() for workspace in library.workspaces.values())
    assert largest <= max(limit, 2 * group * sequence**2)
    # A gradient of other strides, as autograd may hand it over.
    turned = dy.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(library.backward(qkv, y, lse, turned), dqkv)


def test_graphs_handles_and_workspaces_are_made_once(library, package, gpu):
    """Graphs per shape, handles per stream, workspaces per stream and size; none is replaced when others come."""
    qkv = projection()
    y, lse = library.forward(qkv)
    for _ in range(3):
        library.backward(qkv, y, lse, y)
    assert len(package.graphs) == 2 and len(package.handles) == 1 and len(library.workspaces) == 1
    first = package.launches[-1]
    gpu.stream = 9
    library.backward(qkv, y, lse, y)
    assert len(package.graphs) == 2 and [handle.stream for handle in package.handles] == [7, 9]
    assert package.launches[-1][1] == 9 and package.launches[-1][2] != first[2], "streams share no workspace"
    gpu.stream = 7
    longer = projection(sequence=16)
    library.backward(longer, *library.forward(longer), torch.ones(1, 16, 2, 2, 8, dtype=BF16))
    assert len(package.graphs) == 4 and len(library.workspaces) == 3
    library.backward(qkv, y, lse, y)
    assert package.launches[-1][1:] == first[1:], "a captured graph would go on using it"
    assert package.launches[-1][0] is first[0] and len(package.graphs) == 4
    library.close()
    assert not library.workspaces and not any(handle.alive for handle in package.handles)


def test_capture_takes_what_was_seen_only(library, gpu):
    """Inside a capture nothing is built or allocated: known shapes on known streams pass, the rest says what to do."""
    qkv = projection()
    y, lse = library.forward(qkv)
    library.backward(qkv, y, lse, y)
    gpu.capturing = True
    library.backward(qkv, *library.forward(qkv), y)
    with pytest.raises(CaptureError, match=r"no cuDNN graph yet for attention of qkv \[1, 16, .*run this work once before"):
        library.takes(projection(sequence=16))
    with pytest.raises(CaptureError, match="no cuDNN graph yet.*float16"):
        library.forward(projection(dtype=torch.float16))
    gpu.stream = 11
    with pytest.raises(CaptureError, match="stream 0xb has no cuDNN handle"):
        library.forward(qkv)
    gpu.capturing = False
    library.forward(qkv)
    gpu.capturing = True
    with pytest.raises(CaptureError, match=r"stream 0xb has no cuDNN workspace of \d+ bytes"):
        library.backward(qkv, y, lse, y)


class Watching(TorchDispatchMode):
    """A capture's recorder, as far as launches go."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    def foreign(self, name, arguments) -> None:
        self.told.append((name, arguments))


def test_a_capture_is_told(library):
    """What the dispatcher does not see: every tensor read or written, the scratch aside, and how many launches there are."""
    qkv = projection(batch=2)
    with Watching() as watch:
        y, lse = library.forward(qkv)
        dqkv = library.backward(qkv, y, lse, y)
    assert [name for name, _ in watch.told] == ["cudnn_attention", "cudnn_attention_backward"]
    for (_, arguments), wanted in zip(watch.told, ((qkv, y, lse), (qkv, y, lse, y, dqkv)), strict=True):
        assert [a.data_ptr() for a in arguments[:-1]] == [t.data_ptr() for t in wanted] and arguments[-1] == 2


def test_what_it_does_not_take(library, package, monkeypatch):
    """Refused without a graph: other dtypes, parts of a storage, odd addresses, CPU. Refused by cuDNN: warned of once, with
    the reason."""
    flat = torch.zeros(1024, dtype=BF16)
    odd = flat[1:257].view(1, 8, 2, 4, 4)
    for qkv in (projection(dtype=torch.float32), projection()[..., :4], odd):
        assert not library.takes(qkv)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "usable", lambda tensor: False)
        assert not library.takes(projection())
    assert not package.graphs
    package.refuses = "head_dim must be a multiple of 8"
    with pytest.warns(UserWarning, match=r"no deterministic kernels for attention of qkv \[1, 8, 2, 4, 8\].*head_dim must be"):
        assert not library.takes(projection())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not library.takes(projection())
    with pytest.raises(QEffectError, match=r"does not take attention of qkv \[1, 8, 2, 4, 8\].*ask takes\(\) first"):
        library.forward(projection())
    package.refuses, package.engine = None, object()
    with pytest.warns(UserWarning, match="only kernels outside of cuDNN"):
        assert not library.takes(projection(sequence=4))


def test_a_gradient_at_an_odd_address(library):
    qkv = projection()
    y, lse = library.forward(qkv)
    with pytest.raises(ValueError, match="attention's dO lies at an address that 16 does not divide"):
        library.backward(qkv, y, lse, torch.zeros(1024, dtype=BF16)[1 : 1 + y.numel()].view(y.shape))


def broken(name):
    raise OSError("libcudnn.so.9: cannot open shared object file")


NOTHING = SimpleNamespace(__version__="1.29.0", backend_version=lambda: broken(""))
OTHER = r"found cuDNN 91002 and torch runs 91900, .*torch's libcudnn.so first in LD_LIBRARY_PATH"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, r"nvidia-cudnn-frontend is not there .*pip install 'nvidia-cudnn-frontend>=1.29'"),
        (NOTHING, r"does not load \(OSError: libcudnn.so.9: cannot open .*pip install"),
        (SimpleNamespace(), "does not load .*AttributeError"),
        (Cudnn("1.9.2"), "nvidia-cudnn-frontend 1.9.2 is older than 1.29: pip install"),
        (Cudnn(backend=91002), OTHER),
    ],
    ids=["missing", "broken", "another module of that name", "old", "two copies of cuDNN"],
)
def test_without_a_package_of_use(gpu, monkeypatch, module, message):
    monkeypatch.setitem(sys.modules, "cudnn", module)
    with pytest.warns(UserWarning, match="attention runs on slower kernels than cuDNN's: .*" + message) as told:
        assert cudnn_attention.load("cpu:0") is None
    assert len(told) == 1


def test_newer_packages_load(gpu, monkeypatch):
    for version in ("1.29.1", "1.32.0.dev1", "2.0"):
        monkeypatch.setitem(sys.modules, "cudnn", Cudnn(version))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cudnn_attention.load("cpu:0") is not None


# ---- in the layers -----------------------------------------------------------------------------------------


def test_binding_reaches_every_attention():
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 4, "max_positions": 4, "rope": None}
    made = [Attention(str(n), torch.nn.Identity(), torch.nn.Identity(), **sizes) for n in range(2)]
    assert made[0].library is None
    library = object()
    bind_attention(torch.nn.Sequential(made[0], torch.nn.Sequential(made[1])), library)
    assert all(layer.library is library for layer in made)


def test_sdpa_takes_the_library_or_torch(library, package):
    """The same numbers within rounding; what the library refuses goes the way it went without one, there and back."""
    qkv, dy = projection(), random(1, 8, 2, 2, 8, seed=3, dtype=BF16)
    results = []
    for by, refuses in ((library, None), (None, None), (cudnn_attention.load("cpu:0"), "no")):
        package.refuses = refuses
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y, saved = sdpa.forward(qkv, by)
        assert len(saved.tensors) == (by is library)
        results.append((y, *sdpa.backward(dy, qkv, y, saved, by)))
    for other in results[1:]:
        for got, want in zip(results[0], other, strict=True):
            torch.testing.assert_close(got, want, rtol=2.0**-6, atol=2.0**-6)
    assert len(package.launches) == 2
    storages = {part.untyped_storage().data_ptr() for part in results[0][1:]}
    assert len(storages) == 1, "the gradients lie in one fused storage"

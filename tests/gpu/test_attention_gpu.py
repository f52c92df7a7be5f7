"""Attention by cuDNN's Python package on a real GPU: against float64, repeated, captured, on two streams at once.

python -m pytest -q tests/gpu/test_attention_gpu.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.kernels.cudnn_attention import CudnnAttention, load
from tests.unit.layer_harness import random

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

Shape = tuple[int, int, int, int, int]  # batch, sequence, KV heads, query heads of each, head size
SHAPES: list[Shape] = [
    (1, 2048, 16, 1, 128),
    (2, 2048, 4, 1, 128),
    (1, 1024, 4, 4, 128),
    (2, 512, 2, 4, 128),
    (1, 512, 2, 2, 64),
    (1, 1024, 16, 1, 64),
    (2, 1024, 8, 1, 64),
    (2, 2048, 2, 4, 64),
]


@contextmanager
def silent() -> Iterator[None]:
    """No slower kernel stands in: that would be warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(cuDNN|cudnn|slower).*")  # nothing stands in for it
        yield


@pytest.fixture(scope="module")
def library() -> Iterator[CudnnAttention]:
    if find_spec("cudnn") is None:
        pytest.skip("needs nvidia-cudnn-frontend")
    with silent():
        made = load("cuda")
    assert made is not None
    yield made
    torch.cuda.synchronize()
    made.close()


def data(shape: Shape, seed: int = 5, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv, and the gradient of the result."""
    batch, sequence, kv_heads, group, head_dim = shape
    qkv = random(batch, sequence, kv_heads, group + 2, head_dim, seed=seed, dtype=dtype).cuda()
    return qkv, random(batch, sequence, kv_heads, group, head_dim, seed=seed + 1, dtype=dtype).cuda()


def run(library: CudnnAttention, qkv: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the log-sum-exp and d(qkv)."""
    y, lse = library.forward(qkv)
    return y, lse, library.backward(qkv, y, lse, dy)


def equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(got, want, strict=True)]


def exact(qkv: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64, one sequence after the other."""
    results = []
    for one, grad in zip(qkv, dy, strict=True):
        leaf = one.double().requires_grad_()
        heads = leaf.permute(1, 2, 0, 3)
        scores = heads[:, :-2] @ heads[:, -2:-1].transpose(-1, -2) * qkv.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        y = (torch.softmax(scores, dim=-1) @ heads[:, -1:]).permute(2, 0, 1, 3)
        (dleaf,) = torch.autograd.grad(y, leaf, grad.double())
        results.append((y.detach(), scores.logsumexp(dim=-1).detach(), dleaf))
    y, lse, dqkv = (torch.stack(parts) for parts in zip(*results, strict=True))
    return y, lse, dqkv


def assert_close(got: tuple[torch.Tensor, ...], qkv: torch.Tensor, dy: torch.Tensor) -> None:
    """Each of y, lse, dq, dk and dv within 1 % of float64's norm: some roundings of 16-bit probabilities and d(scores)."""
    (y, lse, dqkv), (want_y, want_lse, want) = got, exact(qkv, dy)
    pairs = {"y": (y, want_y), "lse": (lse, want_lse), "dq": (dqkv[:, :, :, :-2], want[:, :, :, :-2])}
    pairs |= {name: (dqkv[:, :, :, place], want[:, :, :, place]) for name, place in (("dk", -2), ("dv", -1))}
    errors = {name: ((a.double() - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
    assert all(error < 1e-2 for error in errors.values()), errors


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_against_float64_and_the_same_60_times(library, shape):
    """The workspace's bytes do not matter: every run finds other ones, not-a-number among them."""
    qkv, dy = data(shape)
    with silent():
        first = run(library, qkv, dy)
        assert_close(first, qkv, dy)
        for number in range(60):
            for workspace in library.workspaces.values():
                workspace.fill_((0xFF, 0x00, 0x3C)[number % 3])
            assert equal(run(library, qkv, dy), first) == [True] * 3, number
    other = run(library, *data(shape, seed=50))
    assert not any(equal(other, first))


def test_float16(library):
    qkv, dy = data((1, 512, 4, 2, 64), dtype=torch.float16)
    with silent():
        first = run(library, qkv, dy)
        assert_close(first, qkv, dy)
        assert all(equal(run(library, qkv, dy), first) == [True] * 3 for _ in range(20))


@pytest.mark.parametrize("shape", [(1, 1024, 4, 2, 128), (2, 512, 4, 1, 64)], ids=["grouped", "two sequences"])
def test_few_heads_at_a_time(library, shape):
    """A small limit: as many launches as KV heads, in less workspace, as near to float64 and as repeatable."""
    qkv, dy = data(shape)
    small = CudnnAttention("cuda", library._cudnn, workspace_limit=1)
    with silent():
        first = run(small, qkv, dy)
        assert_close(first, qkv, dy)
        assert all(equal(run(small, qkv, dy), first) == [True] * 3 for _ in range(20))
        run(library, qkv, dy)
    assert len(small._graphs[qkv.shape, qkv.dtype][1].starts) == shape[0] * shape[2]
    sizes = [max(size for _, size in made.workspaces) for made in (small, library)]
    assert sizes[0] < sizes[1]
    torch.cuda.synchronize()
    small.close()


ROUNDS = 5


def test_nothing_waits_and_nothing_grows(library):
    """A run allocates its results and nothing else, and torch waits for nothing; cuDNN takes no memory either."""
    qkv, dy = data((1, 1024, 8, 2, 128))
    run(library, qkv, dy)
    torch.cuda.synchronize()
    before, taken = torch.cuda.memory_stats()["allocation.all.allocated"], []
    for _ in range(ROUNDS):
        free = torch.cuda.mem_get_info()[0]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(100):
                run(library, qkv, dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        taken.append(free - torch.cuda.mem_get_info()[0])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 300 * ROUNDS
    # What torch's pool may have taken for results in flight. The device's memory is others' too, who take some now and then;
    # what grew would grow in every round.
    assert min(taken) <= 32 << 20, taken


@pytest.mark.parametrize("shape", [(1, 2048, 16, 1, 128), (2, 512, 2, 4, 64)], ids=["one sequence", "grouped"])
def test_captured_equals_eager(library, shape):
    """Replays on three other inputs, here and on the capture's stream; inside a capture nothing new is built."""
    qkv, dy = data(shape)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(library, qkv, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(library, qkv, dy)
    for seed in (10, 20, 30):
        for place, fresh in zip((qkv, dy), data(shape, seed=seed), strict=True):
            place.copy_(fresh)
        want = run(library, qkv, dy)
        for on in (torch.cuda.current_stream(), stream):
            torch.cuda.synchronize()
            for made in captured:
                made.fill_(torch.nan)
            torch.cuda.synchronize()
            with torch.cuda.stream(on):
                graph.replay()
            torch.cuda.synchronize()
            assert equal(captured, want) == [True] * 3


def test_a_capture_refuses_what_is_new(library):
    seen, new = data((1, 512, 4, 1, 64))[0], data((1, 640, 4, 1, 64))[0]
    run(library, *data((1, 512, 4, 1, 64)))
    stream, unseen = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        library.forward(seen)
    for on, qkv, message in ((stream, new, "no cuDNN graph yet"), (unseen, seen, "has no cuDNN handle")):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError, match=f"{message}.*run this work once before it is captured"):
            with torch.cuda.graph(graph, stream=on):
                library.forward(qkv)
    torch.cuda.synchronize()
    assert library.takes(new)


def test_two_streams_at_once(library):
    """Each with its own handle and workspace: what runs beside a launch changes none of its bytes."""
    shape = (1, 2048, 8, 1, 128)
    inputs = [data(shape, seed=seed) for seed in (1, 60)]
    want = [run(library, *pair) for pair in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    for stream, pair in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            run(library, *pair)
    torch.cuda.synchronize()
    for _ in range(20):
        got: list[list[tuple[torch.Tensor, ...]]] = [[], []]
        for _ in range(4):
            for stream, pair, made in zip(streams, inputs, got, strict=True):
                with torch.cuda.stream(stream):
                    made.append(run(library, *pair))
        torch.cuda.synchronize()
        assert all(equal(result, right) == [True] * 3 for made, right in zip(got, want, strict=True) for result in made)


# ---- in the layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "kv_heads", "group"), [(1, 4, 4), (2, 8, 1), (2, 2, 4)], ids=["one", "all heads", "grouped"])
@pytest.mark.parametrize("bound", [True, False], ids=["cuDNN", "without the package"])
def test_attention_of_the_layers_repeats(library, bound, batch, kv_heads, group):
    """In torch's deterministic mode: silently on cuDNN where it is bound, the same gradient bytes with or without it."""
    from qeffect_lm.layers import sdpa

    assert torch.are_deterministic_algorithms_enabled()
    qkv, dy = data((batch, 512, kv_heads, group, 64))
    by = library if bound else None

    def once() -> tuple[torch.Tensor, ...]:
        with silent() if bound else warnings.catch_warnings():
            if not bound:
                warnings.simplefilter("ignore")
            y, saved = sdpa.forward(qkv, by)
            return (y, *(part.clone() for part in sdpa.backward(dy, qkv, y, saved, by)))

    first = once()
    assert all(all(equal(once(), first)) for _ in range(60 if bound else 10))
    want_y, _, want = exact(qkv, dy)
    heads = want.permute(0, 2, 3, 1, 4)
    for got, right in zip(first, (want_y, heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]), strict=True):
        assert ((got.double() - right).norm() / right.norm()).item() < 1e-2


class Operators(TorchDispatchMode):
    """The names of attention's operators, in the order they run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention"
FALLBACKS: list[Shape] = [(1, 512, 4, 4, 64), (2, 512, 8, 1, 64), (2, 1024, 2, 4, 128), (1, 1000, 4, 1, 72), (2, 1, 2, 2, 64)]


@pytest.mark.filterwarnings("ignore:cuDNN does not take")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", FALLBACKS, ids=lambda shape: "x".join(map(str, shape)))
def test_without_the_package_the_forward_runs_once(monkeypatch, shape, dtype):
    """In torch's deterministic mode FlashAttention-2 on its own saved outputs gives the bytes of SDPA, whose forward runs
    again in the backward; and it gives them every time. It needs no cuDNN."""
    from qeffect_lm.layers import sdpa

    assert torch.are_deterministic_algorithms_enabled()
    qkv, dy = data(shape, dtype=dtype)

    def once() -> tuple[SDPBackend | None, tuple[torch.Tensor, ...], list[str]]:
        with Operators() as run:
            y, saved = sdpa.forward(qkv)
            results = (y, *sdpa.backward(dy, qkv, y, saved))
        return saved.kernel, results, run.names

    kernel, first, names = once()
    assert kernel is SDPBackend.FLASH_ATTENTION and names == [FLASH, FLASH + "_backward"]
    assert all(all(equal(once()[1], first)) for _ in range(20))
    with monkeypatch.context() as patch:
        patch.setattr(sdpa, "can_use_flash_attention", lambda *asked: False)
        kernel, generic, names = once()
    assert kernel is None and names == [FLASH, FLASH, FLASH + "_backward"]
    assert equal(first, generic) == [True] * 4
    want_y, _, want = exact(qkv, dy)
    heads = want.permute(0, 2, 3, 1, 4)
    for got, right in zip(first, (want_y, heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]), strict=True):
        # One token alone has gradients of q and k that are zero but for rounding.
        assert ((got.double() - right).norm() / right.norm().clamp(min=1.0)).item() < 1e-2


@pytest.mark.filterwarnings("ignore:cuDNN does not take")
@pytest.mark.parametrize("case", ["float32", "padded heads"])
def test_without_the_package_others_go_the_generic_way(case):
    """What FlashAttention-2 does not take as it lies: SDPA's choice, with its forward in the backward, near float64."""
    from qeffect_lm.layers import sdpa

    dtype, head_dim = (torch.float32, 64) if case == "float32" else (torch.bfloat16, 20)
    qkv, dy = data((2, 256, 2, 2, head_dim), dtype=dtype)
    y, saved = sdpa.forward(qkv)
    assert saved.kernel is None and not saved.tensors
    want_y, _, want = exact(qkv, dy)
    heads = want.permute(0, 2, 3, 1, 4)
    grads = sdpa.backward(dy, qkv, y, saved)
    for got, right in zip((y, *grads), (want_y, heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]), strict=True):
        assert ((got.double() - right).norm() / right.norm()).item() < 1e-2


@pytest.mark.filterwarnings("ignore:cuDNN does not take")
def test_without_the_package_captured_equals_eager():
    """The saved outputs inside a capture: replays on other inputs give eager's bytes."""
    from qeffect_lm.layers import sdpa

    qkv, dy = data((2, 512, 2, 4, 64))

    def work() -> tuple[torch.Tensor, ...]:
        y, saved = sdpa.forward(qkv)
        assert saved.kernel is SDPBackend.FLASH_ATTENTION
        return (y, *sdpa.backward(dy, qkv, y, saved))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = work()
    for seed in (10, 20):
        for place, fresh in zip((qkv, dy), data((2, 512, 2, 4, 64), seed=seed), strict=True):
            place.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert equal(captured, work()) == [True] * 4

"""HostReplay: a tape freezes what a CUDA graph freezes, replays the rest bit for bit, and refuses what it
must not freeze."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.fp8.quantise import E4M3, E5M2, quantise
from qeffect_lm.graphs.backend import Graph
from qeffect_lm.graphs.host_replay import HostReplay, HostReplayGraph
from qeffect_lm.graphs.register import HiddenStateRegister, Rule
from qeffect_lm.runtime.rng import save_generators
from tests.tiny import same_bits
from tests.unit.layer_harness import random as normal

F32 = torch.float32


def register(**tensors: torch.Tensor) -> HiddenStateRegister:
    result = HiddenStateRegister()
    for name, tensor in tensors.items():
        result.add(name, tensor, owner="test")
    return result


def capture_of(work: Callable[[], object], label: str = "work", **tensors: torch.Tensor) -> HostReplayGraph:
    return HostReplay().capture(label, lambda: (work(), None)[1], register=register(**tensors))


# ---- what is frozen ----------------------------------------------------------------------------------------


def test_flag_float_and_branch_are_frozen():
    """A Python flag, a learning rate as a float, a branch: changed after capture, without effect."""
    x, out = torch.ones(3), torch.zeros(3)
    state = {"lr": 0.5, "double": True}

    def work() -> None:
        y = x * state["lr"]
        if state["double"]:
            y = y * 2
        out.copy_(y)

    graph = capture_of(work, x=x, out=out)
    state.update(lr=100.0, double=False)
    x.fill_(3.0)
    out.fill_(-1.0)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 3.0))
    work()
    assert torch.equal(out, torch.full((3,), 300.0)), "control: eagerly both have an effect"


def test_tensor_learning_rate_is_read_at_replay():
    x, lr, out = torch.ones(3), torch.tensor(0.5), torch.zeros(3)
    graph = capture_of(lambda: out.copy_(x * lr), x=x, lr=lr, out=out)
    lr.fill_(4.0)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 4.0))


def test_replaced_input_is_never_seen_a_written_one_is():
    holder, out = {"x": torch.ones(3)}, torch.zeros(3)
    recorded = holder["x"]
    graph = capture_of(lambda: out.copy_(holder["x"] + 1), x=recorded, out=out)
    holder["x"] = torch.full((3,), 50.0)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 2.0))
    recorded.fill_(7.0)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 8.0))


def test_no_python_of_ours_runs_at_replay():
    calls = []
    x, out = torch.ones(3), torch.zeros(3)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            calls.append("forward")
            return y * 2

        @staticmethod
        def backward(ctx, dy):
            calls.append("backward")
            return dy * 2

    def work() -> None:
        leaf = x.detach().requires_grad_()
        out.copy_(torch.autograd.grad(Doubled.apply(leaf).sum(), leaf)[0])

    graph = capture_of(work, x=x, out=out)
    assert calls == ["forward", "backward"]
    graph.replay()
    assert calls == ["forward", "backward"] and torch.equal(out, torch.full((3,), 2.0))


def test_literal_constants_are_kept():
    """torch.tensor(literal) inside a capture: a constant of the graph, also after memory was reused."""
    x, out = torch.ones(2), torch.zeros(2)
    graph = capture_of(lambda: out.copy_(x * torch.tensor([2.0, 3.0])), x=x, out=out)
    gc.collect()
    scribble = [torch.full((2,), 99.0) for _ in range(100)]
    graph.replay()
    assert torch.equal(out, torch.tensor([2.0, 3.0])) and len(scribble) == 100


# ---- what is refused ---------------------------------------------------------------------------------------

X = normal(6, 6, seed=1, dtype=F32)
UNKNOWN = torch.zeros(6, 6)
FROM_NUMPY = torch.from_numpy(np.zeros((6, 6), np.float32))

REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    # name → (work, operation it must name, reason)
    "item": (lambda: X.sum().item(), "_local_scalar_dense", "on the host"),
    "float": (lambda: float(X[0, 0]), "_local_scalar_dense", "on the host"),
    "branch": (lambda: 1 if X.sum() > 0 else 2, "_local_scalar_dense", "on the host"),
    "equal": (lambda: torch.equal(X, X + 1), "equal", "on the host"),
    "allclose": (lambda: torch.allclose(X, X + 1), "", "on the host"),
    "tolist": (lambda: X.tolist(), "tolist", "on the host"),
    "numpy": (lambda: X.numpy(), "numpy", "on the host"),
    "asarray": (lambda: np.asarray(X), "__array__", "on the host"),
    "rand": (lambda: torch.rand(3), "rand", "random generator"),
    "randn_like": (lambda: torch.randn_like(X), "randn_like", "random generator"),
    "randperm": (lambda: torch.randperm(3), "randperm", "random generator"),
    "dropout": (lambda: functional.dropout(X, 0.5), "", "random generator"),
    "bernoulli_": (lambda: torch.empty(3).bernoulli_(0.5), "bernoulli_", "random generator"),
    "own generator": (
        lambda: torch.empty(3).normal_(generator=torch.Generator()),
        "normal_",
        "random generator",
    ),
    "multinomial": (lambda: torch.multinomial(X.abs(), 2), "multinomial", "random generator"),
    "attention with dropout": (
        lambda: functional.scaled_dot_product_attention(*[X.view(1, 1, 6, 6)] * 3, dropout_p=0.5),
        "",
        "random generator",
    ),
    "fused attention with dropout": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[X.view(1, 1, 6, 6)] * 3, 0.5),
        "flash_attention",
        "random generator",
    ),
    "nonzero": (lambda: X.nonzero(), "nonzero", "depends on data"),
    "masked_select": (lambda: X.masked_select(X > 0), "masked_select", "depends on data"),
    "boolean index": (lambda: X[X > 0], "index", "depends on data"),
    "unique": (lambda: torch.unique(X.long()), "unique", "depends on data"),
    "repeat_interleave": (
        lambda: X.long().abs().flatten().repeat_interleave(X.long().abs().flatten()),
        "",
        "",
    ),
    "unknown read": (lambda: X + UNKNOWN, "add", "does not know"),
    "unknown read through a view": (lambda: X + UNKNOWN.t()[1], "t.default", "does not know"),
    "unknown write": (lambda: UNKNOWN.copy_(X), "copy_", "does not know"),
    "unknown out": (lambda: torch.add(X, 1, out=UNKNOWN), "add", "does not know"),
    "unknown in a list": (lambda: torch.cat([X, UNKNOWN]), "cat", "does not know"),
    "made outside from numpy": (lambda: X + FROM_NUMPY, "add", "does not know"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """Host reads, random draws, data-dependent shapes, unregistered tensors: a CaptureError that names the
    operation and the graph, before it ran (no generator moved, nothing was written); afterwards all is as
    usual."""
    work, operation, reason = REFUSED[name]
    before, unknown = save_generators(), UNKNOWN.clone()
    with pytest.raises(CaptureError, match="2F0") as caught:
        capture_of(work, label="2F0", X=X)
    assert operation in str(caught.value.place["operation"]) and reason in str(caught.value)
    assert str(caught.value.place["operation"]) in str(caught.value) and caught.value.place["graph"] == "2F0"
    assert torch.equal(save_generators().torch, before.torch) and torch.equal(UNKNOWN, unknown)
    assert X.sum().item() == X.sum().item() and len(X.tolist()) == 6, "no mode is left behind"


def test_a_read_only_tensor_is_not_written():
    """A tensor that the register holds as a constant may be read; a capture that writes it is refused by its
    name."""
    table, out = torch.ones(3), torch.zeros(3)
    known = HiddenStateRegister()
    known.add("rope/cos", table, owner="layers", rule=Rule.CONSTANT)
    known.add("out", out, owner="test")
    HostReplay().capture("read", lambda: torch.add(table, 1, out=out), register=known)  # type: ignore[arg-type]
    writes = [lambda: table.add_(1), lambda: torch.add(out, 1, out=table), lambda: table[1:].zero_()]
    for write in (*writes, lambda: torch._foreach_add_([out, table], 1.0)):
        with pytest.raises(CaptureError, match="rope/cos") as caught:
            HostReplay().capture("write", write, register=known)  # type: ignore[arg-type]
        assert caught.value.place["tensor"] == "rope/cos"
    assert torch.equal(table, torch.ones(3))


def test_allowed():
    """Indexing by integers, attention without dropout, gathers, scatters: no data decides a shape."""
    index, out = torch.tensor([4, 0, 0]), torch.zeros(3, 6)
    graph = capture_of(lambda: out.copy_(X[index]), X=X, index=index, out=out)
    index.copy_(torch.tensor([1, 2, 3]))
    graph.replay()
    assert torch.equal(out, X[1:4])
    q, y = normal(1, 2, 5, 4, seed=2, dtype=F32), torch.zeros(1, 2, 5, 4)
    graph = capture_of(lambda: y.copy_(functional.scaled_dot_product_attention(q, q, q, is_causal=True)), q=q, y=y)
    q.copy_(normal(1, 2, 5, 4, seed=3, dtype=F32))
    graph.replay()
    assert torch.equal(y, functional.scaled_dot_product_attention(q, q, q, is_causal=True))


# ---- replay is bitwise -------------------------------------------------------------------------------------


def replays(work: Callable[[dict[str, torch.Tensor]], torch.Tensor], seed: int = 0, **shapes: tuple[int, ...]) -> Graph:
    """Capture ``work`` on one set of inputs; on two others the replay's result and inputs equal eager's, bit
    for bit."""
    inputs = {n: normal(*shape, seed=seed + i, dtype=F32) for i, (n, shape) in enumerate(shapes.items())}
    twin = {name: tensor.clone() for name, tensor in inputs.items()}
    out = work({name: tensor.clone() for name, tensor in inputs.items()}).clone()
    graph = capture_of(lambda: out.copy_(work(inputs)), out=out, **inputs)
    for trial in range(1, 3):
        for i, name in enumerate(inputs):
            fresh = normal(*shapes[name], seed=seed + 100 * trial + i, dtype=F32)
            inputs[name].copy_(fresh)
            twin[name].copy_(fresh)
        out.zero_()
        graph.replay()
        want = work(twin)
        assert same_bits(out, want), work
        assert want.count_nonzero() > 0
        assert all(same_bits(inputs[name], twin[name]) for name in inputs)
    return graph


def in_place(t: dict[str, torch.Tensor]) -> torch.Tensor:
    x = t["x"]
    x[1:3].mul_(2.0)
    x.t()[0].add_(x[:, 1])
    x.view(-1)[::3].clamp_(min=-0.5)
    return x.clone()


def in_place_on_made(t: dict[str, torch.Tensor]) -> torch.Tensor:
    y = torch.zeros(4, 4)
    y.diagonal().copy_(t["x"][0])
    y[2].add_(5)
    y.transpose_(0, 1)
    z = torch.empty(4, 4).fill_(1.0)
    return y.mul_(z.sub_(t["x"]))


def views(t: dict[str, torch.Tensor]) -> torch.Tensor:
    x = t["x"]
    first, second = x.chunk(2, dim=1)
    a, b = x.unbind(0)[0], x.split([1, 3])[1]
    strided = x.as_strided((2, 2), (1, 5), 3)
    wide = x[:, :, None].expand(4, 4, 2).reshape(4, 8)
    return torch.cat(
        [
            (first * second).flatten(),
            a,
            b.flatten(),
            strided.flatten(),
            wide.flatten(),
            x.view(2, 8).t().flatten(),
        ]
    )


def out_into_view(t: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.full((40,), 3.0)
    torch.mm(t["x"], t["y"].t(), out=flat[4:20].view(4, 4))
    flat[20:36].view(4, 4).addmm_(t["x"], t["y"])
    return flat


def scatters(t: dict[str, torch.Tensor]) -> torch.Tensor:
    x, index = t["x"].clone(), torch.tensor([3, 1, 1])
    x.index_add_(0, index, t["y"][:3])
    x.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), t["y"][0, :2])
    x.scatter_add_(1, torch.tensor([[0], [1], [2], [2]]), t["y"][:, :1])
    x[t["y"] > 0] = 0.25  # a mask as a target has a fixed shape
    return x


def several_outputs(t: dict[str, torch.Tensor]) -> torch.Tensor:
    values, order = t["x"].sort(dim=1)
    top, where = t["x"].topk(2, dim=0)
    variance, mean = torch.var_mean(t["y"], dim=1)
    parts = torch._foreach_mul([t["x"], t["y"]], 3.0)
    torch._foreach_add_(parts, [t["y"], t["x"]])
    numbers = [values, order.float(), top, where.float(), variance, mean, *parts]
    return torch.cat([n.flatten() for n in numbers])


def batch_norm(t: dict[str, torch.Tensor]) -> torch.Tensor:
    """Writes running statistics and gives new tensors in one operation."""
    mean, variance = t["y"][0], t["y"][1]
    variance.abs_()
    first = functional.batch_norm(t["x"], mean, variance, training=True)
    normed, saved, _ = torch.ops.aten._native_batch_norm_legit(t["x"], None, None, mean, variance, True, 0.1, 1e-5)
    return torch.cat([first, normed, saved[None], mean[None], variance[None]])


def casts(t: dict[str, torch.Tensor]) -> torch.Tensor:
    x = t["x"]
    low = x.bfloat16() * 3
    q = quantise(x, t["y"][0, 0].abs(), E4M3)
    r = quantise(x * 1e-3, t["y"][0, 1].abs(), E5M2, rows=False)
    assert q.rows is not None and q.columns is not None and r.columns is not None
    numbers = [
        low.float(),
        q.rows.float(),
        q.columns.float(),
        r.columns.float(),
        q.scale_inv[None],
        x.double().float(),
    ]
    return torch.cat([n.flatten() for n in numbers])


def factories(t: dict[str, torch.Tensor]) -> torch.Tensor:
    steps = torch.arange(16.0).view(4, 4) + torch.ones_like(t["x"]) * torch.full((4, 4), 2.0)
    return torch.where(t["x"] > 0, steps, torch.zeros(())) + torch.eye(4) + torch.linspace(0, 1, 4)


def backward(t: dict[str, torch.Tensor]) -> torch.Tensor:
    x, w = t["x"].detach().requires_grad_(), t["y"].detach().requires_grad_()
    y = functional.layer_norm(functional.silu(x @ w.t()) * x, (4,))
    loss = functional.cross_entropy(y, torch.tensor([0, 3, 1, 1]))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [x, w])])


PROGRAMS = [
    in_place,
    in_place_on_made,
    views,
    out_into_view,
    scatters,
    several_outputs,
    batch_norm,
    casts,
    factories,
    backward,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_program_replays(program):
    """Views, in-place operations, lists, several outputs, casts to FP8, autograd's backward."""
    replays(program, x=(4, 4), y=(4, 4))


def test_accumulating_backward_replays():
    """Gradients accumulated into registered storages, as W does, over several replays."""
    x, w, grad = normal(5, 4, seed=4, dtype=F32), normal(3, 4, seed=5, dtype=F32), torch.zeros(3, 4)
    twin = torch.zeros(3, 4)

    def work(into: torch.Tensor) -> None:
        weight = w.detach().requires_grad_()
        into.add_(torch.autograd.grad((x @ weight.t()).tanh().sum(), weight)[0])

    graph = capture_of(lambda: work(grad), x=x, w=w, grad=grad)
    grad.zero_()
    for seed in range(6, 9):
        x.copy_(normal(5, 4, seed=seed, dtype=F32))
        graph.replay()
        work(twin)
        assert same_bits(grad, twin)


UNARY = {
    "neg": torch.neg,
    "exp": lambda x: (x * 0.1).exp(),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, dim=-1, keepdim=True) + x,
    "cumsum": lambda x: x.cumsum(0),
    "mean": lambda x: x.mean(dim=1, keepdim=True).expand(4, 4),
    "amax": lambda x: x.abs().amax(dim=0) * x,
    "sum": lambda x: x * x.sum(),
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:].repeat(2, 1)[:4],
    "flip": lambda x: x.flip(0),
    "clamp": lambda x: x.clamp(-1, 1),
    "bfloat16": lambda x: x.bfloat16().float(),
    "tril": torch.tril,
    "clone": torch.clone,
    "embedding": lambda x: functional.embedding(torch.tensor([3, 0, 0, 2]), x),
    "pow": lambda x: x.square() - x.abs().pow(1.5),
    "sort": lambda x: x.sort(dim=1)[0],
    "roll": lambda x: x.roll(1, 0),
}
BINARY = {
    "add": lambda x, y: torch.add(x, y, alpha=0.5),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "mm": lambda x, y: x @ y * 0.3,
    "addmm": lambda x, y: torch.addmm(x, x, y, beta=0.5, alpha=0.25),
    "cat": lambda x, y: torch.cat([x, y], dim=1)[:, 2:6],
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "maximum": torch.maximum,
    "stack": lambda x, y: torch.stack([x, y]).mean(0),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "outer": lambda x, y: torch.outer(x[0], y[:, 1]),
    "bmm": lambda x, y: torch.bmm(x.reshape(2, 2, 4), y.reshape(2, 4, 2)).reshape(4, 2).repeat(1, 2),
}
IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y.sigmoid()),
    "copy_": lambda x, y: x.copy_(y.t()),
    "row": lambda x, y: x[1].add_(y[:, 2]),
    "column": lambda x, y: x.t()[3].sub_(y[0]),
    "zero": lambda x, y: x[2:].zero_(),
    "clamp_": lambda x, y: x.clamp_(max=1.5),
    "maximum out": lambda x, y: torch.maximum(x, y, out=x),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([1, 1]), y[:2]),
}
STEPS = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("in place"), st.sampled_from(sorted(IN_PLACE)), st.integers(0, 9), st.integers(0, 9)),
)


@settings(max_examples=100)
@given(steps=st.lists(STEPS, min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_random_programs_replay(steps, seed):
    """Any small program of these operations, over inputs, views of inputs and its own results, in place too,
    replays bit for bit on new inputs."""

    def program(t: dict[str, torch.Tensor]) -> torch.Tensor:
        pool = [t["x"], t["y"], t["x"].t()]
        for kind, name, a, b in steps:
            x, y = pool[a % len(pool)], pool[b % len(pool)]
            if kind == "unary":
                pool.append(UNARY[name](x))
            elif kind == "binary":
                pool.append(BINARY[name](x, y))
            else:
                base = x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()
                IN_PLACE[name](base, y.clone())
        return torch.cat([p.flatten() for p in pool])

    replays(program, seed, x=(4, 4), y=(4, 4))


def variants(graph: HostReplayGraph) -> list[str]:
    return [operation.run._overloadname for operation in graph._operations if hasattr(operation.run, "_overloadname")]


def test_out_variants_are_used_and_bitwise_equal():
    """Where an operation has one it computes straight into the recorded storage; the bits are the
    functional's."""

    def program(t: dict[str, torch.Tensor]) -> torch.Tensor:
        x, y = t["x"], t["y"]
        return torch.softmax(x @ y, dim=1) * x.sum(dim=0) + y.rsqrt().nan_to_num() - x.mean()

    graph = replays(program, x=(4, 4), y=(4, 4))
    used = variants(graph)
    assert sum("out" in name for name in used) >= 7, used
    for work in (*UNARY.values(), *(lambda x, f=f: f(x, x * 2) for f in BINARY.values())):
        graph = replays(lambda t, work=work: work(t["x"]).contiguous(), x=(4, 4))
        assert graph.pool_bytes >= 64


# ---- digests, pools ----------------------------------------------------------------------------------------


def test_digest():
    """Equal for the same work captured anew; any change of operation, literal, shape, dtype or operand
    changes it."""

    def make(work: Callable[..., object], rows: int = 3, dtype: torch.dtype = F32) -> str:
        x, y, out = (
            torch.ones(rows, 2, dtype=dtype),
            torch.ones(rows, 2, dtype=dtype),
            torch.zeros(rows, 2, dtype=dtype),
        )
        return capture_of(lambda: work(x, y, out), x=x, y=y, out=out).digest

    def work(x, y, out):
        out.copy_((x + y) * 2.0)

    same = {make(work) for _ in range(3)}
    assert len(same) == 1 and len(same.pop()) == 64
    others = [
        make(work),
        make(work, rows=4),
        make(work, dtype=torch.float64),
        make(lambda x, y, out: out.copy_((x + y) * 2.5)),
        make(lambda x, y, out: out.copy_((x - y) * 2.0)),
        make(lambda x, y, out: out.copy_((x + x) * 2.0)),
        make(lambda x, y, out: y.copy_((x + y) * 2.0)),
        make(lambda x, y, out: out[1:].copy_((x + y)[1:] * 2.0)),
        make(lambda x, y, out: out[:2].copy_((x + y)[1:] * 2.0)),
        make(lambda x, y, out: out.copy_([x * 2, x * 3][0])),
        make(lambda x, y, out: out.copy_([x * 2, x * 3][1])),
    ]
    assert len(set(others)) == len(others)
    base = torch.zeros(6)
    halves = [capture_of(lambda part=part: part.add_(1), base=base).digest for part in base.split(3)]
    assert halves[0] != halves[1], "where in a storage counts, for views made before the capture too"


def test_shared_pools():
    """A graph of the same slot may read what another made; without sharing that is an unknown address."""
    x, out, kept = torch.ones(3), torch.zeros(3), []
    known = register(x=x, out=out)
    forward = HostReplay().capture("F", lambda: kept.append(x * 2), register=known)
    assert forward.pool_bytes == 12 and list(forward.storages().values()) == [0]

    def backward() -> None:
        out.copy_(kept[0] + 1)

    with pytest.raises(CaptureError, match="does not know"):
        HostReplay().capture("I", backward, register=known)
    graph = HostReplay().capture("I", backward, register=known, shares=[forward])
    x.fill_(5.0)
    forward.replay()
    graph.replay()
    assert torch.equal(out, torch.full((3,), 11.0))


def test_collection_during_capture():
    """L9: a garbage collection and another graph's destruction in the middle of a capture; the capture
    survives."""

    class Cycle:
        def __init__(self, graph: HostReplayGraph) -> None:
            self.graph, self.me = graph, self

    x, out, other = (normal(4, 4, seed=9 + i, dtype=F32) for i in range(3))
    cycles = [Cycle(capture_of(lambda: out.copy_(x @ x @ x), x=x, out=out)) for _ in range(3)]
    died = [weakref.ref(cycle.graph) for cycle in cycles]

    def work() -> None:
        y = x @ x
        cycles.clear()
        gc.collect()
        z = y.sin()
        del y
        gc.collect()
        out.copy_(z @ x + torch.tensor(2.0) * other)

    graph = capture_of(work, x=x, out=out, other=other)
    assert [ref() for ref in died] == [None] * 3
    x.copy_(normal(4, 4, seed=20, dtype=F32))
    graph.replay()
    assert same_bits(out, (x @ x).sin() @ x + torch.tensor(2.0) * other)

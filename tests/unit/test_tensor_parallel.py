"""What needs no peers: cuts and pieces, storages of pieces, masks of parts, what the contract says of exchanges, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint import SingleProcess
from checkpoint.assembly import owns
from checkpoint.layout import Box, tiling_fault
from checkpoint.resume import check_replicas
from models import build_model
from models.decoder import Decoder
from models.spec import ParameterSpec
from qeffect_lm.app.dry_run import describe
from qeffect_lm.app.holdings import local_spec
from qeffect_lm.config import Config, load_config
from qeffect_lm.contract.collectives import Collectives
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.base import named_parameters
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.dropout import KeyedDropout
from qeffect_lm.layers.embedding import LearnedPositions
from qeffect_lm.layers.loss import CrossEntropyLoss
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec, Shard
from qeffect_lm.optim.norm import BlockOrder, BlockSums
from qeffect_lm.parallel.cuts import Cut, Even, GroupedHeads, Vocabulary, length_of
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.tensor import TensorParallel
from qeffect_lm.parallel.vocabulary import ParallelCrossEntropy
from qeffect_lm.state import Role
from tests.tiny import config

CUTS: list[tuple[Cut, int, list[int]]] = [
    (Even(24), 24, [1, 2, 3, 4]),
    (Even(48, blocks=2), 48, [2, 4, 8]),
    (GroupedHeads(8, 4, 6), 8 * 6 + 2 * 4 * 6, [1, 2, 4, 8]),
    (GroupedHeads(8, 1, 2), 20, [2, 4]),
    *((Vocabulary(total), total, [1, 2, 3, 4, 7]) for total in (7, 9, 10, 259, 5000, 50257)),
]


@pytest.mark.parametrize(("cut", "total", "sizes"), CUTS, ids=str)
def test_pieces_tile_the_whole_once(cut, total, sizes):
    """C4: what no rank holds as a copy covers every row once; copies are pieces that another rank holds."""
    for size in sizes:
        pieces = [cut.pieces(size, rank) for rank in range(size)]
        own = [Box((p.start,), (p.length,)) for held in pieces for p in held if not p.copy]
        assert tiling_fault([total], own) is None
        assert all(length_of(held) > 0 for held in pieces)
        owned = {(p.start, p.length) for held in pieces for p in held if not p.copy}
        assert {(p.start, p.length) for held in pieces for p in held if p.copy} <= owned


def test_rows_that_belong_together():
    """A rank's gate and up are of the same features; a KV head's queries lie with its k and v, shared where ranks share it."""
    assert [(p.start, p.length) for p in Even(16, blocks=2).pieces(4, 1)] == [(2, 2), (10, 2)]
    assert [(p.start, p.length) for p in GroupedHeads(4, 2, 3).pieces(2, 1)] == [(12, 12)]
    shared = GroupedHeads(4, 2, 3).pieces(4, 3)  # the second query of group 1
    assert [(p.start, p.length, p.copy, p.shared) for p in shared] == [
        (15, 3, False, None), (18, 3, True, (1, 2)), (21, 3, True, (1, 2)),
    ]  # fmt: skip
    assert [length_of(Vocabulary(5000).pieces(2, rank)) for rank in range(2)] == [2560, 2440], "aligned, nothing padded"
    for cut, size in ((Even(10), 4), (Even(12, blocks=2), 4), (GroupedHeads(6, 2, 4), 4), (GroupedHeads(6, 3, 4), 2)):
        with pytest.raises(UsageError, match="cannot be cut"):
            cut.pieces(size, 0)
    with pytest.raises(UsageError, match="a vocabulary of 3 cannot be cut for 4 ranks"):
        Vocabulary(3).pieces(4, 3)


# ---- storages ------------------------------------------------------------------------------------------------------

QKV = ParameterSpec("qkv.weight", (16, 5), 0.02, True, ("tp", None), cut=GroupedHeads(4, 2, 2))
GATE = ParameterSpec("gate_up.weight", (16, 5), 0.02, True, ("tp", None), cut=Even(16, blocks=2))
DOWN = ParameterSpec("down.weight", (5, 8), 0.02, True, (None, "tp"))
NORM = ParameterSpec("norm.weight", (5,), None, False, (None,), summed="tokens")
SPECS = (QKV, GATE, DOWN, NORM)


def rank_flat(rank: int, size: int, shard: Shard | None = None) -> FlatBuffers:
    specs = [local_spec(spec, TensorParallel(size, rank)) for spec in SPECS]
    return FlatBuffers(specs, param_dtype=torch.bfloat16, shard=shard)


def wholes() -> dict[str, torch.Tensor]:
    values = {}
    for number, spec in enumerate(SPECS):
        numel = torch.Size(spec.shape).numel()
        values[spec.name] = torch.arange(1000.0 * number, 1000.0 * number + numel).view(spec.shape)
    return values


@pytest.mark.parametrize("replicas", [1, 2])
def test_pieces_are_the_logical_tensor(replicas):
    """Filled from the whole, listed as slices that tile it once, with or without shards over replicas; no copy is written."""
    found: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for rank in range(4):
        for replica in range(replicas):
            flat = rank_flat(rank, 4, None if replicas == 1 else Shard(replicas, replica, 1 << 20))
            for name, whole in wholes().items():
                flat.fill_(name, whole)
            for item in flat.logical_tensors():
                assert item.tensor.is_contiguous()
                if owns(item, {"tp": rank, "dp": replica}) and item.role is Role.MASTER:
                    box = Box(item.start, tuple(item.tensor.shape))
                    found.setdefault(item.name, []).append((box, item.tensor.clone()))
                    assert item.global_shape == tuple(wholes()[item.name.partition("/")[2]].shape)
    for name, whole in wholes().items():
        boxes = [box for box, _ in found[f"master/{name}"]]
        assert tiling_fault(whole.shape, boxes) is None, name
        for box, tensor in found[f"master/{name}"]:
            assert torch.equal(tensor, whole[box.within(Box((0,) * whole.dim(), tuple(whole.shape)))]), name


def test_copies_count_once_in_the_norm():
    """The sum over all ranks' rows is the squared norm of the logical gradient."""
    order_of: dict[int, dict[str, str]] = {}
    sizes: list[tuple[str, int]] = []
    for rank in range(4):
        order_of[rank] = {}
        for spec in SPECS:
            local = local_spec(spec, TensorParallel(4, rank))
            if local.dimension is not None or rank == 0:
                order_of[rank][f"{spec.name} {rank}"] = spec.name
                sizes.append((f"{spec.name} {rank}", local.counted))
    order = BlockOrder(sizes, [list(names) for names in order_of.values()])
    total = 0.0
    for rank in range(4):
        flat = rank_flat(rank, 4)
        for name, whole in wholes().items():
            flat.grad(name).copy_(flat.entry(name).spec.take(whole))
        total += float(BlockSums(flat, order, rank, order_of[rank]).compute_().sum())
    assert total == sum(float(whole.double().square().sum()) for whole in wholes().values())
    assert total < sum(float(rank_flat(0, 4).entry(n).spec.take(w).double().square().sum()) for n, w in wholes().items()) * 4


def test_specs_that_contradict_themselves():
    good = local_spec(QKV, TensorParallel(4, 1))
    assert [piece.copy for piece in good.pieces] == [False, True, True] and good.counted == 2 * 5
    for change, words in (
        ({"pieces": good.pieces[:2]}, "do not make up"),
        ({"pieces": good.pieces[::-1]}, "come last"),
    ):
        with pytest.raises(ValueError, match=words):
            FlatBuffers([ParamSpec("w", good.shape, True, good.axes, good.global_shape, good.start, **change)])
    with pytest.raises(UsageError, match="qkv.weight: 4 query and 2 KV heads cannot be cut for 3 ranks"):
        local_spec(QKV, TensorParallel(3, 0))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("sequence", [True, False])
def test_layers_hold_what_the_specs_say(family, sequence):
    """Every parameter of a rank's layers has its piece's shape, for more ranks than KV heads too."""
    kv = 8 if family == "gpt2" else 2
    more: dict[str, Any] = {"model__num_heads": 8, "model__num_kv_heads": kv, "model__head_dim": 4, "model__ffn_size": 64}
    settings = config(**more, model__family=family, model__vocab_size=67, precision__fp8__recipe="none")
    for rank in (0, 3):
        tp = TensorParallel(4, rank, sequence)
        model = build_model(settings, None, torch.float32, tp)
        assert isinstance(model, Decoder)
        specs = {spec.name: local_spec(spec, tp) for spec in model.parameters()}
        held = dict(named_parameters(model.meta_chunk(0, [4])))
        assert {name: tuple(p.shape) for name, p in held.items()} == {name: spec.shape for name, spec in specs.items()}
        norms = [name for name in specs if "attention_norm" in name or "mlp_norm" in name]
        assert norms and all(specs[name].summed is sequence for name in norms)
        heads = [name for name in specs if ".q_norm" in name or ".k_norm" in name]
        assert all(specs[name].summed for name in heads) and bool(heads) is (family == "qwen3")


def test_replicas_that_differ_are_named():
    """Before a save: a copy of another rank's piece, and what tp peers hold whole."""

    class Two(SingleProcess):
        world = 2

        def __init__(self, other: Any) -> None:
            self.told = iter(other)

        def gather(self, obj: Any) -> list[Any]:
            return [next(self.told), obj]

    tensors = [rank_flat(rank, 4) for rank in (2, 3)]  # they share a KV head
    for flat in tensors:
        for name, whole in wholes().items():
            flat.fill_(name, whole)
    mesh = Mesh({"tp": 4}, 3)

    def told(flat: FlatBuffers) -> list[Any]:
        from qeffect_lm.graphs.register import digest

        items = flat.logical_tensors()
        pieces = {(item.name, tuple(item.start), tuple(item.tensor.shape)): digest(item.tensor) for item in items}
        return [[], (mesh.coords, pieces), None]

    check_replicas(tensors[1].logical_tensors(), Two(told(tensors[0])), mesh)
    for name in ("qkv.weight", "norm.weight"):
        tensors[0].master(name)[-1:].add_(1)
        with pytest.raises(ResumeError, match=f"master/{name}' is replicated, but ranks 0 and 1 hold different bytes"):
            check_replicas(tensors[1].logical_tensors(), Two(told(tensors[0])), mesh)
        tensors[0].master(name)[-1:].sub_(1)
    tensors[0].master("qkv.weight")[:1].add_(1)  # its own queries: no replica
    check_replicas(tensors[1].logical_tensors(), Two(told(tensors[0])), mesh)


# ---- layers --------------------------------------------------------------------------------------------------------


def context(**more: Any) -> LayerContext:
    return LayerContext(Phase.TRAIN, key=torch.tensor(7), **more)


def test_a_part_of_the_tokens_has_its_part_of_the_mask():
    x = torch.ones(8, 6)
    whole = KeyedDropout("drop", 0.5)(x, context())
    parts = [KeyedDropout("drop", 0.5, rank)(x[2 * rank : 2 * rank + 2], context()) for rank in range(4)]
    assert torch.equal(torch.cat(parts), whole) and not torch.equal(parts[0], parts[1])


@pytest.mark.parametrize("documents", [False, True])
def test_a_part_of_the_tokens_has_its_positions(documents):
    """Learned positions of tokens that are cut, rows and documents crossing the cuts; gradients are parts of a sum."""
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 4, 4]], dtype=torch.int32) if documents else None
    whole = LearnedPositions("p", 6, 3)
    torch.nn.init.normal_(whole.weight)
    expected = whole(x, context(starts=starts)).reshape(-1, 3)
    for rank in range(4):
        part = LearnedPositions("p", 6, 3, before=rank)
        part.weight.data = whole.weight.data
        mine = slice(3 * rank, 3 * rank + 3)
        about = context(starts=starts, grid=(2, 6))
        assert torch.equal(part(x.reshape(-1, 3)[mine], about), expected[mine])
        assert part.places(x.reshape(-1, 3)[mine], about) is not None


class Peers(TensorParallel):
    """A rank whose peers' parts are given beforehand."""

    def gather(self, x, context, who):  # noqa: ANN001, ANN202
        self._tell(context, who, "gather")
        return torch.cat(RANKS[who])


RANKS: dict[str, list[torch.Tensor]] = {}


def test_loss_of_a_cut_vocabulary():
    """67 logits in parts of 34 and 33: loss and gradient of the whole, the mask and every row's sum included."""
    logits = torch.randn(6, 67, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
    targets = torch.tensor([[0, 33, 34], [66, 5, 50]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    about: dict[str, Any] = {"targets": targets, "loss_mask": mask, "divisor": torch.tensor(5.0, dtype=torch.float64)}
    rows = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    leaf = logits.clone().requires_grad_()
    expected = CrossEntropyLoss("loss")(leaf.view(2, 3, 67), context(row_losses=rows[0], **about))
    expected.backward()
    parts = [logits[:, :34], logits[:, 34:]]
    told = []
    for first, part in zip((0, 34), parts, strict=True):
        here = (targets.reshape(-1) >= first) & (targets.reshape(-1) < first + part.shape[1])
        at = (targets.reshape(-1) - first) * here
        told.append(torch.stack([part.logsumexp(1), part.gather(1, at[:, None])[:, 0] * here])[None])
    RANKS["loss"] = told
    for rank, part in enumerate(parts):
        layer, mine = ParallelCrossEntropy("loss", 67, tp=Peers(2, rank)), part.clone().requires_grad_()
        loss = layer(mine, context(row_losses=rows[1], **about))
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
        assert leaf.grad is not None and mine.grad is not None
        torch.testing.assert_close(mine.grad, leaf.grad[:, 34 * rank : 34 * rank + mine.shape[1]], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(rows[1], rows[0], rtol=1e-14, atol=0)


def test_exchanges_are_complete_and_in_one_order():
    known = Collectives()
    known.declare("F", 0, ["a.gather", "b.scatter"])
    assert known.fault("F", 0, 0, ("a.gather", "b.scatter", "c.gather")) is None
    assert known.fault("F", 0, 1, ("a.gather", "b.scatter", "c.gather")) is None
    assert "0F2 ended without the scatter of 'b' among its peers" in str(known.fault("F", 0, 2, ("a.gather",)))
    said = str(known.fault("F", 0, 3, ("a.gather", "c.gather", "b.scatter")))
    assert "0F3 exchanges c.gather with its peers, as number 1, where earlier ones exchanged b.scatter" in said
    assert "exchanges nothing with its peers, as number 2" in str(known.fault("F", 0, 4, ("a.gather", "b.scatter")))
    assert known.fault("W", 0, 0, ()) is None and known.listed() == [("0F", ("a.gather", "b.scatter", "c.gather"))]


# ---- the configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model__num_heads": 6, "model__num_kv_heads": 6, "parallel__tp": 4}, "num_heads 6 is not divisible by parallel.tp 4"),
        ({"model__num_kv_heads": 3, "model__num_heads": 6}, "num_kv_heads 3 and parallel.tp 2: one of them must divide"),
        ({"model__ffn_size": 81}, "model.ffn_size 81 is not divisible by parallel.tp 2"),
        ({"model__vocab_size": 3, "parallel__tp": 4}, "model.vocab_size 3 is less than parallel.tp 4"),
        ({"data__seq_len": 5, "data__microbatch_size": 3}, "= 15 tokens are not divisible by parallel.tp 2"),
        ({"precision__fp8__recipe": "current"}, "precision.fp8.recipe current scales each rank's piece by itself"),
        ({"optim__name": "muon"}, "optim.name muon updates whole matrices, and each rank has a piece"),
        ({"pipeline__schedule": "auto", "pipeline__w_delay": 0}, "schedule auto measures whole layers only"),
        ({"precision__fp8__recipe": "delayed"}, "num_kv_heads x model.head_dim / parallel.tp 2 = 8 is not a multiple of 16"),
    ],
)
def test_what_cannot_be_cut_is_refused(keys, words):
    """Which number to change, before anything starts."""
    keys = {"parallel__tp": 2, "precision__fp8__recipe": "none", "model__head_dim": 8, **keys}
    with pytest.raises(UsageError, match=words):
        config(**keys)


def test_what_does_not_divide_is_told_once():
    """As what does not divide: a piece's width would be no whole number, so nothing is said of its multiple of 16."""
    with pytest.raises(UsageError, match=r"ffn_size 352 is not divisible by parallel.tp 3") as told:
        config(parallel__tp=3, precision__fp8__recipe="delayed", model__ffn_size=352, model__head_dim=16)
    assert "not a multiple" not in str(told.value) and "ffn_size /" not in str(told.value)


def test_tokens_need_not_divide_without_sequence_parallelism():
    keys: dict[str, Any] = {"parallel__tp": 2, "precision__fp8__recipe": "none", "data__seq_len": 5, "data__microbatch_size": 3}
    assert isinstance(config(**keys, parallel__sequence_parallel=False), Config)


def test_a_part_that_is_not_cut_is_refused():
    class Own:
        pass

    model = build_model(config(), None, torch.float32)
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    with pytest.raises(UsageError, match="parallel.tp 2: Own cannot be cut over tensor-parallel ranks: set parallel.tp=1"):
        Decoder(**{**fields, "mlp": Own(), "tp": TensorParallel(2)})


def test_dry_run_of_a_rank(tmp_path):
    """What a rank holds: half of what one process does, but for norms."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {vocab_size: 4096, hidden_size: 256, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 512}\n"
        "precision: {fp8: {recipe: delayed}}\ndata: {seq_len: 128, microbatch_size: 1}\nrun: {device: cpu}\n"
        "train: {steps: 4}\n"
    )
    numbers = []
    for tp in (1, 2):
        out = describe(load_config(file, [f"parallel.tp={tp}"]))
        assert ("each of 2 tensor-parallel ranks" in out) is (tp == 2)
        row = next(line.split() for line in out.splitlines() if line.startswith("   0 "))
        scratch = (8 * 65536 * 8 + 3 * 65536 * 4) / 2**20  # of norm and optimizer, the same for all: in the last two columns
        numbers.append([float(cell) - scratch * (place >= 4) for place, cell in enumerate(row[1:])])
    for one, two in zip(*numbers, strict=True):
        assert two == pytest.approx(one / 2, rel=0.15) and two > 0

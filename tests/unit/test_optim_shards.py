"""Sharded optimizer state (ZeRO stage 1) without messages: what each replica holds, updates and saves."""

from __future__ import annotations

import pytest
import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.adamw import AdamW
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec, Shard
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.optim.muon import Muon
from qeffect_lm.optim.norm import BLOCK, BlockOrder, BlockSums

SPECS = [
    ParamSpec("table", (9, 16_384), decay=True),  # two whole blocks and a tail, cut inside of a row group
    ParamSpec("norm", (5,), decay=False),
    ParamSpec("odd", (3, 30_001), decay=True),  # its block edge lies inside of a row
    ParamSpec("old", (2, 40_000), decay=True, trainable=False),
]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
SIZES = {spec.name: spec.numel for spec in SPECS if spec.trainable}


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def replicas(ranks: int, master: torch.dtype, param: torch.dtype, mib: float = 0.3) -> list[FlatBuffers]:
    """All replicas' storages with the same first values; with one rank the unsharded one."""
    made = []
    for rank in range(ranks):
        shard = Shard(ranks, rank, int(mib * 2**20)) if ranks > 1 else None
        flat = FlatBuffers(SPECS, master_dtype=master, param_dtype=param, shard=shard)
        for name, value in values(0).items():
            flat.fill_(name, value)
        made.append(flat)
    return made


def logical(parts: list[FlatBuffers]) -> dict[str, torch.Tensor]:
    """The logical tensors put together from what the replicas list; every element must come from somebody."""
    found: dict[str, torch.Tensor] = {}
    for flat in parts:
        for item in flat.logical_tensors():
            whole = found.setdefault(item.name, torch.full(item.global_shape, float("nan"), dtype=item.tensor.dtype))
            place = tuple(slice(a, a + n) for a, n in zip(item.start, item.tensor.shape, strict=True))
            if "dp" not in item.replicated:
                assert bool(whole[place].isnan().all()), f"{item.name} is held twice"
            whole[place] = item.tensor
    assert not any(bool(tensor.isnan().any()) for tensor in found.values())
    return found


def optimizer(flat: FlatBuffers) -> AdamW:
    schedule = Schedule(1e-2, 30, "cosine", 2)
    return AdamW(flat, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1.0, schedule=schedule)


@pytest.mark.parametrize("dtypes", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_together_step_as_the_whole_does(ranks: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Three steps on shards, parameters exchanged after each: all logical state has the bytes of one unsharded optimizer."""
    whole, parts = replicas(1, *dtypes)[0], replicas(ranks, *dtypes)
    everyone = [whole, *parts]
    optimizers = [optimizer(flat) for flat in everyone]
    for step in range(3):
        grads = values(step + 1)
        norm = torch.stack([grads[name].double().square().sum() for name in SIZES]).sum().sqrt()
        for flat, adamw in zip(everyone, optimizers, strict=True):
            for name in SIZES:
                flat.grad(name).copy_(grads[name])
            adamw.step_(norm, torch.tensor(True))
        for bucket in parts[0].buckets.buckets:
            for owner in range(ranks):
                start, stop = bucket.piece(owner)
                for flat in parts:
                    flat.param_buffer[start:stop] = parts[owner].param_buffer[start:stop]
    expected, found = logical([whole]), logical(parts)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert not torch.equal(expected["master/odd"], values(0)["odd"]) and torch.equal(expected["master/old"], values(0)["old"])
    assert torch.equal(parts[0].param("odd"), whole.param("odd"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_a_replica(ranks: int) -> None:
    """Of bfloat16 parameters a replica holds 2 + 4 bytes whole (parameter, main gradient), masters and moments of its shard."""
    parts = replicas(ranks, *DTYPES[1])
    whole = replicas(1, *DTYPES[1])[0]
    for rank, flat in enumerate(parts):
        owned, trainable = flat.buckets.owned(rank), flat.buckets.owned(rank, trainable=True)
        state = flat.master_buffer.nbytes + flat.moment1_buffer.nbytes + flat.moment2_buffer.nbytes
        assert state == 4 * owned + 8 * trainable
        assert flat.bytes() == flat.param_buffer.nbytes + flat.grad_buffer.nbytes + state
        assert flat.param_buffer.nbytes == whole.param_buffer.nbytes and flat.grad_buffer.nbytes == whole.grad_buffer.nbytes
    sizes = [sum(getattr(flat, f"{kind}_buffer").nbytes for flat in parts) for kind in ("master", "moment1", "moment2")]
    assert sizes == [whole.master_buffer.nbytes, whole.moment1_buffer.nbytes, whole.moment2_buffer.nbytes]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_block_sums_of_shards_add_up_exactly(ranks: int) -> None:
    """Each block's sum comes from one replica, with the bits of the unsharded one; all others say zero."""
    order = BlockOrder(list(SIZES.items()), [list(SIZES)])
    sums = []
    for count in (1, ranks):
        for flat in replicas(count, torch.float32, torch.float32, mib=0.26):
            for name in SIZES:
                flat.grad(name).copy_(values(7)[name])
            sums.append(BlockSums(flat, order, 0).compute_().clone())
    expected, found = sums[0], sums[1:]
    assert torch.equal(torch.stack(found).sum(0), expected) and bool((expected[: order.total_blocks] > 0).all())
    assert int(sum((part != 0).sum() for part in found)) == order.total_blocks == 6
    assert ranks == 1 or all(not torch.equal(part, expected) for part in found)


def test_a_replica_without_a_share() -> None:
    """One block on two replicas: the second holds, updates and saves nothing, and steps all the same."""
    for rank in range(2):
        flat = FlatBuffers([ParamSpec("only", (7,), decay=True)], param_dtype=torch.bfloat16, shard=Shard(2, rank, 1 << 20))
        flat.fill_("only", torch.ones(7))
        flat.grad("only").fill_(1.0)
        adamw = optimizer(flat)
        adamw.step_(torch.tensor(7.0).sqrt().double(), torch.tensor(True))
        names = [item.name for item in flat.logical_tensors()]
        assert names == (["master/only", "moment1/only", "moment2/only", "param/only"] if rank == 0 else ["param/only"])
        assert int(adamw.step) == 1 and bool((flat.param("only") != 1).all()) == (rank == 0)
        sums = BlockSums(flat, BlockOrder([("only", 7)], [["only"]]), 0).compute_()
        assert sums.tolist() == ([7.0] if rank == 0 else [0.0])


def test_sharded_state_has_no_whole_view() -> None:
    flat = replicas(2, *DTYPES[1])[0]
    for call in (flat.master, flat.moment1, flat.moment2):
        with pytest.raises(ValueError, match=r"'odd' (is|are) sharded over the replicas \(optim.zero=1\)"):
            call("odd")
    with pytest.raises(UsageError, match="needs whole matrices.*optim.zero=0"):
        Muon(flat, {}, momentum=0.9)
    assert replicas(2, *DTYPES[0])[0].master("odd").shape == (3, 30_001), "of the parameters' dtype it is the parameter"
    assert flat.buckets.table() and BLOCK == 65_536

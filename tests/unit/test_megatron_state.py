"""What Megatron checkpoints hold besides parameters, from the rules of their formats: extra states of several ranks, tied
heads' optimizer state, stacked objects, buffers of the distributed optimizer, and an index that lies."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.hf.tensors import tensor_groups
from checkpoint.megatron import guard, torch_dist
from checkpoint.megatron.names import ours, theirs
from checkpoint.megatron.read import _scales, read_megatron
from qeffect_lm.errors import UsageError
from tests.hf_folders import SECTION, make_folder
from tests.megatron_support import arguments, extra_state, in_this_process, optimizer_state, whole, write_ranks
from tools.convert import main

FC1 = "decoder.layers.2.mlp.linear_fc1"
FC2 = "decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickles are opened in this process, which saves each test a start of torch."""
    monkeypatch.setattr(guard, "ask_child", in_this_process)


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A torch_dist checkpoint that we wrote ourselves."""
    folder = make_folder(tmp_path / "hf")
    assert main(["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "dist"), "--quiet"]) == 0
    return tmp_path / "dist" / "release"


def read(path: Path, **more: Any) -> Any:
    return read_megatron(path, allow_pickle=True, **more)


def values(model: Any) -> dict[str, torch.Tensor]:
    return {item.name: item.read() for item in model.state}


# ---- mp_rank folders ---------------------------------------------------------------------------------------------


def state_of(seed: int, length: int = 5) -> dict[str, Any]:
    state: dict[str, Any] = pickle.loads(extra_state(length, seed).numpy().tobytes())
    return state


def test_states_of_ranks_that_did_not_reduce() -> None:
    """The largest amax, the smallest scale; in the running window an amax of its own."""
    states = [state_of(1), state_of(2)]
    states[1]["amax_history_bwd"][0] = 7.5
    for kind in ("scale_fwd", "scale_bwd"):  # neither rank has all the smallest
        states[0][kind] *= torch.tensor([1.0, 9.0, 1.0][: len(states[0][kind])])
    items, length = _scales({FC1: states}, "here")
    got = {item.name: item.read() for item in items}
    assert length == 5 and len(got) == 9
    for kind, side, column in (("input", "fwd", 0), ("weight", "fwd", 1), ("grad_output", "bwd", 0)):
        histories = torch.stack([state[f"amax_history_{side}"][:, column] for state in states]).amax(0)
        scales = torch.stack([state[f"scale_{side}"][column] for state in states])
        at = f"layers.2.mlp.gate_up.{kind}"
        assert torch.equal(got[f"scale/{at}"], scales.amin())
        assert torch.equal(got[f"amax_history/{at}"], torch.cat([histories[1:].flip(0), torch.zeros(1)]))
        assert float(got[f"amax_open/{at}"]) == (7.5 if side == "bwd" else -1)


def test_histories_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"different lengths: \[4, 5\]"):
        _scales({FC1: [state_of(1)], "decoder.layers.0.mlp.linear_fc2": [state_of(1, 4)]}, "here")
    for key, value, said in (
        ("amax_history_fwd", torch.ones(5), "history of decoder.layers.2.mlp.linear_fc1 has the shape"),
        ("amax_history_bwd", torch.ones(5, 0), "history of decoder.layers.2.mlp.linear_fc1 has the shape"),
        ("scale_fwd", None, "has no scale_fwd"),
    ):
        with pytest.raises(UsageError, match=said):
            _scales({FC1: [{**state_of(1), key: value}]}, "here")


def test_states_come_with_the_optimizer_only(tmp_path: Path) -> None:
    """With ``--weights-only`` they are left behind, by number."""
    states = {FC1: extra_state(5, 1)}
    root = write_ranks(tmp_path / "m", whole(60), arguments(), optimizer=optimizer_state(whole(60)), extra=states)
    assert "scale/layers.2.mlp.gate_up.input" in values(read(root))
    model = read(root, weights_only=True)
    assert not model.state and "FP8 scales and histories of 1 layers" in model.dropped


def test_a_tied_heads_optimizer_state_is_dropped_with_its_copy(tmp_path: Path) -> None:
    tensors = whole(60)
    tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"].clone()
    args = arguments(untie_embeddings_and_output_weights=False)
    write_ranks(tmp_path, tensors, args, optimizer=optimizer_state(tensors))
    got = values(read(tmp_path))
    assert "moment1/embedding.weight" in got and not any("head" in name for name in got)
    assert len(got) == 3 * (len(tensors) - 1) + 1


def test_stages_with_different_numbers_of_virtual_stages(tmp_path: Path) -> None:
    write_ranks(tmp_path, whole(60), arguments(), 1, 2, 2)
    file = tmp_path / "iter_0000007" / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    del content["model1"]
    torch.save(content, file)
    with pytest.raises(UsageError, match="different numbers of virtual stages"):
        read(tmp_path)


def test_the_model_that_is_told_against_the_arguments(tmp_path: Path) -> None:
    write_ranks(tmp_path, whole(60), arguments())
    with pytest.raises(UsageError, match=r"ffn_size is 36 by its arguments, and 35 by --model"):
        read(tmp_path, section={"ffn_size": 35})
    assert read(tmp_path, section={"ffn_size": 36, "family": "mistral"}).section["family"] == "llama"
    write_ranks(tmp_path / "both", whole(60), arguments(qk_layernorm=True, add_qkv_bias=True))
    with pytest.raises(UsageError, match="qk_layernorm and add_qkv_bias are both set"):
        read(tmp_path / "both")


# ---- torch_dist --------------------------------------------------------------------------------------------------


def with_more(monkeypatch, tensors: Any = None, objects: dict[str, Any] | None = None) -> None:
    """Have the folder hold more than it does: ``tensors`` changes what it has."""
    honest = torch_dist.open_torch_dist

    def more(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        found, kept = honest(folder)
        return (tensors or (lambda given: given))(found), {**kept, **(objects or {})}

    monkeypatch.setattr(torch_dist, "open_torch_dist", more)


def test_extra_states_by_layer(dist: Path, monkeypatch) -> None:
    """Under one key for all layers with the layer in the shard's number, or under a key of its own."""
    states = {1: state_of(1), 0: state_of(2)}
    objects = {"decoder.layers.mlp.linear_fc1._extra_state/shard_1_2": [states[1]]}
    objects["decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"] = [states[0]]
    with_more(monkeypatch, objects=objects)
    found = torch_dist.read_torch_dist(dist)
    assert {module: each[0]["scale_fwd"].tolist() for module, each in found.extra.items()} == {
        f"decoder.layers.{layer}.mlp.linear_fc1": state["scale_fwd"].tolist() for layer, state in states.items()
    }


def test_a_layer_stacked_and_by_itself(dist: Path, monkeypatch) -> None:
    def twice(given: dict[str, Any]) -> dict[str, Any]:
        dtype, shape, chunks = given["decoder.layers.mlp.linear_fc2.weight"]
        own = [(start[1:], guard.Ref(r.path, r.offset, r.dtype, r.shape[1:], r.stride[1:])) for start, r in chunks[:1]]
        return {**given, "decoder.layers.0.mlp.linear_fc2.weight": (dtype, shape[1:], own)}

    with_more(monkeypatch, twice)
    with pytest.raises(UsageError, match="decoder.layers.0.mlp.linear_fc2.weight is there twice"):
        read(dist)


@pytest.mark.parametrize(
    ("tensor", "thing"),
    [
        ("chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg", None),
        ("optimizer.state.exp_avg.gbuf.embedding", None),
        (None, "optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1"),
    ],
)
def test_buffers_of_the_distributed_optimizer(dist: Path, monkeypatch, tensor: str | None, thing: str | None) -> None:
    """Refused with the way out; left behind with ``--weights-only``, by name."""

    def more(given: dict[str, Any]) -> dict[str, Any]:
        return given if tensor is None else {**given, tensor: given["decoder.final_layernorm.weight"]}

    with_more(monkeypatch, more, {} if thing is None else {thing: [1]})
    with pytest.raises(UsageError, match="--dist-ckpt-optim-fully-reshardable, or convert with --weights-only"):
        read(dist)
    assert "the optimizer's state, in Megatron's buffers" in read(dist, weights_only=True).dropped


def test_moments_of_other_optimizers_are_left_behind(dist: Path, monkeypatch) -> None:
    key = "optimizer.state.momentum_buffer.decoder.final_layernorm.weight"
    with_more(monkeypatch, lambda given: {**given, key: given["decoder.final_layernorm.weight"]}, {"rerun/shard_0_1": [1]})
    dropped = read(dist).dropped
    assert key in dropped and "rerun, which is Megatron's own" in dropped


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"relative_path": "../../hf/model.safetensors"}, "not the name of a .distcp file here"),
        ({"relative_path": "/etc/passwd"}, "not the name of a .distcp file here"),
        ({"relative_path": "sub/__0_0.distcp"}, "not the name of a .distcp file here"),
        ({"relative_path": 7}, "not the name of a .distcp file here"),
        ({"relative_path": "__9_9.distcp"}, "refused"),
        ({"offset": -1}, "ends before byte"),
        ({"length": 10**12}, "ends before byte"),
        ({"offset": 10**12}, "ends before byte"),
        ({"transform_descriptors": ["zstd"]}, "compressed or otherwise transformed"),
    ],
)
def test_an_index_that_lies(dist: Path, change: dict[str, Any], said: str) -> None:
    """Where ``.metadata`` says that a tensor's piece is: a file of this folder, bytes inside of it, as they are."""
    metadata = pickle.loads((dist / ".metadata").read_bytes())  # our own
    index = next(index for index in metadata.storage_data if index.fqn == "output_layer.weight")
    for key, value in change.items():
        setattr(metadata.storage_data[index], key, value)
    (dist / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UsageError, match=said):
        read(dist)


def test_pieces_that_are_not_what_the_index_says(dist: Path) -> None:
    def fails(said: str, change: Any) -> None:
        metadata = pickle.loads(good)
        change(metadata)
        (dist / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(UsageError, match=said):
            read(dist)

    def swap(metadata: Any) -> None:
        one, other = (i for i in metadata.storage_data if i.fqn in ("output_layer.weight", "decoder.final_layernorm.weight"))
        data = metadata.storage_data
        data[one], data[other] = data[other], data[one]

    def forget(metadata: Any) -> None:
        metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != "output_layer.weight"}

    def overlap(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[FC2]
        entry.chunks.append(entry.chunks[0])

    good = (dist / ".metadata").read_bytes()
    fails("is not the bfloat16", swap)
    fails("does not say where output_layer.weight", forget)
    fails("linear_fc2.weight is not there exactly once", overlap)
    fails("linear_fc2.weight is not there exactly once", lambda m: m.state_dict_metadata[FC2].chunks.pop())


def test_names_go_there_and_back() -> None:
    """Every parameter of every family that can go has one name of Megatron's, which is ours again."""
    for family in ("llama", "qwen2", "qwen3"):
        names = [group.ours for group in tensor_groups({**SECTION, "family": family})]
        assert [ours(theirs(name)) for name in names] == names
    with pytest.raises(UsageError, match="layers.0.mlp.up.weight has no counterpart"):  # gpt2's
        theirs("layers.0.mlp.up.weight")

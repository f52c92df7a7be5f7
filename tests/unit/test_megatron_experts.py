"""Megatron checkpoints of models with experts, both ways.

What Megatron-core itself wrote (torch_dist of one process) is in tests/golden/megatron_moe.tar.xz.
"""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import open_checkpoint
from checkpoint.hf.config import config_json
from checkpoint.hf.tensors import tensor_groups
from checkpoint.megatron import guard, torch_dist
from checkpoint.megatron.names import gated, one_by_one, ours, split_axis, theirs
from checkpoint.megatron.read import _linear, _state
from checkpoint.megatron.torch_dist import read_torch_dist
from qeffect_lm.app.inference import load_for_inference
from tests.hf_folders import SECTION, contents, make_folder, random_tensors
from tests.megatron_support import arguments, extra_state, in_this_process, run, write_ranks
from tools.convert import main

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_moe.tar.xz"
MIXTRAL = {**SECTION, "family": "mixtral", "moe": {"num_experts": 4, "top_k": 2, "aux_loss_coef": 0.02}}
KINDS = {"param": "param", "master": "master", "exp_avg": "moment1", "exp_avg_sq": "moment2"}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickles are opened in this process, which saves each test a start of torch."""
    monkeypatch.setattr(guard, "ask_child", in_this_process)


def test_every_tensor_is_what_one_process_had(golden: Path, tmp_path: Path) -> None:
    """Parameters, masters and moments: equal bits; logits in float32 within 1e-5 of Megatron-core's."""
    assert run(golden / "dist", tmp_path / "native") == 0
    expected, checkpoint = load_file(golden / "expected.safetensors"), open_checkpoint(tmp_path / "native")
    compared = 0
    for key, tensor in expected.items():
        kind, _, name = key.partition("/")
        if kind not in KINDS:
            continue
        found = ours(name)
        tensor = tensor[:59] if found in ("embedding.weight", "head.weight") else tensor
        assert torch.equal(checkpoint.read(f"{KINDS[kind]}/{found}"), tensor), key
        compared += 1
    assert compared == 4 * 55  # of 4 layers: 4 norms and linears, a router, 8 weights
    section = checkpoint.meta["config"]["model"]
    assert section["family"] == "mixtral" and section["moe"]["num_experts"] == 4 and section["moe"]["aux_loss_coef"] == 0.01
    wide = ["--from", "megatron", "--to", "native", str(golden / "dist"), str(tmp_path / "f32"), "--dtype", "float32"]
    assert main([*wide, "--weights-only", "--allow-pickle", "--quiet"]) == 0
    logits = load_for_inference(tmp_path / "f32", device="cpu").model.logits(expected["tokens"])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)


def test_there_and_back(tmp_path: Path, capsys) -> None:
    """A folder of theirs, into torch_dist and back: the same tensors; what torch sees there, and what the report says."""
    folder = make_folder(tmp_path / "hf", random_tensors(MIXTRAL), config=config_json(MIXTRAL))
    assert main(["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "m")]) == 0
    said = capsys.readouterr().out
    assert "--norm-epsilon 1e-05 --moe-router-dtype fp32 --moe-aux-loss-coeff 0.02\n" in said
    metadata = pickle.loads((tmp_path / "m" / "release" / ".metadata").read_bytes())  # our own
    sizes = {key: tuple(entry.size) for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    at = "decoder.layers.mlp"
    assert sizes[f"{at}.experts.experts.linear_fc1.weight"] == (2, 4, 96, 32)
    assert sizes[f"{at}.experts.experts.linear_fc2.weight"] == (2, 4, 32, 48)
    assert sizes[f"{at}.router.weight"] == (2, 4, 32) and sizes["decoder.layers.pre_mlp_layernorm.weight"] == (2, 32)
    objects = {key for key in metadata.state_dict_metadata if "_extra_state" in key and ".mlp." in key}
    places = [(n, i, e) for n in (1, 2) for i in (0, 1) for e in range(4)]
    assert objects == {f"{at}.experts.experts.linear_fc{n}._extra_state/shard_{i}.{e}_2.4" for n, i, e in places}
    assert run(tmp_path / "m", tmp_path / "back", target="hf") == 0
    assert contents(tmp_path / "back")["model.safetensors"] == contents(folder)["model.safetensors"]
    assert main(["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "x"), "--tp", "2"]) == 2
    assert "mp_rank folders are not written for a model with experts" in capsys.readouterr().err


def test_keys_and_shapes_are_megatrons(golden: Path, tmp_path: Path) -> None:
    """What is written has every parameter under the key and in the shape of Megatron-core's own file, less the padding; but for
    the norm before experts, which goes by the name that Transformer Engine's layers have for it."""
    assert run(golden / "dist", tmp_path / "m", target="megatron") == 0
    written, theirs_ = (
        {name: shape for name, (_, shape, _) in guard.open_torch_dist(folder)[0].items() if not name.startswith("optimizer")}
        for folder in (tmp_path / "m" / "release", golden / "dist" / "iter_0000002")
    )
    fused, own = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    joined = {name.replace(fused, own): shape for name, shape in theirs_.items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        joined[name] = (59, *joined[name][1:])
    assert {name: shape for name, shape in joined.items() if written.get(name) != shape} == {} and len(written) == len(joined)


def test_names() -> None:
    """Each parameter has one name of theirs, which is ours again; grouped layers' numbered weights; which are cut, and how."""
    names = [group.ours for group in tensor_groups(MIXTRAL)]
    assert [ours(theirs(name, experts=True)) for name in names] == names
    at = "decoder.layers.3.mlp.experts"
    one = f"{at}.local_experts.12.linear_fc1.weight"
    assert one_by_one(f"{at}.linear_fc1.weight12") == one == theirs("layers.3.moe.experts.12.gate_up.weight")
    assert one_by_one("decoder.layers.3.mlp.linear_fc1.weight") == "decoder.layers.3.mlp.linear_fc1.weight"
    assert split_axis(one) == 0 and gated(one) and split_axis(one.replace("fc1", "fc2")) == 1
    assert split_axis("decoder.layers.3.mlp.router.weight") is None
    assert ours(f"{at}.local_experts.1.linear_fc3.weight") is None and ours("decoder.layers.0.mlp.experts.weight1") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax is True"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function is 'sigmoid'"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq is "),
        ({"moe_shared_expert_intermediate_size": 64}, "moe_shared_expert_intermediate_size is 64"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias is True"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0"),
        ({"qk_layernorm": True}, "qk_layernorm is True"),
        ({"moe_router_topk": 5}, "moe_router_topk is 5 and num_experts 4"),
        ({"num_experts": "4"}, "num_experts is '4'"),
        ({"num_experts": 400}, "is said to have 4 layers of 400 experts each"),
        ({"moe_router_topk": True}, "moe_router_topk is True"),
        ({}, "has no tensor layers.0.moe.experts.0.down.weight"),
    ],
    ids=str,
)
def test_arguments_that_ours_cannot_be(tmp_path: Path, change: dict[str, Any], said: str, capsys) -> None:
    from tests.megatron_support import whole

    write_ranks(tmp_path / "m", whole(60), arguments(**{"num_experts": 4, **change}))
    assert run(tmp_path / "m", tmp_path / "out") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_fp8_states_of_experts(golden: Path, tmp_path: Path, monkeypatch) -> None:
    """From the rules of the layout: an expert's state is at (layer, expert) of its key. What a grouped layer holds for all
    of its experts at once is left behind, by name."""
    honest = torch_dist.open_torch_dist
    raw = pickle.loads(extra_state(5, 3).numpy().tobytes())
    at = "decoder.layers.mlp.experts.experts.linear_fc2._extra_state"
    more = {f"{at}/shard_2.3_4.4": [raw], "decoder.layers.1.mlp.experts.experts.0.linear_fc1._extra_state/shard_0_1": [raw]}
    more["decoder.layers.1.mlp.experts.linear_fc1._extra_state/shard_0_1"] = [raw]
    monkeypatch.setattr(torch_dist, "open_torch_dist", lambda folder: (honest(folder)[0], {**honest(folder)[1], **more}))
    found = read_torch_dist(golden / "dist" / "iter_0000002")
    named = [_linear(module) for module in found.extra]
    assert named == ["layers.2.moe.experts.3.down", "layers.1.moe.experts.0.gate_up", None]
    parameters = {ours(name): pieces for name, pieces in found.parameters.items()}
    wanted = {name: pieces.shape for name, pieces in parameters.items()}
    items, _, left = _state(found, parameters, wanted, "here")
    assert {item.name for item in items} >= {"scale/layers.2.moe.experts.3.down.grad_output"}
    assert left == ["FP8 scales and histories of decoder.layers.1.mlp.experts.linear_fc1"]

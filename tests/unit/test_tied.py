"""Weights that two layers use: each writes a main gradient of its own, their sum is the parameter's (ranks: tests/dist)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from checkpoint import compare
from models.decoder import Decoder
from models.spec import ParameterSpec
from pipeline.actions import Action, Kind
from pipeline.plan import Plan, make_plan
from pipeline.schedules import Placement
from qeffect_lm.app.assemble import assemble
from qeffect_lm.app.assemble import make_plan as configured_plan
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import resident_bytes
from qeffect_lm.contract.errors import GradSlotError
from qeffect_lm.errors import UsageError
from qeffect_lm.inference.generator import Generator
from qeffect_lm.inference.sampling import Sampling
from qeffect_lm.layers.base import named_parameters
from tests.runs import checkpoint_of, run_here, write_config
from tests.tiny import assert_moved, batch, config, differing, local_plan, train
from tests.unit.test_reference_model import loss_of

TIED: dict[str, Any] = {"model__tie_word_embeddings": True}
FLOAT64: dict[str, Any] = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}
FIRST, SECOND = "layers.0.attention.out.weight", "layers.3.attention.out.weight"


def assert_autograd(run: Any, ties: dict[str, str]) -> None:
    """Loss, every gradient and the norm of the first step, by autograd over one leaf for each parameter."""
    flat = run.assembly.flat
    leaves = {name: flat.master(name).clone().requires_grad_() for name in flat.names}
    data = batch(0)
    shared = leaves | {copy: leaves[source] for copy, source in ties.items()}
    loss = loss_of(shared, data.inputs.flatten(0, 1), data.targets.flatten(0, 1))
    loss.backward()
    assert run.losses[0] == pytest.approx(float(loss.detach()), rel=1e-13)
    for name, leaf in leaves.items():
        torch.testing.assert_close(flat.grad(name), leaf.grad, rtol=1e-9, atol=1e-15, msg=name)
    total = sum(float(leaf.grad.square().sum()) for leaf in leaves.values())
    assert run.norms[0] == pytest.approx(math.sqrt(total), rel=1e-12), "each parameter counts once"


STILL: dict[str, Any] = {**FLOAT64, "optim__clip_norm": None, "optim__lr": 1e-30}


@pytest.mark.parametrize(("stages", "backend"), [(1, "eager"), (1, "host_replay"), (3, "eager")])
def test_embedding_and_head_are_one_weight(stages, backend):
    """One parameter of the model, whose gradient is that of both places; no copy is stored on one rank."""
    settings = config(**TIED, **STILL, graphs__backend=backend)
    run = train(settings, 1, plan=local_plan(stages, 4) if stages > 1 else None)
    assert_autograd(run, {"head.weight": "embedding.weight"})
    flat = run.assembly.flat
    assert "head.weight" not in flat.names and flat.tied_param_buffers == {}
    assert flat.param("head.weight").data_ptr() == flat.param("embedding.weight").data_ptr()
    assert bool(flat.grad("head.weight").any()) and not torch.equal(flat.grad("head.weight"), flat.grad("embedding.weight"))


@pytest.mark.parametrize("more", [{}, {"graphs__scope": "step"}, {"optim__name": "muon"}], ids=["action", "step", "muon"])
def test_captured_equals_eager_over_all_placements(more):
    """Six steps in bfloat16 with FP8 layers: graphs, stages and schedules give the same bits."""
    settings = {**TIED, "precision__dtype": "bfloat16", **{k: v for k, v in more.items() if k.startswith("optim")}}
    eager = train(config(**settings))
    assert_moved(eager)
    others = [train(config(**settings | more, graphs__backend="host_replay"))]
    others += [train(config(**settings), plan=local_plan(stages, 4)) for stages in (2, 3)]
    others.append(train(config(**settings, pipeline__schedule="gpipe", pipeline__w_delay=0)))
    for other in others:
        assert (other.losses, other.norms) == (eager.losses, eager.norms)
        assert differing(other.tensors, eager.tensors) == []
    assert train(config(**settings | {"model__tie_word_embeddings": False})).losses != eager.losses


def test_what_stood_there_before_is_gone():
    """G1 for both producers; and a step whose head never wrote names it."""
    assembly = assemble(config(**TIED))
    assembly.prepare(batch(0))
    clean = train(config(**TIED), 1)
    for name in assembly.flat.gradient_names:
        assembly.flat.grad(name).fill_(7.0)
    assert float(assembly.engine.step(0, batch(0)).grad_norm) == clean.norms[0]
    assert assembly.flat.gradient_names[-1] == "head.weight"

    head = assembly.engine.stages[0].chunk.blocks[-1]
    head.weight_grad = lambda context: context.active_scope().take_weight_grad(head.name)
    with pytest.raises(GradSlotError, match="head.weight.* with 0 of 4 contributions"):
        assembly.engine.step(1, batch(1))


def _two_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output projections of the first and the last decoder layer are one weight."""
    specs = Decoder.parameters

    def parameters(self: Decoder, layers: Any = None) -> list[ParameterSpec]:
        return [spec for spec in specs(self, layers) if spec.name != SECOND]

    monkeypatch.setattr(Decoder, "parameters", parameters)
    monkeypatch.setattr(Decoder, "ties", {SECOND: FIRST})


def _plan(order: list[int]) -> Plan:
    """Two chunks on one rank, whose Ws come in this order of chunks."""
    actions = [Action(Kind.F, chunk, m) for m in range(4) for chunk in (0, 1)]
    actions += [Action(Kind.I, chunk, m) for m in range(4) for chunk in (1, 0)]
    actions += [Action(Kind.W, chunk, m) for chunk in order for m in range(4)]
    return make_plan("local", [actions], Placement((0, 0)), 4)


def test_a_weight_of_two_linears(monkeypatch):
    """L1: both defer W; the gradient is the sum, in every order of the two Ws, with the same bits."""
    _two_linears(monkeypatch)
    runs = [train(config(**STILL), 1, plan=_plan(order)) for order in ([0, 1], [1, 0])]
    for run in runs:
        assert_autograd(run, {SECOND: FIRST})
    assert torch.equal(*(run.assembly.flat.grad(FIRST) for run in runs))


def test_what_is_refused(monkeypatch):
    """A weight that is half frozen; a tied weight in FP8, whose cache would have no master."""
    chunk_of = Decoder.chunk

    def freezing(*args: Any, **more: Any) -> Any:
        made = chunk_of(*args, **more)
        for name, parameter in named_parameters(made):
            parameter.requires_grad_(name != "embedding.weight")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "chunk", freezing)
        with pytest.raises(UsageError, match="embedding.weight is frozen and head.weight is not"):
            assemble(config(**TIED))
    _two_linears(monkeypatch)
    with pytest.raises(UsageError, match=f"{SECOND} is tied and in FP8"):
        assemble(config())


def test_a_frozen_weight_of_two_layers(monkeypatch):
    """Both frozen: it keeps its bytes, has no gradient and no moments, and the rest trains."""
    chunk_of = Decoder.chunk

    def freezing(*args: Any, **more: Any) -> Any:
        made = chunk_of(*args, **more)
        for name, parameter in named_parameters(made):
            parameter.requires_grad_(name not in ("embedding.weight", "head.weight"))
        return made

    monkeypatch.setattr(Decoder, "chunk", freezing)
    first = assemble(config(**TIED)).flat.master("embedding.weight").clone()
    run = train(config(**TIED), 2)
    assert torch.equal(run.assembly.flat.master("embedding.weight"), first) and run.norms[0] > 0
    assert "moment1/embedding.weight" not in run.tensors and "head.weight" not in run.assembly.flat.gradient_names


def test_memory_of_a_dry_run():
    """Two stages: the last one holds a copy in the compute type and a gradient, and nothing of masters and moments. The first
    one receives that gradient in a buffer of its own."""
    both = [
        config(**{"model__tie_word_embeddings": tied}, precision__dtype="bfloat16", parallel__pp=2) for tied in (True, False)
    ]
    table = 64 * 32
    (first, last), (first_untied, last_untied) = (
        [resident_bytes(Layout(settings), configured_plan(settings), rank, "cpu") for rank in (0, 1)] for settings in both
    )
    assert first == first_untied | {"main gradients": first_untied["main gradients"] + 4 * table}
    assert last["main gradients"] == last_untied["main gradients"] and last["parameters"] == last_untied["parameters"]
    assert last_untied["moments"] - last["moments"] == 8 * table
    assert last_untied["masters"] - last["masters"] == 4 * table


def test_a_run_and_its_checkpoints(tmp_path):
    """Trained in bfloat16 main gradients, resumed from the middle with the same bits, read for sampling; no head is saved."""
    write_config(tmp_path)
    options = ["model.tie_word_embeddings=true", "precision.main_grads=bfloat16", "precision.dtype=bfloat16", "train.steps=6"]
    assert run_here(tmp_path, "whole", *options)[0] == 0
    middle = tmp_path / "whole/checkpoints/step_00000003"
    assert run_here(tmp_path, "again", *options, f"checkpoint.resume={middle}")[0] == 0
    compared = compare(checkpoint_of(tmp_path, "whole"), checkpoint_of(tmp_path, "again"))
    assert not compared.different and not compared.only_in_a and not compared.only_in_b and len(compared.equal) > 30
    assert not any("head" in name for name in compared.equal)
    with pytest.raises(UsageError, match="precision.main_grads"):
        run_here(tmp_path, "other", *options, f"checkpoint.resume={middle}", "precision.main_grads=float32")
    model = load_for_inference(tmp_path / "whole/checkpoints").model
    table = checkpoint_of(tmp_path, "whole").read("param/embedding.weight")
    assert torch.equal(model.blocks[-1].weight, table)
    assert model.blocks[-1].weight.data_ptr() == model.tensors["embedding.weight"].data_ptr(), "it is there once"
    assert len(list(Generator(model, Sampling()).run([[1, 2, 3]], 5))) == 5

"""Imported models equal ``transformers``': logits and gradients in float32, with padding; after training, and back again."""

from __future__ import annotations

import pytest
import torch

from checkpoint.hf import config_json, export_tensors, import_tensors, model_section
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from qeffect_lm.runtime.routing import routing_metrics
from tests.hf_models import CONTEXT, MODELS, VOCAB, apart, make, tensors, together
from tests.tiny import Batch, differing, logits_of

BOUND = 1e-5
MICROBATCHES, BATCH = 2, 2


def imported(model, **keys) -> tuple[Assembly, dict]:
    """Our model of theirs, through config.json and names alone."""
    section = model_section(model.config.to_diff_dict()).section
    settings = Config.from_dict(
        {
            "run": {"device": "cpu"},
            "model": section,
            "pipeline": {"microbatches": MICROBATCHES},
            "data": {"seq_len": CONTEXT, "microbatch_size": BATCH},
            "optim": {"warmup_steps": 0, "lr": 1e-3, "clip_norm": None},
            "train": {"steps": 10},
            **keys,
        }
    )
    assembly = assemble(settings)
    load(assembly, import_tensors(section, tensors(model)))
    return assembly, section


def load(assembly: Assembly, made: dict[str, torch.Tensor]) -> None:
    flat = assembly.flat
    assert sorted(made) == sorted(flat.names), "one tensor for every parameter"
    for name, tensor in made.items():
        assert flat.master(name).shape == tensor.shape, name
        flat.master(name).copy_(tensor)
    flat.gather()
    for copy, entry in flat.tied.items():
        if copy in flat.tied_param_buffers:
            flat.param(copy).copy_(flat.master(entry.tied_to))


def padded_batch(seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """Random tokens, the ends of some sequences padding; and which are none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (MICROBATCHES, BATCH, CONTEXT + 1), generator=generator)
    lengths = torch.tensor([[CONTEXT, CONTEXT - 5], [7, CONTEXT - 1]])
    real = torch.arange(CONTEXT) < lengths[..., None]
    mask = real.float()
    return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), mask, int(mask.sum())), real


def their_logits(model, inputs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return model(input_ids=inputs, attention_mask=real.long()).logits


def their_loss(model, data: Batch, real: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens of the step that count."""
    total = torch.zeros(())
    for m in range(MICROBATCHES):
        logits = their_logits(model, data.inputs[m], real[m])
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.targets[m].flatten(), reduction="none")
        total = total + (losses * data.loss_mask[m].flatten()).sum()
        if model.config.model_type == "mixtral":
            total = total + model.config.router_aux_loss_coef * balance(model, data.inputs[m], real[m]) * real[m].sum()
    return total / data.tokens


def balance(model, inputs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Their load-balancing loss of one microbatch, layer by layer, as a mean over layers."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = model(input_ids=inputs, attention_mask=real.long(), output_router_logits=True).router_logits
    experts, k = model.config.num_local_experts, model.config.num_experts_per_tok
    return torch.stack([load_balancing_loss_func((layer,), experts, k, real.long()) for layer in logits]).mean()


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = (got - want).abs().max().item()
    assert got.shape == want.shape and error <= BOUND * max(1.0, want.abs().max().item()), (what, error)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    """Every logit of a token that is no padding, and the gradient of every tensor under their names."""
    model = make(name)
    assembly, section = imported(model)
    data, real = padded_batch()
    with torch.no_grad():
        for m in range(MICROBATCHES):
            want = their_logits(model, data.inputs[m], real[m])
            assert want.std() > 0.1, "logits worth comparing"
            close(logits_of(assembly, data.inputs[m])[real[m]], want[real[m]], "logits")

    loss = their_loss(model, data, real)
    loss.backward()
    assembly.prepare(data)
    result = assembly.engine.step(0, data)
    if model.config.model_type == "mixtral":  # ours is reported by itself
        values = [balance(model, data.inputs[m], real[m]) * real[m].sum() / data.tokens for m in range(MICROBATCHES)]
        balanced, logged = sum(values).item(), routing_metrics(result.routing)["aux_loss"]
        assert abs(logged - balanced) < BOUND * balanced
        loss = loss - model.config.router_aux_loss_coef * balanced
    assert abs(float(result.loss) - loss.item()) < BOUND * loss.item()
    flat = assembly.flat
    grads = {entry: flat.grad(entry).clone() for entry in flat.names}
    theirs = apart({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, got in export_tensors(section, grads).items():
        assert theirs[key].abs().max() > 0 or ".experts." in key, key  # one of eleven is idle
        close(got, theirs[key], key)


@pytest.mark.parametrize("name", ["llama-biases", "mistral-window", "mixtral", "qwen2-window-tied", "qwen3", "gpt2"])
def test_train_and_back(name):
    """Three steps of ours, then their class with our numbers: its logits are ours."""
    model = make(name)
    assembly, section = imported(model)
    before = {n: assembly.flat.master(n).clone() for n in assembly.flat.names}
    for step in range(3):
        assembly.engine.step(step, padded_batch(step)[0])
    after = {n: assembly.flat.master(n).clone() for n in assembly.flat.names}
    assert differing(before, after) == sorted(before), "every tensor moved"
    fresh = make(name, seed=1)
    fresh.load_state_dict(together(fresh, export_tensors(section, after)), strict=not model.config.tie_word_embeddings)
    fresh.tie_weights()
    data, real = padded_batch(9)
    with torch.no_grad():
        for m in range(MICROBATCHES):
            want = their_logits(fresh, data.inputs[m], real[m])
            close(logits_of(assembly, data.inputs[m])[real[m]], want[real[m]], "logits after training")
            assert (want - their_logits(model, data.inputs[m], real[m])).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_byte_equal(name):
    """Without training nothing changes: tensors in any dtype, config.json as it came, or one that means the same."""
    model = make(name)
    config = model.config.to_diff_dict()
    section = model_section(config).section
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = {key: tensor.to(dtype) for key, tensor in tensors(model).items()}
        assert differing(export_tensors(section, import_tensors(section, theirs)), theirs) == []
    assert config_json(section, config) == config
    made = config_json(section)
    assert model_section(made).section == section
    again = type(model)(type(model.config)(**made)).eval()
    again.load_state_dict(model.state_dict())
    data, real = padded_batch()
    with torch.no_grad():
        assert torch.equal(their_logits(again, data.inputs[0], real[0]), their_logits(model, data.inputs[0], real[0]))

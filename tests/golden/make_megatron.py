"""Checkpoints made by Megatron-core itself, for what ``tools.convert --from megatron`` has to read.

    python tests/golden/make_megatron.py OUT.tar.xz                    # Megatron-core importable, or --megatron FOLDER
    python tests/golden/make_megatron.py OUT.tar.xz --te               # on a GPU, layers of Transformer Engine, FP8 histories
    python tests/golden/make_megatron.py OUT.tar.xz --moe              # a model with experts
    python tests/golden/make_megatron.py FOLDER --check                # the other way round: it loads what a conversion wrote

FOLDER holds ``expected.safetensors`` and ``converted``, which ``tools.convert --to megatron`` made of that model (without
``--tp`` and ``--pp``, or with both 1); Megatron-core's logits with it have to be the expected ones, bit for bit. With ``--moe``
those of a model with experts.

Megatron-core's own models, optimizer and checkpoint code run, with tiny sizes: first one process, whose model says what is
right (logits in float32, every parameter, master and moment), then four with two tensor-parallel and two pipeline ranks,
which load that checkpoint, resharding it themselves, and save it in each layout:

    expected.safetensors    what one process holds, by Megatron's names; ``tokens`` and ``logits``
    dist/                   torch_dist of one process, with optimizer
    dist_tp2_pp2/           torch_dist of four, with optimizer, layers stacked under one key (the default)
    dist_layers/            torch_dist of four, each layer and each half of gate and up under a key of its own, with common.pt
    torch_tp2_pp2/          mp_rank folders, with optimizer
    te/                     (--te) torch_dist of one process after FP8 steps, with the layers' extra states

and with ``--moe`` likewise ``expected.safetensors`` and ``dist/``.

Megatron-core wants a GPU and Python 3.12 for training. What is used of it here runs on a CPU and Python 3.11 too, once a
few of its calls that name CUDA mean the CPU (:func:`without_cuda`); nothing of what it computes or writes is changed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import typing
from functools import partial
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, PADDED, SEQUENCE = 4, 16, 4, 2, 8, 24, 59, 64, 16
STEPS, BATCH = 2, 8
EXPERTS, TOP_K = 4, 2
TE_SIZES = {"hidden_size": 128, "ffn_hidden_size": 256, "kv_channels": 32}  # FP8 products want multiples of 16


def without_cuda() -> None:
    """Let the calls of Megatron-core that name CUDA mean the CPU."""
    import contextlib

    import torch

    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        make = getattr(torch, name)

        def on_cpu(*args: Any, device: Any = None, make: Any = make, **kwargs: Any) -> Any:
            return make(*args, device=None if device is None or "cuda" in str(device) else device, **kwargs)

        setattr(torch, name, on_cpu)
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (  # type: ignore[method-assign, assignment]
        kind(self, *args, **kwargs) if args or kwargs else kind(self).replace("torch.", "torch.cuda.")
    )
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda self, *_, **__: contextlib.nullcontext()


def build(dtype: Any, *, te: bool = False, moe: bool = False, tp: int = 1, pp: int = 1, ep: int = 1) -> Any:
    """This rank's part of the model."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "kv_channels": HEAD_DIM, **(TE_SIZES if te else {})}
    config = TransformerConfig(
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        **sizes,
        use_cpu_initialization=not te,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        **(MOE | {"expert_model_parallel_size": ep} if moe else {}),
        **({"fp8": "hybrid", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"} if te else {}),
    )
    if te:
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec(EXPERTS if moe else None, False, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=500000,
        share_embeddings_and_output_weights=False,
    )
    return model.to(dtype)  # torch's norms were made in float32


# Megatron-core's options of a model with experts, which are Mixtral's.
MOE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_router_dtype": "fp32",
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "allgather",
}
MOE_ARGS = {
    "num_experts": EXPERTS,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": FFN,
    "moe_router_topk": TOP_K,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": None,
    "moe_grouped_gemm": False,
}


def optimizer_of(model: Any) -> Any:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model.ddp_config = DistributedDataParallelConfig()
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=False, clip_grad=1.0
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def arguments(tp: int, pp: int, te: bool = False, moe: bool = False, ep: int = 1) -> argparse.Namespace:
    """What Megatron's training script saves of its arguments, those that describe the model and the training."""
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "kv_channels": HEAD_DIM, **(TE_SIZES if te else {})}
    return argparse.Namespace(
        **sizes,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=KV_HEADS,
        seq_length=SEQUENCE,
        max_position_embeddings=64,
        position_embedding_type="rope",
        add_position_embedding=True,
        use_rotary_position_embeddings=True,
        rotary_base=500000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=False,
        add_bias_linear=False,
        add_qkv_bias=False,
        swiglu=True,
        squared_relu=False,
        untie_embeddings_and_output_weights=True,
        apply_layernorm_1p=False,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        qk_layernorm=False,
        **(MOE_ARGS if moe else {"num_experts": None}),
        mtp_num_layers=None,
        multi_latent_attention=False,
        window_size=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=VOCAB,
        padded_vocab_size=PADDED,
        make_vocab_size_divisible_by=16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=ep,
        params_dtype=__import__("torch").bfloat16,
        iteration=STEPS,
        consumed_train_samples=STEPS * BATCH,
        consumed_valid_samples=0,
        ckpt_format="torch_dist",
        tokenizer_type="NullTokenizer",
        world_size=tp * pp,
        lr=1e-2,
    )


def state(
    model: Any, optimizer: Any, tp: int, pp: int, metadata: dict[str, Any] | None, te: bool = False, **more: Any
) -> dict[str, Any]:
    """What is saved: as Megatron's own training script puts it together."""
    import torch

    made: dict[str, Any] = {"args": arguments(tp, pp, te, **more), "checkpoint_version": 3.0, "iteration": STEPS}
    if metadata is None:
        made["model"] = model.state_dict_for_save_checkpoint()
        if optimizer is not None:
            made["optimizer"] = optimizer.state_dict()
        made["rng_state"] = [{"torch_rng_state": torch.get_rng_state()[:16].clone()}]
    else:
        made["model"] = model.sharded_state_dict(metadata=dict(metadata))
        if optimizer is not None:
            made["optimizer"] = optimizer.sharded_state_dict(made, metadata=dict(metadata))
    made["opt_param_scheduler"] = {"max_lr": 1e-2, "num_steps": STEPS * BATCH}
    made["num_floating_point_operations_so_far"] = 12345
    return made


def save_dist(path: Path, saved: dict[str, Any], metadata: dict[str, Any]) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    folder = path / f"iter_{STEPS:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (path / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    dist_checkpointing.save(saved, str(folder), content_metadata=metadata, async_strategy="mcore")
    dist.barrier()


METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
LAYERWISE = {"singleton_local_shards": True, "chained_optim_avoid_prefix": True}


def one_process(out: Path, moe: bool = False) -> None:
    """The model that says what is right, and its checkpoint."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    model = build(torch.bfloat16, moe=moe)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.3 * noise)
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.main_grad = torch.randn(parameter.shape) * 0.1
        optimizer.step()
    expected: dict[str, Any] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        pairs = zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True)
        for parameter, master in (pair for group, masters in pairs for pair in zip(group, masters, strict=True)):
            name, moments = names[id(parameter)], inner.optimizer.state[master]
            expected[f"param/{name}"], expected[f"master/{name}"] = parameter.detach(), master.detach()
            expected[f"exp_avg/{name}"], expected[f"exp_avg_sq/{name}"] = moments["exp_avg"], moments["exp_avg_sq"]
    assert len(expected) == 4 * len(names)
    wide = build(torch.float32, moe=moe)
    wide.load_state_dict({k: v.float() if v is not None else v for k, v in model.state_dict().items()})
    tokens = torch.randint(0, VOCAB, (2, SEQUENCE))
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = wide(tokens, torch.arange(SEQUENCE)[None].expand(2, SEQUENCE), mask)
    expected |= {"tokens": tokens, "logits": logits[..., :VOCAB].contiguous()}
    save_file({name: tensor.clone().contiguous() for name, tensor in expected.items()}, out / "expected.safetensors")
    save_dist(out / "dist", state(model, optimizer, 1, 1, METADATA, moe=moe), METADATA)


def four_processes(out: Path) -> None:
    """Two tensor-parallel and two pipeline ranks, from the checkpoint of one process."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    model = build(torch.bfloat16, tp=2, pp=2)
    optimizer = optimizer_of(model)
    wanted: dict[str, Any] = {"model": model.sharded_state_dict(metadata=dict(METADATA))}
    wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=dict(METADATA))
    loaded = dist_checkpointing.load(wanted, str(out / "dist" / f"iter_{STEPS:07d}"))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    save_dist(out / "dist_tp2_pp2", state(model, optimizer, 2, 2, METADATA), METADATA)
    save_dist(out / "dist_layers", state(model, None, 2, 2, LAYERWISE), LAYERWISE)
    if dist.get_rank() == 0:  # as versions before 0.19 kept what is no tensor
        common = {"args": arguments(2, 2), "checkpoint_version": 3.0, "iteration": STEPS, "content_metadata": LAYERWISE}
        torch.save(common, out / "dist_layers" / f"iter_{STEPS:07d}" / COMMON_STATE_FNAME)
    tensor, pipeline = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    folder = out / "torch_tp2_pp2" / f"iter_{STEPS:07d}" / f"mp_rank_{tensor:02d}_{pipeline:03d}"
    folder.mkdir(parents=True)
    torch.save(state(model, optimizer, 2, 2, None), folder / "model_optim_rng.pt")
    (out / "torch_tp2_pp2" / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def with_te(out: Path) -> None:
    """Two FP8 forwards and backwards of one process on a GPU; the scales and histories also as plain tensors."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from safetensors.torch import save_file

    model_parallel_cuda_manual_seed(1)
    model = build(torch.bfloat16, te=True).cuda()
    tokens = torch.randint(0, VOCAB, (2, SEQUENCE), device="cuda")
    positions = torch.arange(SEQUENCE, device="cuda")[None].expand(2, SEQUENCE)
    for step in range(STEPS):
        loss = model(tokens, positions, None, labels=tokens).float().mean() * (1 + step)
        loss.backward()
    model(tokens, positions, None)  # the roll of the last backward happens before the next forward
    torch.cuda.synchronize()
    saved = state(model, None, 1, 1, METADATA, te=True)
    expected = {f"param/{name}": parameter.detach().cpu() for name, parameter in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        if name.endswith("_extra_state") and isinstance(tensor, torch.Tensor) and tensor.numel():
            content = pickle.loads(tensor.cpu().numpy().tobytes())  # our own, made a moment ago
            for key in ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd"):
                if key in content:
                    expected[f"{key}/{name.removesuffix('._extra_state')}"] = content[key].cpu().clone()
    save_file({name: tensor.clone().contiguous() for name, tensor in expected.items()}, out / "expected_te.safetensors")
    save_dist(out / "te", saved, METADATA)


def check(out: Path, moe: bool = False) -> None:
    """Load a converted checkpoint as Megatron does, and compare logits."""
    import torch
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    folder, expected = out / "converted" / "release", load_file(out / "expected.safetensors")
    assert (folder.parent / "latest_checkpointed_iteration.txt").read_text() == "release"
    model = build(torch.bfloat16, moe=moe)
    if (folder / "metadata.json").exists():
        wanted = {"model": model.sharded_state_dict(metadata=dict(METADATA))}
        state = dist_checkpointing.load(wanted, str(folder))
        assert dist_checkpointing.load_content_metadata(str(folder)) is not None
    else:
        state = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
        norms = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
        for theirs, ours in norms.items():
            for name in [name for name in state["model"] if ours in name]:  # these layers keep norms by themselves
                state["model"][name.replace(ours, theirs)] = state["model"].pop(name)
        for name in [name for name in state["model"] if "core_attention" in name]:
            del state["model"][name]
        for name in ("output_layer.weight", "embedding.word_embeddings.weight"):
            state["model"][name] = state["model"][name][:PADDED]  # Megatron's divisor is 128 there, and 64 here
    assert state["args"].num_layers == LAYERS and state["checkpoint_version"] == 3.0
    print(model.load_state_dict(state["model"], strict=True))
    wide = build(torch.float32, moe=moe)
    wide.load_state_dict({k: v.float() if v is not None else v for k, v in model.state_dict().items()})
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = wide(expected["tokens"], torch.arange(SEQUENCE)[None].expand(2, SEQUENCE), mask)[..., :VOCAB]
    print("logits equal:", torch.equal(logits, expected["logits"]), f"(largest {float(logits.abs().max()):.3f})")
    assert torch.equal(logits, expected["logits"])


PHASES = {
    "check": check,
    "one": one_process,
    "four": four_processes,
    "te": with_te,
    "moe-check": partial(check, moe=True),
    "moe-one": partial(one_process, moe=True),
}


def rank(phase: str, out: Path) -> None:
    """One process of a phase."""
    import torch.distributed as dist

    if phase != "te":
        without_cuda()
    from megatron.core import parallel_state

    dist.init_process_group("nccl" if phase == "te" else "gloo")
    split = 2 if phase == "four" else 1
    parallel_state.initialize_model_parallel(split, split)
    PHASES[phase](out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megatron", help="a folder with the package megatron (and what it needs), put before others")
    parser.add_argument("--te", action="store_true")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.megatron:
        sys.path[:0] = given.megatron.split(os.pathsep)
    if given.phase:
        rank(given.phase, given.out)
        return
    if given.check:
        run("moe-check" if given.moe else "check", str(given.out), given.megatron)
        return
    with tempfile.TemporaryDirectory() as folder:
        for phase in ["te"] if given.te else ["moe-one"] if given.moe else ["one", "four"]:
            run(phase, folder, given.megatron)
        with tarfile.open(given.out, "w:xz", preset=9) as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name, filter=_plain)


def run(phase: str, folder: str, megatron: str | None) -> None:
    """All processes of a phase."""
    world = 4 if phase == "four" else 1
    command = [sys.executable, __file__, folder, "--phase", phase, *(["--megatron", megatron] if megatron else [])]
    processes = []
    for number in range(world):
        env = {**os.environ, "RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
        processes.append(subprocess.Popen(command, env=env))
    if any([process.wait() for process in processes]):
        sys.exit(f"phase {phase} failed")


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()

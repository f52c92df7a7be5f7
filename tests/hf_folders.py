"""Small Hugging Face folders made without ``transformers``, for what has to be refused, killed or measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoint.hf import tensor_groups
from checkpoint.hf.config import config_json

SECTION: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 48,
    "max_position_embeddings": 64,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def random_tensors(section: dict[str, Any], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Theirs, by name."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [theirs for group in tensor_groups(section) for theirs in group.theirs]
    return {name: (torch.randn(shape, generator=generator) * 0.1).to(dtype) for name, shape in shapes}


def make_folder(
    path: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
    config: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A folder with ``config.json`` and one file of tensors, or several and their index; ``keys`` change the configuration."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(SECTION) if tensors is None else tensors
    made = {**(config or config_json(SECTION)), "torch_dtype": "bfloat16", **keys}
    (path / "config.json").write_text(json.dumps(made, indent=2) + "\n")
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def contents(path: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whatever files they are in."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}

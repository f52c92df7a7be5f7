"""Stages that are plain torch modules, for tests of the adapters: a small decoder of linears, norms and an embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH = 32, 16, 8  # multiples of what FP8 products on a GPU take


class Block(nn.Module):
    """A residual MLP with a norm and biases. ``again``: torch's activation checkpointing, reentrant or not; ``runs`` counts."""

    def __init__(self, again: str | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.again, self.runs = again, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again is None:
            return self._body(x)
        made: torch.Tensor = checkpoint(self._body, x, use_reentrant=self.again == "reentrant")
        return made

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.down(F.gelu(self.up(self.norm(x))))


class First(nn.Module):
    def __init__(self, again: str | None) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCAB, WIDTH), Block(again)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(tokens))


class Last(nn.Module):
    def __init__(self, again: str | None) -> None:
        super().__init__()
        self.block, self.norm, self.head = Block(again), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))


def model(stages: int, dtype: torch.dtype = torch.float32, again: str | None = None, seed: int = 0) -> list[nn.Module]:
    """The stages of one model, the same on every rank."""
    torch.manual_seed(seed)
    if stages == 1:
        return [nn.Sequential(First(again), Last(again)).to(dtype)]
    made: list[nn.Module] = [First(again), *(Block(again) for _ in range(stages - 2)), Last(again)]
    return [module.to(dtype) for module in made]


def batch(size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (size, LENGTH), generator=draw) for _ in range(2))  # type: ignore[return-value]


def loss_fn(output: torch.Tensor, target: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def by_hand(modules: Sequence[nn.Module], size: int, microbatches: int, steps: int = 1) -> tuple[list[float], dict[str, Any]]:
    """Losses and gradients of one process with autograd alone: the mean over microbatches, SGD after each step."""
    told = []
    for step in range(steps):
        for module in modules:
            module.zero_grad()
        tokens, target = batch(size, 1 + step)
        for x, y in zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True):
            for module in modules:
                x = module(x)
            loss = loss_fn(x, y)
            told.append(loss.item())
            (loss / microbatches).backward()
        grads = {f"{i}.{n}": p.grad for i, m in enumerate(modules) for n, p in m.named_parameters()}
        descend(modules)
    return told, grads


@torch.no_grad()
def descend(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad


def stages_of(
    modules: Sequence[nn.Module], ranks: int, rank: int, shape: str, make: Callable[..., Any], device: str = "cpu"
) -> list[Any]:
    """This rank's stages, placed in a loop or a V."""
    count = len(modules)
    placed = [i for i in range(count) if (i % ranks if shape == "loop" else min(i, count - 1 - i)) == rank]
    return [make(modules[i].to(device), i, count, torch.device(device)) for i in placed]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def pipeline(
    rank: int,
    world: int,
    name: str,
    *,
    stages: int,
    microbatches: int = 4,
    size: int = 8,
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
    again: str | None = None,
    torch_stages: bool = False,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """Steps of our schedule ``name`` on ``world`` ranks: losses, the last step's gradients, outputs, buffers, forwards run."""
    from torch.distributed.pipelining import PipelineStage as TorchStage

    from qeffect_lm.integrations import pipelining

    if world == 1 and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    modules = model(stages, dtype, again)
    shape = "v" if "V" in name else "loop"
    held = stages_of(modules, world, rank, shape, TorchStage if torch_stages else pipelining.PipelineStage, device)
    schedule = getattr(pipelining, name)(held, microbatches, loss_fn=loss_fn, **options)
    mine = [stage.submod for stage in held]
    losses, outputs = [], []
    for step in range(steps):
        for module in mine:
            module.zero_grad()
        tokens, target = (t.to(device) for t in batch(size, 1 + step))
        told: list[torch.Tensor] = []
        first, last = (any(getattr(s, word) for s in held) for word in ("is_first", "is_last"))
        out = schedule.step(*((tokens,) if first else ()), target=target if last else None, losses=told)
        losses += [loss.item() for loss in told]
        outputs.append(None if out is None else out.detach().cpu())
        grads = {f"{s.stage_index}.{n}": p.grad.cpu().clone() for s in held for n, p in s.submod.named_parameters()}
        descend(mine)
    runs = {f"{s.stage_index}.{n}": m.runs for s in held for n, m in s.submod.named_modules() if isinstance(m, Block)}
    buffers = {key: border.buffers for key, border in schedule.runner._training.items()}
    state = None if schedule.fp8 is None else {name: raw(t) for name, t in schedule.fp8.state_dict().items()}
    parameters = {f"{s.stage_index}.{n}": p.detach().cpu().clone() for s in held for n, p in s.submod.named_parameters()}
    return {
        "losses": losses, "grads": grads, "outputs": outputs, "runs": runs, "buffers": buffers, "state": state,
        "parameters": parameters, "report": schedule.report(),
    }  # fmt: skip

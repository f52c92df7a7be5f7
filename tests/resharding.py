"""Layouts for tests of resharding: all ranks of one in this process, restored, saved, compared, and training on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis import strategies as st

from checkpoint import Checkpoint, Communicator, compare, open_checkpoint, save_checkpoint
from checkpoint.resume import check_replicas, contract_meta, restore, saved_state
from models.decoder import Decoder
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.layers.base import named_parameters
from qeffect_lm.parallel.mesh import Mesh
from tests.checkpoint_support import on_ranks
from tests.tiny import Batch, batch, config, train

AT_ONCE = (Phase.explicit, Phase.reuse, Phase.generate)  # an example takes a second: a smaller one is not looked for
LAYERS = 4
FROZEN = ("layers.1.mlp.down.weight", "layers.2.mlp_norm.weight")
TINY: dict[str, Any] = {"model__num_layers": LAYERS, "model__vocab_size": 259}
MODELS: dict[str, dict[str, Any]] = {
    "float32": TINY,
    "microbatch": {**TINY, "precision__fp8__window": "microbatch"},
    "bfloat16": {**TINY, "precision__dtype": "bfloat16", "optim__moments": "bfloat16", "optim__beta2": 0.99},
    "tied": {**TINY, "precision__dtype": "bfloat16", "model__tie_word_embeddings": True, "optim__skip_sigma": 6.0},
    "tied float32": {**TINY, "model__tie_word_embeddings": True},
    "frozen": {**TINY, "precision__dtype": "bfloat16"},
    # Shards are cut in multiples of 65,536 elements: an embedding of 2.05 of them is cut inside of a row.
    "large": {**TINY, "model__vocab_size": 4201, "parallel__bucket_mib": 0.26, "precision__dtype": "bfloat16"},
}
ONE_CHUNK, SOME_CHUNKS = ("gpipe", "1f1b", "zb-h1", "zb-h2"), ("interleaved-1f1b", "zb-v", "dualpipev")


@dataclass(frozen=True)
class Layout:
    """How ranks, chunks and optimizer state are laid out."""

    pp: int = 1
    dp: int = 1
    schedule: str = "gpipe"
    chunks: int = 1  # per rank
    stage_layers: tuple[int, ...] = (LAYERS,)
    zero: int = 0

    @property
    def world(self) -> int:
        return self.pp * self.dp

    def settings(self, model: str) -> dict[str, Any]:
        return {
            **MODELS[model],
            "parallel__pp": self.pp,
            "parallel__dp": self.dp,
            "pipeline__schedule": self.schedule,
            "pipeline__w_delay": 0,
            "pipeline__chunks": self.chunks,
            "pipeline__stage_layers": list(self.stage_layers),
            "optim__zero": self.zero,
        }


@st.composite
def layouts(draw: st.DrawFn, most: int = 12) -> Layout:
    """PP 1 to 4, DP 1 to 3, any schedule with its chunks, any split of the layers, with or without shared optimizer state."""
    pp = draw(st.integers(1, 4))
    dp = draw(st.integers(1, max(1, min(3, most // pp))))
    schedule = draw(st.sampled_from((*ONE_CHUNK, *SOME_CHUNKS)))
    chunks = 1
    if schedule in SOME_CHUNKS:
        chunks = draw(st.integers(2, 3)) if schedule == "interleaved-1f1b" else 2
    edges = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=pp * chunks - 1, max_size=pp * chunks - 1)))
    bounds = [0, *edges, LAYERS]
    split = tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    return Layout(pp, dp, schedule, chunks, split, draw(st.integers(0, 1)))


class Anywhere:
    """A data cursor that takes every place."""

    def __init__(self) -> None:
        self.place: Any = None

    def state(self) -> Any:
        return self.place

    def load_state(self, state: Any) -> None:
        self.place = state


@contextmanager
def frozen(model: str) -> Iterator[None]:
    """Some weights are frozen in the model ``frozen``."""
    chunk = Decoder.chunk

    def with_frozen(self: Decoder, *arguments: Any) -> Any:
        made = chunk(self, *arguments)
        for name, parameter in named_parameters(made):
            parameter.requires_grad_(name not in FROZEN)
        return made

    with pytest.MonkeyPatch.context() as patch:
        if model == "frozen":
            patch.setattr(Decoder, "chunk", with_frozen)
        yield


class Ranks:
    """All ranks of a layout, assembled; nothing that crosses ranks but saving and restoring works."""

    def __init__(self, model: str, layout: Layout) -> None:
        self.layout, self.sizes = layout, Mesh({"pp": layout.pp, "dp": layout.dp}).sizes
        self.meshes = [Mesh(self.sizes, rank) for rank in range(layout.world)]
        settings = config(**layout.settings(model))
        with frozen(model), pytest.MonkeyPatch.context() as patch:
            patch.setattr("qeffect_lm.app.assemble.Transport", lambda *_: None)
            self.parts = [assemble(settings, mesh) for mesh in self.meshes]

    def restore(self, checkpoint: Checkpoint) -> list[str]:
        """What rank 0 was told."""
        told: list[str] = []

        def body(comm: Communicator) -> None:
            mesh = self.meshes[comm.rank]
            arguments = (checkpoint, self.parts[comm.rank], Anywhere(), comm, mesh.coords, self.sizes)
            restore(*arguments, changed=["pipeline.schedule"], say=told.append)

        finish(on_ranks(self.layout.world, body))
        return told

    def save(self, root: Path, step: int = 2) -> Checkpoint:
        def body(comm: Communicator) -> None:
            part, mesh = self.parts[comm.rank], self.meshes[comm.rank]
            check_replicas(part.logical_tensors(), comm, mesh)
            save(part, root, step, comm, mesh)

        finish(on_ranks(self.layout.world, body))
        return open_checkpoint(root / f"step_{step:08d}")


def save(part: Assembly, root: Path, step: int, comm: Communicator, mesh: Mesh) -> None:
    contract = contract_meta(part, comm)
    meta = {} if contract is None else {"data": {"next_sample": 7}, "layout": dict(mesh.sizes), **contract}
    save_checkpoint(root, step, saved_state(part, mesh.coords), meta, comm, mesh.coords)


def finish(results: Sequence[Any]) -> None:
    """Raise the first rank's error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result


def trained(model: str, root: Path, steps: int = 2) -> Checkpoint:
    """A checkpoint of one process that trained."""
    with frozen(model):
        run = train(config(**Layout().settings(model)), steps, batches=lambda step: vocabulary_batch(step, model))
    ranks: Any = SimpleNamespace(layout=Layout(), meshes=[Mesh({})], parts=[run.assembly])
    return Ranks.save(ranks, root, steps)


def vocabulary_batch(step: int, model: str) -> Batch:
    return batch(step, vocab=MODELS[model]["model__vocab_size"])


def assert_equal(a: Checkpoint, b: Checkpoint) -> int:
    """All logical tensors and the contract's counters, whatever the slices; returns how many tensors."""
    result = compare(a, b, meta_keys=("contract", "data"))
    odd = [name for name in (*result.only_in_a, *result.only_in_b) if not name.startswith("rng/")]
    different = [one.name for one in result.different if not one.name.startswith("rng/")]
    assert (different, odd, result.meta) == ([], [], ())
    return len(result.equal)

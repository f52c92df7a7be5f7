"""Every command of the documentation, run as it is written, page by page, in a copy of the tree.

What cannot run here is in ``ELSEWHERE``, with the reason. Names that stand for something of the reader's (``CONFIG.yaml``,
``SRC``) are replaced by what the world below has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.docs_commands import ROOT, blocks
from tests.hf_folders import SECTION, config_json, make_folder, random_tensors
from tests.megatron_support import unpacked

pytestmark = pytest.mark.long

ELSEWHERE = {
    r"^make ": "what CI runs, or a GPU's",
    r"^pip install": "takes packages from outside",
    r"my_family": "tests/unit/test_extending.py, which takes the page's code",
    r"^srun": "needs Slurm",
    r"cuda|demo-gpu|tests/gpu|bench (placement|kernels|train|layers|capture|curves)|backend=te": "needs a GPU",
    r"^python -m tools\.parity( --all| --json| --parallel.*)?( *#.*)?$": "minutes to hours; its cells are tests of their own",
    r"^python -m tools\.parity --parallel": "minutes; tests/dist/test_layouts.py",
    r"torchtitan": "make test-titan",
    r"nproc-per-node 8 -m tools": "eight ranks; the same with two is a test of its own",
}
CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": "mine", "dir": "runs/mine2", "device": "cpu"},
    "model": {"vocab_size": 512, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 96},
    "precision": {"fp8": {"recipe": "delayed", "history": 4}},
    "pipeline": {"microbatches": 8},
    "graphs": {"backend": "host_replay"},
    "data": {
        "train": "data/small.train",
        "valid": "data/small.valid",
        "tokenizer": "data/small.model",
        "seq_len": 64,
        "microbatch_size": 2,
    },
    "train": {"steps": 3},
    "checkpoint": {"every": 2},
}


class World:
    """A copy of the tree with a corpus, configurations and folders under the names that the pages use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
        for name in tracked or ["."]:
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        library = Path(os.__file__).parent
        for name in ("sources", "SRC"):
            (root / name).mkdir()
            for path in sorted(library.glob("*.py"))[:120]:
                shutil.copy2(path, root / name)
        self.path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(self, text: str, timeout: float = 900) -> str:
        script = self.root / "commands.sh"
        script.write_text(f"set -eo pipefail\n{text}")
        env = {**os.environ, "PATH": self.path, "OMP_NUM_THREADS": "1", "HOME": str(self.root / "home")}
        done = subprocess.run(["bash", str(script)], cwd=self.root, env=env, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{text}\nexit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def write(self, name: str, value: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("docs"))
    made.run("python -m tools.preprocess --input sources --glob '*.py' --output data/small --train-tokenizer --vocab-size 512")
    for name in ("CONFIG.yaml", "config.yaml", "mine.yaml", "my.yaml"):
        made.write(name, {**CONFIG, "run": {**CONFIG["run"], "dir": f"runs/{name}"}})
    made.write("prompts.txt", "def f\nclass A\n")
    turns = [("user", "Say {}."), ("assistant", "{}, as you like.")]
    chats = [[{"role": role, "content": text.format(n)} for role, text in turns] for n in range(60)]
    made.write("chat.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    made.write("blend.yaml", {**CONFIG, "data": {**CONFIG["data"], "train": None}})
    made.run("python train.py CONFIG.yaml run.dir=runs/start")
    made.run("python -m tools.preprocess --input sources --glob '*.py' --output data/big --train-tokenizer --vocab-size 2048")
    return made


def save_tokenizer(path: Path, texts: list[str], end: str = "</s>") -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=[end], show_progress=False))
    made.save(str(path))


def _runnable(text: str) -> str:
    """The block without the lines of commands that cannot run here."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return "\n".join(line for line in joined.splitlines() if not any(re.search(p, line.strip()) for p in ELSEWHERE)) + "\n"


def _run_page(world: World, page: str, names: dict[str, str]) -> None:
    parts = [block for block in blocks() if block.page == page]
    assert parts
    for block in parts:
        text = _runnable(block.text)
        for name, value in names.items():
            text = text.replace(name, value)
        world.run(text)


@pytest.fixture(scope="module")
def trained(world: World) -> World:
    """The README's runs, and ``runs/mine``, whose checkpoints a page looks into."""
    _run_page(world, "README.md", {"FOLDER": "sources"})
    steps = "train.steps=110 checkpoint.every=10 checkpoint.keep=4 train.eval_every=0 data.seq_len=32"
    world.run(f"python train.py CONFIG.yaml run.dir=runs/mine {steps}")
    return world


def test_tutorial(world: World) -> None:
    _run_page(world, "tutorial.md", {})


def test_readme_and_what_needs_its_runs(trained: World) -> None:
    assert (trained.root / "runs/tiny/loss.png").exists()
    replay = "python -m tools.replay runs/mine/checkpoints/step_00000100 --control"
    for page in ("checkpoints.md", "generate.md", "replay.md", "report.md"):
        _run_page(trained, page, {replay: f"! {replay}"})  # which has to fail


TWO = "torchrun --nproc-per-node 2 train.py my.yaml"
PAGES: dict[str, dict[str, str]] = {
    "blending.md": {"CONFIG.yaml": "blend.yaml", "data/web.train": "data/small.train", "data/code.train": "data/small.valid"},
    "moe.md": {
        "data.train=…": "data.train=data/big.train train.steps=2",
        "data.tokenizer=…": "data.tokenizer=data/big.model",
        "ep=2": "ep=2 run.dir=runs/ep data.seq_len=64",
    },
    "fine-tuning.md": {
        "MODEL/tokenizer.json": "data/small.model",
        "--chat llama3": "--chat plain --valid-fraction 0.2",
        "CHECKPOINT": "runs/start/checkpoints data.seq_len=32",
    },
    "launching.md": {},
    "contract.md": {},
    "explain.md": {"runs/traced": "runs/traced2"},
    "data-parallel.md": {"python train.py my.yaml parallel.dp=2": f"{TWO} parallel.dp=2 data.accept_batch=true"},
    "gradients.md": {},
    "kernels.md": {},
    "families.md": {},
    "parity.md": {},
    "plan.md": {},
    "profile.md": {"CONFIG.yaml": "CONFIG.yaml run.dir=runs/profiled train.steps=12"},
    "plan-check.md": {},
    "recompute.md": {},
    "schedules.md": {},
    "configuration.md": {"models/configs/demo.yaml": "CONFIG.yaml run.dir=runs/changed", "train.steps=200": "train.steps=4"},
    "context-parallel.md": {"config.yaml": "config.yaml run.dir=runs/cp"},
    "tensor-parallel.md": {"config.yaml": "config.yaml run.dir=runs/tp"},
    "resharding.md": {"config.yaml": "config.yaml checkpoint.dir=runs/resharded"},
}


@pytest.mark.parametrize(("page", "names"), PAGES.items(), ids=PAGES)
def test_page(world: World, page: str, names: dict[str, str]) -> None:
    _run_page(world, page, names)


def test_data(world: World) -> None:
    texts = [f"text {n}: " + "some words of it " * (n % 7 + 1) for n in range(600)]
    world.write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    packed = zstandard.ZstdCompressor().compress((world.root / "a.jsonl").read_bytes())
    (world.root / "b.jsonl.zst").write_bytes(packed)
    parquet.write_table(pyarrow.table({"text": texts}), world.root / "c.parquet")
    save_tokenizer(world.root / "tokenizer.json", texts)
    _run_page(world, "data.md", {})


def test_convert(world: World) -> None:
    """The generic lines with a folder of each kind; then the page's two stories."""
    section = {**SECTION, "vocab_size": 512}
    hub = make_folder(world.root / "home/hub/Llama-3.2-1B", random_tensors(section), config=config_json(section))
    texts = [f"Once there were {n} words in a text.\n" * 20 for n in range(400)]
    save_tokenizer(hub / "tokenizer.json", texts, "<|end_of_text|>")
    for number, text in enumerate(texts):
        world.write(f"texts/{number}.txt", text)
    shutil.copytree(unpacked(world.root / "golden") / "dist", world.root / "ckpts/mine")
    world.run("python train.py CONFIG.yaml run.dir=runs/run")
    generic, mine, megatron = [block for block in blocks() if block.page == "convert.md"]
    kinds = {"hf": "~/hub/Llama-3.2-1B", "native": "runs/run", "megatron": "ckpts/mine"}
    for number, command in enumerate(generic.commands):
        kind = re.search(r"--from (\w+)", command)
        assert kind is not None
        world.run(command.replace("SRC", kinds[kind.group(1)]).replace("DST", f"out/{number}"))
    data = {"train": "corpus/mine.train", "seq_len": 16, "microbatch_size": 1}
    more = {"data": data, "train": {"steps": 2}, "precision": {"fp8": {"recipe": "delayed"}}, "graphs": {"backend": "eager"}}
    start = {"base": "models/llama-3.2-1b/model.yaml", "checkpoint": {"init_from": "models/llama-3.2-1b"}}
    world.write("mine.yaml", {**start, **more, "run": {"dir": "runs/run2"}})
    world.run(mine.text.replace("runs/run ", "runs/run2 "))
    data = {**CONFIG["data"], **data, "train": CONFIG["data"]["train"], "tokenizer": None}
    more["precision"] = {"fp8": {"recipe": "none"}}  # its sizes are not those of FP8 products, and it knows 59 tokens
    world.write("mine.yaml", {**more, "base": "runs/mine-start/model.yaml", "run": {"dir": "runs/run3"}, "data": data})
    world.run(megatron.text.replace("init_state=training", "init_state=training --dry-run"))


def test_every_page_with_commands_is_run() -> None:
    here = Path(__file__).read_text()
    pages = {block.page for block in blocks() if _runnable(block.text).strip()}
    assert {page for page in pages if f'"{page}"' not in here} == set()

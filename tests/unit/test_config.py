"""Configuration: files, inheritance, overrides, and what a user is told about wrong keys, types, units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from qeffect_lm.config import Config, help_text, load_config
from qeffect_lm.config_help import describe, markdown_tables
from qeffect_lm.config_yaml import dump_yaml, parse_yaml
from qeffect_lm.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 128,
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, "c.yaml", dump_yaml({"model": MODEL, "train": {"steps": 20}}))


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_defaults_and_derived_values(file: Path) -> None:
    config = load_config(file)
    assert config.model.head_dim == 16
    assert config.optim.schedule == "linear" and config.optim.lr == 1e-3
    assert config.precision.fp8.recipe == "none" and config.precision.fp8.history == 16
    assert config.checkpoint_dir() == Path("runs/run/checkpoints")
    assert load_config(file, ["checkpoint.dir=/x"]).checkpoint_dir() == Path("/x")
    assert config.chunk_layers(1) == [4] and config.chunk_layers(3) == [2, 1, 1]
    assert load_config(file, ["parallel.pp=2", "pipeline.stage_layers=[4,0]"]).chunk_layers(2) == [4, 0]
    assert load_config(file, ["model.head_dim=32"]).model.head_dim == 32
    assert load_config(file, ["parallel.pp=2", "parallel.dp=3"]).parallel.world == 6


def test_it_is_frozen(file: Path) -> None:
    config = load_config(file)
    with pytest.raises(ValidationError):
        config.optim.lr = 2.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.optim = config.optim  # type: ignore[misc]


def test_overrides_are_yaml_values(file: Path) -> None:
    config = load_config(
        file,
        ["optim.lr=1e-4", "run.name=2024", "contract.mode=off", "optim.clip_norm=null", "data.train="],
    )
    assert config.optim.lr == 1e-4 and config.run.name == "2024" and config.contract.mode == "off"
    assert config.optim.clip_norm is None and config.data.train is None
    assert load_config(file, ["data.train=a=b"]).data.train == "a=b"
    assert load_config(file, ["optim.lr=1", "optim.lr=2"]).optim.lr == 2.0


def test_base_files_are_relative_to_the_naming_file(tmp_path: Path) -> None:
    write(tmp_path, "base/root.yaml", dump_yaml({"model": MODEL, "train": {"steps": 1}, "optim": {"lr": 1}}))
    write(tmp_path, "base/middle.yaml", "base: root.yaml\noptim:\n  lr: 2\n  eps: 1e-6\n")
    path = write(tmp_path, "top.yaml", "base: base/middle.yaml\noptim:\n  lr: 3\ntrain:\n  # nothing here\n")
    config = load_config(path)
    assert (config.optim.lr, config.optim.eps, config.train.steps) == (3.0, 1e-6, 1)


def test_a_circle_of_bases_is_spelled_out(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "base: b.yaml\n")
    write(tmp_path, "b.yaml", "base: c.yaml\n")
    path = write(tmp_path, "c.yaml", "base: b.yaml\n")
    message = error_of(tmp_path / "a.yaml")
    assert "circle" in message and message.index("b.yaml") < message.index("c.yaml")
    assert str(tmp_path / "a.yaml") not in message
    assert "circle" in error_of(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: gone.yaml\n", "gone.yaml (the base of"),
        ("base: [a]\n", "the path of one YAML file is expected"),
        ("- 1\n", "sections such as 'model:' are expected"),
        ("model: {\n", "not valid YAML"),
        ("run:\n  seed: 1\n  seed: 2\n", "line 3, column 3: not valid YAML: the key 'seed' is written twice"),
        ("run: 3\n", "run (in "),
    ],
)
def test_broken_files(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of(write(tmp_path, "x.yaml", text))


def test_missing_file(tmp_path: Path) -> None:
    assert "no configuration file" in error_of(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lrr=1", ["unknown key optim.lrr (on the command line)", "nearest known key is optim.lr"]),
        ("model.hiden_size=1", ["nearest known key is model.hidden_size"]),
        ("optm.lr=1", ["unknown key optm.lr", "nearest known key is optim.lr"]),
        ("train.lr=1", ["nearest known key is optim.lr"]),
        ("fp8.recipe=delayed", ["nearest known key is precision.fp8.recipe"]),
        ("precision.recipe=delayed", ["nearest known key is precision.fp8.recipe"]),
        ("optim.lr=fast", ["optim.lr (on the command line): 'fast' (text) given, expected number > 0"]),
        ("train.max_minutes=10h", ["'10h' (text) given", "(minutes)", "bare number, without a unit"]),
        ("launch.timeout_seconds=5min", ["(seconds)", "bare number"]),
        ("launch.timeout_seconds=1e308", ["expected number > 0 and <= 10,000,000 (seconds)"]),
        ("parallel.bucket_mib=1e308", ["expected number > 0 and <= 1,048,576 (MiB of main gradients)"]),
        ("optim.lr=-1", ["-1 (integer) given, expected number > 0 (per optimizer step)"]),
        ("run.seed=true", ["run.seed", "true (boolean) given, expected integer"]),
        ("train.steps=1.5", ["1.5 (number) given, expected integer >= 1 and <= 10,000,000 (optimizer steps)"]),
        ("contract.mode=of", ["expected enforce | trace | off"]),
        ("contract.poison=yes", ["expected true | false"]),
        ("pipeline.stage_layers=[1,a]", ["'a' (text) given, expected list of integers or null (layers)"]),
        ("model.hidden_size=", ["null given, expected integer >= 1 (features)"]),
        ("optim.lr=.inf", ["optim.lr"]),
        ("model=3", ["not of the form section.key=value"]),
        ("x", ["not of the form section.key=value"]),
        ("optim.=1", ["not of the form section.key=value"]),
        ("optim.lr=[1", ["not valid YAML"]),
        ("model.num_heads.y=3", ["model.num_heads", "expected integer >= 1 (heads)"]),
    ],
)
def test_wrong_keys_types_and_units(file: Path, override: str, parts: list[str]) -> None:
    message = error_of(file, override)
    for part in parts:
        assert part in message


def test_the_file_of_a_wrong_value_is_named(tmp_path: Path, file: Path) -> None:
    path = write(tmp_path, "top.yaml", "base: c.yaml\noptim:\n  lr: '1'\nrun:\n  name: 5\n")
    message = error_of(path)
    assert "2 problems" in message and f"optim.lr (in {path}): '1' (text) given" in message
    assert f"run.name (in {path}): 5 (integer) given, expected text not empty; put it in quotes" in message


def test_all_missing_keys_are_listed(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, "x.yaml", "model:\n"))
    for name in (*(f"model.{k}" for k in MODEL), "train.steps"):
        assert f"{name} is missing" in message
    assert "model.head_dim" not in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.num_heads=6"], "model.hidden_size 64 is not divisible by model.num_heads 6"),
        (["model.num_kv_heads=3"], "model.num_kv_heads 3 does not divide model.num_heads 4"),
        (["model.head_dim=15"], "odd"),
        (["precision.main_grads=bfloat16", "precision.dtype=float64"], "main_grads bfloat16 with precision.dtype float64"),
        (["precision.main_grads=bfloat16", "optim.backend=torch"], "takes gradients in the masters' type"),
        (["optim.name=muon", "optim.zero=1"], "optim.name muon updates whole matrices: set optim.zero=0"),
        (["parallel.tp=3"], "model.num_heads 4 is not divisible by parallel.tp 3"),
        (["precision.fp8.recipe=delayed", "model.ffn_size=100"], "model.ffn_size = 100 is not a multiple of"),
        (["precision.fp8.recipe=delayed", "model.hidden_size=72", "model.head_dim=16"], "hidden_size = 72"),
        (["precision.fp8.recipe=current", "model.head_dim=12"], "model.num_kv_heads x model.head_dim = 24"),
        (
            ["precision.fp8.recipe=delayed", "data.seq_len=9", "data.microbatch_size=9"],
            "data.seq_len x data.microbatch_size = 81",
        ),
        (
            ["precision.fp8.recipe=delayed", "precision.fp8.high_precision_first=3",
             "precision.fp8.high_precision_last=2"],
            "exceed model.num_layers 4",
        ),
        (["parallel.pp=5"], "parallel.pp 5 is more than model.num_layers 4"),
        (["pipeline.stage_layers=[2,2]"], "has 2 entries, parallel.pp is 1"),
        (["parallel.pp=2", "pipeline.stage_layers=[2,3]"], "adds up to 5, model.num_layers is 4"),
        (["parallel.pp=2", "pipeline.stage_layers=[5,-1]"], "negative"),
        (["pipeline.microbatches=0"], "expected integer >= 1 (microbatches)"),
        (["optim.schedule=wsd"], "needs optim.wsd_decay_steps"),
        (["optim.schedule=wsd", "optim.wsd_decay_steps=15"], "exceed train.steps 20"),
        (["optim.wsd_decay_steps=5"], "no meaning with optim.schedule linear"),
        (["train.eval_every=5"], "set data.valid"),
    ],
)  # fmt: skip
def test_contradictions_between_keys(file: Path, overrides: list[str], part: str) -> None:
    assert part in error_of(file, *overrides)


def test_fp8_shapes_that_fit_are_accepted(file: Path) -> None:
    config = load_config(
        file, ["precision.fp8.recipe=delayed", "optim.schedule=wsd", "optim.wsd_decay_steps=10"]
    )
    assert config.precision.fp8.recipe == "delayed"


_texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
_tricky = st.sampled_from(
    ["off", "null", "~", "1e5", "1_000", "0x10", "1:30", "true", ".5", "-", " a", "a: b"]
)
_floats = st.floats(min_value=1e-300, max_value=1e300)


@settings(max_examples=150)
@given(name=st.one_of(_texts, _tricky), group=st.one_of(st.none(), _tricky, _texts), lr=_floats, eps=_floats)
def test_dump_reads_back_as_equal(name: str, group: str | None, lr: float, eps: float) -> None:
    config = Config.from_dict(
        {
            "model": MODEL,
            "train": {"steps": 3},
            "run": {"name": name},
            "logging": {"wandb_group": group},
            "optim": {"lr": lr, "eps": eps},
            "parallel": {"pp": 2},
            "pipeline": {"stage_layers": [1, 3]},
        }
    )
    again = Config.from_dict(parse_yaml(config.dump_yaml(), "dump"))
    assert again == config and again.dump_yaml() == config.dump_yaml()
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [("off", "off"), ("yes", "yes"), ("1e-3", 1e-3), ("1:30", "1:30"), ("010", "010"), ("1_000", 1000),
     ("null", None), ("", None), ("true", True), ("-2", -2), (".5", 0.5), ("3.", 3.0), ("2E5", 2e5)],
)  # fmt: skip
def test_the_yaml_dialect(text: str, value: Any) -> None:
    parsed = parse_yaml(text, "test")
    assert parsed == value and type(parsed) is type(value)


def test_help_lists_every_key_within_the_terminal() -> None:
    text = help_text(100)
    assert max(map(len, text.splitlines())) <= 100
    for name, info in describe(Config).items():
        assert f"  {name}  [{info.kind}" in text
        assert info.on_resume in ("free", "warn", "refuse") and info.description.endswith(".")
    flat = " ".join(text.split())
    assert "train.max_minutes [number > 0 or null; default null; unit: minutes; on resume: free]" in flat
    assert "train.steps [integer >= 1 and <= 10,000,000; required; unit: optimizer steps; on resume: warn]" in flat


def test_documentation_holds_the_current_keys() -> None:
    """docs/configuration.md is generated between two markers; QEFFECT_UPDATE_DOCS=1 writes it anew."""
    import os

    path = ROOT / "docs" / "configuration.md"
    before, begin, rest = path.read_text().partition("<!-- keys: begin -->\n")
    old, end, after = rest.partition("<!-- keys: end -->")
    assert begin and end
    wanted = "\n" + markdown_tables(Config) + "\n"
    if os.environ.get("QEFFECT_UPDATE_DOCS"):
        path.write_text(before + begin + wanted + end + after)
        return
    assert old == wanted, "run QEFFECT_UPDATE_DOCS=1 pytest tests/unit/test_config.py"


def test_shipped_base_states_the_defaults() -> None:
    """models/configs/base.yaml documents defaults; it must not drift from the code's."""
    config = load_config(ROOT / "models/configs/base.yaml", [f"model.{k}={v}" for k, v in MODEL.items()]
                         + ["train.steps=5"])  # fmt: skip
    for name, info in describe(Config).items():
        if info.required or name == "model.head_dim":
            continue
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        assert value == info.default, name

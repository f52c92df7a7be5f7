"""``tools.evaluate``: texts and token sets, what is counted and how many bytes that is, wrong requests."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.inference.perplexity import score
from tests.runs import run_here, write_config
from tests.text_run import text_run
from tools.evaluate import main

TEXT = "  def naïve(▁):\n\treturn 'é日🎉'\n" * 9


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    return folder, *text_run(folder)


@pytest.fixture
def call(run, capsys):
    """The exit code and what was printed."""

    def calling(*arguments: object) -> tuple[int, str, str]:
        code = main([str(run[1]), "--threads", "1", *map(str, arguments)])
        return code, *capsys.readouterr()

    return calling


def test_a_text(call, run, tmp_path):
    """Every token but the first, and the bytes of the text but for the first token's, exactly."""
    (tmp_path / "t").write_text(TEXT)
    code, out, err = call("--data", tmp_path / "t", "--stride", "8", "--json")
    assert code == 0 and err == ""
    made = json.loads(out)
    tokenizer = run[2]
    ids = tokenizer.encode(TEXT)
    wanted = score(load_for_inference(run[1]).model, np.array(ids), stride=8, batch=8)
    assert (made["nats"], made["tokens"], made["windows"]) == (wanted.nats, len(ids) - 1, wanted.windows)
    assert made["bytes"] == len(TEXT.encode()) - len(tokenizer.decode(ids[:1]).encode())
    assert made["bits_per_byte"] == pytest.approx(made["nats"] / math.log(2) / made["bytes"], rel=1e-15)
    assert made["perplexity"] == math.exp(made["nats_per_token"]) and made["nats_per_token"] == wanted.nats / wanted.tokens
    assert (made["context"], made["stride"], made["step"]) == (32, 8, 8)

    text = call("--text", tmp_path / "t", "--stride", "8")[1].splitlines()
    assert text[0].startswith(f"perplexity  {made['perplexity']:.4f} ")
    assert text[0].endswith(f"{made['bits_per_byte']:.4f} bits per byte)")
    assert text[1].startswith(f"counted     {made['tokens']:,} of {len(ids):,} tokens")
    assert text[1].endswith(f", {made['bytes']:,} bytes")
    assert text[2] == f"windows     {made['windows']} of at most 32 tokens, 8 from one to the next"


def test_with_bos_every_token_of_the_text_counts(call, run, tmp_path):
    (tmp_path / "t").write_text(TEXT)
    made = json.loads(call("--data", tmp_path / "t", "--bos", "--json")[1])
    assert (made["tokens"], made["bytes"]) == (len(run[2].encode(TEXT)), len(TEXT.encode()))


def test_only_the_first_tokens(call, run, tmp_path):
    (tmp_path / "t").write_text(TEXT)
    made = json.loads(call("--data", tmp_path / "t", "--max-tokens", "17", "--json")[1])
    ids = run[2].encode(TEXT)
    sizes = [len(run[2].decode(ids[:count]).encode()) for count in (1, 17)]
    assert made["tokens"] == 16 and made["bytes"] == sizes[1] - sizes[0]


def test_a_token_set(call, run, tmp_path):
    """As training reads it; end-of-sequence tokens count as tokens and have no bytes. A text of the same name needs --text."""
    folder, _, tokenizer = run
    tokens = IndexedDataset(folder / "text").tokens
    made = json.loads(call("--data", folder / "text", "--json")[1])
    wanted = score(load_for_inference(run[1]).model, tokens, batch=8)
    assert (made["nats"], made["tokens"], made["stride"]) == (wanted.nats, len(tokens) - 1, 32)
    first = len(tokenizer.decode(tokens[:1].tolist()).encode())
    assert made["bytes"] == len(tokenizer.decode(tokens.tolist()).encode()) - first
    assert json.loads(call("--data", folder / "text.bin", "--json")[1]) == made
    (folder / "text").write_text("short text")
    try:
        assert json.loads(call("--data", folder / "text", "--json")[1]) == made
        assert json.loads(call("--text", folder / "text", "--json")[1])["tokens"] < 12
    finally:
        (folder / "text").unlink()


def test_a_token_set_without_a_tokenizer(tmp_path, capsys):
    write_config(tmp_path)
    assert run_here(tmp_path, "run", "train.steps=1")[0] == 0
    capsys.readouterr()
    asked = [str(tmp_path / "run"), "--threads", "1", "--data", str(tmp_path / "held_out"), "--max-tokens", "50"]
    assert main([*asked, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["bits_per_byte"] is made["bytes"] is None and made["tokens"] == 49
    assert main(asked) == 0 and "no bits per byte without a tokenizer" in capsys.readouterr().out
    (tmp_path / "t").write_text("abc")
    assert main([*asked[:3], "--text", str(tmp_path / "t")]) == 2
    assert "give one with --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "missing"], "neither a token set missing.bin, missing.idx nor a text file"),
        (["--text", "missing"], "text file missing cannot be read"),
        (["--data", "FOLDER/text", "--bos"], "--bos is for texts"),
        (["--data", "FOLDER/text", "--stride", "33"], "--stride is 33; it must lie between 1 and the context of 32"),
        (["--data", "FOLDER/text", "--max-tokens", "1"], "--max-tokens is 1"),
        (["--data", "FOLDER/text", "--batch-size", "0"], "--batch-size is 0"),
        (["--data", "FOLDER/text.model"], "cannot be read"),
    ],
    ids=str,
)
def test_wrong_requests_end_with_one_line(call, run, options, message):
    code, out, err = call(*(option.replace("FOLDER", str(run[0])) for option in options))
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err

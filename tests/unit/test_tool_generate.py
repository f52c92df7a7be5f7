"""``tools.generate``: prompts in, text out, as it comes or whole, as text or JSON; interruptions and wrong requests."""

from __future__ import annotations

import io
import json
import sys

import pytest

from qeffect_lm.inference.generator import Generator
from tests.text_run import text_run
from tools.generate import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return text_run(tmp_path_factory.mktemp("generate"))


@pytest.fixture
def call(run, capsys):
    """The exit code and what was printed."""

    def calling(*arguments: str) -> tuple[int, str, str]:
        code = main([str(run[0]), "--threads", "1", *arguments])
        return code, *capsys.readouterr()

    return calling


class Written(io.StringIO):
    """Remembers what was there at each flush: what a reader of the terminal saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def results(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_text_and_json_agree_and_streaming_changes_nothing(call, run):
    prompts = ["--prompt", "def ", "--prompt", "  \u2581 é", "--prompt", "class A"]
    options = [*prompts, "--max-new-tokens", "12", "--seed", "3", "--ignore-eos"]
    code, out, _ = call(*options, "--json")
    made = results(out)
    assert code == 0 and [one["prompt"] for one in made] == ["def ", "  \u2581 é", "class A"]
    tokenizer = run[1]
    for number, one in enumerate(made):
        assert one["index"] == number and one["finish"] == "length" and len(one["tokens"]) == 12 and one["stop"] is None
        prompt = tokenizer.encode(one["prompt"])
        assert len(prompt) == one["prompt_tokens"]
        whole = tokenizer.decode([*prompt, *one["tokens"]])
        assert "\ufffd" in whole or whole == one["prompt"] + one["text"]
    text = "".join(f"=== prompt {i} of 3 ===\n{one['prompt']}{one['text']}\n" for i, one in enumerate(made, 1))
    assert call(*options) == (0, text, "") == call(*options, "--no-stream")
    assert call(*options, "--batch-size", "2")[1] == call(*options, "--batch-size", "2", "--stream")[1]
    single = call("--prompt", "class A", "--max-new-tokens", "12", "--seed", "3", "--ignore-eos", "--batch-size", "3")
    assert single == (0, f"class A{made[2]['text']}\n", ""), "one prompt: no heading"
    assert results(call(*options, "--json", "--seed", "4")[1])[0]["text"] != made[0]["text"]


def test_streaming_shows_text_as_it_comes_in_the_order_of_the_prompts(call, monkeypatch):
    options = ["--prompt", "def ", "--prompt", "class A", "--max-new-tokens", "9", "--ignore-eos"]
    whole = call(*options)[1]
    written = Written()
    monkeypatch.setattr(sys, "stdout", written)
    call(*options)
    assert all(whole.startswith(seen) for seen in written.seen) and written.seen[-1] == whole
    assert len({seen for seen in written.seen if "=== prompt 2" not in seen}) >= 5
    monkeypatch.setattr(sys, "stdout", held := Written())
    call(*options, "--no-stream")
    assert {seen.count("=== prompt") for seen in held.seen} == {0, 1, 2} and len(set(held.seen)) == 3


def test_stop_strings_are_not_shown(call):
    options = ["--prompt", "def ", "--max-new-tokens", "30", "--ignore-eos", "--temperature", "1.5"]
    whole = results(call(*options, "--json")[1])[0]["text"]
    stop = whole[7:10]
    made = results(call(*options, "--json", "--stop", "never to be seen", "--stop", stop)[1])[0]
    assert made["text"] == whole[: whole.index(stop)] and (made["finish"], made["stop"]) == ("stop", stop)
    assert len(made["tokens"]) < 30
    assert call(*options, "--stop", stop)[1] == f"def {made['text']}\n"


def test_end_of_sequence_ends_and_is_no_text(call, run, monkeypatch):
    options = ["--prompt", "def ", "--max-new-tokens", "10", "--json"]
    whole = results(call(*options, "--ignore-eos")[1])[0]["tokens"]
    end = whole[4]
    monkeypatch.setattr(type(run[1]), "end_ids", (end,))
    made = results(call(*options)[1])[0]
    at = whole.index(end)
    assert made["finish"] == "eos" and made["tokens"] == whole[: at + 1]
    assert made["text"] == run[1].decode([*run[1].encode("def "), *whole[:at]])[4:]


def test_prompts_of_a_file(call, tmp_path, monkeypatch):
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_bytes(b"def \r\n\xc3\xbcber\n  x")
    lines.write_text('"def "\n{"prompt": "\\u00fcber", "id": 7}\n"two\\nlines"\n')
    options = ["--max-new-tokens", "2", "--json"]
    assert [one["prompt"] for one in results(call("--prompts", str(plain), *options)[1])] == ["def ", "über", "  x"]
    assert [one["prompt"] for one in results(call("--prompts", str(lines), *options)[1])] == ["def ", "über", "two\nlines"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert [one["prompt"] for one in results(call("--prompts", "-", *options)[1])] == ["a", "b"]


def test_bos_comes_first(call, run):
    made = [results(call("--prompt", "def ", "--json", "--max-new-tokens", "3", *more)[1])[0] for more in ([], ["--bos"])]
    plain = len(run[1].encode("def "))
    assert [one["prompt_tokens"] for one in made] == [plain, plain + 1] and made[0]["tokens"] != made[1]["tokens"]


def test_ctrl_c_shows_what_there_is_and_ends(call, monkeypatch):
    options = ["--prompt", "def ", "--prompt", "class A", "--max-new-tokens", "9", "--ignore-eos"]
    whole = [one["text"] for one in results(call(*options, "--json")[1])]
    going = Generator.run

    def interrupted(self, prompts, count):
        for number, new in enumerate(going(self, prompts, count)):
            if number == 9:
                raise KeyboardInterrupt
            yield new

    monkeypatch.setattr(Generator, "run", interrupted)
    code, out, err = call(*options, "--json")
    made = results(out)
    assert (code, err) == (130, "interrupted\n")
    assert [one["finish"] for one in made] == ["interrupted"] * 2 and [len(one["tokens"]) for one in made] == [5, 4]
    code, out, err = call(*options)
    first, second = (one["text"] for one in made)
    assert (code, err) == (130, "interrupted\n") and all(w.startswith(o["text"]) for w, o in zip(whole, made, strict=True))
    assert out == f"=== prompt 1 of 2 ===\ndef {first}\n=== prompt 2 of 2 ===\nclass A{second}\n"


def test_a_prompt_longer_than_the_context_is_cut_and_said(call):
    code, _, err = call("--prompt", "x + 1 " * 30, "--max-new-tokens", "2")
    assert code == 0 and "the model sees the last 32" in err and err.startswith("prompt 1 has ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "prompt 1 has no token"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature is -1.0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--prompt", "a", "--batch-size", "0"], "--batch-size is 0"),
        (["--prompt", "a", "--stop", ""], "--stop is empty"),
        (["--prompt", "a", "--tokenizer", "missing.model"], "missing.model does not exist"),
        (["--prompts", "missing.txt"], "--prompts missing.txt cannot be read"),
        (["--prompt", "\udcff"], "lone surrogate"),
        (["--prompt", "a", "--device", "cuda"], "torch sees no GPU"),
        (["--prompt", "a", "--threads", "0"], "0 given, at least 1 thread"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_requests_end_with_one_line(call, options, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = call(*options)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '"a"\n{"text": "b"}\n', "line 2: a JSON string is needed"),
        ("p.jsonl", '"a"\nb\n', "line 2 is no JSON"),
        ("p.txt", "", "holds no prompt"),
    ],
)
def test_wrong_files_of_prompts(call, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    code, _, err = call("--prompts", str(tmp_path / name))
    assert code == 2 and message in err


def test_another_models_tokenizer_is_refused(call, run, tmp_path):
    from qeffect_lm.data.tokenizer import train_sentencepiece

    path = train_sentencepiece(["some other text, long enough for a few more pieces " * 20], tmp_path / "o", vocab_size=310)
    code, _, err = call("--prompt", "a", "--tokenizer", str(path))
    assert code == 2 and "has 310 ids, the model knows 300" in err


def test_a_cache_that_does_not_fit_is_refused(call, monkeypatch):
    from qeffect_lm.app import inference

    monkeypatch.setattr(inference, "free_bytes", lambda device: 500_000)
    code, _, err = call("--prompt", "a", "--batch-size", "40")
    assert code == 2 and "the KV cache of 10240 tokens needs" in err and "lower --batch-size" in err
    assert call("--prompt", "a", "--max-new-tokens", "2")[0] == 0

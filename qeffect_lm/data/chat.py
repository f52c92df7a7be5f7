"""Conversations as documents for fine-tuning: a model family's template, and which tokens the loss counts.

A conversation is a JSON object with a list of messages (``{"role": "system" | "user" | "assistant", "content": text}``), of
which at least one is the assistant's. Counted are the assistant's words and what ends its turn: that is what the model has to
say.

The formats are those of the families' model cards: ``chatml`` (Qwen), ``llama3``, ``llama2``, ``mistral`` (v0.3), and
``plain``, which has no markers: texts with an empty line after each, the assistant's ended by the tokenizer's end of text. No
system prompt is made up where a conversation has none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from qeffect_lm.data.tokenizer import check_unicode
from qeffect_lm.errors import UsageError

ROLES = ("system", "user", "assistant")
END = "\0end"  # the tokenizer's own end of text, whatever its name


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation: text, or the name of one of the tokenizer's own pieces; and whether it counts."""

    text: str
    counted: bool = False
    piece: bool = False


Message = tuple[str, str]


def messages_of(record: Any, key: str) -> list[Message] | str:
    """(role, content) of each message of a JSON object, or why it is no conversation."""
    found = record.get(key)
    if not isinstance(found, list) or not found:
        return f"no list of messages under the key {key!r}"
    messages: list[Message] = []
    for number, one in enumerate(found, 1):
        if not isinstance(one, dict) or not isinstance(one.get("content"), str):
            return f"message {number} has no text under the key 'content'"
        if one.get("role") not in ROLES:
            return f"message {number} has role {one.get('role')!r}: there are {', '.join(ROLES)}"
        if one["role"] == "system" and number > 1:
            return f"message {number} is the system's: it can only be the first"
        try:
            check_unicode(one["content"])
        except UsageError as error:
            return f"message {number}: {error}"
        messages.append((one["role"], one["content"]))
    if all(role != "assistant" for role, _ in messages):
        return "no message is the assistant's: there is nothing to learn"
    return messages


# ---- templates ------------------------------------------------------------------------------------------------------


def _piece(name: str, counted: bool = False) -> Segment:
    return Segment(name, counted, True)


def _chatml(messages: Sequence[Message]) -> list[Segment]:
    made = []
    for role, content in messages:
        answer = role == "assistant"
        made += [_piece("<|im_start|>"), Segment(f"{role}\n"), Segment(content, answer)]
        made += [_piece("<|im_end|>", answer), Segment("\n")]
    return made


def _llama3(messages: Sequence[Message]) -> list[Segment]:
    made = [_piece("<|begin_of_text|>")]
    for role, content in messages:
        answer = role == "assistant"
        made += [_piece("<|start_header_id|>"), Segment(role), _piece("<|end_header_id|>"), Segment("\n\n")]
        made += [Segment(content.strip(), answer), _piece("<|eot_id|>", answer)]
    return made


def _turns(messages: Sequence[Message], family: str) -> tuple[str, list[tuple[str, str | None]]]:
    """The system's text and (user, assistant) turns; the last one may lack its answer. Raises UsageError for another order."""
    system = messages[0][1] if messages[0][0] == "system" else ""
    rest = messages[1:] if messages[0][0] == "system" else messages
    if any(role != ("user", "assistant")[i % 2] for i, (role, _) in enumerate(rest)):
        raise UsageError(f"template {family} wants user and assistant in turns, the user first")
    answers = [content for _, content in rest[1::2]]
    padded: list[str | None] = [*answers, *[None] * (len(rest) % 2)]
    return system, list(zip([content for _, content in rest[::2]], padded, strict=True))


def _llama2(messages: Sequence[Message]) -> list[Segment]:
    system, turns = _turns(messages, "llama2")
    made = []
    for number, (user, answer) in enumerate(turns):
        head = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system and not number else ""
        made += [_piece("<s>"), Segment(f"[INST] {head}{user.strip()} [/INST]")]
        if answer is not None:
            made += [Segment(f" {answer.strip()} ", True), _piece("</s>", True)]
    return made


def _mistral(messages: Sequence[Message]) -> list[Segment]:
    system, turns = _turns(messages, "mistral")
    made = [_piece("<s>")]
    for number, (user, answer) in enumerate(turns):
        head = f"{system}\n\n" if system and number == len(turns) - 1 else ""  # with the last question, as v0.3 has it
        made += [_piece("[INST]"), Segment(f" {head}{user}"), _piece("[/INST]")]
        if answer is not None:
            made += [Segment(f" {answer}", True), _piece("</s>", True)]
    return made


def _plain(messages: Sequence[Message]) -> list[Segment]:
    made = []
    for role, content in messages:
        answer = role == "assistant"
        made += [Segment(content, answer), _piece(END, True) if answer else Segment("\n\n")]
    return made


TEMPLATES: dict[str, Callable[[Sequence[Message]], list[Segment]]] = {
    "chatml": _chatml,
    "llama2": _llama2,
    "llama3": _llama3,
    "mistral": _mistral,
    "plain": _plain,
}


# ---- tokens ---------------------------------------------------------------------------------------------------------


def check_template(name: str, tokenizer: Any) -> None:
    """Raise UsageError where the tokenizer lacks a piece of the template."""
    example = TEMPLATES[name]([("user", "a"), ("assistant", "b")])
    missing = sorted({one.text for one in example if one.piece and _id_of(one.text, tokenizer) is None})
    if missing:
        told = ", ".join("end of text (--eos)" if piece == END else repr(piece) for piece in missing)
        raise UsageError(f"template {name}: tokenizer {tokenizer.path} has no {told}; it is another family's")


def _id_of(piece: str, tokenizer: Any) -> int | None:
    if piece == END:
        return tokenizer.end_ids[0] if tokenizer.end_ids else None
    found: int | None = tokenizer.token_id(piece)
    return found


def tokens_of(segments: Sequence[Segment], tokenizer: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Token ids, and 1 for each that counts, of a rendered conversation.

    A tokenizer that tells where in the text its tokens lie gets each run of text between two of its pieces whole, and a token
    counts where its last character does. Any other one gets every segment by itself.
    """
    ids: list[int] = []
    counted: list[int] = []
    spans = getattr(tokenizer, "encode_spans", None)
    at = 0
    while at < len(segments):
        one = segments[at]
        if one.piece:
            token = _id_of(one.text, tokenizer)
            assert token is not None, "check_template comes first"
            ids.append(token)
            counted.append(int(one.counted))
            at += 1
            continue
        end = at + 1
        while spans is not None and end < len(segments) and not segments[end].piece:
            end += 1
        run = segments[at:end]
        if spans is None:
            made = tokenizer.encode_batch([one.text])[0]
            counted += [int(one.counted)] * len(made)
        else:
            made, ends = spans("".join(part.text for part in run))
            edges = list(accumulate(len(part.text) for part in run))
            counted += [int(run[min(bisect_right(edges, last - 1), len(run) - 1)].counted) for last in ends]
        ids += made
        at = end
    return np.array(ids, dtype=np.int32), np.array(counted, dtype=np.int32)

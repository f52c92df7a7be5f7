"""What :mod:`tools.generate` prints: text as it comes, in the order of the prompts, or a JSON object per prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qeffect_lm.inference.text import Continuation


@dataclass
class Result:
    """What became of one prompt. ``reason``: ``eos``, ``stop``, ``length`` or ``interrupted``; None while it runs."""

    prompt: str
    prompt_tokens: int
    continuation: Continuation
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    shown: int = 0  # characters of the continuation that were written

    def take(self, token: int, reason: str | None, end: bool) -> None:
        """A new token; ``end``: it is an end-of-sequence token, which is no text."""
        self.tokens.append(token)
        if not end:
            self.continuation.push(token)
        if self.continuation.stop is not None:
            reason = "stop"
        if reason is not None:
            self.finish(reason)

    def finish(self, reason: str) -> None:
        self.continuation.finish()
        self.reason = "stop" if self.continuation.stop is not None else reason

    def as_json(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "prompt": self.prompt,
            "text": self.continuation.text,
            "finish": self.reason,
            "stop": self.continuation.stop,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
        }


class Output:
    """Writes results to stdout in the order of the prompts.

    Args:
        stream: show the first unfinished prompt's text as it comes; else each result when it is whole.
        as_json: one JSON object per line instead.
    """

    def __init__(self, results: Sequence[Result], *, stream: bool, as_json: bool) -> None:
        self._results, self._stream, self._json = results, stream and not as_json, as_json
        self._at = 0  # the first prompt that is not written whole
        self._begun = False

    def update(self) -> None:
        """Write what can be written now."""
        while self._at < len(self._results):
            result = self._results[self._at]
            if result.reason is None and not self._stream:
                break
            self._write(result)
            if result.reason is None:
                break
            if not self._json:
                sys.stdout.write("\n")
            self._at, self._begun = self._at + 1, False
        sys.stdout.flush()

    def interrupt(self) -> None:
        """End here: what has begun is written as far as it came."""
        for result in self._results:
            if result.reason is None:
                result.finish("interrupted")
        while self._at < len(self._results) and (self._results[self._at].tokens or self._begun):
            self._write(self._results[self._at])
            if not self._json:
                sys.stdout.write("\n")
            self._at, self._begun = self._at + 1, False
        sys.stdout.flush()

    def _write(self, result: Result) -> None:
        if self._json:
            sys.stdout.write(json.dumps(result.as_json(self._at), ensure_ascii=False) + "\n")
            return
        if not self._begun:
            if len(self._results) > 1:
                sys.stdout.write(f"=== prompt {self._at + 1} of {len(self._results)} ===\n")
            sys.stdout.write(result.prompt)
            self._begun = True
        text = result.continuation.text
        sys.stdout.write(text[result.shown :])
        result.shown = len(text)

"""From new tokens to text: shown as soon as it is certain, and no sooner.

A character of several tokens appears when it is whole, and what may be the beginning of a stop string is held back until that
is decided. So what was shown is always the beginning of the final text, which does not depend on where tokens begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qeffect_lm.errors import UsageError


class TokenDecoder(Protocol):
    """Turns the tokens of one continuation into text."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is not whole."""
        ...

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        ...


class StopFinder:
    """Cuts a text before the stop string that is complete first (of several complete at once, before the longest)."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("--stop is empty: it would stop every text before its first character")
        self.stops = tuple(stops)
        self.found: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Take in the next piece; returns what is certain to come before any stop string. Nothing once one was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of ``text`` that begins ``stop``."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Continuation:
    """The text of one generated sequence. ``text`` is all that :meth:`push` and :meth:`finish` returned."""

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str] = ()) -> None:
        self._decoder, self._finder = decoder, StopFinder(stops)
        self.text = ""

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._finder.found

    def push(self, token: int) -> str:
        """The text that is certain since ``token``."""
        return self._add(self._finder.push(self._decoder.push(token)))

    def finish(self) -> str:
        """No token comes any more: the rest of the text."""
        new = self._finder.push(self._decoder.finish())
        return self._add(new + self._finder.finish())

    def _add(self, new: str) -> str:
        self.text += new
        return new

"""Errors a user meets. Each says what is wrong and what to do, and carries the process's exit code.

``train.py`` and the tools print ``error: <message>`` and exit with ``exit_code``; a traceback appears only with
``--traceback``. Contract violations (:mod:`qeffect_lm.contract.errors`) derive from :class:`QEffectError` too.
"""

from __future__ import annotations


class QEffectError(Exception):
    """Something failed while running (exit code 1)."""

    exit_code = 1


class UsageError(QEffectError, ValueError):
    """The request itself is wrong: configuration, arguments, inputs (exit code 2)."""

    exit_code = 2


def shown(text: str, most: int = 200) -> str:
    """A text of unknown origin for one line of an error: what cannot be printed is escaped, what is too long is cut."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)

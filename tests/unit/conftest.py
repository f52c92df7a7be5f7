"""Fixtures that several files of unit tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def plan_tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``tools.plan`` in this process: what it prints, or with ``code`` its error, which is one line and all there is."""
    from tools import plan as tool

    def call(*arguments: str, code: int = 0) -> str:
        try:
            got = tool.main(arguments)
        except SystemExit as stop:
            got = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert got == code, err
        if code:
            assert out == "" and err.startswith("error: ") and err.count("\n") == 1, "one clear line"
            return str(err)
        assert err == ""
        return str(out)

    return call

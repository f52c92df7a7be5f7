"""The hidden-state table: printed in the docs, and true of what a run registers."""

from __future__ import annotations

from pathlib import Path

from qeffect_lm.app.assemble import assemble
from qeffect_lm.contract.hidden_state import markdown_table, owners
from tests.tiny import config


def test_docs_print_the_table():
    assert markdown_table() in (Path(__file__).parents[2] / "docs/contract.md").read_text()


def test_every_registered_owner_is_in_the_table():
    register = assemble(config()).register
    assert {entry.owner for entry in register.entries} <= owners()
    assert "scale" in register.table() and "timeline" in register.table()

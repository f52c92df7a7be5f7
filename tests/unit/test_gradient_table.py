"""The printed table of main gradients says where they are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from qeffect_lm.app.assemble import assemble
from qeffect_lm.app.dry_run import describe
from qeffect_lm.app.main import main
from qeffect_lm.optim.gradient_table import gradient_table
from qeffect_lm.parallel.mesh import Mesh
from tests.helpers import ROOT
from tests.tiny import config
from tools.common import environment

LINE = re.compile(r" *([\d,]+) +([\d,]+) +([\d,]+) +(tied|\d+) +(?:(-|\d+|\d+-\d+) +)?(\S+)(?: \(added to (\S+)\))? +([\dx]+)$")


def rows(page: str) -> dict[str, Any]:
    """Gradient → (byte, element, bytes, chunk, buckets, added to)."""
    found = {}
    for match in filter(None, map(LINE.match, page.splitlines())):
        byte, element, size, chunk, buckets, name, source, _ = match.groups()
        assert name not in found
        found[name] = (*(int(cell.replace(",", "")) for cell in (byte, element, size)), chunk, buckets, source)
    return found


@pytest.mark.parametrize("grads", ["float32", "bfloat16"])
def test_the_table_is_where_gradients_are(grads):
    """Every gradient of the assembled rank, at its address, with its bytes; starts are multiples of 256 bytes."""
    settings = config(model__tie_word_embeddings=True, precision__dtype="bfloat16", precision__main_grads=grads)
    flat = assemble(settings).flat
    found = rows(describe(settings, gradients=True))
    assert list(found) == flat.gradient_names
    for name, (byte, element, size, chunk, _, source) in found.items():
        buffer = flat.tied_grad_buffers["head.weight"] if name == "head.weight" else flat.grad_buffer
        grad = flat.grad(name)
        assert grad.data_ptr() - buffer.data_ptr() == byte == element * grad.element_size() and byte % 256 == 0
        assert size == grad.numel() * grad.element_size()
        assert chunk == ("tied" if name == "embedding.weight" else "0")
        assert source == ("embedding.weight" if name == "head.weight" else None)
    assert rows(describe(settings)) == {}


def test_buckets_of_the_table():
    """With shared state: the buckets that hold a gradient, on every rank of its own buffers; frozen ones are not listed."""
    more: dict[str, Any] = {"parallel__dp": 2, "parallel__pp": 2, "optim__zero": 1, "parallel__bucket_mib": 0.01}
    more["model__vocab_size"] = 4201  # embedding and head have more than two blocks each
    page = describe(config(**more), gradients=True)
    halves = page.split("main gradients of pipeline rank ")[1:]
    for rank, half in enumerate(halves):
        mesh = Mesh({"pp": 2, "dp": 2}, 2 * rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeline.p2p.Transport.__init__", lambda *args: None)
            flat = assemble(config(**more), mesh).flat
        assert flat.buckets is not None
        found = rows(half)
        assert list(found) == flat.gradient_names and len({row[4] for row in found.values()}) > 3
        for name, row in found.items():
            holding = [str(n) for n, bucket in enumerate(flat.buckets.buckets) if name in bucket.names]
            assert row[4] == (holding[0] if len(holding) == 1 else f"{holding[0]}-{holding[-1]}")
            assert row[3] == str(rank)
        assert any("-" in row[4] for row in found.values())
    entries = dict(assemble(config()).flat.entries)
    frozen = entries["head.weight"]
    object.__setattr__(frozen, "segment", "frozen")
    assert "head.weight" not in rows(gradient_table(entries, [], torch.float32))


def test_it_belongs_to_a_dry_run(capsys):
    path = str(ROOT / "models/configs/demo.yaml")
    assert main([path, "--gradients"], {}) == 2
    assert "--gradients prints with --dry-run only" in capsys.readouterr().err
    assert main([path, "--dry-run", "--gradients", "parallel.pp=1", "pipeline.stage_layers=null"], environment()) == 0
    assert "final_norm.weight" in rows(capsys.readouterr().out)

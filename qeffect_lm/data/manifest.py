"""``PREFIX.json`` beside a token file: what it holds, of which tokenizer, and how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from qeffect_lm.data.files import sha256_of_files, write_atomic
from qeffect_lm.data.indexed import IndexedDataset, bin_path, idx_path
from qeffect_lm.errors import QEffectError, UsageError

FORMAT = 1


def mask_prefix(prefix: Path | str) -> Path:
    """Where the mask of a pair lies: which of its tokens the loss counts."""
    return Path(f"{prefix}.mask")


def write_manifest(dataset: IndexedDataset, tokenizer: dict[str, Any] | None, more: dict[str, Any]) -> None:
    """The counts of a pair, the SHA-256 of its files (and of its mask's), its tokenizer, and ``more``."""
    about: dict[str, Any] = {
        "format": FORMAT,
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "sha256": _sha256(dataset.prefix),
    }
    mask = mask_prefix(dataset.prefix)
    if idx_path(mask).exists():
        about["mask"] = {"sha256": _sha256(mask)}
    if tokenizer is not None:
        about["tokenizer"] = tokenizer
    write_atomic(manifest_path(dataset.prefix), (json.dumps({**about, **more}, indent=2) + "\n").encode())


def open_mask(dataset: IndexedDataset) -> IndexedDataset | None:
    """The mask of a pair; None where it has none.

    Raises:
        UsageError: it is of other documents, half of it is missing, or all of it, of a pair that was made with one.
    """
    prefix = mask_prefix(dataset.prefix)
    if not idx_path(prefix).exists() and not bin_path(prefix).exists():
        if "mask" in read_manifest(dataset.prefix):
            raise UsageError(
                f"{dataset.prefix} was made with a mask of what the loss counts, and {prefix}.idx and .bin are not there: copy "
                "them too"
            )
        return None
    mask = IndexedDataset(prefix, empty=not dataset.num_tokens)
    same = np.array_equal(mask.sizes, dataset.sizes) and np.array_equal(mask.document_index, dataset.document_index)
    if not same:
        raise UsageError(f"{prefix} is not the mask of {dataset.prefix}: they hold other documents; make both again")
    return mask


def manifest_path(prefix: Path | str) -> Path:
    """The manifest of a pair."""
    return Path(f"{prefix}.json")


def read_manifest(prefix: Path | str) -> dict[str, Any]:
    """The manifest of a pair; empty where there is none, or another program's file of that name."""
    try:
        found = json.loads(manifest_path(prefix).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known = isinstance(found, dict) and isinstance(found.get("sha256"), dict) and "tokens" in found
    return found if known else {}


def tokenizer_of(prefix: Path | str) -> dict[str, Any] | None:
    """What the manifest says of the tokenizer (``sha256``, ``vocab_size``, ...); None where it says nothing."""
    found = read_manifest(prefix).get("tokenizer")
    known = isinstance(found, dict) and isinstance(found.get("sha256"), str) and isinstance(found.get("vocab_size"), int)
    return found if known else None


def check_free(prefix: Path | str) -> None:
    """Raise UsageError where a manifest of ``prefix`` would replace a file that is none."""
    path = manifest_path(prefix)
    if path.exists() and not read_manifest(prefix):
        raise UsageError(f"{path} is there and is no manifest of token files: it is not overwritten; choose another output")


def verify(prefix: Path) -> str:
    """Read a pair, and its mask, and compare them with the manifest; returns what was found, in words.

    Raises:
        QEffectError: a file is not the one that the manifest describes, or the manifest cannot be read.
    """
    found, mask = {"": _sha256(prefix)}, mask_prefix(prefix)
    if idx_path(mask).exists():
        found[".mask"] = _sha256(mask)
    path, manifest = manifest_path(prefix), read_manifest(prefix)
    if not manifest and path.exists():
        raise QEffectError(f"{path} is no manifest, or is damaged: copy it again, or remove it")
    if not manifest:
        lines = [f"SHA-256 of {prefix}{name}.{end}: {sha}" for name, files in found.items() for end, sha in files.items()]
        return "\n".join([*lines, "no manifest to compare with"])
    told = {"": manifest["sha256"], ".mask": (manifest.get("mask") or {}).get("sha256") or {}}
    for name in told if told[".mask"] or ".mask" in found else [""]:
        for end in ("idx", "bin"):
            if told[name].get(end) != found.get(name, {}).get(end):
                raise QEffectError(
                    f"{prefix}{name}.{end} is not what {path} describes: it was changed, damaged or is of another corpus; copy "
                    "it again"
                )
    return f"{'the pair and its mask' if '.mask' in found else 'both files'} are those of the manifest"


def _sha256(prefix: Path | str) -> dict[str, str]:
    return {"idx": sha256_of_files([idx_path(prefix)]), "bin": sha256_of_files([bin_path(prefix)])}

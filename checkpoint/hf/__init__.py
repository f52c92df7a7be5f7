"""Hugging Face's names for what we have: ``config.json`` ↔ the model section, their tensors ↔ ours.

Pure functions on names, numbers and tensors: nothing here opens a file or imports ``transformers``.

    found = model_section(config_json)            # refuses what our layers would compute otherwise
    groups = tensor_groups(found.section)         # one of ours ↔ some of theirs
    source = choose_tensors(found.section, names) # unknown and missing names are refused
"""

from __future__ import annotations

from checkpoint.hf.config import Found, config_json, model_section
from checkpoint.hf.description import Description, describe
from checkpoint.hf.tensors import (
    Chosen,
    Group,
    check_tied,
    choose_tensors,
    export_tensors,
    import_tensors,
    tensor_groups,
    to_ours,
    to_theirs,
)

__all__ = [
    "Chosen",
    "Description",
    "Found",
    "Group",
    "check_tied",
    "choose_tensors",
    "config_json",
    "describe",
    "export_tensors",
    "import_tensors",
    "model_section",
    "tensor_groups",
    "to_ours",
    "to_theirs",
]

"""Model specifications for TorchTitan 0.2, which finds them by name once this module is imported:

    --experimental.custom_import qeffect_lm.integrations.torchtitan.train_spec --model.name llama3_qeffect

``llama3_qeffect`` is its ``llama3`` with our pipeline and FP8, ``llama3_qeffect_bf16`` the same without FP8.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from qeffect_lm.integrations.torchtitan.pipeline import pipeline_llm, required

specs = required("torchtitan.protocols.train_spec")
for _name, _fp8 in (("llama3_qeffect", True), ("llama3_qeffect_bf16", False)):
    _theirs = specs.get_train_spec("llama3")
    specs.register_train_spec(_name, dataclasses.replace(_theirs, pipelining_fn=partial(pipeline_llm, fp8=_fp8)))

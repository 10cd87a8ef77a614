"""What the tests of the warp-specialised kernels on a GPU share: where they run, and their masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NEEDS_SM_90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs sm_90",
    ),
]
RERUNS = 30
WINDOW = {"window": {"size": 200}}
SINKS = {"all_of": ["causal", {"any_of": [WINDOW, {"sink": {"tokens": 4}}]}]}
STRIDED = {"all_of": ["causal", {"any_of": [WINDOW, {"strided": {"stride": 64}}]}]}
GLOBAL = {"any_of": [{"window": {"radius": 90}}, {"global": {"tokens": 8}}]}
FEATURES: list[dict[str, Any]] = [
    {"softcap": 5.0},
    {"alibi": True},
    {"sink_logits": True, "null_key": True},
]

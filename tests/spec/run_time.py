"""What the tests of nodes that data decide share."""

from __future__ import annotations

from typing import Any

import torch

from sparsegen.spec import Pattern


def dense(mask: Any, q_len: int, kv_len: int, **runtime: Any) -> torch.Tensor:
    return Pattern.from_dict({"mask": mask}).dense_mask(q_len, kv_len, **runtime)

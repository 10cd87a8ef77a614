"""The language: a YAML pattern becomes a frozen ``Pattern``; what it means is written here once.

Names load when they are first asked for, so that rooms which need only ``spec.expr`` do not pay for pydantic.  The
function ``reference`` is not among them: here that name is its module, ``sparsegen.spec.reference``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Gpu": "gpu",
    "HeadRule": "pattern",
    "Pattern": "pattern",
    "Problem": "problem",
    "all_gpus": "gpu",
    "current_gpu": "gpu",
    "find_gpu": "gpu",
    "json_schema": "schema",
    "merge": "reference",
    "random_block_table": "random_blocks",
    "shipped_patterns": "shipped",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value

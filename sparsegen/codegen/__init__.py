"""Schedule × template → KernelSource: Jinja decides structure, numbers stay ``tl.constexpr``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsegen.codegen.knobs import Knob as Knob
    from sparsegen.codegen.knobs import LaunchConfig as LaunchConfig
    from sparsegen.codegen.source import KernelSource as KernelSource
    from sparsegen.codegen.source import render as render
    from sparsegen.codegen.template import Template as Template
    from sparsegen.codegen.template import load_template as load_template

_WHERE = {
    "Knob": "knobs",
    "LaunchConfig": "knobs",
    "KernelSource": "source",
    "render": "source",
    "Template": "template",
    "load_template": "template",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """Load on first use: a cache listing needs ``LaunchConfig`` and none of the analysis."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)

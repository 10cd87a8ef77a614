"""sparsegen: a declarative attention pattern becomes a specialised, tuned Triton kernel.

Everything listed in ``__all__`` is the public surface.  Names load on first use, so ``import sparsegen`` stays
cheap and needs neither a GPU nor a driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsegen import errors as errors
    from sparsegen import nn as nn
    from sparsegen.artifact.store import Store as Store
    from sparsegen.errors import ArtifactError as ArtifactError
    from sparsegen.errors import CacheMiss as CacheMiss
    from sparsegen.errors import InputError as InputError
    from sparsegen.errors import SparsegenError as SparsegenError
    from sparsegen.errors import SpecError as SpecError
    from sparsegen.errors import ToolchainError as ToolchainError
    from sparsegen.errors import TuneError as TuneError
    from sparsegen.errors import UnsupportedError as UnsupportedError
    from sparsegen.runtime.api import compile as compile
    from sparsegen.runtime.api import load as load
    from sparsegen.runtime.attend import Attend as Attend
    from sparsegen.spec.gpu import Gpu as Gpu
    from sparsegen.spec.pattern import Pattern as Pattern
    from sparsegen.spec.problem import Problem as Problem
    from sparsegen.spec.reference import merge as merge
    from sparsegen.spec.reference import reference as reference

__version__ = "0.1.0.dev0"

# name -> module that defines it (a module's own name: the module itself)
_WHERE = {
    "Pattern": "sparsegen.spec.pattern",
    "Problem": "sparsegen.spec.problem",
    "Gpu": "sparsegen.spec.gpu",
    "compile": "sparsegen.runtime.api",
    "load": "sparsegen.runtime.api",
    "Attend": "sparsegen.runtime.attend",
    "Store": "sparsegen.artifact.store",
    "reference": "sparsegen.spec.reference",
    "merge": "sparsegen.spec.reference",
    "nn": "sparsegen.nn",
    "errors": "sparsegen.errors",
    "SparsegenError": "sparsegen.errors",
    "SpecError": "sparsegen.errors",
    "UnsupportedError": "sparsegen.errors",
    "InputError": "sparsegen.errors",
    "ToolchainError": "sparsegen.errors",
    "CacheMiss": "sparsegen.errors",
    "ArtifactError": "sparsegen.errors",
    "TuneError": "sparsegen.errors",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'sparsegen' has no attribute {name!r}")
    module = import_module(_WHERE[name])
    value = module if _WHERE[name] == f"sparsegen.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

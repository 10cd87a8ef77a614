"""Every node of the language.  Importing this module fills ``NODES`` (keyword → class).

A new primitive is one class in ``primitives``, ``grids`` or ``run_time``.
"""

from __future__ import annotations

from sparsegen.spec import grids, primitives, run_time
from sparsegen.spec.node import NODES

__all__ = ["NODES", "grids", "primitives", "run_time"]

"""The stand-ins are importable by name, in tests and in the processes that tests start; the scripts in benchmarks too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

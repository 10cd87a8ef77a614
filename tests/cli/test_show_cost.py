"""What `show` costs at a million tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsegen import Pattern
from sparsegen.report import coverage
from tests.cli.show_masks import MASKS

ROOT = Path(__file__).parents[2]
MILLION = """
import resource, sys
from pathlib import Path
import numpy, sparsegen, sparsegen.report.art, sparsegen.schedule.build, sparsegen.schedule.count
from sparsegen.report.show import look
from tests.work import at_most
pattern = sparsegen.Pattern.from_dict({mask!r})
small, picture = look(pattern, (256, 256)), Path({picture!r})
small.text(explain=True), small.save_png(picture)  # imports what is imported late
sys.stdout.flush()
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with at_most({calls}):
    seen = look(pattern, (1 << 20, 1 << 20))
    seen.gradients  # an analysis of its own, of the transposed mask
    seen.text(explain=True), seen.as_dict()
seen.save_png(picture)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) >> 10)
"""


OWN = {
    "window_sink": 300_000,
    "strided": 500_000,
    "fixed": 550_000,
    "drawn": 300_000,
    "global": 1_500_000,
}
SHIPPED = {  # the dearest ones
    "bigbird": 2_500_000,
    "longformer_base": 1_600_000,
    "longnet_dilated": 7_500_000,
    "video_frames": 1_600_000,
}


@pytest.mark.parametrize(("name", "calls"), {**OWN, **SHIPPED}.items(), ids=[*OWN, *SHIPPED])
def test_a_million_tokens(name: str, calls: int, tmp_path: Path) -> None:
    """Few calls, and under 64 MiB beyond the imports, the picture included in the memory."""
    shipped = name in SHIPPED
    mask = Pattern.from_yaml(name).to_dict() if shipped else {"name": name, "mask": MASKS[name]}
    code = MILLION.format(mask=mask, picture=str(tmp_path / "million.png"), calls=calls)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64


def test_edges_cut_evenly() -> None:
    assert coverage.edges(10, 4) == (0, 2, 5, 7, 10)
    assert coverage.edges(3, 8) == (0, 1, 2, 3)

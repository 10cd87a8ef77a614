"""The command line: each command mirrors one Python call; whatever it can do, Python can do."""

from __future__ import annotations

from sparsegen.cli.app import app as app
from sparsegen.cli.app import main as main

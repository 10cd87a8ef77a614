"""``python -m sparsegen`` and the ``sparsegen`` command."""

from __future__ import annotations

from sparsegen.cli import main

if __name__ == "__main__":
    main()

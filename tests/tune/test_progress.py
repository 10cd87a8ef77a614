"""The bar on a terminal and the lines in a log."""

from __future__ import annotations

import io

from sparsegen.tune.progress import Progress, shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_plain_lines_for_what_is_new():
    out = io.StringIO()
    with shown("causal on nvidia-h200", out) as tell:
        tell(Progress(0, 3, None, None))
        tell(Progress(1, 3, 1200.0, 1200.0))
        tell(Progress(2, 3, 1200.0, 1200.0))  # nothing new, a moment later
        tell(Progress(3, 3, 800.0, 1200.0))
    assert out.getvalue() == (
        "causal on nvidia-h200: 0/3 trials, nothing measured yet\n"
        "causal on nvidia-h200: 1/3 trials, best 1,200.0 µs, baseline 1,200.0 µs (1.00x)\n"
        "causal on nvidia-h200: 3/3 trials, best 800.0 µs, baseline 1,200.0 µs (1.50x)\n"
    )


def test_a_terminal_gets_a_bar():
    out = Terminal()
    with shown("causal", out) as tell:
        tell(Progress(1, 2, 1200.0, 1200.0))
        tell(Progress(2, 2, 800.0, 1200.0))
    assert "2/2" in out.getvalue() and "800.0 µs" in out.getvalue()
    assert "\x1b[" in out.getvalue()

"""A pattern as text: one character a block, darker where more of the block is visible."""

from __future__ import annotations

import sys

from sparsegen.report.coverage import Grid

_SHADES = "·░▒▓█"  # empty, some, more, most, all
_ASCII = ".-+*#"


def draw(grid: Grid, *, ascii_only: bool | None = None) -> str:
    """Lines of characters, queries downwards and keys to the right, with a scale and a legend.

    ``ascii_only``: plain characters; ``None`` asks whether stdout can print the others.
    """
    if ascii_only is None:
        ascii_only = not _can_print(_SHADES)
    shades = _ASCII if ascii_only else _SHADES
    total = grid.total()
    rows, cols = total.shape
    marks = [[shades[_level(total[i, j])] for j in range(cols)] for i in range(rows)]
    wide = len(str(grid.q_edges[-1]))
    last = grid.k_edges[-1] - 1
    lines = [f"{'':{wide}} k 0{f'{last}' if last else '':>{cols - 1}}"]
    for i, row in enumerate(marks):
        label = f"{grid.q_edges[i]}" if i % 8 == 0 or i == rows - 1 else ""
        lines.append(f"{label:>{wide}} {'q' if i == 0 else ' '} {''.join(row)}")
    height = grid.q_edges[1] - grid.q_edges[0]
    width = grid.k_edges[1] - grid.k_edges[0]
    legend = "  ".join(
        f"{shade} {word}"
        for shade, word in zip(shades, ("nothing", "< 1/3", "< 2/3", "most", "all"), strict=True)
    )
    how = "" if grid.exact else ", looked at in places"
    lines.append(f"{'':{wide}}   one character: {height} x {width} cells{how};  {legend}")
    return "\n".join(lines)


def _level(share: float) -> int:
    """0 and 4 for nothing and all of what was looked at; the steps between are thirds."""
    if share <= 0:
        return 0
    if share > 1 - 1e-9:
        return 4
    return 1 if share < 1 / 3 else 2 if share < 2 / 3 else 3


def _can_print(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

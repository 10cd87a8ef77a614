"""A pattern as PNG: every branch in its colour, stronger where more of a pixel is visible."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsegen.report import files
from sparsegen.report.coverage import Grid

# Told apart by people with the common colour-vision deficiencies, in the order branches come.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")
_FAINTEST = 0.35  # a pixel of which almost nothing is visible still shows


def blended(grid: Grid) -> Any:
    """The picture without axes: uint8 [rows, columns, 4], transparent where nothing is visible, for any ground."""
    import numpy as np

    colour = np.zeros((*grid.total().shape, 3))
    weight = np.zeros(grid.total().shape)
    clear = np.ones(grid.total().shape)
    for rgb, strength in _layers(grid).values():
        colour += strength * rgb
        weight += strength[..., 0]
        clear *= 1 - strength[..., 0]
    colour /= np.maximum(weight, 1e-9)[..., None]
    return np.round(255 * np.dstack([colour, 1 - clear])).astype(np.uint8)


def save_png(grid: Grid, title: str, path: Path, words: Mapping[str, str] | None = None) -> None:
    """Write the picture of ``grid`` to ``path`` with a legend of the branches seen; ``words``: what to add to their names."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    image = np.ones((*grid.total().shape, 3))
    handles = []
    for name, (rgb, strength) in _layers(grid).items():
        image *= 1 - strength * (1 - rgb)
        more = (words or {}).get(name)
        handles.append(Patch(color=tuple(rgb), label=f"{name}: {more}" if more else name))
    size = 6.4 + 0.2 * len(handles)
    figure = Figure(figsize=(6.4, size), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    extent = (0, grid.k_edges[-1], grid.q_edges[-1], 0)
    axes.imshow(image, extent=extent, interpolation="nearest", aspect="auto")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.tick_params(labelsize=8)
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=1, fontsize=8, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    files.write(path, drawn.getvalue())


def _layers(grid: Grid) -> dict[str, tuple[Any, Any]]:
    """Colour [3] and strength [rows, columns, 1], 0 to 1, of every branch that shows."""
    import numpy as np

    layers = {}
    seen = {name: share for name, share in grid.shares.items() if share.any()}
    for index, (name, share) in enumerate(seen.items()):
        colour = COLOURS[index % len(COLOURS)]
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        strength = np.where(share > 0, _FAINTEST + (1 - _FAINTEST) * share, 0)[..., None]
        layers[name] = rgb, strength
    return layers

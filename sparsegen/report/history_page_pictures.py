"""A small picture of every shipped pattern, as a PNG that lies on a light and on a dark page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsegen.report.picture import blended
from sparsegen.report.show import look

if TYPE_CHECKING:
    from sparsegen.report.coverage import Grid
    from sparsegen.spec.pattern import Pattern

LONGEST = 8192  # tokens drawn; of longer problems the first ones
PIXELS = 192


@dataclass(frozen=True)
class Branch:
    """A disjoint part of the pattern: its ``style`` (the colour's number), and how its tiles lie."""

    name: str
    tiling: str
    style: int


@dataclass(frozen=True)
class Picture:
    """``image`` is a data URI, empty where only a call's own data say what is visible; ``note`` then says so."""

    pattern: str
    summary: str
    length: int
    visible: str
    schedule: str
    branches: tuple[Branch, ...]
    image: str
    note: str

    @property
    def words(self) -> str:
        """What is to be seen, for those who cannot see it."""
        parts = ", ".join(b.name for b in self.branches)
        seen = f"{self.visible} of {self.length:,} × {self.length:,} cells visible"
        return f"Mask of {self.pattern}: {seen}" + f"; branches: {parts}." * bool(parts)


def pictures(patterns: Mapping[str, Pattern]) -> Iterator[Picture]:
    """One picture a pattern, in the order given; about a third of a second each."""
    return map(picture, patterns.values())


def picture(pattern: Pattern) -> Picture:
    """Head 0 of a pattern at its problem's first length, at most ``LONGEST`` tokens."""
    lengths = pattern.problem.lengths if pattern.problem is not None else ()
    length = min(*lengths[0], LONGEST) if lengths else LONGEST
    data = example_data(pattern, length)
    summary = pattern.summary or ""
    if data is None:
        note = "Data of each call decide what is visible."
        return Picture(pattern.name, summary, length, "", "", (), "", note)
    seen = look(pattern, (length, length), runtime=data)
    grid = seen.grid((PIXELS, PIXELS))
    tilings = {b["name"]: b["tiling"] for b in seen.branches}
    shown = [name for name, share in grid.shares.items() if share.any()]
    branches = tuple(Branch(n, tilings.get(n, ""), i) for i, n in enumerate(shown))
    about = "" if seen.counts.exact else "about "
    return Picture(
        pattern.name,
        summary,
        length,
        f"{about}{100 * seen.density:.3g} %",
        "" if seen.schedule is None else seen.schedule.label,
        branches,
        data_uri(grid),
        f"Drawn with {', '.join(data)} made up for the picture." if data else "",
    )


def data_uri(grid: Grid) -> str:
    """The grid as a PNG with a transparent ground, one pixel a block."""
    from PIL import Image

    # 64 colours are more than an eye tells apart here, and a third of the bytes
    image = Image.fromarray(blended(grid)).quantize(64, method=Image.Quantize.FASTOCTREE)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def example_data(pattern: Pattern, length: int) -> dict[str, Any] | None:
    """Run-time data made up for a picture, equal every time; None where we cannot make up what the pattern needs."""
    known: dict[str, Any] = {
        "document_lengths": [length * n // 16 for n in (2, 5, 1, 4, 4)],
        "kv_lengths": length * 3 // 4,
        "prefix_lengths": length // 4,
    }
    needs = list(pattern.runtime_needs)
    for _, node in pattern.nodes():
        if node.keyword == "block_mask":
            known["block_mask"] = _drawn(length, getattr(node, "block")) < 0.3  # noqa: B009
        elif (
            node.keyword == "top_blocks"
        ):  # with scores from q and k a call needs none, a picture does
            block = getattr(node, "block")  # noqa: B009
            known["block_scores"] = _drawn(length, (block, block))
            needs.append(("block_scores",))
    found = {}
    for group in needs:
        name = next((n for n in group if n in known), None)
        if name is None:
            return None
        found[name] = known[name]
    return found


def _drawn(length: int, block: tuple[int, int]) -> Any:
    """Numbers from 0 to 1 for every block; float tensor [rows, columns]."""
    import numpy as np
    import torch

    shape = [-(-length // b) for b in block]
    # RandomState is frozen by numpy's policy: the same numbers in every version
    return torch.from_numpy(np.random.RandomState(0).random_sample(shape))

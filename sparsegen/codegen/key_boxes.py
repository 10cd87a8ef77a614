"""Key tiles that are boxes themselves (``Tiling.k_extent``) as text: which keys they are, and where these lie in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sparsegen.codegen import text
from sparsegen.schedule.boxes import KEYS
from sparsegen.schedule.forms import K_FIRST, K_LAST
from sparsegen.schedule.intervals import fdiv, pick, pick_args
from sparsegen.schedule.tree import Segment, Test


@dataclass(frozen=True)
class KeyBoxes:
    """Key tile j // N is a box of W digits on axis 0 and N / W on axis 1, from digits y0_tile and y1_tile on.

    Lower axes have ``y*_tiles`` of them; the top one is axis 1, or axis 2, which is the same on a whole tile.  A grid's
    lines follow each other on axis 1 and on axis 2 alike, so one view [..., lines, columns] serves both.
    """

    seg: Segment
    block: str

    @property
    def cuts(self) -> tuple[int, ...]:
        return self.seg.tiling.k_cuts

    @property
    def width(self) -> int:
        return self.seg.tiling.k_extent

    @property
    def lines(self) -> str:
        """A key tile's size on axis 1."""
        return f"({self.block} // {self.width})"

    @property
    def varying(self) -> tuple[str, ...]:
        """Digits that differ between the keys of a tile."""
        return ("y0", "y1")

    def beyond(self, upper: bool) -> tuple[str, ...]:
        """Tests that hide what a key tile has beyond the box; ``upper``: the top axis is compared with ``row_hi``."""
        top = f"y{len(self.cuts)}"
        return tuple(f"{y}[None, :] <= {y}_last" for y in self.varying if y != top or not upper)

    def of_lines(self, tests: Iterable[Test]) -> tuple[tuple[Test, ...], tuple[str, ...]]:
        """The tests where the keys of the call are whole lines, which a descriptor needs: fewer, and some on lines instead.

        Whether a key is one of the call is then a question of its line alone, and the box answers it where the lines
        are its top axis.
        """
        kept = tuple(t for t in tests if t not in KEYS)
        if len(self.cuts) == 1 and self._in_call:
            return kept, ()
        line = "y1[None, :]"
        if len(self.cuts) > 1:
            line += f" + {self.cuts[1] // self.cuts[0]} * y2"
        first, last = (text.floor_by(name, self.cuts[0]) for name in ("k_first", "k_last"))
        return kept, (f"{line} >= {first}", f"{line} <= {last}")

    @property
    def _in_call(self) -> bool:
        """Whether the box has no line before the first key of the call, and none behind the last one."""
        first, last = (fdiv(x, self.cuts[-1]) for x in (K_FIRST, K_LAST))
        lowest, highest = pick_args(self.seg.tile_lo, "max"), pick_args(self.seg.tile_hi, "min")
        return first in lowest and last in highest

    @staticmethod
    def by_axis(parts: Iterable[str]) -> list[str]:
        """Tests joined by the key digits that they use: in a tensor core's layout a thread has few of each.

        With columns and lines apart a cell takes two selections; tests of rows alone go with the columns.
        """
        groups: dict[frozenset[str], list[str]] = {}
        for part in parts:
            used = frozenset(re.findall(r"\b(?:y1|y0|k_pos)\b(?=\[)", part)) or frozenset(("y0",))
            groups.setdefault(used, []).append(part)
        return [" & ".join(f"({p})" for p in g) if len(g) > 1 else g[0] for g in groups.values()]

    @property
    def row_hi(self) -> str:
        """Last value of the top axis that a row may see, within the box."""
        return text.form(pick("min", [self.seg.row_hi, self.seg.tile_hi]), text.ROW)

    @property
    def end(self) -> str:
        """Entries of all key tiles."""
        top = len(self.cuts)
        counts = [f"y{t}_tiles" for t in range(top)]
        digits = f"(y{top}_last - y{top}_first + 1)"
        counts.append(f"tl.cdiv({digits}, {self.lines})" if top == 1 else digits)
        return " * ".join([*counts, self.block])

    @property
    def corner(self) -> tuple[str, str]:
        """Where a key tile starts in the view [..., lines, columns] of the keys, lines of ``k_cuts[0]``."""
        column, line, *above = self._firsts
        if above:
            line = f"{self.cuts[1] // self.cuts[0]} * ({above[0]}) + {line}"
        return f"({line} - {text.floor_by('k_first', self.cuts[0])}).to(tl.int32)", column

    def before(self) -> tuple[str, ...]:
        """Lines before the loops: the first and last digits of the box, and key tiles along the lower axes."""
        lines = []
        top = len(self.cuts)
        for t, (lo, hi) in enumerate((*self.seg.inner, (self.seg.tile_lo, self.seg.tile_hi))):
            lines += [f"y{t}_first = {text.form(lo)}", f"y{t}_last = {text.form(hi)}"]
            if t < top:
                size = str(self.width) if t == 0 else self.lines
                lines.append(f"y{t}_tiles = tl.cdiv(y{t}_last - y{t}_first + 1, {size})")
        return tuple(lines)

    def vectors(self) -> tuple[str, ...]:
        """Lines before the loops: where the keys of a tile lie from its first one on."""
        rows = f"n % {self.width} + {self.cuts[0]} * (n // {self.width})"
        return f"n = tl.arange(0, {self.block})", f"k_rows = ({rows}).to(tl.int64)"

    def inside(self, needed: str) -> tuple[str, ...]:
        """Lines of a loop from entry j on; ``needed``: text that uses digits and ``k_pos``."""
        names = set(re.findall(r"\w+", needed))
        column, line, *above = self._firsts
        steps = [column, f"{self.cuts[0]} * ({line})"]
        steps += [f"{cut} * ({first})" for cut, first in zip(self.cuts[1:], above)]
        digits = {"y0": f"{column} + n % {self.width}", "y1": f"{line} + n // {self.width}"}
        digits |= dict(zip(("y2",), above))
        return (
            f"first_key = {' + '.join(steps)}",
            *(["k_pos = first_key + k_rows.to(POSITION)"] if "k_pos" in names else []),
            *(f"{name} = {digit}" for name, digit in digits.items() if name in names),
        )

    @property
    def _firsts(self) -> list[str]:
        """The first digit of a key tile on every axis."""
        at = f"j // {self.block}"
        out = [f"y0_first + {at} % y0_tiles * {self.width}"]
        if len(self.cuts) == 1:
            return [*out, f"y1_first + {at} // y0_tiles * {self.lines}"]
        out.append(f"y1_first + {at} // y0_tiles % y1_tiles * {self.lines}")
        return [*out, f"y2_first + {at} // (y0_tiles * y1_tiles)"]

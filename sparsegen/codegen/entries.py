"""The entries of a box of key digits as text: which keys they are, and where these lie in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from sparsegen.codegen import text
from sparsegen.codegen.key_boxes import KeyBoxes
from sparsegen.schedule.tree import Segment


def sizes(seg: Segment) -> list[str]:
    """Digits of the box on every lower axis: a number, or a name that the box's lines set."""
    sizes = [hi - lo + 1 for lo, hi in seg.inner]
    return [f"y{t}_size" if size.terms else str(size.const) for t, size in enumerate(sizes)]


def descriptor_of(seg: Segment) -> tuple[int, int] | None:
    """(period, group) of the tensor descriptor that loads the segment's keys, where one can.

    It takes ``group`` neighbouring keys of every ``period``: (1, 1) a run, (128, 1) one residue class, (128, 8) eight
    of every 128.  None: keys are gathered by pointers.
    """
    if not seg.tiling.k_cuts:
        return 1, 1
    if seg.tiling.k_extent:
        return seg.tiling.k_cuts[0], seg.tiling.k_extent
    if len(seg.tiling.k_cuts) > 1:
        return None
    (size,) = sizes(seg)
    return (seg.tiling.k_cuts[0], int(size)) if size.isdigit() and 16 % int(size) == 0 else None


def product(sizes: Iterable[str]) -> str:
    """Sizes multiplied, as text."""
    kept = [s for s in sizes if s != "1"]
    return f"({' * '.join(kept)})" if len(kept) > 1 else (kept or ["1"])[0]


def box_of(seg: Segment, block: str) -> Box | KeyBoxes:
    """The text of a segment whose keys are a box of digits."""
    return KeyBoxes(seg, block) if seg.tiling.k_extent else Box(seg, block)


@dataclass(frozen=True)
class Box:
    """How entries become keys: entry e is digit e % size of axis 0, then e // size on the next axis, and so on.

    An axis of one digit takes no division.  ``steady``: every key tile starts at the first of the lower digits, so that
    distances in memory are the same on all of them and stay in registers.
    """

    seg: Segment
    block: str

    @cached_property
    def sizes(self) -> list[str]:
        """Digits on every lower axis, see ``sizes``."""
        return sizes(self.seg)

    @property
    def steady(self) -> bool:
        return all(n.isdigit() for n in self.sizes) and 16 % prod(map(int, self.sizes)) == 0

    @property
    def steps(self) -> dict[int, str]:
        """Digit of an entry, from the first one on, along every axis that has several."""
        out: dict[int, str] = {}
        below: list[str] = []
        for t, n in enumerate([*self.sizes, ""]):
            if n != "1":
                over = f"{'n' if self.steady else 'entry'}{_over(below)}"
                out[t] = f"{over} % {n}" if n else over
                below += [n] if n else []
        return out

    def first(self, t: int) -> str:
        """First digit of a key tile on an axis."""
        if t == len(self.sizes):
            top = f"y{t}_first"
            return f"{top} + j{_over(self.sizes)}" if self.steady else top
        if self.sizes[t] == "1":
            return f"y{t}"
        lo = self.seg.inner[t][0]
        return f"y{t}_first" if lo.terms else str(lo.const)

    @property
    def varying(self) -> tuple[str, ...]:
        """Digits that differ between the keys of a tile; the top one always may."""
        lower = (f"y{t}" for t, size in enumerate(self.sizes) if size != "1")
        return (*lower, f"y{len(self.sizes)}")

    @property
    def corner(self) -> tuple[str, str]:
        """Where a key tile starts in the view [..., length / period, period, columns] of the keys."""
        (cut,) = self.seg.tiling.k_cuts
        top = f"y1_first + j{_over(self.sizes)} - {text.floor_by('k_first', cut)}"
        return f"({top}).to(tl.int32)", self.first(0)

    def before(self) -> tuple[str, ...]:
        """Lines before the loops: the first digits of the box and its sizes, where they are no numbers."""
        lines = []
        for t, (size, (lo, hi)) in enumerate(zip(self.sizes, self.seg.inner)):
            if size == "1" or lo.terms:
                lines.append(f"{f'y{t}' if size == '1' else f'y{t}_first'} = {text.form(lo)}")
            if not size.isdigit():
                lines.append(f"{size} = {text.form(hi - lo + 1)}")
        lines.append(f"y{len(self.sizes)}_first = {text.form(self.seg.tile_lo)}")
        return tuple(lines)

    def vectors(self) -> tuple[str, ...]:
        """Lines before the loops that set where the keys of a tile lie, where that is the same on all tiles."""
        if not self.steady:
            return ()
        rows = f"k_rows = ({self._position(self.steps)}).to(tl.int64)"
        return f"n = tl.arange(0, {self.block})", rows

    def inside(self, needed: str) -> tuple[str, ...]:
        """Lines of a loop from entry j on; ``needed``: text that uses digits and ``k_pos``."""
        digits = {}
        for t, step in self.steps.items():
            start = self.first(t)
            digits[f"y{t}"] = f"y{t} = {step if start == '0' else f'{start} + {step}'}"
        if not self.steady:
            return (
                f"entry = j + tl.arange(0, {self.block})",
                *digits.values(),
                f"k_pos = {text.from_digits('y', self.seg.tiling.k_cuts)}",
                "first_key = k_first",
                "k_rows = (k_pos - k_first).to(tl.int64)",
            )
        names = set(re.findall(r"\w+", needed))
        firsts = {t: self.first(t) for t in range(len(self.sizes) + 1)}
        return (
            f"first_key = {self._position(firsts)}",
            *(["k_pos = first_key + k_rows.to(POSITION)"] if "k_pos" in names else []),
            *(line for name, line in digits.items() if name in names),
        )

    def _position(self, digits: dict[int, str]) -> str:
        """A sum of digits times their steps."""
        steps, out = (1, *self.seg.tiling.k_cuts), []
        for t, digit in digits.items():
            if digit != "0":
                operand = digit if digit.isidentifier() else f"({digit})"
                out.append(f"{steps[t]} * {operand}" if t else digit)
        return " + ".join(out)


def _over(below: Iterable[str]) -> str:
    size = product(below)
    return "" if size == "1" else f" // {size}"

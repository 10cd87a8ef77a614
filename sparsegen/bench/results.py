"""What a benchmark found: plain frozen records, written as JSON and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sparsegen.bench.roofline import Roof, Work

OURS = "sparsegen"


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    ``us`` is the median of the rounds, ``spread_us`` slowest minus fastest round, ``sustained_us`` the mean back to back,
    ``host_us`` the host's time of a call.  ``peak_bytes`` is what torch held during a call beyond its inputs, with what
    the set-up keeps (``setup_bytes``).  ``setup_ms``: building the mask, not in any other time.  ``difference``: relative
    L2 error against our output, 0 for ours.  ``host_in_time``: calls are slower for the host than for the GPU and that
    could not be hidden, so ``us`` is the host's.
    """

    contender: str
    us: float
    spread_us: float
    sustained_us: float
    host_us: float
    peak_bytes: int
    setup_ms: float
    setup_bytes: int
    difference: float
    host_in_time: bool = False


@dataclass(frozen=True)
class Refused:
    """A peer that was not measured, and why.  ``difference``: its relative error where that was the reason."""

    contender: str
    reason: str
    difference: float | None = None


@dataclass(frozen=True)
class Measured:
    """One pattern at one pair of lengths.

    ``cells`` are visible ones, ``all_cells`` and ``computed_cells`` as many, all over heads and batch entries;
    ``flop`` and ``bytes`` see ``roofline.Work``.
    """

    pattern: str
    problem: str
    q_len: int
    kv_len: int
    schedule: str
    config: str
    chosen_by: str
    cells: int
    cells_exact: bool
    all_cells: int
    computed_cells: int | None
    flop: int
    bytes: int
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]

    @property
    def work(self) -> Work:
        """What any kernel has to do."""
        return Work(self.cells, self.flop, self.bytes)

    @property
    def visible(self) -> float:
        """Visible share of all cells."""
        return self.cells / self.all_cells

    @property
    def efficiency(self) -> float | None:
        """Visible share of the cells that our tiles compute."""
        return None if self.computed_cells is None else self.cells / max(self.computed_cells, 1)

    @property
    def ours(self) -> Row:
        """Our own row."""
        return next(r for r in self.rows if r.contender == OURS)

    def fraction(self, row: Row, roof: Roof) -> float:
        """How much of the roofline the contender reaches, 1 at the roof."""
        return self.work.floor_us(roof) / row.us


@dataclass(frozen=True)
class LeftOut:
    """A case that was not measured.  ``wrong``: our kernel's result was not right."""

    pattern: str
    lengths: str
    reason: str
    wrong: bool = False


@dataclass(frozen=True)
class Results:
    """A whole run: where and when, by which protocol, the roof, and every case."""

    gpu: str
    versions: Mapping[str, str]
    date: str
    protocol: str
    roof: Roof
    missing: tuple[tuple[str, str], ...]  # peers that are not here, and why
    cases: tuple[Measured, ...] = ()
    left_out: tuple[LeftOut, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the figures that follow from the others."""
        data = asdict(self)
        for one, plain in zip(self.cases, data["cases"], strict=True):
            plain["visible_share"], plain["efficiency"] = one.visible, one.efficiency
            plain["intensity"] = one.work.intensity
            plain["floor_us"] = one.work.floor_us(self.roof)
            for row, values in zip(one.rows, plain["rows"], strict=True):
                values["tflops"], values["gbs"] = one.work.tflops(row.us), one.work.gbs(row.us)
                values["roofline"] = one.fraction(row, self.roof)
                values["ratio"] = row.us / one.ours.us
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Results:
        """Back from ``as_dict``; what follows from other figures is not read."""
        cases = []
        for one in data["cases"]:
            rows = tuple(_made(Row, r) for r in one["rows"])
            refused = tuple(_made(Refused, r) for r in one["refused"])
            cases.append(_made(Measured, {**one, "rows": rows, "refused": refused}))
        return _made(
            cls,
            {
                **data,
                "roof": _made(Roof, data["roof"]),
                "missing": tuple((n, why) for n, why in data["missing"]),
                "cases": tuple(cases),
                "left_out": tuple(_made(LeftOut, x) for x in data["left_out"]),
            },
        )


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{name: values[name] for name in kind.__dataclass_fields__})

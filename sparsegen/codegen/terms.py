"""Tables of random_blocks: the arguments of a kernel that hold drawn blocks, and membership in them as text."""

from __future__ import annotations

from collections.abc import Iterable

from sparsegen.codegen import text
from sparsegen.codegen.plan import Table
from sparsegen.errors import UnsupportedError
from sparsegen.schedule.forms import Opaque
from sparsegen.schedule.formula import Range
from sparsegen.schedule.tree import AnyOf, NoneOf, Schedule
from sparsegen.spec.expr import Term


class Terms(text.TermPrinter):
    """Membership tests of the kernel's tables."""

    def __init__(self, tables: tuple[Table, ...]):
        self.tables = {t.term: t for t in tables}

    def __call__(self, term: Term) -> str:
        table = self.tables.get(term)
        if table is None:
            raise UnsupportedError(f"the forward template has no run-time data for {term.kind!r}")
        i = table.index
        return f"in_table{i}(TABLE{i}, table{i}_row, q_pos, k_pos)"


def tables_of(schedule: Schedule) -> tuple[Table, ...]:
    """Every random_blocks term that a segment walks over or tests, each once."""
    terms: dict[Term, None] = {}
    for cls in schedule.classes:
        for sweep in cls.sweeps:
            for seg in sweep.segments:
                if seg.table is not None:
                    terms[seg.table.term] = None  # type: ignore[index]
                for span in seg.spans:
                    for test in span.tests:
                        terms.update(dict.fromkeys(_terms_of(test)))
    return tuple(
        Table(
            index=i,
            term=term,
            block=term["block"],
            per_row=term["per_row"],
            row_of_q=text.floor_by("q_pos", term["block"]),
            block_of_k=text.floor_by("k_pos", term["block"]),
        )
        for i, term in enumerate(sorted(terms, key=str))
    )


def _terms_of(test: object) -> Iterable[Term]:
    if isinstance(test, Range):
        for generator, _ in test.lin.terms:
            if isinstance(generator, Opaque):
                yield from _terms_in(generator.expr)
    elif isinstance(test, (AnyOf, NoneOf)):
        for cube in test.cubes:
            for r in cube:
                yield from _terms_of(r)


def _terms_in(e: object) -> Iterable[Term]:
    if isinstance(e, Term):
        yield e
    else:
        for field in getattr(e, "__dataclass_fields__", ()):
            value = getattr(e, field)
            for child in value if isinstance(value, tuple) else (value,):
                yield from _terms_in(child)

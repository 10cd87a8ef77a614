"""Results as a table for people and as CSV, one line a pattern x length x contender."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from sparsegen.bench.results import OURS, Measured, Results, Row

COLUMNS = (
    "date", "gpu", "driver", "sparsegen", "torch", "triton", "pattern", "problem", "q_len", "kv_len", "contender",
    "median_us", "spread_us", "ratio", "sustained_us", "host_us", "host_in_time", "peak_bytes", "setup_ms",
    "setup_bytes", "tflops", "gbs", "roofline", "difference", "cells", "all_cells", "computed_cells", "intensity",
    "matmul_tflops", "copy_gbs", "schedule", "config", "chosen_by", "protocol", "note",
)  # fmt: skip
_VERSIONS = ("driver", "sparsegen", "torch", "triton")


def csv_text(results: Results) -> str:
    """The whole file.  A contender that was not timed, and a case that was left out, is a line with its reason as ``note``."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines(results))
    return out.getvalue()


def lines(results: Results) -> Iterator[dict[str, Any]]:
    """The lines of the CSV as columns by name."""
    run: dict[str, Any] = {"date": results.date, "gpu": results.gpu, "protocol": results.protocol}
    run |= {name: results.versions.get(name, "") for name in _VERSIONS}
    run |= {
        "matmul_tflops": round(results.roof.matmul / 1e12, 1),
        "copy_gbs": round(results.roof.copy / 1e9, 1),
    }
    for one in results.cases:
        case = run | _case_columns(one)
        for row in one.rows:
            yield case | _row_columns(one, row, results)
        for refused in one.refused:
            difference = "" if refused.difference is None else f"{refused.difference:.3g}"
            yield case | {
                "contender": refused.contender,
                "difference": difference,
                "note": refused.reason,
            }
    for lost in results.left_out:
        yield run | {"pattern": lost.pattern, "problem": lost.lengths, "note": lost.reason}


def _case_columns(one: Measured) -> dict[str, Any]:
    names = ("pattern", "problem", "q_len", "kv_len", "cells", "all_cells")
    return {name: getattr(one, name) for name in names} | {
        "computed_cells": "" if one.computed_cells is None else one.computed_cells,
        "intensity": round(one.work.intensity, 3),
    }


def _row_columns(one: Measured, row: Row, results: Results) -> dict[str, Any]:
    mine = row.contender == OURS
    return {
        "contender": row.contender,
        "median_us": round(row.us, 3),
        "spread_us": round(row.spread_us, 3),
        "ratio": round(row.us / one.ours.us, 4),
        "sustained_us": round(row.sustained_us, 3),
        "host_us": round(row.host_us, 2),
        "host_in_time": int(row.host_in_time),
        "peak_bytes": row.peak_bytes,
        "setup_ms": round(row.setup_ms, 3),
        "setup_bytes": row.setup_bytes,
        "tflops": round(one.work.tflops(row.us), 2),
        "gbs": round(one.work.gbs(row.us), 1),
        "roofline": round(one.fraction(row, results.roof), 4),
        "difference": f"{row.difference:.3g}",
        "schedule": one.schedule if mine else "",
        "config": one.config if mine else "",
        "chosen_by": one.chosen_by if mine else "",
    }


def text(results: Results) -> str:
    """For a person: the run, a table a case, what was not measured, and peers that are not here."""
    roof, v = results.roof, results.versions
    parts = [
        f"{results.gpu}, driver {v.get('driver')}, torch {v.get('torch')}, triton {v.get('triton')}, {results.date}\n"
        f"{results.protocol}\n"
        f"roof: {roof.matmul / 1e12:.0f} TF/s matrix product, {roof.copy / 1e9:,.0f} GB/s copy, "
        f"equal at {roof.ridge:.0f} operations a byte"
    ]
    parts += [case_text(one, results) for one in results.cases]
    lost = [f"not measured: {x.pattern} {x.lengths}: {x.reason}" for x in results.left_out]
    absent = [f"not here: {name}: {why}" for name, why in results.missing]
    return "\n\n".join(parts + ["\n".join(x) for x in (lost, absent) if x])


_HEAD = (
    "", "µs", "±", "ratio", "sustained µs", "host µs", "TF/s", "GB/s", "of roof", "memory", "mask ms", "differs",
)  # fmt: skip


def case_text(one: Measured, results: Results) -> str:
    """One case: its cells and schedule, a line a contender, and why others have none."""
    about = "" if one.cells_exact else "about "
    computed = "" if one.efficiency is None else f", {one.efficiency:.1%} of the computed ones"
    floor = one.work.floor_us(results.roof)
    head = [
        f"{one.pattern}, {one.problem}",
        f"visible {about}{one.visible:.2%} of all cells{computed}; {one.work.intensity:.0f} operations a byte; floor {floor:.1f} µs",
        f"schedule {one.schedule}; {one.config}; {one.chosen_by}",
    ]
    rows = [_HEAD, *(_shown(one, row, results) for row in one.rows)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(r, widths)))
        for r in rows
    ]
    late = [r.contender for r in one.rows if r.host_in_time]
    notes = [f"{name}: the host's time is in it" for name in late]
    notes += [f"{r.contender}: {r.reason}" for r in one.refused]
    return "\n".join([*head, *(f"  {line.rstrip()}" for line in [*lines, *notes])])


def _shown(one: Measured, row: Row, results: Results) -> tuple[str, ...]:
    mine = row.contender == OURS
    return (
        row.contender,
        f"{row.us:,.1f}",
        f"{row.spread_us:.1f}",
        f"{row.us / one.ours.us:.3f}",
        f"{row.sustained_us:,.1f}",
        f"{row.host_us:.0f}",
        f"{one.work.tflops(row.us):.0f}",
        f"{one.work.gbs(row.us):,.0f}",
        f"{one.fraction(row, results.roof):.1%}",
        f"{row.peak_bytes / 2**20:,.1f} MiB",
        f"{row.setup_ms:.1f}" if row.setup_bytes or row.setup_ms else "–",
        "" if mine else f"{row.difference:.1e}",
    )

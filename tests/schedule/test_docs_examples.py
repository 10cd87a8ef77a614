"""docs/schedule.md says what the compiler does: every number of its worked examples, from the schedules themselves."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsegen.schedule.forms import value
from sparsegen.schedule.tiles import entry_keys, one_tile, tile_rows
from sparsegen.schedule.tree import HeadClass, Sweep, Tiling
from sparsegen.schedule.verify import execute, mask_of
from sparsegen.spec.predicate import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "schedule.md").read_text(encoding="utf-8")


def _pictures() -> Any:
    """scripts/schedule-pictures, where the examples are written down."""
    path = ROOT / "scripts" / "schedule-pictures"
    loader = SourceFileLoader("schedule_pictures", str(path))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


P = _pictures()
EXAMPLES = {
    name: getattr(P, name)
    for name in ("UNION", "BAND", "RESIDUE", "GROUPS", "GRID", "HEAVY", "ORDER")
}


def said(*cells: object) -> None:
    """The page has a table row that begins with these cells (written out as they stand there)."""
    row = "| " + " | ".join(map(str, cells)) + " |"
    assert row in PAGE, f"docs/schedule.md has no row {row}"


def percent(visible: int, computed: int) -> str:
    return f"{100 * visible / computed:.1f} %"


def keys_of(example: Any, segment: Any, tile: int) -> list[int]:
    """Keys in the box of one query tile."""
    _, seen = P.tiles_of(segment, example.length, example.side)
    inner = tuple((int(a[tile]), int(n[tile])) for a, n in seen.inner)
    entries = np.arange(int(seen.entries[tile]))
    return entry_keys(int(seen.first[tile]), inner, entries, segment.tiling)["k"].tolist()


def rows_of(example: Any, segment: Any, tile: int) -> list[int]:
    env, _ = P.tiles_of(segment, example.length, example.side)
    rows = tile_rows(one_tile(env, tile), 0, example.length, example.side, segment.tiling)
    return rows.q[rows.live].tolist()


def conjuncts(segment: Any) -> dict[str, list[str]]:
    """What each span tests beside the row limits."""
    return {s.kind: list(map(str, s.tests)) for s in segment.spans}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_computes_its_mask(name: str) -> None:
    """The branches on the page's tilings show each visible cell once."""
    e = EXAMPLES[name]
    assert f"`{e.text}`" in PAGE or name == "BAND"
    for segments in (e.segments, e.on_runs):
        sweeps = [Sweep(Tiling(s.tiling.q_cuts, s.tiling.extent), (s,)) for s in segments]
        call = (0, e.length, 0, e.length)
        got = execute(HeadClass(None, tuple(sweeps), e.text), call, e.side, e.side)
        want = mask_of(parse(e.text), call)
        assert (got == want).all()
    assert (sum(x.astype(int) for x in e.shown()) == want).all()


def test_union() -> None:
    e = P.UNION
    counts = [int(x.sum()) for x in e.shown()]
    assert counts == [100, 42, 42]
    for branch, n in zip(e.branches, counts, strict=True):
        assert re.search(rf"^\| `{re.escape(branch)}` \|.*\| {n} \|$", PAGE, re.M)
    cubes = sorted((int(e.visible([c]).sum()) for c in e.cubes), reverse=True)
    assert cubes == [100, 64, 64]
    total = sum(counts)
    assert f"{total} cells. The three cubes hold 100 + 64 + 64 = {sum(cubes)}" in PAGE
    assert f"so {sum(cubes) - total} would have counted more than once" in PAGE


def test_residue_classes() -> None:
    e = P.RESIDUE
    (runs,), (tiled,), (seen,) = e.on_runs, e.segments, e.shown()
    assert tiled.tiling == Tiling((8,), (1,), (8,))
    assert rows_of(e, tiled, 3) == keys_of(e, tiled, 3) == [3, 11, 19, 27]
    assert [(str(lo), str(hi)) for lo, hi in tiled.inner] == [("x0", "x0")]
    assert conjuncts(tiled) == {"full": [], "tail": []} and str(tiled.row_hi).endswith(", x1)")
    assert conjuncts(runs)["whole"] == [e.branches[0].split(" and ")[0]]
    assert [len(keys_of(e, runs, i)) for i in range(8)] == [*range(4, 33, 4)]
    assert P.per_query_tile(runs, 32).tolist() == [*range(1, 9)]
    assert P.per_query_tile(tiled, 32).tolist() == [1] * 8
    a, b, n = P.computed(e.on_runs, 32), P.computed(e.segments, 32), int(seen.sum())
    said("computed cells", a, b)
    said(f"efficiency ({n} visible)", percent(n, a), percent(n, b))
    said("key tiles", "1 + 2 + … + 8 = 36", "8 · 1 = 8")


def test_key_groups() -> None:
    e = P.GROUPS
    chunk, groups = e.segments
    assert groups.tiling == Tiling((), (), (8,)) and chunk.tiling == Tiling()
    assert rows_of(e, groups, 4) == [16, 17, 18, 19]
    assert keys_of(e, groups, 4) == [6, 7, 14, 15]
    assert keys_of(e, e.on_runs[1], 4) == [*range(16)]
    _, seen = P.tiles_of(groups, 32)
    assert (seen.tiles(4)["full"][4], conjuncts(groups)["full"]) == (1, [])
    on_runs = P.per_query_tile(e.on_runs[1], 32)
    said("key tiles of rows 16 to 19", on_runs[4], P.per_query_tile(groups, 32)[4])
    said("key tiles, all rows", on_runs.sum(), P.per_query_tile(groups, 32).sum())
    assert P.per_query_tile(chunk, 32).sum() == 12
    a, b = P.computed(e.on_runs, 32), P.computed(e.segments, 32)
    said("with the chunks' 12: computed cells", a, b)
    visible = [int(x.sum()) for x in e.shown()]
    text = f"efficiency ({visible[0]} + {visible[1]} visible)"
    said(text, percent(sum(visible), a), percent(sum(visible), b))


def test_boxes_of_a_grid() -> None:
    e = P.GRID
    (runs,), (tiled,), (seen,) = e.on_runs, e.segments, e.shown()
    assert rows_of(e, tiled, 1) == [2, 3, 10, 11]
    keys = keys_of(e, tiled, 1)
    assert keys == [k for k in range(32) if 1 <= k % 8 <= 4 and k // 8 <= 2] and len(keys) == 12
    assert "-1 <= x0 - y0 <= 1" in conjuncts(tiled)["whole"]
    assert (str(tiled.row_lo), str(tiled.row_hi)) == ("x1 - 1", "x1 + 1")
    assert keys_of(e, runs, 0) == [*range(16)]
    on_runs, boxes = P.per_query_tile(runs, 32), P.per_query_tile(tiled, 32)
    assert boxes.tolist() == [3] * 8
    text = " + ".join(map(str, on_runs)) + f" = {on_runs.sum()}"
    said("key tiles", text, f"8 · 3 = {boxes.sum()}")
    a, b, n = P.computed(e.on_runs, 32), P.computed(e.segments, 32), int(seen.sum())
    said("computed cells", a, b)
    said(f"efficiency ({n} visible)", percent(n, a), percent(n, b))


def test_key_boxes_of_a_grid() -> None:
    e = P.GRID
    (tiled,), (seen,) = e.segments, e.shown()
    twin = replace(tiled, tiling=replace(tiled.tiling, k_extent=2))
    _, got = P.tiles_of(twin, 32, 4)
    assert got.tiles(4)["whole"].tolist() == [4] * 8
    inner = tuple((int(first[1]), int(n[1])) for first, n in got.inner)
    keys = entry_keys(int(got.first[1]), inner, np.arange(16), twin.tiling, 4)
    boxes = list(zip(keys["y0"].tolist(), keys["y1"].tolist()))
    lines, columns = ((0, 1), (2, 3)), ((1, 2), (3, 4))
    assert boxes == [(x, y) for ys in lines for xs in columns for y in ys for x in xs]
    said("lines", "columns 1, 2", "columns 3, 4")
    said("2, 3", "box 2", "box 3")
    share = percent(int(seen.sum()), 32 * 16).replace(" %", "")
    assert f"32 key tiles in all, {share} % of their cells" in PAGE


def test_closed_forms() -> None:
    from sparsegen import Pattern
    from sparsegen.schedule.build import build

    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M)
    (head_class,) = build(Pattern.from_yaml_text(text)).classes
    (band,) = head_class.sweeps[0].segments
    assert band.branch == P.BAND.segments[0].branch
    env, seen = P.tiles_of(band, 96, 16)
    at = one_tile(env, 4)
    assert (at["q_first"], at["q_last"]) == (64, 79)
    for name in ("tile_lo", "tile_hi", "full_lo", "full_hi"):
        form = getattr(band, name)
        said(f"`{name}`", f"`{form}`", value(form, at))
    for name in ("row_lo", "row_hi"):
        form = getattr(band, name)
        said(f"`{name}`", f"`{form}`", f"of row 64: {value(form, {**at, 'q': 64})}")
    tiles = list(P.key_tiles(band, 96, 16))
    mine = [(t.kind, int(t.keys[0]), int(t.keys[-1])) for t in tiles if t.tile == 4]
    assert mine == [("head", 17, 32), ("full", 33, 48), ("full", 49, 64), ("tail", 65, 80)]
    for kind, text in (
        ("head", "1 tile, keys 17 to 32, tests `k >= q - 47`"),
        ("body", "2 tiles, keys 33 to 64, tests nothing"),
        ("tail", "1 tile, keys 65 to 80, tests `k <= q`"),
    ):
        assert re.search(rf"^\| {kind} \|.*\| {re.escape(text)} \|$", PAGE, re.M)
    assert [t.kind for t in tiles if t.tile == 0] == ["whole"]
    spans = {s.kind: (s.lower, s.upper, s.tests) for s in band.spans}
    assert spans["head"] == (True, False, ()) and spans["tail"] == (False, True, ())


def test_lists_of_spans() -> None:
    listed = re.findall(r"^\| `((?:head|full|tail|whole)(?:, [^`]*)?)` \|", PAGE, re.M)
    assert listed == [
        "whole",
        "full, tail",
        "full, tail, whole",
        "head, full, tail",
        "head, full, tail, whole",
    ]

    def kinds(pattern: str, name: str, *, plain: bool = False) -> str:
        from sparsegen import Pattern
        from sparsegen.schedule.build import candidates

        found = candidates(Pattern.from_yaml(pattern))
        schedule = found[-1 if plain else 0].schedule
        assert not plain or schedule.label == "runs"
        every = [s for c in schedule.classes for w in c.sweeps for s in w.segments]
        return next(", ".join(x.kind for x in s.spans) for s in every if s.name == name)

    assert kinds("streaming_llm", "columns") == "whole"
    assert kinds("causal", "causal") == "full, tail"
    assert kinds("sparse_transformer_strided", "strided") == "full, tail"
    assert kinds("bigbird", "rows") == "full, tail, whole"
    assert kinds("longnet_dilated", "masked", plain=True) == "head, full, tail"
    assert kinds("gemma2_local", "band") == "head, full, tail, whole"


def test_state_between_sweeps() -> None:
    torch = pytest.importorskip("torch")
    from sparsegen import merge

    def part(out: float, lse: float) -> tuple[Any, Any]:
        return torch.full((1, 1, 1, 1), out).double(), torch.full((1, 1, 1), lse).double()

    out, lse = merge([part(2.0, 0.0), part(6.0, math.log(3))])
    assert out.item() == pytest.approx(5) and lse.item() == pytest.approx(math.log(4))
    assert "OUT (2 + 3·6) / 4 = 5 and LSE ln 4" in " ".join(PAGE.split())


def test_heavy_rows() -> None:
    from sparsegen.schedule.heavy import few_rows
    from sparsegen.schedule.search import candidates
    from sparsegen.schedule.ways import HEAVY

    e = P.HEAVY
    band, rows, columns = (P.per_query_tile(s, e.length) for s in e.segments)

    def three(name: str, load: Any) -> None:
        assert len(set(load[1:7].tolist())) == 1
        said(name, load[0], load[1], load[7])

    three("band", band)
    three("rows, keys 4 to 31", rows)
    three("columns", columns)
    three("all in one sweep", band + rows + columns)
    three("without rows", band + columns)
    assert keys_of(e, e.segments[1], 0) == [*range(4, 32)]
    assert P.chunks(int(rows[0])) == [2, 2, 2, 1] and P.CHUNK == 2
    assert "The longest program falls from 9 to 4; the cells stay the same, 576." in PAGE
    assert P.computed(e.segments, 32) == 576
    apart = few_rows(e.disjoint[1])
    assert apart is not None and apart[0] == (0, 3)
    mean = (band + rows + columns).sum() / 8
    assert mean == 4.5 and rows.max() <= HEAVY * mean and f"the mean of {mean}" in PAGE

    best = candidates([(None, parse(e.text))], lengths=[(32_768, 32_768)])[0]
    assert best.schedule.label == "runs + split rows"
    split = best.schedule.classes[0].sweeps[1]
    assert split.split and split.rows == (0, 3)
    assert round(best.cost.tile_cells / (128 * 64) / 256) == 6
    assert -(-(32_768 - 4) // 64) == 512 and "512 of a mean of 6" in " ".join(PAGE.split())


def test_order() -> None:
    (s,) = P.ORDER.segments
    loads = P.per_query_tile(s, 32).tolist()
    assert loads == [*range(1, 9)] and sum(loads) == 36
    for name, order in (("first tile first", loads), ("heaviest first", loads[::-1])):
        end, placed = P.makespan(order, 3)
        own = [" + ".join(str(order[i]) for p, _, i in placed if p == n) for n in range(3)]
        said(name, *own, end)


def test_limits() -> None:
    """The bounds of the search, and what a window reaches in tiles of its size."""
    rows = re.findall(r"^\| `(\w+)\.([A-Z_]+)` \| ([\d,]+) \|", PAGE, re.M)
    assert len(rows) == 18
    for module, name, number in rows:
        is_now = getattr(import_module(f"sparsegen.schedule.{module}"), name)
        assert is_now == int(number.replace(",", "")), f"{module}.{name} is {is_now}"
    for m, share in ((128, 50), (64, 67)):
        assert round(100 * 128 / (128 + m - 1)) == share and f"{share} %" in PAGE


def test_labels() -> None:
    """Labels that the page explains are labels that schedules have."""
    from sparsegen.schedule.search import candidates

    masks = {
        "runs": ("k <= q", 32_768),
        "runs + mod 128": ("k <= q and (q - k < 128 or (q - k) % 128 == 0)", 32_768),
        "runs + keys mod 128": ("k <= q and (q // 128 == k // 128 or k % 128 >= 120)", 32_768),
        "runs + box 4 of 128": ("k <= q and (q - k < 128 or (q - k) % 128 == 0)", 4_096),
        "runs + split rows": ("abs(q - k) <= 256 or k < 64 or q < 64", 32_768),
    }
    explained = re.findall(r"^\| `(runs[^`]*)` \|", PAGE, re.M)
    assert explained == [*masks, "runs + mod 128 / runs"]
    for label, (text, n) in masks.items():
        found = candidates([(None, parse(text))], lengths=[(n, n)])
        assert found[0].schedule.label == label


@pytest.mark.parametrize("name", P.PICTURES)
def test_pictures_are_there_and_can_be_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = ROOT / "docs" / "images" / f"schedule_{name}.png"
    assert f"(images/{kept.name})" in PAGE
    assert kept.stat().st_size <= 60 << 10
    P.PICTURES[name]().savefig(tmp_path / "new.png")
    assert (tmp_path / "new.png").stat().st_size > 5_000

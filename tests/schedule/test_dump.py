"""Golden dumps of three schedules (``--update-golden`` rewrites them), and the graph derived from the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsegen.schedule.build import build, build_from_exprs
from sparsegen.schedule.dump import dump
from sparsegen.schedule.graph import graph
from sparsegen.spec.pattern import Pattern
from tests.schedule.formulas import mask

GOLDEN = Path(__file__).parent / "golden"
PATTERNS = Path(__file__).parents[1] / "data" / "acceptance" / "patterns"


@pytest.mark.parametrize("name", ["streaming_llm", "bigbird", "per_head"])
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    text = dump(build(Pattern.from_yaml(PATTERNS / f"{name}.yaml")))
    path = GOLDEN / f"{name}.schedule.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: run pytest --update-golden and read the result"
    assert text == path.read_text(encoding="utf-8")


def test_the_graph_chains_segments_between_load_and_combine() -> None:
    import networkx as nx

    rules = [(((0, 1),), mask("k <= q and (q - k < 99 or k < 4)")), (None, mask("k <= q"))]
    g = graph(build_from_exprs(rules))
    kinds = [g.nodes[n]["kind"] for n in nx.topological_sort(g)]
    assert kinds.count("load") == kinds.count("combine") == 2 and kinds.count("segment") == 3
    assert nx.shortest_path(g, "load0.0", "combine0") == [
        "load0.0",
        "segment0.0.columns",
        "segment0.0.band",
        "combine0",
    ]
    assert g.nodes["segment0.0.band"]["spans"] == ("head", "full", "tail", "whole")


def test_an_empty_mask_has_no_segment_and_says_none() -> None:
    schedule = build_from_exprs([(None, mask("k <= q and k > q"))])
    assert schedule.classes[0].sweeps[0].segments == ()
    assert "other heads: none" in dump(schedule)

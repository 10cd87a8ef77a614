"""The schedule as a graph of what a kernel does, derived from the tree: for drawing, ordering and structural checks.

load      query tile and softmax state, one per sweep: empty in the first, else what the sweep before has left
segment   the loops over key tiles of one branch; the state is chained through all segments of a sweep
combine   output and LSE of a head class, after its last sweep
"""

from __future__ import annotations

from typing import Any

from sparsegen.schedule.dump import heads_text, tiling_text
from sparsegen.schedule.tree import Schedule


def graph(schedule: Schedule) -> Any:
    """A networkx DiGraph; nodes have ``kind`` and ``label``, edges have ``kind``.

    chain: a state in registers goes on · state: it goes on through memory, from sweep to sweep · combine: it is the result.
    """
    import networkx as nx

    g = nx.DiGraph(align=schedule.align)
    for i, one in enumerate(schedule.classes):
        end = f"combine{i}"
        g.add_node(end, kind="combine", label=heads_text(one.heads))
        at = ""
        for j, sweep in enumerate(one.sweeps):
            before, at = at, f"load{i}.{j}"
            g.add_node(at, kind="load", label=tiling_text(sweep), split=sweep.split)
            if before:
                g.add_edge(before, at, kind="state")
            for segment in sweep.segments:
                node = f"segment{i}.{j}.{segment.name}"
                g.add_node(
                    node,
                    kind="segment",
                    label=segment.name,
                    spans=tuple(s.kind for s in segment.spans),
                    branch=str(segment.branch),
                )
                g.add_edge(at, node, kind="chain")
                at = node
        if at:
            g.add_edge(at, end, kind="combine")
    return g

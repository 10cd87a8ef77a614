"""Changes of templates that are tried against what ships (``variants.py``): each edits a copy of the folder templates/.

An edit that was measured moves into the templates or out of this file; what it gave is told in docs/performance.md.

    tree       forward: a row's maximum as a tree, every thread's columns first; the shipped one is a chain of 31 for each row
    order      forward: scores are waited for alone; maximum and factors are computed beside the product with the values
    late       forward: the same, and the weights, too
    registers  forward: queries are a product's operand from registers, which shared memory need not give eight times a key tile
    turns      forward, one segment without a guest: consumers ask for their products in turn
    own        backward: the first own tensor (queries, keys) from registers
    owns       backward: both
    pairs      backward: LSE and delta of a visited query in one load of 8 bytes (Triton 3.6 to 3.8)
    twins      backward, keys and fused by the hopper texts: LSE of two neighbours in one load of 8 bytes, and so delta (Triton 3.6 to 3.8)

What a part costs is learnt by leaving it out; gradients are wrong then, so these are for ``--unchecked`` alone:

    no_exponentials   forward: weights are the scores
    no_statistics     backward: LSE and delta of the visited queries are not loaded
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

TILES, CONSUMER, KERNEL = (
    Path("forward") / name
    for name in ("hopper_tiles.jinja", "hopper_consumer.jinja", "hopper.py.jinja")
)
MACROS = Path("backward") / "hopper_macros.jinja"
REGISTERS = 192  # columns of queries that fit beside scores, weights and output

BOTH_WAITED = """\
        s, {{ hopper.accs }} = warpgroup_mma_wait(0, deps=(s, {{ hopper.accs }}))
        mbarrier.arrive(free.index(slot), count=1)
{{ softmax(plan, launch, seg) | trim | indent(8, first=true) }}
        p = p.to(DTYPE)
"""
# A wait that passes at once begins a new block of code.  Without it ptxas puts the wait for the values right behind that for the scores.
NEW_BLOCK = """\
{% if hopper.launches[launch.function].queries %}
        mbarrier.wait(q_ready.index(place), (turn // query_slots(PERSISTENT)) & 1)
{% else %}
        mbarrier.wait(ready.index(slot), (t // STAGES) & 1)
{% endif %}
"""
SCORES_WAITED = """\
        s = warpgroup_mma_wait({{ plan.v_chunks | length }}, deps=(s,))
{{ masked(plan, launch, seg, "s", "") | trim | indent(8, first=true) }}
"""
VALUES_WAITED = """\
{{ waited(plan) | trim | indent(8, first=true) }}
        mbarrier.arrive(free.index(slot), count=1)
{{ rescale(plan) | trim | indent(8, first=true) }}
"""


def change(path: Path, old: str, new: str, times: int = 1) -> None:
    """Replace ``old``, which the file must hold so many times: an edit made for other templates fails."""
    text = path.read_text()
    found = text.count(old)
    if found != times:
        raise ValueError(f"{path.name} holds {old!r} {found} times, not {times}")
    path.write_text(text.replace(old, new))


def tree(root: Path) -> None:
    change(
        root / KERNEL,
        "@gluon.jit\ndef online_softmax(s, m, l, scale):",
        """\
@gluon.jit
def row_maximum(s):
    own = gl.max(s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), axis=3)
    return gl.max(gl.max(own, axis=1), axis=1)


@gluon.jit
def online_softmax(s, m, l, scale):""",
    )
    old = "    m_new = gl.maximum(m, gl.convert_layout(gl.max(s, axis=1) * scale, m.type.layout))"
    change(root / KERNEL, old, old.replace("gl.max(s, axis=1)", "row_maximum(s)"))


def order(root: Path) -> None:
    softmax = """\
    m_new = gl.maximum(m, gl.convert_layout(gl.max(s, axis=1) * scale, m.type.layout))
    p = gl.exp2(s * scale - gl.convert_layout(m_new, gl.SliceLayout(1, s.type.layout))[:, None])
    factor = gl.exp2(m - m_new)
    l = l * gl.convert_layout(factor, gl.SliceLayout(1, l.type.layout))[:, None]
    return p, m_new, l + gl.convert_layout(sums(p), l.type.layout), factor
"""
    split = """\
    m, factor = new_maximum(s, m, scale)
    p, l = softmax_weights(s, m, l, factor, scale)
    return p, m, l, factor


@gluon.jit
def new_maximum(s, m, scale):
    m_new = gl.maximum(m, gl.convert_layout(gl.max(s, axis=1) * scale, m.type.layout))
    return m_new, gl.exp2(m - m_new)


@gluon.jit
def softmax_weights(s, m, l, factor, scale):
    p = gl.exp2(s * scale - gl.convert_layout(m, gl.SliceLayout(1, s.type.layout))[:, None])
    l = l * gl.convert_layout(factor, gl.SliceLayout(1, l.type.layout))[:, None]
    return p, l + gl.convert_layout(sums(p), l.type.layout)
"""
    change(root / KERNEL, softmax, split)
    maximum = "        m, factor = new_maximum(s, m, {{ plan.softmax_scale }})\n"
    weights = """\
        p, l = softmax_weights(s, m, l, factor, {{ plan.softmax_scale }})
        p = p.to(DTYPE)
"""
    change(root / TILES, BOTH_WAITED, SCORES_WAITED + maximum + NEW_BLOCK + VALUES_WAITED + weights)


def late(root: Path) -> None:
    weights = """\
        weights, m, l, factor = online_softmax(s, m, l, {{ plan.softmax_scale }})
        weights = weights.to(DTYPE)
"""
    behind = "        p = weights\n"
    change(root / TILES, BOTH_WAITED, SCORES_WAITED + weights + NEW_BLOCK + VALUES_WAITED + behind)


def registers(root: Path) -> None:
    few = f'plan.qk_chunks | sum(attribute="width") <= {REGISTERS}'
    own = few.replace('"', "'")
    change(
        root / TILES,
        "warpgroup_mma(queries{{ c.index }}, {{ keys }}",
        f"warpgroup_mma({{{{ 'q_own' if {own} else 'queries' }}}}{{{{ c.index }}}}, {{{{ keys }}}}",
        times=2,
    )
    behind = "fence_async_shared()\n{% endif %}\n{% endmacro %}\n\n{# in: m, l, acc*"
    load = f"""\
fence_async_shared()
{{% endif %}}
{{% if {few} %}}
{{% for c in plan.qk_chunks %}}
q_own{{{{ c.index }}}} = queries{{{{ c.index }}}}.load(gl.DotOperandLayout(0, product_layout(BLOCK_N), 2))
{{% endfor %}}
{{% endif %}}
{{% endmacro %}}

{{# in: m, l, acc*"""
    change(root / CONSUMER, behind, load)


def turns(root: Path) -> None:
    # two more barriers at the end of q_empty: "it is this consumer's turn"; key tile t of both is their turn number t
    change(root / KERNEL, "q_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1]", "q_empty = gl.allocate_shared_memory(gl.int64, [TILES + 2, 1]")  # fmt: skip
    ready = (
        "    for i in gl.static_range(STAGES):\n        mbarrier.init(ready.index(i), count=1)\n"
    )
    turn = "    for i in gl.static_range(2):\n        mbarrier.init(q_empty.index(TILES + i), count=1)\n"
    change(root / KERNEL, ready, turn + ready)
    at = "q_empty.index(query_slots(PERSISTENT) + {})"
    walk = '    """64 rows of every program\'s tile."""\n'
    change(
        root / KERNEL,
        walk,
        f"{walk}    if FIRST_ROW == CONSUMER_ROWS:  # the first turn is the other one's\n        mbarrier.arrive({at.format(0)}, count=1)\n",
    )
    own, other = (
        "FIRST_ROW // CONSUMER_ROWS",
        "1 - FIRST_ROW // CONSUMER_ROWS",
    )
    wait = f"if BLOCK_M > CONSUMER_ROWS:\n    mbarrier.wait({at.format(own)}, t & 1)\n"
    give = f"if BLOCK_M > CONSUMER_ROWS:\n    mbarrier.arrive({at.format(other)}, count=1)\n"
    indented = lambda text: "".join(f"        {line}\n" for line in text.splitlines())
    scores = '{{ scores(plan, seg, "s", "slot") | trim | indent(8, first=true) }}\n'
    values = '{{ values(plan, seg, "p") | trim | indent(8, first=true) }}\n'
    change(root / TILES, scores + values, indented(wait) + scores + values + indented(give))
    first = '{% macro first(plan, launch, seg) %}\n{{ ready() | trim }}\n{{ scores(plan, seg, "s", "slot") | trim }}\n'
    asked = '{{ scores(plan, seg, "s", "slot") | trim }}\n'
    change(root / TILES, first, first.replace(asked, wait + asked + give))


def own(root: Path, which: str = "(0,)") -> None:
    at = '{{ own_rows(plan, "own_", "mine") | trim }}\nfor j in'
    load = f"""\
{{{{ own_rows(plan, "own_", "mine") | trim }}}}
{{% for i in {which} %}}
{{% for c in (plan.qk_chunks, plan.v_chunks)[i] %}}
own_{{{{ hopper.own[i] }}}}{{{{ c.index }}}} = own_{{{{ hopper.own[i] }}}}{{{{ c.index }}}}.load(gl.DotOperandLayout(0, product_layout({{{{ seg.block }}}}), 2))
{{% endfor %}}
{{% endfor %}}
for j in"""
    change(root / MACROS, at, load)


def owns(root: Path) -> None:
    own(root, "(0, 1)")


def pairs(root: Path) -> None:
    statistics = """\
@gluon.jit
def statistics(stats, N: gl.constexpr):
    thread: gl.constexpr = gl.BlockedLayout([2, 1], [4, 8], [1, 4], [0, 1])
    whole: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, 2], gl.int64)
    column = stats._reinterpret(gl.int64, [N, 2], whole).slice(0, 1, dim=1).load(thread)
    both = gl.convert_layout(column.reshape([N]), columns_layout(N), assert_trivial=True)
    return both.to(gl.int32).to(gl.float32, bitcast=True), (both >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def statistic("""
    change(root / "backward" / "hopper.py.jinja", "@gluon.jit\ndef statistic(", statistics)
    keys = root / "backward" / "hopper_keys.jinja"
    change(
        keys,
        "lse = statistic({{ stats }}, 0, {{ seg.block }})",
        "lse, delta = statistics({{ stats }}, {{ seg.block }})",
    )
    change(keys, "delta = statistic({{ stats }}, 1, {{ seg.block }})\n", "")


def twins(root: Path) -> None:
    # rows of STATS: LSE, the next row's LSE, delta, the next row's delta
    backward = root / "backward"
    for name, own, rows, inside, last in (
        ("prepare.jinja", "tl", "at", "inside", "row + rows == q_rows - 1"),
        ("hopper_queries.jinja", "gl", "(first_stat + rows)", "inside", "first_stat + rows == batch_head.to(gl.int64) * q_rows + q_rows - 1"),
    ):  # fmt: skip
        text = f"{own}.store(STATS + {rows} * 4 + 1, delta, mask={inside})\n"
        first = f"{rows} > batch_head.to({own}.int64) * q_rows"
        change(
            backward / name,
            text,
            f"{own}.store(STATS + {rows} * 4 + 2, delta, mask={inside})\n"
            f"{own}.store(STATS + {rows} * 4 - 3, lse, mask={inside} & ({first}))\n"
            f"{own}.store(STATS + {rows} * 4 - 1, delta, mask={inside} & ({first}))\n"
            f"{own}.store(STATS + {rows} * 4 + 1, lse * 0.0 + float('inf'), mask={inside} & ({last}))\n"
            f"{own}.store(STATS + {rows} * 4 + 3, delta * 0.0, mask={inside} & ({last}))\n",
        )
    for name, old in (
        ("hopper_queries.jinja", "delta = gl.load(STATS + (first_stat + rows) * 4 + 1,"),
        ("queries.jinja", "delta = tl.load(STATS + stat_rows * 4 + 1,"),
    ):
        change(backward / name, old, old.replace("4 + 1", "4 + 2"))
    twin = """\
@gluon.jit
def twin_statistic(stats, WHICH: gl.constexpr, N: gl.constexpr):
    thread: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [1, 4], [0, 1])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    two = stats._reinterpret(gl.float32, [N // 2, 8], rows).slice(2 * WHICH, 2, dim=1).load(thread)
    return gl.convert_layout(two.reshape([N]), columns_layout(N), assert_trivial=True)


@gluon.jit
def statistic("""
    for folder, text in (
        ("backward", "hopper_keys.jinja"),
        ("backward_fused", "hopper_fused.jinja"),
    ):
        kernel, loop = root / folder / "hopper.py.jinja", root / folder / text
        change(kernel, "@gluon.jit\ndef statistic(", twin)
        change(kernel, "column = stats.slice(WHICH, 1, dim=1)", "column = stats.slice(2 * WHICH, 1, dim=1)")  # fmt: skip
        which = "{{ 'statistic' if seg.corner else 'twin_statistic' }}("
        for name in ("lse", "delta"):
            change(loop, f"{name} = statistic(", f"{name} = {which}")


def no_exponentials(root: Path) -> None:
    text = (root / KERNEL).read_text()
    at = text.index("def online_softmax(")
    end = text.index("@gluon.jit", at)
    part = text[at:end]
    whole = re.sub(r"gl\.exp2\((s \* scale - gl\.convert_layout\(m_new.*)\)\n", r"\1\n", part)
    change(root / KERNEL, part, whole)


def no_statistics(root: Path) -> None:
    load = "    column = stats.slice(WHICH, 1, dim=1).load(thread)\n"
    nothing = "    column = gl.zeros([N, 1], gl.float32, thread)\n"
    change(root / "backward" / "hopper.py.jinja", load, nothing)


EDITS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (tree, order, late, registers, turns, own, owns, pairs, twins)
}
WITHOUT: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (no_exponentials, no_statistics)
}

"""Changes of templates that are tried against what ships (``variants.py``): each edits a copy of the folder templates/.

An edit that was measured moves into the templates or out of this file; what it gave is told in docs/performance.md.

    turns      forward, one segment without a guest: consumers ask for their products in turn
    borders    gradients, split: each border of a row is tested where it is, by comparisons with numbers, as forward

What a part costs is learnt by leaving it out; results are wrong then, so these are for ``--unchecked`` alone:

    no_exponentials   forward: weights are the scores
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

TILES, KERNEL = (Path("forward") / name for name in ("hopper_tiles.jinja", "hopper.py.jinja"))
PHASES, GRADIENTS = (Path("backward") / name for name in ("hopper_macros.jinja", "hopper.py.jinja"))


def change(path: Path, old: str, new: str, times: int = 1) -> None:
    """Replace ``old``, which the file must hold so many times: an edit made for other templates fails."""
    text = path.read_text()
    found = text.count(old)
    if found != times:
        raise ValueError(f"{path.name} holds {old!r} {found} times, not {times}")
    path.write_text(text.replace(old, new))


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


def borders(root: Path) -> None:
    # the functions of the forward kernel, for weights in place of scores
    text = (root / KERNEL).read_text()
    functions = text[
        text.index("@gluon.jit\ndef in_columns(") : text.index("@gluon.jit\ndef new_maximum(")
    ]
    functions = (
        re.sub(r"{%.*%}\n", "", functions).replace('float("-inf")', "0.0").replace("-inf", "0")
    )
    head = "@gluon.jit\ndef weighted("
    change(root / GRADIENTS, head, functions + head)
    ends = "{% if consumes and seg.body_lo %}\n"
    inside = "{{ gluon(limit.inside, at, names) }}"
    limits = f"{{% for limit in seg.loop.limits if limit.inside and consumes %}}\n{inside}\n{{% endfor %}}\n"
    change(root / PHASES, ends, limits + ends)
    tests = """{% if seg.loop.limits %}
{% for limit in seg.loop.limits %}
{% set hides = "up_to" if limit.name == "row_hi" else "from_on" %}
{% set hidden = gluon("p = " ~ hides ~ "(p, " ~ limit.name ~ " - (" ~ limit.first ~ "))", at, names) %}
{% if limit.where %}
if TEST_ALL:
    {{ hidden }}
elif {{ gluon(limit.where) }}:
    {{ hidden }}
{% else %}
{{ hidden }}
{% endif %}
{% endfor %}
{% elif seg.loop.edge %}
if TEST_ALL:
    {{ masked }}
"""
    edge = "{% if seg.loop.edge %}\nif TEST_ALL:\n    {{ masked }}\n"
    change(root / PHASES, edge, tests)


def no_exponentials(root: Path) -> None:
    text = (root / KERNEL).read_text()
    at = text.index("def softmax_weights(")
    end = text.index("@gluon.jit", at)
    part = text[at:end]
    whole = re.sub(r"gl\.exp2\((s \* scale - gl\.convert_layout\(m, .*)\)\n", r"\1\n", part)
    change(root / KERNEL, part, whole)


EDITS: dict[str, Callable[[Path], None]] = {"turns": turns, "borders": borders}
WITHOUT: dict[str, Callable[[Path], None]] = {"no_exponentials": no_exponentials}

"""The operations that a protocol of barriers is made of, found in a kernel's text by its lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

OPERATION = re.compile(
    r"(mbarrier\.(wait|arrive|expect)\((\w+)|fence_async_shared\(|load_box\((\w+)|.* = warpgroup_mma_wait\()"
)


@dataclass(frozen=True)
class Operation:
    """A line of the text that the protocol is made of."""

    line: int
    name: str  # function, operation, barrier, and which of several such

    def __str__(self) -> str:
        return self.name


def operations_of(lines: Sequence[str]) -> list[Operation]:
    """The operations of a text, by its lines."""
    out: list[Operation] = []
    function = ""
    for i, line in enumerate(lines):
        if found := re.match(r"def (\w+)\(", line):
            function = found[1]
        elif found := OPERATION.match(line.strip()):
            what = found[2] or re.sub(r".* = |\(.*", "", line.strip())
            name = "-".join(filter(None, [function, what, found[3] or found[4]]))
            same = sum(o.name.startswith(name) for o in out)
            out.append(Operation(i, f"{name}-{same}"))
    return out

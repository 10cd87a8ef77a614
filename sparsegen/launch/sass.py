"""A look at the machine code: does the assembler's output read a uniform register that nothing ever set?

ptxas 12.8, which Triton 3.6 brings, does that to the address of a tensor-core operand in some unpipelined loops
(value tiles of 32 columns; seen 2026-11-29, head_dim 96 on an H200).  The kernel then gives wrong values or stops at an
illegal address, and nothing else tells: the PTX is right.  Such a binary is refused.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_WRITERS = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")  # besides all whose name starts with U
_WIDTHS = {".64": 2, ".WIDE": 2, ".128": 4}


def unset_registers(listing: str) -> list[tuple[int, str]]:
    """(register, instruction) of every uniform register that is read before anything writes it, in listing order.

    Loops need no care: what a loop carries is set before the loop.  Descriptors ``gdesc[URn]`` are not looked at, since an
    operand from registers leaves half of one unset.
    """
    if "HGMMA" not in listing:
        return []  # the fault concerns Hopper's asynchronous matrix instructions
    set_already: set[int] = set()
    found = []
    for opcode, operands in _instructions(listing):
        first, *others = [part.strip() for part in operands.split(",")] or [""]
        writes = _written(opcode, first)
        reads = others if writes else [first, *others]
        for part in reads:
            if "gdesc[" in part:
                continue
            for number in map(int, _REGISTER.findall(part)):
                if number not in set_already:
                    found.append((number, f"{opcode} {operands}"))
        set_already |= writes
    return found


def listing_of(cubin: Path, tool: Path) -> str:
    """Machine code of a cubin as text; "" where the tool is missing or refuses."""
    if not tool.exists():
        return ""
    run = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""


def _instructions(listing: str) -> Iterator[tuple[str, str]]:
    for line in listing.splitlines():
        found = _LINE.match(line)
        if found:
            yield found[1], found[2]


def _written(opcode: str, first: str) -> set[int]:
    found = re.fullmatch(r"UR(\d+)", first)
    if not found or not (opcode.startswith("U") or opcode.split(".")[0] in _WRITERS):
        return set()
    width = next((w for suffix, w in _WIDTHS.items() if suffix in opcode), 1)
    return set(range(int(found[1]), int(found[1]) + width))

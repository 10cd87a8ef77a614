"""A look at the machine code: does the assembler's output read a uniform register that is not set on every way there?

ptxas 12.8, which Triton 3.6 brings, does that to the addresses of tensor-core operands: in some unpipelined loops nothing
sets them (value tiles of 32 columns; seen 2026-11-29, head_dim 96 on an H200), and where two loops use one
operand they can be set inside the first alone, which short inputs skip (seen 2026-11-30, sinks before a window).
The kernel then gives wrong values or stops at an illegal address, and nothing else tells: the PTX is right.  Such a
binary is refused.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.x]+)\s*(.*?)\s*;(.*)")
_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"\.L\w+")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_WRITERS = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")  # besides all whose name starts with U
_COPY = re.compile(r"UR(\d+), UR(\d+)")  # operands of UMOV
_WIDTHS = {".64": 2, ".WIDE": 2, ".128": 4}
_LEAVES = ("EXIT", "RET", "BRX", "JMP", "BRA")  # where control does not fall through
ALL = frozenset(range(64))


@dataclass
class _Block:
    """Instructions without a way in or out between them."""

    code: list[tuple[str, str]] = field(default_factory=list)  # opcode, operands
    after: list[str | int] = field(
        default_factory=list
    )  # blocks that may follow: labels, or numbers


def unset_registers(listing: str) -> list[tuple[int, str]]:
    """(register, instruction) of every uniform register that is read where some way leads to it without a write.

    Writes under a predicate count as writes: what they leave out is read under the same predicate.  A copy into another uniform
    register is no read: the other one is then as unset as this one.  ptxas 12.9 saves registers so that nothing has set
    yet, and sets them before it reads either (seen 2026-11-30 in producers).
    """
    if "HGMMA" not in listing:
        return []  # the fault concerns Hopper's asynchronous matrix instructions
    blocks, labels = _blocks(listing)
    set_before = _set_before(blocks, labels)
    found = []
    for block, before in zip(blocks, set_before):
        known = set(before)
        for opcode, operands in block.code:
            unset = _step(opcode, operands, known)
            found += [(n, f"{opcode} {operands}") for n in sorted(unset)]
    return found


def listing_of(cubin: Path, tool: Path) -> str:
    """Machine code of a cubin as text; "" where the tool is missing or refuses."""
    if not tool.exists():
        return ""
    run = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""


def _blocks(listing: str) -> tuple[list[_Block], dict[str, int]]:
    """The blocks in listing order, and which one a label starts."""
    blocks, labels = [_Block()], {}
    falls = True
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1].code:
                if falls:
                    blocks[-1].after.append(len(blocks))
                blocks.append(_Block())
            labels[label[1]] = len(blocks) - 1
            falls = True
        elif found := _LINE.match(line):
            predicate, opcode, operands, comment = found.groups()
            if not falls:  # code behind a jump, without a label: nothing leads there
                blocks.append(_Block())
            blocks[-1].code.append((opcode, operands))
            falls = True
            name = opcode.split(".")[0]
            if name in _LEAVES:
                blocks[-1].after += _TARGET.findall(operands + comment)
                conditional = predicate is not None or operands.startswith(("P", "!P", "U"))
                if conditional:
                    blocks[-1].after.append(len(blocks))
                    blocks.append(_Block())
                falls = conditional
    return blocks, labels


def _set_before(blocks: list[_Block], labels: dict[str, int]) -> list[frozenset[int]]:
    """Registers that are set on every way to a block; all of them for one that no way leads to."""
    before = [ALL] * len(blocks)
    before[0] = frozenset()
    todo = list(range(len(blocks)))
    while todo:
        i = todo.pop(0)
        known = set(before[i])
        for opcode, operands in blocks[i].code:
            _step(opcode, operands, known)
        for target in blocks[i].after:
            j = labels.get(target) if isinstance(target, str) else target
            if j is not None and j < len(blocks) and not before[j] <= known:
                before[j] &= known
                todo.append(j)
    return before


def _step(opcode: str, operands: str, known: set[int]) -> set[int]:
    """Makes of the registers that are set before an instruction those set behind it; what it reads that is not set."""
    reads, writes = _reads_and_writes(opcode, operands)
    copied = _COPY.fullmatch(operands) if opcode.split(".")[0] == "UMOV" else None
    if copied is not None:
        to, of = int(copied[1]), int(copied[2])
        set_now = {n for n in writes if of + n - to in known}
        known -= writes
        known |= set_now
        return set()
    unset = reads - known
    known |= writes
    return unset


def _reads_and_writes(opcode: str, operands: str) -> tuple[set[int], set[int]]:
    first, *others = [part.strip() for part in operands.split(",")] or [""]
    writes = _written(opcode, first)
    return _read(others if writes else [first, *others]), writes


def _read(parts: Iterable[str]) -> set[int]:
    out: set[int] = set()
    for place, part in enumerate(parts):
        numbers = [int(n) for n in _REGISTER.findall(part)]
        if part.startswith("gdesc[") and numbers:
            # both operands in shared memory, or the second alone: then the first half says nothing
            half = 0 if place == 1 else 2
            numbers = list(range(numbers[0] + half, numbers[0] + 4))
        out.update(numbers)
    return out


def _written(opcode: str, first: str) -> set[int]:
    found = re.fullmatch(r"UR(\d+)", first)
    if not found or not (opcode.startswith("U") or opcode.split(".")[0] in _WRITERS):
        return set()
    width = next((w for suffix, w in _WIDTHS.items() if suffix in opcode), 1)
    return set(range(int(found[1]), int(found[1]) + width))

"""The look at the machine code finds a uniform register that some way reads and did not set, and nothing else."""

from __future__ import annotations

import pytest

from sparsegen.launch.sass import unset_registers

GOOD = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   UIMAD.WIDE.U32 UR8, UR4, UR5, URZ ;
        /*0020*/              @!P0 UIADD3 UR42, UP0, UR9, 0x40, URZ ;
        /*0030*/                   UMOV UR43, 0x40000040 ;
        /*0040*/                   R2UR UR6, R5 ;
        /*0050*/                   LDS.128 R16, [UR6+0x10040] ;
        /*0060*/                   HGMMA.64x32x16.F32.BF16 R88, R24, gdesc[UR40].tnspB, R88 ;
"""


def test_nothing_to_find() -> None:
    assert unset_registers(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "register"),
    [
        # as ptxas 12.8 wrote it: the register is its own source
        ("UIADD3 UR42, UP0, UR9, 0x40, URZ", "UIADD3 UR42, UP0, UR42, 0x40, URZ", 42),
        ("ULDC.64 UR4", "ULDC UR4", 5),
        ("UIMAD.WIDE.U32 UR8", "UIMAD UR8", 9),
        ("[UR6+0x10040]", "[UR7+0x10040]", 7),
        ("UMOV UR43", "UMOV UR44", 43),
    ],
)
def test_a_register_that_is_never_set(old: str, new: str, register: int) -> None:
    assert old in GOOD
    (found,) = unset_registers(GOOD.replace(old, new))
    assert found[0] == register


def test_other_code_is_left_alone() -> None:
    assert unset_registers(GOOD.replace("HGMMA", "HMMA").replace("UR9, 0x40", "UR50, 0x40")) == []


# ---------------------------------------------------------------------- operands in shared memory
def listing(*lines: str) -> str:
    """Instructions, and labels that end in a colon, as nvdisasm prints them."""
    out, address = [], 0
    for line in lines:
        if line.endswith(":"):
            out.append(line)
            continue
        predicate, code = line.split(" ", 1) if line.startswith("@") else ("", line)
        out.append(f"        /*{address:04x}*/ {predicate:>18} {code} ;")
        address += 16
    return "\n".join(out) + "\n"


def setting(*registers: int) -> list[str]:
    return [f"UMOV UR{n}, 0x40" for n in registers]


PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"  # both operands in shared memory
WEIGHTED = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24"  # the second alone


@pytest.mark.parametrize(
    ("product", "needed"), [(PRODUCT, (8, 9, 10, 11)), (WEIGHTED, (10, 11))], ids=["both", "second"]
)
def test_halves_of_a_descriptor(product: str, needed: tuple[int, ...]) -> None:
    """Two registers an operand: those of the first say nothing where it is in registers."""
    assert unset_registers(listing(*setting(*needed), product)) == []
    for missing in needed:
        rest = setting(*(n for n in needed if n != missing))
        assert [n for n, _ in unset_registers(listing(*rest, product))] == [missing]


# ---------------------------------------------------------------------- ways through the code
ALL_SET = setting(8, 9, 10, 11)


def found_in(*lines: str) -> list[int]:
    return [n for n, _ in unset_registers(listing(*lines, "EXIT"))]


def test_a_branch_that_skips_the_write() -> None:
    """As ptxas 12.8 wrote it for two loops on one operand: the address is set inside the first, which may be empty."""
    skipped = ["@P0 BRA `(.L_x_1)", *ALL_SET, PRODUCT, ".L_x_1:", PRODUCT]
    assert found_in(*skipped) == [8, 9, 10, 11]
    assert found_in(*ALL_SET, *skipped) == []
    again = ["@P0 BRA `(.L_x_1)", *ALL_SET, PRODUCT, ".L_x_1:", *ALL_SET, PRODUCT]
    assert found_in(*again) == []


def test_both_sides_of_a_branch_set_it() -> None:
    sides = ["@!P1 BRA `(.L_x_1)", *ALL_SET, "BRA `(.L_x_2)", ".L_x_1:", *setting(8, 9, 10)]
    assert found_in(*sides, "UMOV UR11, 0x1", ".L_x_2:", PRODUCT) == []
    assert found_in(*sides, ".L_x_2:", PRODUCT) == [11]


@pytest.mark.parametrize("jump", ["@P0 BRA `(.L_x_1)", "BRA.U UP0, `(.L_x_1)", "BRA P1, `(.L_x_1)"])
def test_forms_of_a_conditional_branch(jump: str) -> None:
    assert found_in(jump, *ALL_SET, ".L_x_1:", PRODUCT) == [8, 9, 10, 11]


def test_a_branch_that_is_always_taken() -> None:
    """What it jumps over is no way at all, and neither is what no way leads to."""
    assert found_in(*ALL_SET, "BRA `(.L_x_1)", PRODUCT.replace("UR8", "UR20"), ".L_x_1:", PRODUCT) == []  # fmt: skip
    assert found_in("BRA `(.L_x_1)", *ALL_SET, ".L_x_1:", PRODUCT) == [8, 9, 10, 11]


def test_loops() -> None:
    """The first pass sees what was before the loop alone; what a pass sets is there after it."""
    body = [".L_x_1:", PRODUCT, *ALL_SET, "@P0 BRA `(.L_x_1)"]
    assert found_in(*body) == [8, 9, 10, 11]
    assert found_in(*ALL_SET, *body) == []
    assert found_in(".L_x_1:", *ALL_SET, "@P0 BRA `(.L_x_1)", PRODUCT) == []
    late = [".L_x_1:", "@P1 BRA `(.L_x_2)", *ALL_SET, ".L_x_2:", "@P0 BRA `(.L_x_1)", PRODUCT]
    assert found_in(*late) == [8, 9, 10, 11]


def test_a_write_under_a_predicate_counts() -> None:
    """What it leaves out is read under the same predicate; a branch is not taken for one."""
    assert found_in("@P0 UMOV UR8, 0x1", "@!UP1 UMOV UR9, 0x1", *setting(10, 11), PRODUCT) == []


def test_a_copy_is_no_read() -> None:
    """ptxas 12.9 saves what nothing has set yet, and sets it before it reads either."""
    saved = ["UMOV UR20, UR8", *setting(8, 9, 10, 11), PRODUCT]
    assert found_in(*saved) == []
    assert found_in(*saved, "UMOV UR21, UR20", "UMOV UR20, 0x1", "UIADD3 UR4, UR20, 0x1, URZ") == []
    # the copy is as unset as what it was copied from, through a second one and over a value as well
    assert found_in(*saved, "UMOV UR21, UR20", "UIADD3 UR4, UR21, 0x1, URZ") == [21]
    assert found_in(*setting(8, 9, 10, 11), "UMOV UR8, UR30", PRODUCT) == [8]
    assert found_in(*setting(8, 9, 10, 11), "@P0 UMOV UR8, UR30", PRODUCT) == [8]
    # and as set
    assert found_in(*setting(9, 10, 11, 30), "UMOV UR8, UR30", PRODUCT) == []


def test_an_indirect_branch_goes_to_all_its_targets() -> None:
    """They stand in a remark behind the instruction."""
    table = 'BRX R2 -0x30 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)'
    first = [".L_x_1:", *ALL_SET, "BRA `(.L_x_3)"]
    assert found_in(table, *first, ".L_x_2:", *ALL_SET, ".L_x_3:", PRODUCT) == []
    assert found_in(table, *first, ".L_x_2:", *setting(8, 9), ".L_x_3:", PRODUCT) == [10, 11]
    assert found_in(*setting(8, 9), table, *first, ".L_x_2:", *setting(10), ".L_x_3:", PRODUCT) == [11]  # fmt: skip


def test_ways_that_end() -> None:
    ended = ["@P0 BRA `(.L_x_1)", "EXIT", ".L_x_1:", *ALL_SET, PRODUCT]
    assert found_in(*ended) == []
    assert found_in("@P0 EXIT", *ALL_SET, PRODUCT) == []


def test_the_instruction_is_said() -> None:
    ((register, said),) = unset_registers(listing(*setting(8, 9, 10), PRODUCT))
    assert register == 11 and said.startswith("HGMMA") and said.endswith("gdesc[UR8], R24")

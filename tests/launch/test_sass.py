"""The look at the machine code finds a uniform register that is read and never set, and nothing else."""

from __future__ import annotations

import pytest

from sparsegen.launch.sass import unset_registers

GOOD = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   UIMAD.WIDE.U32 UR8, UR4, UR5, URZ ;
        /*0020*/              @!P0 UIADD3 UR42, UP0, UR9, 0x40, URZ ;
        /*0030*/                   R2UR UR6, R5 ;
        /*0040*/                   LDS.128 R16, [UR6+0x10040] ;
        /*0050*/                   HGMMA.64x32x16.F32.BF16 R88, R24, gdesc[UR40].tnspB, R88 ;
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
    ],
)
def test_a_register_that_is_never_set(old: str, new: str, register: int) -> None:
    assert old in GOOD
    (found,) = unset_registers(GOOD.replace(old, new))
    assert found[0] == register


def test_other_code_is_left_alone() -> None:
    assert unset_registers(GOOD.replace("HGMMA", "HMMA").replace("UR9, 0x40", "UR50, 0x40")) == []

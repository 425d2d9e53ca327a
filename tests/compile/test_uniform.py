"""No instruction of flash_decoding's machine code for sm_90 reads a uniform register that has no value. No GPU."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.compile.conftest import answer
from tests.compile.uniform import unset

QUESTIONS = (("uniform.py",), ("uniform.py", "16"))

# a descriptor of an operand in UR8 and UR9, whose upper half is made on one of two ways only
PROGRAM = """
        /*0000*/                   UMOV UR8, 0x10 ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   {upper} ;
.L_x_1:
        /*0030*/                   QGMMA.64x32x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT ;
        /*0040*/                   EXIT ;
"""


def test_every_address_of_an_operand_is_made() -> None:
    found: dict[str, list[str]] = answer("uniform.py")
    assert len(found) == 7 and not any(found.values()), found


def test_products_of_32_columns_in_pairs_are_what_it_finds() -> None:
    """The fault for which the kernel does not make them: of every case one H200 got wrong results (2026-11-25)."""
    if version("triton") != "3.6.0":
        pytest.skip("the fault is of ptxas 12.8, which triton 3.6.0 brings")
    found: dict[str, list[str]] = answer("uniform.py", "16")
    assert len(found) == 4 and all(found.values()), found


def test_a_register_is_followed_on_every_way() -> None:
    product = "QGMMA.64x32x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT"
    before = "        /*0000*/                   {0} ;\n"
    written = "".join(before.format(f"UMOV UR{number}, 0x20") for number in (9, 10, 11))
    assert unset(written + PROGRAM.format(upper="NOP")) == []
    assert unset(PROGRAM.format(upper="UMOV UR9, 0x20")) == [product]
    # an address in place, of 0 and of something else
    in_place = "UIADD3.X UR9, UR9, 0x40000040, URZ, UP0, !UPT"
    assert unset(written + PROGRAM.format(upper=in_place)) == [in_place]
    assert unset(written + before.format("UMOV UR9, URZ") + PROGRAM.format(upper=in_place)) == []
    conditional = before.format("@P1 UMOV UR9, URZ").replace(" " * 19 + "@P1", " " * 14 + "@P1 ")
    assert unset(written + conditional + PROGRAM.format(upper=in_place)) == [in_place]

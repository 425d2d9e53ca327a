"""Reading listings: hand-written ones, where every number can be counted by eye."""

from __future__ import annotations

import pytest

from wavecrest.isa.assembly import AMD, NVIDIA, Access, Line, count, hot_loop, loops

# an outer loop (0, 1, 3 and 4, placed out of order) around the loop of block 2, then a loop with a matrix instruction
LISTING = """
	.text
kernel:                                 ; @kernel
; %bb.0:
	s_load_dwordx4 s[0:3], s[0:1], 0x0 ; not a vector load
	s_branch .LBB0_1
.LBB0_4:                                ;   in Loop: Header=BB0_1 Depth=1
	.loc	1 98 24
	global_store_dwordx4 v[0:1], v[2:5], off
	s_cbranch_scc1 .LBB0_5
.LBB0_1:                                ; =>This Loop Header: Depth=1
	v_mov_b32_e32 v1, 0
.LBB0_2:                                ; =>This Inner Loop Header: Depth=2
	buffer_load_dwordx4 v[4:7], v1, s[0:3], 0 offen
	buffer_load_ushort v8, v1, s[0:3], 0 offen
	s_waitcnt vmcnt(1)
	v_add_f32_e32 v2, v4, v5
	s_waitcnt vmcnt(0) lgkmcnt(0)
	s_waitcnt lgkmcnt(0)
	s_barrier
	s_cbranch_vccz .LBB0_2
; %bb.3:
	s_branch .LBB0_4
.LBB0_5:
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	s_cbranch_scc0 .LBB0_5
; %bb.6:
	s_endpgm
.Lfunc_end0:
	.size	kernel, .Lfunc_end0-kernel
	.section	.AMDGPU.csdata
; codeLenInByte = 100
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     16
    .args:
      - .offset:         0
...
"""

SASS = """
	.section	.text.kernel,"ax",@progbits
        .size           kernel,(.L_x_4 - kernel)
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HFMA2.MMA R39, -RZ, RZ, 0, 0 ;
        /*0020*/              @!P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   LDG.E.128.CONSTANT R4, desc[UR8][R4.64+0x4000] ;
        /*0040*/                   LDG.E.64 R4, desc[UR8][R4.64] ;
        /*0050*/              @P2  LDG.E R4, desc[UR8][R4.64] ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0090*/                   STG.E.U16 desc[UR8][R20.64], R4 ;
        /*00a0*/                   STL [R1], R4 ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
        /*00d0*/                   NOP;
.L_x_4:
"""


def _labels(loop: list[Line]) -> list[str]:
    return [line.label for line in loop if line.label]


def test_innermost_loops_wherever_their_blocks_stand() -> None:
    found = loops(AMD.parse(LISTING))
    assert [_labels(loop) for loop in found] == [[".LBB0_2"], [".LBB0_5"]]
    assert found[0][-1].opcode == "s_cbranch_vccz"


def test_a_wait_inside_a_loop_is_no_loop_of_its_own() -> None:
    wait = """.L_x_8:
        /*0058*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R2 ;
        /*005c*/              @!P1 BRA `(.L_x_8) ;
"""
    lines = SASS.split("        /*0060*/")
    (loop,) = loops(NVIDIA.parse(lines[0] + wait + "        /*0060*/" + lines[1]))
    assert count(loop, NVIDIA).matrix == {"HGMMA.64x128x16.F32.BF16": 1} and _labels(loop) == [".L_x_1", ".L_x_8"]
    assert loops(NVIDIA.parse("        /*0000*/                   NOP ;\n" + wait)) == []


def test_counts_of_a_loop() -> None:
    inner, matrix = (count(loop, AMD) for loop in loops(AMD.parse(LISTING)))
    assert inner.instructions == 7
    assert inner.loads == {16: 1, 2: 1} and inner.stores == {}
    assert (inner.waits, inner.drains, inner.barriers, inner.matrix) == (3, 1, 1, {})
    assert matrix.matrix == {"v_mfma_f32_32x32x8_bf16_1k": 1} and matrix.instructions == 1


def test_counts_of_a_kernel() -> None:
    whole = count(AMD.parse(LISTING), AMD)
    # scalar loads are not vector loads; metadata and directives are not instructions
    assert whole.loads == {16: 1, 2: 1} and whole.stores == {16: 1}
    assert whole.instructions == 12


def test_a_matrix_instruction_outweighs_many_others() -> None:
    assert _labels(hot_loop(AMD.parse(LISTING), AMD)) == [".LBB0_5"]
    without = LISTING.replace("v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]", "v_nop")
    assert _labels(hot_loop(AMD.parse(without), AMD)) == [".LBB0_2"]


def test_no_loop() -> None:
    lines = AMD.parse("kernel:\n\ts_nop 0\n\ts_cbranch_scc0 .LBB0_1\n\tv_nop\n.LBB0_1:\n\ts_endpgm\n")
    assert loops(lines) == [] and hot_loop(lines, AMD) == [] and count(lines, AMD).instructions == 3
    assert loops([]) == []


def test_one_loop_with_two_ways_back() -> None:
    text = """
	s_nop 0
.LBB0_1:
	v_add_u32_e32 v0, v1, v2
	s_cbranch_scc0 .LBB0_1
	v_mul_lo_u32 v0, v1, v2
	s_cbranch_scc1 .LBB0_1
	s_endpgm
"""
    (loop,) = loops(AMD.parse(text))
    assert count(loop, AMD).instructions == 2


def test_a_block_that_nothing_reaches_is_in_no_loop() -> None:
    text = "\ts_endpgm\n.LBB0_1:\n\tv_nop\n.LBB0_2:\n\tv_nop\n\ts_cbranch_scc0 .LBB0_2\n\ts_branch .LBB0_1\n"
    assert loops(AMD.parse(text)) == []


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        ("global_load_dwordx4", ("load", 16)),
        ("buffer_load_dwordx3", ("load", 12)),
        ("buffer_load_b64", ("load", 8)),
        ("global_load_b96", ("load", 12)),
        ("flat_load_dword", ("load", 4)),
        ("global_load_u16", ("load", 2)),
        ("buffer_load_d16_hi_b16", ("load", 2)),
        ("global_load_short_d16_hi", ("load", 2)),
        ("buffer_load_ubyte", ("load", 1)),
        ("buffer_load_i8", ("load", 1)),
        ("global_load_lds_dwordx4", ("load", 16)),
        ("global_store_b128", ("store", 16)),
        ("buffer_store_dwordx2", ("store", 8)),
        ("buffer_store_byte", ("store", 1)),
        ("global_store_d16_hi_b8", ("store", 1)),
        ("global_load_block", ("load", 0)),
        ("s_load_dwordx4", None),
        ("ds_read_b128", None),
        ("global_atomic_add_f32", None),
        ("buffer_gl0_inv", None),
        ("scratch_load_dword", None),
    ],
)
def test_widths(opcode: str, access: tuple[str, int] | None) -> None:
    assert AMD.access(Line(opcode, opcode)) == (None if access is None else Access(*access))  # type: ignore[arg-type]


def test_a_spill_is_no_global_access() -> None:
    text = """
	buffer_store_dword v1, off, s[48:51], 0 offset:4 ; 4-byte Folded Spill
	buffer_load_dword v1, off, s[48:51], 0 offset:4 ; 4-byte Folded Reload
	buffer_load_dword v1, off, s[4:7], 0
"""
    found = count(AMD.parse(text), AMD)
    assert (found.instructions, found.loads, found.stores, found.scratch) == (3, {4: 1}, {}, 2)


def test_scratch_memory() -> None:
    text = """
	scratch_store_dwordx4 off, v[1:4], off offset:16 ; 16-byte Folded Spill
	scratch_load_dword v1, off, off offset:16
	v_writelane_b32 v40, s30, 0 ; 4-byte Folded Spill
	global_store_dword v[0:1], v2, off
"""
    assert count(AMD.parse(text), AMD).scratch == 2
    assert count(NVIDIA.parse(SASS.replace("HGMMA.64x128x16.F32.BF16", "LDL.LU")), NVIDIA).scratch == 2


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        ("ds_read_b128", ("load", 16)),
        ("ds_read2_b64", ("load", 16)),
        ("ds_read2st64_b32", ("load", 8)),
        ("ds_read_u16_d16_hi", ("load", 2)),
        ("ds_read_b64_tr_b16", ("load", 8)),
        ("ds_load_b96", ("load", 12)),
        ("ds_load_2addr_stride64_b64", ("load", 16)),
        ("ds_write_b8", ("store", 1)),
        ("ds_write_b16_d16_hi", ("store", 2)),
        ("ds_write2st64_b64", ("store", 16)),
        ("ds_store_2addr_b32", ("store", 8)),
        ("ds_bpermute_b32", None),
        ("ds_swizzle_b32", None),
        ("ds_add_f32", None),
        ("global_load_lds_dwordx4", None),
    ],
)
def test_widths_of_lds(opcode: str, access: tuple[str, int] | None) -> None:
    assert AMD.local(Line(opcode, opcode)) == (None if access is None else Access(*access))  # type: ignore[arg-type]
    found = count([Line(opcode, opcode)], AMD)
    assert sum(found.lds_loads.values()) + sum(found.lds_stores.values()) == (access is not None)


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        ("LDS.128", ("load", 16)),
        ("LDS.U.64", ("load", 8)),
        ("LDS", ("load", 4)),
        ("STS.U16", ("store", 2)),
        ("LDSM.16.M88.4", ("load", 16)),
        ("LDSM.16.MT88.2", ("load", 8)),
        ("STSM.16.M88", ("store", 4)),
        ("LDG.E.128", None),
    ],
)
def test_widths_of_shared_memory(opcode: str, access: tuple[str, int] | None) -> None:
    assert NVIDIA.local(Line(opcode, opcode)) == (None if access is None else Access(*access))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "waits", "drains"),
    [
        ("s_waitcnt vmcnt(0)", 1, 1),
        ("s_waitcnt vmcnt(10)", 1, 0),
        ("s_waitcnt lgkmcnt(0)", 1, 0),
        ("s_waitcnt vmcnt(0) lgkmcnt(3)", 1, 1),
        ("s_wait_loadcnt 0x0", 1, 1),
        ("s_wait_loadcnt 0x5", 1, 0),
        ("s_wait_loadcnt_dscnt 0x0", 1, 1),
        ("s_wait_kmcnt 0x0", 1, 0),
        ("s_wait_alu 0xfffe", 0, 0),
        ("s_waitcnt_depctr 0xfff", 0, 0),
        ("s_nop 0", 0, 0),
    ],
)
def test_waits(text: str, waits: int, drains: int) -> None:
    found = count(AMD.parse(f"\t{text}\n"), AMD)
    assert (found.instructions, found.waits, found.drains) == (1, waits, drains)


@pytest.mark.parametrize(
    ("opcode", "matrix"),
    [
        ("v_mfma_f32_16x16x32_fp8_fp8", True),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", True),
        ("v_smfmac_f32_16x16x32_bf16", True),
        ("v_wmma_f32_16x16x16_bf16", True),
        ("v_swmmac_f32_16x16x32_bf16", True),
        ("v_fma_f32", False),
        ("v_pk_fma_f32", False),
        ("s_mul_i32", False),
    ],
)
def test_matrix_instructions(opcode: str, matrix: bool) -> None:
    assert bool(count([Line(opcode, opcode)], AMD).matrix) is matrix


def test_sass() -> None:
    lines = NVIDIA.parse(SASS)
    whole, hot = count(lines, NVIDIA), count(hot_loop(lines, NVIDIA), NVIDIA)
    # HFMA2.MMA is no matrix instruction; the jump to itself behind EXIT is no loop; padding does not count
    assert len(loops(lines)) == 1
    assert whole.instructions == 10 and hot.instructions == 5
    assert hot.loads == {16: 1, 8: 1, 4: 1} and whole.stores == {2: 1}
    assert hot.matrix == {"HGMMA.64x128x16.F32.BF16": 1} and hot.barriers == 1
    assert whole.matrix == hot.matrix and whole.waits is None and whole.drains is None

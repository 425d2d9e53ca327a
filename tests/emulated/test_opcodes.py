"""Opcodes of the emulator beside a second source: their meaning by their names, in exact arithmetic (meanings.py)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="its LLVM assembles the opcodes")

Child = Callable[..., "subprocess.CompletedProcess[str]"]

# opcodes whose names say nothing that could be compared, and why
UNNAMED = {
    # the parts of a division, which is compared as a whole; what the float16 one is for, LLVM does in another way
    *("v_div_scale_f32", "v_div_scale_f64", "v_div_fmas_f32_e64", "v_div_fmas_f64_e64", "v_div_fixup_f32_e64"),
    *("v_div_fixup_f64_e64", "v_div_fixup_f16", "v_div_fixup_legacy_f16_e64"),
    # faces of a cube map, which no kernel here has, and random numbers
    *("v_cubeid_f32_e64", "v_cubema_f32_e64", "v_cubesc_f32_e64", "v_cubetc_f32_e64"),
    *("v_prng_b32_e32", "v_prng_b32_e64"),
    # two results
    *("v_swap_b32_e32", "v_swap_b32_e64"),
    # the program counter: loops and branches of whole kernels
    *("s_branch", "s_call_b64", "s_cbranch_execnz", "s_cbranch_execz", "s_cbranch_scc0", "s_cbranch_scc1"),
    *("s_cbranch_vccnz", "s_cbranch_vccz"),
    # registers by number and skipped instructions, which LLVM never makes
    *("s_set_gpr_idx_idx", "s_set_gpr_idx_mode", "s_setvskip"),
}


def compared(run_child: Child, *arguments: str) -> Any:
    done = run_child("tests.emulated.opcodes", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_opcode_does_what_its_name_means(run_child: Child) -> None:
    found = compared(run_child, "gfx950")
    assert found["differ"] == {}
    # gfx950 has every one of the tables
    assert set(found["unnamed"]) == UNNAMED and found["not on it"] == []
    # an opcode that the emulator no longer understands is not compared either
    assert len(found["compared"]) == 1256


@pytest.mark.every_emulated
@pytest.mark.parametrize(("arch", "count"), [("gfx90a", 1220), ("gfx942", 1239)])
def test_so_do_those_of_older_architectures(run_child: Child, arch: str, count: int) -> None:
    found = compared(run_child, arch)
    assert found["differ"] == {} and len(found["compared"]) == count

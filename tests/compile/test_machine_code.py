"""Kernels with what row kernels lack, compiled and read: matrix instructions, LDS, spills, dtypes, nested loops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compile.conftest import ARCHS, KERNELS, compile_rows
from wavecrest.isa import mca
from wavecrest.isa.facts import KernelFacts, Row

AMD = [arch for arch in ARCHS if arch.startswith("gfx")]
Examples = dict[tuple[str, str], Row]


def _facts(examples: Examples, case: str, arch: str) -> KernelFacts:
    row = examples[case, arch]
    assert row.facts is not None, row.reason
    return row.facts


@pytest.mark.parametrize("arch", AMD)
def test_occupancy_is_what_llvm_says(examples: Examples, arch: str) -> None:
    found = [row.facts for (_, where), row in examples.items() if where == arch]
    assert len(found) == 15
    for facts in found:
        assert facts is not None and facts.register_waves == facts.llvm_waves


@pytest.mark.parametrize(
    ("arch", "opcode"),
    [
        ("gfx90a", "v_mfma_f32_32x32x8bf16_1k"),
        ("gfx942", "v_mfma_f32_32x32x8_bf16"),
        ("gfx950", "v_mfma_f32_32x32x16_bf16"),
        ("gfx1100", "v_wmma_f32_16x16x16_bf16"),
        ("gfx1201", "v_wmma_f32_16x16x16_bf16"),
        ("sm_90", "HGMMA.64x128x16.F32.BF16"),
    ],
)
def test_the_matrix_unit_has_the_work_of_the_tile(examples: Examples, arch: str, opcode: str) -> None:
    facts = _facts(examples, "large", arch)
    assert facts.hot is not None and set(facts.hot.matrix) == {opcode}
    # multiplications of a 128x128x64 tile over those of one instruction, shared by the waves (a group of 4 on NVIDIA)
    size = re.search(r"(\d+)x(\d+)x(\d+)", opcode)
    assert size is not None
    one = int(size[1]) * int(size[2]) * int(size[3])
    waves = 2 if arch == "sm_90" else 8
    assert facts.hot.matrix[opcode] == 128 * 128 * 64 // one // waves
    assert 0 < facts.hot.matrix_share < 1 and facts.kernel.matrix_count >= facts.hot.matrix_count


@pytest.mark.parametrize("arch", AMD)
def test_a_tile_lies_in_local_memory(examples: Examples, arch: str) -> None:
    facts = _facts(examples, "large", arch)
    # both operands of one step, in bfloat16
    assert facts.lds == 2 * 128 * 64 * 2
    assert facts.hot is not None and facts.hot.barriers > 0 and facts.hot.waits is not None
    assert facts.hot.waits > 0 and 0 < (facts.hot.drains or 0) <= facts.hot.waits
    assert facts.hot.loads == {16: 4 if arch.startswith("gfx9") else 8}
    # a wave writes an eighth of the tile into LDS, and reads at least what its matrix instructions multiply
    lanes = 64 if arch.startswith("gfx9") else 32
    stored, read = (
        lanes * sum(width * number for width, number in (accesses or {}).items())
        for accesses in (facts.hot.lds_stores, facts.hot.lds_loads)
    )
    assert stored == facts.lds // 8 and read >= facts.lds // 4


def test_spills_and_scratch_are_seen(examples: Examples) -> None:
    """The same tile with half the waves: too many registers for gfx1100 and for no other architecture."""
    for arch in AMD:
        facts = _facts(examples, "spilling", arch)
        assert (facts.spills > 0) == (facts.scratch > 0) == (arch == "gfx1100"), arch
        assert (facts.kernel.scratch or 0) >= (facts.loop_scratch or 0)
        assert (facts.kernel.scratch != 0) == (facts.loop_scratch != 0) == (arch == "gfx1100"), arch
    assert _facts(examples, "spilling", "gfx1100").vgpr == 256


def test_accumulation_registers_count_for_occupancy(examples: Examples) -> None:
    facts = _facts(examples, "spilling", "gfx942")
    total = facts.vgpr + (facts.agpr or 0)
    assert facts.register_waves == 512 // (-(-total // 8) * 8)
    assert _facts(examples, "spilling", "gfx1100").agpr is None


def test_every_dtype_is_a_pointer_type(examples: Examples) -> None:
    names = {case for case, _ in examples}
    assert {"int8", "uint8", "int64", "float64", "float8_e4m3fn", "float8_e5m2fnuz"} <= names
    for (case, arch), row in examples.items():
        if case.endswith("fnuz") and arch == "sm_90":
            assert row.facts is None and "fp8" in row.reason and "not supported" in row.reason, row.reason
        else:
            assert row.facts is not None, row.reason


@pytest.mark.parametrize("arch", ARCHS)
def test_the_inner_of_two_loops_is_the_hot_one(examples: Examples, arch: str) -> None:
    for case in ("int8", "float16", "float32", "float64"):
        facts = _facts(examples, case, arch)
        assert facts.loops == 1 and facts.hot is not None
        # the inner loop loads, the outer one stores
        assert set(facts.hot.loads) == {16} and facts.hot.stores == {} and set(facts.kernel.stores) == {16}
        width = {"int8": 1, "float16": 2, "float32": 4, "float64": 8}[case]
        threads = 64 if arch.startswith("gfx9") else 32
        assert facts.hot.loads[16] == 1024 * width // threads // 16
        assert facts.hot.code[0].startswith("."), "the code begins with the loop's label"
        assert sum(line.startswith("    ") for line in facts.hot.code) >= facts.hot.instructions


@pytest.mark.parametrize("arch", AMD)
def test_code_size(examples: Examples, arch: str) -> None:
    facts = _facts(examples, "float32", arch)
    # an instruction has 4 to 12 bytes
    assert 4 * facts.kernel.instructions <= facts.code_bytes <= 12 * facts.kernel.instructions + 64


def test_a_kernel_that_takes_the_compiler_down_is_a_reason() -> None:
    rows = compile_rows([f"{KERNELS}:crashing"], ("gfx942",))
    assert [row.case for row in rows] == ["before", "fatal", "after"]
    assert [row.reason for row in rows] == ["", "the compiler crashed", ""]
    assert rows[0].facts is not None and rows[2].facts is not None


def test_model_of_a_matrix_loop(examples: Examples) -> None:
    facts = _facts(examples, "large", "gfx942")
    assert facts.hot is not None and facts.mca is None and facts.mca_reason == ""
    try:
        tool = mca.find()
    except mca.MissingDependency as error:
        pytest.skip(str(error))
    from wavecrest.isa.assembly import AMD as SYNTAX

    found = mca.estimate(tool, "gfx942", SYNTAX.parse("\n".join(facts.hot.code)))
    if isinstance(found, str):
        # versions before 22 abort on buffer instructions
        assert "crashed" in found
        pytest.skip(found)
    # 16 instructions of 8 passes
    assert found.matrix_cycles == 128 and found.cycles > 128


def test_a_killed_survey_leaves_no_process_behind(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # an empty cache, so that there is work for a while
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("everything.py")
    child = subprocess.Popen(
        [sys.executable, str(script), "gfx942,gfx950,gfx1100", f"{KERNELS}:cases"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None and child.stderr.readline().startswith("1/")
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    assert children
    child.kill()
    child.wait()
    child.stderr.close()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "the workers outlive their parent"
        time.sleep(0.2)

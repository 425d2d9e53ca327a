"""Every op's kernel with its shipped configurations, as machine code of CDNA, against its oracle."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.conftest import ARCHS
from wavecrest.dispatch import registry
from wavecrest.isa.run import CASES, op_names

Emulated = Callable[[str, str], Any]
Child = Callable[..., "subprocess.CompletedProcess[str]"]

pytest.importorskip("triton", reason="kernels are compiled by triton")


@pytest.mark.every_emulated
@pytest.mark.parametrize("op", op_names("all"))
@pytest.mark.parametrize("arch", ARCHS)
def test_op_matches_its_oracle(emulated: Emulated, arch: str, op: str) -> None:
    mine = [case for case in emulated("ops", arch)["cases"] if case["op"] == op]
    study = registry.get(op).study
    # ops with other sizes than rows and columns run their own cases alone
    own = set() if study.emulate_cases is None else set(study.emulate_cases(arch))
    standard = {case.name for case in CASES} if study.sizes == ("M", "N") else set()
    assert standard | own and standard | own <= {case["case"] for case in mine}
    for case in mine:
        assert case["outcome"] in ("ok", "refused"), case
        assert case["outcome"] == "refused" or case["work"]["instructions"] > 0, case
    # a kernel may decline a dtype or strides, not everything, unless the architecture lacks what the op is for
    reasons = [case["reason"] for case in mine]
    assert any(case["outcome"] == "ok" for case in mine) or all("gfx90a has no float8" in one for one in reasons), (
        reasons
    )


@pytest.mark.every_emulated
@pytest.mark.parametrize("arch", ARCHS)
def test_a_split_row_has_the_same_bits_whether_its_programs_wait_or_not(run_child: Child, arch: str) -> None:
    done = run_child("tests.emulated.exchange", arch)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == []


@pytest.mark.every_emulated
@pytest.mark.parametrize("arch", ARCHS)
def test_programs_that_exchange_h_have_the_bits_of_a_launch_for_each_token(run_child: Child, arch: str) -> None:
    done = run_child("tests.emulated.cooperative", arch)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["differ"] == [] and min(found["workgroups"].values()) > 1, found


_SCRIPT = """
import sys
import torch, triton, triton.language as tl

@triton.jit
def scale(x_ptr, y_ptr, n, by, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, offs < n) * by, offs < n)

def run(device, n, launched):
    x, y = torch.randn(n, device=device), torch.zeros(n, device=device)
    scale[(launched,)](x, y, n if launched == 2 else 10 * n, 3.0, BLOCK=128)
    torch.cuda.synchronize() if device == "cuda" else None
    return x, y

def test_scale():
    x, y = run("cpu", 200, 2)
    assert torch.equal(y, 3 * x)

if __name__ == "__main__":
    x, y = run(sys.argv[1], 200, int(sys.argv[2]))
    assert torch.equal(y, 3 * x)
    print("from the script")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "test_scale.py"
    path.write_text(_SCRIPT)
    (tmp_path / "scale.py").write_text(_SCRIPT)
    return str(path)


@pytest.mark.every_emulated
def test_a_script_a_test_file_and_what_goes_wrong(run_child: Child, script: str) -> None:
    program = script.replace("test_scale", "scale")
    good = run_child("wavecrest", "isa", "run", program, "--", "cpu", "2")
    assert good.returncode == 0, good.stderr
    assert "from the script" in good.stdout and "2 workgroups" in good.stdout and "scale" in good.stdout
    # --json: only the result is on standard output
    mapped = run_child("wavecrest", "isa", "run", program, "--cuda-is-cpu", "--json", "--", "cuda", "2")
    assert mapped.returncode == 0, mapped.stderr
    assert mapped.stdout.lstrip().startswith("{") and "from the script" in mapped.stderr
    outside = run_child("wavecrest", "isa", "run", program, "--", "cpu", "9")
    assert outside.returncode == 2
    message = " ".join(outside.stdout.split())
    assert "out-of-bounds access at scale+" in message and "past the end of argument" in message, message
    assert "scale.py:" in message
    tested = run_child("wavecrest", "isa", "run", script, "--arch", "gfx950", "--", "-q")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    nothing = run_child("wavecrest", "isa", "run", script, "--", "-q", "-k", "nosuch")
    assert nothing.returncode == 2 and "no tests collected" in nothing.stdout


@pytest.mark.every_emulated
def test_options_of_an_op(run_child: Child) -> None:
    name = op_names("all")[0]
    assert registry.get(name).name == name
    done = run_child("wavecrest", "isa", "run", name, "--shapes", "2x50,3x64", "--dtype", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as asked") == 2

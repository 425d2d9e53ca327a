"""`wavecrest bench xlstm`, `mlstm` and `slstm` as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wavecrest import hardware, records
from wavecrest.bench import xlstm
from wavecrest.bench.ops import Settings
from wavecrest.cli import _bench_kernels, main
from wavecrest.dispatch import registry
from wavecrest.measure import interleaved
from wavecrest.models.xlstm.kernels import KERNELS
from wavecrest.ops.slstm.sequence import launch_cpu

# the C code of the sLSTM, where it can be compiled
C_CODE = ["c"] if launch_cpu.problem() is None else []
SIZES = ("B=1", "H=1", "S=4,17", "D=16")


@pytest.fixture(autouse=True)
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings made up: the n-th piece of work takes n ms."""

    def measure(works: Sequence[Any], **_options: Any) -> interleaved.Interleaved:
        for work in works:
            work()
        return interleaved.Interleaved(tuple((float(n + 1),) * 30 for n in range(len(works))), "host wall")

    monkeypatch.setattr(interleaved, "measure", measure)
    monkeypatch.setenv("COLUMNS", "80")


def _record(family: str, *words: str, **asked: Any) -> records.OpBenchRecord:
    return xlstm.bench(family, hardware.detect("cpu"), Settings(words=words, **asked))


def test_every_kernel_name_is_in_every_case() -> None:
    record = _record("xlstm", *SIZES)
    assert [bench.op for bench in record.ops] == [*xlstm.MLSTM, *xlstm.SLSTM]
    for bench in record.ops:
        # a step has no length, and the chunkwise kernels are there with sigmoid gates too
        assert len(bench.cases) == {"mlstm_chunkwise": 4, "mlstm_step": 1, "slstm_step": 1}.get(bench.op, 2)
        for case in bench.cases:
            names = [name for impl in case.impls for name in impl.name.split(", ")]
            assert names[0] == "auto" and len(set(names)) == len(names)
            if bench.op.startswith("mlstm"):
                gate = "sigmoid" if case.case.endswith("gates") else "exp"
                kernels = KERNELS[bench.op.removeprefix("mlstm_")].values()
                assert set(names) == {kernel.name for kernel in kernels if kernel.input_gate == gate} | {"auto"}
            own = C_CODE if bench.op in xlstm.SLSTM else []
            assert case.backend == [*own, "torch"][0] and case.impls[0].ms is not None
            for impl in case.impls:
                assert (impl.ms is None) == bool(impl.problem)
                # in the interpreter Triton's run on a CPU, and C code needs a compiler
                reason = "cannot be compiled" if impl.name == "c" else "runs on a GPU"
                assert not impl.problem or (impl.name != "torch" and impl.problem.startswith(reason))


def test_the_choice_of_dispatch_is_first() -> None:
    op = registry.get("slstm_step")
    case = xlstm.cases(op, hardware.detect("cpu"), Settings(words=("B=1", "H=1", "D=16")))[0]
    call = case.make()
    names = [", ".join(["auto", *C_CODE[:1]]), "triton", "torch"] if C_CODE else ["auto, torch", "triton", "c"]
    assert [name for name, _, _ in xlstm._planned(op, call)] == names
    op.force("reference")
    try:
        assert [name for name, _, _ in xlstm._planned(op, call)] == ["auto", "triton", "c", "torch"]
    finally:
        op.force(None)


def test_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    assert main.main(["bench", "mlstm", *SIZES, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for part in ("mlstm_chunkwise B=1 H=1 S=17 D=16 fp32", "sigmoid gates", "→ auto", "1.000 ms to 1.000 ms", "2.00×"):
        assert part in text, part
    assert "slstm" not in text and text.count("→ auto") == 7
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80
    record = records.load_as(out, records.OpBenchRecord)
    assert record.suite == "mlstm" and record.ops[0].cases[0].sizes == {"B": 1, "H": 1, "S": 4, "D": 16}
    assert main.main(["bench", "--from", str(out)]) == 0
    assert capsys.readouterr().out == text
    assert main.main(["bench", "--from", str(out), "--plot", str(tmp_path / "a.svg")]) == 1
    assert "no plot" in capsys.readouterr().err
    assert main.main(["bench", "slstm", *SIZES, "--json"]) == 0
    assert {bench["op"] for bench in json.loads(capsys.readouterr().out)["ops"]} == {"slstm_sequence", "slstm_step"}


def test_a_wrong_kernel_has_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(xlstm, "mlstm_parallel", lambda q, k, v, i, f, **_more: torch.zeros_like(v))
    assert main.main(["bench", "mlstm", "B=1", "H=1", "S=4", "D=16"]) == 2
    found = capsys.readouterr()
    assert "wrong: result 0 has error 1" in found.out and "without a valid result" in found.err


def test_time_is_bound() -> None:
    record = _record("slstm", *SIZES, budget=1e-9)
    assert {case.problem for bench in record.ops for case in bench.cases} == {"no time left of the budget"}
    assert _bench_kernels.measure("slstm", {"words": ("B=1", "H=1", "S=4", "D=16")}, "cpu").suite == "slstm"


def test_sizes_where_none_are_given() -> None:
    cpu = hardware.detect("cpu")
    for kind, first, last in (
        ("cpu", "1x4x8x32 fp32", "4x4x256x64 fp32"),
        ("cuda", "1x4x8x64 bf16", "16x4x2048x128 bf16"),
    ):
        cases = xlstm.cases(registry.get("slstm_sequence"), replace(cpu, kind=kind), Settings())
        assert (cases[0].name, cases[-1].name) == (first, last)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["mlstm", "M=4"], "'M=4' is no size of these kernels: give B=… H=… S=… D=… dtype=…"),
        (["mlstm", "B=0"], "B=0: must be a whole number"),
        (["mlstm", "dtype=int8"], "dtype=int8"),
        (["mlstm", "dtype=fp32", "--dtype", "bf16"], "give the dtype"),
        (["mlstm", "--peers", "none"], "--peers has no meaning beside it"),
        (["mlstm", "gemm"], "give it alone"),
        (["mlstm", "--compile"], "give it alone"),
        (["mlstm", "--case", "nowhere"], "no case of mlstm has 'nowhere' in its name"),
        (["mlstm", "--seconds", "0"], "--seconds must be above zero"),
    ],
)
def test_what_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", *words]) == 1
    assert reason in " ".join(capsys.readouterr().err.split())

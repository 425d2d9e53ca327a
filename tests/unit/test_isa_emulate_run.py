"""`wavecrest isa run` without the emulator: cases, comparison, records, options."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from tests.toy import OneCall
from wavecrest.cli import isa_run
from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import Study
from wavecrest.errors import (
    EnvironmentProblem,
    InvalidArgument,
    OutOfBounds,
    OutputError,
    RecordError,
    Unsupported,
    WorkloadError,
)
from wavecrest.isa import run
from wavecrest.isa.emulate import record
from wavecrest.isa.emulate.program import Stats
from wavecrest.records import provenance

ROOT = Path(__file__).parents[2]


class FakeOp:
    """The parts of an op that `run` uses; `result` is returned by its kernel."""

    name, op_class = "fake", "row"

    def __init__(self, kernel: Any, reference: Any = None, *, stores: tuple[str, ...] = ()) -> None:
        self.kernel, self.definition = kernel, reference or (lambda x: x * 2)
        self.driver = SimpleNamespace(runs=[])
        self.study = Study(inputs=self._inputs, cost=lambda call: Cost(0, 0), stores=stores)

    def _inputs(self, rows: int, columns: int, dtype: torch.dtype, device: str) -> OneCall:
        return OneCall(torch.randn(rows, columns, dtype=dtype, device=device))

    def reference(self, call: OneCall) -> Any:
        return self.definition(call.x)

    def run(self, backend: str, call: OneCall) -> Any:
        assert backend == "triton"
        stats = Stats(workgroups=3, instructions=10, ops={"V_MFMA_X": 4, "S_NOP": 6}, unguarded=["x"])  # type: ignore[arg-type]
        self.driver.runs.append(SimpleNamespace(kernel="_fake", stats=stats))
        return self.kernel(call.x)

    def case(self, dtype: str = "float32") -> record.CaseResult:
        make = functools.partial(run._example, self, run.Case("one", 4, 64, dtype))  # type: ignore[arg-type]
        return run._run_case(self, "one", dtype, make, self.driver)  # type: ignore[arg-type]


def test_a_right_result_is_ok_and_its_work_is_counted() -> None:
    found = FakeOp(lambda x: x * 2).case()
    assert found.outcome == "ok" and found.worst == 0 and found.shapes == ["4x64"] and not found.reason
    assert (found.work.launches, found.work.workgroups, found.work.matrix_instructions) == (1, 3, 4)
    assert found.work.kernels == ["_fake"] and found.work.unguarded == ["x"]
    assert (found.work.exact, found.work.no_effect) == (0, 6)
    assert list(found.work.approximate.values()) == [4]


def _off_by(amount: float) -> Any:
    def kernel(x: Tensor) -> Tensor:
        y = x * 2
        y[1, 3] += amount
        return y

    return kernel


def test_a_wrong_result_says_how_wrong() -> None:
    found = FakeOp(_off_by(1.0)).case()
    assert found.outcome == "wrong" and "largest" in found.reason and found.worst is not None and found.worst > 0.1
    nan = FakeOp(_off_by(float("nan"))).case()
    assert nan.outcome == "wrong" and "NaN or infinity in other places" in nan.reason


def test_what_a_kernel_forgets_to_write_is_found() -> None:
    def forgets(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:-1] = x[:-1] * 2
        return y

    assert FakeOp(forgets).case().outcome == "wrong"
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.bfloat16):
        with run._nan_in_uninitialised_memory():
            assert torch.empty(100, dtype=dtype).float().isnan().all(), dtype
            assert torch.randn(4).new_empty(100, dtype=dtype).float().isnan().all(), dtype
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_argument_written_to_is_wrong() -> None:
    assert "argument" in FakeOp(lambda x: x.mul_(2), lambda x: x).case().reason


def test_what_an_op_stores_is_held_to_what_the_reference_stores() -> None:
    def stores(x: Tensor) -> Tensor:
        x[2, 5] += 1.0
        return x * 2

    def stores_more(x: Tensor) -> Tensor:
        y = stores(x)
        x[2, 6] += 1.0
        return y

    for kernel, outcome in ((stores, "ok"), (stores_more, "wrong")):
        found = FakeOp(kernel, stores, stores=("x",)).case()
        assert found.outcome == outcome and ("what is stored differs" in found.reason) == (outcome == "wrong")


def test_a_refusal_a_fault_and_a_kernel_that_never_ran() -> None:
    def raises(error: Exception) -> Any:
        def kernel(_x: Tensor) -> Tensor:
            raise error

        return kernel

    assert FakeOp(raises(Unsupported("no float32 here"))).case().model_dump()["reason"] == "no float32 here"
    assert FakeOp(raises(Unsupported("no"))).case().outcome == "refused"
    assert FakeOp(raises(InvalidArgument("multiples of 16"))).case().outcome == "refused"
    broken = FakeOp(raises(RuntimeError("PassManager::run failed"))).case()
    assert broken.outcome == "failed" and broken.reason == "RuntimeError: PassManager::run failed"
    fault = FakeOp(raises(OutOfBounds("at kernel+0x10: global_load"))).case()
    assert fault.outcome == "failed" and "global_load" in fault.reason and fault.work.launches == 1
    idle = FakeOp(lambda x: x * 2)
    idle.driver = SimpleNamespace(runs=())
    idle.run = lambda _backend, call: call.x * 2  # type: ignore[method-assign, assignment]
    assert idle.case().reason == "no kernel was launched"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_results_may_be_one_step_off(dtype: torch.dtype) -> None:
    values = torch.linspace(-100, 100, 1000)
    want = values.to(dtype)
    assert run._codes_off(want, want) == (0.0, 0)
    # codes that grow with the value: sign and magnitude for floats
    stored = want.view(torch.int8).clone()
    stored[500:505] += 1
    near = stored.view(dtype)
    assert run._codes_off(near, want) == (0.005, 0)
    stored[600] += 3
    assert run._codes_off(stored.view(dtype), want) == (0.006, 1)


def test_a_quantized_result_is_held_to_its_steps() -> None:
    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 20).round().clamp(-127, 127).to(torch.int8), torch.ones(())

    def kernel(step: int, count: int) -> Any:
        def make(x: Tensor) -> tuple[Tensor, Tensor]:
            q, scale = reference(x)
            q.view(-1)[:count] = torch.where(q.view(-1)[:count] < 100, q.view(-1)[:count] + step, 0)
            return q, scale

        return make

    for step, count, outcome in ((1, 2, "ok"), (1, 30, "wrong"), (2, 1, "wrong")):
        op = FakeOp(kernel(step, count), reference)
        op.op_class = "quantized"
        found = op.case()
        assert found.outcome == outcome and found.codes == pytest.approx(count / 256), (step, count)


def test_gaps_hold_nan_and_the_values_stay() -> None:
    x, q = torch.randn(5, 7), torch.randint(0, 9, (5, 2, 7), dtype=torch.int8)
    for tensor in (x, q):
        view = run._with_gaps(tensor)
        assert torch.equal(view, tensor) and not view.is_contiguous() and view.stride(0) > 2 * tensor.shape[-1]
    storage = torch.empty(0).set_(run._with_gaps(x).untyped_storage())  # type: ignore[call-overload]
    assert int(storage.isnan().sum()) == storage.numel() - x.numel()


def test_the_standard_cases_reach_every_kind_of_row() -> None:
    # wider than any row that a program keeps in registers
    assert any(case.columns > 32768 for case in run.CASES)
    assert any(case.columns % 16 for case in run.CASES) and any(case.strided for case in run.CASES)
    assert {case.dtype for case in run.CASES} == set(run.DTYPES)
    assert run.cases([(2, 3)], ["float16"]) == (run.Case("as asked", 2, 3, "float16"),)
    assert {case.dtype for case in run.cases(dtypes=["float16"])} == {"float16"}
    with pytest.raises(InvalidArgument, match="float64"):
        run.cases(dtypes=["float64"])


@pytest.fixture
def no_emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The switch, without an emulator behind it: kernels run in the interpreter, and count as launched."""
    asked: list[dict[str, Any]] = []

    class Driver:
        @property
        def runs(self) -> list[Any]:
            return [SimpleNamespace(kernel="k", stats=Stats(workgroups=1, instructions=1))] * next(self.count)

        def __init__(self) -> None:
            self.count = iter(range(10**6))

    class Switch:
        def __init__(self, arch: str, **options: Any) -> None:
            asked.append({"arch": arch, **options})

        def __enter__(self) -> Driver:
            return Driver()

        def __exit__(self, *_error: object) -> None:
            pass

    monkeypatch.setattr("wavecrest.isa.emulate.emulated", Switch)
    monkeypatch.setattr("wavecrest.isa.emulate.version", lambda: "0.14.0")
    yield asked


def test_an_op_adds_its_own_cases(no_emulator: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get("rms_norm")
    study = op.study
    monkeypatch.setattr(op, "run", lambda _backend, call: op.reference(call))

    def own(arch: str) -> dict[str, Any]:
        return {f"own {arch}": lambda: study.inputs(2, 8, torch.float16, "cpu")}

    monkeypatch.setattr("wavecrest.ops.rows.study.studies", lambda: {"rms_norm": replace(study, emulate_cases=own)})
    found = run.run_ops(["rms_norm"], "gfx950", resident=3)
    assert [case.case for case in found.cases] == [*(case.name for case in run.CASES), "own gfx950"]
    assert found.cases[-1].dtype == "float16" and found.passed and no_emulator == [{"arch": "gfx950", "resident": 3}]
    assert found.header.evidence == "emulated"


def test_every_kernel_of_an_op_runs_every_call(
    no_emulator: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = registry.get("gemm")
    asked: list[str] = []

    def ran(backend: str, call: Any) -> Any:
        asked.append(backend)
        return op.reference(call)

    monkeypatch.setattr(op, "run", ran)
    found = run.run_ops(["gemm"], "gfx942")
    assert op.study.emulate_cases is not None
    names = list(op.study.emulate_cases("gfx942"))
    kernels = (
        "triton",
        "triton_stream_k",
        "triton_gemv",
        "triton_hopper",
        "triton_hopper_epilogue",
        "triton_hopper_blocks",
        "triton_hopper_words",
        "triton_cdna",
    )
    assert asked == [kernel for kernel in kernels for _ in names]
    assert [case.case for case in found.cases] == [
        *names, *(f"{name} · {kernel.removeprefix('triton_')}" for kernel in kernels[1:] for name in names)
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match="gemm has sizes M, N, K"):
        run.run_ops(["gemm"], "gfx942", run.cases([(2, 8)], ["float16"]))


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(isa_run.command)
    return app


def test_the_command_prints_writes_and_returns(
    no_emulator: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    op, path = registry.get("rms_norm"), tmp_path / "out.json"
    monkeypatch.setattr(op, "run", lambda _backend, call: op.reference(call))
    done = CliRunner().invoke(_app(), ["rms_norm", "--arch", "gfx942", "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "odd columns" in done.output and "emulated gfx942" in done.output and "tinygrad 0.14.0" in done.output
    read = record.load(path)
    own = registry.get("rms_norm").study.emulate_cases
    assert own is not None and read.passed and read.arch == "gfx942"
    assert [case.case for case in read.cases] == [*(case.name for case in run.CASES), *own("gfx942")]
    monkeypatch.setattr(op, "run", lambda _backend, call: op.reference(call) + 1)
    wrong = CliRunner().invoke(_app(), ["rms_norm", "--shapes", "2x8", "--dtype", "float16"])
    assert wrong.exit_code == 2 and "wrong" in wrong.output and "relative error" in wrong.output
    json = CliRunner().invoke(_app(), ["rms_norm", "--shapes", "2x8", "--json"])
    assert record.EmulationRecord.model_validate_json(json.stdout[json.stdout.index("{") :]).passed is False


def test_a_run_says_how_exact_it_was_and_what_was_looked_for(
    no_emulator: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = registry.get("rms_norm")
    monkeypatch.setattr(op, "run", lambda _backend, call: op.reference(call))
    plain = CliRunner().invoke(_app(), ["rms_norm", "--shapes", "2x8"])
    assert "fidelity: " in plain.output and "not checked: missing waits" in plain.output
    checked = CliRunner().invoke(_app(), ["rms_norm", "--shapes", "2x8", "--check"])
    assert "\nchecked: waits, barriers" in checked.output
    assert [asked["check"] for asked in no_emulator] == [False, True]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"target": "nosuch"}, InvalidArgument),
        ({"target": "rms_norm", "arguments": ["-k"]}, InvalidArgument),
        ({"target": "rms_norm", "cuda_is_cpu": True}, InvalidArgument),
        ({"target": "rms_norm", "workers": 0}, InvalidArgument),
        ({"target": "rms_norm", "output": Path("/")}, OutputError),
        ({"target": "gone.py"}, WorkloadError),
        ({"target": "gone.py", "shapes": [(1, 1)]}, InvalidArgument),
    ],
)
def test_bad_input_is_refused_before_anything_runs(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        isa_run.run(**options)


def test_shapes_on_the_command_line() -> None:
    assert isa_run.parse_shapes("3x1000, 37x33") == [(3, 1000), (37, 33)] and isa_run.parse_shapes(None) == []
    with pytest.raises(InvalidArgument, match="3x"):
        isa_run.parse_shapes("3x")


def test_here_the_interpreter_is_on_and_that_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("on a machine with a GPU kernels are not defined for the interpreter")
    with pytest.raises(EnvironmentProblem, match="TRITON_INTERPRET=1"):
        isa_run.run("rms_norm")


def test_a_script_that_launches_nothing_or_raises(no_emulator: list[dict[str, Any]], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nif len(sys.argv) > 1:\n    raise ValueError(sys.argv[1])\n")
    failed = run.run_file(str(script), "gfx942", ["so it is"])
    assert not failed.passed and failed.reason == "script.py:3: ValueError: so it is"
    script.write_text("import sys\nsys.exit(4)\n")
    assert run.run_file(str(script), "gfx942").reason == "the script ended with 4"


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_cuda_can_stand_for_the_cpu(device: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a real cuda device here")
    with run.cuda_on_cpu():
        x = torch.zeros(3, device=device)
        assert x.device.type == "cpu" and x.to(device).cuda().device.type == "cpu"
        torch.cuda.synchronize()
        assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(3, device=device)


def test_which_targets_are_files() -> None:
    assert run.is_file("a/b.py") and run.is_file("test_x.py::test_y") and not run.is_file("rms_norm")
    assert run._is_test_file("a/test_b.py") and run._is_test_file("b_test.py") and run._is_test_file("b.py::x")
    assert not run._is_test_file("a/b.py") and not run._is_test_file("tests/contest_a.py")


def test_a_damaged_record_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"format_version": 1, "kind": "emulation"}')
    with pytest.raises(RecordError, match="damaged: header"):
        record.load(path)
    path.write_text('{"format_version": 99}')
    with pytest.raises(RecordError, match="upgrade"):
        record.load(path)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_committed_record_covers_every_kernel(arch: str) -> None:
    newest = max((ROOT / "evidence" / "emulated").glob(f"*_isa-run_{arch}.jsonl.gz"))
    found = record.load(newest)
    assert (
        found.arch == arch
        and found.passed
        and found.checked
        and found.header.evidence == "emulated"
        and re.fullmatch(r"\d+\.\d+\.\d+|[0-9a-f]{40}", found.tinygrad)
    )
    missing = set(run.op_names("all")) - {case.op for case in found.cases if case.outcome == "ok"}
    assert not missing, f"run scripts/emulate: no record of {sorted(missing)}"
    assert all(value.startswith("…") or "/" not in value for value in found.header.environment.values())
    assert isinstance(found.header, provenance.Header)

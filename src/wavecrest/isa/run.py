"""Run ops, scripts and test files with their kernels as AMD machine code on the CPU, and check the results."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest import env, hardware, ops
from wavecrest.backends import user
from wavecrest.dispatch.call import AnyCall, mapped, tensors_of
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import InvalidArgument, MissingDependency, Unsupported, WavecrestError, WorkloadError
from wavecrest.isa import emulate, sources, survey
from wavecrest.isa.emulate import fidelity
from wavecrest.isa.emulate.record import CaseResult, EmulationRecord, ProgramResult, Work
from wavecrest.measure import numerics
from wavecrest.records import provenance

OnCase = Callable[[CaseResult], None]

DTYPES = ("float32", "float16", "bfloat16")
# 8-bit types -> bits of the mantissa; None: integers
_CODES = {
    torch.int8: None,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 2,
    torch.float8_e5m2fnuz: 2,
}
# most 8-bit results that may be one step off: values that lie on the border between two steps in float32
CODES_OFF = 0.01


class Case(NamedTuple):
    """Arguments that `Study.inputs` makes; `strided`: every tensor of two or more dimensions is a view with gaps."""

    name: str
    rows: int
    columns: int
    dtype: str
    strided: bool = False


# a ragged end, several rows a program with a ragged end, blocks that fill the row, a row taken in pieces, gaps
CASES = (
    Case("odd columns", 3, 1000, "bfloat16"),
    Case("narrow rows", 37, 33, "float32"),
    Case("even columns", 2, 4096, "float16"),
    Case("looped", 2, 40000, "bfloat16"),
    Case("strided", 5, 300, "float16", strided=True),
)


def op_names(target: str, kernels: Sequence[tuple[str, str]] = ()) -> list[str]:
    """The ops that a target names: one, or with "all" every op that has a Triton kernel.

    Args:
        target: the name of an op, or "all".
        kernels: (op, name) of users' kernels: if there are any, ops with one of these.

    Raises:
        InvalidArgument: no such op, or it has no kernel.
    """
    if kernels:
        found = list(dict.fromkeys(op for op, _ in kernels if target in ("all", op)))
        if not found:
            raise InvalidArgument(
                f"--kernels registers no kernel for {ops.get(target).name if target != 'all' else 'any op'}"
            )
        return found
    if target == "all":
        return survey.ops_with_kernels()
    if "triton" not in ops.get(target).backends:
        raise InvalidArgument(f"{target} has no Triton kernel to run")
    return [target]


def cases(shapes: Sequence[tuple[int, int]] = (), dtypes: Sequence[str] = ()) -> tuple[Case, ...]:
    """The cases of a run: the standard ones, or every shape in every dtype.

    Raises:
        InvalidArgument: a dtype that is not in DTYPES.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise InvalidArgument(f"--dtype takes {', '.join(DTYPES)}, not {dtype!r}")
    if not shapes:
        return tuple(case for case in CASES if not dtypes or case.dtype in dtypes) or tuple(
            case._replace(dtype=dtype) for case in CASES for dtype in dtypes
        )
    pairs = itertools.product(shapes, dtypes or ("bfloat16",))
    return tuple(Case("as asked", rows, columns, dtype) for (rows, columns), dtype in pairs)


def run_ops(
    names: Sequence[str],
    arch: str,
    chosen: Sequence[Case] | None = None,
    *,
    on_case: OnCase | None = None,
    kernels: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> EmulationRecord:
    """Run ops on one architecture and compare each result with the op's oracle.

    Args:
        names: names of ops that have a Triton kernel.
        arch: an AMD architecture.
        chosen: the cases from `cases`; None: the standard ones, and those that the op adds (`Study.emulate_cases`).
        on_case: called after each.
        kernels: (op, name) of users' kernels to run in place of the ops' own.
        options: as for `emulate.emulated`.

    Raises:
        MissingDependency, EnvironmentProblem: no emulator here; the message says what to install.
    """
    results = []
    with emulate.emulated(arch, **options) as driver:
        for name in names:
            op = ops.get(name)
            own = [backend for backend in op.backends if backend.startswith("triton")]
            own = [backend for found, backend in kernels if found == name] if kernels else own
            for backend, (label, dtype, make) in itertools.product(own, list(_calls(op, arch, chosen))):
                # the first one is the default kernel
                label = label if backend == own[0] else f"{label} · {backend.removeprefix('triton_')}"
                results.append(_run_case(op, label, dtype, make, driver, backend))
                if on_case is not None:
                    on_case(results[-1])
    ran = {kernel for result in results for kernel in result.work.kernels}
    hashes = {name: found for name, found in sources.kernels().items() if name in ran}
    return EmulationRecord(
        header=_header(),
        arch=arch,
        tinygrad=emulate.version(),
        sources=hashes,
        checked=bool(options.get("check")),
        cases=results,
    )


def _header() -> provenance.Header:
    return provenance.header(hardware.cpu(), evidence="emulated")


def _calls(op: AnyOp, arch: str, chosen: Sequence[Case] | None) -> Iterator[tuple[str, str, Callable[[], AnyCall]]]:
    """Name, dtype and a function that makes the arguments of each call."""
    rows_and_columns = op.study.sizes == ("M", "N")
    if chosen is not None and not rows_and_columns:
        raise InvalidArgument(
            f"{op.name} has sizes {', '.join(op.study.sizes)}: it runs its own cases, without --shapes or --dtype"
        )
    standard = CASES if rows_and_columns else ()
    for case in standard if chosen is None else chosen:
        yield case.name, case.dtype, lambda case=case: _example(op, case)  # type: ignore[misc]
    if chosen is None and op.study.emulate_cases is not None:
        for name, make in op.study.emulate_cases(arch).items():
            yield name, "", make


def _example(op: AnyOp, case: Case) -> AnyCall:
    call = op.study.inputs(case.rows, case.columns, getattr(torch, case.dtype), "cpu")
    if not case.strided:
        return call
    return mapped(call, lambda tensor: _with_gaps(tensor) if tensor.ndim > 1 else tensor)


def _with_gaps(tensor: Tensor) -> Tensor:
    """The same values in a view with gaps: a row between two rows, and three elements before each row."""
    shape = (tensor.shape[0] * 2, *tensor.shape[1:-1], tensor.shape[-1] + 3)
    # NaN, or the largest number: it shows up if a kernel takes it for data
    fill = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    view = torch.full(shape, fill, dtype=tensor.dtype)[::2, ..., 3:]
    return view.copy_(tensor)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    # bytes: NaN is not equal to itself, and some types compare nothing
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _run_case(
    op: AnyOp,
    label: str,
    dtype: str,
    make: Callable[[], AnyCall],
    driver: emulate.EmulatedDriver,
    backend: str = "triton",
) -> CaseResult:
    # the same numbers whatever ran before
    torch.manual_seed(0)
    before = len(driver.runs)
    result = CaseResult(op=op.name, case=label, shapes=[], dtype=dtype, outcome="ok")
    try:
        call = make()
        tensors = tensors_of(call)
        result.shapes = ["x".join(map(str, tensor.shape)) for tensor in tensors]
        result.dtype = dtype or str(tensors[0].dtype).removeprefix("torch.")
        kept = _copies(call)
        # the oracle is the check here: a user's kernel needs no other one
        with _nan_in_uninitialised_memory(), user.being_checked(op.name, backend):
            got = op.run(backend, call)
    except (Unsupported, InvalidArgument) as error:
        # a standard case may be outside the contract of the kernel or of the op
        return result.model_copy(update={"outcome": "refused", "reason": str(error)})
    except WavecrestError as error:
        return result.model_copy(update={"outcome": "failed", "reason": str(error), "work": _work(driver, before)})
    except Exception as error:
        # a kernel that does not compile is a row of the result and does not end the run
        reason = f"{type(error).__name__}: {str(error)[:500]}"
        return result.model_copy(update={"outcome": "failed", "reason": reason, "work": _work(driver, before)})
    compared = _compare(op, _copies(kept), got)
    if op.study.stores:
        # the reference's writes to its arguments, in the arguments' own dtypes
        op.reference(kept)
    if not all(_same_bits(now, wanted) for now, wanted in zip(call, kept, strict=True) if isinstance(now, Tensor)):
        reason = "what is stored differs from the reference's" if op.study.stores else "an argument was written to"
        compared |= {"outcome": "wrong", "reason": reason}
    if len(driver.runs) == before:
        compared |= {"outcome": "failed", "reason": "no kernel was launched"}
    return result.model_copy(update=compared | {"work": _work(driver, before)})


def _copies(call: AnyCall) -> AnyCall:
    return mapped(call, Tensor.clone)


@contextlib.contextmanager
def _nan_in_uninitialised_memory() -> Iterator[None]:
    """Make elements that a kernel forgets to write NaN (the largest number, for integers), not stale values."""
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # a module with a property, which type checkers do not see
    deterministic: Any = torch.utils.deterministic
    filling = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        deterministic.fill_uninitialized_memory = filling


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _oracle(op: AnyOp, call: AnyCall) -> tuple[Tensor, ...]:
    """The reference in float64; for quantized results in float32, as the op defines its own rounding steps."""
    if op.op_class == "quantized":
        return _tuple(op.reference(call))
    # what the call writes to keeps its dtype
    stored = {name: getattr(call, name) for name in op.study.stores}
    wide = mapped(call, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    return _tuple(op.reference(wide._replace(**stored)))


def _compare(op: AnyOp, call: AnyCall, got: Any) -> dict[str, Any]:
    """Compare all results; returns the fields for a CaseResult."""
    first = next(value for value in call if isinstance(value, Tensor))
    found: dict[str, Any] = {}
    wrong = []
    for index, (result, want) in enumerate(zip(_tuple(got), _oracle(op, call), strict=True)):
        if result.dtype in _CODES and want.dtype == result.dtype:
            off, far = _codes_off(result, want)
            found["codes"] = max(off, found.get("codes", 0.0))
            if far or off > CODES_OFF:
                more = f", {far} elements by more than one step" if far else ""
                wrong.append(f"result {index}: {off:.2%} of the 8-bit values differ{more}")
            continue
        # a result in a wider type than the input, such as a scale, is held to its own
        dtype = str(result.dtype if result.is_floating_point() else first.dtype).removeprefix("torch.")
        limits, compared = numerics.tolerance("row", dtype), numerics.compare(result, want)
        for field in ("relative", "worst"):
            found[field] = max(getattr(compared, field), found.get(field, 0.0))
        if not compared.within(limits):
            infinite = "" if compared.nonfinite_match else ", NaN or infinity in other places"
            wrong.append(
                f"result {index}: relative error {compared.relative:.1e} (limit {limits.relative:.1e}), largest "
                f"{compared.worst:.1e} (limit {limits.worst:.1e}){infinite}"
            )
    return found | ({"outcome": "wrong", "reason": "; ".join(wrong)} if wrong else {})


def _codes_off(got: Tensor, want: Tensor) -> tuple[float, int]:
    """Share of 8-bit values that differ, and how many differ by more than one step (or are NaN in one only)."""
    if got.shape != want.shape:
        return 1.0, want.numel()
    mantissa, old, new = _CODES[want.dtype], want.float(), got.float()
    differ = ~((old == new) | (old.isnan() & new.isnan()))
    if mantissa is None:
        step = torch.ones_like(old)
    else:
        # the wider of the two values' steps; subnormals have the step of the smallest normal number
        largest = torch.maximum(old.abs(), new.abs()).clamp_min(float(torch.finfo(want.dtype).smallest_normal))
        step = torch.exp2(torch.floor(torch.log2(largest)) - mantissa)
    near = (old - new).abs() <= step
    return float(differ.sum()) / max(1, want.numel()), int((differ & ~near).sum())


def _work(driver: emulate.EmulatedDriver, before: int) -> Work:
    runs = driver.runs[before:]
    ops = sum((Counter(run.stats.ops) for run in runs), Counter())
    close = fidelity.of(ops)
    return Work(
        launches=len(runs),
        workgroups=sum(run.stats.workgroups for run in runs),
        instructions=sum(run.stats.instructions for run in runs),
        matrix_instructions=sum(run.stats.matrix_instructions() for run in runs),
        exact=close.exact,
        approximate=close.approximate,
        no_effect=close.no_effect,
        lds_cycles=sum(run.stats.lds_cycles for run in runs),
        lds_conflicts=sum(run.stats.lds_conflicts for run in runs),
        unsupported=sorted({text for run in runs for text in run.stats.unsupported}),
        seconds=round(sum(run.stats.seconds for run in runs), 3),
        compile_seconds=round(sum(run.stats.compile_seconds for run in runs), 3),
        kernels=sorted({run.kernel for run in runs}),
        unguarded=sorted({name for run in runs for name in run.stats.unguarded}),
    )


def is_file(target: str) -> bool:
    """True if a target names a Python file (with or without pytest's `::test`), not an op."""
    return target.partition("::")[0].endswith(".py")


def _is_test_file(target: str) -> bool:
    path, _, test = target.partition("::")
    name = Path(path).name
    return bool(test) or name.startswith("test_") or name.endswith("_test.py")


def run_file(
    target: str, arch: str, arguments: Sequence[str] = (), *, cuda_is_cpu: bool = False, **options: Any
) -> ProgramResult:
    """Run a script, or a test file with pytest, with every Triton kernel it launches as AMD machine code.

    Args:
        target: script.py, or test_x.py with or without `::test`.
        arch: an AMD architecture.
        arguments: of the script, or for pytest.
        cuda_is_cpu: take the device "cuda" for the CPU, see `cuda_on_cpu`.
        options: as for `emulate.emulated`.

    Raises:
        WorkloadError: no such file.
        MissingDependency, EnvironmentProblem: no emulator here, or no pytest.
    """
    path = Path(target.partition("::")[0])
    if not path.is_file():
        raise WorkloadError(f"no file {path}")
    # before the program defines kernels: a conftest that turns the interpreter on without a GPU is overruled
    env.set_default("TRITON_INTERPRET", "0")
    with emulate.emulated(arch, **options) as driver, cuda_on_cpu() if cuda_is_cpu else contextlib.nullcontext():
        problem = _run_tests(target, arguments) if _is_test_file(target) else _run_script(path, arguments)
    if not problem and not driver.runs:
        problem = "no Triton kernel was launched, so nothing ran as machine code"
    return ProgramResult(
        header=_header(),
        arch=arch,
        tinygrad=emulate.version(),
        target=provenance.shown_path(target),
        checked=bool(options.get("check")),
        passed=not problem,
        reason=problem,
        work=_work(driver, 0),
    )


def _run_script(path: Path, arguments: Sequence[str]) -> str:
    """Run a script; returns the fault, or an empty string."""
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            return f"the script ended with {end.code!r}"
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path.name}:{frames[-1].lineno}: " if frames else ""
        kind = "" if isinstance(error, WavecrestError) else f"{type(error).__name__}: "
        return f"{where}{kind}{error}"
    finally:
        sys.argv, sys.path[:] = argv, search
    return ""


def _run_tests(target: str, arguments: Sequence[str]) -> str:
    """Run a test file with pytest; returns the fault, or an empty string."""
    try:
        pytest = importlib.import_module("pytest")
    except ImportError:
        raise MissingDependency("pytest", f"running the tests in {target}", "pip install pytest") from None
    # xdist would run the tests in processes that have no emulator
    code = pytest.main([target, "-p", "no:cacheprovider", "-p", "no:xdist", *arguments])
    return "" if code == 0 else f"pytest ended with {pytest.ExitCode(code).name.lower().replace('_', ' ')}"


class _CudaOnCpu(torch.overrides.TorchFunctionMode):
    """Replaces the device "cuda" by "cpu" in the arguments of every torch function."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.cuda:
            return args[0]
        return function(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in (kwargs or {}).items()})


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Take device="cuda" for the CPU in torch functions, and let `torch.cuda.synchronize()` do nothing.

    No more of torch.cuda is mapped: `is_available` stays False, and events and streams stay errors.
    """
    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    try:
        with _CudaOnCpu():
            yield
    finally:
        torch.cuda.synchronize = synchronize

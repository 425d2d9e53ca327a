"""TunableOp's solutions, found offline, as data of the plan: which kernel of rocBLAS or hipBLASLt runs each GEMM.

TunableOp times every solution of both libraries when it meets a shape, for seconds, and in a process that serves. Here
the model's shapes are written down, a process of its own tunes them with a numerical check, and the plan carries the
file that this gives. Serving reads it and tunes nothing. A solution is a number in one version of a library, so the
step is refused wherever a version differs.

On CUDA TunableOp has PyTorch's own solution alone: the step finds nothing there, and its file can still be applied. It
was not run on an AMD GPU: this project has none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.cuda import tunable
from torch.utils._python_dispatch import TorchDispatchMode

from wavecrest import env
from wavecrest.backends import blas
from wavecrest.dispatch.tuned import tunable_op
from wavecrest.errors import PlanError, StepRefused, TableError
from wavecrest.optimizer.steps.around import Around
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import TunedFile
from wavecrest.records import decode

if TYPE_CHECKING:
    from torch import nn

# part of the GEMMs' time that better solutions save, by guess; the trial decides
TUNED_GAIN = 0.05
# seconds that tuning may take: a shape takes some, and tuning that does not end was reported (pytorch/pytorch#190433)
MOST_SECONDS = 600.0
# part of the seconds left for trials that it may take
SHARE = 0.5
# solutions that TunableOp writes; others would be names that this version knows nothing of
_SOLUTION = re.compile(r"Default|Gemm_(Rocblas|Hipblaslt)_-?\d{1,10}", re.ASCII)
_OPERATORS = ("GemmTunableOp", "GemmAndBiasTunableOp", "GemmStridedBatchedTunableOp")


class Operand(NamedTuple):
    """A matrix as a GEMM was given it."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


# an operation of aten and its operands
Product = tuple[str, tuple[Operand, ...]]


class TunableOp(Step):
    """Solutions of TunableOp for the model's GEMMs, from a file that the plan holds."""

    id = "tunable_op"
    title = "GEMM → tuned solutions"
    level = 4
    phase = "library"
    group = "tunable_op"
    params_type = TunedFile
    # they change the shapes
    tried_after = ("fuse_qkv", "fuse_gate_up", "fuse_parallel", "route_linear", "choose_linear")

    def check_params(self, params: dict[str, Any]) -> list[str]:
        """The file must be one that TunableOp writes, with solutions of the two libraries and nothing else."""
        found = super().check_params(params)
        problem = problem_of(params)
        if problem:
            raise PlanError(f"parameters of step {self.id}: {problem}")
        return found

    def find(self, context: StepContext) -> Found:
        """The GEMMs for which tuning, in a process of its own, finds another solution than PyTorch's."""
        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="TunableOp is for GPUs")
        if torch.version.hip is None:
            return Found((), note="on CUDA TunableOp has PyTorch's own solution alone")
        if tunable.is_enabled():
            raise StepRefused("TunableOp is enabled for all of PyTorch's GEMMs here: unset PYTORCH_TUNABLEOP_ENABLED")
        products = products_of(context)
        if not products:
            return Found((), note="the model calls no GEMM of PyTorch's")
        params = tuned(products, context.device.torch_name, min(MOST_SECONDS, SHARE * context.seconds_left))
        better = [row for row in params["rows"] if row[2] != "Default"]
        if not better:
            return Found((), note=f"PyTorch's own solution is the fastest for {len(params['rows'])} GEMMs")
        note = f"another solution than PyTorch's for {len(better)} of {len(params['rows'])} GEMMs"
        return Found(tuple(f"{row[0]} {row[1]}" for row in better), params, note)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """TunableOp compares with no time of PyTorch's that it writes down; by guess."""
        share = context.share("gemm")
        return Prediction.of_saved(TUNED_GAIN * share, f"{found.note}; GEMM is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Read the file, and enable TunableOp, without tuning, for the length of each call.

        Raises:
            StepRefused: another library version or GPU than the file's, or TunableOp does not take it.
        """
        read(params)
        # outside of the compiled call, whose code runs PyTorch's GEMMs like any other
        if model._compiled_call_impl is not None:
            model._compiled_call_impl = _enabled(model._compiled_call_impl)
        else:
            model.forward = _Tuned(model)
        return model


class _Tuned(Around):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _enabled(self.run)(*args, **kwargs)


def _enabled(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        enabled = tunable.is_enabled()
        try:
            tunable.enable(True)
            # it stays off: a process that ends with tuning on writes what it knows into a file
            tunable.tuning_enable(False)
            return call(*args, **kwargs)
        finally:
            tunable.enable(enabled)

    return run


def text_of(params: dict[str, Any]) -> str:
    """The file, as TunableOp reads it."""
    lines = [f"Validator,{name},{value}" for name, value in params["validators"]]
    return "\n".join([*lines, *(",".join(row) for row in params["rows"])]) + "\n"


def problem_of(params: dict[str, Any]) -> str:
    """The fault of parameters that have the right types; "" if they have no fault."""
    try:
        found = tunable_op.parse(text_of(params), "the file")
    except TableError as problem:
        return str(problem)
    if [list(pair) for pair in found.validators] != [list(pair) for pair in params["validators"]]:
        return "a validator is no name and value"
    if len(found.rows) != len(params["rows"]):
        return "a row is not one line"
    keys = [(row.operator, row.sizes) for row in found.rows]
    if len(set(keys)) != len(keys) or len(dict(found.validators)) != len(found.validators):
        return "a GEMM or a validator is there twice"
    for row in found.rows:
        if row.kind not in _OPERATORS or not _SOLUTION.fullmatch(row.solution):
            return f"{row.operator} with {row.solution} is not what TunableOp writes"
    return ""


def read(params: dict[str, Any]) -> None:
    """Give the file to TunableOp in this process.

    Raises:
        StepRefused: it is for other versions or another GPU, or TunableOp does not take it.
    """
    if not torch.cuda.is_available():
        raise StepRefused("TunableOp is for GPUs")
    if tunable.is_enabled():
        raise StepRefused("TunableOp is enabled for all of PyTorch's GEMMs here: unset PYTORCH_TUNABLEOP_ENABLED")
    # PyTorch annotates a tuple of pairs as one pair
    pairs: Any = tunable.get_validators()
    here, theirs = dict(pairs), dict(params["validators"])
    other = [
        f"{name} {theirs.get(name, 'none')} → {here.get(name, 'none')}"
        for name in sorted(here.keys() | theirs.keys())
        if here.get(name) != theirs.get(name)
    ]
    if other:
        raise StepRefused(f"its solutions are numbers of other versions ({'; '.join(other)}): tune again here")
    if not env.get("PYTORCH_TUNABLEOP_FILENAME") and not blas.keeps_solutions():
        # at its first use TunableOp reads a file of that name, by default one in the working directory
        tunable.set_filename(os.devnull, insert_device_ordinal=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.csv"
        path.write_text(text_of(params), encoding="utf-8")
        if not tunable.read_file(str(path)):
            raise StepRefused("TunableOp does not take the file that the plan holds")


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The GEMMs of PyTorch's that run inside, each once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Product, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm") and not kwargs:
            given = tuple(
                Operand(str(one.dtype).removeprefix("torch."), tuple(one.shape), tuple(one.stride())) for one in args
            )
            self.found[name, given] = None
        return func(*args, **(kwargs or {}))


def products_of(context: StepContext) -> list[Product]:
    """The GEMMs of the model with the steps kept so far, of all buckets."""
    assert context.model is not None
    with torch.no_grad(), _Products() as seen:
        for inputs in context.workload.buckets.values():
            inputs.clone().call(context.model)
    return list(seen.found)


def tuned(products: list[Product], device: str, seconds: float) -> dict[str, Any]:
    """The parameters of the step: what TunableOp finds in a process of its own.

    Raises:
        StepRefused: the process died, took too long, or wrote what is no such file.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, target = Path(folder) / "task.json", Path(folder) / "found.json"
        task.write_text(json.dumps({"products": products, "device": device}), encoding="utf-8")
        command = [*env.python_command("wavecrest.optimizer.tuning_side"), str(task), str(target)]
        try:
            done = subprocess.run(
                command, env=env.python_child({"PYTORCH_TUNABLEOP_ENABLED": None, "PYTORCH_TUNABLEOP_TUNING": None}),
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise StepRefused(f"tuning {len(products)} GEMMs took more than {seconds:.0f} s") from None
        if done.returncode != 0 or not target.is_file():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise StepRefused(f"TunableOp's process ended with code {done.returncode}: {last}")
        try:
            params = decode.json_of(target.read_bytes())
            TunableOp().check_params(params)
        except (ValueError, PlanError) as problem:
            raise StepRefused(f"TunableOp wrote what this version does not know: {problem}") from None
    return dict(params)

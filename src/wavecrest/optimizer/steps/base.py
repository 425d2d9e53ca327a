"""The base class of steps, and the copy of a model that steps work on.

A step never touches the user's model. It works on a structural copy: new module objects that share every parameter
and buffer with the original, so that base and candidate live side by side at the cost of the new tensors alone, and a
step that raises or an interrupted run leaves the original exactly as it was.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from wavecrest.errors import PlanError, StepRefused
from wavecrest.optimizer.steps.params import Params
from wavecrest.records import files

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.hardware import Device
    from wavecrest.measure.timing import Clock
    from wavecrest.measure.workload import Workload
    from wavecrest.records import BucketProfile

# when an applied step takes effect: surgery on the module tree, settings around the call, compilation, capture
Phase = Literal["environment", "surgery", "setting", "compile", "capture"]
PHASES: tuple[Phase, ...] = ("environment", "surgery", "setting", "compile", "capture")


@dataclass(frozen=True, slots=True)
class Found:
    """The sites that a step would change. Without sites there is nothing to do, and `note` has the reason.

    `params` is JSON and is all that `apply` needs to do the same again from a plan file.
    """

    sites: tuple[str, ...]
    params: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected speed-up (1.0: none) and what it rests on; evidence of kind "model", never a measurement."""

    ratio: float | None
    basis: str


@dataclass(slots=True)
class StepContext:
    """The inputs of a step: the workload, the device, and the profile of the model with the steps kept so far."""

    workload: Workload
    device: Device
    profile: list[BucketProfile] = field(default_factory=list)
    # the structural copy with the kept surgery applied: what find() inspects
    model: nn.Module | None = None
    precision: str | None = None
    processes: int = 3
    # whether a compile step is in force
    compiled: bool = False
    # seconds of the budget that are left, and that the longest compilation so far took
    seconds_left: float = float("inf")
    compile_seconds: float = 0.0
    # where time comes from
    now: Clock = time.perf_counter

    def share(self, *categories: str) -> float:
        """Mean share of the profiled time, over buckets, that these categories take (0 to 1)."""
        if not self.profile:
            return 0.0
        shares = [sum(row.share for row in bucket.categories if row.category in categories) for bucket in self.profile]
        return sum(shares) / len(shares)

    def idle_share(self) -> float:
        """Mean share of wall time in which the GPU had no work (0 on the CPU, where it is not measured)."""
        idle = [bucket.idle_ms / bucket.wall_ms for bucket in self.profile if bucket.idle_ms and bucket.wall_ms]
        return sum(idle) / len(self.profile) if idle else 0.0


class Step:
    """One step of the ladder. Subclasses set the class attributes and implement find, predict and apply.

    Attributes:
        id: stable name used in plans, such as "fuse_qkv" or "compile:default".
        title: what the table shows.
        level: 1 environment, 2 compile, 3 surgery, 4 kernels, 5 capture and quantisation.
        phase: when its effect takes place in the assembled model.
        group: steps of one group exclude each other; a kept one replaces the one before.
        params_type: schema of the parameters that `apply` takes; None: a plan may hold any.
    """

    id: str
    title: str
    level: int
    phase: Phase = "surgery"
    group: str | None = None
    params_type: type[Params] | None = None

    def check_params(self, params: dict[str, Any]) -> list[str]:
        """The paths of the modules that parameters from a plan file name.

        Raises:
            PlanError: a parameter is unknown, missing, of another type or not one that this step takes. A step of
                another package without `params_type` checks its own.
        """
        if self.params_type is None:
            return []
        try:
            return self.params_type.model_validate(params).modules()
        except pydantic.ValidationError as problem:
            raise PlanError(f"parameters of step {self.id}: {files.first_problem(problem)}") from None

    def find(self, context: StepContext) -> Found:
        """Find the sites that this step would change.

        Raises:
            StepRefused: the step must not run here; the message is its verdict's reason.
        """
        raise NotImplementedError

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The expected speed-up, before anything is changed."""
        raise NotImplementedError

    def excludes(self, other: Step) -> bool:
        """Whether keeping this step takes `other` (kept before) out of force."""
        return self.group is not None and self.group == other.group

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change `model` (always a private copy) and return the module to call.

        Raises:
            StepRefused: the model does not fit `params`.
        """
        raise NotImplementedError


def structural_copy(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares parameters, buffers and other tensors with the original.

    Raises:
        StepRefused: the model holds something that cannot be copied (a lock, an open file, a live generator).
    """
    from wavecrest.measure.tree import iter_tensors

    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    for module in model.modules():
        plain = {
            name: value
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules") and not callable(value)
        }
        for _, tensor in iter_tensors("", plain, set()):
            memo[id(tensor)] = tensor
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise StepRefused(f"the model cannot be copied ({type(error).__name__}: {error})") from error


def set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)

"""The base class of steps, and the copy of a model that steps work on.

A step never touches the user's model. It works on a structural copy: new module objects that share every parameter
and buffer with the original, so that base and candidate live side by side at the cost of the new tensors alone, and a
step that raises or an interrupted run leaves the original exactly as it was.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from wavecrest.errors import PlanError, StepRefused
from wavecrest.optimizer.steps.params import Params
from wavecrest.profile.causes import sdpa_backends
from wavecrest.records import files

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.hardware import Device
    from wavecrest.measure.timing import Clock
    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.children import Starter
    from wavecrest.optimizer.options import Wish
    from wavecrest.records import BucketProfile, CauseKind, Ceilings

# no prediction promises that more of a call's time goes
MOST_SAVED = 0.9
# when an applied step takes effect: other weights, surgery on the module tree, settings around the call, compilation,
# choices of a GEMM library around the call, capture
Phase = Literal["environment", "weights", "surgery", "setting", "compile", "library", "capture"]
PHASES: tuple[Phase, ...] = ("environment", "weights", "surgery", "setting", "compile", "library", "capture")
# the phases that change the module tree, which steps look at for their sites
TREE: tuple[Phase, ...] = ("weights", "surgery")
# the phases that record what a model does, without its values
TRACED: tuple[Phase, ...] = ("compile", "capture")


@dataclass(frozen=True, slots=True)
class Found:
    """The sites that a step would change. Without sites there is nothing to do, and `note` has the reason.

    `params` is JSON and is all that `apply` needs to do the same again from a plan file. `saved` is the share of the
    sites' own time that was saved where the step tried them alone, `saved_ms` the milliseconds in all buckets together;
    None where it did not. `rows` are those of each site's input, where the step saw them. `compiles`: its trial
    compiles the model, though that is not the step's phase; `title` is what the table shows then. `parts`: of a step
    that joins others, what each of them found. `captured`: parameters of the graph capture that is tried with the step,
    and kept with it.
    """

    sites: tuple[str, ...]
    params: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    saved: float | None = None
    saved_ms: float | None = None
    rows: tuple[int, ...] = ()
    compiles: bool = False
    title: str = ""
    parts: tuple[Found, ...] = ()
    captured: dict[str, Any] | None = None


# a step's id and the ratio it was measured at; None: it was not tried
Tie = tuple[str, float | None]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected speed-up (1.0: none) and what it rests on; evidence of kind "model", never a measurement.

    `ratio` None: no model is trusted; the planner then expects little of the step, and tries it late.
    """

    ratio: float | None
    basis: str

    @classmethod
    def of_saved(cls, saved: float, basis: str) -> Prediction:
        """The prediction that this share of a call's time goes (0 to 1), which nothing brings above MOST_SAVED."""
        return cls(1 / (1 - min(max(saved, 0.0), MOST_SAVED)), basis)


@dataclass(slots=True)
class StepContext:
    """The inputs of a step: the workload, the device, and the profile of the model with the steps kept so far."""

    workload: Workload
    device: Device
    profile: list[BucketProfile] = field(default_factory=list)
    # the structural copy with the kept surgery applied: what find() inspects
    model: nn.Module | None = None
    # what steps have found out about it for one another; emptied when it is let go
    shared: dict[object, Any] = field(default_factory=dict)
    precision: str | None = None
    quantize: Wish | None = None
    processes: int = 3
    # of the run's child processes; None: they have this process's variables as they are
    starter: Starter | None = None
    # whether a compile step is in force, and whether calls are replays of captured graphs
    compiled: bool = False
    captured: bool = False
    # whether it is the capture that compiles, by the default preset
    compiled_by_capture: bool = False
    # whether a capture of the model as it is was refused, and nothing has been compiled
    uncapturable: bool = False
    # whether layer norms of the model with the steps kept so far are kernels of wavecrest; whether a step in force made
    # all of them, so that a compilation can do without it; and while steps look, the model without that step
    own_layer_norms: bool = False
    norms_can_go: bool = False
    without_norms: nn.Module | None = None
    # steps that tied by a gain and fit those in force, the largest first; then those that could not be tried without
    # one that lost by a little, and that one
    ties: Sequence[Tie] = ()
    # seconds of the budget that are left for trials of steps
    seconds_left: float = float("inf")
    # the bandwidth and FLOP/s that the device reaches; None where they were not measured
    ceilings: Ceilings | None = None
    # where time comes from
    now: Clock = time.perf_counter

    def share(self, *categories: str) -> float:
        """Mean share of a call's time, over buckets, that these categories take (0 to 1).

        On a GPU the time in which the device had no work is part of the call, so that all categories together take
        what `idle_share` leaves.
        """
        if not self.profile:
            return 0.0
        shares = [
            _busy(bucket) * sum(row.share for row in bucket.categories if row.category in categories)
            for bucket in self.profile
        ]
        return sum(shares) / len(shares)

    def math_share(self) -> float:
        """Mean share of a call's time, over buckets, of attention that SDPA runs on its math path (0 to 1).

        From the ops: the kernels of a replayed graph do not say which of them are attention's.
        """
        shares = [
            _busy(bucket) * sum(op.share for op in bucket.ops if op.category == "attention")
            for bucket in self.profile
            if sdpa_backends(bucket)["math"]
        ]
        return sum(shares) / len(self.profile) if shares else 0.0

    def idle_share(self) -> float:
        """`idle_share` of the model with the steps kept so far."""
        return idle_share(self.profile)


def idle_share(profile: Sequence[BucketProfile]) -> float:
    """Mean share of wall time, over buckets, in which the GPU had no work (0 on the CPU)."""
    idle = [1 - _busy(bucket) for bucket in profile]
    return sum(idle) / len(idle) if idle else 0.0


def _busy(bucket: BucketProfile) -> float:
    if not bucket.idle_ms or not bucket.wall_ms:
        return 1.0
    return 1 - min(1.0, bucket.idle_ms / bucket.wall_ms)


class Step:
    """One step of the ladder. Subclasses set the class attributes and implement find, predict and apply.

    Attributes:
        id: stable name used in plans, such as "fuse_qkv" or "compile:default".
        title: what the table shows.
        level: 1 environment, 2 compile, 3 surgery, 4 kernels, 5 capture and quantisation.
        phase: when its effect takes place in the assembled model.
        group: steps of one group exclude each other; a kept one replaces the one before.
        params_type: schema of the parameters that `apply` takes; None: a plan may hold any.
        tried_after: ids of steps that are tried before this one where both apply, as they change its sites.
        needs: ids of steps without which it finds no sites, as those are the first part of its change.
        searches: it searches for minutes, so it is tried last, once, on the final shape of the model.
        cures: kinds of causes that it removes; a diagnosis that names one has the step tried next.
        joins: it applies steps that tied together; its sites depend on `StepContext.ties` too.
        in_graphs: it looks for its sites where a capture is in force.
        eager_only: sizes depend on values in what it makes, so that it excludes compilation and capture, and they it.
    """

    id: str
    title: str
    level: int
    phase: Phase = "surgery"
    group: str | None = None
    params_type: type[Params] | None = None
    tried_after: Sequence[str] = ()
    needs: Sequence[str] = ()
    searches: bool = False
    cures: Sequence[CauseKind] = ()
    joins: bool = False
    in_graphs: bool = False
    eager_only: bool = False

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

    def looks_long(self, device: Device) -> bool:
        """Whether looking for its sites takes seconds, as it traces the model or compiles kernels.

        It looks only where there is time for a trial too.
        """
        return False

    def hope(self, context: StepContext) -> Prediction:
        """The expected speed-up if every site that it looks for is there, by the profile; of a step that looks long."""
        raise NotImplementedError

    def excludes(self, other: Step) -> bool:
        """Whether keeping this step takes `other` (kept before) out of force."""
        return self.clashes(other) or (self.group is not None and self.group == other.group)

    def instead_of(self, context: StepContext) -> tuple[str, ...]:
        """The ids of steps in force that are left out where this one is tried, as it does better what they do."""
        return ()

    def clashes(self, other: Step) -> bool:
        """Whether one of the two is `eager_only`, and the other records what a model does."""
        return any(one.eager_only and two.phase in TRACED for one, two in ((self, other), (other, self)))

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
        raise StepRefused(
            f"the model cannot be copied ({type(error).__name__}: {error}), and steps work on a copy; keep locks, "
            "files and generators outside of its modules"
        ) from error


def set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def apply_step(model: nn.Module, step: Step, params: dict[str, Any]) -> nn.Module:
    """The model with one step applied; `model`, a private copy, is changed.

    Raises:
        PlanError: the step does not take its parameters.
        StepRefused: it does not fit this model.
    """
    for path in step.check_params(params):
        if not _has_module(model, path):
            raise StepRefused(f"step {step.id} names the module {path!r}, which the model does not have")
    return step.apply(model, params)


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True

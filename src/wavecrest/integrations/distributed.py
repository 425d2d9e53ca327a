"""Models over several GPUs of a job: tensor parallelism on local shards, and decisions that all ranks share.

After `parallelize` a rank holds an ordinary model with smaller layers: attention heads and MLP columns are divided, and
two sums over the ranks a block put the results together. All that works on an ordinary model (ops, steps, plans) works
on the shard. Ranks agree because rank 0 decides and the others apply what it decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wavecrest.errors import InvalidArgument, RankFailed, StepRefused, WavecrestError
from wavecrest.integrations._shards import (
    GatheredLinear,
    RowParallel,
    gather_local,
    is_divided,
    parallelize,
    shards,
)
from wavecrest.measure.tree import is_object, iter_tensors
from wavecrest.measure.workload import Inputs, Workload, from_example
from wavecrest.optimizer import api
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.gate.leaves import Answer
from wavecrest.optimizer.gate.reference import Reference
from wavecrest.optimizer.gate.snapshot import Snapshot, write
from wavecrest.optimizer.options import Options
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.progress import receiver

__all__ = [
    "ParallelResult",
    "RowParallel",
    "GatheredLinear",
    "apply",
    "gather_local",
    "is_divided",
    "on_rank_zero",
    "optimize",
    "parallelize",
]

logger = logging.getLogger("wavecrest.integrations.distributed")

R = TypeVar("R")

# ranks wait for rank 0 while it optimizes or tunes
PATIENCE = timedelta(hours=24)
# rules of the gate about answers; those about threads, memory and gradients are held on rank 0's shard
RULES = frozenset(
    ("leaves", "structure", "type", "accuracy", "elements", "top-1", "dependence", "variation", "padding", "edges")
)
# bytes up to which whole numbers inside of a cache, such as the position to write at, are sent from rank 0
MOST_STATE = 1 << 16
# in messages the original, the optimized model, and the original in higher precision
ORIGINAL, OPTIMIZED, REFERENCE = range(3)


class _Job:
    """Messages between the ranks by gloo, which can wait for hours and needs no GPU."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise InvalidArgument(
                "the job has no process group: start with torchrun and call torch.distributed.init_process_group first"
            )
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def tell(self, message: Any = None) -> Any:
        """Rank 0's message, on every rank."""
        box = [message]
        with _ended():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def lines(self, line: str) -> list[str]:
        """A line of each rank, on every rank."""
        found = [""] * self.ranks
        with _ended():
            dist.all_gather_object(found, line, group=self.group)
        return found

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if one has an error: its own, or which other rank has which."""
        lines = self.lines("" if error is None else _line(error))
        if error is not None:
            raise error
        failed = [(rank, line) for rank, line in enumerate(lines) if line]
        if failed:
            raise RankFailed(f"rank {failed[0][0]} failed: {failed[0][1]}")


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or ["(no message)"])[0]
    return f"{type(error).__name__}: {text}"


@contextmanager
def _ended() -> Iterator[None]:
    """A connection that breaks while this rank waits is a rank that ended."""
    try:
        yield
    except (RuntimeError, dist.DistBackendError) as error:
        if isinstance(error, WavecrestError):
            raise
        raise RankFailed(f"another rank ended while rank {dist.get_rank()} waited for it ({_line(error)})") from error


def on_rank_zero(function: Callable[[], R]) -> R:
    """Run a function on rank 0 and return its result on every rank, such as a run of `wavecrest.tune.session.tune`.

    Rows that it tuned are in the user's database; the other ranks of a host read them when their decisions are made, so
    their earlier decisions are dropped here.

    Args:
        function: its result can be pickled.

    Raises:
        RankFailed: on the other ranks, with rank 0's error; rank 0 raises its own.
    """
    from wavecrest.dispatch import registry

    job = _Job()
    result, error = None, None
    if job.rank == 0:
        try:
            result = function()
        except Exception as raised:
            error = raised
    job.agree(error)
    answer: R = job.tell(result)
    if job.rank:
        registry.reread()
    return answer


@dataclass(frozen=True, slots=True)
class ParallelResult:
    """Result of `optimize` on one rank.

    Attributes:
        model: the rank's shard with the plan applied; the parallel model as it was where `refused` says why.
        plan: rank 0's, the same on every rank.
        refused: why the plan is not in force, or "".
        local: rank 0's `wavecrest.optimizer.api.OptimizeResult` with report and record; None on other ranks.
    """

    model: nn.Module
    plan: Plan
    refused: str
    local: api.OptimizeResult | None


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    reset: Callable[[str], None] | None = None,
    progress: Any = None,
    **options: Any,
) -> ParallelResult:
    """Optimize a model that `parallelize` divided; every rank of the job calls it alike.

    Rank 0 runs `wavecrest.optimize` on its shard without communication, so its speed-ups are those of a rank's own
    work. The others wait, then all ranks apply the same plan, and rank 0 holds the answers of the whole parallel model
    to the accuracy gate. A plan that fails there on any rank is in force on none.

    Args:
        model: of `parallelize`, in eval mode; it is not changed.
        example_inputs: as for `wavecrest.optimize`, the same on every rank. An object among them, such as a key-value
            cache, is each rank's own, and holds the rank's heads.
        reset: as `Workload.reset`: called with the bucket's name before a call, to put a cache back.
        progress: as for `wavecrest.optimize`; rank 0 alone shows it.
        options: fields of `wavecrest.optimizer.api.Options`, and `out` and `bundle` of `wavecrest.optimize`.

    Returns:
        This rank's result.

    Raises:
        RankFailed: another rank failed or ended.
        InvalidArgument: the model has no layers that `parallelize` made, or an option is wrong.
    """
    if not is_divided(model):
        raise InvalidArgument("distributed.optimize takes a model that distributed.parallelize divided")
    if options.get("quantize") is not None or options.get("quality") is not None:
        raise InvalidArgument("quantize is for a model in one process: the answers of a shard alone have no quality")
    job = _Job()
    local, error = None, None
    if job.rank == 0:
        try:
            local = _optimize_shard(model, example_inputs, reset, progress, options)
        except Exception as raised:
            error = raised
    job.agree(error)
    plan = Plan.of_value(job.tell(local.plan.model_dump(mode="json") if local else None), "of rank 0")
    return _followed(job, model, plan, example_inputs, reset, local)


def apply(
    model: nn.Module,
    plan: Plan | str | Path,
    example_inputs: Any,
    *,
    reset: Callable[[str], None] | None = None,
) -> ParallelResult:
    """Put a plan that `optimize` wrote for a divided model in force, on every rank; nothing is measured.

    Rank 0 holds the answers of the whole parallel model to the accuracy gate, as `optimize` does.

    Args:
        model: of `parallelize`, over as many ranks as the plan was made for; it is not changed.
        plan: the plan, or its file, which rank 0 reads.
        example_inputs: as for `optimize`, the same on every rank.
        reset: as for `optimize`.

    Returns:
        This rank's result, without `local`.

    Raises:
        RankFailed: another rank failed or ended.
        InvalidArgument: the model has no layers that `parallelize` made.
        PlanError: the file is no plan, or a damaged one.
        PlanMismatch: the plan is for another architecture or shard.
    """
    if not is_divided(model):
        raise InvalidArgument("distributed.apply takes a model that distributed.parallelize divided")
    job = _Job()
    document, error = None, None
    if job.rank == 0:
        try:
            read = plan if isinstance(plan, Plan) else Plan.load(plan)
            document = read.model_dump(mode="json")
        except Exception as raised:
            error = raised
    job.agree(error)
    return _followed(job, model, Plan.of_value(job.tell(document), "of rank 0"), example_inputs, reset, None)


def _followed(
    job: _Job,
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    reset: Callable[[str], None] | None,
    local: api.OptimizeResult | None,
) -> ParallelResult:
    """The plan in force on every rank, or on none where the whole model's answers break the gate."""
    optimized, error = model, None
    try:
        with gather_local(model):
            optimized = plan.apply(model, inputs)
        for ours, theirs in zip(shards(optimized), shards(model), strict=True):
            ours.group = theirs.group
    except Exception as raised:
        error = raised
    job.agree(error)
    refused = _check(job, model, optimized, inputs, reset)
    if refused:
        logger.warning("the plan is not in force: %s", refused)
    return ParallelResult(model if refused else optimized, plan, refused, local)


def _optimize_shard(
    model: nn.Module, inputs: Any, reset: Callable[[str], None] | None, progress: Any, options: Mapping[str, Any]
) -> api.OptimizeResult:
    files: dict[str, Any] = {name: Path(options[name]) for name in ("out", "bundle") if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in ("out", "bundle")}
    # a step in other processes would have to start other ranks
    rest["skip"] = tuple({*rest.get("skip", ()), "environment"})
    workload = from_example(model, inputs)
    workload.reset = reset
    with gather_local(model):
        return api.run(workload, Options(**rest), progress=receiver(progress), **files)


def _check(
    job: _Job,
    model: nn.Module,
    optimized: nn.Module,
    inputs: Any,
    reset: Callable[[str], None] | None = None,
) -> str:
    """Why answers of the whole parallel model break the gate, or "": rank 0 calls, the others answer its calls."""
    workload = from_example(model, inputs)
    workload.reset = reset
    own = _Own(workload)
    reference = _Reference(job, workload, own)
    if job.rank:
        _answer(job, (model, optimized), reference, own)
        return str(job.tell())
    problem = ""
    try:
        gate = Gate.prepare(_called(job, model, workload, own), rules=RULES, reference=reference)
        problem = failures(gate.check(_Caller(job, OPTIMIZED, optimized, own)))
    except StepRefused as error:
        problem = str(error)
    finally:
        job.tell(None)
    job.tell(problem)
    return problem


def _called(job: _Job, model: nn.Module, workload: Workload, own: _Own) -> Workload:
    caller = _Caller(job, ORIGINAL, model, own)
    return Workload(caller, workload.buckets, name=workload.name, reset=workload.reset)


class _Place(NamedTuple):
    """In a message in place of an object of the inputs: its number, and the whole numbers that it holds on rank 0."""

    number: int
    state: dict[str, Tensor]


class _Held(NamedTuple):
    """In a message a tensor of a GPU: values of the host's memory for the receiver's own GPU."""

    values: Tensor


class _Own:
    """Objects among the example inputs, such as key-value caches: each rank has its own, with its own heads.

    A message names them by number. The state of rank 0's is what the gate makes it; the others' is put back before
    every call, with rank 0's whole numbers (positions, lengths) in it.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.objects: list[Any] = []
        for inputs in workload.buckets.values():
            for leaf in pytree.tree_leaves((inputs.args, dict(inputs.kwargs))):
                if is_object(leaf) and not any(leaf is one for one in self.objects):
                    self.objects.append(leaf)
        self.kept: Snapshot | None = None

    def sent(self, value: Any) -> Any:
        """Arguments as a message: nothing in it lies on a GPU."""

        def leaf(one: Any) -> Any:
            if isinstance(one, Tensor):
                return _Held(one.cpu()) if one.is_cuda else one
            if not is_object(one):
                return one
            for number, mine in enumerate(self.objects):
                if one is mine:
                    return _Place(number, {path: tensor.cpu() for path, tensor in _whole_numbers(one)})
            raise InvalidArgument(f"a {type(one).__name__} that is not of the example inputs cannot go to other ranks")

        return pytree.tree_map(leaf, value)

    def received(self, value: Any) -> Any:
        """The arguments of a message on this rank."""
        if self.kept is None:
            if self.workload.reset is not None:
                for bucket in self.workload.buckets:
                    self.workload.reset(bucket)
            self.kept = Snapshot((f"{number}", one) for number, one in enumerate(self.objects))
        self.kept.restore()

        def leaf(one: Any) -> Any:
            if isinstance(one, _Held):
                return one.values.to(torch.accelerator.current_device_index())
            if not isinstance(one, _Place):
                return one
            mine = self.objects[one.number]
            for path, tensor in _whole_numbers(mine):
                write(tensor, one.state[path])
            return mine

        return pytree.tree_map(leaf, value, is_leaf=lambda one: isinstance(one, (_Held, _Place)))

    def restore(self) -> None:
        """Put the objects back as they were before the calls."""
        if self.kept is not None:
            self.kept.restore()


def _whole_numbers(value: Any) -> Iterator[tuple[str, Tensor]]:
    for path, tensor in iter_tensors("", value, set()):
        if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.nbytes <= MOST_STATE:
            yield path, tensor


class _Caller(nn.Module):
    """A model on rank 0 whose calls all ranks make, with the same inputs."""

    def __init__(self, job: _Job, number: int, model: nn.Module, own: _Own) -> None:
        super().__init__()
        self.number, self.model = number, model
        # past nn.Module and copies: a job cannot be copied
        self._tell, self._own = job.tell, own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The answer of the parallel model."""
        self._tell((self.number, self._own.sent((args, kwargs))))
        with _ended():
            return self.model(*args, **kwargs)


class _Reference(Reference):
    """The parallel model in higher precision: a copy of each rank's shard, which all ranks call together.

    An error of one rank is no answer on all, with the same note. A rank may raise anywhere in the model, and another
    would wait for it in the next collective up to the job's timeout; so all ranks meet in front of each.
    """

    def __init__(self, job: _Job, workload: Workload, own: _Own) -> None:
        super().__init__(workload)
        self._job, self._own = job, own
        # of the call: the note of a rank that raised
        self._failed = ""
        self.note = self._agreed(self.note)
        if self.note:
            # what one rank has no memory for, none calls
            self._model = None
        for layer in shards(self._model) if self._model is not None else ():
            layer.linear.register_forward_hook(self._meet)

    def answer(self, inputs: Inputs) -> tuple[Answer, dict[str, Tensor]] | None:
        """As `Reference.answer`; rank 0 makes the others call too."""
        if self._model is None:
            return None
        if self._job.rank == 0:
            self._job.tell((REFERENCE, self._own.sent((inputs.args, dict(inputs.kwargs)))))
        before, self.note, self._failed = self.note, "", ""
        found = None
        try:
            found = super().answer(inputs)
        except Exception as error:
            self.note = f"inputs for the {self._high} copy: {_line(error)}; the original is the reference"
        # a rank that met another's error has heard of it, and the other goes no further
        self._failed = self._failed or self._agreed(self.note)
        self.note = self._failed or before
        if self._failed and self._failed != before:
            logger.warning("%s", self.note)
        return None if self._failed else found

    def _meet(self, *_: Any) -> None:
        self._failed = self._agreed("")
        if self._failed:
            raise RankFailed(self._failed)

    def _agreed(self, note: str) -> str:
        """The note of all ranks, or of the first that has one, with its number."""
        notes = self._job.lines(note)
        if len(set(notes)) == 1:
            return note
        return next(f"rank {rank}: {one}" for rank, one in enumerate(notes) if one)


def _answer(job: _Job, models: tuple[nn.Module, nn.Module], reference: Reference, own: _Own) -> None:
    while (message := job.tell()) is not None:
        number, sent = message
        args, kwargs = own.received(sent)
        if number == REFERENCE:
            reference.answer(Inputs(args, kwargs))
            continue
        # what a rank cannot capture, none can: rank 0 meets the same refusal and says so
        with torch.no_grad(), _ended(), suppress(StepRefused):
            models[number](*args, **kwargs)
    own.restore()

"""Kernels of users: `register_kernel` makes a function a backend of an op, which runs only calls it was checked for.

The check is made at the first decision that the kernel could take part in, for calls of one form (dtypes, dimensions
and options of the arguments that the function takes) on one architecture: `wavecrest.tune.contract` has the rules. Its
outcome is kept beside the user's database of measured rows, by the hash of the sources and the versions.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

import wavecrest.ops.common.interpreted as _interpreted
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import device_of, fields_of
from wavecrest.dispatch.custom_op import configured_operation_of
from wavecrest.dispatch.decision import Backend
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.dispatch.op import STATE, AnyOp
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, KernelRefused
from wavecrest.ops.packed import PackedWeight

F = TypeVar("F", bound=Callable[..., Any])

# below PyTorch (10): a kernel that is named by nothing decides nothing
PRIORITY = 5
OPT_IN = "is a kernel of a user's: it runs where a measured row, a pin or the caller names it"
# holds a kernel to the contract; imported when a check is due
CONTRACT = "wavecrest.tune.contract"
VERDICTS = "wavecrest.tune.verdicts"
# where tensors of the CPU run
CPU = "cpu"

# kernels that are being checked: they may run calls before they have a verdict
_under_check: ContextVar[frozenset[tuple[str, str]]] = ContextVar("under_check", default=frozenset())


@dataclass(eq=False)
class UserKernel:
    """A registered kernel.

    Attributes:
        op, name: the op, and the name of the backend.
        function: the user's.
        takes: the fields of the op's call that are handed to it, in the order of its parameters.
        options: parameters that are given by a configuration.
        archs, dtypes: architectures and dtypes (of the call's first tensor) that it is declared for; empty: any.
        reason: the user's own refusal, or None.
        configs: its configurations, the default first; empty: it takes none.
    """

    op: AnyOp
    name: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    options: tuple[str, ...]
    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    reason: Callable[..., str | None] | None
    reason_takes: tuple[str, ...]
    configs: tuple[Config, ...]
    verdicts: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _places: tuple[int, ...] = ()
    _keywords: tuple[tuple[str, int], ...] = ()
    # the fields that it is not handed, with their places and the values that they must have
    _others: tuple[tuple[str, int, Any], ...] = ()
    _in_graph: Callable[[Any, list[int]], list[Tensor]] | None = None

    def __post_init__(self) -> None:
        kind: type[tuple[Any, ...]] = self.op.call_type
        names = list(fields_of(kind))
        parameters = inspect.signature(self.function).parameters
        by_name = [one for one in self.takes if parameters[one].kind is inspect.Parameter.KEYWORD_ONLY]
        self._places = tuple(names.index(one) for one in self.takes if one not in by_name)
        self._keywords = tuple((one, names.index(one)) for one in by_name)
        usual = _usual_values(self.op)
        self._others = tuple((one, names.index(one), usual[one]) for one in names if one not in self.takes)

    def declined(self, call: Any) -> str | None:
        """Why the kernel is not for a call by its declaration, whatever a check says; None if it is."""
        place = place_of(device_of(call))
        if self.archs and place not in self.archs and not (place == CPU and _triton.interpreted):
            return f"is declared for {', '.join(self.archs)}, and this is {place}"
        first = _first(call)
        if self.dtypes and dtype_name(first) not in self.dtypes:
            return f"is declared for {', '.join(self.dtypes)}, not {dtype_name(first)}"
        if needs_grad(*[value for value in call if isinstance(value, Tensor)]):
            return "gives no gradients"
        for name, index, usual in self._others:
            value = call[index]
            if isinstance(value, Tensor):
                return f"takes no {name}"
            if value != usual:
                return f"takes no {name} other than {usual!r}"
        if any(isinstance(value, PackedWeight) for value in call):
            return "takes no packed weights"
        if self.reason is None:
            return None
        return self.reason(*[getattr(call, name) for name in self.reason_takes])

    def refuse(self, call: Any) -> str | None:
        """Why the kernel does not run a call: by its declaration, or by the check of calls of its form."""
        reason = self.declined(call)
        if reason is not None:
            return reason
        form = self.form(call)
        return _checked(self.op.name, self.name, device_of(call), form) or None

    def form(self, call: Any) -> tuple[tuple[Any, ...], ...]:
        """The form of a call, as `contract.form_of` gives it; plain enough for Dynamo to trace."""
        parts: tuple[tuple[Any, ...], ...] = ()
        for name in self.takes:
            value = getattr(call, name)
            if isinstance(value, Tensor):
                parts = (*parts, ("tensor", dtype_name(value), value.ndim))
            elif isinstance(value, torch.dtype):
                parts = (*parts, ("dtype", str(value).removeprefix("torch.")))
            elif isinstance(value, float):
                parts = (*parts, ("float",))
            else:
                parts = (*parts, ("value", value))
        return parts

    def run(self, call: Any, config: Config | None = None) -> Any:
        """Run one call."""
        if config is not None and config not in self.configs:
            raise InvalidArgument(f"{self.op.name}: {self.name} was not registered with {config!r}")
        options = {} if config is None else config.kwargs
        if self._in_graph is not None and torch.compiler.is_compiling():
            made = self._in_graph(call, [options[name] for name in self.options])
            return made[0] if len(made) == 1 else tuple(made)
        return self._called(call, options)

    def _called(self, call: Any, options: Mapping[str, int]) -> Any:
        named = {name: call[index] for name, index in self._keywords}
        return self.function(*[call[index] for index in self._places], **named, **options)

    def bind(self, call: Any, config: Config | None = None) -> Callable[[Any], Any]:
        """The function for calls with the signature of this one."""
        # a decision holds for a key, which need not know all that the user's refusal looks at, such as strides
        if self.declined(call) is not None:
            return partial(self.op.run, _next(self.op, call))
        if self._keywords or config is not None:
            return partial(self.run, config=config)
        function, places = self.function, self._places
        return lambda call: function(*[call[index] for index in places])

    def verdict(self, device: str, form: tuple[tuple[Any, ...], ...]) -> Any:
        """The verdict on calls of a form, from this process, from an earlier one, or from a check now.

        Returns:
            A `wavecrest.tune.contract.Verdict`.
        """
        place = place_of(device)
        if (place, form) not in self.verdicts:
            contract, kept = importlib.import_module(CONTRACT), importlib.import_module(VERDICTS)
            key = kept.key_of(self, place, form)
            found = kept.look_up(key)
            if found is None:
                with being_checked(self.op.name, self.name):
                    found = contract.verify(
                        self.op, self.name, form, self.takes, device, self.declined, self.configs
                    )  # fmt: skip
                kept.keep(key, found)
            self.verdicts[place, form] = found
        return self.verdicts[place, form]


# by op and name; registering again replaces
KERNELS: dict[tuple[str, str], UserKernel] = {}


@overload
def register_kernel(op: F) -> F: ...


@overload
def register_kernel(
    op: str,
    *,
    name: str | None = None,
    arch: str | Sequence[str] | None = None,
    dtypes: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    refuse: Callable[..., str | None] | None = None,
    configs: Iterable[Mapping[str, int]] | None = None,
) -> Callable[[F], F]: ...


def register_kernel(
    op: str | Callable[..., Any],
    *,
    name: str | None = None,
    arch: str | Sequence[str] | None = None,
    dtypes: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
    refuse: Callable[..., str | None] | None = None,
    configs: Iterable[Mapping[str, int]] | None = None,
) -> Any:
    """A decorator: the function becomes a backend of an op, once it is checked, where something names it.

    >>> @wavecrest.register_kernel("rms_norm", dtypes=("float32", "bfloat16"))
    ... def my_norm(x, weight, eps):
    ...     return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    The parameters of the function are arguments of the op by their names; those that it leaves out it need not know:
    calls that give them are refused. It returns what the op returns, in new memory. The op says all else: example
    arguments, shape key, oracle.

    No call runs it unchecked. The first decision that it could take part in holds it to the op's contract, for calls of
    that form on that device: values beside a float64 oracle in odd shapes and with gaps between rows and columns,
    results in memory filled with NaN, NaN and infinities, empty tensors, arguments unchanged, results that share no
    memory with them, the same bits twice. A kernel that fails is refused with the first failing case. What passes runs
    where a measured row, a pin or the caller names it, never by itself: it is checked to be right, not to be fast.

    A function of no op, `@wavecrest.register_kernel` without parentheses, has no oracle to be checked against: Inductor
    compiles it into one kernel at its first call.

    Args:
        op: the name of the op, see `wavecrest.registry.names()`; or a function of tensors that is of no op.
        name: of the backend, in rows and decisions; None: the function's.
        arch: architectures that it is for ("gfx942", "sm_90", "cpu"); None: any. Triton's interpreter counts as any.
        dtypes: of the call's first tensor; None: any.
        refuse: why a call is not for the kernel, or None: a function whose parameters are arguments of the op.
        configs: configurations for `wavecrest tune` to try, the default first: dictionaries of whole numbers, with
            the same names in each. The function takes them as parameters of these names.

    Returns:
        A decorator that returns the function as it is; of a function of no op, its compiled form.

    Raises:
        InvalidArgument: no such op, architecture or dtype; a parameter is neither an argument of the op nor part of the
            configurations; or the op has a backend of its own of that name.
    """
    if callable(op):
        if any(value is not None for value in (name, arch, dtypes, refuse, configs)):
            raise InvalidArgument(
                "register_kernel: name, arch, dtypes, refuse and configs are of a kernel of an op: name the op first, "
                'as in @wavecrest.register_kernel("rms_norm", arch="gfx942")'
            )
        return torch.compile(op)
    if op not in STATE.ops:
        importlib.import_module("wavecrest.ops")
    target = registry.get(op)
    archs = _names(arch)
    for one in archs:
        if one not in hardware.ARCHS and one != CPU:
            raise InvalidArgument(
                f"register_kernel: no architecture {one!r}; there are {CPU}, {', '.join(hardware.ARCHS)}"
            )
    given = (dtypes,) if isinstance(dtypes, (str, torch.dtype)) else tuple(dtypes or ())
    kinds = tuple(str(one).removeprefix("torch.") for one in given)
    for one in kinds:
        if not isinstance(getattr(torch, one, None), torch.dtype):
            raise InvalidArgument(
                f"register_kernel: there is no dtype {one!r}; name them as torch does, such as bfloat16"
            )
    space = _configs(configs)

    def register(function: F) -> F:
        own = str(name or getattr(function, "__name__", ""))
        if not own.isidentifier():
            raise InvalidArgument(f"register_kernel: {own!r} cannot be the name of a backend; give name=")
        options = tuple(space[0].kwargs) if space else ()
        takes = _parameters(target, function, options)
        reason_takes = () if refuse is None else _parameters(target, refuse, ())
        kernel = UserKernel(target, own, function, takes, options, archs, kinds, refuse, reason_takes, space)
        kernel._in_graph = _operation(kernel)
        target.attach_user(
            Backend(
                own,
                kernel.run,
                kernel.bind,
                kernel.refuse,
                lambda _call: OPT_IN,
                PRIORITY,
                (lambda _key: space[0]) if space else None,
                configs=space,
                user=True,
            )
        )
        KERNELS[op, own] = kernel
        return function

    return register


def check_kernel(
    op: str, name: str, *, dtype: str | torch.dtype = "float32", device: str | None = None, **changes: Any
) -> int:
    """Hold a backend of an op to the op's contract now, a user's kernel or any other.

    Args:
        op, name: the op, and the backend.
        dtype: of the example calls.
        device: as for `wavecrest.hardware.detect`: "cpu", "cuda" or "cuda:N"; None: the GPU if there is one.
        changes: other values of the example calls' arguments, such as `weight=None`: they make another form.

    Returns:
        The number of cases that ran.

    Raises:
        InvalidArgument: no such op, backend or dtype, or the op refuses the example.
        KernelRefused: the backend breaks a rule; the message has the first failing case. Or it takes no such calls.
    """
    if op not in STATE.ops:
        importlib.import_module("wavecrest.ops")
    target, kind = registry.get(op), getattr(torch, str(dtype).removeprefix("torch."), None)
    if name not in target.backends:
        raise InvalidArgument(f"{op} has no backend {name!r}; it has {', '.join(sorted(target.backends))}")
    if str(kind).removeprefix("torch.") not in target.study.example_dtypes:
        raise InvalidArgument(
            f"check_kernel: {op} has examples in {', '.join(target.study.example_dtypes)}, not {dtype}"
        )
    contract = importlib.import_module(CONTRACT)
    where = hardware.detect(device).torch_name
    call = contract.example(target, kind, where)._replace(**changes)
    target.check(call)
    kernel = KERNELS.get((op, name))
    with torch.no_grad():
        if kernel is None:
            fields = tuple(call._fields)
            form, refuse = contract.form_of(call, fields), target.backends[name].refuse
            verdict = contract.verify(target, name, form, fields, where, refuse)
        elif (reason := kernel.declined(call)) is not None:
            raise KernelRefused(f"{op}: backend {name} refuses: {reason}")
        else:
            verdict = kernel.verdict(where, kernel.form(call))
    if not verdict.passed:
        raise KernelRefused(f"{op}: backend {name} {_broken(op, verdict)}")
    return int(verdict.cases)


def _broken(op: str, verdict: Any) -> str:
    if verdict.finding is None:
        return f"cannot be checked: {verdict.reason}"
    note = ""
    small = verdict.finding.dtype not in ("float32", "float16", "float64")
    if small and _triton.interpreted and not _interpreted.computes_small_floats():
        note = "; Triton's interpreter rounds this type down, a GPU and `wavecrest isa run` do not"
    return f"breaks the contract of {op}: {verdict.finding}{note}"


@contextmanager
def being_checked(op: str, name: str) -> Iterator[None]:
    """Inside, a kernel runs calls that it has no verdict for: for what checks its results."""
    token = _under_check.set(_under_check.get() | {(op, name)})
    try:
        yield
    finally:
        _under_check.reset(token)


# Dynamo would trace the detection of the architecture
@constant_in_graphs
def place_of(device: str) -> str:
    """The architecture that tensors on a type of device run on, or the device where it has no record."""
    if device == CPU and _triton.emulated is None:
        return CPU
    known = _target.arch()
    return device if known is None else known.name


# Dynamo runs this while it traces and keeps the reason as a constant
@constant_in_graphs
def _checked(op: str, name: str, device: str, form: tuple[tuple[Any, ...], ...]) -> str:
    """Why a check refuses calls of a form; "" if they passed."""
    kernel = KERNELS[op, name]
    if (op, name) in _under_check.get():
        return ""
    known = (place_of(device), form) in kernel.verdicts
    if not known and device != CPU:
        if not torch.cuda.is_available() or _target.is_assumed():
            return f"is checked where {place_of(device)} is: it was not yet"
        if torch.cuda.is_current_stream_capturing():
            return "is not checked yet, and cannot be while a graph is captured: run a call before"
    verdict = kernel.verdict(device, form)
    return "" if verdict.passed else _broken(op, verdict)


def _usual_values(op: AnyOp) -> dict[str, Any]:
    """The values of a call's fields where no option is given, such as an op's own eps; None for tensors."""
    study = op.study
    dtype = "float32" if "float32" in study.example_dtypes else study.example_dtypes[0]
    made = study.inputs(*[16] * len(study.sizes), getattr(torch, dtype), "cpu")._asdict()
    return {name: None if isinstance(value, Tensor) else value for name, value in made.items()}


def _first(call: Any) -> Tensor:
    for value in call:
        if isinstance(value, Tensor):
            return value
    raise InvalidArgument("a call without a tensor has no kernel")


def _next(op: AnyOp, call: Any) -> str:
    """The backend that runs a call where a user's kernel does not."""
    for one in op.by_priority():
        if not one.user and one.refuse(call) is None and one.opt_in(call) is None:
            return one.name
    return "reference"


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _configs(given: Iterable[Mapping[str, int]] | None) -> tuple[Config, ...]:
    found = [dict(one) for one in given or ()]
    for one in found:
        if set(one) != set(found[0]) or not one or any(type(value) is not int for value in one.values()):
            raise InvalidArgument(f"register_kernel: configs takes dictionaries of the same whole numbers, not {one!r}")
    return tuple(dict.fromkeys(Config(**one) for one in found))


def _parameters(op: AnyOp, function: Callable[..., Any], options: tuple[str, ...]) -> tuple[str, ...]:
    """The fields of the op's call that a function takes, in its order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"register_kernel: {function!r} is no function with named parameters: {error}") from error
    kind: type[tuple[Any, ...]] = op.call_type
    known = fields_of(kind)
    for one in parameters:
        plain = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if not plain or (one.name not in known and one.name not in options and one.default is one.empty):
            taken = ", ".join([*known, *options])
            raise InvalidArgument(
                f"register_kernel: {op.name} has no argument {one.name!r}; the parameters of a kernel are among {taken}"
            )
    found = tuple(one.name for one in parameters if one.name in known and one.name not in options)
    missing = [name for name in options if name not in {one.name for one in parameters}]
    if missing:
        raise InvalidArgument(f"register_kernel: the function takes no {', '.join(missing)}, which configs gives")
    return found


# numbers the operations, as a kernel that is registered again gets one of its own: graphs keep the one they were
# compiled with, which was checked
_numbers = itertools.count()


def _operation(kernel: UserKernel) -> Callable[[Any, list[int]], list[Tensor]] | None:
    """The kernel as one operation of a graph: any callable works inside torch.compile, and Dynamo does not trace it.

    None where it cannot be one, as the op writes to its arguments or has some that a schema cannot express: then Dynamo
    traces the function.
    """
    op = kernel.op
    if op.study.stores:
        return None

    def run(call: Any, values: list[int]) -> list[Tensor]:
        made = kernel._called(call, dict(zip(kernel.options, values, strict=True)))
        return [one.contiguous() for one in (made if isinstance(made, tuple) else (made,))]

    def fake(call: Any) -> list[Tensor]:
        made = op.reference(call)
        results = made if isinstance(made, tuple) else (made,)
        return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in results]

    try:
        return configured_operation_of(f"user_{op.name}_{kernel.name}_{next(_numbers)}", op.call_type, run, fake)
    except InvalidArgument:
        return None

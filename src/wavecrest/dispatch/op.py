"""An op, its backends, and the decision which of them runs a call.

An `Op` is one mathematical function with one definition (its reference). A call of it is one typed object (see
`wavecrest.dispatch.call`). Backends attach to it by name; one that refuses a call gives its reason. A `Decision` is
made once per shape key and cached, and what runs it is bound once per signature, so that the cost of a call stays near
the cost of a bare kernel launch.
"""

from __future__ import annotations

import importlib
import logging
import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Literal, ParamSpec, TypeVar

import torch

from wavecrest.dispatch import lookup
from wavecrest.dispatch.call import Signature, device_of, fields_of, function_of, signature_function
from wavecrest.dispatch.decision import Backend, Decision, DispatchMiss, Key, Refusal, Source
from wavecrest.dispatch.study import Study
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.dispatch.tuned import Config, Database, Overlay, untuned_calls
from wavecrest.errors import InvalidArgument, KernelRefused, OutputError, Unsupported
from wavecrest.records.renamed import current_backend

C = TypeVar("C", bound=tuple[Any, ...])
R = TypeVar("R")
P = ParamSpec("P")

Strict = Literal["off", "warn", "error"]

_logger = logging.getLogger("wavecrest.dispatch")

# reason why a kernel that the interpreter or the emulator runs is opt-in
ON_THE_CPU = "Triton's interpreter and the emulator are for tests: they run when forced or named"

# signatures kept before starting over: a bound on memory where every call has another shape
MAX_SIGNATURES = 4096


@dataclass(slots=True)
class _Entry:
    decision: Decision
    backend: Backend[Any, Any]
    calls: int = 0


@dataclass(slots=True)
class _Bound:
    """The function that runs the calls of one signature, and their entry."""

    run: Callable[..., Any]
    entry: _Entry


# (backend, its configuration, source, reason, backends that refused with their reasons)
_Choice = tuple[Backend[Any, Any], Config | None, Source, str, tuple[tuple[str, str], ...]]

# a backend, its configuration, source and reason, by key
Pins = dict[Key, tuple[str, Config | None, Source, str]]

# decisions by key, what runs calls by signature, decisions of traced calls
Decisions = tuple[dict[Key, _Entry], dict[tuple[Any, ...], _Bound], dict[Key, Decision]]


@dataclass(slots=True)
class State:
    """The dispatch state of this process: ops, measured rows, strict mode, the file of untuned calls."""

    ops: dict[str, Op[Any, Any]] = field(default_factory=dict)
    database: Database = field(default_factory=lambda: Database(overlay=Overlay.of_user()))
    strict: Strict = "off"
    recorder: untuned_calls.Recorder | None = None


STATE = State()


def _never(_call: Any) -> None:
    return None


def _check_dense(op: str, names: tuple[str, ...], check: Callable[[C], None], call: C) -> None:
    """Refuse sparse, nested and mkldnn tensors, which have no strides, for all ops; then the op's own check."""
    for name, value in zip(names, call, strict=True):
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_nested):
            kind, way = str(value.layout), "convert it with .to_dense()"
            if value.is_nested:
                kind, way = "a nested tensor", "pad it with torch.nested.to_padded_tensor"
            raise InvalidArgument(f"{op}: {name} must be a dense tensor, got {kind}; {way}")
    check(call)


@dataclass(eq=False)
class Op(Generic[C, R]):
    """One op: its definition, its checks, and the backends that compute it.

    Args:
        name: the op's one name (test, documentation page, `wavecrest explain NAME`).
        call_type: the type of its calls, a NamedTuple.
        reference: the definition, dull and in float32 (or better) inside; also the path of last resort.
        check: raises InvalidArgument; runs before any backend, so that all backends refuse the same calls.
        key: the shape key of a call: hashable, made of strings, numbers and None, and all that the choice of a backend
            may depend on (whether gradients are needed is part of it).
        study_module: the module whose STUDY says what tuning, benchmarking and evidence need; imported on request.
        key_fields: names of the key's parts; except for `UNLISTED` also the columns of measured rows.
        key_sizes: the size fields among them: rows that differ only in these are near rows.
        op_class: which tolerance its results are judged by.
    """

    name: str
    call_type: type[C]
    reference: Callable[[C], R]
    check: Callable[[C], None]
    key: Callable[[C], Key]
    study_module: str
    key_fields: tuple[str, ...] = ()
    key_sizes: tuple[str, ...] = ()
    op_class: str = "row"
    backends: dict[str, Backend[C, R]] = field(default_factory=dict)
    _cache: dict[Key, _Entry] = field(default_factory=dict)
    _pins: Pins = field(default_factory=dict)
    _bound: dict[tuple[Any, ...], _Bound] = field(default_factory=dict)
    # decisions made while Dynamo traced a call; their compiled calls are not counted
    _traced: dict[Key, Decision] = field(default_factory=dict)
    # the backends by falling priority
    _order: tuple[Backend[C, R], ...] = ()
    # the signature of a call, written for the fields of `call_type`
    _signature: Callable[[C], Signature] = field(init=False)
    # backend that every key uses, set by `force`; None: decide per key
    _forced: str | None = None
    # set once all of wavecrest's backends are attached: from then on only checked kernels are added
    _closed: bool = False
    # grows whenever any op's decisions are dropped: copies of decisions kept elsewhere are then stale
    epoch: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.name in STATE.ops:
            raise InvalidArgument(f"an op named {self.name} is already registered")
        STATE.ops[self.name] = self
        self._signature = signature_function(self.call_type)
        self.check = partial(_check_dense, self.name, tuple(fields_of(self.call_type)), self.check)
        self.attach("reference", self.reference, priority=0)

    @property
    def study(self) -> Study[C]:
        """The part of the op that only tuning, benchmarking and evidence need."""
        study: Study[C] = importlib.import_module(self.study_module).studies()[self.name]
        return study

    def call_of(self, values: Iterable[Any]) -> C:
        """The call with these values of its fields, in their order."""
        return self.call_type(*values)

    def attach(
        self,
        name: str,
        run: Callable[[C], R],
        *,
        refuse: Callable[[C], str | None] = _never,
        opt_in: Callable[[C], str | None] = _never,
        priority: int,
        bind: Callable[[C], Callable[[C], R]] | None = None,
        as_native: bool = False,
    ) -> None:
        """Add a backend without configurations (see `Backend`); decisions made before are forgotten.

        Nothing checks it: it is for wavecrest's backends, and for an op's own package.

        Raises:
            InvalidArgument: the op is one of wavecrest's, whose backends are complete.
        """
        self._add(Backend(name, run, bind, refuse, opt_in, priority, as_native=as_native))

    def attach_kernel(
        self,
        name: str,
        bind: Callable[[C, Config], Callable[[C], R]],
        *,
        refuse: Callable[[C], str | None],
        opt_in: Callable[[C], str | None] = _never,
        priority: int,
        default_config: Callable[[Key], Config],
        run: Callable[[C, Config], R] | None = None,
        optional: tuple[str, ...] = (),
        as_native: bool = False,
    ) -> None:
        """Add one of wavecrest's kernels by the function that binds it (see `Backend`); forgets earlier decisions.

        `run` runs one call; None: the call is bound, then run. On the CPU it runs only when forced, pinned or named.

        Raises:
            InvalidArgument: as of `attach`.
        """

        def bound_and_called(call: C, config: Config) -> R:
            return bind(call, config)(call)

        def asked_for(call: C) -> str | None:
            return ON_THE_CPU if device_of(call) == "cpu" else opt_in(call)

        run = run or bound_and_called
        self._add(
            Backend(
                name, run, bind, refuse, asked_for, priority, default_config, optional, as_native=as_native
            )
        )  # fmt: skip

    def attach_user(self, backend: Backend[C, R]) -> None:
        """Add or replace a kernel of a user's; decisions made before are forgotten.

        For `wavecrest.backends.user`, whose backends refuse each call that they were not checked for.

        Raises:
            InvalidArgument: one of the op's own backends has that name.
        """
        own = self.backends.get(backend.name)
        if own is not None and not own.user:
            raise InvalidArgument(f"{self.name} has a backend {backend.name!r} of its own; choose another name")
        self._put(backend)

    def detach_user(self, name: str) -> None:
        """Take a user's kernel away, if there is one of that name; decisions made before are forgotten."""
        if name in self.backends and self.backends[name].user:
            del self.backends[name]
            self._order = tuple([one for one in self._order if one.name != name])
            self.forget()

    def close(self) -> None:
        """Take no more backends that nothing checks: all of wavecrest's are attached."""
        self._closed = True

    def _add(self, backend: Backend[C, R]) -> None:
        if self._closed:
            raise InvalidArgument(
                f"{self.name} takes no backend that nothing checks: register {backend.name!r} with "
                f"wavecrest.register_kernel({self.name!r}), which holds it to the op's contract"
            )
        self._put(backend)

    def _put(self, backend: Backend[C, R]) -> None:
        self.backends[backend.name] = backend
        self._order = tuple(sorted(self.backends.values(), key=lambda one: -one.priority))
        self.forget()

    def __call__(self, call: C) -> R:
        """Check a call, pick the backend for its key, run it.

        A call whose signature was seen before goes straight to what was bound for it.
        """
        if torch.compiler.is_compiling():
            self.check(call)
            return self._call_traced(self.key(call), call)
        try:
            bound = self._bound.get(self._signature(call))
        except (AttributeError, TypeError, RuntimeError):
            # of an argument that is no tensor, or has no strides or hash
            bound = None
        if bound is None:
            return self._first(call)
        bound.entry.calls += 1
        result: R = bound.run(call)
        return result

    def of_fields(self, kind: Callable[P, C]) -> Callable[P, R]:
        """A function that takes the fields of a call and runs it as `__call__` does, for an op's public function.

        Of a signature seen before it makes the call object without the type's constructor, and calls two functions
        less: beside PyTorch's own function a call takes a quarter to a third less than `op(kind(...))` on the host.

        Args:
            kind: the op's `call_type`.
        """
        return function_of(self, kind)

    def _first(self, call: C) -> R:
        """Run the first call of a signature; of one that cannot be formed check says why, or its error is raised."""
        self.check(call)
        signature, key = self._signature(call), self.key(call)
        # a warning of the decision names the line of the public function's caller: it counts the calls in between
        bound = self._bind_signature(signature, call, self._cache.get(key) or self._decide(key, call))
        bound.entry.calls += 1
        result: R = bound.run(call)
        return result

    def call_on(self, backend: str, call: C) -> R:
        """Run a call on the backend that its caller names, with the configuration that was measured for it, if one was.

        Bound for its signature and counted as by `__call__`. The decision's source is "forced".

        Raises:
            InvalidArgument: there is no backend of that name.
            Unsupported: the backend refuses this call; KernelRefused where it is a user's kernel.
        """
        if torch.compiler.is_compiling():
            return self.run(backend, call)
        try:
            bound = self._bound.get((backend, *self._signature(call)))
        except (AttributeError, TypeError, RuntimeError):
            self.check(call)
            raise
        if bound is None:
            bound = self._bind_signature((backend, *self._signature(call)), call, self._named(backend, call))
        bound.entry.calls += 1
        result: R = bound.run(call)
        return result

    def _named(self, backend: str, call: C) -> _Entry:
        """The entry of calls whose backend is named."""
        chosen = self._taking(backend, call)
        key = self.key(call)
        # beside the decisions for the same key that are the dispatcher's
        name = ("named", chosen.name, *key)
        if name not in self._cache:
            measured, config, _, reason = _measured(self.name, key, (chosen.name,), chosen.name)
            why = f"named by the caller; {reason if measured else 'no measured row for it'}"
            made = Config(**dict(config)) if config else None
            self._cache[name] = _Entry(_decision(self, key, chosen.name, made, "forced", why, ()), chosen)
        return self._cache[name]

    def _taking(self, backend: str, call: C) -> Backend[C, R]:
        """A backend that takes a call, which is checked here."""
        self.check(call)
        chosen = self._backend(backend)
        reason = chosen.refuse(call)
        if reason is not None:
            kind = KernelRefused if chosen.user else Unsupported
            raise kind(f"{self.name}: backend {backend} refuses: {reason}")
        return chosen

    def _bind_signature(self, signature: tuple[Any, ...], call: C, entry: _Entry) -> _Bound:
        if len(self._bound) >= MAX_SIGNATURES:
            self._bound.clear()
        bound = self._bound[signature] = _Bound(_bind(entry, call), entry)
        return bound

    def decide(self, call: C) -> Decision:
        """The decision for a call, without running it."""
        self.check(call)
        key = self.key(call)
        return (self._cache.get(key) or self._decide(key, call)).decision

    def decide_as(self, key: Key, call: C) -> Decision:
        """The decision for `key`, e.g. of an architecture that is not present; backends check `call`.

        It is not cached, counted or recorded as untuned.
        """
        backend, config, source, reason, refused = self._choose(key, call)
        if config is None and backend.takes_config:
            config = self.config_of(backend.name, key)
        return Decision(self.name, key, backend.name, config, source, reason, tuple(Refusal(*pair) for pair in refused))

    def swap(self, decisions: Decisions | None) -> Decisions:
        """Put decisions that were made before (None: none) in place of those made since, which are returned."""
        now = self._cache, self._bound, self._traced
        Op.epoch += 1
        self._cache, self._bound, self._traced = decisions or ({}, {}, {})
        return now

    def swap_pins(self, pins: Pins) -> Pins:
        """Put pins in place of those there are, which are returned; decisions stay, so that they go with `swap`."""
        before, self._pins = self._pins, pins
        return before

    def run(self, backend: str, call: C, *, config: Config | None = None) -> R:
        """Run one named backend, whatever the dispatcher would choose (tests, benchmarks, tuning).

        Raises:
            InvalidArgument: there is no backend of that name.
            Unsupported: the backend refuses this call; KernelRefused where it is a user's kernel.
        """
        chosen = self._taking(backend, call)
        result: R
        if chosen.takes_config:
            result = chosen.run(call, config or self.config_of(backend, self.key(call)))
        else:
            result = chosen.run(call)
        return result

    def config_of(self, backend: str, key: Key) -> Config:
        """The configuration that a backend runs a key with where nothing measured is known.

        Raises:
            InvalidArgument: there is no backend of that name, or it takes no configuration.
        """
        default = self._backend(backend).default_config
        if default is None:
            raise InvalidArgument(f"{self.name}: backend {backend} takes no configuration")
        return default(key)

    def pin(self, key: Key, backend: str, config: Config | None, source: Source, reason: str) -> None:
        """Fix the backend of one key (a plan's dispatch rows); before measured rows.

        Row bucket 0 stands for calls inside torch.compile, where the row count is not known.
        """
        self._pins[key] = (self._backend(backend).name, config, source, reason)
        self.forget()

    def force(self, backend: str | None) -> None:
        """Run every call on one backend that takes it; None goes back to deciding per key."""
        self._forced = None if backend is None else self._backend(backend).name
        self.forget()

    def forget(self) -> None:
        """Drop the decisions made so far (pins stay)."""
        self._bound.clear()
        self._cache.clear()
        self._traced.clear()
        Op.epoch += 1

    def unpin(self) -> None:
        """Drop all pins, and the decisions made so far."""
        self._pins.clear()
        self.forget()

    def decisions(self) -> list[tuple[Decision, int]]:
        """The decisions made so far with the number of eager calls that used each (0 for those of compiled calls)."""
        eager = [(entry.decision, entry.calls) for entry in self._cache.values()]
        return eager + [(decision, 0) for decision in self._traced.values()]

    def by_priority(self) -> tuple[Backend[C, R], ...]:
        """The backends by falling priority: the first that takes a call is the default choice."""
        return self._order

    def _backend(self, name: str) -> Backend[C, R]:
        try:
            return self.backends[current_backend(name)]
        except KeyError:
            raise InvalidArgument(
                f"{self.name} has no backend {name!r}; it has {', '.join(sorted(self.backends))}"
            ) from None

    def _choose(self, key: Key, call: C) -> _Choice:
        """The backend for a call; plain enough for Dynamo to trace."""
        pin = self._pins.get(key) if self._pins else None
        wanted = self._forced if self._forced is not None else (pin[0] if pin is not None else None)
        taking: tuple[str, ...] = ()
        refused: tuple[tuple[str, str], ...] = ()
        fallback: Backend[C, R] | None = None
        for backend in self._order:
            reason = backend.refuse(call)
            if reason is None:
                taking = (*taking, backend.name)
                if backend.name != wanted:
                    reason = backend.opt_in(call)
                    if reason is None and fallback is None:
                        fallback = backend
            if reason is not None:
                refused = (*refused, (backend.name, reason))
        if wanted is not None and wanted in taking:
            if self._forced is not None or pin is None:
                return self.backends[wanted], None, "forced", "forced by the caller", refused
            return self.backends[wanted], pin[1], pin[2], pin[3], refused
        note = ""
        if wanted is not None:
            note = f"; {wanted}, {'forced' if self._forced is not None else 'pinned'}, refuses it"
        measured, config, source, reason = _measured(self.name, key, taking, "" if fallback is None else fallback.name)
        if measured:
            # a measurement stands above what a backend is opt-in for
            refused = tuple([pair for pair in refused if pair[0] != measured])
            return self.backends[measured], Config(**dict(config)) if config else None, source, reason + note, refused
        if fallback is None:
            raise Unsupported(f"{self.name}: no backend takes this call: {refused}")
        return fallback, None, "default", f"highest priority that takes the call{note}{reason}", refused

    def _decide(self, key: Key, call: C) -> _Entry:
        backend, config, source, reason, refused = self._choose(key, call)
        entry = _Entry(_decision(self, key, backend.name, config, source, reason, refused), backend)
        self._cache[key] = entry
        return entry

    def _call_traced(self, key: Key, call: C) -> R:
        """A call inside torch.compile: decided while tracing, so that the compiled code holds the backend alone."""
        # sizes in the key (columns; rows are 0) may be symbolic: the configuration is made for their values
        key = tuple(operator.index(part) if type(part) is int else part for part in key)
        backend, config, source, reason, refused = self._choose(key, call)
        pairs = _note_traced(self.name, key, backend.name, lookup.pairs(config), source, reason, refused)
        result: R
        if backend.takes_config:
            result = backend.run(call, Config(**dict(pairs)))
        else:
            result = backend.run(call)
        return result


# an op whose calls and results are not looked into: tools work on any
AnyOp = Op[Any, Any]


def _bind(entry: _Entry, call: Any) -> Callable[..., Any]:
    """The function that runs an entry's backend for calls with the signature of this one."""
    backend, config = entry.backend, entry.decision.config
    if backend.takes_config:
        return partial(backend.run, config=config) if backend.bind is None else backend.bind(call, config)
    return backend.run if backend.bind is None else backend.bind(call)


def _decision(
    op: Op[Any, Any],
    key: Key,
    backend: str,
    config: Config | None,
    source: Source,
    reason: str,
    refused: tuple[tuple[str, str], ...],
) -> Decision:
    if config is None and op.backends[backend].takes_config:
        config = op.config_of(backend, key)
    decision = Decision(op.name, key, backend, config, source, reason, tuple(Refusal(*pair) for pair in refused))
    if _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", decision.describe(op.key_fields))
        for refusal in decision.refused:
            _logger.debug("%s: not %s, which %s", op.name, refusal.backend, refusal.reason)
    if source not in ("exact", "forced"):
        _report_untuned_call(op, decision)
    return decision


# Dynamo runs this while it traces and keeps the result as a constant, so that it does not trace the reading of a file
@constant_in_graphs
def _measured(
    name: str, key: Key, taking: tuple[str, ...], fallback: str
) -> tuple[str, tuple[tuple[str, int], ...], Source, str]:
    """Backend, configuration, source and reason for a key from measurements, among the backends in `taking`.

    The backend is "" where no row, prior or cost model can be used; the reason then says why each one that was found
    cannot. `fallback` is the backend that runs in that case.
    """
    return lookup.find(STATE.ops[name], key, taking, fallback, STATE.database)


# Dynamo runs this while it traces and keeps the result as a constant, so that recording leaves no trace in the graph
@constant_in_graphs
def _note_traced(
    name: str,
    key: Key,
    backend: str,
    config: tuple[tuple[str, int], ...],
    source: Source,
    reason: str,
    refused: tuple[tuple[str, str], ...],
) -> tuple[tuple[str, int], ...]:
    op = STATE.ops[name]
    decision = _decision(op, key, backend, Config(**dict(config)) if config else None, source, reason, refused)
    op._traced[key] = decision
    return lookup.pairs(decision.config)


def _report_untuned_call(op: Op[Any, Any], decision: Decision) -> None:
    """Record and report a decision that no measured row of the key's own stands behind."""
    columns = lookup.columns(op, decision.key)
    if STATE.recorder is not None and columns is not None:
        key = dict(zip(*columns, strict=True))
        one = untuned_calls.UntunedCall(op.name, STATE.database.arch, key, decision.backend, decision.source)
        try:
            STATE.recorder.add(one)
        except OutputError as error:
            # the call itself is well
            warnings.warn(f"{error}; no more misses are recorded", DispatchMiss, stacklevel=7)
            STATE.recorder = None
    if STATE.strict == "off":
        return
    message = f"no measured row: {decision.describe(op.key_fields)}"
    if STATE.strict == "error":
        raise Unsupported(message)
    warnings.warn(message, DispatchMiss, stacklevel=7)

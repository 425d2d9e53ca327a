"""Ops, their backends, and the decision which backend runs a call. Every decision can be read afterwards.

An `Op` is one mathematical function with one definition (its reference). Backends attach to it by name with a
predicate; a predicate that declines gives its reason. A `Decision` is made once per shape key and cached, so that the
cost of a call stays near the cost of a bare kernel launch.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from wavecrest import env
from wavecrest.dispatch import lookup
from wavecrest.dispatch.decision import Backend as Backend
from wavecrest.dispatch.decision import Cost as Cost
from wavecrest.dispatch.decision import Coverage as Coverage
from wavecrest.dispatch.decision import Decision as Decision
from wavecrest.dispatch.decision import DispatchMiss as DispatchMiss
from wavecrest.dispatch.decision import Key as Key
from wavecrest.dispatch.decision import Refusal as Refusal
from wavecrest.dispatch.decision import Source as Source
from wavecrest.dispatch.keys import dtype_name as dtype_name
from wavecrest.dispatch.keys import m_bucket as m_bucket
from wavecrest.dispatch.keys import needs_grad as needs_grad
from wavecrest.dispatch.keys import row_bucket as row_bucket
from wavecrest.dispatch.keys import signature_of
from wavecrest.dispatch.lookup import UNLISTED as UNLISTED
from wavecrest.dispatch.tuned import Cell, Config, Database, Overlay, Proposal, Row, Work, misses
from wavecrest.errors import InvalidArgument, OutputError, Unsupported
from wavecrest.hardware import Arch

Strict = Literal["off", "warn", "error"]

# what the example calls of most ops can be made in
EXAMPLE_DTYPES = ("float64", "float32", "float16", "bfloat16")

# modules that attach backends to ops by name; imported by load_backends, never by an op
BACKEND_MODULES = (
    "wavecrest.backends.torch",
    "wavecrest.backends.gemm_then_act",
    "wavecrest.backends.blas",
    "wavecrest.backends.sdpa",
    "wavecrest.backends.aiter",
)


@dataclass(slots=True)
class _Entry:
    decision: Decision
    backend: Backend
    calls: int = 0


@dataclass(slots=True)
class _Bound:
    """What runs the calls of one signature."""

    call: Callable[..., Any]
    entry: _Entry


# signatures kept before starting over: a bound on memory where every call has another shape
MAX_SIGNATURES = 4096

# (backend, its configuration, source, reason, declined backends with their reasons)
_Choice = tuple[Backend, Config | None, Source, str, tuple[tuple[str, str], ...]]

# decisions by key, what runs calls by signature, decisions of traced calls
Decisions = tuple[dict[Key, _Entry], dict[tuple[Any, ...], _Bound], dict[Key, Decision]]

_OPS: dict[str, Op] = {}
_database = Database(overlay=Overlay.of_user())
_strict: Strict = "off"
_misses: misses.Recorder | None = None
_loaded = False


def _always(*_args: Any, **_kwargs: Any) -> None:
    return None


@dataclass(eq=False)
class Op:
    """One op: its definition, its checks, and the backends that compute it.

    Args:
        name: the op's one name (module, test, documentation page, `wavecrest explain NAME`).
        reference: the definition, dull and in float32 (or better) inside; also the path of last resort.
        check: raises InvalidArgument; runs before every path, so that oracle and kernel refuse alike.
        key: the shape key of a call: hashable, made of strings, numbers and None, and all that the choice of a backend
            may depend on (whether gradients are needed is part of it).
        key_fields: the names of the key's parts, for people; but for `UNLISTED` also the columns of measured rows.
        key_sizes: those of them that are sizes: a measured row that differs in them alone is a near one.
        inputs: `inputs(M, N, dtype, device)` gives the arguments of an example call; as many sizes as `sizes` names.
        cost: the least work of a call.
        default_config: the kernel configuration for a key where nothing measured is known, of every backend that
            attaches without its own.
        sizes: the names of the sizes that `inputs` takes.
        example_dtypes: the names of the torch dtypes that `inputs` takes.
        compile_cases: `compile_cases(arch, config=None)` gives, by name, the launches that must compile for an
            architecture (`hardware.Arch`), made from meta tensors: with the shipped configurations, or with `config`.
        bench_cases: `bench_cases(suite, device)` gives, by name, functions that make the arguments of a case of
            `wavecrest bench`, where M×N tensors from `inputs` are not what there is to measure.
        emulate_cases: `emulate_cases(arch)` gives, by name, functions that make the arguments (on the CPU) of calls
            that `wavecrest isa run` adds to those from `inputs`: options that inputs leave at their defaults.
        unpacked: `unpacked(*args)` gives the arguments of the same call with a packed weight unpacked, for peers that
            have no such thing; None where nothing is packed.
        bound: `bound(*args)` gives how far elements of a kernel's first result may be from the reference's, float64 of
            its shape, or a tuple with one for each result; or None where the tolerance of `op_class` is all there is to
            judge by.
        call_of_key: `call_of_key(parts, device)` gives the arguments of a call with the key whose parts it is given by
            name (None where there is no such call that it can make), so that recorded misses can be tuned.
        model: `model(key, arch, taking, fallback)` gives what a cost model proposes for a key that has neither a row of
            its own nor a near one, among the backends `taking` the call, of which `fallback` would run it; or None.
        stores: positions of the arguments that a call may write to: what is written is rounded to their dtypes, which
            an oracle in float64 leaves as they are.
    """

    name: str
    reference: Callable[..., Any]
    check: Callable[..., None]
    key: Callable[..., Key]
    inputs: Callable[..., tuple[Any, ...]]
    cost: Callable[..., Cost]
    default_config: Callable[[Key], Config]
    key_fields: tuple[str, ...] = ()
    key_sizes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ("M", "N")
    example_dtypes: tuple[str, ...] = EXAMPLE_DTYPES
    compile_cases: Callable[..., dict[str, Any]] | None = None
    bench_cases: Callable[[str, str], dict[str, Callable[[], tuple[Any, ...]]]] | None = None
    emulate_cases: Callable[[str], dict[str, Callable[[], tuple[Any, ...]]]] | None = None
    unpacked: Callable[..., tuple[Any, ...]] | None = None
    bound: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None
    call_of_key: Callable[[Mapping[str, Cell], str], tuple[Any, ...] | None] | None = None
    model: Callable[[Key, Arch, tuple[str, ...], str], Proposal | None] | None = None
    stores: tuple[int, ...] = ()
    op_class: str = "row"
    backends: dict[str, Backend] = field(default_factory=dict)
    _cache: dict[Key, _Entry] = field(default_factory=dict)
    _pins: dict[Key, tuple[str, Config | None, Source, str]] = field(default_factory=dict)
    _bound: dict[tuple[Any, ...], _Bound] = field(default_factory=dict)
    # decisions made while Dynamo traced a call; their compiled calls are not counted
    _traced: dict[Key, Decision] = field(default_factory=dict)
    # the backends by falling priority
    _order: tuple[Backend, ...] = ()
    # backend that every key uses, set by `force`; None: decide per key
    _forced: str | None = None
    # grows whenever any op's decisions are dropped: what was kept of them is stale
    epoch: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.name in _OPS:
            raise InvalidArgument(f"an op named {self.name} is already registered")
        _OPS[self.name] = self
        self.attach("reference", self.reference, supports=_always, priority=0)

    def attach(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        supports: Callable[..., str | None],
        priority: int,
        reserved: Callable[..., str | None] = _always,
        takes_config: bool = False,
        bind: Callable[..., Callable[..., Any]] | None = None,
        default_config: Callable[[Key], Config] | None = None,
        space: Callable[[Key, Arch], Iterable[Config]] | None = None,
        launches: Callable[..., list[Any]] | None = None,
        optional: tuple[str, ...] = (),
        work: Callable[[Key, Config, Arch], tuple[Work, ...]] | None = None,
        as_native: bool = False,
    ) -> None:
        """Add a backend (see `Backend` for the arguments); decisions made before are forgotten."""
        self.backends[name] = Backend(
            name,
            run,
            bind,
            supports,
            reserved,
            priority,
            takes_config,
            default_config,
            space,
            launches,
            optional,
            work,
            as_native,
        )
        self._order = tuple(sorted(self.backends.values(), key=lambda backend: -backend.priority))
        self.forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, pick the backend for their key, run it.

        A positional call whose signature was seen before goes straight to what was bound for it.
        """
        if torch.compiler.is_compiling():
            self.check(*args, **kwargs)
            return self._call_traced(self.key(*args, **kwargs), args, kwargs)
        if kwargs:
            self.check(*args, **kwargs)
            key = self.key(*args, **kwargs)
            entry = self._cache.get(key) or self._decide(key, args, kwargs)
            entry.calls += 1
            return _bind(entry, args, kwargs, once=True)(*args, **kwargs)
        try:
            signature = signature_of(args)
            bound = self._bound.get(signature)
        except TypeError:
            # an argument that has no hash is none that check lets pass
            self.check(*args)
            raise
        if bound is None:
            self.check(*args)
            key = self.key(*args)
            bound = self._bind_signature(signature, args, self._cache.get(key) or self._decide(key, args, {}))
        bound.entry.calls += 1
        return bound.call(*args)

    def call_on(self, backend: str, *args: Any) -> Any:
        """Run a call on the backend that its caller names, with the configuration that was measured for it, if one was.

        Bound for its signature and counted as `__call__` does it; a decision of its own, whose source is "forced".

        Raises:
            InvalidArgument: there is no backend of that name.
            Unsupported: the backend declines this call.
        """
        if torch.compiler.is_compiling():
            return self.run(backend, *args)
        signature = (backend, *signature_of(args))
        bound = self._bound.get(signature)
        if bound is None:
            bound = self._bind_signature(signature, args, self._named(backend, args))
        bound.entry.calls += 1
        return bound.call(*args)

    def _named(self, backend: str, args: tuple[Any, ...]) -> _Entry:
        """The entry of calls whose backend is named."""
        chosen = self._taking(backend, args, {})
        key = self.key(*args)
        # beside the decisions for the same key that are the dispatcher's
        name = ("named", backend, *key)
        if name not in self._cache:
            measured, config, _, reason = _measured(self.name, key, (backend,), backend)
            why = f"named by the caller; {reason if measured else 'no measured row is of it'}"
            made = Config(**dict(config)) if config else None
            self._cache[name] = _Entry(_decision(self, key, backend, made, "forced", why, ()), chosen)
        return self._cache[name]

    def _taking(self, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Backend:
        """A backend that takes a call which was checked here."""
        self.check(*args, **kwargs)
        chosen = self._backend(backend)
        reason = chosen.supports(*args, **kwargs)
        if reason is not None:
            raise Unsupported(f"{self.name}: backend {backend} declines: {reason}")
        return chosen

    def _bind_signature(self, signature: tuple[Any, ...], args: tuple[Any, ...], entry: _Entry) -> _Bound:
        if len(self._bound) >= MAX_SIGNATURES:
            self._bound.clear()
        bound = self._bound[signature] = _Bound(_bind(entry, args, {}, once=False), entry)
        return bound

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """The decision for a call, without running it."""
        self.check(*args, **kwargs)
        key = self.key(*args, **kwargs)
        entry = self._cache.get(key) or self._decide(key, args, kwargs)
        return entry.decision

    def decide_as(self, key: Key, *args: Any) -> Decision:
        """The decision for calls with a key that need not be that of the arguments, which predicates look at.

        For devices that are not here: it is neither kept nor counted, and no miss is reported.
        """
        backend, config, source, reason, refused = self._choose(key, args, {})
        if config is None and backend.takes_config:
            config = self.config_of(backend.name, key)
        return Decision(self.name, key, backend.name, config, source, reason, tuple(Refusal(*pair) for pair in refused))

    def swap(self, decisions: Decisions | None) -> Decisions:
        """Put decisions that were made before (None: none) in place of those made since, which are returned."""
        now = self._cache, self._bound, self._traced
        Op.epoch += 1
        self._cache, self._bound, self._traced = decisions or ({}, {}, {})
        return now

    def run(self, backend: str, *args: Any, config: Config | None = None, **kwargs: Any) -> Any:
        """Run one named backend, whatever the dispatcher would choose (tests, benchmarks, tuning).

        Raises:
            InvalidArgument: there is no backend of that name.
            Unsupported: the backend declines this call.
        """
        chosen = self._taking(backend, args, kwargs)
        if chosen.takes_config:
            return chosen.run(*args, **kwargs, config=config or self.config_of(backend, self.key(*args, **kwargs)))
        return chosen.run(*args, **kwargs)

    def config_of(self, backend: str, key: Key) -> Config:
        """The configuration that a backend runs a key with where nothing measured is known.

        Raises:
            InvalidArgument: there is no backend of that name.
        """
        return (self._backend(backend).default_config or self.default_config)(key)

    def pin(self, key: Key, backend: str, config: Config | None, source: Source, reason: str) -> None:
        """Fix the backend of one key (a plan's dispatch rows); before measured rows.

        A key whose row bucket is 0 is that of calls inside torch.compile, where the row count is not known.
        """
        self._backend(backend)
        self._pins[key] = (backend, config, source, reason)
        self.forget()

    def force(self, backend: str | None) -> None:
        """Run every call on one backend that supports it; None goes back to deciding per key."""
        if backend is not None:
            self._backend(backend)
        self._forced = backend
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

    def by_priority(self) -> tuple[Backend, ...]:
        """The backends by falling priority: the first that takes a call is the default choice."""
        return self._order

    def _backend(self, name: str) -> Backend:
        try:
            return self.backends[name]
        except KeyError:
            raise InvalidArgument(
                f"{self.name} has no backend {name!r}; it has {', '.join(sorted(self.backends))}"
            ) from None

    def _choose(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Choice:
        """The backend for a call; plain enough for Dynamo to trace."""
        pin = self._pins.get(key) if self._pins else None
        wanted = self._forced if self._forced is not None else (pin[0] if pin is not None else None)
        taking: tuple[str, ...] = ()
        refused: tuple[tuple[str, str], ...] = ()
        fallback: Backend | None = None
        for backend in self._order:
            reason = backend.supports(*args, **kwargs)
            if reason is None:
                taking = (*taking, backend.name)
                if backend.name != wanted:
                    reason = backend.reserved(*args, **kwargs)
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
            note = f"; {wanted}, {'forced' if self._forced is not None else 'pinned'}, declines it"
        measured, config, source, reason = _measured(self.name, key, taking, "" if fallback is None else fallback.name)
        if measured:
            # a measurement stands above what a backend reserves itself for
            refused = tuple([pair for pair in refused if pair[0] != measured])
            return self.backends[measured], Config(**dict(config)) if config else None, source, reason + note, refused
        if fallback is None:
            raise Unsupported(f"{self.name}: no backend takes this call: {refused}")
        return fallback, None, "default", f"highest priority that takes the call{note}{reason}", refused

    def _decide(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        backend, config, source, reason, refused = self._choose(key, args, kwargs)
        entry = _Entry(_decision(self, key, backend.name, config, source, reason, refused), backend)
        self._cache[key] = entry
        return entry

    def _call_traced(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call inside torch.compile: decided while tracing, so that the compiled code holds the backend alone."""
        # sizes in the key (columns; rows are 0) may be symbolic: the configuration is made for their values
        key = tuple(operator.index(part) if type(part) is int else part for part in key)
        backend, config, source, reason, refused = self._choose(key, args, kwargs)
        pairs = _note_traced(self.name, key, backend.name, lookup.pairs(config), source, reason, refused)
        if backend.takes_config:
            return backend.run(*args, **kwargs, config=Config(**dict(pairs)))
        return backend.run(*args, **kwargs)


def _bind(entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any], *, once: bool) -> Callable[..., Any]:
    """The function that runs an entry's backend for calls like this one."""
    backend, config = entry.backend, entry.decision.config
    options = {} if config is None else {"config": config}
    if backend.bind is not None and not once:
        return backend.bind(*args, **kwargs, **options)
    return partial(backend.run, **options) if options else backend.run


def _decision(
    op: Op,
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
    if source not in ("exact", "forced"):
        _report_miss(op, decision)
    return decision


# Dynamo runs this while it traces and keeps the result as a constant, so that it does not trace the reading of a file
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _measured(
    name: str, key: Key, taking: tuple[str, ...], fallback: str
) -> tuple[str, tuple[tuple[str, int], ...], Source, str]:
    """Backend, configuration, source and reason for a key by what was measured, among the backends `taking` the call.

    Where there is nothing that can be used the backend is "", and the reason says why what there is cannot. `fallback`
    is the backend that runs then.
    """
    return lookup.find(_OPS[name], key, taking, fallback, _database)


# Dynamo runs this while it traces and keeps the result as a constant, so that recording leaves no trace in the graph
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_traced(
    name: str,
    key: Key,
    backend: str,
    config: tuple[tuple[str, int], ...],
    source: Source,
    reason: str,
    refused: tuple[tuple[str, str], ...],
) -> tuple[tuple[str, int], ...]:
    op = _OPS[name]
    decision = _decision(op, key, backend, Config(**dict(config)) if config else None, source, reason, refused)
    op._traced[key] = decision
    return lookup.pairs(decision.config)


def _report_miss(op: Op, decision: Decision) -> None:
    """Record and report a decision that no measured row of the key's own stands behind."""
    global _misses
    columns = lookup.columns(op, decision.key)
    if _misses is not None and columns is not None:
        key = dict(zip(*columns, strict=True))
        try:
            _misses.add(misses.Miss(op.name, _database.arch, key, decision.backend, decision.source))
        except OutputError as error:
            # the call itself is well
            warnings.warn(f"{error}; no more misses are recorded", DispatchMiss, stacklevel=6)
            _misses = None
    if _strict == "off":
        return
    message = f"no measured row: {decision.describe()}"
    if _strict == "error":
        raise Unsupported(message)
    warnings.warn(message, DispatchMiss, stacklevel=6)


def load_backends() -> None:
    """Import the modules that attach backends, once; called when `wavecrest.ops` is imported."""
    global _loaded
    if not _loaded:
        _loaded = True
        for name in BACKEND_MODULES:
            importlib.import_module(name)


def get(name: str) -> Op:
    """The op of a name.

    Raises:
        InvalidArgument: there is none; the message lists the names there are.
    """
    # ops register when their package is imported
    importlib.import_module("wavecrest.ops")
    try:
        return _OPS[name]
    except KeyError:
        raise InvalidArgument(f"no op named {name!r}; there are {', '.join(names())}") from None


def names() -> list[str]:
    """The names of all ops, sorted."""
    importlib.import_module("wavecrest.ops")
    return sorted(_OPS)


def strict(mode: Strict) -> None:
    """What a call without a measured row of its own does, whether it runs by a near row, a model or the default.

    Args:
        mode: "off" nothing, "warn" a DispatchMiss warning, "error" Unsupported.

    Raises:
        InvalidArgument: it is none of these.
    """
    global _strict
    if mode not in ("off", "warn", "error"):
        raise InvalidArgument(f"strict takes off, warn or error, not {mode!r}")
    _strict = mode
    if mode != "off":
        # decisions made before were not reported
        forget()


def forget() -> None:
    """Forget every op's decisions and call counts; the next call of each decides anew (pins stay)."""
    for op in _OPS.values():
        op.forget()


@contextlib.contextmanager
def measured_in(database: Database) -> Iterator[None]:
    """Decide by the rows of another database; every op decides anew, on entering and on leaving.

    Functions that torch.compile has compiled before keep their decisions.
    """
    global _database
    before, _database = _database, database
    forget()
    try:
        yield
    finally:
        _database = before
        forget()


@contextlib.contextmanager
def in_turn(*databases: Database) -> Iterator[tuple[Callable[[], None], ...]]:
    """A function for each database that lets its rows decide from now on, with the decisions made by them before.

    Unlike `measured_in` going back costs no new decisions, so that calls can be timed in turn.
    """
    global _database
    before, ops = _database, list(_OPS.values())
    outside = [op.swap(None) for op in ops]
    kept: dict[int, list[Decisions]] = {}
    active: int | None = None

    def chosen(index: int) -> None:
        global _database
        nonlocal active
        if active != index:
            made = [op.swap(own) for op, own in zip(ops, kept.get(index, [None] * len(ops)), strict=True)]
            if active is not None:
                kept[active] = made
            active, _database = index, databases[index]

    try:
        yield tuple([partial(chosen, index) for index in range(len(databases))])
    finally:
        _database = before
        for op, own in zip(ops, outside, strict=True):
            op.swap(own)


def database() -> Database:
    """The measured rows that decide now."""
    return _database


def measured_along(op: Op, key: Key) -> list[tuple[int, Row]]:
    """The measured rows that differ from a call's key in the first of `key_sizes` alone, and its own, by that size."""
    return lookup.along(op, key, _database)


def reread() -> None:
    """Read the measured rows anew, after they have changed, and forget every op's decisions (pins stay)."""
    _database.forget()
    forget()


def record_misses(path: Path | None) -> None:
    """Append the key of every call on a GPU without a measured row of its own to a file, for `wavecrest tune FILE`.

    Args:
        path: the file, JSON lines; None: none from now on. Decisions made before are recorded when they are made anew.

    Raises:
        OutputError: it cannot be written.
    """
    global _misses
    _misses = None if path is None else misses.Recorder(path)
    if path is not None:
        forget()


def coverage() -> Coverage:
    """Every decision of every op with its number of eager calls: the table to print at the end of a run.

    As a context manager it holds those of the block: see `wavecrest.dispatch.decision.Coverage`.
    """
    return Coverage(lambda: [row for name in sorted(_OPS) for row in _OPS[name].decisions()])


_mode = env.get("WAVECREST_STRICT", "off")
if _mode in ("off", "warn", "error"):
    strict(_mode)  # type: ignore[arg-type]
else:
    raise InvalidArgument(f"WAVECREST_STRICT takes off, warn or error, not {_mode!r}")

if env.get("WAVECREST_MISSES"):
    record_misses(Path(env.get("WAVECREST_MISSES")))

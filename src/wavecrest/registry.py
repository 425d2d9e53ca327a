"""Ops, their backends, and the decision which backend runs a call. Every decision can be read afterwards.

An `Op` is one mathematical function with one definition (its reference). Backends attach to it by name with a
predicate; a predicate that declines gives its reason. A `Decision` is made once per shape key and cached, so that the
cost of a call stays near the cost of a bare kernel launch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from wavecrest import env
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.tuned import Config

if TYPE_CHECKING:
    from torch import Tensor

Source = Literal["exact", "near", "model", "default", "forced"]
Strict = Literal["off", "warn", "error"]
Key = tuple[Any, ...]

# modules that attach backends to ops by name; imported by load_backends, never by an op
BACKEND_MODULES = ("wavecrest.backends.torch",)


class DispatchMiss(UserWarning):
    """A call found no measured or modelled row and runs on the default choice (strict mode reports it)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work a call can take: floating-point operations and bytes moved (each operand once)."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backend that does not run a call, and why."""

    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Which backend runs the calls of one shape key, where that comes from, and who was declined."""

    op: str
    key: Key
    backend: str
    config: Config | None
    source: Source
    reason: str
    refused: tuple[Refusal, ...]

    def describe(self) -> str:
        """One line for people."""
        config = f" {self.config!r}" if self.config is not None else ""
        return f"{self.op}{self.key}: {self.backend}{config} ({self.source}: {self.reason})"


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an op.

    `supports(*args)` returns None, or the reason why this call is declined. It must look only at what the op's key
    contains (dtype, device, sizes), since its answer is cached by that key. `priority`: the highest that does not
    decline is the default choice.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None]
    priority: int
    takes_config: bool


@dataclass(slots=True)
class _Entry:
    decision: Decision
    backend: Backend
    calls: int = 0


_OPS: dict[str, Op] = {}
_strict: Strict = "off"
_loaded = False


@dataclass(eq=False)
class Op:
    """One op: its definition, its checks, and the backends that compute it.

    Args:
        name: the op's one name (module, test, documentation page, `wavecrest explain NAME`).
        reference: the definition, dull and in float32 (or better) inside; also the path of last resort.
        check: raises InvalidArgument; runs before every path, so that oracle and kernel refuse alike.
        key: the shape key of a call: hashable, and all that the choice of a backend may depend on.
        inputs: `inputs(M, N, dtype, device)` gives the arguments of an example call.
        cost: the least work of a call.
        default_config: the kernel configuration for a key where nothing measured is known.
    """

    name: str
    reference: Callable[..., Any]
    check: Callable[..., None]
    key: Callable[..., Key]
    inputs: Callable[..., tuple[Any, ...]]
    cost: Callable[..., Cost]
    default_config: Callable[[Key], Config]
    op_class: str = "row"
    backends: dict[str, Backend] = field(default_factory=dict)
    _cache: dict[Key, _Entry] = field(default_factory=dict)
    _pins: dict[Key, tuple[str, Config | None, Source, str]] = field(default_factory=dict)
    # backend that every key uses, set by tests and by `force`; None: decide per key
    _forced: str | None = None

    def __post_init__(self) -> None:
        if self.name in _OPS:
            raise InvalidArgument(f"an op named {self.name} is already registered")
        _OPS[self.name] = self
        self.attach(
            "reference", self.reference, supports=lambda *_args, **_kwargs: None, priority=0, takes_config=False
        )

    def attach(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        supports: Callable[..., str | None],
        priority: int,
        takes_config: bool = False,
    ) -> None:
        """Add a backend; decisions made before are forgotten."""
        self.backends[name] = Backend(name, run, supports, priority, takes_config)
        self._cache.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, pick the backend for their key, run it."""
        self.check(*args, **kwargs)
        entry = self._cache.get(self.key(*args, **kwargs))
        if entry is None:
            entry = self._decide(args, kwargs)
        entry.calls += 1
        if entry.decision.config is not None:
            return entry.backend.run(*args, **kwargs, config=entry.decision.config)
        return entry.backend.run(*args, **kwargs)

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """The decision for a call, without running it."""
        self.check(*args, **kwargs)
        entry = self._cache.get(self.key(*args, **kwargs)) or self._decide(args, kwargs)
        return entry.decision

    def run(self, backend: str, *args: Any, config: Config | None = None, **kwargs: Any) -> Any:
        """Run one named backend, whatever the dispatcher would choose (tests, benchmarks, tuning).

        Raises:
            InvalidArgument: there is no backend of that name.
            Unsupported: the backend declines this call.
        """
        self.check(*args, **kwargs)
        chosen = self._backend(backend)
        reason = chosen.supports(*args, **kwargs)
        if reason is not None:
            raise Unsupported(f"{self.name}: backend {backend} declines: {reason}")
        if chosen.takes_config:
            return chosen.run(*args, **kwargs, config=config or self.default_config(self.key(*args, **kwargs)))
        return chosen.run(*args, **kwargs)

    def pin(self, key: Key, backend: str, config: Config | None, source: Source, reason: str) -> None:
        """Fix the backend of one key (a plan's dispatch rows, a tuned row)."""
        self._backend(backend)
        self._pins[key] = (backend, config, source, reason)
        self._cache.pop(key, None)

    def force(self, backend: str | None) -> None:
        """Run every call on one backend that supports it; None goes back to deciding per key."""
        if backend is not None:
            self._backend(backend)
        self._forced = backend
        self._cache.clear()

    def decisions(self) -> list[tuple[Decision, int]]:
        """The decisions made so far with the number of eager calls that used each."""
        return [(entry.decision, entry.calls) for entry in self._cache.values()]

    def _backend(self, name: str) -> Backend:
        try:
            return self.backends[name]
        except KeyError:
            raise InvalidArgument(
                f"{self.name} has no backend {name!r}; it has {', '.join(sorted(self.backends))}"
            ) from None

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        key = self.key(*args, **kwargs)
        refused: list[Refusal] = []
        pin = self._pins.get(key)
        choice: tuple[Backend, Config | None, Source, str] | None = None
        for backend in sorted(self.backends.values(), key=lambda b: -b.priority):
            reason = backend.supports(*args, **kwargs)
            if reason is not None:
                refused.append(Refusal(backend.name, reason))
            elif self._forced == backend.name:
                choice = (backend, None, "forced", "forced by the caller")
            elif self._forced is None and pin is not None and pin[0] == backend.name:
                choice = (backend, pin[1], pin[2], pin[3])
            elif choice is None:
                choice = (backend, None, "default", "highest priority that supports the call")
        if choice is None:
            raise Unsupported(f"{self.name}: no backend takes this call: {refused}")
        backend, config, source, reason = choice
        if backend.takes_config and config is None:
            config = self.default_config(key)
        decision = Decision(self.name, key, backend.name, config, source, reason, tuple(refused))
        if source == "default" and _strict != "off":
            _report_miss(decision)
        entry = _Entry(decision, backend)
        self._cache[key] = entry
        return entry


def _report_miss(decision: Decision) -> None:
    message = f"no measured row: {decision.describe()}"
    if _strict == "error":
        raise Unsupported(message)
    warnings.warn(message, DispatchMiss, stacklevel=4)


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
    """What a call without a measured row does: "off" nothing, "warn" a DispatchMiss warning, "error" Unsupported."""
    global _strict
    if mode not in ("off", "warn", "error"):
        raise InvalidArgument(f"strict takes off, warn or error, not {mode!r}")
    _strict = mode


def coverage() -> list[tuple[Decision, int]]:
    """Every decision of every op with its number of eager calls: the table to print at the end of a run."""
    return [row for name in sorted(_OPS) for row in _OPS[name].decisions()]


def m_bucket(rows: int) -> int:
    """The bucket of a row count, one scheme for all ops: exact up to 8, then powers of two, one above 65,536."""
    if rows <= 8:
        return rows
    return min(1 << (rows - 1).bit_length(), 131072)


def dtype_name(tensor: Tensor) -> str:
    """A tensor's dtype without the "torch." prefix."""
    return str(tensor.dtype).removeprefix("torch.")


_mode = env.get("WAVECREST_STRICT", "off")
if _mode in ("off", "warn", "error"):
    strict(_mode)  # type: ignore[arg-type]
else:
    raise InvalidArgument(f"WAVECREST_STRICT takes off, warn or error, not {_mode!r}")

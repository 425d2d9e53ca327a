"""Backends, dispatch decisions, and the coverage of a run: the decisions that it used."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from wavecrest.dispatch.tuned import Config

Source = Literal["exact", "near", "prior", "model", "default", "forced"]
# where a decision comes from, the best first; "forced" is the caller's
SOURCES: tuple[Source, ...] = ("exact", "near", "prior", "model", "default", "forced")
Key = tuple[Any, ...]
# the backend of every op that is PyTorch's own operation
NATIVE = "torch"

C = TypeVar("C", bound=tuple[Any, ...])
R = TypeVar("R")


class DispatchMiss(UserWarning):
    """A call has no measured row of its own (strict mode reports it)."""


class MissingKernel(UserWarning):
    """A measured row names a user's kernel that this process has not loaded; the row is ignored (said once)."""


class PortableKernel(UserWarning):
    """A call that a kernel of one architecture was chosen for runs an op's portable one; the message has the reason."""


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
    """Which backend runs the calls of one shape key, where that comes from, and who refused."""

    op: str
    key: Key
    backend: str
    config: Config | None
    source: Source
    reason: str
    refused: tuple[Refusal, ...]

    @property
    def own_kernel(self) -> bool:
        """True if one of our kernels runs the calls: those alone have configurations."""
        return self.config is not None

    @property
    def native(self) -> bool:
        """True if PyTorch's own operation runs the calls."""
        return self.backend == NATIVE

    def _repr_html_(self) -> str:
        """The decision for a notebook: what runs and why, and why not the others."""
        head = f"<b>{html.escape(f'{self.op}: {self.backend}')}</b><br>{html.escape(f'{self.source}: {self.reason}')}"
        rows = [("key", repr(self.key)), *((f"not {one.backend}", one.reason) for one in self.refused)]
        if self.config is not None:
            rows.insert(0, ("configuration", repr(self.config)))
        cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in rows)
        return f"<div>{head}<table>{cells}</table></div>"

    def describe(self, fields: Sequence[str] = ()) -> str:
        """One line for people; `fields`: names of the key's parts, as `Op.key_fields`."""
        config = f" {self.config!r}" if self.config is not None else ""
        named = ", ".join(f"{name}={value}" for name, value in zip(fields, self.key, strict=False))
        return f"{self.op}{f'({named})' if named else self.key}: {self.backend}{config} ({self.source}: {self.reason})"


@dataclass(frozen=True, slots=True)
class Backend(Generic[C, R]):
    """One implementation of an op.

    Attributes:
        name: unique within its op.
        run: runs one call: `run(call)`, or `run(call, config)` where it takes a configuration.
        bind: does once what is the same for all calls of one signature (shapes, strides, dtypes, device) and returns
            the function for them: `bind(call)` or `bind(call, config)`; None: `run` is called.
        refuse: the reason why this call cannot run here, or None. It must look only at what the op's key contains
            (dtype, device, sizes), since its answer is cached by that key.
        opt_in: the reason why a call that it takes runs here only when forced, pinned, named or measured, or None.
        priority: the highest that neither refuses nor is opt-in is the default choice.
        default_config: the configuration of a key where nothing measured is known; it names every parameter that the
            backend needs. None: it takes no configuration.
        optional: parameters that a configuration may have beside them, as rows measured before a parameter was there
            do not have it.
        as_native: its results are rounded on the way where PyTorch's are, and judged as those.
        configs: the configurations that it may run with, the default first, where the op's study has no space for it;
            a row with another one is not used.
        user: a user's kernel, which `refuse` holds to the op's contract.
    """

    name: str
    run: Callable[..., R]
    bind: Callable[..., Callable[[C], R]] | None
    refuse: Callable[[C], str | None]
    opt_in: Callable[[C], str | None]
    priority: int
    default_config: Callable[[Key], Config] | None = None
    optional: tuple[str, ...] = ()
    as_native: bool = False
    configs: tuple[Config, ...] = ()
    user: bool = False

    @property
    def takes_config(self) -> bool:
        """True for a kernel with configurations."""
        return self.default_config is not None


@dataclass(slots=True)
class OpCoverage:
    """The decisions of one op: keys and eager calls by source.

    Calls that torch.compile compiled are decided and not counted: their keys have no calls.
    """

    op: str
    keys: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, source: str, calls: int) -> None:
        """Count one more key."""
        self.keys[source] = self.keys.get(source, 0) + 1
        self.calls[source] = self.calls.get(source, 0) + calls


class Coverage(list[tuple[Decision, int]]):
    """Decisions with the number of eager calls that used each: in the process so far, or in a `with` block.

    >>> with wavecrest.coverage() as seen:
    ...     model(x)
    >>> print(seen)

    Inside the block it holds what it held before; at its end the decisions that were made or used inside.
    """

    def __init__(self, now: Callable[[], list[tuple[Decision, int]]]) -> None:
        super().__init__(now())
        self._now = now

    def __enter__(self) -> Coverage:
        self._before = {_identity(decision): calls for decision, calls in self._now()}
        return self

    def __exit__(self, *_error: object) -> None:
        rows = []
        for decision, calls in self._now():
            before = self._before.get(_identity(decision))
            # decisions that were forgotten inside count anew
            counted = calls - before if before is not None and calls >= before else calls
            if before is None or counted > 0:
                rows.append((decision, counted))
        self[:] = rows

    def by_op(self) -> list[OpCoverage]:
        """The number of decisions by source, one row per op, in the order of op names."""
        found: dict[str, OpCoverage] = {}
        for decision, calls in sorted(self, key=lambda row: row[0].op):
            found.setdefault(decision.op, OpCoverage(decision.op)).add(decision.source, calls)
        return list(found.values())

    def __str__(self) -> str:
        lines = [f"{'op':24} {'calls':>8}" + "".join(f" {source:>8}" for source in SOURCES)]
        for row in self.by_op():
            counts = "".join(f" {row.calls.get(source, 0):8}" for source in SOURCES)
            lines.append(f"{row.op:24} {sum(row.calls.values()):8}{counts}")
        return "\n".join(lines)


def _identity(decision: Decision) -> tuple[Any, ...]:
    return decision.op, decision.key, decision.backend, decision.config, decision.source

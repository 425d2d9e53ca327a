"""Pick a configuration for a shape key: its measured row, then a near row, a published one, the cost model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from wavecrest import hardware
from wavecrest.dispatch.decision import Backend, Key, MissingKernel, Source
from wavecrest.dispatch.study import Study
from wavecrest.dispatch.tuned import LAUNCH_OPTIONS, Cell, Config, Database, Proposal, Row, near
from wavecrest.hardware import Arch

# parts of a key that measured rows have no column for: they are those of calls on a GPU without gradients. A call that
# writes over its arguments cannot be timed by repeating it: it runs as the one that writes beside them was measured
UNLISTED = ("device", "grad", "in_place")

# backend ("" for none), its configuration, source, reason
Answer = tuple[str, tuple[tuple[str, int], ...], Source, str]

# (op, backend) of rows whose kernel is missing, which a warning was given of
_missing: set[tuple[str, str]] = set()


class Described(Protocol):
    """The attributes of an op that a look-up reads (see `wavecrest.dispatch.op.Op`)."""

    name: str
    key_fields: tuple[str, ...]
    key_sizes: tuple[str, ...]

    @property
    def backends(self) -> Mapping[str, Backend[Any, Any]]:
        """The backends by name."""

    @property
    def study(self) -> Study[Any]:
        """The part of the op that only tools need, such as its cost model."""

    def by_priority(self) -> tuple[Backend[Any, Any], ...]:
        """The backends by falling priority."""

    def config_of(self, backend: str, key: Key) -> Config:
        """A backend's default configuration."""


def find(op: Described, key: Key, taking: tuple[str, ...], fallback: str, database: Database) -> Answer:
    """Backend, configuration, source and reason for a key; the backend is "" where nothing that is known can be used.

    Args:
        op, key: the call's.
        taking: the backends that take it.
        fallback: the one that runs where nothing is known; "" for none.
        database: the measured rows.

    Raises:
        TableError: a table is malformed.
    """
    found = columns(op, key)
    if found is None:
        return "", (), "default", ""
    fields, cells = found
    exact = database.look_up(op.name, fields, cells)
    note = ""
    if exact is not None:
        problem = unusable(op, key, taking, exact.backend, exact.config)
        if not problem:
            return exact.backend, pairs(exact.config), exact.source, exact.reason
        note = f"; {exact.reason} for {exact.backend}, {problem}"
    row, reason = _near(op, key, taking, fallback, database, fields, cells)
    if row is not None:
        return row.backend, pairs(row.config), "near", reason + note
    note += f"; {reason}" if reason else ""
    prior = database.prior(op.name, fields, cells)
    if prior is not None:
        problem = _not_here(op, taking, prior.backend)
        if not problem:
            return prior.backend, (), prior.source, prior.reason + note
        note += f"; {prior.reason} for {prior.backend}, {problem}"
    proposal, problem = _proposal(op, key, taking, fallback, hardware.ARCHS.get(database.arch))
    if proposal is not None:
        return proposal.backend, pairs(proposal.config), "model", proposal.reason + note
    return "", (), "default", note + problem


def along(op: Described, key: Key, database: Database) -> list[tuple[int, Row]]:
    """The measured rows that differ from a key in the first of its sizes alone, and its own, by that size."""
    found = columns(op, key)
    if found is None or not op.key_sizes:
        return []
    fields, cells = found
    place = fields.index(op.key_sizes[0])
    rows = [row for row in database.rows(op.name, fields).values() if isinstance(row.key[place], int)]
    same = [row for row in rows if row.key[:place] + row.key[place + 1 :] == cells[:place] + cells[place + 1 :]]
    return sorted(((int(row.key[place] or 0), row) for row in same), key=lambda pair: pair[0])


def pairs(config: Config | None) -> tuple[tuple[str, int], ...]:
    """A configuration's parameters."""
    return () if config is None else tuple(config.kwargs.items())


def columns(op: Described, key: Key) -> tuple[tuple[str, ...], tuple[Cell, ...]] | None:
    """The parts of a key that measured rows have, by name; None for calls without rows: on a CPU, or with gradients."""
    parts = dict(zip(op.key_fields, key, strict=False))
    if parts.get("device") != "cuda" or parts.get("grad", False):
        return None
    fields = fields_of(op)
    return fields, tuple([parts[field] for field in fields])


def fields_of(op: Described) -> tuple[str, ...]:
    """The parts of an op's key that measured rows have columns for."""
    return tuple([name for name in op.key_fields if name not in UNLISTED])


def unusable(op: Described, key: Key, taking: tuple[str, ...], backend: str, config: Config | None) -> str:
    """Why a call cannot run as measured; "" where it can."""
    return _not_here(op, taking, backend) or misfit(op, key, backend, config)


def _not_here(op: Described, taking: tuple[str, ...], backend: str) -> str:
    """Why a backend does not run a call; "" where it does."""
    if is_missing(op, backend):
        return f"which {op.name} does not have"
    return "" if backend in taking else "which refuses it"


def is_missing(op: Described, backend: str) -> bool:
    """True if an op has no backend of a name that a measured row has; the first time it is a MissingKernel warning."""
    if backend in op.backends:
        return False
    if (op.name, backend) not in _missing:
        _missing.add((op.name, backend))
        warnings.warn(
            f"measured rows of {op.name} name the kernel {backend!r}, which is not registered in this process: they "
            "are ignored; load it with --kernels FILE or WAVECREST_KERNELS, or install its package",
            MissingKernel,
            stacklevel=2,
        )
    return True


def _near(
    op: Described,
    key: Key,
    taking: tuple[str, ...],
    fallback: str,
    database: Database,
    fields: tuple[str, ...],
    cells: tuple[Cell, ...],
) -> tuple[Row | None, str]:
    """The row of a neighbouring size to take for a key, with the reason; or None, with the reason why not."""
    sizes = tuple(place for place, name in enumerate(fields) if name in op.key_sizes)
    if not sizes or not fallback:
        return None, ""
    rows = database.rows(op.name, fields).values()
    neighbours = [
        near.Neighbour(one.distance, carried(op, key, one.row, fields)) for one in near.neighbours(rows, cells, sizes)
    ]
    arch = hardware.ARCHS.get(database.arch)
    spaces: dict[str, frozenset[Config]] = {}

    def misfit(row: Row) -> str:
        problem = unusable(op, key, taking, row.backend, row.config)
        if problem or row.config is None:
            return problem
        if row.backend not in spaces:
            spaces[row.backend] = _space(op, key, row.backend, arch)
        return "" if row.config in spaces[row.backend] else f"{row.config!r} is not in the search space of this call"

    found = near.choose(neighbours, fallback, partial(baseline, op, taking, fallback), misfit)
    if found.row is None:
        return None, found.reason
    return found.row, f"{database.said(op.name, found.row)} for {_others(fields, found.row, cells)}: {found.reason}"


def carried(op: Described, key: Key, row: Row, fields: tuple[str, ...]) -> Row:
    """A row carried over to another key: where it ran its backend's default configuration, it gets the key's default.

    A default may depend on sizes (splits that fill all compute units), so it is computed again for those of the key.
    """
    if row.config is None or row.backend not in op.backends or not op.backends[row.backend].takes_config:
        return row
    parts = dict(zip(op.key_fields, key, strict=False)) | dict(zip(fields, row.key, strict=True))
    there = op.config_of(row.backend, tuple(parts.values()))
    return replace(row, config=op.config_of(row.backend, key)) if there == row.config else row


def baseline(op: Described, taking: tuple[str, ...], fallback: str, row: Row) -> float | None:
    """The fallback's time in the run that measured a row, in µs; None where that run did not time the fallback.

    Each run times PyTorch and the default configuration of one backend: the first by priority that takes the call and
    has configurations.
    """
    if fallback == "torch":
        return row.native_us
    first = next((one.name for one in op.by_priority() if one.name in taking and one.takes_config), None)
    return row.evidence.default_us if fallback == first else None


def _space(op: Described, key: Key, backend: str, arch: Arch | None) -> frozenset[Config]:
    """The configurations of a backend that can work for a key: LDS, registers and divisibility allow them."""
    space = op.study.kernel(backend).space
    tried = op.backends[backend].configs if space is None or arch is None else space(key, arch)
    return frozenset([op.config_of(backend, key), *tried])


def _others(fields: tuple[str, ...], row: Row, cells: tuple[Cell, ...]) -> str:
    """The parts of a row's key that differ from those of a call."""
    pairs = zip(fields, row.key, cells, strict=True)
    return " ".join(f"{name}={there}" for name, there, here in pairs if there != here)


def _proposal(
    op: Described, key: Key, taking: tuple[str, ...], fallback: str, arch: Arch | None
) -> tuple[Proposal | None, str]:
    """The proposal of the op's cost model; or None, with the reason where the proposal cannot run."""
    model = None if arch is None else op.study.model
    if model is None or arch is None:
        return None, ""
    proposal = model(key, arch, taking, fallback)
    if proposal is None:
        return None, ""
    problem = unusable(op, key, taking, proposal.backend, proposal.config)
    return (None, f"; modelled {proposal.backend}, {problem}") if problem else (proposal, "")


def misfit(op: Described, key: Key, backend: str, config: Config | None) -> str:
    """Why a measured configuration does not fit: it lacks a parameter of the default, or has unknown ones; or ""."""
    given = {} if config is None else config.kwargs
    if not op.backends[backend].takes_config:
        return f"which takes no configuration ({_words(given)})" if given else ""
    choices = op.backends[backend].configs
    if choices and config not in choices:
        return f"which was not registered with {_words(given)}"
    known, more = op.config_of(backend, key).kwargs, (*op.backends[backend].optional, *LAUNCH_OPTIONS)
    unknown = {name: value for name, value in given.items() if name not in known and name not in more}
    if unknown:
        return f"which does not know {_words(unknown)}"
    missing = [name for name in known if name not in given and name not in more]
    return f"which needs {' '.join(missing)} too" if missing else ""


def _words(config: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())

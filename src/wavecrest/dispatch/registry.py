"""The ops of this process, and what decides for all of them: measured rows, strictness, the record of untuned calls."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from wavecrest import env, hardware, records
from wavecrest.dispatch import lookup
from wavecrest.dispatch.decision import Coverage, Key
from wavecrest.dispatch.op import STATE, Decisions, Op, Strict
from wavecrest.dispatch.tuned import Config, Database, Row, untuned_calls
from wavecrest.errors import InvalidArgument, PlanMismatch

# modules that attach backends to ops by name; imported by load_backends, never by an op
BACKEND_MODULES = (
    "wavecrest.backends.torch.causal_conv1d",
    "wavecrest.backends.torch.conv2d",
    "wavecrest.backends.torch.flash_attention",
    "wavecrest.backends.torch.flash_decoding",
    "wavecrest.backends.torch.gated",
    "wavecrest.backends.torch.gemm",
    "wavecrest.backends.torch.memcpy",
    "wavecrest.backends.torch.mla",
    "wavecrest.backends.torch.mlstm",
    "wavecrest.backends.torch.moe",
    "wavecrest.backends.torch.rope",
    "wavecrest.backends.torch.rows",
    "wavecrest.backends.torch.slstm",
    "wavecrest.backends.torch.topk_routing",
    "wavecrest.backends.gemm_then_act",
    "wavecrest.backends.blas",
    "wavecrest.backends.addmm_activation",
    "wavecrest.backends.split_bias",
    "wavecrest.backends.onednn",
    "wavecrest.backends.sdpa",
    "wavecrest.backends.aiter",
    "wavecrest.backends.flydsl",
)


# loads users' kernels and ops, of packages and of WAVECREST_KERNELS
USER_KERNELS = "wavecrest.backends.user_files"


def load_backends() -> None:
    """Import the modules that attach backends; called when `wavecrest.ops` is imported.

    After it wavecrest's ops take no other backend than users' kernels, which are checked.
    """
    for name in BACKEND_MODULES:
        importlib.import_module(name)
    for op in STATE.ops.values():
        op.close()


def load_user_kernels() -> None:
    """Load the kernels and ops of installed packages and of WAVECREST_KERNELS; called at the end of `wavecrest.ops`.

    A package that cannot be loaded is a warning, and a file that cannot be loaded an error.

    Raises:
        WorkloadError: what WAVECREST_KERNELS names cannot be loaded.
    """
    importlib.import_module(USER_KERNELS).load_all()


def get(name: str) -> Op[Any, Any]:
    """The op of a name; ops register when `wavecrest.ops` is imported.

    Raises:
        InvalidArgument: there is no op of that name; the message lists all names.
    """
    try:
        return STATE.ops[name]
    except KeyError:
        known = f"there are {', '.join(names())}" if STATE.ops else "none are registered: import wavecrest.ops first"
        near = difflib.get_close_matches(str(name), STATE.ops, 1, 0.75)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidArgument(f"no op named {name!r}{meant}; {known}") from None


def names() -> list[str]:
    """The names of all ops, sorted; ops register when `wavecrest.ops` is imported."""
    return sorted(STATE.ops)


def strict(mode: Strict) -> None:
    """Choose what happens at a call whose key has no measured row, whether a near row, a model or the default runs it.

    Args:
        mode: "off": nothing; "warn": a DispatchMiss warning; "error": Unsupported is raised.

    Raises:
        InvalidArgument: the mode is not one of these three.
    """
    if mode not in ("off", "warn", "error"):
        raise InvalidArgument(f"strict takes off, warn or error, not {mode!r}")
    STATE.strict = mode
    if mode != "off":
        # decisions made before were not reported
        forget()


def forget() -> None:
    """Forget every op's decisions and call counts; the next call of each decides anew (pins stay)."""
    for op in STATE.ops.values():
        op.forget()


@contextlib.contextmanager
def measured_in(database: Database) -> Iterator[None]:
    """Decide by the rows of another database; every op decides anew, on entering and on leaving.

    Functions that torch.compile has compiled before keep their decisions.
    """
    before, STATE.database = STATE.database, database
    forget()
    try:
        yield
    finally:
        STATE.database = before
        forget()


@contextlib.contextmanager
def in_turn(*databases: Database) -> Iterator[tuple[Callable[[], None], ...]]:
    """A function for each database that lets its rows decide from now on, with the decisions made by them before.

    Unlike `measured_in` going back costs no new decisions, so that calls can be timed in turn.
    """
    before, ops = STATE.database, list(STATE.ops.values())
    outside = [op.swap(None) for op in ops]
    kept: dict[int, list[Decisions]] = {}
    active: int | None = None

    def chosen(index: int) -> None:
        nonlocal active
        if active != index:
            made = [op.swap(own) for op, own in zip(ops, kept.get(index, [None] * len(ops)), strict=True)]
            if active is not None:
                kept[active] = made
            active, STATE.database = index, databases[index]

    try:
        yield tuple([partial(chosen, index) for index in range(len(databases))])
    finally:
        STATE.database = before
        for op, own in zip(ops, outside, strict=True):
            op.swap(own)


def database() -> Database:
    """The measured rows that decide now."""
    return STATE.database


def measured_along(op: Op[Any, Any], key: Key) -> list[tuple[int, Row]]:
    """The measured rows that differ from a call's key in the first of `key_sizes` alone, and its own, by that size."""
    return lookup.along(op, key, STATE.database)


def reread() -> None:
    """Read the measured rows anew, after they have changed, and forget every op's decisions (pins stay)."""
    STATE.database.forget()
    forget()


def pin_tuned(path: Path | str) -> int:
    """Fix the choices that a record of `wavecrest tune` found, for this process: `Op.pin` for each of its keys.

    For CPUs, whose calls have no measured rows in a database, and where a record is served as it is. Calls inside
    torch.compile do not know their number of rows, and are decided as before.

    Args:
        path: written by `wavecrest tune OP --out FILE`.

    Returns:
        The number of keys that are pinned; a key that a missing kernel won is left out with a MissingKernel warning.

    Raises:
        RecordError: it is damaged, or no record of a tuning run.
        PlanMismatch: it was measured on another device.
    """
    record = records.load_as(Path(path), records.TuneRecord)
    was, kind = record.header.device, record.header.device["kind"]
    here = hardware.detect("cpu" if kind == "cpu" else None)
    if was["name"] != here.name:
        raise PlanMismatch(f"{path} was measured on {was['name']}, and this is {here.name}: tune here")
    op, pinned = get(record.op), 0
    for found in record.keys:
        if found.backend is None or lookup.is_missing(op, found.backend):
            continue
        config = Config(**found.config) if found.config else None
        op.pin(tuple(found.key.values()), found.backend, config, "exact", f"{found.us:.3g} µs, pinned from {path}")
        pinned += 1
    return pinned


def record_misses(path: Path | None) -> None:
    """Append the key of every call on a GPU without a measured row of its own to a file, for `wavecrest tune FILE`.

    Args:
        path: the file, JSON lines; None: none from now on. Decisions made before are recorded when they are made anew.

    Raises:
        OutputError: it cannot be written.
    """
    STATE.recorder = None if path is None else untuned_calls.Recorder(path)
    if path is not None:
        forget()


def coverage() -> Coverage:
    """Every decision of every op with its number of eager calls: the table to print at the end of a run.

    As a context manager it holds those of the block: see `wavecrest.dispatch.decision.Coverage`.
    """
    return Coverage(lambda: [row for name in sorted(STATE.ops) for row in STATE.ops[name].decisions()])


# empty is not set, and capitals do not matter, as for the variables of `settings`
_mode = (env.get("WAVECREST_STRICT") or "off").lower()
if _mode in ("off", "warn", "error"):
    strict(_mode)  # type: ignore[arg-type]
else:
    raise InvalidArgument(f"WAVECREST_STRICT takes off, warn or error, not {_mode!r}")

if env.get("WAVECREST_MISSES"):
    record_misses(Path(env.get("WAVECREST_MISSES")))

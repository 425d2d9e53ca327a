"""A measured row: the fastest way found to run the calls of one key, with the evidence for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from wavecrest import hardware
from wavecrest.dispatch.tuned.config import Config

Cell = int | bool | str | None
RowKey = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The run that a row comes from; a field is empty where it is not known.

    Args:
        default_us: the time of the default configuration in the same run, in µs.
        error: the relative error against the op's definition (`numerics.compare`).
        device: the name of the device.
        units: its compute units.
        versions: of what ran, as `Here.versions`.
        date: when it was measured, ISO 8601 in UTC.
        commit: of wavecrest.
        origin: whose measurement it is where `wavecrest tune` did not make it, for people.
        detail: what another program's table has beside, "NAME=VALUE …", so that it can be written back.
    """

    default_us: float | None = None
    error: float | None = None
    device: str = ""
    units: int | None = None
    versions: str = ""
    date: str = ""
    commit: str = ""
    origin: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """The fastest way found to run the calls of one key.

    Args:
        key: the parts of the op's key that the table has columns for.
        backend: the backend's name.
        config: its configuration; None for a backend that takes none.
        us: its time on the device, in µs, kept to the nanosecond.
        native_us: PyTorch's in the same run; None where PyTorch does not run the call, or was not timed beside it.
        record: the result file that says so, under evidence/, and after "@" the hash of its content
            (`records.files.content_hash`); older rows have no hash.
        evidence: see `Evidence`.
    """

    key: RowKey
    backend: str
    config: Config | None
    us: float
    native_us: float | None
    record: str
    evidence: Evidence = field(default=Evidence())


@dataclass(frozen=True, slots=True)
class Proposal:
    """The choice for a key by the database or a cost model; `reason` is for people."""

    backend: str
    config: Config | None
    source: Literal["exact", "near", "prior", "model"]
    reason: str


@dataclass(frozen=True, slots=True)
class Here:
    """The device and the versions of this process, as rows have them."""

    arch: str
    device: str
    units: int
    versions: str


def versions_text(torch: str | None, triton: str | None, driver: str) -> str:
    """The versions that a time depends on, in one cell."""
    return "; ".join(part for part in (f"torch {torch}", f"triton {triton}", driver) if part)


@cache
def here() -> Here:
    """Device and versions of this process; looked up once."""
    from importlib import metadata

    import torch

    device = hardware.detect()
    triton: str | None = None
    for package in ("triton", "pytorch-triton-rocm"):
        try:
            triton = metadata.version(package)
            break
        except metadata.PackageNotFoundError:
            continue
    return Here(device.arch, device.name, device.compute_units, versions_text(torch.__version__, triton, device.driver))


_assumed: hardware.Arch | None = None


@contextmanager
def assumed(target: hardware.Arch) -> Iterator[None]:
    """Inside, rows are compared with the part of an architecture, which need not be here, and not with this device."""
    global _assumed
    before, _assumed = _assumed, target
    try:
        yield
    finally:
        _assumed = before


def said(row: Row, *, user: bool = False) -> str:
    """Times and source of a row, and how device and versions differ from those here, as text for people."""
    evidence = row.evidence
    native = "native PyTorch does not run it" if row.native_us is None else f"native {row.native_us:.1f} µs"
    if evidence.origin:
        native = f"by {evidence.origin}"
    text = f"measured {row.us:.1f} µs, {native} ({row.record}{', user database' if user else ''})"
    other = differences(evidence)
    return f"{text}, measured with {other}" if other else text


def differences(evidence: Evidence) -> str:
    """The parts of a row's device and versions that differ from those here; "" where they are the same or not known."""
    now = here()
    found = []
    device, units, where = now.device, now.units, "here"
    if _assumed is not None:
        # a part is named without its vendor
        part = _assumed.part
        device = evidence.device if part in evidence.device else part
        units, where = _assumed.compute_units, f"on {part}"
    if evidence.device and evidence.device != device:
        found.append(evidence.device)
    if evidence.units is not None and evidence.units != units:
        found.append(f"{evidence.units} compute units, {units} {where}")
    mine = now.versions.split("; ")
    found += [part for part in evidence.versions.split("; ") if part and part not in mine]
    return ", ".join(found)

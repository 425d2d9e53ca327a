"""The proof bundle: one file with all that a run's claim rests on, for somebody who does not trust its maker.

| member | holds |
|---|---|
| `bundle.json` | `Manifest`: hashes of the other members, and of what the run was made with |
| `run.json` | the record: every sample, verdict, seed and version, and the machine |
| `plan.json` | the plan |

It is data: nothing of it is imported, run or looked up, and no path in it is opened but to compare a hash with that of
the checker's own file. Its hashes protect it from damage, not from its maker: `confirm` checks what it claims.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
import torch
from pydantic import Field

from wavecrest.errors import BundleError, RecordError
from wavecrest.measure.workload import source_of
from wavecrest.optimizer.gate.snapshot import bits, in_parts
from wavecrest.optimizer.plan import Plan
from wavecrest.records import OptimizeRecord, archive, decode, files, of_value, provenance

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.gate import Gate

FORMAT_VERSION = 1
MANIFEST, RUN, PLAN = "bundle.json", "run.json", "plan.json"
MEMBERS = (MANIFEST, RUN, PLAN)
WHAT = "proof bundle"
# source files of a workload at most: beyond, its own file alone
MOST_SOURCES = 500
# elements of a tensor that are hashed at a time
CHUNK = 1 << 26

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _is_inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or len(name) > 1000:
        raise ValueError(f"{name[:80]!a} is no path below the workload's folder")
    return name


class InputHashes(files.Model):
    """One bucket: hashes of its example's tensors by path, and of each set of values that the gate drew, by kind."""

    bucket: str
    example: dict[str, Hash]
    drawn: list[tuple[str, Hash]]


class Manifest(files.Model):
    """Contents of a bundle, and what its run was made with, as SHA-256.

    Attributes:
        members: of the other members.
        sources: of the workload's source files, by path from the folder of its own file; empty for a model in memory.
        weights: of the model's parameters and buffers: names, shapes, dtypes and bits.
        inputs: by bucket.
        seed: what the gate's values were drawn from.
    """

    kind: Literal["bundle"] = "bundle"
    format_version: pydantic.StrictInt = FORMAT_VERSION
    created: str
    wavecrest: str
    # hash of wavecrest's own source files, as in headers of records
    source: str
    members: dict[Literal["run.json", "plan.json"], Hash]
    sources: dict[Annotated[str, pydantic.AfterValidator(_is_inside)], Hash]
    weights: Hash
    inputs: list[InputHashes]
    seed: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as it was read: every part is of a known form, and nothing is checked yet.

    Attributes:
        content: the first digits of the SHA-256 of the file.
    """

    manifest: Manifest
    record: OptimizeRecord
    plan: Plan
    content: str


def write(path: Path, record: OptimizeRecord, plan: Plan, workload: Workload, gate: Gate) -> None:
    """Write the bundle of a finished run, whole or not at all.

    Args:
        path: the file.
        record: the run.
        plan: its plan.
        workload: what was optimized, as it was given.
        gate: the run's gate, whose seed and values are named.

    Raises:
        OutputError: the file cannot be written.
        BundleError: the record is too large.
    """
    members = {
        RUN: (record.model_dump_json(indent=1) + "\n").encode(),
        PLAN: (plan.model_dump_json(indent=1) + "\n").encode(),
    }
    manifest = Manifest(
        created=record.header.created,
        wavecrest=record.header.versions.wavecrest,
        source=provenance.source(),
        members={name: hashlib.sha256(held).hexdigest() for name, held in members.items()},  # type: ignore[misc]
        sources=hash_sources(workload.spec),
        weights=hash_weights(workload.model),
        inputs=hash_inputs(workload, gate),
        seed=gate.seed,
    )
    archive.write(path, {MANIFEST: (manifest.model_dump_json(indent=1) + "\n").encode(), **members})


def read(path: Path) -> Bundle:
    """Read a bundle.

    Raises:
        BundleError: no such file, damaged, foreign, or newer than this version.
        RecordError, PlanError: a member is.
    """
    held = archive.read(path, MEMBERS, what=WHAT)
    values = {name: _value(name, content, path) for name, content in held.items()}
    shown = decode.shown(path)
    document = files.document_of(values[MANIFEST], shown, what=WHAT, current=FORMAT_VERSION, error=BundleError)
    try:
        manifest = Manifest.model_validate(document)
    except pydantic.ValidationError as problem:
        raise BundleError(f"the {WHAT} {shown} is damaged: {files.first_problem(problem)}") from None
    for name in (RUN, PLAN):
        if manifest.members.get(name) != hashlib.sha256(held[name]).hexdigest():  # type: ignore[call-overload]
            raise BundleError(f"the {WHAT} {shown} is damaged: the content of {name} is not what {MANIFEST} says")
    record = of_value(values[RUN], f"{RUN} of {shown}")
    if not isinstance(record, OptimizeRecord):
        raise RecordError(f"{RUN} of {shown} is a result of {record.kind}, not of optimize")
    plan = Plan.of_value(values[PLAN], f"{PLAN} of {shown}")
    return Bundle(manifest, record, plan, files.content_hash(path))


def _value(name: str, content: bytes, path: Path) -> object:
    try:
        found: object = decode.json_of(content)
    except decode.Undecodable as problem:
        raise BundleError(f"the {WHAT} {decode.shown(path)} is damaged: {name}: {problem}") from None
    return found


def hash_sources(spec: str | None) -> dict[str, str]:
    """Hashes of a workload's own source file and of the loaded modules that lie beside and below it, by path.

    Packages that were installed are known by their versions. Of a Hugging Face folder: its JSON files.
    """
    source = source_of(spec) if spec is not None else None
    if source is None:
        return {}
    if source.is_dir():
        return {one.name: _hash_file(one) for one in sorted(source.glob("*.json"))}
    folder = source.parent
    found = {source.name: source}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        # there are thousands of modules: text is compared before the disk is asked
        if not isinstance(name, str) or not name.endswith(".py") or not name.startswith(f"{folder}{os.sep}"):
            continue
        path = Path(name)
        if path.is_file() and _is_own(path, folder):
            found[path.relative_to(folder).as_posix()] = path
    if len(found) > MOST_SOURCES:
        found = {source.name: source}
    return {name: _hash_file(found[name]) for name in sorted(found)}


def _is_own(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    installed = any(part in ("site-packages", "dist-packages") or part.startswith(".") for part in parts)
    return not installed and not path.is_relative_to(provenance.PACKAGE)


def compare_sources(claimed: Mapping[str, str], spec: str) -> list[str]:
    """Names of a manifest's source files that are missing or different beside the workload that a checker has."""
    source = source_of(spec)
    if source is None:
        return list(claimed)
    folder = source if source.is_dir() else source.parent
    return [name for name, digest in claimed.items() if not _has(folder / name, digest)]


def _has(path: Path, digest: str) -> bool:
    try:
        return _hash_file(path) == digest
    except (OSError, ValueError):
        return False


def _hash_file(path: Path) -> str:
    return hashlib.sha256(decode.content(path)).hexdigest()


def hash_weights(model: nn.Module) -> str:
    """The hash of a model's parameters and buffers: names, shapes, dtypes and bits."""
    total = hashlib.sha256()
    for name, tensor in in_parts(dict((*model.named_parameters(), *model.named_buffers()))).items():
        total.update(f"{name}\0{hash_tensor(tensor)}\0".encode())
    return total.hexdigest()


def hash_inputs(workload: Workload, gate: Gate) -> list[InputHashes]:
    """Hashes of the example inputs, and of the values that a gate has drawn."""
    sites = {site.bucket: site for site in gate.sites}
    rows = []
    for bucket, inputs in workload.buckets.items():
        example = {path: hash_tensor(tensor) for path, tensor in inputs.tensors()}
        cases = sites[bucket].cases if bucket in sites else []
        drawn = [(case.kind, _together(case.values)) for case in cases]
        rows.append(InputHashes(bucket=bucket, example=example, drawn=drawn))
    return rows


def _together(values: list[Tensor]) -> str:
    return hashlib.sha256("".join(map(hash_tensor, values)).encode()).hexdigest()


def hash_tensor(tensor: Tensor) -> str:
    """The hash of a tensor's shape, dtype, scales of a quantized one, and bits, wherever it lies."""
    total = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}{_scales(tensor)}\0".encode())
    plain = tensor.detach()
    for part in _parts(plain if plain.layout == torch.strided else plain.to_dense()):
        total.update(part.cpu().numpy().tobytes())
    return total.hexdigest()


def _scales(tensor: Tensor) -> str:
    if not tensor.is_quantized:
        return ""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f" {tensor.q_scale()!r} {tensor.q_zero_point()}"
    parts = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return f" {tensor.q_per_channel_axis()} {_together(list(parts))}"


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    flat = bits(tensor)
    for begin in range(0, flat.numel(), CHUNK):
        yield flat[begin : begin + CHUNK]

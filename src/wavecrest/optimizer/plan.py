"""The plan file: what was decided, for which machine and model, with the evidence; replayed at serve time.

JSON with a format version, never pickle. Applying a plan: an exact fingerprint replays it; the same architecture with
other versions verifies the numerics again, step by step; another architecture or another model refuses.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field

from wavecrest import env, hardware
from wavecrest.errors import PlanError, PlanMismatch, PlanWarning
from wavecrest.records import DecisionRow, Result, StepOutcome, decode, files, provenance
from wavecrest.report import notebook, numbers

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload

__all__ = [
    "FORMAT_VERSION",
    "BucketSpec",
    "EnvironmentSetting",
    "Fingerprint",
    "ModelIdentity",
    "Plan",
    "PlanWarning",
]

FORMAT_VERSION = 1


class Fingerprint(files.Model):
    """Device, driver and versions that the measurements depend on."""

    arch: str
    device: str
    compute_units: int
    driver: str
    torch: str
    triton: str | None
    transformers: str | None
    wavecrest: str

    @classmethod
    def of(cls, device: hardware.Device) -> Fingerprint:
        """The fingerprint of this process on `device`."""
        versions = provenance.versions()
        return cls(
            arch=device.arch,
            device=device.name,
            compute_units=device.compute_units,
            driver=device.driver,
            torch=versions.torch or "none",
            triton=versions.triton,
            transformers=versions.transformers,
            wavecrest=versions.wavecrest,
        )

    def differences(self, other: Fingerprint) -> list[str]:
        """The fields that differ, as "torch 2.12 → 2.13"."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [f"{key} {mine[key]} → {theirs[key]}" for key in mine if mine[key] != theirs[key]]


class ModelIdentity(files.Model):
    """Which model: its class, and a hash over module classes, parameter names, shapes and dtypes (not values)."""

    cls: str
    structure: str
    parameters: int
    dtype: str

    @classmethod
    def of(cls, model: nn.Module, dtype: str) -> ModelIdentity:
        """The identity of a model in memory."""
        digest = hashlib.sha256()
        for path, module in model.named_modules():
            digest.update(f"{path} {type(module).__qualname__}\n".encode())
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            digest.update(f"{path} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        count = sum(parameter.numel() for parameter in model.parameters())
        return cls(cls=type(model).__qualname__, structure=digest.hexdigest()[:32], parameters=count, dtype=dtype)


class EnvironmentSetting(files.Model):
    """A variable to set; `when` says from when on it must be set to act."""

    name: str
    value: str
    when: Literal["before import"] = "before import"
    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    @pydantic.model_validator(mode="after")
    def _known(self) -> EnvironmentSetting:
        # a variable can name code to run (PYTHONSTARTUP, LD_PRELOAD, BROWSER), and verify sets what a plan says
        if not env.may_try(self.name, self.value):
            raise ValueError(f"{self.name}={self.value} is not in this wavecrest's table of variables to try")
        return self


class BucketSpec(files.Model):
    """The shapes a plan was measured for: {input path: "1x32 int64"}."""

    name: str
    shapes: dict[str, str]


class Plan(files.Model):
    """Decisions of `optimize`. `steps` has every verdict; the kept steps are replayed in their order."""

    kind: Literal["plan"] = "plan"
    format_version: pydantic.StrictInt = FORMAT_VERSION
    created: str
    workload: str
    spec: str | None
    fingerprint: Fingerprint
    model: ModelIdentity
    buckets: list[BucketSpec]
    environment: list[EnvironmentSetting] = Field(default_factory=list)
    steps: list[StepOutcome] = Field(default_factory=list)
    # ids of the steps in force at the end, in order; a kept step may have been replaced by a later one of its group
    stack: list[str] = Field(default_factory=list)
    dispatch: list[DecisionRow] = Field(default_factory=list)
    result: Result | None = None
    min_gain: Annotated[float, Field(ge=0, lt=1)] = 0.02
    precision: Literal["tf32", "bf16", "fp16"] | None = None

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> Plan:
        asked = [step_id for step_id in self.stack if step_id.startswith("precision:")]
        wrong = [step_id for step_id in asked if step_id != f"precision:{self.precision}"]
        if wrong:
            raise ValueError(f"the step {wrong[0]} is in force, and precision says {self.precision or 'nothing'}")
        for what, names in (("step", self.stack), ("variable", [row.name for row in self.environment])):
            if len(set(names)) != len(names):
                raise ValueError(f"a {what} is there twice: {', '.join(names)}")
        return self

    @classmethod
    def start(cls, workload: Workload, device: hardware.Device, shapes: dict[str, dict[str, str]]) -> Plan:
        """An empty plan for a workload on a device."""
        return cls(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            workload=workload.name,
            spec=workload.spec,
            fingerprint=Fingerprint.of(device),
            model=ModelIdentity.of(workload.model, workload.dtype),
            buckets=[BucketSpec(name=name, shapes=shapes[name]) for name in workload.buckets],
        )

    def save(self, path: str | Path) -> None:
        """Write the plan, whole or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        files.write_text(Path(path), self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: no such file, damaged, foreign, or newer than this version.
        """
        path = Path(path)
        return cls.of_value(files.read_json(path, what="plan", error=PlanError), decode.shown(path))

    @classmethod
    def of_value(cls, value: Any, name: str) -> Plan:
        """The plan of a value read as JSON; `name` is its file's.

        Raises:
            PlanError: damaged, foreign, or newer than this version.
        """
        document = files.document_of(value, name, what="plan", current=FORMAT_VERSION, error=PlanError)
        if document.get("kind") != "plan":
            raise PlanError(f"{name} is not a wavecrest plan: kind {document.get('kind')!r}")
        try:
            return cls.model_validate(document)
        except pydantic.ValidationError as problem:
            raise PlanError(f"the plan {name} is damaged: {files.first_problem(problem)}") from None

    def _repr_html_(self) -> str:
        """The plan for a notebook: model, machine, and the steps in force."""
        machine, found = self.fingerprint, self.result
        rows = [(step.title, numbers.ratio(step.ratio), numbers.interval(step.ci), step.reason) for step in self.kept()]
        lines = [
            f"{self.model.parameters:,} parameters, {self.model.dtype}; made on {machine.device} ({machine.arch}), "
            f"torch {machine.torch}",
            f"result: {found.verdict}" if found else "the run was interrupted",
            *(f"set before import: {row.name}={row.value}" for row in self.environment),
            "" if rows else "no step is in force: applying it changes nothing",
        ]
        return str(notebook.card(f"Plan for {self.model.cls}", lines, ("step", "speed-up", "95 % CI", "why"), rows))

    def kept(self) -> list[StepOutcome]:
        """The steps in force, in the order of replay."""
        latest = {step.id: step for step in self.steps if step.verdict == "kept"}
        missing = [step_id for step_id in self.stack if step_id not in latest]
        if missing:
            raise PlanError(f"the plan is damaged: stack names {missing[0]!r}, which no kept step has")
        return [latest[step_id] for step_id in self.stack]

    def match(self, workload: Workload, device: hardware.Device) -> list[str]:
        """The differences between the plan's machine and this one (empty: they are the same).

        Raises:
            PlanMismatch: the architecture or the model is another.
        """
        here = Fingerprint.of(device)
        if here.arch != self.fingerprint.arch:
            raise PlanMismatch(
                f"the plan was measured on {self.fingerprint.arch} ({self.fingerprint.device}), this is {here.arch} "
                f"({here.device}); run `wavecrest optimize` here"
            )
        model = ModelIdentity.of(workload.model, workload.dtype)
        if model.structure != self.model.structure:
            raise PlanMismatch(
                f"the plan is for {self.model.cls} ({self.model.parameters:,} parameters, {self.model.dtype}), this is "
                f"{model.cls} ({model.parameters:,} parameters, {model.dtype}) with other modules or shapes"
            )
        return self.fingerprint.differences(here)

    def apply(self, model: nn.Module, example_inputs: Any = None, *, strict: bool = False) -> nn.Module:
        """The optimized model; `model` itself stays as it is, and shares its weights with the result.

        Weights that the plan quantizes are then in memory in both forms. `model` alone holds the original ones: with
        `model = plan.apply(model)` they are freed.

        A plan holds no ranges of shapes: what a run served by padding is applied here at fixed shapes, and others
        compile anew.

        Args:
            model: the model the plan was made for.
            example_inputs: as for `optimize`; needed only where versions differ, to verify the numerics again.
            strict: raise where a step would be dropped or a variable is missing, instead of warning.

        Raises:
            PlanError: the plan holds what no `optimize` writes: an unknown step or parameter, or a damaged row.
            StepRefused: a step does not fit the model.
            PlanMismatch: another architecture or model; or other versions and no example inputs to verify with; or,
                with strict, anything that would have been a PlanWarning.
        """
        # replaying needs torch and every step; reading a plan needs neither
        from wavecrest.measure.workload import Inputs, Workload, from_example
        from wavecrest.optimizer.replay import check_environment, check_ranges, pin_dispatch, replay

        if example_inputs is None:
            import torch

            # only the model's side of the workload is looked at
            workload = Workload(model, {"none": Inputs((torch.zeros(1, device=_home(model)),))})
        else:
            workload = from_example(model, example_inputs)
        device = hardware.detect(workload.device)
        differences = self.match(workload, device)
        check_environment({row.name: row.value for row in self.environment}, strict)
        check_ranges(workload, strict)
        if differences and example_inputs is None:
            raise PlanMismatch(
                f"versions differ from the plan's ({'; '.join(differences)}): its steps must be verified again. Pass "
                "example_inputs to apply, or run `wavecrest verify`"
            )
        pin_dispatch(self.dispatch, strict)
        return replay(self.kept(), workload, verify=bool(differences), because=differences, strict=strict).model


def _home(model: nn.Module) -> str:
    return next((str(tensor.device) for tensor in (*model.parameters(), *model.buffers())), "cpu")

"""The findings of doctor, as values that can be stored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from wavecrest.records import SmokeRow
from wavecrest.records.files import Model
from wavecrest.records.provenance import Versions

Level = Literal["ok", "info", "warn", "problem"]
LEVELS: tuple[Level, ...] = ("problem", "warn", "info", "ok")


class Finding(Model):
    """One observation: what it is, why it matters, what to do, who says so, and how to measure what it costs here.

    `check` names the check that found it. "problem" means that results or speed cannot be trusted, "warn" that speed
    is probably lost, "info" that it is worth knowing, "ok" that a check passed.
    """

    check: str
    level: Level
    what: str
    why: str
    action: str
    source: str
    measure: str = ""


class DoctorReport(Model):
    """`wavecrest doctor`."""

    kind: Literal["doctor"] = "doctor"
    format_version: int = 1
    created: str
    device: dict[str, Any]
    versions: Versions
    # the GPU stack: ROCm release or CUDA version, and the kernel driver; None without a GPU
    platform_release: str | None
    kernel_driver: str | None
    compiler: str | None
    threads: int
    environment: dict[str, str]
    findings: list[Finding] = Field(default_factory=list)
    # with --smoke: the ops beside their oracles; None without
    smoke: list[SmokeRow] | None = None

    def count(self, level: Level) -> int:
        """The number of findings of this level."""
        return sum(finding.level == level for finding in self.findings)

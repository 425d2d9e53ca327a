"""What helps or hurts speed and correctness on this machine, found by looking; nothing is changed."""

from __future__ import annotations

from wavecrest.doctor.checks import CHECKS, run_checks
from wavecrest.doctor.context import Context, Dump, collect
from wavecrest.doctor.report import DoctorReport, Finding

__all__ = ["CHECKS", "Context", "DoctorReport", "Dump", "Finding", "collect", "run_checks"]

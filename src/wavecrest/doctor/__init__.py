"""Findings about this machine that help or hurt speed and correctness; looks only, changes nothing."""

from __future__ import annotations

from wavecrest.doctor.checks import CHECKS, in_order, run_checks
from wavecrest.doctor.context import Context, Dump, collect
from wavecrest.doctor.report import DoctorReport, Finding

__all__ = ["CHECKS", "Context", "DoctorReport", "Dump", "Finding", "collect", "in_order", "run_checks"]

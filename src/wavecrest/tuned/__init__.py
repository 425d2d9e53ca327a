"""Kernel configurations and where they come from."""

from wavecrest.tuned.config import LAUNCH_OPTIONS, Config
from wavecrest.tuned.database import Cell, Database, Proposal, Row

__all__ = ["LAUNCH_OPTIONS", "Cell", "Config", "Database", "Proposal", "Row"]

"""Kernel configurations and where they come from."""

from wavecrest.tuned.config import LAUNCH_OPTIONS, Config
from wavecrest.tuned.cost_model import Work
from wavecrest.tuned.database import Database
from wavecrest.tuned.overlay import Entry, Overlay
from wavecrest.tuned.row import Cell, Evidence, Proposal, Row

__all__ = ["LAUNCH_OPTIONS", "Cell", "Config", "Database", "Entry", "Evidence", "Overlay", "Proposal", "Row", "Work"]

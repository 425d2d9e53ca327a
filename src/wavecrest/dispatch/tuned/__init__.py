"""Kernel configurations and where they come from."""

from wavecrest.dispatch.tuned.config import LAUNCH_OPTIONS, Config
from wavecrest.dispatch.tuned.cost_model import Work
from wavecrest.dispatch.tuned.database import Database
from wavecrest.dispatch.tuned.overlay import Entry, Overlay
from wavecrest.dispatch.tuned.row import Cell, Evidence, Proposal, Row

__all__ = ["LAUNCH_OPTIONS", "Cell", "Config", "Database", "Entry", "Evidence", "Overlay", "Proposal", "Row", "Work"]

"""Which backend runs a call: ops, backends, decisions, and the measured rows they rest on."""

from importlib.util import find_spec

from wavecrest import INSTALL_TORCH
from wavecrest.errors import MissingDependency

# the ops and everything above them begin here; measured rows are read without torch, so it is not imported
if find_spec("torch") is None:
    raise MissingDependency("torch", "wavecrest.ops, and what is built on it,", INSTALL_TORCH)

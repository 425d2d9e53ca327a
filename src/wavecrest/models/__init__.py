"""Whole models over the ops and modules, with their loaders."""

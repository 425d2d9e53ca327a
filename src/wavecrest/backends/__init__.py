"""Implementations from outside, each module attaching to the ops by name."""

"""Kernel configurations and where they come from."""

from wavecrest.tuned.config import Config

__all__ = ["Config"]

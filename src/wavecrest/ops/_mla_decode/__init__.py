"""Attention of a few queries over a cache of latents that all heads share (MLA)."""

from wavecrest.ops._mla_decode.backend import mla_decode

__all__ = ["mla_decode"]

"""Attention of many queries over a cache of latents that all heads share (MLA)."""

from wavecrest.ops._mla_prefill.backend import mla_prefill

__all__ = ["mla_prefill"]

"""Attention of many queries over a cache of latents that all heads share (MLA)."""

from wavecrest.ops.mla_prefill.op import mla_prefill

__all__ = ["mla_prefill"]

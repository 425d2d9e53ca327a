"""Attention of queries over keys in one kernel, without the matrix of scores in memory."""

from wavecrest.ops.flash_attention.op import flash_attention

__all__ = ["flash_attention"]

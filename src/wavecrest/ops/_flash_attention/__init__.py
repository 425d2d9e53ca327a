"""Attention of queries over keys in one kernel, without the matrix of scores in memory."""

from wavecrest.ops._flash_attention.backend import flash_attention

__all__ = ["flash_attention"]

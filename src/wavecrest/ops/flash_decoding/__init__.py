"""Attention of a few queries over a cache of keys and values, with and without pages."""

from wavecrest.ops.flash_decoding.op import flash_decoding

__all__ = ["flash_decoding"]

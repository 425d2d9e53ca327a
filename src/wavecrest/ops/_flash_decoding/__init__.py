"""Attention of a few queries over a cache of keys and values, with and without pages."""

from wavecrest.ops._flash_decoding.backend import flash_decoding
from wavecrest.ops._flash_decoding.quantized import quantize_cache

__all__ = ["flash_decoding", "quantize_cache"]

"""Packed weights: a weight [N, K] as a kernel reads it, with its format, scales and zero points."""

from wavecrest.ops.packed.cache import quantize_cache, quantize_cache_8bit
from wavecrest.ops.packed.weight import (
    PackedWeight,
    from_plain,
    mxfp4_of_pairs,
    pack,
    refuse_other_formats,
    to_plain,
)

__all__ = [
    "PackedWeight",
    "from_plain",
    "mxfp4_of_pairs",
    "pack",
    "quantize_cache",
    "quantize_cache_8bit",
    "refuse_other_formats",
    "to_plain",
]

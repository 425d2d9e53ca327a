"""Packed weights: a weight [N, K] in the layout and precision that a kernel reads, which knows what it is."""

from wavecrest.ops.packed.cache import quantize_cache
from wavecrest.ops.packed.weight import PackedWeight, from_plain, pack, refuse_other_formats, to_plain

__all__ = ["PackedWeight", "from_plain", "pack", "quantize_cache", "refuse_other_formats", "to_plain"]

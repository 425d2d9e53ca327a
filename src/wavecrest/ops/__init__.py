"""The ops: one function each, dispatched to the fastest correct backend (see `wavecrest.registry`).

Importing this package touches no GPU and works without Triton.
"""

from wavecrest.ops.add_rms_norm import add_rms_norm
from wavecrest.ops.gelu_and_mul import gelu_and_mul
from wavecrest.ops.layer_norm import layer_norm
from wavecrest.ops.rms_norm import rms_norm
from wavecrest.ops.silu_and_mul import silu_and_mul
from wavecrest.registry import load_backends

__all__ = ["add_rms_norm", "gelu_and_mul", "layer_norm", "rms_norm", "silu_and_mul"]

load_backends()

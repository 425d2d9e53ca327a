from __future__ import annotations

from tests.ops.norm_quantize import NormQuantize


class TestLayerNormQuantize(NormQuantize):
    op, norm, residual = "layer_norm_quantize", "layer_norm", False

from __future__ import annotations

from tests.ops.norm_quantize import NormQuantize


class TestAddLayerNormQuantize(NormQuantize):
    op, norm, residual = "add_layer_norm_quantize", "layer_norm", True

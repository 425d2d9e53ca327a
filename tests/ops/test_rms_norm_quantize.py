from __future__ import annotations

from tests.ops.norm_quantize import NormQuantize


class TestRmsNormQuantize(NormQuantize):
    op, norm, residual = "rms_norm_quantize", "rms_norm", False

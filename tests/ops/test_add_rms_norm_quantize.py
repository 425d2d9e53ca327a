from __future__ import annotations

from tests.ops.norm_quantize import NormQuantize


class TestAddRmsNormQuantize(NormQuantize):
    op, norm, residual = "add_rms_norm_quantize", "rms_norm", True

"""The matrix product with everything around it: types, scales, packed weights, epilogues."""

from wavecrest.ops._gemm.backend import gemm, linear

__all__ = ["gemm", "linear"]

"""PyTorch's product through a library of its choosing: (hip)BLAS, (hip)BLASLt, Composable Kernel.

PyTorch picks one of them for all products (`torch.backends.cuda.preferred_blas_library`); which is fastest depends on
the shape, so each is a candidate of its own. The preference is set for the length of a call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from wavecrest import registry
from wavecrest.ops.gemm.operands import Operands

# below PyTorch's own choice: they run where a measured row names them
PRIORITY = 3
# backend: the name that PyTorch has for the library on both vendors, and what it is there
LIBRARIES = {
    "torch_blas": ("cublas", "cuBLAS or rocBLAS"),
    "torch_blaslt": ("cublaslt", "cuBLASLt or hipBLASLt"),
    "torch_ck": ("ck", "Composable Kernel"),
}


def _native() -> registry.Backend:
    return registry.get("gemm").backends["torch"]


def _supports(name: str, *args: Any) -> str | None:
    given = Operands(*args)
    library, words = LIBRARIES[name]
    if not given.a.is_cuda:
        return f"asks for {words}, on a GPU"
    if given.a.dtype.itemsize == 1 or given.a.dtype == torch.float64:
        return f"asks for {words}, and PyTorch has one library for products of {registry.dtype_name(given.a)}"
    if torch.version.hip is None and library == "ck":
        return f"asks for {words}, which a ROCm build of PyTorch has"
    if torch.version.hip is None and library == "cublas":
        return "asks for cuBLAS, which PyTorch takes by itself"
    if torch.compiler.is_compiling():
        return "sets a preference around the call, which torch.compile does not record"
    return _native().supports(*args)


def _gemm(name: str, *args: Any) -> Tensor:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(LIBRARIES[name][0])
    try:
        result: Tensor = _native().run(*args)
        return result
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _reserved(*_args: Any) -> str:
    return "runs where a measured row names it"


for _name in LIBRARIES:
    registry.get("gemm").attach(
        _name, partial(_gemm, _name), supports=partial(_supports, _name), reserved=_reserved, priority=PRIORITY
    )

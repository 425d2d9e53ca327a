"""PyTorch's product through a library of its choosing: (hip)BLAS, (hip)BLASLt, Composable Kernel.

PyTorch picks one of them for all products (`torch.backends.cuda.preferred_blas_library`); which is fastest depends on
the shape, so each is a candidate of its own. The preference is set for the length of a call. So is TunableOp, which on
ROCm times every solution of both libraries when it sees a shape for the first time.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import platformdirs
import torch
from torch import Tensor
from torch.cuda import tunable

from wavecrest import env
from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Backend
from wavecrest.dispatch.keys import dtype_name
from wavecrest.ops._gemm.call import Operands

# below PyTorch's own choice: they run where a measured row names them
PRIORITY = 3
# backend: the name that PyTorch has for the library on both vendors, and what it is there
LIBRARIES = {
    "torch_blas": ("cublas", "cuBLAS or rocBLAS"),
    "torch_blaslt": ("cublaslt", "cuBLASLt or hipBLASLt"),
    "torch_ck": ("ck", "Composable Kernel"),
}


def _native() -> Backend:
    return registry.get("gemm").backends["torch"]


def _declines(words: str, *args: Any) -> str | None:
    """What keeps all of them from a call."""
    given = Operands(*args)
    if not given.a.is_cuda:
        return f"asks for {words}, on a GPU"
    if given.a.dtype.itemsize == 1 or given.a.dtype == torch.float64:
        return f"asks for {words}, and PyTorch has one library for products of {dtype_name(given.a)}"
    if torch.compiler.is_compiling():
        return "sets a preference around the call, which torch.compile does not record"
    return _native().supports(*args)


def _supports(name: str, *args: Any) -> str | None:
    library, words = LIBRARIES[name]
    reason = _declines(words, *args)
    if reason is None and torch.version.hip is None and library == "ck":
        reason = f"asks for {words}, which a ROCm build of PyTorch has"
    if reason is None and torch.version.hip is None and library == "cublas":
        reason = "asks for cuBLAS, which PyTorch takes by itself"
    return reason


@cache
def _take_warning() -> None:
    """Take PyTorch's one warning, that the preference is experimental: a user who never asked for it can do nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.preferred_blas_library(before)


def _gemm(name: str, *args: Any) -> Tensor:
    _take_warning()
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(LIBRARIES[name][0])
    try:
        result: Tensor = _native().run(*args)
        return result
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _tunable_supports(*args: Any) -> str | None:
    reason = _declines("TunableOp", *args)
    if reason is None and torch.version.hip is None:
        reason = "asks for TunableOp, which has solutions to choose from on ROCm"
    if reason is None and tunable.is_enabled():
        reason = "asks for TunableOp, which is enabled for all of PyTorch's products here"
    return reason


@cache
def _keep_solutions() -> None:
    """Have PyTorch keep what it finds beside other caches, not in the working directory, unless the user says where."""
    if not env.get("PYTORCH_TUNABLEOP_FILENAME"):
        folder = platformdirs.user_cache_path("wavecrest", ensure_exists=True)
        tunable.set_filename(str(folder / "tunableop.csv"), insert_device_ordinal=True)


def _tuned_gemm(*args: Any) -> Tensor:
    _keep_solutions()
    # also enabled: a user may have done so after this call was decided
    enabled, tuning = tunable.is_enabled(), tunable.tuning_is_enabled()
    try:
        tunable.enable(True)
        # timing waits for the device, which a capture does not allow: what is not known by then runs untuned
        tunable.tuning_enable(not torch.cuda.is_current_stream_capturing())
        result: Tensor = _native().run(*args)
        return result
    finally:
        tunable.enable(enabled)
        tunable.tuning_enable(tuning)


def _reserved(*_args: Any) -> str:
    return "runs where a measured row names it"


for _name in LIBRARIES:
    registry.get("gemm").attach(
        _name, partial(_gemm, _name), supports=partial(_supports, _name), reserved=_reserved, priority=PRIORITY
    )
registry.get("gemm").attach(
    "torch_tunable", _tuned_gemm, supports=_tunable_supports, reserved=_reserved, priority=PRIORITY
)

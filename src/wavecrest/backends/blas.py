"""PyTorch's GEMM through a named library: (hip)BLAS, (hip)BLASLt, Composable Kernel.

PyTorch uses one library for all GEMMs (`torch.backends.cuda.preferred_blas_library`). Which is fastest depends on the
shape, so each is a candidate of its own. The preference is set for the length of a call. So is TunableOp, which on
ROCm times every solution of both libraries when it sees a shape for the first time.
"""

from __future__ import annotations

import warnings
from functools import cache, partial

import platformdirs
import torch
from torch import Tensor
from torch.cuda import tunable

import wavecrest.backends.torch.gemm as native
from wavecrest import env
from wavecrest.dispatch.keys import dtype_name
from wavecrest.ops._gemm.backend import MEASURED, op
from wavecrest.ops._gemm.call import GemmCall

# below PyTorch's own choice: they run where a measured row names them
PRIORITY = 3
# backend: the name that PyTorch has for the library on both vendors, and what it is there
LIBRARIES = {
    "torch_blas": ("cublas", "cuBLAS or rocBLAS"),
    "torch_blaslt": ("cublaslt", "cuBLASLt or hipBLASLt"),
    "torch_ck": ("ck", "Composable Kernel"),
}


def _refuse(words: str, call: GemmCall) -> str | None:
    """The reason why none of these backends can run a call; `words`: what the backend asks PyTorch for."""
    if not call.a.is_cuda:
        return f"asks for {words}, on a GPU"
    if call.a.dtype.itemsize == 1 or call.a.dtype == torch.float64:
        return f"asks for {words}, and PyTorch has one library for GEMMs of {dtype_name(call.a)}"
    if torch.compiler.is_compiling():
        return "sets a preference around the call, which torch.compile does not record"
    return native.refuse(call)


def _refuse_library(name: str, call: GemmCall) -> str | None:
    library, words = LIBRARIES[name]
    reason = _refuse(words, call)
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


def bind_library(name: str, call: GemmCall) -> native.Bound:
    """The function for calls with the signature of this one, by one of `LIBRARIES`."""
    multiply, library = native.bind(call), LIBRARIES[name][0]
    _take_warning()

    def run(call: GemmCall) -> Tensor:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            return multiply(call)
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return run


def run_library(name: str, call: GemmCall) -> Tensor:
    """One call by one of `LIBRARIES`."""
    return bind_library(name, call)(call)


def _refuse_tunable(call: GemmCall) -> str | None:
    reason = _refuse("TunableOp", call)
    if reason is None and torch.version.hip is None:
        reason = "asks for TunableOp, which has solutions to choose from on ROCm"
    if reason is None and tunable.is_enabled():
        reason = "asks for TunableOp, which is enabled for all of PyTorch's GEMMs here"
    return reason


@cache
def _keep_solutions() -> None:
    """Have PyTorch keep what it finds beside other caches, not in the working directory, unless the user says where."""
    if not env.get("PYTORCH_TUNABLEOP_FILENAME"):
        folder = platformdirs.user_cache_path("wavecrest", ensure_exists=True)
        tunable.set_filename(str(folder / "tunableop.csv"), insert_device_ordinal=True)


def keeps_solutions() -> bool:
    """True if a call of this process has had PyTorch keep what it finds."""
    return _keep_solutions.cache_info().currsize > 0


def bind_tunable(call: GemmCall) -> native.Bound:
    """The function for calls with the signature of this one, by the solution that TunableOp finds fastest."""
    multiply = native.bind(call)
    _keep_solutions()

    def run(call: GemmCall) -> Tensor:
        # also enabled: a user may have done so after this call was decided
        enabled, tuning = tunable.is_enabled(), tunable.tuning_is_enabled()
        try:
            tunable.enable(True)
            # timing waits for the device, which a capture does not allow: what is not known by then runs untuned
            tunable.tuning_enable(not torch.cuda.is_current_stream_capturing())
            return multiply(call)
        finally:
            tunable.enable(enabled)
            tunable.tuning_enable(tuning)

    return run


def run_tunable(call: GemmCall) -> Tensor:
    """One call by the solution that TunableOp finds fastest."""
    return bind_tunable(call)(call)


def _opt_in(_call: GemmCall) -> str:
    return MEASURED


for _name in LIBRARIES:
    op.attach(
        _name,
        partial(run_library, _name),
        refuse=partial(_refuse_library, _name),
        opt_in=_opt_in,
        priority=PRIORITY,
        bind=partial(bind_library, _name),
    )
op.attach(
    "torch_tunable", run_tunable, refuse=_refuse_tunable, opt_in=_opt_in, priority=PRIORITY, bind=bind_tunable
)  # fmt: skip

"""Calls of the GEMM kernels for sm_90, their definition, and the kernels' own text run on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import gluon
from tests.ops.gemm_harness import BF16, F16, random
from wavecrest import hardware
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm import kernel_hopper as hopper_kernel
from wavecrest.ops._gemm import kernel_hopper_epilogue as epilogue_kernel
from wavecrest.ops._gemm import launch_hopper as hopper_launch
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GATED, GemmCall
from wavecrest.ops.common import triton as _triton
from wavecrest.ops.common.activation import ACTIVATIONS


def gated(M: int, N: int, K: int, dtype: torch.dtype = BF16, device: str = "cuda", **more: Any) -> GemmCall:
    """a [M, K] and a weight [2N, K]: results [M, N] of about 1."""
    return plain(M, 2 * N, K, dtype, device, **({"activation": "silu_and_mul"} | more))


def plain(M: int, N: int, K: int, dtype: torch.dtype = BF16, device: str = "cuda", **more: Any) -> GemmCall:
    """a [M, K] and a weight [N, K]: products of about 1."""
    b = random(N, K, dtype=dtype, device=device, seed=1) * max(1, K) ** -0.5
    return GemmCall(random(M, K, dtype=dtype, device=device), b.mT, **more)


def biases(columns: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """A float32 bias, and one of every second element of a float16 tensor."""
    wide = random(2 * columns, dtype=F16, device=device, seed=2)
    return random(columns, device=device, seed=2), wide[::2]


# a tile and its edges; less than one, of a row and of a step; K that fills no step; more tiles than programs; groups of
# rows that are not full; one step less than the second group stays behind, and as many
SHAPES = (
    (128, 128, 256), (127, 136, 264), (129, 120, 248), (1, 8, 8), (5, 40, 64), (1000, 328, 520), (3000, 1032, 136),
    (300, 256, 64), (300, 256, 128), (4100, 1024, 1024),
)  # fmt: skip


def activate_on_cpu(x: Tensor, slope: float, activation: int) -> Tensor:
    names = {number: name for name, number in ACTIVATIONS.items()}
    how: dict[str, Any] = {
        "silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu, "leaky_relu": partial(functional.leaky_relu, negative_slope=slope),
    }  # fmt: skip
    return x if activation == 0 else how[names[activation]](x)


def definition(call: GemmCall) -> Tensor:
    """act(alpha · a @ b + bias) in float64, its second half in place of act's where it is gated."""
    y = call.alpha * (call.a.double() @ call.b.double())
    if call.bias is not None:
        y += call.bias.double()
    gate, up = y.chunk(2, -1) if call.activation in GATED else (y, 1.0)
    name = GATED.get(str(call.activation), call.activation)
    return activate_on_cpu(gate, call.slope, ACTIVATIONS[name] if name else 0) * up


def stand_in(
    call: GemmCall,
    config: Config,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
    activate: Callable[..., Tensor] = activate_on_cpu,
    **planted: str,
) -> Tensor:
    """A call with a kernel's own text on a CPU; `planted`: what it says, and what it says instead."""
    y = torch.full(call.shape, math.nan, dtype=call.dtype)
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "tile_descriptor", gluon.Descriptor)
        launch = hopper_launch.launch if "BEHIND" in config else hopper_launch.launch_epilogue
        made = launch(call, y, config, ARCHS["sm_90"])
    path = Path(hopper_kernel.__file__)
    beside = None if "BEHIND" in config else path
    if beside is not None:
        path = Path(epilogue_kernel.__file__)
    kernels = gluon.Kernels(
        path, planted, beside=beside, activate=activate, NONE=0, GELU=4, gelu_16=lambda x: activate(x, 0.0, 4)
    )
    constants = {name: value for name, value in config.kwargs.items() if not name.startswith("num_")}
    args = [gluon.Pointer(one) if isinstance(one, Tensor) else one for one in made.args]
    kernels.run(made.kernel.__name__, min(programs, *made.grid), *args, **made.constants, **constants)
    return y


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU runs is held on it")


def gemm_on_sm_90() -> AnyOp:
    """The op, for tests on such a GPU; others are skipped."""
    if hardware.detect().arch != "sm_90":
        pytest.skip(f"is for sm_90; this is {hardware.detect().arch}")
    return gemm


def pretend_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch's questions about the device answered as on an sm_90."""
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS["sm_90"])
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)

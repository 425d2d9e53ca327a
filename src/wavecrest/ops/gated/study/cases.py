"""Cases of the gated ops: example calls to compile."""

from __future__ import annotations

import torch

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.gated.call import GatedCall
from wavecrest.ops.gated.config import configured
from wavecrest.ops.gated.launch import launch

# columns (narrow with several rows a program, odd, common) that compile tests take
COMPILE_COLUMNS = (64, 1000, 14336)
# by activation: what a case's name says of `approximate`, and its value
_FORMS = {"silu": {"": "none"}, "gelu": {" exact": "none", " tanh": "tanh"}}


def inputs(activation: str, M: int, N: int, dtype: torch.dtype, device: str) -> GatedCall:
    """A call on random gate and up [M, N]."""
    gate = torch.randn(M, N, dtype=dtype, device=device)
    return GatedCall(activation, gate, torch.randn_like(gate))


def compile_cases(activation: str, arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """Separate and packed operands of the common widths; `config` instead of the default configuration."""
    cases = {}
    for label, approximate in _FORMS[activation].items():
        for columns in COMPILE_COLUMNS:
            x = torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
            packed = torch.empty(64, 2 * columns, dtype=torch.bfloat16, device="meta")
            made = config or configured(0, columns, arch.wave_size)
            cases[f"N={columns}{label}"] = launch(GatedCall(activation, x, x, approximate), x, made)
            cases[f"N={columns}{label} packed"] = launch(GatedCall(activation, packed, None, approximate), x, made)
    return cases

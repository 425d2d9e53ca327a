"""Cases of mlstm_step: example calls to compile, benchmark and emulate, and the least work of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import MlstmStepCall
from wavecrest.ops.mlstm.step.config import default
from wavecrest.ops.mlstm.step.launch import planned
from wavecrest.ops.mlstm.study.cases import example as sequence_example


def cost_of(call: MlstmStepCall) -> Cost:
    """Four operations for each element of a state; every operand once, states read and written."""
    read = sum(one.nbytes for one in call if isinstance(one, Tensor))
    written = call.c.numel() * call.c_dtype.itemsize + call.n.nbytes + call.v.nbytes
    written += 0 if call.m is None else call.m.nbytes
    return Cost(flops=4 * (call.c.numel() + call.n.numel()), bytes=read + written)


def example(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, **options: Any) -> MlstmStepCall:
    """A step of B, NH, DK, DV.

    `epilogue`: with norm and output gate; `half`: c in float16; `counted`: with arrivals.
    """
    b, nh, dk, dv = shape
    half, epilogue = options.pop("half", False), options.pop("epilogue", False)
    if options.pop("counted", False):
        options["arrivals"] = torch.zeros((b, nh), dtype=torch.int32, device=device)
    made = sequence_example((b, nh, 1, dk, dv), dtype, device, first=True, epilogue=epilogue)
    q, k, v, i, f, c, n, m = made[:8]
    if options.get("input_gate", "exp") != "exp":
        m = None
    output_gate = made.output_gate
    if output_gate is not None:
        options |= {"norm_weight": made.norm_weight, "output_gate": output_gate[:, :, 0]}
    assert c is not None and n is not None
    c = c.half() if half else c
    return MlstmStepCall(q[:, :, 0], k[:, :, 0], v[:, :, 0], i, f, c, n, m, **options)


def call_of_key(parts: Mapping[str, Cell], device: str) -> MlstmStepCall | None:
    """A step of 16 rows with this key, as the key does not say how many; see `Study`."""
    dtype, state, after = (getattr(torch, str(parts[name]), None) for name in ("dtype", "state", "new_state"))
    if not isinstance(dtype, torch.dtype):
        return None
    heads, dk, dv = (int(parts[name] or 0) for name in ("heads", "dk", "dv"))
    options: dict[str, Any] = {
        "input_gate": parts["input_gate"], "normalize": bool(parts["normalize"]), "half": state == torch.float16,
        "gate_soft_cap": 15.0 if parts["capped"] else 0.0, "epilogue": bool(parts["norm"]),
        "state_dtype": None if after == state else after,
    }  # fmt: skip
    call = example((16, heads, dk, dv), dtype, device, **options)
    return call if parts["output_gate"] else call._replace(output_gate=None)


def inputs(B: int, H: int, D: int, dtype: torch.dtype, device: str) -> MlstmStepCall:
    """B rows of H heads, with DK = D and DV = 2 D as in xLSTM."""
    return example((B, H, D, 2 * D), dtype, device)


# B, NH, DK, DV and options: both shapes of heads, in place and not, in one launch and in two; with arrivals where a
# head has several programs to count
_COMPILED: dict[str, tuple[tuple[int, int, int, int], torch.dtype, dict[str, Any]]] = {
    "7B": ((16, 8, 256, 512), torch.bfloat16, {"gate_soft_cap": 15.0}),
    "7B in place": ((16, 8, 256, 512), torch.bfloat16, {"in_place": True, "epilogue": True}),
    "7B half": ((16, 8, 256, 512), torch.bfloat16, {"in_place": True, "half": True}),
    "7B counted": ((16, 8, 256, 512), torch.bfloat16, {"in_place": True, "epilogue": True, "counted": True}),
    "64x128": ((16, 8, 64, 128), torch.bfloat16, {"gate_soft_cap": 15.0, "epilogue": True}),
    "64x128 in place": ((16, 8, 64, 128), torch.bfloat16, {"in_place": True, "input_gate": "sigmoid"}),
    "96x192": ((16, 4, 96, 192), torch.float32, {"epilogue": True}),
}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    cases: dict[str, _launcher.Launch] = {}
    for name, (shape, dtype, options) in _COMPILED.items():
        launches = planned(example(shape, dtype, "meta", **options), config or default(*shape[2:], arch), arch)
        cases |= dict(zip((name, f"{name} norm"), launches, strict=False))
    return cases


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], MlstmStepCall]]:
    """A step of bfloat16 with norm and output gate, heads of xLSTM-7B and smaller ones.

    The batch is no part of the key: `wavecrest tune` takes the first case of each shape of heads.
    """
    sizes = {"7B": (8, 256, 512), "nh8 64x128": (8, 64, 128), "nh32 64x128": (32, 64, 128)}
    batches: tuple[int, ...] = (16, 1, 4, 64)
    if suite == "quick":
        sizes, batches = {"nh2 32x64": (2, 32, 64)}, (2,)
    return {
        f"b{batch} {name}": partial(example, (batch, *shape), torch.bfloat16, device, epilogue=True, gate_soft_cap=15.0)
        for name, shape in sizes.items()
        for batch in batches
    }


def emulate_cases(arch: str) -> dict[str, Callable[[], MlstmStepCall]]:
    """Odd head_dims, sigmoid and capped gates, norm and gate in one launch, two, or counted; float32, as states are."""
    single = torch.float32
    return {
        "odd columns": partial(example, (2, 3, 24, 40), single, "cpu"),
        "sigmoid": partial(example, (1, 2, 48, 96), single, "cpu", input_gate="sigmoid", normalize=False),
        "norm and gate": partial(example, (2, 2, 32, 64), single, "cpu", epilogue=True, gate_soft_cap=15.0),
        "wide norm": partial(example, (1, 1, 256, 300), single, "cpu", epilogue=True),
        "counted": partial(example, (1, 2, 256, 300), single, "cpu", epilogue=True, counted=True),
        "bfloat16": partial(example, (2, 2, 64, 128), torch.bfloat16, "cpu"),
    }

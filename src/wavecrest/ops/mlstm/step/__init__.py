"""One token of the mLSTM: states read once and written once, in the caller's memory where that is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
import wavecrest.ops.mlstm.backend as _shared
import wavecrest.ops.mlstm.reference as _reference_module
import wavecrest.ops.mlstm.step.launch as _step
import wavecrest.ops.mlstm.study.bound as _bound
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import Operands, StepOperands, check_step

KEY_FIELDS = (
    "heads", "dk", "dv", "dtype", "state", "new_state", "input_gate", "normalize", "capped", "norm", "output_gate",
    "in_place", "device", "grad",
)  # fmt: skip


def _key(*args: Any, **kwargs: Any) -> Key:
    given = StepOperands(*args, **kwargs)
    # the batch is no part of it: no measured row can make a row's bits depend on it
    return (
        given.heads,
        given.dk,
        given.dv,
        dtype_name(given.q),
        dtype_name(given.c),
        str(given.c_dtype).removeprefix("torch."),
        given.input_gate,
        given.normalize,
        1 if given.gate_soft_cap > 0 else 0,
        given.norm_weight is not None,
        given.output_gate is not None,
        given.in_place,
        given.q.device.type,
        needs_grad(*given.floats),
    )


def _cost(*args: Any, **kwargs: Any) -> Cost:
    """Four operations for each element of a state; every operand once, states read and written."""
    given = StepOperands(*args, **kwargs)
    read = sum(one.nbytes for one in given if isinstance(one, Tensor))
    written = given.c.numel() * given.c_dtype.itemsize + given.n.nbytes + given.v.nbytes
    written += 0 if given.m is None else given.m.nbytes
    return Cost(flops=4 * (given.c.numel() + given.n.numel()), bytes=read + written)


def _check(*args: Any, **kwargs: Any) -> None:
    check_step("mlstm_step", StepOperands(*args, **kwargs))


def _reference(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _reference_module.step(StepOperands(*args, **kwargs))


def _example(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, **options: Any) -> tuple[Any, ...]:
    """The arguments of a step of B, NH, DK, DV.

    `epilogue`: with norm and output gate; `half`: c in float16; `counted`: with arrivals.
    """
    b, nh, dk, dv = shape
    half, epilogue = options.pop("half", False), options.pop("epilogue", False)
    if options.pop("counted", False):
        options["arrivals"] = torch.zeros((b, nh), dtype=torch.int32, device=device)
    made = _shared.example((b, nh, 1, dk, dv), dtype, device, first=True, epilogue=epilogue)
    q, k, v, i, f, c, n, m = made[:8]
    if options.get("input_gate", "exp") != "exp":
        m = None
    if epilogue:
        options |= {"norm_weight": made[18], "output_gate": made[20][:, :, 0]}
    c = c.half() if half else c
    return tuple(StepOperands(q[:, :, 0], k[:, :, 0], v[:, :, 0], i, f, c, n, m, **options))


def _call_of_key(parts: Mapping[str, Cell], device: str) -> tuple[Any, ...] | None:
    """A step of 16 rows with this key, as the key does not say how many; see `Op`."""
    dtype, state, after = (getattr(torch, str(parts[name]), None) for name in ("dtype", "state", "new_state"))
    if not isinstance(dtype, torch.dtype):
        return None
    heads, dk, dv = (int(parts[name] or 0) for name in ("heads", "dk", "dv"))
    options: dict[str, Any] = {
        "input_gate": parts["input_gate"], "normalize": bool(parts["normalize"]), "half": state == torch.float16,
        "gate_soft_cap": 15.0 if parts["capped"] else 0.0, "epilogue": bool(parts["norm"]),
        "state_dtype": None if after == state else after,
    }  # fmt: skip
    given = StepOperands(*_example((16, heads, dk, dv), dtype, device, **options))
    return tuple(given if parts["output_gate"] else given._replace(output_gate=None))


def _inputs(B: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """B rows of H heads, D columns of q and k and twice as many of v, as in xLSTM."""
    return _example((B, H, D, 2 * D), dtype, device)


def _declines(*args: Any, **kwargs: Any) -> str | None:
    return _shared.declines(StepOperands(*args, **kwargs))


def _default_config(key: Key) -> Config:
    return _step.default(*_shared.columns_of(KEY_FIELDS, key), _target.arch())


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return _step.space(*_shared.columns_of(KEY_FIELDS, key), arch)


def _launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    given = StepOperands(*args)
    return _step.planned(given.sequence(), _how(given), config, arch)


def _how(given: StepOperands) -> _step.How:
    return _step.How(given.in_place, given.arrivals)


def _tensors(given: StepOperands) -> Operands:
    """The tensors of a step as those of a call over sequences, without a dimension for tokens."""
    return Operands(*given[:8], norm_weight=given.norm_weight, output_gate=given.output_gate)


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    given = StepOperands(*args, **kwargs)
    run = _step.bind(given.sequence(), _how(given), config)

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        now = StepOperands(*args, **kwargs)
        return run(_tensors(now), now.arrivals)

    return call


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


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases: dict[str, _launcher.Launch] = {}
    for name, (shape, dtype, options) in _COMPILED.items():
        given = StepOperands(*_example(shape, dtype, "meta", **options))
        made = config or _step.default(*shape[2:], arch)
        launches = _step.planned(given.sequence(), _how(given), made, arch)
        cases |= dict(zip((name, f"{name} norm"), launches, strict=False))
    return cases


def _bench_cases(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """A step of bfloat16 with norm and output gate, heads of xLSTM-7B and smaller ones.

    The batch is no part of the key: `wavecrest tune` takes the first case of each shape of heads.
    """
    sizes = {"7B": (8, 256, 512), "nh8 64x128": (8, 64, 128), "nh32 64x128": (32, 64, 128)}
    batches: tuple[int, ...] = (16, 1, 4, 64)
    if suite == "quick":
        sizes, batches = {"nh2 32x64": (2, 32, 64)}, (2,)
    return {
        f"b{batch} {name}": partial(
            _example, (batch, *shape), torch.bfloat16, device, epilogue=True, gate_soft_cap=15.0
        )
        for name, shape in sizes.items()
        for batch in batches
    }


def _emulate_cases(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Odd columns, sigmoid and capped gates, norm and gate in one launch, two, or counted; float32, as states are."""
    single = torch.float32
    return {
        "odd columns": partial(_example, (2, 3, 24, 40), single, "cpu"),
        "sigmoid": partial(_example, (1, 2, 48, 96), single, "cpu", input_gate="sigmoid", normalize=False),
        "norm and gate": partial(_example, (2, 2, 32, 64), single, "cpu", epilogue=True, gate_soft_cap=15.0),
        "wide norm": partial(_example, (1, 1, 256, 300), single, "cpu", epilogue=True),
        "counted": partial(_example, (1, 2, 256, 300), single, "cpu", epilogue=True, counted=True),
        "bfloat16": partial(_example, (2, 2, 64, 128), torch.bfloat16, "cpu"),
    }


_op = LegacyOp(
    "mlstm_step",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    inputs=_inputs,
    sizes=("B", "H", "D"),
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_bench_cases,
    emulate_cases=_emulate_cases,
    bound=lambda *args: _bound.step_bound(StepOperands(*args)),
    call_of_key=_call_of_key,
    op_class="gemm",
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches, optional=("EARLY",))


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
    *,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    gate_soft_cap: float = 0.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    output_gate: Tensor | None = None,
    in_place: bool = False,
    state_dtype: torch.dtype | None = None,
    arrivals: Tensor | None = None,
) -> Any:
    """One token of the mLSTM cell, by the formulas of `mlstm_chunkwise`.

    Args:
        q, k: [B, NH, DK], float32, float16, bfloat16 or float64, any strides.
        v: [B, NH, DV] in q's dtype.
        i, f: [B, NH, 1] or [B, NH], pre-activations of the gates in any float dtype.
        c: [B, NH, DK, DV], float32 or float16, any strides.
        n: [B, NH, DK] float32.
        m: [B, NH, 1] float32; None for sigmoid gates. For float64 q states may be float64.
        eps, input_gate, normalize, gate_soft_cap, norm_weight, norm_eps: as for `mlstm_chunkwise`.
        output_gate: [B, NH, DV], any float dtype and strides, with norm_weight.
        in_place: write the new states over c, n and m, and return these.
        state_dtype: of the new c, float32 or float16 (clamped to ±65504); None: c's.
        arrivals: int32 [B, NH] of zeros, contiguous, which the call leaves as zeros, and which no other call may use at
            the same time, as with states in place. With it our kernel counts the programs of each head, and the last
            one normalises h and writes n and m: one launch, where a second one follows without it. For decoding, where
            it lives as long as the states do; other backends have no use for it.

    Returns:
        (h, (c, n, m)), for sigmoid gates (h, (c, n)): h [B, NH, DV] in q's dtype and v's memory order.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this; or in_place with gradients, or with states
            whose elements share memory.
    """
    result = _op(
        q, k, v, i, f, c, n, m, eps, input_gate, normalize, gate_soft_cap, norm_weight, norm_eps, output_gate,
        in_place, state_dtype, arrivals,
    )  # fmt: skip
    return _shared.nested(result, True)

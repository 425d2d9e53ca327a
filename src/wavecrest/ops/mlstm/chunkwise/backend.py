"""The op mlstm_chunkwise: its backends and its public function, and the definition over all pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
import wavecrest.ops.mlstm.backend as _shared
import wavecrest.ops.mlstm.chunkwise.config as _config
import wavecrest.ops.mlstm.chunkwise.launch as _launch
import wavecrest.ops.mlstm.reference as _reference_module
import wavecrest.ops.mlstm.study.bound as _bound
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.call import Operands, check


def _cost(*args: Any, **kwargs: Any) -> Cost:
    return _shared.cost_of(Operands(*args, **kwargs))


def _key(*args: Any, **kwargs: Any) -> Key:
    return _shared.key_of(Operands(*args, **kwargs))


def _check(*args: Any, **kwargs: Any) -> None:
    check("mlstm_chunkwise", Operands(*args, **kwargs))


def _reference(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    return _reference_module.reference(Operands(*args, **kwargs))


def _inputs(B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """B rows of S tokens of H heads, D columns of q and k and twice as many of v, as in xLSTM."""
    return _shared.example((B, H, S, D, 2 * D), dtype, device)


def _declines(*args: Any, **kwargs: Any) -> str | None:
    return _shared.declines(Operands(*args, **kwargs))


def _shape_of(key: Key) -> _config.Shape:
    part = dict(zip(_shared.KEY_FIELDS, key, strict=True))
    return _config.Shape(part["dk"], part["dv"], part["dtype"], part["chunk"])


def _default_config(key: Key) -> Config:
    return _config.default(_shape_of(key), _target.arch())


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return _config.space(_shape_of(key), arch)


def _launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    return _launch.planned(Operands(*args), config, arch)


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    return _launch.bind(Operands(*args, **kwargs), config)


_Shape = tuple[int, int, int, int, int]
# B, NH, S, DK, DV and options: both shapes of heads, with states, norm and gate, padded and packed rows, every option
_COMPILED: dict[str, tuple[_Shape, torch.dtype, dict[str, Any]]] = {
    "7B": ((1, 8, 2048, 256, 512), torch.bfloat16, {"return_last_states": True, "epilogue": True}),
    "64x128": ((1, 8, 2048, 64, 128), torch.bfloat16, {"return_last_states": True, "epilogue": True}),
    "7B padded first": ((4, 8, 2048, 256, 512), torch.bfloat16, {"first": True, "return_last_states": True}),
    "7B sigmoid float16": ((1, 8, 2048, 256, 512), torch.float16, {"input_gate": "sigmoid"}),
    "64x128 packed resets": ((1, 8, 2048, 64, 128), torch.float16, {"epilogue": True, "gate_soft_cap": 15.0}),
    "96x192": ((1, 4, 2048, 96, 192), torch.bfloat16, {}),
    "float32": ((1, 8, 2048, 64, 128), torch.float32, {"gate_soft_cap": 15.0}),
    # more columns of k than a program weights at a time
    "512x64": ((1, 4, 2048, 512, 64), torch.bfloat16, {}),
}


def _compiled() -> Iterator[tuple[str, Operands]]:
    for name, (shape, dtype, options) in _COMPILED.items():
        more: dict[str, Any] = {}
        if "padded" in name:
            more = {"seq_starts": torch.empty(shape[0], dtype=torch.int32, device="meta")}
            more["seq_lens"] = more["seq_starts"]
        if "packed" in name:
            more = {"cu_seqlens": torch.empty(9, dtype=torch.int32, device="meta")}
            more["resets"] = torch.empty(1, shape[2], dtype=torch.bool, device="meta")
        yield name, Operands(*_shared.example(shape, dtype, "meta", **options, **more))


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases: dict[str, _launcher.Launch] = {}
    for name, given in _compiled():
        made = config or _config.default(_shape_of(_shared.key_of(given)), arch)
        launches = _launch.planned(given, made, arch)
        names = (f"{name} gates", f"{name} keys", f"{name} states", name, f"{name} norm")
        cases |= dict(zip(names, launches, strict=False))
    return cases


# B, NH, S, DK, DV: xLSTM-7B, and smaller heads
_BENCH = {
    "7B b1s2048": (1, 8, 2048, 256, 512),
    "7B b4s2048": (4, 8, 2048, 256, 512),
    "7B b1s512": (1, 8, 512, 256, 512),
    "7B b1s16384": (1, 8, 16384, 256, 512),
    "nh8 64x128 b4s2048": (4, 8, 2048, 64, 128),
    "nh32 64x128 b1s2048": (1, 32, 2048, 64, 128),
}
# the cell alone: the shapes that peers are compared on
_CELL = {
    "cell b1s2048": (1, 8, 2048, 256, 512),
    "cell b1s4096": (1, 8, 4096, 256, 512),
    "cell b2s2048": (2, 8, 2048, 256, 512),
    "cell b2s4096": (2, 8, 4096, 256, 512),
    "cell b4s2048": (4, 8, 2048, 256, 512),
    "cell b4s4096": (4, 8, 4096, 256, 512),
    "cell nh32 64x128 b4s2048": (4, 32, 2048, 64, 128),
    "cell nh32 64x128 b4s4096": (4, 32, 4096, 64, 128),
    "cell b1s16384": (1, 8, 16384, 256, 512),
}


def _bench_cases(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Prompts of bfloat16 with last states, norm and output gate as in a model; and the cell alone."""
    made = partial(partial, _shared.example)
    model = {"return_last_states": True, "epilogue": True, "gate_soft_cap": 15.0}
    if suite == "quick":
        return {"nh2 32x64 b1s128": made((1, 2, 128, 32, 64), torch.bfloat16, device, **model)}
    found = {name: made(shape, torch.bfloat16, device, **model) for name, shape in _BENCH.items()}
    return found | {name: made(shape, torch.bfloat16, device) for name, shape in _CELL.items()}


def _emulate_cases(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Odd columns, padding, packed sequences, resets, sigmoid gates, norm and gate, states, several chunks."""
    return {
        name: partial(_shared.example, shape, dtype, "cpu", chunk_size=32, **options)
        for name, (shape, dtype, options) in _shared.emulated().items()
    }


_op = LegacyOp(
    "mlstm_chunkwise",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=_shared.KEY_FIELDS,
    key_sizes=_shared.KEY_SIZES,
    inputs=_inputs,
    sizes=("B", "H", "S", "D"),
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_bench_cases,
    emulate_cases=_emulate_cases,
    bound=lambda *args: _bound.bound(Operands(*args), chunks=True),
    call_of_key=_shared.call_of_key,
    op_class="gemm",
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches)


def mlstm_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    input_gate: str = "exp",
    normalize: bool = True,
    gate_soft_cap: float = 0.0,
    cu_seqlens: Tensor | None = None,
    seq_starts: Tensor | None = None,
    seq_lens: Tensor | None = None,
    resets: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    output_gate: Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
) -> Any:
    """The mLSTM cell over sequences of tokens (xLSTM, Beck et al., 2024, section 2.3), in chunks.

    With lf = log σ(f) and s = DK^−½, token by token: m′ = max(lf + m, i), c′ = e^(lf + m − m′) c + e^(i − m′) k vᵀ,
    n′ = e^(lf + m − m′) n + e^(i − m′) k, h = s qᵀc′ / (max(|s q · n′|, e^−m′) + eps).

    Args:
        q, k: [B, NH, S, DK], float32, float16, bfloat16 or float64, any strides: a view of [B, S, NH, DK] is read in
            place. DK at least 1, S at least 0.
        v: [B, NH, S, DV] in q's dtype, DV at least 1.
        i, f: [B, NH, S], pre-activations of the input and the forget gate in any float dtype; gates are float32. A log
            σ(f) below −10⁵ counts as −10⁵.
        c_initial, n_initial, m_initial: the first states, all or none: [B, NH, DK, DV] float32 or float16, [B, NH, DK]
            and [B, NH, 1] float32 (sigmoid: no m). Not written to. None: zeros.
        return_last_states: also return the states behind the last token.
        eps: added to the denominator.
        chunk_size: tokens of a chunk, a multiple of 16 up to 4096; None: chosen. Results agree up to rounding.
        input_gate: "exp"; or "sigmoid": log σ(i) for i, no m, and 1 for e^−m′.
        normalize: False (sigmoid only): h = s qᵀc′.
        gate_soft_cap: c > 0: gates are c · tanh(x / c) first; 0: they are not.
        cu_seqlens: int32 [N + 1], with B = 1: sequence j is the tokens from cu_seqlens[j] up to cu_seqlens[j + 1];
            states are [N, …]. Like all of the next three it is not looked at before the launch.
        seq_starts, seq_lens: int32 [B]: a row's tokens are those from its start (0), as many as its length (to the
            end). Others leave states as they are, whatever they hold, and have h = 0.
        resets: bool [B, S]: the states are zeroed (c = n = m = 0) before these tokens.
        norm_weight: [NH · DV], any float dtype: h becomes LayerNorm(h) · weight, the norm over DV of each head in
            float32 with biased variance.
        norm_eps: of that norm.
        output_gate: [B, NH, S, DV], any float dtype and strides, with norm_weight: the result is multiplied by
            σ(output_gate).
        state_dtype: of the last c: float32, or float16 clamped to ±65504; n and m are float32 (for float64 q all are
            float64).
        batch_invariant: choose backend and configuration without a look at how many sequences and tokens there are or
            how they lie, so that a sequence has the same bits alone, in any batch, padded and packed, where a kernel
            runs (on a GPU, without gradients). PyTorch's products have no such promise.

    Returns:
        h [B, NH, S, DV] in q's dtype and v's memory order; with `return_last_states` (h, (c, n, m)), for sigmoid gates
        (h, (c, n)).

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    result = _op(
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, chunk_size, input_gate, normalize,
        gate_soft_cap, cu_seqlens, seq_starts, seq_lens, resets, norm_weight, norm_eps, output_gate, state_dtype,
        batch_invariant,
    )  # fmt: skip
    return _shared.nested(result, return_last_states)


def mlstm_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    gate_soft_cap: float = 0.0,
) -> Tensor:
    """The mLSTM from all pairs of tokens: O(S²) memory, no states, in PyTorch. A reference, not a kernel.

    Args:
        q, k, v, i, f, eps, input_gate, normalize, gate_soft_cap: as for `mlstm_chunkwise`. The stabiliser is the
            largest exponent of a row, without the zero that a recurrence begins with, so that results differ by
            about eps.

    Returns:
        h [B, NH, S, DV] in q's dtype and v's memory order, differentiable; in float32 (float64) until it is rounded.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    given = Operands(q, k, v, i, f, eps=eps, input_gate=input_gate, normalize=normalize, gate_soft_cap=gate_soft_cap)
    check("mlstm_parallel", given)
    rows = _reference_module.rows_of(given)
    h = _reference_module.parallel(rows, eps, given.exponential, normalize)
    return _reference_module.result_like(h, v)

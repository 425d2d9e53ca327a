"""The mLSTM over short sequences: the recurrence token by token, states in registers, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
import wavecrest.ops.mlstm.backend as _shared
import wavecrest.ops.mlstm.reference as _reference_module
import wavecrest.ops.mlstm.sequence.launch as _recurrent
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
    check("mlstm_sequence", Operands(*args, **kwargs))


def _reference(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    return _reference_module.reference(Operands(*args, **kwargs))


def _inputs(B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """B rows of S tokens of H heads, D columns of q and k and twice as many of v, as in xLSTM."""
    return _shared.example((B, H, S, D, 2 * D), dtype, device)


def _declines(*args: Any, **kwargs: Any) -> str | None:
    return _shared.declines(Operands(*args, **kwargs))


def _default_config(key: Key) -> Config:
    return _recurrent.default(*_shared.columns_of(_shared.KEY_FIELDS, key), _target.arch())


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return _recurrent.space(*_shared.columns_of(_shared.KEY_FIELDS, key), arch)


def _launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    return _recurrent.planned(Operands(*args), config, arch)


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    run = _recurrent.bind(Operands(*args, **kwargs), config)
    return lambda *args, **kwargs: run(Operands(*args, **kwargs))


# B, NH, S, DK, DV and options: both shapes of heads, padded rows with every option, sigmoid gates, other dtypes
_COMPILED: dict[str, tuple[tuple[int, int, int, int, int], torch.dtype, dict[str, Any]]] = {
    "7B": ((1, 8, 16, 256, 512), torch.bfloat16, {"return_last_states": True, "first": True, "epilogue": True}),
    "64x128": ((1, 8, 16, 64, 128), torch.bfloat16, {"return_last_states": True, "first": True, "epilogue": True}),
    "sigmoid float16": ((1, 8, 16, 256, 512), torch.float16, {"input_gate": "sigmoid", "return_last_states": True}),
    "float32": ((1, 8, 16, 64, 128), torch.float32, {"gate_soft_cap": 15.0}),
}


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases: dict[str, _launcher.Launch] = {}
    for name, (shape, dtype, options) in _COMPILED.items():
        given = Operands(*_shared.example(shape, dtype, "meta", **options))
        launches = _recurrent.planned(given, config or _recurrent.default(*shape[3:], arch), arch)
        cases |= dict(zip((name, f"{name} norm"), launches, strict=False))
    return cases


def _bench_cases(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """A few tokens with states, norm and output gate, in bfloat16, heads of xLSTM-7B."""
    shapes = {"b1s8": (1, 8, 8, 256, 512), "b4s16": (4, 8, 16, 256, 512), "b1s32": (1, 8, 32, 256, 512)}
    if suite == "quick":
        shapes = {"b2s4": (2, 2, 4, 32, 64)}
    options = {"first": True, "epilogue": True, "return_last_states": True, "gate_soft_cap": 15.0}
    return {name: partial(_shared.example, shape, torch.bfloat16, device, **options) for name, shape in shapes.items()}


def _emulate_cases(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Odd columns, padding, packed sequences, resets, sigmoid gates, norm and gate in one launch and in two."""
    return {
        name: partial(_shared.example, shape, dtype, "cpu", **options)
        for name, (shape, dtype, options) in _shared.emulated().items()
    }


_op = LegacyOp(
    "mlstm_sequence",
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
    bound=lambda *args: _bound.bound(Operands(*args), chunks=False),
    call_of_key=_shared.call_of_key,
    op_class="gemm",
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches)


def mlstm_sequence(
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
    """The mLSTM cell over sequences of a few tokens, one after another within one launch.

    The function of `mlstm_chunkwise`, with the same arguments and results, for sequences of 1 to about 32 tokens; any
    length works, and takes time in proportion. Products of states are float32, whatever the dtype of q.

    Args:
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, input_gate, normalize, gate_soft_cap,
            cu_seqlens, seq_starts, seq_lens, resets, norm_weight, norm_eps, output_gate, state_dtype,
            batch_invariant: as there.
        chunk_size: checked as there, and has no effect: there are no chunks.

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

"""The op flash_decoding: its cost and backends, and its public function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._flash_decoding.config as _config
import wavecrest.ops._flash_decoding.launch as _launch
import wavecrest.ops._flash_decoding.study.cases as _cases
import wavecrest.ops._flash_decoding.study.work as _work
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_decoding.call import EIGHT_BIT_FLOATS, Operands, check
from wavecrest.ops._flash_decoding.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._flash_decoding.reference import reference


def _cost(*args: Any, **kwargs: Any) -> Cost:
    given = Operands(*args, **kwargs)
    lengths = given.seq_lens
    if given.seq_starts is not None:
        lengths = (lengths - given.seq_starts.clamp(min=0)).clamp(min=0)
    keys = given.capacity * given.batch if lengths.device.type == "meta" else int(lengths.sum())
    each = given.kv_heads * (given.columns + given.v_columns)
    stored = given.k_cache.shape[-1] + given.v_cache.shape[-1]
    moved = keys * given.kv_heads * stored * given.k_cache.element_size() + given.q.nbytes
    for scale in (given.k_scale, given.v_scale, given.k_shift, given.v_shift):
        if scale is not None and given.by_token:
            moved += keys * given.kv_heads * scale.shape[-1] * scale.element_size()
    moved += given.q.element_size() * given.batch * given.tokens * given.heads * given.v_columns
    if given.k is not None and given.v is not None:
        moved += 2 * (given.k.nbytes + given.v.nbytes)
    return Cost(flops=2 * keys * given.tokens * given.group * each, bytes=moved)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unwidened(dtype: str) -> str | None:
    """Why an 8-bit float is not widened on this architecture; for AMD's the compiler writes it out if need be."""
    arch = _target.arch()
    if arch is None:
        return f"Triton's interpreter has no {dtype}" if dtype.endswith("fnuz") else None
    if arch.vendor == "nvidia" and (arch.fp8 is None or dtype.endswith("fnuz")):
        return f"cannot widen {dtype} on {arch.name}"
    return None


def _declines(*args: Any, **kwargs: Any) -> str | None:
    given = Operands(*args, **kwargs)
    tensors = (given.q, given.k_cache, given.v_cache, given.sinks, given.alibi_slopes, given.cos, given.sin)
    grad = needs_grad(*tensors)
    reason = _checks.kernel_refusal(dtype_name(given.q), given.q.device.type, 1, grad)
    if reason is not None:
        return reason
    if not given.dense:
        return "reads columns, and groups of them, that lie next to each other"
    if given.cos is not None and dtype_name(given.cos) not in _checks.KERNEL_DTYPES:
        return f"takes tables of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(given.cos)}"
    if given.k_cache.dtype not in EIGHT_BIT_FLOATS:
        return None
    unread: str | None = _unwidened(str(given.k_cache.dtype).removeprefix("torch."))
    return _quantized.kernel_refusal(given.k_cache.dtype) if unread is None and given.k is not None else unread


def _key(*args: Any, **kwargs: Any) -> Key:
    return key_of(Operands(*args, **kwargs))


def _check(*args: Any, **kwargs: Any) -> None:
    check(Operands(*args, **kwargs))


def _reference(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    return reference(Operands(*args, **kwargs))


def _default_config(key: Key) -> Config:
    return _config.default(shape_of(key), _target.arch())


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    return _config.space(shape_of(key), arch)


def _launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    return _launch.described(Operands(*args), config, arch)


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases = {}
    for name, given in _cases.compiled(arch).items():
        made = config or _config.default(shape_of(key_of(given)), arch)
        first, *others = _launch.described(given, made, arch)
        cases[name] = first
        if given.prepares:
            # what comes after it is as in calls whose keys are in the cache
            continue
        for launch in others:
            cases[f"{name} join"] = launch
    return cases


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    return _launch.bind(Operands(*args, **kwargs), config)


_op = LegacyOp(
    "flash_decoding",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "capacity"),
    inputs=_cases.inputs,
    sizes=("B", "H", "S", "D"),
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_cases.bench,
    emulate_cases=_cases.emulated,
    call_of_key=_cases.call_of_key,
    stores=tuple(map(Operands._fields.index, ("k_cache", "v_cache", "k_scale", "v_scale", "k_shift", "v_shift"))),
    op_class="gemm",
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches, work=_work.work)


def flash_decoding(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    window: int = -1,
    softmax_scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    k_shift: Tensor | None = None,
    v_shift: Tensor | None = None,
    seq_starts: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_style: str = "neox",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of sequences over their cached keys, those tokens' own among them.

    Query t of T is the token at place seq_len − T + t of its sequence and sees the keys up to that place, as
    `flash_attention` with `causal`; the cache is read once for all queries and heads that share a head of it.

    Args:
        q: [B, T, Hq, D], T from 1 to 16 (more with speculative decoding); float32, float16, bfloat16 or float64; D from
            1 to 256; any strides.
        k_cache: [B, S, Hk, D], or pages [P, page, Hk, D] of any size; Hq is a multiple of Hk. In q's dtype; or int8 or
            an 8-bit float with scales; or uint8 with D / 2 bytes of two codes, from 0 to 15, with scales and shifts of
            1, 2, 4 or 8 groups of columns, D a multiple of 2 · groups (`quantize_cache` makes them). Any strides,
            columns next to each other for the kernel.
        v_cache: the same with Dv columns, from 1 to 256.
        seq_lens: int32 [B], the keys of each sequence, at most S or page · pages. Not looked at before the launch.
        block_table: int32 [B, pages]: which page of the cache holds each page of a sequence.
        window: keys before its own that a query sees; −1: all.
        softmax_scale: the factor of q · kᵀ, at least 0; None: 1 / √D.
        alibi_slopes: float32 [Hq] or [B, Hq]: −slope · distance is added to the scaled scores.
        softcap: c > 0: scaled scores become c · tanh(s / c); 0: they do not.
        sinks: floating [Hq], a further score of each query that has no value.
        k_scale, v_scale: what the numbers of a cache of 8 or 4 bits are multiplied by. 8 bits: float32, one number or
            [Hk], or one for each token and head, [B, S, Hk, 1] or [P, page, Hk, 1] in float32, float16 or bfloat16. 4
            bits: [B, S, Hk, groups] or [P, page, Hk, groups] of these. Any strides; more groups than one next to each
            other for the kernel.
        return_lse: also return the natural logarithms of the sums of exponentials, with the sink in them.
        batch_invariant: split the keys of a sequence without a look at how many sequences there are, so that a
            sequence has the same bits in any batch.
        k_shift, v_shift: of a cache of 4 bits, what is added after that, in the shape and dtype of the scales.
        seq_starts: int32 [B], the place of each sequence's first key that is not hidden, as of a batch that is padded
            at the left; 0 and less: none is hidden. Not looked at before the launch.
        k, v: [B, T, Hk, D] and [B, T, Hk, Dv] in q's dtype, keys and values of the tokens of q: they are written to the
            caches, which are changed, at places seq_len − T + t from 0 on, before attention. Rounded as the cache asks
            for: with the scales given, or with scales and shifts of tokens that are written too. None: they are there.
        cos, sin: floating [positions, R / 2], R up to D: the first R columns of q and k are turned by the angles of
            their places, as by `rope`. A place that the tables do not have makes NaN.
        rotary_style: which columns are a pair, "neox" (i, i + R/2) or "gptj" (2i, 2i + 1).

    Returns:
        [B, T, Hq, Dv] in q's dtype, contiguous; with `return_lse` also float32 (float64 for float64) [B, Hq, T]. A
        query that sees nothing has 0 and −inf; with a sink, 0 and the sink.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this, or k, v or what they are written to needs
            gradients.
    """
    result: Tensor | tuple[Tensor, Tensor] = _op(
        q, k_cache, v_cache, seq_lens, block_table, window, softmax_scale, alibi_slopes, softcap, sinks, k_scale,
        v_scale, return_lse, batch_invariant, k_shift, v_shift, seq_starts, k,
        v, cos, sin, rotary_style,
    )  # fmt: skip
    return result

"""The op flash_attention: its cost and backends, and its public function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._flash_attention.config as _config
import wavecrest.ops._flash_attention.launch as _launch
import wavecrest.ops._flash_attention.launch_hopper as _hopper
import wavecrest.ops._flash_attention.study.cases as _cases
import wavecrest.ops._flash_attention.study.work as _work
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import needs_grad
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import Operands, Window, check
from wavecrest.ops._flash_attention.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._flash_attention.reference import reference

# below PyTorch's: its kernels are the default for what they take until a measured row says otherwise
PRIORITY = 5


def visible_pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs of a query and a key that it sees; −1: no limit on that side."""
    diagonal = torch.arange(queries) + keys - queries
    last = torch.full_like(diagonal, keys - 1) if right < 0 else (diagonal + right).clamp(max=keys - 1)
    first = torch.zeros_like(diagonal) if left < 0 else (diagonal - left).clamp(min=0)
    return int((last - first + 1).clamp(min=0).sum())


def _lengths(starts: Tensor, longest: int) -> list[int]:
    """The lengths of packed sequences; of the device "meta", which has no numbers, the longest for all."""
    if starts.device.type == "meta":
        return [longest] * (starts.shape[0] - 1)
    return starts.diff().tolist()


def _cost(*args: Any, **kwargs: Any) -> Cost:
    given = Operands(*args, **kwargs)
    if given.cu_seqlens_q is not None and given.cu_seqlens_k is not None:
        queries = _lengths(given.cu_seqlens_q, given.queries)
        keys = _lengths(given.cu_seqlens_k, given.keys)
        pairs = sum(visible_pairs(m, n, given.left, given.right) for m, n in zip(queries, keys, strict=True))
    else:
        pairs = given.batch * visible_pairs(given.queries, given.keys, given.left, given.right)
    moved = sum(one.nbytes for one in (given.q, given.k, given.v))
    moved += given.q.numel() // given.columns * given.v_columns * given.dtype.itemsize
    descales = (given.q_descale, given.k_descale, given.v_descale)
    for small in (given.bias, given.alibi_slopes, given.sinks, given.cu_seqlens_q, given.cu_seqlens_k, *descales):
        moved += 0 if small is None else small.nbytes
    moved += 4 * given.q.numel() // given.columns if given.return_lse else 0
    return Cost(flops=2 * pairs * given.heads * (given.columns + given.v_columns), bytes=moved)


def _declines(*args: Any, **kwargs: Any) -> str | None:
    given = Operands(*args, **kwargs)
    grad = needs_grad(*given.differentiable)
    # 8-bit q is multiplied as it is, or in these 16 bits
    reason = _checks.kernel_refusal(str(given.wide).removeprefix("torch."), given.q.device.type, 1, grad)
    if reason is None and given.quantized:
        reason = _unreadable(given.k.dtype)
    return reason


# Dynamo would trace the detection of the GPU, which it cannot
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unreadable(dtype: torch.dtype) -> str | None:
    return _launch.unreadable(dtype, _target.arch())


def _reserved(*args: Any, **kwargs: Any) -> str | None:
    if args[0].device.type == "cpu":
        return "Triton's interpreter and the emulator are for tests: they run when forced or named"
    return None


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
    given = Operands(*args)
    if given.batch * given.queries * given.q.numel() == 0:
        return []
    meta = given._replace(q=given.q.to("meta"))
    return [_launch.launch(given, *_launch.empty_results(meta), config, arch)]


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases = {}
    fp8 = torch.float8_e4m3fnuz if arch.fp8 == "e4m3fnuz" else torch.float8_e4m3fn
    for name, given in (_cases.compiled() | _cases.compiled_of_codes(fp8)).items():
        made = config or _config.default(shape_of(key_of(given)), arch)
        cases[name] = _launch.launch(given, *_launch.empty_results(given), made, arch)
    if arch.name == "sm_90" and config is None:
        for name, given in _cases.compiled_for_hopper().items():
            made = _hopper.default(shape_of(key_of(given)))
            cases[f"hopper {name}"] = _hopper.launch(given, *_launch.empty_results(given), made, arch)
    return cases


def _hopper_declines(*args: Any, **kwargs: Any) -> str | None:
    given = Operands(*args, **kwargs)
    return _declines(*args, **kwargs) or _hopper.refusal(given, _launch.access(given))


def _hopper_reserved(*args: Any, **kwargs: Any) -> str | None:
    return "runs where a measured row names it"


def _hopper_launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    given = Operands(*args)
    if given.batch * given.queries * given.q.numel() == 0:
        return []
    meta = given._replace(q=given.q.to("meta"))
    return [_hopper.launch(given, *_launch.empty_results(meta), config, arch)]


def _hopper_bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    given = Operands(*args, **kwargs)
    portable = _launch.bind(given, _config.default(shape_of(key_of(given)), _target.arch()))
    return _hopper.bind(given, config, portable)


def _hopper_run(*args: Any, config: Config, **kwargs: Any) -> Any:
    return _hopper_bind(*args, config=config, **kwargs)(*args, **kwargs)


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    return _launch.bind(Operands(*args, **kwargs), config)


def _run(*args: Any, config: Config, **kwargs: Any) -> Any:
    return _bind(*args, config=config, **kwargs)(*args, **kwargs)


_op = LegacyOp(
    "flash_attention",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "queries", "keys"),
    inputs=_cases.inputs,
    sizes=("B", "H", "S", "D"),
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_cases.bench,
    emulate_cases=_cases.emulated,
    call_of_key=_cases.call_of_key,
    op_class="gemm",
)
_op.attach(
    "triton",
    _run,
    supports=_declines,
    reserved=_reserved,
    priority=PRIORITY,
    takes_config=True,
    bind=_bind,
    space=_space,
    launches=_launches,
    work=partial(_work.work, "triton"),
)
_op.attach(
    "triton_hopper",
    _hopper_run,
    supports=_hopper_declines,
    reserved=_hopper_reserved,
    priority=PRIORITY,
    takes_config=True,
    bind=_hopper_bind,
    default_config=lambda key: _hopper.default(shape_of(key)),
    space=lambda key, arch: _hopper.space(shape_of(key), arch),
    launches=_hopper_launches,
    work=partial(_work.work, "triton_hopper"),
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    p_descale: float | None = None,
    out_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(s) · v over the keys a query sees, sᵢⱼ = softcap(scale · qᵢ · kⱼ) + biasᵢⱼ − slope · |i + Sk − Sq − j|.

    8-bit q, k and v stand for the values times their descales: q and k are multiplied as they are (int8 with sums in
    int32), q_descale · k_descale is a part of the scale, v_descale a factor of the result. Where q is a float, k and v
    are widened to its dtype, which has all of their values.

    Query i is aligned with key i + Sk − Sq: the last query with the last key (bottom right), in each sequence.

    Args:
        q: [B, Sq, Hq, D] of layout "bshd", [B, Hq, Sq, D] of "bhsd", [Tq, Hq, D] of "thd"; any strides, which are read
            in place; float32 (IEEE products), float16, bfloat16, float64, int8 or an 8-bit float (float8_e4m3fn,
            float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz). D from 1 to 256. Sq may be 0.
        k: the same with Sk and Hk, of which Hq is a multiple: query head h reads head h // (Hq / Hk). q's dtype, or an
            8-bit one with a q that is a float.
        v: the same as k with Dv columns, from 1 to 256. Stored transposed ([B, H, Dv, S]) it is passed as a view.
        layout: "bshd", "bhsd", or "thd": sequences of several lengths behind one another.
        causal: a query sees no key after its own: j ≤ i + Sk − Sq.
        window: (left, right), keys that a query sees before and after its own, which it sees too; −1: all. With
            `causal` right is 0.
        softmax_scale: the factor of q · kᵀ, at least 0; None: 1 / √D.
        bias: any floating dtype and strides, [B, Hq, Sq, Sk] or broadcast to it ("thd": the two maxima for Sq and Sk).
            Added to the scaled and capped scores. −inf hides a key.
        alibi_slopes: float32 [Hq] or [B, Hq] (Press et al., 2022).
        softcap: c > 0: scaled scores become c · tanh(s / c), before bias and slopes (Gemma 2); 0: they do not.
        sinks: floating [Hq], a further score of each query that has no value: it takes part in the sum that weights are
            divided by (as in gpt-oss).
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] with "thd": where sequences begin, from 0 up to Tq or Tk, not falling.
            Not looked at before the launch; results of tokens after the last sequence are not written.
        max_seqlen_q, max_seqlen_k: with "thd": at least the length of the longest sequence. Queries beyond
            max_seqlen_q are not computed.
        return_lse: also return log(Σⱼ exp(sᵢⱼ)), with the sink in it.
        q_descale, k_descale, v_descale: float32 with 8-bit q, k and v: one number ([] or [1]), [H], or [B, H] ("thd":
            of sequences), with Hq for q and Hk for k and v; those of q and k at least 0, which is not looked at. int8
            needs them, 8-bit floats have 1 without.
        p_descale: with 8-bit q, k and v: weights are 8-bit codes of v's dtype too, p / p_descale rounded to nearest
            even and cut off at the largest code. p is counted from the largest score so far and at most 1, so that
            1 / 127 is natural for int8, 1 / 448 for float8_e4m3fn, 1 / 240 for float8_e4m3fnuz and 1 / 57344 for the
            others. The sum that results are divided by, and the logarithms, have weights as they are before. None:
            weights, and v for them, have q's dtype or that of a 16-bit result (float16 for a float32 one).
        out_dtype: of the result with 8-bit k and v: float32, float16 or bfloat16. None: q's, or bfloat16 for 8-bit q.
        dropout_p: from 0 up to, not with, 1: the share of weights that is dropped, after the softmax; the others are
            multiplied by 1 / (1 − dropout_p). The weights' sum and the logarithms are those without. The mask is the
            same for any backend, layout and size of tiles: of query i and key j of sequence b, counted in it from 0,
            and query head h, the weight is kept if a word of 32 bits is at least ⌊dropout_p · 2³²⌋. The word is
            number j mod 4 of those that Philox-4x32-10 (Salmon et al., 2011; as in `triton.language.philox`) has for
            the counter (⌊j / 4⌋, i, h, b) and the key `seed`, low word first.
        seed: a whole number from 0 below 2⁶⁴, needed with `dropout_p` above 0. A CUDA graph replays with the seed that
            it was captured with.

    Returns:
        The result in q's layout and dtype (or `out_dtype`) with Dv columns, contiguous; with `return_lse` also the
        natural logarithms, float32 (float64 for float64) [B, Hq, Sq], or [Hq, Tq] of "thd". A query that sees nothing
        has a result of 0 and −inf; with a sink, 0 and the sink.

        What lies beyond a sequence's keys never takes part. Of keys that causality or the window hide, a NaN or an
        infinity in v may make queries near them NaN (0 · NaN), by what computes them; the reference has none of it.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    if isinstance(window, list):
        # calls are looked up by their arguments
        window = tuple(window)
    result: Tensor | tuple[Tensor, Tensor] = _op(
        q, k, v, layout, causal, window, softmax_scale, bias, alibi_slopes, softcap, sinks, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, return_lse, q_descale, k_descale, v_descale, p_descale, out_dtype,
        dropout_p, seed,
    )  # fmt: skip
    return result

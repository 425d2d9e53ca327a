"""The op mla_decode: its cost and backends, and its public function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

import wavecrest.ops._mla_decode.config as _config
import wavecrest.ops._mla_decode.launch as _launch
import wavecrest.ops._mla_decode.launch_hopper as _hopper
import wavecrest.ops._mla_decode.study.cases as _cases
import wavecrest.ops._mla_decode.study.work as _work
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode.call import Operands, check
from wavecrest.ops._mla_decode.key import KEY_FIELDS, columns_apart, key_of, shape_of, weights_apart
from wavecrest.ops._mla_decode.reference import reference


def cost_of(given: Operands) -> Cost:
    """The least work: each row of the cache once, two products over it, and those of the weights."""
    lengths, t, h = given.seq_lens, given.tokens, given.heads
    if lengths.device.type == "meta":
        counts = [given.capacity] * given.batch
    else:
        counts = lengths.tolist()
    # query t of T sees the keys up to length − T + t
    pairs = sum(max(0, length - t + 1 + i) for length in counts for i in range(t))
    flops = 2 * pairs * h * (2 * given.latent + given.rotary)
    flops += 2 * given.batch * t * h * given.latent * (given.nope + given.values)
    size = given.q_nope.element_size()
    moved = sum(counts) * (given.latent + given.rotary) * size + given.q_nope.nbytes + given.q_rope.nbytes
    moved += size * given.batch * t * h * (given.values or given.latent)
    moved += sum(one.nbytes for one in (given.w_uk, given.w_uv) if one is not None)
    return Cost(flops=flops, bytes=moved)


def declines(given: Operands) -> str | None:
    """Why the kernel does not take a call."""
    reason = _checks.kernel_refusal(dtype_name(given.q_nope), given.q_nope.device.type, 1, needs_grad(*given.floats))
    if reason is not None:
        return reason
    if columns_apart(given):
        return "reads columns that lie next to each other"
    if weights_apart(given):
        return "reads weights whose rows or columns lie next to each other"
    if given.cos is not None and dtype_name(given.cos) not in _checks.KERNEL_DTYPES:
        return f"takes tables of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(given.cos)}"
    return None


def _cost(*args: Any, **kwargs: Any) -> Cost:
    return cost_of(Operands(*args, **kwargs))


def _declines(*args: Any, **kwargs: Any) -> str | None:
    return declines(Operands(*args, **kwargs))


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
    names = {"_mla_product_kernel": "product", "_mla_join_kernel": "join"}
    cases: dict[str, _launcher.Launch] = {}
    if arch.name == "sm_90" and config is None:
        for name, given in _cases.compiled_for_hopper().items():
            made = _hopper.default(shape_of(key_of(given)), arch)
            cases[f"hopper {name}"] = _hopper.described(given, made, arch)[0]
    for name, given in _cases.compiled().items():
        made = config or _config.default(shape_of(key_of(given)), arch)
        for launch in _launch.described(given, made, arch):
            kind = names.get(launch.kernel.__name__, "")
            label = f"{name} {kind}".strip()
            cases[f"{label} of results" if label in cases else label] = launch
    return cases


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    return _launch.bind(Operands(*args, **kwargs), config)


def hopper_declines(given: Operands) -> str | None:
    """Why sm_90's kernel does not take a call."""
    return declines(given) or _hopper.refusal(given)


def _hopper_reserved(*args: Any, **kwargs: Any) -> str | None:
    return "runs where a measured row names it"


def attach_hopper(
    op: Op,
    change: Callable[[Config], Config] = lambda config: config,
    work: Callable[..., tuple[Work, ...]] | None = None,
) -> None:
    """The kernel for sm_90 as a backend of an op with these operands; `change`: what its configurations become.

    `work`: what it does, for the cost model.
    """

    def supports(*args: Any, **kwargs: Any) -> str | None:
        return hopper_declines(Operands(*args, **kwargs))

    def bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
        given = Operands(*args, **kwargs)
        key = op.key(*args, **kwargs)
        return _hopper.bind(given, config, _launch.bind(given, op.default_config(key)))

    def run(*args: Any, config: Config, **kwargs: Any) -> Any:
        return bind(*args, config=config, **kwargs)(*args, **kwargs)

    op.attach(
        "triton_hopper",
        run,
        supports=supports,
        reserved=_hopper_reserved,
        priority=_launcher.KERNEL_PRIORITY,
        takes_config=True,
        bind=bind,
        default_config=lambda key: change(_hopper.default(shape_of(key), _target.arch())),
        # each once: what is changed may be the same
        space=lambda key, arch: dict.fromkeys(map(change, _hopper.space(shape_of(key), arch))),
        launches=lambda *args, config, arch: _hopper.described(Operands(*args), config, arch),
        work=work,
    )


_op = LegacyOp(
    "mla_decode",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "capacity"),
    inputs=_cases.inputs,
    sizes=("B", "H", "S"),
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_cases.bench,
    emulate_cases=_cases.emulated,
    op_class="gemm",
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches, work=partial(_work.work, "triton"))
_op.modelled(propose)
attach_hopper(_op, work=partial(_work.work, "triton_hopper"))


def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    w_uk: Tensor | None = None,
    w_uv: Tensor | None = None,
    softmax_scale: float | None = None,
    logit_cap: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope_style: str = "neox",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of sequences over their cached latents, which all heads share.

    Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) in its absorbed form: with latent c and rotary part k
    of each cached token, head h of query t weighs c by softmax(cap(scale · (q_nope · c + q_rope · k))). Query t of T is
    the token at place seq_len − T + t of its sequence and sees the keys up to that place.

    Args:
        q_nope: [B, T, H, R], absorbed (q · w_uk of each head), or [B, T, H, Dn] with `w_uk`; T from 1 to 16; float32,
            float16, bfloat16 or float64; any strides, columns next to each other for the kernel, as of all below.
        q_rope: [B, T, H, Dr] in q_nope's dtype, Dr from 1 to 128, turned by its position or, with `cos`, to be turned.
        latent_cache: [B, S, R + Dr], or pages [P, page, R + Dr] of any size, in q_nope's dtype: of each token its
            latent of R columns, 1 to 512, and its rotary part, turned. Any strides between tokens and pages.
        seq_lens: int32 [B], the keys of each sequence, at most S or page · pages. Not looked at before the launch.
        block_table: int32 [B, pages]: which page of the cache holds each page of a sequence. Beyond a sequence's keys
            its numbers may be anything.
        w_uk: [H, Dn, R], what expands a latent to the keys of each head: multiplied into the queries first, rounded to
            their dtype. Rows or columns next to each other.
        w_uv: [H, Dv, R], what expands a latent to the values of each head: the weighted latents, rounded, are
            multiplied by it. With both, the two parts of `kv_b_proj.weight.view(H, Dn + Dv, R)`.
        softmax_scale: the factor of the scores, at least 0; None with `w_uk`: 1 / √(Dn + Dr). Absorbed queries do not
            tell Dn, so that it must be given with them.
        logit_cap: c > 0: scaled scores become c · tanh(s / c); 0: they do not.
        cos, sin: [positions, Dr / 2], any floating dtype: q_rope is turned by them as by `rope`, in float32 and rounded
            once. The cache's keys are never turned: they are when they are stored.
        positions: int32 or int64 [B, T] with tables; None: seq_len − T + t. One that is not in the table makes NaN.
        rope_style: which columns are a pair, "neox" (i, i + Dr/2) or "gptj" (2i, 2i + 1).
        return_lse: also return the natural logarithms of the sums of exponentials.
        batch_invariant: split the keys of a sequence without a look at how many sequences there are or how many keys
            fit, so that a sequence has the same bits in any batch and cache.

    Returns:
        [B, T, H, R], with `w_uv` [B, T, H, Dv], in q_nope's dtype, contiguous; with `return_lse` also float32 (float64
        for float64) [B, H, T]. A query that sees nothing has 0 and −inf.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    result: Tensor | tuple[Tensor, Tensor] = _op(
        q_nope, q_rope, latent_cache, seq_lens, block_table, w_uk, w_uv, softmax_scale, logit_cap, cos, sin, positions,
        rope_style, return_lse, batch_invariant,
    )  # fmt: skip
    return result

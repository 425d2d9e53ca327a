"""The op mla_prefill: its cost and backends, and its public function.

The kernel is `mla_decode`'s, for any number of queries: the rows of its tiles are heads first, so that a tile of 64
rows of 128 heads is of one query and none of its work is hidden by causality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

import wavecrest.ops._mla_prefill.decompressed as _decompressed
import wavecrest.ops._mla_prefill.study.cases as _cases
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode import config as _config
from wavecrest.ops._mla_decode import launch as _launch
from wavecrest.ops._mla_decode.backend import attach_hopper, cost_of, declines
from wavecrest.ops._mla_decode.call import MAX_LENGTH, Checks, Operands
from wavecrest.ops._mla_decode.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._mla_decode.reference import reference

# above the absorbed kernel, for calls that it does not reserve itself for
PRIORITY = _launcher.KERNEL_PRIORITY + 5


def _cost(*args: Any, **kwargs: Any) -> Cost:
    """That of the form with fewer FLOPs, with the cache read once."""
    given = Operands(*args, **kwargs)
    least = cost_of(given)
    if given.seq_lens.device.type == "meta":
        lengths = [given.capacity] * given.batch
    else:
        lengths = given.seq_lens.tolist()
    sizes = (given.latent, given.rotary, given.nope, given.values)
    other = sum(_decompressed.flops(given.tokens, length, *sizes)[1] for length in lengths) * given.heads
    return Cost(flops=min(least.flops, other), bytes=least.bytes)


def _declines(*args: Any, **kwargs: Any) -> str | None:
    return declines(Operands(*args, **kwargs))


def _key(*args: Any, **kwargs: Any) -> Key:
    return key_of(Operands(*args, **kwargs))


def _check(*args: Any, **kwargs: Any) -> None:
    given = Operands(*args, **kwargs)
    for name, weight in (("w_uk", given.w_uk), ("w_uv", given.w_uv)):
        if weight is None:
            raise InvalidArgument(f"mla_prefill: {name} must be given: queries and results are not absorbed")
    Checks("mla_prefill", given).all(MAX_LENGTH)


def _reference(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    return reference(Operands(*args, **kwargs))


def _unsplit(config: Config) -> Config:
    """Keys of invariant calls are not split at all: their sums would take memory for every query."""
    return Config(**(config.kwargs | {"SPLITS": max(1, config["SPLITS"])}))


def _default_config(key: Key) -> Config:
    return _unsplit(_config.default(shape_of(key), _target.arch()))


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    seen: set[Config] = set()
    for one in map(_unsplit, _config.space(shape_of(key), arch)):
        if one not in seen:
            seen.add(one)
            yield one


def _launches(*args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    return _launch.described(Operands(*args), config, arch)


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases: dict[str, _launcher.Launch] = {}
    for name, given in _cases.compiled().items():
        made = config or _unsplit(_config.default(shape_of(key_of(given)), arch))
        first, second, *rest = _launch.described(given, made, arch)
        cases |= {f"{name} product": first, name: second}
        if len(rest) > 1:
            cases[f"{name} join"] = rest[0]
        cases[f"{name} product of results"] = rest[-1]
    return cases


def _bind(*args: Any, config: Config, **kwargs: Any) -> Callable[..., Any]:
    return _launch.bind(Operands(*args, **kwargs), config)


def _run_decompressed(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    return _decompressed.run(Operands(*args, **kwargs))


def _decompressed_declines(*args: Any, **kwargs: Any) -> str | None:
    given = Operands(*args, **kwargs)
    if given.nope + given.rotary > 256 or given.values > 256:
        return "attends to 256 columns at most"
    return None


def _decompressed_reserved(*args: Any, **kwargs: Any) -> str | None:
    given = Operands(*args, **kwargs)
    if given.q_nope.device.type == "cpu":
        return "is for a GPU, where attention has a kernel"
    # buckets, as the decision is kept for them
    tokens, keys = row_bucket(given.tokens), max(row_bucket(given.capacity), row_bucket(given.tokens))
    absorbed, expanded = _decompressed.flops(tokens, keys, given.latent, given.rotary, given.nope, given.values)
    if absorbed <= expanded:
        return "few queries take fewer FLOPs absorbed than the keys take to expand"
    if _decompressed.expanded_bytes(given) > _decompressed.MOST_BYTES:
        return f"keys and values of all heads take more than {_decompressed.MOST_BYTES >> 30} GiB"
    return None


_op = LegacyOp(
    "mla_prefill",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "tokens", "capacity"),
    inputs=_cases.inputs,
    sizes=("B", "H", "T", "S"),
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_cases.bench,
    emulate_cases=_cases.emulated,
    op_class="gemm",
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches)
attach_hopper(_op, _unsplit)
_op.attach(
    "decompressed",
    _run_decompressed,
    supports=_decompressed_declines,
    reserved=_decompressed_reserved,
    priority=PRIORITY,
)


def mla_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    seq_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    logit_cap: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope_style: str = "neox",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the last T tokens of sequences, a prompt or a chunk of it, over their cached latents.

    As `mla_decode` with both weights, for any number of queries. Two forms of the same function: absorbed, where keys
    and values are latents, 2 (2 R + Dr) FLOPs a pair of a query and a key; and decompressed, where keys and values of
    all heads are made first, 2 R (Dn + Dv) FLOPs a key, and a pair takes 2 (Dn + Dr + Dv). Sizes of DeepSeek-V3: 3.4
    times as many a pair absorbed, so that from about 170 queries on, or for a whole prompt, decompressed has fewer.
    That is the one that runs on a GPU unless the keys and values of all heads would take more than 4 GiB.

    Args:
        q_nope: [B, T, H, Dn], float32, float16, bfloat16 or float64; T at least 1.
        q_rope: [B, T, H, Dr] in q_nope's dtype, Dr from 1 to 128, turned, or with `cos` to be turned.
        latent_cache: [B, S, R + Dr], or pages [P, page, R + Dr], in q_nope's dtype; the T tokens' rows are in it.
        seq_lens: int32 [B], the keys of each sequence, those T among them. Not looked at before the launch.
        w_uk: [H, Dn, R]. w_uv: [H, Dv, R]. Both parts of `kv_b_proj.weight.view(H, Dn + Dv, R)`.
        block_table: int32 [B, pages].
        softmax_scale: None: 1 / √(Dn + Dr).
        logit_cap, cos, sin, positions, rope_style, return_lse: as of `mla_decode`.
        batch_invariant: the absorbed form does not split keys, so that a sequence has the same bits in any batch.

    Returns:
        [B, T, H, Dv] in q_nope's dtype, contiguous; with `return_lse` also float32 (float64 for float64) [B, H, T]. A
        query before the first token (T more than seq_len) has 0 and −inf.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    result: Tensor | tuple[Tensor, Tensor] = _op(
        q_nope, q_rope, latent_cache, seq_lens, block_table, w_uk, w_uv, softmax_scale, logit_cap, cos, sin, positions,
        rope_style, return_lse, batch_invariant,
    )  # fmt: skip
    return result

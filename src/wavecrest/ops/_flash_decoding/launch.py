"""Decoding's launches: the splits of the keys, and what puts them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._flash_decoding.call import Operands
from wavecrest.ops._flash_decoding.kernel import _decoding_kernel, _joining_kernel
from wavecrest.ops._flash_decoding.kernel_append import STYLES, _append_kernel
from wavecrest.ops.common.quantized import LARGEST

# matrix units take no fewer
LEAST_BLOCK = 16
TENSORS = 16
JOINED_TENSORS = 7
PREPARED_TENSORS = 14
# splits that are put together at a time
JOINED = 16


class Plan(NamedTuple):
    """What runs: what is turned and written before; the launch over keys; where they are split the shape of its sums,
    and the launch after.
    """

    before: _launcher.Launch | None
    first: _launcher.Launch
    parts: tuple[int, ...] | None
    second: _launcher.Launch | None


def _overlaps(arch: Arch | None) -> bool:
    """True where a kernel may start before the one in front of it has ended."""
    nvidia = arch is not None and arch.vendor == "nvidia" and arch.name != "sm_80" and not _triton.interpreted
    return nvidia and not torch.compiler.is_compiling()


def _assembles(arch: Arch | None) -> bool:
    """True where the kernel's NVIDIA assembly is what runs it."""
    return arch is not None and arch.vendor == "nvidia" and not _triton.interpreted


def _foreign(given: Operands, arch: Arch | None) -> bool:
    """True where the cache holds e4m3fn and no instruction that triton 3.6 makes takes it."""
    native = arch is not None and (arch.vendor == "nvidia" or arch.name == "gfx950")
    return given.k_cache.dtype == torch.float8_e4m3fn and not native


def _rounds(arch: Arch | None) -> bool:
    """True where an instruction rounds float32 to bfloat16."""
    return arch is not None and (arch.vendor == "nvidia" or arch.name == "gfx950")


def _is_nvidia(arch: Arch | None) -> bool:
    """True for the interpreter too, which runs what is written for NVIDIA."""
    return arch is None or arch.vendor == "nvidia"


def _narrow(given: Operands, arch: Arch | None) -> bool:
    """True where codes of 8 bits, or of 4 with a scale a token, meet NVIDIA's matrix units, or the interpreter's."""
    return _is_nvidia(arch) and given.k_cache.element_size() == 1 and given.q.element_size() == 2 and given.groups < 2


def _strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The first strides of a tensor, 0 where there is one element, and before those where it has fewer dimensions."""
    if tensor is None:
        return (0,) * dims
    found = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return (*(0 for _ in range(dims - len(found))), *found[:dims])


def _scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    """The strides of scales or shifts from page to page (or sequence), token and head."""
    if scale is not None and scale.ndim == 4:
        return _strides(scale, 3)
    return (0, 0, *_strides(scale, 1))


def _tensors(given: Operands, o: Tensor, lse: Tensor | None, parts: Tensor, meta: Tensor) -> tuple[Tensor, ...]:
    q = given.q
    some = (
        given.seq_starts, given.block_table, given.alibi_slopes, given.sinks, given.k_scale, given.v_scale,
        given.k_shift, given.v_shift,
    )  # fmt: skip
    return (
        q, given.k_cache, given.v_cache, given.seq_lens, *(q if one is None else one for one in some),
        o, q if lse is None else lse, parts, meta,
    )  # fmt: skip


def _joined_tensors(given: Operands, o: Tensor, lse: Tensor | None, parts: Tensor, meta: Tensor) -> tuple[Tensor, ...]:
    q = given.q
    starts, sinks = (q if one is None else one for one in (given.seq_starts, given.sinks))
    return parts, meta, given.seq_lens, starts, sinks, o, q if lse is None else lse


def _prepared_tensors(given: Operands, turned: Tensor) -> tuple[Tensor, ...]:
    q = given.q
    some = (given.k, given.v)
    more = (
        given.block_table, given.cos, given.sin, given.k_scale, given.v_scale, given.k_shift, given.v_shift,
    )  # fmt: skip
    return (
        q, *(q if one is None else one for one in some), given.k_cache, given.v_cache, given.seq_lens,
        *(q if one is None else one for one in more), turned,
    )  # fmt: skip


def preparation(given: Operands, turned: Tensor) -> _launcher.Launch:
    """The launch that turns queries and writes new keys and values: a program a token and head."""
    writers = 0 if given.k is None else given.kv_heads
    groups = max(1, given.groups)
    size_k, size_v = given.k_cache.shape[3] // groups, given.v_cache.shape[3] // groups
    tables = (given.cos, given.sin)
    return _launcher.Launch(
        _append_kernel,
        (given.batch * given.tokens, writers + (0 if given.cos is None else given.heads)),
        (
            *_prepared_tensors(given, turned), given.tokens, writers, given.heads, given.page, given.capacity,
            0 if given.cos is None else given.cos.shape[0], 0 if given.cos is None else given.cos.shape[1],
            given.columns, size_k, size_v, *_strides(given.q, 3), *_strides(given.k, 3), *_strides(given.v, 3),
            *_strides(given.k_cache, 3), *_strides(given.v_cache, 3),
            0 if given.block_table is None else given.block_table.stride(0), given.seq_lens.stride(0),
            *(0 if table is None else table.stride(0) for table in tables), *_scale_strides(given.k_scale),
            *_scale_strides(given.v_scale), *_scale_strides(given.k_shift), *_scale_strides(given.v_shift),
        ),
        {
            "APPEND": given.k is not None, "STYLE": STYLES[given.style], "PAGED": given.block_table is not None,
            "SCALED": given.k_scale is not None and not given.by_token, "TOKENS": given.by_token,
            "GROUPS": given.groups, "LARGEST": LARGEST.get(given.k_cache.dtype, 0.0),
            "BLOCK_Q": _layout.power_of_two(given.columns), "BLOCK_K": _layout.power_of_two(size_k) * groups,
            "BLOCK_V": _layout.power_of_two(size_v) * groups,
        },
        Config(num_warps=1),
    )  # fmt: skip


def plan(
    given: Operands, o: Tensor, lse: Tensor | None, parts: Tensor, meta: Tensor, config: Config, arch: Arch | None,
    even: bool = True,
) -> Plan:  # fmt: skip
    """The launches of a call; parts and meta are memory for the sums of splits, `even`: v begins at an even byte.

    Where queries are turned they are read from memory [B, T, Hq, D] without gaps.
    """
    before = preparation(given, given.q) if given.prepares else None
    if given.cos is not None:
        given = given._replace(q=torch.empty(given.q.shape, dtype=given.q.dtype, device="meta"))
    chunk, keys = config["CHUNK"], config["BLOCK_N"]
    if chunk % keys != 0:
        raise InvalidArgument(f"flash_decoding: a CHUNK of {chunk} keys is no multiple of a BLOCK_N of {keys}")
    splits = max(1, _layout.ceil_div(given.capacity, chunk))
    rows, width, out = given.tokens * given.group, given.columns, given.v_columns
    q_strides, k_strides, v_strides = (_strides(one, 3) for one in (given.q, given.k_cache, given.v_cache))
    q_align, kv_align = _layout.alignment(0, q_strides), _layout.alignment(0, k_strides, v_strides)
    # of 4 bits, the bytes of a group, and a power of two of them for each group
    groups = max(1, given.groups)
    size_d, size_dv = (width // (2 * groups), out // (2 * groups)) if given.four_bits else (width, out)
    d_align, dv_align = _layout.alignment(size_d), _layout.alignment(size_dv)
    block_d = max(LEAST_BLOCK, _layout.power_of_two(size_d) * groups)
    block_dv = max(LEAST_BLOCK, _layout.power_of_two(size_dv) * groups)
    paged = given.block_table is not None
    # all keys are seen by a window as large as the cache; differences with it then fit into 32 bits
    left = given.capacity if given.window < 0 else min(given.window, given.capacity)
    overlaps, narrow, nvidia = _overlaps(arch), _narrow(given, arch), _is_nvidia(arch)
    # how far a tile reaches, in elements
    reach = max(k_strides[1], v_strides[1]) * keys + max(block_d, block_dv)
    constants = {
        "LEFT": given.window >= 0 or given.seq_starts is not None, "STARTS": given.seq_starts is not None,
        "SINKS": given.sinks is not None, "LSE": given.return_lse, "PDL": overlaps,
    }  # fmt: skip
    first = _launcher.Launch(
        _decoding_kernel,
        (splits * _layout.ceil_div(rows, config["BLOCK_M"]), given.kv_heads, given.batch),
        (
            *_tensors(given, o, lse, parts, meta), float(given.scale), float(given.softcap), left, given.tokens,
            given.kv_heads, given.group, given.page, splits, size_d // d_align, size_dv // dv_align,
            *(stride // q_align for stride in q_strides), *(stride // kv_align for stride in (*k_strides, *v_strides)),
            0 if given.block_table is None else given.block_table.stride(0), given.seq_lens.stride(0),
            *_strides(given.seq_starts, 1), *_strides(given.alibi_slopes, 2), *_strides(given.sinks, 1),
            *_scale_strides(given.k_scale), *_scale_strides(given.v_scale), *_scale_strides(given.k_shift),
            *_scale_strides(given.v_shift),
        ),
        {
            **constants, "PAGED": paged, "WHOLE": paged and given.page % keys == 0, "SOFTCAP": given.softcap > 0,
            "ALIBI": given.alibi_slopes is not None, "SPLIT": splits > 1,
            "SCALED": given.k_scale is not None and not given.by_token, "TOKENS": given.by_token,
            "GROUPS": given.groups, "Q_ALIGN": q_align, "KV_ALIGN": kv_align, "D_ALIGN": d_align, "DV_ALIGN": dv_align,
            
            "EVEN_D": size_d * groups == block_d, "EVEN_DV": size_dv * groups == block_dv,
            "WIDE": reach >= 2**31, "PTX": _assembles(arch),
            "FOREIGN": _foreign(given, arch), "ROUNDS": _rounds(arch),
            "PAIRS": narrow and even and block_dv >= 2 * LEAST_BLOCK and kv_align % 2 == 0 and size_dv % 2 == 0,
            "HALF": narrow and given.q.dtype == torch.bfloat16, "AHEAD": nvidia and given.by_token and given.groups < 2,
            "BLOCK_D": block_d, "BLOCK_DV": block_dv,
        },
        config,
    )  # fmt: skip
    if splits == 1:
        return Plan(before, first, None, None)
    out_align = _layout.alignment(out)
    second = _launcher.Launch(
        _joining_kernel,
        (rows, given.kv_heads, given.batch),
        (
            *_joined_tensors(given, o, lse, parts, meta), left, given.tokens, given.kv_heads, given.group, splits,
            out // out_align, given.seq_lens.stride(0), *_strides(given.seq_starts, 1), *_strides(given.sinks, 1),
        ),
        {
            **constants, "CHUNK": chunk, "BLOCK_N": keys, "BLOCK_S": JOINED, "DV_ALIGN": out_align,
            "BLOCK_DV": max(LEAST_BLOCK, _layout.power_of_two(out)),
        },
        Config(num_warps=4, **({"launch_pdl": 1} if overlaps else {})),
    )  # fmt: skip
    return Plan(before, first, (given.batch, given.kv_heads, splits, rows), second)


def bind(given: Operands, config: Config, even: bool | None = None) -> Callable[..., Any]:
    """The function for all calls with arguments like these; `even` as in `plan`, None: as it is here."""
    device, shape, dtype = given.q.device, given.shape, given.q.dtype
    # inductor copies what does not begin as it did when it compiled, and Dynamo has no begin of a view
    even = (torch.compiler.is_compiling() or given.v_cache.data_ptr() % 2 == 0) if even is None else even
    nothing = torch.empty(0, dtype=dtype, device=device)
    sums = torch.empty(0, dtype=torch.float32, device=device)
    made = plan(given, nothing, sums if given.return_lse else None, sums, sums, config, _target.arch(), even)
    start, numbers = _launcher.starter(made.first, device), made.first.args[TENSORS:]
    prepare = None if made.before is None else _launcher.starter(made.before, device)
    prepare_numbers = () if made.before is None else made.before.args[PREPARED_TENSORS:]
    join = None if made.second is None else _launcher.starter(made.second, device)
    join_numbers = () if made.second is None else made.second.args[JOINED_TENSORS:]
    parts_shape, out, q_shape = made.parts, given.v_columns, given.q.shape
    lse_shape = (given.batch, given.heads, given.tokens)
    paired = made.first.constants["PAIRS"] and not torch.compiler.is_compiling()
    single: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal single
        now = Operands(*args, **kwargs)
        if paired and now.v_cache.data_ptr() % 2 != 0:
            single = bind(now, config, False) if single is None else single
            return single(*args, **kwargs)
        o = torch.empty(shape, dtype=dtype, device=device)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device) if now.return_lse else None
        # not the result: a torch.compile that takes every tensor for written would lose it
        parts = meta = now.q
        if parts_shape is not None:
            parts = torch.empty((*parts_shape, out), dtype=torch.float32, device=device)
            meta = torch.empty((*parts_shape, 2), dtype=torch.float32, device=device)
        if o.numel() > 0:
            if prepare is not None:
                turned = now.q if now.cos is None else torch.empty(q_shape, dtype=dtype, device=device)
                prepare(*_prepared_tensors(now, turned), *prepare_numbers)
                now = now._replace(q=turned)
            start(*_tensors(now, o, lse, parts, meta), *numbers)
            if join is not None:
                join(*_joined_tensors(now, o, lse, parts, meta), *join_numbers)
        return (o, lse) if now.return_lse else o

    return call


def described(given: Operands, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write."""
    if given.batch == 0:
        return []
    o = torch.empty(0, dtype=given.q.dtype, device="meta")
    sums = torch.empty(0, dtype=torch.float32, device="meta")
    made = plan(given, o, sums if given.return_lse else None, sums, sums, config, arch)
    return [launch for launch in (made.before, made.first, made.second) if launch is not None]

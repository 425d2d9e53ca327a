"""Decoding's launches: the append, the splits of the keys, and the kernel that joins them; and their binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._flash_decoding.call import FlashDecodingCall
from wavecrest.ops._flash_decoding.config import LEAST_CHUNK
from wavecrest.ops._flash_decoding.kernel import _decoding_kernel, _joining_kernel
from wavecrest.ops._flash_decoding.kernel_append import STYLES, _append_kernel
from wavecrest.ops.common.quantized import LARGEST

# matrix units take no fewer
LEAST_BLOCK = 16
# columns of a product from shared memory
LEAST_SHARED = 64
# a cache up to this times as large as a split is not split
HARDLY_MORE = 1.125
# splits that are put together at a time
JOINED = 16


class Plan(NamedTuple):
    """The launches of a call: the append, or None; the one over keys; where those are split, the join, or None.

    `parts`: the shape of the splits' sums without head_dim.
    """

    before: _launcher.Launch | None
    first: _launcher.Launch
    parts: tuple[int, ...] | None
    second: _launcher.Launch | None


def _assembles(arch: Arch | None) -> bool:
    """True where the kernel's NVIDIA assembly is what runs it."""
    return arch is not None and arch.vendor == "nvidia" and not _triton.interpreted


def _foreign(call: FlashDecodingCall, arch: Arch | None) -> bool:
    """True where the cache holds e4m3fn and no instruction that triton 3.6 makes takes it."""
    native = arch is not None and (arch.vendor == "nvidia" or arch.name == "gfx950")
    return call.k_cache.dtype == torch.float8_e4m3fn and not native


def _rounds(arch: Arch | None) -> bool:
    """True where an instruction rounds float32 to bfloat16."""
    return arch is not None and (arch.vendor == "nvidia" or arch.name == "gfx950")


def _is_nvidia(arch: Arch | None) -> bool:
    """True for the interpreter too, which runs what is written for NVIDIA."""
    return arch is None or arch.vendor == "nvidia"


def _multiplies_shared(arch: Arch | None, config: Config) -> bool:
    """True where a group of warps multiplies operands in shared memory (`wgmma`)."""
    return arch is not None and arch.name == "sm_90" and config["BLOCK_M"] >= 64 and config["num_warps"] % 4 == 0


def _narrow(call: FlashDecodingCall, arch: Arch | None) -> bool:
    """True for a cache of 8 bits, or of 4 with one scale a token, on NVIDIA's matrix units or in the interpreter."""
    return _is_nvidia(arch) and call.k_cache.element_size() == 1 and call.q.element_size() == 2 and call.groups < 2


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


def _tensors(
    call: FlashDecodingCall, q: Tensor, o: Tensor, lse: Tensor | None, parts: Tensor, meta: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The tensors of the kernel over keys, and of the one that joins splits; `q` is rotated if rotation is on.

    Absent tensors are passed as q and not read.
    """
    starts = q if call.seq_starts is None else call.seq_starts
    sinks = q if call.sinks is None else call.sinks
    logarithms = q if lse is None else lse
    first = (
        q,
        call.k_cache,
        call.v_cache,
        call.seq_lens,
        starts,
        q if call.block_table is None else call.block_table,
        q if call.alibi_slopes is None else call.alibi_slopes,
        sinks,
        q if call.k_scale is None else call.k_scale,
        q if call.v_scale is None else call.v_scale,
        q if call.k_shift is None else call.k_shift,
        q if call.v_shift is None else call.v_shift,
        call.append_lens if call.advance and call.append_lens is not None else q,
        o,
        logarithms,
        parts,
        meta,
    )
    return first, (parts, meta, call.seq_lens, starts, sinks, o, logarithms)


def _append_tensors(call: FlashDecodingCall, turned: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the append; q, which is not read through them, in the place of an absent one."""
    q = call.q
    return (
        q,
        q if call.k is None else call.k,
        q if call.v is None else call.v,
        call.k_cache,
        call.v_cache,
        # not by its property: one Python call less in each call
        call.seq_lens if call.append_lens is None else call.append_lens,
        q if call.block_table is None else call.block_table,
        q if call.cos is None else call.cos,
        q if call.sin is None else call.sin,
        q if call.k_scale is None else call.k_scale,
        q if call.v_scale is None else call.v_scale,
        q if call.k_shift is None else call.k_shift,
        q if call.v_shift is None else call.v_shift,
        turned,
    )


def append(call: FlashDecodingCall, turned: Tensor, arch: Arch | None) -> _launcher.Launch:
    """The launch that rotates queries and writes new keys and values: a program a token and head."""
    early, options = _pdl.start_of(Config(num_warps=1), arch, _pdl.EARLY)
    writers = 0 if call.k is None else call.kv_heads
    groups = max(1, call.groups)
    size_k, size_v = call.k_cache.shape[3] // groups, call.v_cache.shape[3] // groups
    tables = (call.cos, call.sin)
    return _launcher.Launch(
        _append_kernel,
        (call.batch * call.seqlen_q, writers + (0 if call.cos is None else call.heads)),
        (
            *_append_tensors(call, turned), call.seqlen_q, writers, call.heads, call.page, call.capacity,
            0 if call.cos is None else call.cos.shape[0], 0 if call.cos is None else call.cos.shape[1],
            call.head_dim, size_k, size_v, *_strides(call.q, 3), *_strides(call.k, 3), *_strides(call.v, 3),
            *_strides(call.k_cache, 3), *_strides(call.v_cache, 3),
            0 if call.block_table is None else call.block_table.stride(0), call.new_lens.stride(0),
            *(0 if table is None else table.stride(0) for table in tables), *_scale_strides(call.k_scale),
            *_scale_strides(call.v_scale), *_scale_strides(call.k_shift), *_scale_strides(call.v_shift),
        ),
        {
            "APPEND": call.k is not None, "STYLE": STYLES[call.style], "PAGED": call.block_table is not None,
            "SCALED": call.k_scale is not None and not call.by_token, "TOKENS": call.by_token,
            "GROUPS": call.groups, "LARGEST": LARGEST.get(call.k_cache.dtype, 0.0),
            "BLOCK_Q": _layout.power_of_two(call.head_dim), "BLOCK_K": _layout.power_of_two(size_k) * groups,
            "BLOCK_V": _layout.power_of_two(size_v) * groups, "ADVANCE": call.advance, "EARLY": early,
        },
        options,
    )  # fmt: skip


def chunk_of(call: FlashDecodingCall, config: Config) -> int:
    """Keys of a split: CHUNK divides the largest capacity of a bucket, and a smaller one has as many splits.

    In splits of 1,024, a quarter of 4,096, 2,176 keys would be three, of which the last has 128. What is hardly more
    than one split is one: 2,176 keys of splits of 2,048. Where the batch must not change a result's bits the capacity
    does not either.
    """
    chunk, keys, capacity = int(config["CHUNK"]), int(config["BLOCK_N"]), call.capacity
    if chunk % keys != 0:
        raise InvalidArgument(f"flash_decoding: a CHUNK of {chunk} keys is no multiple of a BLOCK_N of {keys}")
    if call.batch_invariant:
        return chunk
    if capacity <= chunk * HARDLY_MORE:
        return max(LEAST_CHUNK, _layout.ceil_div(capacity, keys) * keys)
    share = _layout.ceil_div(capacity, _layout.ceil_div(row_bucket(max(1, capacity)), chunk))
    return min(chunk, max(LEAST_CHUNK, _layout.ceil_div(share, keys) * keys))


def plan(
    call: FlashDecodingCall,
    o: Tensor,
    lse: Tensor | None,
    parts: Tensor,
    meta: Tensor,
    config: Config,
    arch: Arch | None,
    even: bool = True,
) -> Plan:
    """The launches of a call; parts and meta are memory for the sums of splits, `even`: v begins at an even byte.

    Where queries are rotated they are read from memory [B, T, Hq, D] without gaps.
    """
    before = append(call, call.q, arch) if call.prepares else None
    if call.cos is not None:
        call = call._replace(q=torch.empty(call.q.shape, dtype=call.q.dtype, device="meta"))
    chunk, keys = chunk_of(call, config), config["BLOCK_N"]
    splits = max(1, _layout.ceil_div(call.capacity, chunk))
    first_tensors, join_tensors = _tensors(call, call.q, o, lse, parts, meta)
    rows, width, out = call.seqlen_q * call.group, call.head_dim, call.head_dim_v
    q_strides, k_strides, v_strides = (_strides(one, 3) for one in (call.q, call.k_cache, call.v_cache))
    q_align, kv_align = _layout.alignment(0, q_strides), _layout.alignment(0, k_strides, v_strides)
    # with 4 bits the sizes are bytes of a group, and each group gets a power of two of bytes
    groups = max(1, call.groups)
    size_d, size_dv = (width // (2 * groups), out // (2 * groups)) if call.four_bits else (width, out)
    d_align, dv_align = _layout.alignment(size_d), _layout.alignment(size_dv)
    block_d = max(LEAST_BLOCK, _layout.power_of_two(size_d) * groups)
    block_dv = max(LEAST_BLOCK, _layout.power_of_two(size_dv) * groups)
    paged = call.block_table is not None
    # all keys are seen by a window as large as the cache; differences with it then fit into 32 bits
    left = call.capacity if call.window < 0 else min(call.window, call.capacity)
    overlaps, narrow, nvidia = _pdl.overlaps(arch), _narrow(call, arch), _is_nvidia(arch)
    # with operands in shared memory pairs gain nothing, and of two products of 32 columns behind each other's ends one
    # was wrong: ptxas 12.8 makes their addresses of a register that it has not set (every case of one H200, 2026-11-25)
    least_pairs = 2 * (LEAST_SHARED if _multiplies_shared(arch, config) else LEAST_BLOCK)
    # how far a tile reaches, in elements
    reach = max(k_strides[1], v_strides[1]) * keys + max(block_d, block_dv)
    constants = {
        "LEFT": call.window >= 0 or call.seq_starts is not None, "STARTS": call.seq_starts is not None,
        "SINKS": call.sinks is not None, "LSE": call.return_lse, "PDL": overlaps,
    }  # fmt: skip
    first = _launcher.Launch(
        _decoding_kernel,
        (splits * _layout.ceil_div(rows, config["BLOCK_M"]), call.kv_heads, call.batch),
        (
            *first_tensors, float(call.scale), float(call.softcap), left, call.seqlen_q,
            call.kv_heads, call.group, call.page, splits, size_d // d_align, size_dv // dv_align,
            *(stride // q_align for stride in q_strides), *(stride // kv_align for stride in (*k_strides, *v_strides)),
            0 if call.block_table is None else call.block_table.stride(0), call.seq_lens.stride(0),
            *_strides(call.seq_starts, 1), *_strides(call.alibi_slopes, 2), *_strides(call.sinks, 1),
            call.new_lens.stride(0), *_scale_strides(call.k_scale), *_scale_strides(call.v_scale),
            *_scale_strides(call.k_shift), *_scale_strides(call.v_shift),
        ),
        {
            **constants, "PAGED": paged, "WHOLE": paged and call.page % keys == 0, "SOFTCAP": call.softcap > 0,
            "ALIBI": call.alibi_slopes is not None, "SPLIT": splits > 1,
            "SCALED": call.k_scale is not None and not call.by_token, "TOKENS": call.by_token,
            "GROUPS": call.groups, "Q_ALIGN": q_align, "KV_ALIGN": kv_align, "D_ALIGN": d_align, "DV_ALIGN": dv_align,
            "EVEN_D": size_d * groups == block_d, "EVEN_DV": size_dv * groups == block_dv,
            "WIDE": reach >= 2**31, "PTX": _assembles(arch),
            "FOREIGN": _foreign(call, arch), "ROUNDS": _rounds(arch),
            "PAIRS": narrow and even and block_dv >= least_pairs and kv_align % 2 == 0 and size_dv % 2 == 0,
            "HALF": narrow and call.q.dtype == torch.bfloat16, "AHEAD": nvidia and call.by_token and call.groups < 2,
            "ADVANCE": call.advance, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "CHUNK": chunk,
        },
        # a number that torch.compile keeps open is no part of a configuration
        Config(**{name: given for name, given in config.kwargs.items() if name != "CHUNK"}),
    )  # fmt: skip
    if splits == 1:
        return Plan(before, first, None, None)
    out_align = _layout.alignment(out)
    second = _launcher.Launch(
        _joining_kernel,
        (rows, call.kv_heads, call.batch),
        (
            *join_tensors, left, call.seqlen_q, call.kv_heads, call.group, splits,
            out // out_align, call.seq_lens.stride(0), *_strides(call.seq_starts, 1), *_strides(call.sinks, 1),
        ),
        {
            **constants, "CHUNK": chunk, "BLOCK_N": keys, "BLOCK_S": JOINED, "DV_ALIGN": out_align,
            "BLOCK_DV": max(LEAST_BLOCK, _layout.power_of_two(out)),
        },
        Config(num_warps=4, **({"launch_pdl": 1} if overlaps else {})),
    )  # fmt: skip
    return Plan(before, first, (call.batch, call.kv_heads, splits, rows), second)


def bind(
    call: FlashDecodingCall, config: Config, even: bool | None = None
) -> Callable[[FlashDecodingCall], Tensor | tuple[Tensor, Tensor]]:
    """The function that launches the kernels for calls with the signature of this one; `even` as in `plan`, None: as
    v begins in this call.
    """
    device, shape, dtype = call.q.device, call.shape, call.q.dtype
    # inductor copies what does not begin as it did when it compiled, and Dynamo has no begin of a view
    even = (torch.compiler.is_compiling() or call.v_cache.data_ptr() % 2 == 0) if even is None else even
    nothing = torch.empty(0, dtype=dtype, device=device)
    sums = torch.empty(0, dtype=torch.float32, device=device)
    made = plan(call, nothing, sums if call.return_lse else None, sums, sums, config, _target.arch(), even)
    start = _launcher.starter(made.first, device)
    prepare = None if made.before is None else _launcher.starter(made.before, device)
    join = None if made.second is None else _launcher.starter(made.second, device)
    parts_shape, out, q_shape, turns = made.parts, call.head_dim_v, call.q.shape, call.cos is not None
    lse_shape = (call.batch, call.heads, call.seqlen_q) if call.return_lse else None
    paired = made.first.constants["PAIRS"] and not torch.compiler.is_compiling()
    single: Callable[[FlashDecodingCall], Any] | None = None

    def run(call: FlashDecodingCall) -> Tensor | tuple[Tensor, Tensor]:
        nonlocal single
        q = call.q
        if paired and call.v_cache.data_ptr() % 2 != 0:
            single = bind(call, config, False) if single is None else single
            result: Tensor | tuple[Tensor, Tensor] = single(call)
            return result
        o = torch.empty(shape, dtype=dtype, device=device)
        lse = None if lse_shape is None else torch.empty(lse_shape, dtype=torch.float32, device=device)
        # not the result: a torch.compile that takes every tensor for written would lose it
        parts = meta = q
        if parts_shape is not None:
            parts = torch.empty((*parts_shape, out), dtype=torch.float32, device=device)
            meta = torch.empty((*parts_shape, 2), dtype=torch.float32, device=device)
        if o.numel() > 0:
            if prepare is not None:
                turned = torch.empty(q_shape, dtype=dtype, device=device) if turns else q
                prepare(*_append_tensors(call, turned))
                q = turned
            first, joined = _tensors(call, q, o, lse, parts, meta)
            start(*first)
            if join is not None:
                join(*joined)
        return o if lse is None else (o, lse)

    return run


def launches(call: FlashDecodingCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write."""
    if call.batch == 0:
        return []
    o = torch.empty(0, dtype=call.q.dtype, device="meta")
    sums = torch.empty(0, dtype=torch.float32, device="meta")
    made = plan(call, o, sums if call.return_lse else None, sums, sums, config, arch)
    return [launch for launch in (made.before, made.first, made.second) if launch is not None]

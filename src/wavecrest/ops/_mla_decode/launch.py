"""The launches of attention over a latent cache: a GEMM for each head before and after the splits of the keys."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops._mla_decode.config as _config
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode.call import MlaDecodeCall, MlaResult
from wavecrest.ops._mla_decode.kernel import _mla_join_kernel, _mla_kernel, _mla_product_kernel

# matrix units take no fewer
LEAST_BLOCK = 16
STYLES = {"none": 0, "neox": 1, "gptj": 2}


class LaunchPlan(NamedTuple):
    """The launches of a call, in their order; None for those that the call does not need.

    Attributes:
        absorb: multiplies the queries by w_uk.
        attend: attends to the keys of each split.
        combine: combines the partial results of the splits.
        expand: multiplies the latents of the result by w_uv.
        partial_shape: [B, splits, T · H] where keys are split: the rows of the partial results; else None.
    """

    absorb: _launcher.Launch | None
    attend: _launcher.Launch
    combine: _launcher.Launch | None
    expand: _launcher.Launch | None
    partial_shape: tuple[int, ...] | None

    @property
    def launches(self) -> list[_launcher.Launch]:
        """The launches that the call needs, in order."""
        return [one for one in (self.absorb, self.attend, self.combine, self.expand) if one is not None]


class KeySplit(NamedTuple):
    """How the work of a sequence is divided over programs.

    Attributes:
        splits: programs that share the keys of a row.
        granularity: the keys of a split are a multiple of it.
        blocks: tiles of BLOCK_M rows that a sequence has.
    """

    splits: int
    granularity: int
    blocks: int


class Buffers(NamedTuple):
    """Memory that the launches of one call write.

    Attributes:
        q: [B, T, H, R], the absorbed queries; `q_nope` itself where the call has no w_uk.
        latents: [B, T, H, R], the result before w_uv; `o` itself where the call has no w_uv.
        o: the result.
        lse: [B, H, T], float32, the log-sum-exp.
        partial_o: [B, splits, T · H, R], float32, the unnormalized result of each split.
        partial_ml: [B, splits, T · H, 2], float32, the largest score of each split and its sum of exponentials.

    Where the call does not need one of them an input stands in for it.
    """

    q: Tensor
    latents: Tensor
    o: Tensor
    lse: Tensor
    partial_o: Tensor
    partial_ml: Tensor


class AttendKernel(NamedTuple):
    """A kernel that attends to the cached latents.

    Its tensors are the descriptors, the (absorbed) queries, the call's input fields, and `latents`, `lse`, `partial_o`
    and `partial_ml` of the buffers.

    Attributes:
        input_fields: the names of the fields of a call that the kernel reads beside the queries.
        launch: makes the launch from the call, these tensors, the queries, the configuration, the split and the
            architecture.
        descriptors: makes the tensor descriptors of a call, all of its latent cache; None: the kernel takes none.
    """

    input_fields: Callable[[MlaDecodeCall], tuple[str, ...]]
    launch: Callable[[MlaDecodeCall, tuple[Any, ...], Tensor, Config, KeySplit, Arch | None], _launcher.Launch]
    descriptors: Callable[[MlaDecodeCall], tuple[Any, ...]] | None = None


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The first strides of a tensor, 0 along dimensions of one element; all 0 for None."""
    if tensor is None:
        return (0,) * dims
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))[:dims]


def _head_gemm(x: Tensor, w: Tensor, y: Tensor, rows_contiguous: bool, config: Config) -> _launcher.Launch:
    """y[b, t, h] = x[b, t, h] · w[h] with w [H, K, N]; either the rows of w are contiguous or its columns are."""
    rows, heads = x.shape[0] * x.shape[1], x.shape[2]
    x_strides = strides(x, 3)
    w_strides = [stride if size > 1 else 0 for size, stride in zip(w.shape, w.stride(), strict=True)]
    # the stride that is 1 is known to the kernel, and no multiple of an alignment
    w_strides[2 if rows_contiguous else 1] = 0
    x_align, w_align = _layout.alignment(0, x_strides), _layout.alignment(0, tuple(w_strides))
    programs = _layout.ceil_div(rows, config["BLOCK_M"]) * _layout.ceil_div(w.shape[2], config["BLOCK_N"]) * heads
    return _launcher.Launch(
        _mla_product_kernel,
        (programs,),
        (
            x, w, y, rows, x.shape[1], heads, *(one // x_align for one in x_strides),
            *(one // w_align for one in w_strides),
        ),
        {"K": w.shape[1], "N": w.shape[2], "X_ALIGN": x_align, "W_ALIGN": w_align, "ACROSS": rows_contiguous},
        config,
    )  # fmt: skip


def _contiguous_along(w: Tensor, dim: int) -> bool:
    return w.stride(dim) == 1 or w.shape[dim] == 1


def _gemm_config(call: MlaDecodeCall) -> Config:
    bits = 32 if call.q_nope.dtype == torch.float32 else 16
    return _config.gemm_config(row_bucket(call.batch * call.seqlen_q), bits, call.batch_invariant)


def _absorb(call: MlaDecodeCall, buffers: Buffers) -> _launcher.Launch | None:
    """q_nope · w_uk."""
    if call.w_uk is None:
        return None
    return _head_gemm(call.q_nope, call.w_uk, buffers.q, _contiguous_along(call.w_uk, 2), _gemm_config(call))


def _expand(call: MlaDecodeCall, buffers: Buffers) -> _launcher.Launch | None:
    """The latents of the result · w_uvᵀ."""
    if call.w_uv is None:
        return None
    return _head_gemm(buffers.latents, call.w_uv.mT, buffers.o, _contiguous_along(call.w_uv, 1), _gemm_config(call))


def _portable_input_fields(call: MlaDecodeCall) -> tuple[str, ...]:
    # q_rope stands in for a tensor that the call does not have: the kernel does not read it then
    optional = ("block_table", "cos", "sin", "positions")
    given = [name if getattr(call, name) is not None else "q_rope" for name in optional]
    return ("q_rope", "latent_cache", "seq_lens", *given)


def _portable_launch(
    call: MlaDecodeCall, tensors: tuple[Any, ...], q: Tensor, config: Config, split: KeySplit, arch: Arch | None
) -> _launcher.Launch:
    q_strides, rope_strides = strides(q, 3), strides(call.q_rope, 3)
    q_align = _layout.alignment(0, q_strides, rope_strides)
    stride_cp, token = strides(call.latent_cache, 2)
    # alignment of token and page strides; for an unpaged cache of any length
    c_align = _layout.alignment(0, (stride_cp, token))
    paged = call.block_table is not None
    table_strides = (0, 0) if call.cos is None or call.sin is None else (call.cos.stride(0), call.sin.stride(0))
    return _launcher.Launch(
        _mla_kernel,
        (split.blocks * split.splits * call.batch,),
        (
            *tensors,
            float(call.scale), float(call.logit_cap), call.seqlen_q, call.heads, call.page_size, *split,
            0 if call.cos is None else call.cos.shape[0],
            *(one // q_align for one in (*q_strides, *rope_strides)), stride_cp // c_align,
            *strides(call.block_table, 1), call.seq_lens.stride(0), *table_strides, *strides(call.positions, 2),
        ),
        {
            "LSE": call.return_lse, "R": call.latent_dim, "PDL": _pdl.overlaps(arch),
            "PAGED": paged, "WHOLE": paged and call.page_size % config["BLOCK_N"] == 0, "CAP": call.capped,
            "STYLE": STYLES[call.style], "PLACES": call.positions is not None, "SPLIT": split.splits > 1,
            "Q_ALIGN": q_align, "C_ALIGN": c_align, "TOKEN": token, "DR": call.head_dim_rope,
            "XCDS": 1 if arch is None else arch.xcds, "BLOCK_R": _block_r(call),
            "BLOCK_DR": max(LEAST_BLOCK, _layout.power_of_two(call.head_dim_rope)),
        },
        Config(**{name: value for name, value in config.kwargs.items() if name not in ("SPLITS", "KEYS")}),
    )  # fmt: skip


PORTABLE = AttendKernel(_portable_input_fields, _portable_launch)


def _block_r(call: MlaDecodeCall) -> int:
    return max(LEAST_BLOCK, _layout.power_of_two(call.latent_dim))


def _combine(call: MlaDecodeCall, buffers: Buffers, split: KeySplit, arch: Arch | None) -> _launcher.Launch:
    """The results of rows from the partial results of their splits."""
    overlaps, block_r = _pdl.overlaps(arch), _block_r(call)
    # the number of warps that gives each lane 8 columns, 16 bytes of the result
    warps = max(1, block_r // (8 * (32 if arch is None else arch.wave_size)))
    return _launcher.Launch(
        _mla_join_kernel,
        (call.batch * call.seqlen_q * call.heads,),
        (
            buffers.partial_o, buffers.partial_ml, call.seq_lens, buffers.latents, buffers.lse, call.seqlen_q,
            call.heads, split.splits, split.granularity, call.seq_lens.stride(0),
        ),
        {"LSE": call.return_lse, "R": call.latent_dim, "PDL": overlaps, "BLOCK_R": block_r},
        Config(num_warps=warps, **({"launch_pdl": 1} if overlaps else {})),
    )  # fmt: skip


def _split_of(call: MlaDecodeCall, config: Config) -> KeySplit:
    granularity, block_n = config["KEYS"], config["BLOCK_N"]
    if granularity % block_n != 0:
        raise InvalidArgument(f"mla_decode: KEYS={granularity} of a split must be a multiple of BLOCK_N={block_n}")
    splits = max(1, _layout.ceil_div(call.max_seqlen_k, granularity))
    if config["SPLITS"] > 0:
        splits = min(splits, config["SPLITS"])
    return KeySplit(splits, granularity, _layout.ceil_div(call.seqlen_q * call.heads, config["BLOCK_M"]))


def allocator(
    call: MlaDecodeCall, device: torch.device, partial_shape: tuple[int, ...] | None
) -> Callable[[MlaDecodeCall], Buffers]:
    """The function that allocates the buffers of calls with the signature of this one.

    Where a buffer is not needed an input stands in, not a result: a torch.compile that assumes that a kernel writes
    every tensor, and keeps only the last of several aliases, would lose the result.
    """
    shape, latent_shape, lse_shape, dtype = call.shape, call.latent_shape, call.lse_shape, call.q_nope.dtype
    absorbs, expands, return_lse = call.w_uk is not None, call.w_uv is not None, call.return_lse
    partial_o_shape = None if partial_shape is None else (*partial_shape, call.latent_dim)
    partial_ml_shape = None if partial_shape is None else (*partial_shape, 2)
    single = torch.float32

    def allocate(call: MlaDecodeCall) -> Buffers:
        stand_in = call.q_nope
        o = torch.empty(shape, dtype=dtype, device=device)
        q = torch.empty(latent_shape, dtype=dtype, device=device) if absorbs else stand_in
        latents = torch.empty(latent_shape, dtype=dtype, device=device) if expands else o
        lse = torch.empty(lse_shape, dtype=single, device=device) if return_lse else stand_in
        if partial_o_shape is None or partial_ml_shape is None:
            return Buffers(q, latents, o, lse, stand_in, stand_in)
        partial_o = torch.empty(partial_o_shape, dtype=single, device=device)
        return Buffers(q, latents, o, lse, partial_o, torch.empty(partial_ml_shape, dtype=single, device=device))

    return allocate


def plan(call: MlaDecodeCall, config: Config, arch: Arch | None, kernel: AttendKernel = PORTABLE) -> LaunchPlan:
    """The launches of a call, over buffers without memory.

    Raises:
        InvalidArgument: the configuration's KEYS are no multiple of its BLOCK_N.
    """
    split = _split_of(call, config)
    device = call.q_nope.device if torch.compiler.is_compiling() else torch.device("meta")
    buffers = allocator(call, device, None)(call)
    if split.splits > 1:
        partial = torch.empty(0, dtype=torch.float32, device=device)
        buffers = buffers._replace(partial_o=partial, partial_ml=partial)
    q = call.q_nope if call.w_uk is None else buffers.q
    descriptors = () if kernel.descriptors is None else kernel.descriptors(call)
    inputs = [getattr(call, name) for name in kernel.input_fields(call)]
    tensors = (*descriptors, q, *inputs, buffers.latents, buffers.lse, buffers.partial_o, buffers.partial_ml)
    return LaunchPlan(
        absorb=_absorb(call, buffers),
        attend=kernel.launch(call, tensors, q, config, split, arch),
        combine=_combine(call, buffers, split, arch) if split.splits > 1 else None,
        expand=_expand(call, buffers),
        partial_shape=(call.batch, split.splits, call.seqlen_q * call.heads) if split.splits > 1 else None,
    )


def bind(call: MlaDecodeCall, config: Config, kernel: AttendKernel = PORTABLE) -> Callable[[MlaDecodeCall], MlaResult]:
    """The function that launches the kernels for calls with the signature of this one."""
    device = call.q_nope.device
    made = plan(call, config, _target.arch(), kernel)
    fields = kernel.input_fields(call)
    num_descriptors = 0 if kernel.descriptors is None else len(kernel.descriptors(call))
    attend = _launcher.starter(made.attend, device, num_descriptors)
    absorb, combine, expand = (
        None if one is None else _launcher.starter(one, device) for one in (made.absorb, made.combine, made.expand)
    )
    inputs_of, allocate = attrgetter(*fields), allocator(call, device, made.partial_shape)
    has_rows, return_lse = call.batch > 0, call.return_lse

    def run(call: MlaDecodeCall) -> MlaResult:
        buffers = allocate(call)
        q, latents, o, lse, partial_o, partial_ml = buffers
        if has_rows:
            if absorb is not None:
                absorb(call.q_nope, call.w_uk, q)
            attend(*(call.latent_cache,) * num_descriptors, q, *inputs_of(call), latents, lse, partial_o, partial_ml)
            if combine is not None:
                combine(partial_o, partial_ml, call.seq_lens, latents, lse)
            if expand is not None:
                expand(latents, call.w_uv, o)
        return (o, lse) if return_lse else o

    return run


def launches(
    call: MlaDecodeCall, config: Config, arch: Arch | None, kernel: AttendKernel = PORTABLE
) -> list[_launcher.Launch]:
    """The launches of a call, in order, over buffers without memory."""
    return plan(call, config, arch, kernel).launches if call.batch > 0 else []

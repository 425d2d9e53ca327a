"""The launches of attention over a latent cache: products of each head around the splits of the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops._mla_decode.config as _config
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode.call import Operands
from wavecrest.ops._mla_decode.kernel import _mla_join_kernel, _mla_kernel, _mla_product_kernel

# matrix units take no fewer
LEAST_BLOCK = 16
TENSORS, JOIN_TENSORS, PRODUCT_TENSORS = 12, 5, 3
STYLES = {"none": 0, "neox": 1, "gptj": 2}


class Plan(NamedTuple):
    """What runs: queries times w_uk, the launch over keys, that which adds what splits found, times w_uv."""

    absorb: _launcher.Launch | None
    attend: _launcher.Launch
    parts: tuple[int, ...] | None
    join: _launcher.Launch | None
    expand: _launcher.Launch | None

    @property
    def launches(self) -> list[_launcher.Launch]:
        """Those there are, in order."""
        return [one for one in (self.absorb, self.attend, self.join, self.expand) if one is not None]


class Split(NamedTuple):
    """How keys are shared out: over so many programs, in pieces of `least`; and tiles of a sequence's rows."""

    splits: int
    least: int
    blocks: int


class Kernel(NamedTuple):
    """One that attends: of so many tensors the first are descriptors, what makes them, and what makes its launch.

    Both take the call, absorbed queries and memory whose `o` is for latents.
    """

    number: int
    described: int
    tensors: Callable[[Operands, Tensor, Memory], tuple[Any, ...]]
    launch: Callable[[Operands, Tensor, Memory, Config, Split, Arch | None], _launcher.Launch]


class Memory(NamedTuple):
    """What kernels write: absorbed queries, the latents of the result, the result, logarithms, sums of splits."""

    q: Tensor
    latents: Tensor
    o: Tensor
    lse: Tensor
    parts: Tensor
    meta: Tensor


def _overlaps(arch: Arch | None) -> bool:
    """True where a kernel may start before the one in front of it has ended."""
    nvidia = arch is not None and arch.vendor == "nvidia" and arch.name != "sm_80" and not _triton.interpreted
    return nvidia and not torch.compiler.is_compiling()


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The first strides of a tensor, 0 where there is one element."""
    if tensor is None:
        return (0,) * dims
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))[:dims]


def _product(x: Tensor, w: Tensor, y: Tensor, across: bool, config: Config) -> _launcher.Launch:
    """y[b, t, h] = x[b, t, h] · w[h]; of w [H, K, N] columns lie side by side (`across`), or rows do."""
    rows, heads = x.shape[0] * x.shape[1], x.shape[2]
    x_strides = strides(x, 3)
    w_strides = [stride if size > 1 else 0 for size, stride in zip(w.shape, w.stride(), strict=True)]
    # the one that is 1 is known, and not of a multiple
    w_strides[2 if across else 1] = 0
    x_align, w_align = _layout.alignment(0, x_strides), _layout.alignment(0, tuple(w_strides))
    programs = _layout.ceil_div(rows, config["BLOCK_M"]) * _layout.ceil_div(w.shape[2], config["BLOCK_N"]) * heads
    return _launcher.Launch(
        _mla_product_kernel,
        (programs,),
        (
            x, w, y, rows, x.shape[1], heads, *(one // x_align for one in x_strides),
            *(one // w_align for one in w_strides),
        ),
        {"K": w.shape[1], "N": w.shape[2], "X_ALIGN": x_align, "W_ALIGN": w_align, "ACROSS": across},
        config,
    )  # fmt: skip


def _across(w: Tensor, dim: int) -> bool:
    """True if it is columns that lie side by side in [H, K, N], by the dimension of w that they are."""
    return w.stride(dim) == 1 or w.shape[dim] == 1


def _tensors(given: Operands, q: Tensor, memory: Memory) -> tuple[Tensor, ...]:
    rope = given.q_rope
    some = (given.block_table, given.cos, given.sin, given.positions)
    return (
        q, rope, given.latent_cache, given.seq_lens, *(rope if one is None else one for one in some),
        memory.o, memory.lse, memory.parts, memory.meta,
    )  # fmt: skip


def _attend(
    given: Operands, q: Tensor, memory: Memory, config: Config, split: Split, arch: Arch | None
) -> _launcher.Launch:
    """The portable kernel's launch."""
    q_strides, rope_strides = strides(q, 3), strides(given.q_rope, 3)
    q_align = _layout.alignment(0, q_strides, rope_strides)
    stride_cp, token = strides(given.latent_cache, 2)
    # what divides a token's stride, where it divides a page's too: of a whole cache, whatever its length
    c_align = _layout.alignment(0, (stride_cp, token))
    paged = given.block_table is not None
    table_strides = (0, 0) if given.cos is None or given.sin is None else (given.cos.stride(0), given.sin.stride(0))
    return _launcher.Launch(
        _mla_kernel,
        (split.blocks * split.splits * given.batch,),
        (
            *_tensors(given, q, memory),
            float(given.scale), float(given.logit_cap), given.tokens, given.heads, given.page, *split,
            0 if given.cos is None else given.cos.shape[0],
            *(one // q_align for one in (*q_strides, *rope_strides)), stride_cp // c_align,
            *strides(given.block_table, 1), given.seq_lens.stride(0), *table_strides, *strides(given.positions, 2),
        ),
        {
            "LSE": given.return_lse, "R": given.latent, "PDL": _overlaps(arch),
            "PAGED": paged, "WHOLE": paged and given.page % config["BLOCK_N"] == 0, "CAP": given.capped,
            "STYLE": STYLES[given.style], "PLACES": given.positions is not None, "SPLIT": split.splits > 1,
            "Q_ALIGN": q_align, "C_ALIGN": c_align, "TOKEN": token, "DR": given.rotary,
            "XCDS": 1 if arch is None else arch.xcds, "BLOCK_R": _block_r(given),
            "BLOCK_DR": max(LEAST_BLOCK, _layout.power_of_two(given.rotary)),
        },
        Config(**{name: value for name, value in config.kwargs.items() if name not in ("SPLITS", "KEYS")}),
    )  # fmt: skip


PORTABLE = Kernel(TENSORS, 0, _tensors, _attend)


def _block_r(given: Operands) -> int:
    return max(LEAST_BLOCK, _layout.power_of_two(given.latent))


def plan(given: Operands, memory: Memory, config: Config, arch: Arch | None, kernel: Kernel = PORTABLE) -> Plan:
    """The launches of a call."""
    least, keys = config["KEYS"], config["BLOCK_N"]
    if least % keys != 0:
        raise InvalidArgument(f"mla_decode: KEYS={least} of a split are no multiple of BLOCK_N={keys}")
    splits = max(1, _layout.ceil_div(given.capacity, least))
    if config["SPLITS"] > 0:
        splits = min(splits, config["SPLITS"])
    if splits == 1:
        memory = memory._replace(parts=memory.o, meta=memory.o)
    split = Split(splits, least, _layout.ceil_div(given.tokens * given.heads, config["BLOCK_M"]))
    q = given.q_nope if given.w_uk is None else memory.q
    latents = memory.o if given.w_uv is None else memory.latents
    attend = kernel.launch(given, q, memory._replace(o=latents), config, split, arch)
    parts, join = None, None
    if splits > 1:
        parts = (given.batch, splits, given.tokens * given.heads)
        overlaps = _overlaps(arch)
        join = _launcher.Launch(
            _mla_join_kernel,
            (given.batch * given.tokens * given.heads,),
            (
                memory.parts, memory.meta, given.seq_lens, latents, memory.lse, given.tokens, given.heads, splits,
                least, given.seq_lens.stride(0),
            ),
            {"LSE": given.return_lse, "R": given.latent, "PDL": overlaps, "BLOCK_R": _block_r(given)},
            Config(num_warps=_join_warps(_block_r(given), arch), **({"launch_pdl": 1} if overlaps else {})),
        )  # fmt: skip
    return Plan(_absorb(given, memory), attend, parts, join, _expand(given, memory))


def _join_warps(width: int, arch: Arch | None) -> int:
    """As few as have 8 columns a lane, 16 bytes of the result."""
    return max(1, width // (8 * (32 if arch is None else arch.wave_size)))


def _product_config(given: Operands) -> Config:
    bits = 32 if given.q_nope.dtype == torch.float32 else 16
    return _config.product(row_bucket(given.batch * given.tokens), bits, given.batch_invariant)


def _absorb(given: Operands, memory: Memory) -> _launcher.Launch | None:
    """q_nope · w_uk."""
    if given.w_uk is None:
        return None
    return _product(given.q_nope, given.w_uk, memory.q, _across(given.w_uk, 2), _product_config(given))


def _expand(given: Operands, memory: Memory) -> _launcher.Launch | None:
    """The latents of the result · w_uvᵀ."""
    if given.w_uv is None:
        return None
    return _product(memory.latents, given.w_uv.mT, memory.o, _across(given.w_uv, 1), _product_config(given))


def allocate(given: Operands, device: torch.device | str, parts: tuple[int, ...] | None) -> Memory:
    """Memory for a call, not yet written.

    For what is not needed stands an input: a result would be lost in a torch.compile that takes every tensor for
    written, and the last one for the result.
    """
    dtype, single = given.q_nope.dtype, torch.float32
    o = torch.empty(given.shape, dtype=dtype, device=device)
    q = given.q_nope if given.w_uk is None else torch.empty(given.latent_shape, dtype=dtype, device=device)
    latents = o if given.w_uv is None else torch.empty(given.latent_shape, dtype=dtype, device=device)
    lse = torch.empty(given.lse_shape, dtype=single, device=device) if given.return_lse else given.q_nope
    if parts is None:
        return Memory(q, latents, o, lse, given.q_nope, given.q_nope)
    sums = torch.empty((*parts, given.latent), dtype=single, device=device)
    return Memory(q, latents, o, lse, sums, torch.empty((*parts, 2), dtype=single, device=device))


def bind(given: Operands, config: Config, kernel: Kernel = PORTABLE) -> Callable[..., Any]:
    """The function for all calls with arguments like these."""
    device = given.q_nope.device
    made = _planned(given, config, _target.arch(), kernel)
    starts = [
        None if one is None else (_launcher.starter(one, device, described), one.args[tensors:])
        for one, described, tensors in (
            (made.absorb, 0, PRODUCT_TENSORS), (made.attend, kernel.described, kernel.number),
            (made.join, 0, JOIN_TENSORS), (made.expand, 0, PRODUCT_TENSORS),
        )
    ]  # fmt: skip
    absorb, attend, join, expand = starts
    parts, some = made.parts, given.batch > 0
    assert attend is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        now = Operands(*args, **kwargs)
        memory = allocate(now, device, parts)
        q = now.q_nope
        if some:
            if absorb is not None:
                q = memory.q
                absorb[0](now.q_nope, now.w_uk, q, *absorb[1])
            latents = memory.o if now.w_uv is None else memory.latents
            attend[0](*kernel.tensors(now, q, memory._replace(o=latents)), *attend[1])
            if join is not None:
                join[0](memory.parts, memory.meta, now.seq_lens, memory.latents, memory.lse, *join[1])
            if expand is not None and now.w_uv is not None:
                expand[0](memory.latents, now.w_uv, memory.o, *expand[1])
        return (memory.o, memory.lse) if now.return_lse else memory.o

    return call


def _planned(given: Operands, config: Config, arch: Arch | None, kernel: Kernel) -> Plan:
    """The launches, made of tensors without memory."""
    device = given.q_nope.device if torch.compiler.is_compiling() else torch.device("meta")
    sums = torch.empty(0, dtype=torch.float32, device=device)
    return plan(given, allocate(given, device, None)._replace(parts=sums, meta=sums), config, arch, kernel)


def described(given: Operands, config: Config, arch: Arch | None, kernel: Kernel = PORTABLE) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write."""
    return _planned(given, config, arch, kernel).launches if given.batch > 0 else []

"""The launches of the kernels for a few rows (`multiply_kernel.py`), and the calls that they take."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, Operands, kinds
from wavecrest.ops._gemm.config import MULTIPLY_ROWS
from wavecrest.ops._gemm.kernel_gemv import _multiply_kernel, _words_kernel


def reads_words(given: Operands) -> bool:
    """True for 4-bit codes: each call looks where they start, as a weight may start inside a word."""
    return given.form == "int4"


def multiplies(given: Operands) -> str | None:
    """Why `_multiply_kernel` does not make a product."""
    if given.M > MULTIPLY_ROWS:
        # without the number: inside torch.compile a symbolic one in a text would compile for it alone
        return f"is for up to {MULTIPLY_ROWS} rows"
    if _launch.orders(given) != (1, 1) or (_launch.leading(given) > 1 and given.M > 1):
        return "reads a and b along K, which must be contiguous in both"
    if given.tail is not None and not given.tail.mT.is_contiguous():
        return "reads the rows of a tail [T, K] one behind the other"
    if reads_words(given):
        return _no_words(given)
    if given.form != "plain" or given.integers or "block" in kinds(given) or "group" in kinds(given):
        return "has no shuffled weights, sums of integers, blocks or groups of scales of bytes"
    return None


def _no_words(given: Operands) -> str | None:
    """Why `_words_kernel` does not make a product with 4-bit codes."""
    if given.K == 0:
        return "has no codes to read: K is 0"
    if not given.flat or given.activation in GATED or given.zero is not None:
        return "reads codes as words without batches, gated activations and zero points"
    if given.group % 64 != 0:
        return "reads codes in groups of 64 or 128 columns"
    return None if given.b.stride(-1) % 16 == 0 else "reads codes as words: columns start at multiples of 16 bytes"


def _words(given: Operands, y: Tensor, parts: Tensor, config: Config, arch: Arch | None) -> _launch.Plan:
    """`_words_kernel`."""
    how = _launch.walk(given)
    _launch.refuse_parts(given, config)
    (sam, _, sbn, sbk, *rest), finish = _launch.common(given)
    if config["BLOCK_K"] % given.group != 0:
        raise InvalidArgument(f"gemm: a BLOCK_K of {config['BLOCK_K']} is no multiple of a group of {given.group}")
    bias, residual, scale_a, scale_b, _, out_scale = _launch.other_tensors(given)
    align_n, steps = _launch.column_unit(given), _layout.ceil_div(given.K, config["BLOCK_K"])
    early, options = _pdl.start_of(config, arch)
    first = _launcher.Launch(
        _words_kernel,
        (_layout.ceil_div(given.N, config["BLOCK_N"]),),
        (
            given.a, given.b, y, parts, bias, residual, scale_a, scale_b, out_scale,
            given.N // align_n, given.K // how.align, steps, how.a_strides[1], given.b.stride(-1) // 16,
            sam, sbn, sbk, *rest,
        ),
        {
            **finish, "NORM_EPS": _launch.norm_eps(given), "ROWS": given.M, "GROUP": given.group, "ALIGN": how.align,
            "ALIGN_N": align_n, "STAGES": config["num_stages"], "PTX": _launch.assembles(arch),
            "PDL": _pdl.overlaps(arch), "EARLY": early,
        },
        _launch.without(options, "SPLIT_K"),
    )  # fmt: skip
    return _launch.Plan(first, None, None, tensors=9)


def _tail_steps(given: Operands, config: Config) -> int:
    """Columns of K that a program of the tail takes at a time, as many bytes of it and of a as one of b does."""
    return min(_layout.power_of_two(given.K), config["BLOCK_K"] * max(1, config["BLOCK_N"] // 4))


def _alike(given: Operands, arch: Arch | None) -> int:
    """Elements of a in 16 bytes, where a lane of AMD's would load more of b; else 0.

    There loads go to registers: 16 bytes of an 8-bit b lie over lanes otherwise than 16 of a, and Triton passes all of
    b through LDS to mend that, widened to float32 (gfx942, triton 3.6). On NVIDIA both are in shared memory anyway.
    """
    narrow = given.b.itemsize < given.a.itemsize
    return 16 // given.a.itemsize if arch is not None and arch.vendor == "amd" and narrow else 0


def multiply(given: Operands, y: Tensor, parts: Tensor, config: Config, arch: Arch | None, tma: bool) -> _launch.Plan:
    """`_words_kernel`; or `_multiply_kernel`, and `_sum_kernel` where SPLIT_K is above 1."""
    if reads_words(given):
        return _words(given, y, parts, config, arch)
    how, split = _launch.walk(given), config["SPLIT_K"]
    _launch.refuse_parts(given, config)
    (sam, _, sbn, _, *rest), finish = _launch.common(given)
    bias, residual, scale_a, scale_b, tail, out_scale = _launch.other_tensors(given)
    columns = given.N - given.tails
    align_n = _layout.alignment(columns, (0, 0, 0))
    steps = _layout.ceil_div(_layout.ceil_div(given.K, config["BLOCK_K"]), split)
    early, options = _pdl.start_of(config, arch)
    tail_k = _tail_steps(given, config) if given.tails else 1
    first = _launcher.Launch(
        _multiply_kernel,
        (given.tails + _layout.ceil_div(columns, config["BLOCK_N"]), given.batches, split),
        (
            given.a, given.b, y, parts, bias, residual, scale_a, scale_b, tail, out_scale,
            columns // align_n, given.K // how.align, steps,
            how.a_strides[0], how.a_strides[1], how.b_strides[0], how.b_strides[2], sam, sbn, *rest,
        ),
        {
            **finish, "NORM_EPS": _launch.norm_eps(given), "ROWS": given.M, "ALIGN": how.align, "ALIGN_N": align_n,
            "EVEN_K": given.K % config["BLOCK_K"] == 0, "STAGES": config["num_stages"], "PTX": _launch.assembles(arch),
            "ALIKE": _alike(given, arch), "PDL": _pdl.overlaps(arch), "EARLY": early, "TAIL": given.tails,
            "TAIL_K": tail_k, "EVEN_TAIL": given.K % tail_k == 0,
        },
        options,
    )  # fmt: skip
    if split == 1:
        return _launch.Plan(first, None, None)
    shape = (split, given.batches, given.M, given.columns)
    return _launch.Plan(first, shape, _launch.sum_parts(given, y, parts, split, arch))

"""The launches of the GEMV kernels (`kernel_gemv.py`), for up to 8 rows of a, and which calls they refuse."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, INT4_UNIT, NIBBLES, GemmCall, kinds
from wavecrest.ops._gemm.config import GEMV_ROWS
from wavecrest.ops._gemm.kernel_gemv import _multiply_kernel, _words_kernel


def reads_words(call: GemmCall) -> bool:
    """True for 4-bit values: each call looks at their address, as a weight may start inside a word."""
    return call.form in NIBBLES


def refusal(call: GemmCall) -> str | None:
    """The reason why the GEMV kernels cannot run a call."""
    if call.M > GEMV_ROWS:
        # without the number: inside torch.compile a symbolic one in a text would compile for it alone
        return f"is for up to {GEMV_ROWS} rows"
    if _launch.orders(call) != (1, 1) or (_launch.leading(call) > 1 and call.M > 1):
        return "reads a and b along K, which must be contiguous in both"
    if call.tail is not None and not call.tail.mT.is_contiguous():
        return "takes a tail [T, K] that is contiguous"
    if reads_words(call):
        return _words_refusal(call)
    if call.form != "plain" or call.integers or "block" in kinds(call) or "group" in kinds(call):
        return "takes no shuffled weight, no int8 a, and no scales of blocks or groups of an 8-bit weight"
    return None


def _words_refusal(call: GemmCall) -> str | None:
    """The reason why `_words_kernel` cannot run a call with 4-bit values."""
    if call.K == 0:
        return "has no values to read: K is 0"
    if not call.flat or call.activation in GATED or call.zero is not None:
        return "reads 4-bit values as words, without batches, gated activations and zero points"
    if call.form == "int4" and call.group % 64 != 0:
        return "reads 4-bit values in groups of 64 or 128 columns"
    return (
        None
        if call.b.stride(-1) % 16 == 0
        else "reads 4-bit values as words: columns must start at multiples of 16 bytes"
    )


def _words(call: GemmCall, y: Tensor, parts: Tensor, config: Config, arch: Arch | None) -> _launch.Plan:
    """`_words_kernel`."""
    how = _launch.walk(call)
    _launch.refuse_parts(call, config)
    (sam, _, sbn, sbk, *rest), epilogue = _launch.epilogue_of(call)
    if config["BLOCK_K"] % call.group != 0:
        raise InvalidArgument(f"gemm: a BLOCK_K of {config['BLOCK_K']} is not a multiple of a group of {call.group}")
    if config["BLOCK_K"] % INT4_UNIT != 0:
        raise InvalidArgument(f"gemm: a BLOCK_K of {config['BLOCK_K']} has no whole units of {INT4_UNIT} columns")
    bias, residual, scale_a, scale_b, _, out_scale = _launch.other_tensors(call)
    align_n, steps = _launch.column_unit(call), _layout.ceil_div(call.K, config["BLOCK_K"])
    early, options = _pdl.start_of(config, arch, _pdl.EARLY)
    first = _launcher.Launch(
        _words_kernel,
        (_layout.ceil_div(call.N, config["BLOCK_N"]),),
        (
            call.a, call.b, y, parts, bias, residual, scale_a, scale_b, out_scale,
            call.N // align_n, call.K // how.align, steps, how.a_strides[1], call.b.stride(-1) // 16,
            sam, sbn, sbk, *rest,
        ),
        {
            **epilogue, "NORM_EPS": _launch.norm_eps(call), "ROWS": call.M, "GROUP": call.group, "ALIGN": how.align,
            "ALIGN_N": align_n, "STAGES": config["num_stages"], "PTX": _launch.assembles(arch),
            "PDL": _pdl.overlaps(arch), "EARLY": early,
        },
        _launch.without(options, "SPLIT_K"),
    )  # fmt: skip
    return _launch.Plan(first, None, None, reads_words=True)


def _tail_steps(call: GemmCall, config: Config) -> int:
    """K step of a program of the extra rows, so that its loads are as large as those of a program of b."""
    return min(_layout.power_of_two(call.K), config["BLOCK_K"] * max(1, config["BLOCK_N"] // 4))


def _alike(call: GemmCall, arch: Arch | None) -> int:
    """Elements of a in 16 bytes, where a lane on AMD would load more of an 8-bit b than that; else 0.

    On AMD loads go to registers. 16 bytes of an 8-bit b lie over lanes otherwise than 16 bytes of a, and Triton would
    pass all of b, widened to float32, through LDS to give both one layout (gfx942, triton 3.6). On NVIDIA both are in
    shared memory anyway.
    """
    narrow = call.b.itemsize < call.a.itemsize
    return 16 // call.a.itemsize if arch is not None and arch.vendor == "amd" and narrow else 0


def gemv(call: GemmCall, y: Tensor, parts: Tensor, config: Config, arch: Arch | None, tma: bool) -> _launch.Plan:
    """`_words_kernel`; or `_multiply_kernel`, and `_sum_kernel` where SPLIT_K is above 1."""
    if reads_words(call):
        return _words(call, y, parts, config, arch)
    how, split = _launch.walk(call), config["SPLIT_K"]
    _launch.refuse_parts(call, config)
    (sam, _, sbn, _, *rest), epilogue = _launch.epilogue_of(call)
    bias, residual, scale_a, scale_b, tail, out_scale = _launch.other_tensors(call)
    columns = call.N - call.tails
    align_n = _layout.alignment(columns, (0, 0, 0))
    steps = _layout.ceil_div(_layout.ceil_div(call.K, config["BLOCK_K"]), split)
    early, options = _pdl.start_of(config, arch, _pdl.EARLY)
    tail_k = _tail_steps(call, config) if call.tails else 1
    first = _launcher.Launch(
        _multiply_kernel,
        (call.tails + _layout.ceil_div(columns, config["BLOCK_N"]), call.batches, split),
        (
            call.a, call.b, y, parts, bias, residual, scale_a, scale_b, tail, out_scale,
            columns // align_n, call.K // how.align, steps,
            how.a_strides[0], how.a_strides[1], how.b_strides[0], how.b_strides[2], sam, sbn, *rest,
        ),
        {
            **epilogue, "NORM_EPS": _launch.norm_eps(call), "ROWS": call.M, "ALIGN": how.align, "ALIGN_N": align_n,
            "EVEN_K": call.K % config["BLOCK_K"] == 0, "STAGES": config["num_stages"], "PTX": _launch.assembles(arch),
            "ALIKE": _alike(call, arch), "PDL": _pdl.overlaps(arch), "EARLY": early, "TAIL": call.tails,
            "TAIL_K": tail_k, "EVEN_TAIL": call.K % tail_k == 0,
        },
        options,
    )  # fmt: skip
    if split == 1:
        return _launch.Plan(first, None, None)
    shape = (split, call.batches, call.M, call.columns)
    return _launch.Plan(first, shape, _launch.sum_parts(call, y, parts, split, arch))

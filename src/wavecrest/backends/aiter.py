"""AMD's aiter as a backend: its tuned dispatcher for GEMMs, with the table rows that it would use; its attention.

Called as its sources say (ROCm/aiter, aiter/tuned_gemm.py and aiter/ops/gemm_op_a8w8.py, read 2026-11-21, and
aiter/ops/mha.py, 2026-11-22; preshuffled weights 2026-11-26); it was not run: this project has no AMD GPU. Imported
inside functions only. `tests/unit/aiter_signatures.py` holds the calls to the signatures of named versions.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wavecrest.backends.torch.gemm as native
from wavecrest import env, hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.dispatch.tuned import aiter_csv
from wavecrest.errors import TableError
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._gemm.backend import MEASURED, op
from wavecrest.ops._gemm.call import GemmCall, kinds

# below PyTorch: it runs where a measured row names it
PRIORITY = 4
# dtypes of the results of its 8-bit kernels
OUT_DTYPES = (torch.bfloat16, torch.float16)
# architectures with 16-bit kernels for preshuffled weights; elsewhere its dispatcher ends in an assertion
PRESHUFFLED = ("gfx942", "gfx950")
# N and K are multiples of this for gfx950's assembly kernel, which takes preshuffled weights without a tuned row
ASSEMBLY_TILE = 64


@cache
def _missing() -> str | None:
    """Why aiter cannot run here at all."""
    if torch.version.hip is None:
        return "runs on AMD GPUs; this torch is no ROCm build"
    if importlib.util.find_spec("aiter") is None:
        return "is not installed (an AMD GPU and https://github.com/ROCm/aiter)"
    return None


# Dynamo would trace the search for the package
@constant_in_graphs
def _unavailable() -> str | None:
    return _missing()


def _refuse_gemm(call: GemmCall) -> str | None:
    reason: str | None = _unavailable()
    if reason is not None:
        return reason
    if not call.a.is_cuda or needs_grad(call.a, call.b, call.bias, call.residual, call.norm_weight):
        return "runs on a GPU, without gradients"
    if call.form == "int4" or call.weight_only or not call.flat or call.b.stride(-2) != 1:
        return "takes one plain or preshuffled weight [N, K] of a's dtype that is contiguous along K"
    if call.form == "shuffled":
        return _refuse_preshuffled(call)
    if call.a.dtype.itemsize == 2:
        return None
    if call.a.dtype.itemsize != 1:
        return f"multiplies 16-bit and 8-bit types, not {dtype_name(call.a)}"
    if kinds(call) not in (("vector", "vector"), ("block", "block")):
        return f"applies scales of rows and columns, or of blocks, not {' and '.join(kinds(call))}"
    if kinds(call) == ("block", "block") and call.integers:
        return "applies block scales to 8-bit floats"
    return None if call.dtype in OUT_DTYPES else f"makes bfloat16 and float16 from 8 bits, not {call.dtype}"


def _refuse_preshuffled(call: GemmCall) -> str | None:
    """Why aiter has no kernel for a weight in the (16, 16) layout of its `shuffle_weight`."""
    device = hardware.detect()
    if call.a.dtype.itemsize == 2:
        if torch.compiler.is_compiling():
            return "learns the layout from an attribute of the tensor, which torch.compile does not keep"
        if device.arch not in PRESHUFFLED:
            return f"multiplies 16-bit preshuffled weights on {' and '.join(PRESHUFFLED)}, not on {device.arch}"
        odd = call.columns % ASSEMBLY_TILE or call.K % ASSEMBLY_TILE
        if device.arch == "gfx950" and (odd or call.a.dtype != torch.bfloat16):
            return f"multiplies preshuffled weights on gfx950 in bfloat16, N and K multiples of {ASSEMBLY_TILE}"
        return None
    own = None if device.known is None else device.known.fp8
    if own is None or {dtype_name(call.a), dtype_name(call.b)} != {f"float8_{own}"}:
        return f"multiplies preshuffled weights of the 8-bit floats of {device.arch}, not {dtype_name(call.b)}"
    if kinds(call) != ("vector", "vector"):
        return f"applies scales of rows and columns to preshuffled weights, not {' and '.join(kinds(call))}"
    return None if call.dtype in OUT_DTYPES else f"makes bfloat16 and float16 from 8 bits, not {call.dtype}"


def run_gemm(call: GemmCall) -> Tensor:
    """One call."""
    call = native.normalised(call)
    # a new view, so that what is said of the layout is of this call's weight alone
    a, weight, bias = call.a.reshape(call.M, call.K), call.b.mT, call.bias
    preshuffled = call.form == "shuffled"
    scales, bias_is_left = kinds(call), True
    if call.a.dtype.itemsize == 2:
        from aiter.tuned_gemm import gemm_a16w16

        # added by it only where nothing comes between, and in its own dtype
        if bias is not None and call.alpha == 1.0 and call.bias_along == "n" and bias.dtype == a.dtype:
            bias_is_left = False
        if preshuffled:
            weight.is_shuffled = True  # type: ignore[attr-defined]
        y = gemm_a16w16(a, weight, bias=None if bias_is_left else bias, otype=a.dtype)
    else:
        assert call.scale_a is not None and call.scale_b is not None
        if scales == ("block", "block"):
            from aiter import gemm_a8w8_blockscale

            y = gemm_a8w8_blockscale(a, weight, call.scale_a, call.scale_b.mT.contiguous(), dtype=call.dtype)
        elif preshuffled:
            from aiter import gemm_a8w8_bpreshuffle

            rows, columns = call.scale_a.reshape(-1, 1), call.scale_b.reshape(-1, 1)
            y = gemm_a8w8_bpreshuffle(a, weight, rows, columns, dtype=call.dtype)
        else:
            from aiter import gemm_a8w8

            rows, columns = call.scale_a.reshape(-1, 1), call.scale_b.reshape(1, -1)
            y = gemm_a8w8(a, weight, rows, columns, dtype=call.dtype)
    y = y.reshape(*call.a.shape[:-1], call.columns)
    epilogue = native.bind_epilogue(call, bias_is_left)
    return y if epilogue is None else epilogue(call, y)


@cache
def _tables() -> tuple[tuple[aiter_csv.Row, ...], str]:
    """The rows of the tables that aiter reads here, and what is wrong with one of them."""
    listed = env.get("AITER_CONFIG_GEMM_BF16")
    paths = [Path(path) for path in listed.split(os.pathsep) if path]
    if not listed:
        spec = importlib.util.find_spec("aiter")
        folders = [] if spec is None else spec.submodule_search_locations or []
        paths = [path for folder in folders for name in aiter_csv.SHIPPED for path in sorted(Path(folder).glob(name))]
    rows: list[aiter_csv.Row] = []
    problem = ""
    for path in paths:
        try:
            rows += aiter_csv.read([path])
        except TableError as error:
            problem = problem or str(error)
    return tuple(rows), problem


# Dynamo would trace the search through the rows
@constant_in_graphs
def _tabled(M: int, N: int, K: int, dtype: str) -> str:
    """A note for `explain`: the GEMM's row in aiter's tables, or why they cannot be read; "" if there is neither."""
    device = hardware.detect()
    rows, problem = _tables()
    row = aiter_csv.find(rows, device.arch, device.compute_units, M, N, K, dtype)
    unread = f"; {problem}" if problem else ""
    if row is None:
        return unread
    took = "a placeholder" if row.us is None else f"{row.us:.1f} µs"
    return (
        f"; its table {row.file} has {took} by {row.library} for {row.M} rows: `wavecrest tune gemm` compares{unread}"
    )


def _opt_in_gemm(call: GemmCall) -> str:
    """The reason for the opt-in, and the row that aiter's own tables have for the rows of the key's bucket."""
    if _unavailable() is not None or call.a.dtype.itemsize != 2 or call.form != "plain":
        return MEASURED
    said: str = _tabled(row_bucket(call.M), call.columns, call.K, dtype_name(call.a))
    return MEASURED + said


def _attention_refuse(call: FlashAttentionCall) -> str | None:
    reason: str | None = _unavailable()
    if reason is not None:
        return reason
    if not call.q.is_cuda or needs_grad(call.q, call.k, call.v, call.bias, call.alibi_slopes):
        return "runs on a GPU, without gradients"
    if call.q.dtype.itemsize != 2 or call.quantized:
        return f"attends in float16 and bfloat16, not {dtype_name(call.k)}"
    if call.dropout:
        return "has no dropout whose mask a seed gives"
    if call.sinks is not None:
        return "has sinks of another form in each version"
    if call.softcap > 0 and not call.packed:
        return "caps scores of packed sequences alone"
    if call.blind or call.batch * call.seqlen_q * call.q.shape[0] == 0:
        return "is not asked for queries without keys, nor without queries"
    if call.packed and call.return_lse:
        return "leaves open what the logarithms of packed queries without keys are"
    return _refuse_bias(call)


def _refuse_bias(call: FlashAttentionCall) -> str | None:
    if call.bias is None:
        return None
    if call.packed or call.bias.dtype != call.q.dtype or call.alibi_slopes is not None:
        return "adds a bias of q's dtype, without slopes, to sequences that are not packed"
    whole = (call.seqlen_q, call.seqlen_k)
    if call.bias.numel() != call.seqlen_q * call.seqlen_k or tuple(call.bias.shape[-2:]) != whole:
        return "adds one bias [Sq, Sk] to all heads and sequences"
    return None


def _window(call: FlashAttentionCall) -> tuple[int, int, int]:
    """aiter's window (left, right, sink tokens); −1: unlimited. Older versions have no third number."""
    left = -1 if call.left >= call.seqlen_k - 1 else call.left
    right = -1 if call.right >= call.seqlen_q - 1 else call.right
    # plain causality is its flag alone, without a window: its assembly kernels take no other form
    return left, -1 if call.causal and left < 0 else right, 0


def _attention(call: FlashAttentionCall) -> Any:
    import aiter

    options: dict[str, Any] = {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": _window(call),
        "alibi_slopes": call.alibi_slopes,
        "return_lse": call.return_lse,
    }
    if call.packed:
        if call.softcap > 0:
            options["logits_soft_cap"] = float(call.softcap)
        lengths = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqlen_q, call.seqlen_k)
        found = aiter.flash_attn_varlen_func(call.q, call.k, call.v, *lengths, **options)
    else:
        if call.bias is not None:
            options["bias"] = call.bias.reshape(call.seqlen_q, call.seqlen_k)
        # tokens before heads
        q, k, v = (call.bhsd(one).transpose(1, 2) for one in (call.q, call.k, call.v))
        found = aiter.flash_attn_func(q, k, v, **options)
    # a tensor alone, or a tuple with it, by version
    out, *more = found if isinstance(found, (tuple, list)) else (found,)
    out = (out.transpose(1, 2) if call.layout == "bhsd" else out).contiguous()
    return (out, more[0].contiguous()) if call.return_lse else out


def _attention_opt_in(_call: FlashAttentionCall) -> str:
    return MEASURED


registry.get("flash_attention").attach(
    "aiter", _attention, refuse=_attention_refuse, opt_in=_attention_opt_in, priority=PRIORITY
)
op.attach("aiter", run_gemm, refuse=_refuse_gemm, opt_in=_opt_in_gemm, priority=PRIORITY)

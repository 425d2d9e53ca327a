"""AMD's aiter as a backend: its tuned dispatcher for products, with the table rows that it would use; its attention.

Called as its sources say (ROCm/aiter, aiter/tuned_gemm.py and aiter/ops/gemm_op_a8w8.py, read 2026-11-21, and
aiter/ops/mha.py, 2026-11-22); it was not run: this project has no AMD GPU. Imported inside functions only.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wavecrest.backends.torch.gemm as _native
from wavecrest import env, hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.dispatch.tuned import aiter_csv
from wavecrest.errors import TableError
from wavecrest.ops._flash_attention.call import Operands as Attention
from wavecrest.ops._gemm.call import Operands, kinds

# below PyTorch: it runs where a measured row names it
PRIORITY = 4
# what its 8-bit kernels make
OUT_DTYPES = (torch.bfloat16, torch.float16)


@cache
def _missing() -> str | None:
    """Why aiter cannot run here at all."""
    if torch.version.hip is None:
        return "runs on AMD GPUs; this torch is no ROCm build"
    if importlib.util.find_spec("aiter") is None:
        return "is not installed (an AMD GPU and https://github.com/ROCm/aiter)"
    return None


# Dynamo would trace the search for the package
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unavailable() -> str | None:
    return _missing()


def _gemm_supports(*args: Any) -> str | None:
    given = Operands(*args)
    reason: str | None = _unavailable()
    if reason is not None:
        return reason
    if not given.a.is_cuda or needs_grad(given.a, given.b, given.bias, given.residual, given.norm_weight):
        return "runs on a GPU, without gradients"
    if given.form != "plain" or given.weight_only or not given.flat or given.b.stride(-2) != 1:
        return "takes one plain weight [N, K] that is contiguous along K"
    if given.a.dtype.itemsize == 2:
        return None
    if given.a.dtype.itemsize != 1:
        return f"multiplies 16-bit and 8-bit types, not {dtype_name(given.a)}"
    if kinds(given) not in (("vector", "vector"), ("block", "block")):
        return f"applies scales of rows and columns, or of blocks, not {' and '.join(kinds(given))}"
    if kinds(given) == ("block", "block") and given.integers:
        return "applies block scales to 8-bit floats"
    return None if given.dtype in OUT_DTYPES else f"makes bfloat16 and float16 from 8 bits, not {given.dtype}"


def _gemm(*args: Any) -> Tensor:
    given = _native.normed(Operands(*args))
    a, weight, bias = given.a.reshape(given.M, given.K), given.b.mT, given.bias
    scales = kinds(given)
    if given.a.dtype.itemsize == 2:
        from aiter.tuned_gemm import gemm_a16w16

        # added by it only where nothing comes between, and in its own dtype
        inside = bias is not None and given.alpha == 1.0 and given.bias_along == "n" and bias.dtype == a.dtype
        y = gemm_a16w16(a, weight, bias=bias if inside else None, otype=a.dtype)
        bias = None if inside else bias
    else:
        assert given.scale_a is not None and given.scale_b is not None
        if scales == ("block", "block"):
            from aiter import gemm_a8w8_blockscale

            y = gemm_a8w8_blockscale(a, weight, given.scale_a, given.scale_b.mT.contiguous(), dtype=given.dtype)
        else:
            from aiter import gemm_a8w8

            rows, columns = given.scale_a.reshape(-1, 1), given.scale_b.reshape(1, -1)
            y = gemm_a8w8(a, weight, rows, columns, dtype=given.dtype)
    return _native.finished(given, y.reshape(*given.a.shape[:-1], given.columns), bias)


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
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tabled(M: int, N: int, K: int, dtype: str) -> str:
    """What aiter's own tables say of a product, and which cannot be read; "" where there is nothing to say."""
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


def _reserved(*args: Any) -> str | None:
    """Where it runs, and what its own tables have for the rows of the key's bucket."""
    reason = "runs where a measured row names it"
    given = Operands(*args)
    if _unavailable() is not None or given.a.dtype.itemsize != 2:
        return reason
    said: str = _tabled(row_bucket(given.M), given.columns, given.K, dtype_name(given.a))
    return reason + said


def _attention_supports(*args: Any, **kwargs: Any) -> str | None:
    given = Attention(*args, **kwargs)
    reason: str | None = _unavailable()
    if reason is not None:
        return reason
    if not given.q.is_cuda or needs_grad(given.q, given.k, given.v, given.bias, given.alibi_slopes):
        return "runs on a GPU, without gradients"
    if given.q.dtype.itemsize != 2 or given.quantized:
        return f"attends in float16 and bfloat16, not {dtype_name(given.k)}"
    if given.dropout:
        return "has no dropout whose mask a seed gives"
    if given.sinks is not None:
        return "has sinks of another form in each version"
    if given.softcap > 0 and not given.packed:
        return "caps scores of packed sequences alone"
    if given.blind or given.batch * given.queries * given.q.shape[0] == 0:
        return "is not asked for queries without keys, nor without queries"
    if given.packed and given.return_lse:
        return "leaves open what the logarithms of packed queries without keys are"
    return _bias_declined(given)


def _bias_declined(given: Attention) -> str | None:
    if given.bias is None:
        return None
    if given.packed or given.bias.dtype != given.q.dtype or given.alibi_slopes is not None:
        return "adds a bias of q's dtype, without slopes, to sequences that are not packed"
    whole = (given.queries, given.keys)
    if given.bias.numel() != given.queries * given.keys or tuple(given.bias.shape[-2:]) != whole:
        return "adds one bias [Sq, Sk] to all heads and sequences"
    return None


def _window(given: Attention) -> tuple[int, int, int]:
    """Its window: −1 where a side hides nothing; the third number, of tokens always seen, is of newer versions."""
    left = -1 if given.left >= given.keys - 1 else given.left
    right = -1 if given.right >= given.queries - 1 else given.right
    # where causality is all there is it says so by its flag alone, as its kernels written by hand ask for
    return left, -1 if given.causal and left < 0 else right, 0


def _attention(*args: Any, **kwargs: Any) -> Any:
    import aiter

    given = Attention(*args, **kwargs)
    options: dict[str, Any] = {
        "softmax_scale": given.scale,
        "causal": given.causal,
        "window_size": _window(given),
        "alibi_slopes": given.alibi_slopes,
        "return_lse": given.return_lse,
    }
    if given.packed:
        if given.softcap > 0:
            options["logits_soft_cap"] = float(given.softcap)
        lengths = (given.cu_seqlens_q, given.cu_seqlens_k, given.queries, given.keys)
        found = aiter.flash_attn_varlen_func(given.q, given.k, given.v, *lengths, **options)
    else:
        if given.bias is not None:
            options["bias"] = given.bias.reshape(given.queries, given.keys)
        # tokens before heads
        q, k, v = (given.bhsd(one).transpose(1, 2) for one in (given.q, given.k, given.v))
        found = aiter.flash_attn_func(q, k, v, **options)
    # a tensor alone, or a tuple with it, by version
    out, *more = found if isinstance(found, (tuple, list)) else (found,)
    out = (out.transpose(1, 2) if given.layout == "bhsd" else out).contiguous()
    return (out, more[0].contiguous()) if given.return_lse else out


def _attention_reserved(*_args: Any, **_kwargs: Any) -> str:
    return "runs where a measured row names it"


registry.get("flash_attention").attach(
    "aiter", _attention, supports=_attention_supports, reserved=_attention_reserved, priority=PRIORITY
)
registry.get("gemm").attach("aiter", _gemm, supports=_gemm_supports, reserved=_reserved, priority=PRIORITY)

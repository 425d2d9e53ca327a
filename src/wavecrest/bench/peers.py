"""Peers of an op: PyTorch eager and compiled, and the kernels of other libraries where they are installed.

A peer gets the same tensors as the op. Where it does not offer an op, or not for these arguments, it says why. Calls
were written from the peers' sources: liger-kernel 0.8.5 (`liger_kernel/ops/*.py`) and ROCm/aiter (`aiter/ops/norm.py`,
`rmsnorm.py`, `activation.py`, `quant.py`). Their imports stay inside functions: nothing else needs them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wavecrest import env
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.ops._flash_decoding.call import FlashDecodingCall
from wavecrest.ops._flash_decoding.reference import stored
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.reference import table_rows
from wavecrest.ops.gated.call import GatedCall
from wavecrest.ops.rows.call import RowCall

# a call without arguments, ready to be timed
Call = Callable[[], Any]


def _as_it_is(result: Any) -> Any:
    return result


@dataclass(frozen=True, slots=True)
class Prepared:
    """A peer's call, and a function (not timed) that turns its results into the op's results."""

    run: Call
    finish: Callable[[Any], Any] = _as_it_is


# makes the call for an op's arguments, or raises Unsupported with the reason
Maker = Callable[..., Call | Prepared]

PEERS = ("eager", "compile", "liger", "aiter")
# peers used only when named: PyTorch's own kernels, which need a full cache in 16 bits
SDPA = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
ALL = (*PEERS, *SDPA)
# peer -> (module, distribution, how to get it)
_PACKAGES = {
    "liger": ("liger_kernel", "liger-kernel", "pip install --no-deps liger-kernel"),
    "aiter": ("aiter", "amd-aiter", "an AMD GPU and https://github.com/ROCm/aiter"),
}


def available(names: tuple[str, ...] = PEERS) -> tuple[dict[str, str], dict[str, str]]:
    """The peers that can run here with their versions, and the others with the reasons.

    Raises:
        InvalidArgument: a name is not a peer's.
    """
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise InvalidArgument(f"no peer {unknown[0]!r}; there are {', '.join(ALL)}, or none")
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name not in _PACKAGES:
            versions[name] = f"torch {torch.__version__}"
            continue
        module, distribution, install = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            missing[name] = f"not installed; it needs {install}"
            continue
        try:
            versions[name] = f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            versions[name] = f"{distribution} of unknown version"
    return versions, missing


def prepare(peer: str, op: AnyOp, call: AnyCall) -> Prepared:
    """The computation of a call by a peer.

    Raises:
        Unsupported: the peer does not offer this; the message is the reason.
    """
    if peer in ("eager", "compile"):
        return Prepared(_torch(op, call, compiled=peer == "compile"))
    if peer in SDPA:
        if not isinstance(call, FlashDecodingCall):
            raise Unsupported("is for flash_decoding")
        return _sdpa(peer, call)
    makers = {"liger": LIGER, "aiter": AITER}[peer]
    maker = makers.get(op.name)
    if maker is None:
        raise Unsupported("does not offer this op")
    first = next(value for value in call if isinstance(value, Tensor))
    if first.device.type == "cpu" and env.get("TRITON_INTERPRET") != "1":
        raise Unsupported("runs on a GPU")
    made = maker(call)
    return made if isinstance(made, Prepared) else Prepared(made)


def _torch(op: AnyOp, call: AnyCall, *, compiled: bool) -> Call:
    backend = op.backends.get("torch")
    if backend is None:
        raise Unsupported("the op has no PyTorch backend")
    unpacked = op.study.unpacked
    if unpacked is not None:
        # PyTorch's alternative: the same GEMM with the weight unpacked before the clock starts
        call = unpacked(call)
    reason = backend.refuse(call)
    if reason is not None:
        raise Unsupported(reason)
    run = backend.run
    if compiled:
        # a graph break would quietly time eager code; and variants of one function share a limit, so start over
        torch._dynamo.reset()
        run = torch.compile(run, dynamic=False, fullgraph=True)
    return lambda: run(call)


def _sdpa(peer: str, call: FlashDecodingCall) -> Prepared:
    """PyTorch's attention of one query over whole caches in the query's dtype, made so before the clock starts.

    It takes no lengths: with a mask for them it would read the whole cache, and the mask.
    """
    if call.seqlen_q > 1 or not bool((call.seq_lens == call.capacity).all()):
        raise Unsupported("is asked for one query over full caches")
    plain = FlashDecodingCall(call.q, call.k_cache, call.v_cache, call.seq_lens, softmax_scale=call.softmax_scale)
    places = ("k_cache", "v_cache", "block_table", "k_scale", "v_scale", "k_shift", "v_shift", "batch_invariant")
    if call != plain._replace(**{name: getattr(call, name) for name in places}):
        raise Unsupported("has no window, slopes, cap, sinks or logarithms")
    q, dtype = call.q.transpose(1, 2), call.q.dtype
    k = stored(call, call.k_cache, call.k_scale, call.k_shift, torch.float32).to(dtype).transpose(1, 2)
    v = stored(call, call.v_cache, call.v_scale, call.v_shift, torch.float32).to(dtype).transpose(1, 2)

    def attend() -> Tensor:
        with sdpa_kernel(SDPA[peer]):
            return F.scaled_dot_product_attention(q, k, v, scale=call.scale, enable_gqa=call.group > 1)

    try:
        attend()
    except RuntimeError as error:
        raise Unsupported(f"PyTorch declines: {str(error).splitlines()[0]}") from error
    return Prepared(attend, lambda y: y.transpose(1, 2).contiguous())


def _no_vector(name: str) -> Unsupported:
    return Unsupported(f"needs a {name}")


def _liger_rms_norm(call: RowCall) -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # offset 0, Llama's casting, nothing in place
    return lambda: LigerRMSNormFunction.apply(call.x, call.weight, call.eps, 0.0, "llama", False)


def _liger_add_rms_norm(call: RowCall) -> Call:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    if call.weight is None:
        raise _no_vector("weight")
    return lambda: LigerFusedAddRMSNormFunction.apply(call.x, call.residual, call.weight, call.eps, 0.0, "llama", False)


def _liger_layer_norm(call: RowCall) -> Call:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    if call.weight is None or call.bias is None:
        raise _no_vector("weight and a bias")
    return lambda: LigerLayerNormFunction.apply(call.x, call.weight, call.bias, call.eps)


def _liger_silu_and_mul(call: GatedCall) -> Call:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    if call.up is None:
        return lambda: LigerFusedGateUpSiLUMulFunction.apply(call.gate)
    return lambda: LigerSiLUMulFunction.apply(call.gate, call.up)


def _liger_gelu_and_mul(call: GatedCall) -> Call:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if call.approximate != "tanh":
        raise Unsupported("offers the tanh form only")
    if call.up is None:
        raise Unsupported("takes gate and up as two tensors")
    return lambda: LigerGELUMulFunction.apply(call.gate, call.up)


def _liger_softmax(call: RowCall) -> Call:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return lambda: LigerSoftmaxFunction.apply(call.x)


# one program of its kernel holds all heads of a token, so ask for no more heads than models have
LIGER_ROPE_HEADS = 128


def _liger_rope(call: RopeCall) -> Prepared:
    from liger_kernel.ops.rope import LigerRopeFunction

    x = call.x
    if call.style != "neox" or x.ndim not in (3, 4):
        raise Unsupported("offers the NeoX style on one batch of sequences")
    if not 2 <= x.shape[-2] <= LIGER_ROPE_HEADS:
        raise Unsupported(f"rotates queries and keys, here 2 to {LIGER_ROPE_HEADS} heads in all, not {x.shape[-2]}")
    # it takes no positions: the row of each token is selected before the clock starts
    tables = [rows.contiguous() for rows in table_rows(call)]
    # it rotates queries and keys in place: half of the heads each, in copies of its own
    batch = x if x.ndim == 4 else x.unsqueeze(0)
    half = x.shape[-2] // 2
    halves = (part.clone(memory_format=torch.contiguous_format) for part in (batch[:, :, :half], batch[:, :, half:]))
    q, k = (part.transpose(1, 2) for part in halves)

    def run() -> Any:
        return LigerRopeFunction.apply(q, k, *tables, None, 1, 2 * call.cos.shape[-1])

    def finish(result: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([part.transpose(1, 2) for part in result], dim=2).reshape(x.shape)

    return Prepared(run, finish)


def _aiter_rms_norm(call: RowCall) -> Call:
    import aiter

    if call.weight is None:
        raise _no_vector("weight")
    return lambda: aiter.rms_norm(call.x, call.weight, call.eps)


def _aiter_layer_norm(call: RowCall) -> Call:
    import aiter

    return lambda: aiter.layer_norm(call.x, call.weight, call.bias, call.eps)


def _aiter_gated(call: GatedCall) -> Call:
    import aiter

    kernel = getattr(aiter, f"{call.function}_and_mul")
    # it takes one packed tensor; packing is not timed, and the bytes read are the same
    packed = call.gate if call.up is None else torch.cat([call.gate, call.up], dim=-1)

    def run() -> Tensor:
        out = torch.empty(*packed.shape[:-1], packed.shape[-1] // 2, dtype=packed.dtype, device=packed.device)
        kernel(out, packed)
        return out

    return run


def _aiter_quantize_int8(call: RowCall) -> Call:
    from aiter.ops.quant import per_token_quant_hip

    if call.scale is not None or call.granularity != "token":
        raise Unsupported("is asked for a scale a token, worked out from the values")
    return lambda: per_token_quant_hip(call.x, quant_dtype=call.dtype)


LIGER: dict[str, Maker] = {
    "add_rms_norm": _liger_add_rms_norm,
    "gelu_and_mul": _liger_gelu_and_mul,
    "layer_norm": _liger_layer_norm,
    "rms_norm": _liger_rms_norm,
    "rope": _liger_rope,
    "silu_and_mul": _liger_silu_and_mul,
    "softmax": _liger_softmax,
}
AITER: dict[str, Maker] = {
    "gelu_and_mul": _aiter_gated,
    "layer_norm": _aiter_layer_norm,
    "quantize_int8": _aiter_quantize_int8,
    "rms_norm": _aiter_rms_norm,
    "silu_and_mul": _aiter_gated,
}

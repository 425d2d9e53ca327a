"""The op mla_prefill, with its backends attached.

The kernels are those of `mla_decode`, for any number of queries: the rows of a tile are heads first, so that a tile of
64 rows of 128 heads has one query and causality hides none of its work.
"""

from __future__ import annotations

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._mla_decode.backend import attach_kernels
from wavecrest.ops._mla_decode.call import MlaResult
from wavecrest.ops._mla_decode.key import KEY_FIELDS, key_of
from wavecrest.ops._mla_decode.reference import reference
from wavecrest.ops._mla_prefill.call import MlaPrefillCall, check
from wavecrest.ops._mla_prefill.launch import MOST_BYTES, expanded_bytes, flops, run_decompressed

# above the absorbed kernel, for calls that it is not opt-in for
PRIORITY = _launcher.KERNEL_PRIORITY + 5


def unsplit(config: Config) -> Config:
    """A configuration that does not split the keys of invariant calls: partial sums would take memory per query."""
    return Config(**(config.kwargs | {"SPLITS": max(1, config["SPLITS"])}))


def refuse_decompressed(call: MlaPrefillCall) -> str | None:
    """The reason why the decompressed form cannot run a call."""
    if call.head_dim_nope + call.head_dim_rope > 256 or call.head_dim_v > 256:
        return "attends to 256 columns at most"
    return None


def opt_in_decompressed(call: MlaPrefillCall) -> str | None:
    """The reason why the decompressed form runs a call only where it is asked for."""
    if call.q_nope.device.type == "cpu":
        return "is for a GPU, where attention has a kernel"
    # buckets, as the decision is kept for them
    seqlen_q, seqlen_k = row_bucket(call.seqlen_q), row_bucket(call.max_seqlen_k)
    absorbed, expanded = flops(
        seqlen_q, max(seqlen_k, seqlen_q), call.latent_dim, call.head_dim_rope, call.head_dim_nope, call.head_dim_v
    )
    if absorbed <= expanded:
        return "few queries take fewer FLOPs absorbed than the keys take to expand"
    if expanded_bytes(call) > MOST_BYTES:
        return f"keys and values of all heads take more than {MOST_BYTES >> 30} GiB"
    return None


op: Op[MlaPrefillCall, MlaResult] = Op(
    "mla_prefill",
    MlaPrefillCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._mla_prefill.study",
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "tokens", "capacity"),
    op_class="gemm",
)
attach_kernels(op, unsplit)
op.attach(
    "decompressed",
    run_decompressed,
    refuse=refuse_decompressed,
    opt_in=opt_in_decompressed,
    priority=PRIORITY,
)

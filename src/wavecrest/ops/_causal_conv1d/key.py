"""The shape key of the causal convolution: what the choice of a backend may depend on."""

from __future__ import annotations

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, m_bucket
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall

KEY_FIELDS = (
    "batch",
    "tokens",
    "channels",
    "taps",
    "dtype",
    "weight",
    "bias",
    "initial",
    "lens",
    "activation",
    "device",
    "grad",
)
KEY_SIZES = ("batch", "tokens")


def key_of(call: CausalConv1dCall) -> Key:
    """The shape key of a call: KEY_FIELDS; batch and tokens by bucket."""
    return (
        m_bucket(call.x.shape[0]),
        m_bucket(call.tokens),
        call.channels,
        call.taps,
        dtype_name(call.x),
        dtype_name(call.weight),
        None if call.bias is None else dtype_name(call.bias),
        call.initial is not None,
        call.seq_lens is not None,
        call.activation,
        call.x.device.type,
        call.needs_grad,
    )

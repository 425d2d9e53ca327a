"""Shape keys of the sLSTM ops: what the choice of a backend may depend on."""

from __future__ import annotations

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.ops.slstm.call import SlstmCall, SlstmStepCall

KEY_FIELDS = (
    "heads",
    "head_dim",
    "dtype",
    "forget_gate",
    "bias",
    "form",
    "resets",
    "initial",
    "last",
    "device",
    "grad",
)
STEP_KEY_FIELDS = ("heads", "head_dim", "dtype", "forget_gate", "bias", "device", "grad")


def key_of(call: SlstmCall) -> Key:
    """The shape key of a call over sequences (KEY_FIELDS).

    Without batch and tokens: no measured row can make a sequence's bits depend on the batch around it, or on where the
    caller divides it.
    """
    return (
        call.heads,
        call.head_dim,
        dtype_name(call.x),
        call.forget_gate,
        call.bias is not None,
        call.form,
        call.resets is not None,
        call.h_initial is not None,
        call.return_last_states,
        call.x.device.type,
        needs_grad(*call.floats),
    )


def step_key_of(call: SlstmStepCall) -> Key:
    """The shape key of a step (STEP_KEY_FIELDS); without the batch, as `key_of`."""
    return (
        call.heads,
        call.head_dim,
        dtype_name(call.x),
        call.forget_gate,
        call.bias is not None,
        call.x.device.type,
        needs_grad(*call.floats),
    )


def head_dim_and_dtype(fields: tuple[str, ...], key: Key) -> tuple[int, str]:
    """The head_dim and the dtype of a key."""
    return key[fields.index("head_dim")], key[fields.index("dtype")]

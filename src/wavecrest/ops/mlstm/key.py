"""Shape keys of the mLSTM ops: what the choice of a backend may depend on."""

from __future__ import annotations

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, name_of, needs_grad
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall

KEY_FIELDS = (
    "batch", "tokens", "heads", "dk", "dv", "dtype", "state", "form", "input_gate", "normalize", "capped", "resets",
    "initial", "last", "norm", "output_gate", "chunk", "invariant", "device", "grad",
)  # fmt: skip
# the fields that are sizes; tables list their rows by the first of them
KEY_SIZES = ("tokens", "batch")
STEP_KEY_FIELDS = (
    "heads", "dk", "dv", "dtype", "state", "new_state", "input_gate", "normalize", "capped", "norm", "output_gate",
    "in_place", "device", "grad",
)  # fmt: skip


def key_of(call: MlstmCall) -> Key:
    """The shape key of a call over sequences (KEY_FIELDS); `batch` is the number of its sequences.

    With `batch_invariant` the key leaves out what a sequence may have around it (`batch` and `tokens` 0, `form` "any"):
    no measured row can make its bits depend on that.
    """
    return (
        0 if call.batch_invariant else m_bucket(call.sequences),
        0 if call.batch_invariant else m_bucket(call.tokens),
        call.heads,
        call.dk,
        call.dv,
        dtype_name(call.q),
        name_of(call.c_dtype),
        "any" if call.batch_invariant else call.form,
        call.input_gate,
        call.normalize,
        call.capped,
        call.resets is not None,
        call.c_initial is not None,
        call.return_last_states,
        call.norm_weight is not None,
        call.output_gate is not None,
        call.chunk_size or 0,
        call.batch_invariant,
        call.q.device.type,
        needs_grad(*call.floats),
    )


def step_key_of(call: MlstmStepCall) -> Key:
    """The shape key of a step (STEP_KEY_FIELDS); without the batch, so that no row's bits can depend on it."""
    return (
        call.heads,
        call.dk,
        call.dv,
        dtype_name(call.q),
        dtype_name(call.c),
        name_of(call.c_dtype),
        call.input_gate,
        call.normalize,
        1 if call.gate_soft_cap > 0 else 0,
        call.norm_weight is not None,
        call.output_gate is not None,
        call.in_place,
        call.q.device.type,
        needs_grad(*call.floats),
    )


def head_dims(fields: tuple[str, ...], key: Key) -> tuple[int, int]:
    """DK and DV of a key."""
    return key[fields.index("dk")], key[fields.index("dv")]

"""The refusal that the kernels of both sLSTM ops share."""

from __future__ import annotations

import wavecrest.ops.common.checks as _checks
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.ops.slstm.call import SlstmCall, SlstmStepCall


def refuse(call: SlstmCall | SlstmStepCall) -> str | None:
    """The reason why wavecrest's kernels cannot run a call; None if they can."""
    return _checks.kernel_refusal(dtype_name(call.x), call.x.device.type, 1, needs_grad(*call.floats))

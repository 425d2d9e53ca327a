"""The mLSTM in PyTorch operations."""

from __future__ import annotations

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.ops.mlstm.backend import refuse as kernel_refuses
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.chunkwise.backend import op as _chunkwise
from wavecrest.ops.mlstm.reference import chunkwise
from wavecrest.ops.mlstm.sequence.backend import op as _sequence
from wavecrest.ops.mlstm.step.backend import op as _step


def refuse(call: MlstmCall) -> str | None:
    """Refuse `batch_invariant` where a kernel has it: PyTorch's GEMMs do not promise the same bits in any batch."""
    if not call.batch_invariant or call.q.device.type == "cpu" or kernel_refuses(call) is not None:
        return None
    return "its GEMMs may round otherwise in another batch, and batch_invariant asks for the same bits"


_chunkwise.attach("torch", chunkwise, refuse=refuse, priority=PRIORITY)
# the definition of the other two is made of PyTorch's operations, one token at a time
_sequence.attach("torch", _sequence.reference, refuse=refuse, priority=PRIORITY)
_step.attach("torch", _step.reference, priority=PRIORITY)

"""The mLSTM in PyTorch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch import registry
from wavecrest.ops.mlstm.call import Operands as MemorySequence
from wavecrest.ops.mlstm.reference import chunkwise


def _mlstm_chunkwise(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    return chunkwise(MemorySequence(*args, **kwargs))


def _mlstm_supports(name: str) -> Callable[..., str | None]:
    """What PyTorch's form of an mLSTM over sequences declines: the same bits in any batch, where a kernel has them."""

    def supports(*args: Any, **kwargs: Any) -> str | None:
        given = MemorySequence(*args, **kwargs)
        if not given.batch_invariant or given.q.device.type == "cpu":
            return None
        kernel = registry.get(name).backends["triton"].supports(*args, **kwargs)
        if kernel is not None:
            return None
        return "its products may round otherwise in another batch, and batch_invariant asks for the same bits"

    return supports


# the definition of the other two is made of PyTorch's operations, one token at a time
for _name, _run, _takes in (
    ("mlstm_chunkwise", _mlstm_chunkwise, _mlstm_supports("mlstm_chunkwise")),
    ("mlstm_sequence", registry.get("mlstm_sequence").reference, _mlstm_supports("mlstm_sequence")),
    ("mlstm_step", registry.get("mlstm_step").reference, None),
):
    registry.get(_name).attach("torch", _run, supports=_takes, priority=PRIORITY)

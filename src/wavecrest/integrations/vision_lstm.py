"""Vision-LSTM (ViL): the mLSTM cells of its layers, of both directions, by wavecrest's op, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.ops import mlstm_chunkwise

# what a cell has, by the names of package vision_lstm
PARTS = ("num_heads", "igate", "fgate", "outnorm")


class _Cell(nn.Module):
    """A cell of Vision-LSTM with its parameters: gates of q, k and v, the mLSTM, and a norm by head."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.num_heads = int(cell.num_heads)
        self.igate, self.fgate, self.outnorm = cell.igate, cell.fgate, cell.outnorm

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """h [B, S, width], of q, k and v [B, S, width]."""
        given = torch.cat((q, k, v), -1)
        i, f = self.igate(given).mT, self.fgate(given).mT
        q, k, v = (one.view(*one.shape[:2], self.num_heads, -1).transpose(1, 2) for one in (q, k, v))
        norm: Any = self.outnorm
        # 1 + the parameter
        weight = norm.weight_proxy
        if weight is None:
            weight = torch.ones(self.num_heads * v.shape[3], device=v.device)
        h: Tensor = mlstm_chunkwise(q, k, v, i, f, norm_weight=weight, norm_eps=norm.eps)
        y = h.transpose(1, 2).flatten(2)
        return y if norm.bias is None else y + norm.bias


def patch_vision_lstm(model: nn.Module) -> nn.Module:
    """Make the mLSTM of a Vision-LSTM model run on `wavecrest.ops.mlstm_chunkwise`, in place.

    The package computes it from all pairs of patches, in memory that grows with their square; the op goes by chunks.
    Layers that go from the last patch to the first turn their input and output around themselves: that stays, as these
    are half as wide as each of q, k, v and h. Parameters and state dict stay the same, and gradients work.

    Args:
        model: a `VisionLSTM` or `VisionLSTM2` of package vision_lstm, which projects copy into their own code, or a
            module with such layers: cells are known by their class, MatrixLSTMCell, and their parts.

    Returns:
        The model.

    Raises:
        InvalidArgument: the model has no such cell that is not patched already; nothing is changed then.
    """
    found = [
        (owner, name, part)
        for owner in model.modules()
        for name, part in owner.named_children()
        if any(kind.__name__ == "MatrixLSTMCell" for kind in type(part).__mro__)
        and all(hasattr(part, one) for one in PARTS)
    ]
    if not found:
        raise InvalidArgument(
            f"patch_vision_lstm takes a model of package vision_lstm that is not patched yet; {type(model).__name__} "
            f"has no MatrixLSTMCell with {', '.join(PARTS)}"
        )
    # one that two layers share stays shared
    made = {id(part): _Cell(part).train(part.training) for _, _, part in found}
    for owner, name, part in found:
        setattr(owner, name, made[id(part)])
    return model

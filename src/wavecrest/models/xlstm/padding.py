"""Where the tokens of padded rows are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument


class Padding(NamedTuple):
    """Where the tokens of each row are: int32 [B] each, the place of the first one, and how many there are."""

    starts: Tensor
    lengths: Tensor


def spans(mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """(starts, lengths) int64 [B] of a mask [B, S] with one run of tokens a row; None where all are tokens.

    Raises:
        InvalidArgument: the mask is not of the tokens' shape, or a row has a hole.
    """
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape or mask.is_floating_point():
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidArgument(
            f"xLSTM: attention_mask must be bool or integers {list(tokens.shape)} as the tokens are, got {found}"
        )
    kept = mask.to(tokens.device) != 0
    if kept.numel() == 0:
        return None
    starts, lengths = kept.byte().argmax(1), kept.sum(1)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    run = (places >= starts[:, None]) & (places < (starts + lengths)[:, None])
    if not torch.equal(run, kept):
        raise InvalidArgument(
            "xLSTM: a row of attention_mask has a hole; states are made token by token: leave the tokens out"
        )
    return None if bool(kept.all()) else (starts, lengths)

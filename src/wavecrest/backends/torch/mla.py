"""Multi-head latent attention by PyTorch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch import registry
from wavecrest.ops._mla_decode.call import Operands as Latent
from wavecrest.ops._mla_decode.reference import absorbed


def _mla(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    return absorbed(Latent(*args, **kwargs))


for _name in ("mla_decode", "mla_prefill"):
    registry.get(_name).attach("torch", _mla, priority=PRIORITY)

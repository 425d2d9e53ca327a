"""Who reads a tensor during a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Reads(TorchFunctionMode):
    """Counts, for tensors that are watched, the calls of PyTorch's functions that take them."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # attributes (shape, dtype) are no reads
        if getattr(func, "__name__", "") != "__get__":
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self.count:
                    self.count[id(leaf)] += 1
        return func(*args, **kwargs)

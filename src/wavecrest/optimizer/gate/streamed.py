"""A model in higher precision where no whole copy of it fits: weights are raised while their module runs.

What it takes beside the original is the largest module's weights, and the activations in higher precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# modules that read the weights of their children without calling them
READ_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def streamed(model: nn.Module, high: torch.dtype) -> nn.Module:
    """A copy that computes in `high` and shares its parameters with the model; buffers are its own, in `high`.

    A module whose weights another one reads raises an error of mixed dtypes when it is called.
    """
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    made = copy.deepcopy(model, shared)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(high)
        readers = list(module.modules()) if isinstance(module, READ_CHILDREN) else [module]
        places = [(one, name) for one in readers for name, value in one._parameters.items() if _is_float(value)]
        if places:
            raise_them, put_back = _around(places, high)
            module.register_forward_pre_hook(raise_them, prepend=True)
            # after an error too
            module.register_forward_hook(put_back, always_call=True)
    return made


def _is_float(value: Tensor | None) -> bool:
    return value is not None and value.is_floating_point()


def _around(places: list[tuple[nn.Module, str]], high: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks that raise parameters before a call and put back what was there behind it."""
    held: list[tuple[nn.Module, str, nn.Parameter]] = []

    def raise_them(*_: Any) -> None:
        for one, name in places:
            own = one._parameters[name]
            if own is not None and own.dtype != high:
                held.append((one, name, own))
                one._parameters[name] = nn.Parameter(own.detach().to(high), requires_grad=False)

    def put_back(*_: Any) -> None:
        while held:
            one, name, own = held.pop()
            one._parameters[name] = own

    return raise_them, put_back

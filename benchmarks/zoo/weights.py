"""Random weights that behave like trained ones: every part of the model changes the answer, and nothing overflows.

Fresh models have parts that do nothing (zero heads, layer scales of 1e-6, biases of zero, norms of one), so that a
wrong kernel in such a part would not show. And a deep network whose batch norms keep the statistics they are made with
grows by the square root of two a block, to infinity in float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.measure.workload import Workload

# spread of what was constant: a weight of zeros, and a bias or a norm around its value
WEIGHT, AROUND = 0.02, 0.1
# scales below this are those of layers that start as nothing
SCALE, LEAST_SCALE = 0.2, 0.01


@torch.no_grad()
def vary(model: nn.Module) -> None:
    """Replace parameters that are constant by random ones."""
    random = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            _vary(parameter, random)


def _vary(parameter: Tensor, random: torch.Generator) -> None:
    """Replace a parameter whose elements are all the same."""
    if parameter.numel() < 2:
        return
    first = parameter.reshape(-1)[0]
    if not bool((parameter == first).all()):
        return
    value = float(first)
    noise = torch.randn(parameter.shape, generator=random, device="cpu").to(parameter)
    if parameter.squeeze().ndim > 1:
        parameter.copy_(value + WEIGHT * noise)
    elif 0 < abs(value) < LEAST_SCALE:
        parameter.copy_(SCALE * (1 + AROUND * noise))
    else:
        parameter.copy_(value + AROUND * noise if value else WEIGHT * noise)


@torch.no_grad()
def fit_statistics(workload: Workload) -> None:
    """Set the running mean and variance of every norm that has them to those of its input, from one call.

    The model is in float32 still.
    """
    hooks = [
        module.register_forward_pre_hook(_measure)
        for module in workload.model.modules()
        if isinstance(getattr(module, "running_var", None), Tensor)
    ]
    if not hooks:
        return
    kept = dict(workload.buckets)
    try:
        # the inputs are in the dtype that the model will have
        workload.buckets = {name: _in_float32(inputs) for name, inputs in kept.items()}
        for bucket in workload.buckets:
            workload.run(bucket)
    finally:
        workload.buckets = kept
        for hook in hooks:
            hook.remove()


def _in_float32(inputs: Any) -> Any:
    made = inputs.clone()
    args = tuple(_wide(value) for value in made.args)
    return type(made)(args, {name: _wide(value) for name, value in made.kwargs.items()})


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _measure(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    x = args[0].float().transpose(0, 1).flatten(1)
    running: Any = module
    running.running_var.copy_(x.var(1))
    running.running_mean.copy_(x.mean(1))

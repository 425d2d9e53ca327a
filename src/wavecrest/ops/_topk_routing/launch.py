"""The router's launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._topk_routing.call import Routing, TopkRoutingCall
from wavecrest.ops._topk_routing.kernel import _topk_routing_kernel


def launch(call: TopkRoutingCall, weights: Tensor, ids: Tensor, config: Config) -> _launcher.Launch:
    """The kernel's launch for a call that has tokens."""
    bias, (stride_lt, stride_le) = call.bias, call.logits.stride()
    contiguous = stride_le == 1 or call.experts == 1
    align = _layout.alignment(call.experts, (stride_lt, 0, 0)) if contiguous else 1
    return _launcher.Launch(
        _topk_routing_kernel,
        (_layout.ceil_div(call.num_tokens, config["BLOCK_T"]),),
        (
            call.logits, call.logits if bias is None else bias, weights, ids, call.num_tokens, call.k,
            float(call.scale), call.topk_groups, stride_lt // align, stride_le, 0 if bias is None else bias.stride(0),
        ),
        {
            "ALIGN": align, "CONTIGUOUS": contiguous, "BIAS": bias is not None,
            "SOFTMAX": call.scores == "softmax", "RENORMALIZE": call.renormalize, "EXPERTS": call.experts,
            "GROUPS": call.num_groups, "BLOCK_E": _layout.power_of_two(call.experts),
            "BLOCK_K": _layout.power_of_two(call.k),
        },
        config,
    )  # fmt: skip


def launches(call: TopkRoutingCall, config: Config, arch: object) -> list[_launcher.Launch]:
    """The launches of a call, over results without memory."""
    if call.num_tokens == 0:
        return []
    weights = torch.empty((call.num_tokens, call.k), dtype=torch.float32, device="meta")
    return [launch(call, weights, weights.to(torch.int32), config)]


def bind(call: TopkRoutingCall, config: Config) -> Callable[[TopkRoutingCall], Routing]:
    """The function that launches the kernel for calls with the signature of this one."""
    device, shape, has_tokens = call.logits.device, (call.num_tokens, call.k), call.num_tokens > 0
    where = device if torch.compiler.is_compiling() else torch.device("meta")
    made = launch(
        call, torch.empty(shape, dtype=torch.float32, device=where),
        torch.empty(shape, dtype=torch.int32, device=where), config,
    )  # fmt: skip
    start = _launcher.starter(made, device)

    def run(call: TopkRoutingCall) -> Routing:
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        if has_tokens:
            start(call.logits, call.logits if call.bias is None else call.bias, weights, ids)
        return weights, ids

    return run

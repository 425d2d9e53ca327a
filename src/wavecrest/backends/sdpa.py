"""PyTorch's attention through a kernel of its choosing: flash, cuDNN, memory-efficient, or written out.

`scaled_dot_product_attention` picks one of them by rules of its own; which is fastest depends on the shape, so each is
a candidate of its own. The choice (`torch.nn.attention.sdpa_kernel`) is set for the length of a call. Whether a kernel
takes a call PyTorch itself is asked, as that differs between builds: on ROCm flash is AOTriton or Composable Kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import wavecrest.backends.torch.flash_attention as _torch
from wavecrest.dispatch.decision import Backend
from wavecrest.ops._flash_attention.backend import op as _op
from wavecrest.ops._flash_attention.call import FlashAttentionCall

# below PyTorch's own choice and the kernel: they run where a measured row or a pin names them
PRIORITY = 3
# backend: PyTorch's kernel, and what it is called
KERNELS = {
    "torch_flash": (SDPBackend.FLASH_ATTENTION, "flash attention"),
    "torch_cudnn": (SDPBackend.CUDNN_ATTENTION, "cuDNN's attention"),
    "torch_efficient": (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient attention"),
    "torch_math": (SDPBackend.MATH, "attention written out"),
}
# PyTorch's addition to a warning's text; the start of its first warning, and its text on kernels not asked for
_WHERE, _BESIDE = " (Triggered internally", ("used because:", "has been runtime disabled.")


def _native() -> Backend[FlashAttentionCall, Any]:
    return _op.backends["torch"]


Tensors = tuple[Tensor, Tensor, Tensor]


def _asked_on_a_gpu(kernel: SDPBackend, tensors: Tensors, mask: Tensor | None, **options: Any) -> bool:
    ask: Callable[..., bool] = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
    }[kernel]
    call = (*tensors, mask, 0.0, options.get("is_causal", False), options.get("enable_gqa", False))
    # without its reasons, which it writes to standard error
    return ask(torch.backends.cuda.SDPAParams(*call), False)


def _chosen(kernel: SDPBackend, tensors: Tensors, mask: Tensor | None, **options: Any) -> bool:
    q, k, v = tensors
    try:
        # with one kernel allowed PyTorch's choice is that kernel, or an error after warnings that say why
        return torch._fused_sdp_choice(q, k, v, mask, **options) == kernel.value
    except RuntimeError:
        return False


def _refused(name: str, call: FlashAttentionCall) -> str | None:
    """The reason why PyTorch's kernel does not take a call that PyTorch takes, in PyTorch's words."""
    kernel, words = KERNELS[name]
    if kernel == SDPBackend.MATH:
        return None
    if not call.q.is_cuda and kernel != SDPBackend.FLASH_ATTENTION:
        return f"asks for {words}, on a GPU"
    # fake tensors, as of `wavecrest explain`: PyTorch for CPUs would log an internal error and give no reason
    if call.q.is_cuda and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"asks for {words} on a GPU, of a PyTorch that is built for CPUs"
    # the mask of all pairs may be larger than all else, and the call may go to a kernel that needs none
    tensors, options = _torch.attention_call(call)
    mask = options.pop("attn_mask", None)
    ask = _asked_on_a_gpu if call.q.is_cuda else _chosen
    with warnings.catch_warnings(record=True) as said:
        # all of them, also those that were shown before
        warnings.simplefilter("always")
        with sdpa_kernel(kernel):
            if ask(kernel, tensors, mask, **options):
                return None
            if call.q.is_cuda:
                _chosen(kernel, tensors, mask, **options)
    reasons = [str(one.message).partition(_WHERE)[0].strip() for one in said]
    reasons = [reason for reason in dict.fromkeys(reasons) if not reason.endswith(_BESIDE)]
    return f"asks for {words}, which PyTorch refuses: {'; '.join(reasons) or 'it does not say why'}"


def _refuse(name: str, call: FlashAttentionCall) -> str | None:
    if torch.compiler.is_compiling():
        return "is asked of PyTorch with a call's own tensors, which torch.compile does not have"
    return _native().refuse(call) or _refused(name, call)


def _bind(name: str, call: FlashAttentionCall) -> Callable[[FlashAttentionCall], Tensor]:
    """The function that runs calls with the signature of this one by PyTorch's kernel of that name."""
    kernel, native = KERNELS[name][0], _torch.bind(call)

    def run(call: FlashAttentionCall) -> Tensor:
        try:
            with sdpa_kernel(kernel):
                return native(call)
        except RuntimeError:
            # a decision is for a bucket of lengths, and PyTorch's answer may differ inside one
            reason = _refused(name, call)
            if reason is None:
                raise
        warnings.warn(f"flash_attention: {name} {reason}; PyTorch's own choice runs in its place", stacklevel=2)
        return native(call)

    return run


def _run(name: str, call: FlashAttentionCall) -> Tensor:
    return _bind(name, call)(call)


def _opt_in(_call: FlashAttentionCall) -> str:
    return "runs where a measured row names it"


for _name in KERNELS:
    _op.attach(
        _name,
        partial(_run, _name),
        refuse=partial(_refuse, _name),
        opt_in=_opt_in,
        priority=PRIORITY,
        bind=partial(_bind, _name),
    )

"""The bandwidth kernel's arguments and launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._memcpy.call import UNIT_BYTES, WORD_BYTES, MemcpyCall, words_of
from wavecrest.ops._memcpy.kernel import _memcpy_kernel


def launch(call: MemcpyCall, words: Tensor, y: Tensor, config: Config) -> _launcher.Launch:
    """The kernel's launch: `words` are those of x, y those of the result or, of mode "read", the sum."""
    programs, count = call.programs, words.numel()
    tiles = (count + config["BLOCK"] - 1) // config["BLOCK"]
    return _launcher.Launch(
        _memcpy_kernel,
        (tiles if programs is None else programs,),
        (words, y, count // (UNIT_BYTES // WORD_BYTES), tiles, programs or 1, call.signed_value),
        {
            "READS": call.mode != "write",
            "WRITES": call.mode != "read",
            "LOOP": programs is not None,
            "EVEN": count % config["BLOCK"] == 0,
        },
        config,
    )


def bind(call: MemcpyCall, config: Config) -> Callable[[MemcpyCall], Tensor]:
    """The function that launches the kernel for calls with the signature of this one."""
    words = words_of(call.x)
    made = launch(call, words, words, config)
    start = _launcher.starter(made, call.x.device)
    has_elements, reads = call.x.numel() > 0, call.mode == "read"
    # the kernel sees no shape, so that one view does where rows are whole words; Dynamo does not trace the offset
    in_word = max(1, WORD_BYTES // call.x.element_size())
    one_view = call.x.ndim > 0 and call.x.shape[-1] % in_word == 0 and not torch.compiler.is_compiling()

    def run(call: MemcpyCall) -> Tensor:
        x = call.x
        # where x starts is not part of the signature: checked on each call
        is_whole = one_view and x.storage_offset() % in_word == 0
        words = x.view(torch.int32) if is_whole else words_of(x)
        if reads:
            total = torch.zeros((), dtype=torch.int64, device=x.device)
            if has_elements:
                start(words, total)
            return total
        y = torch.empty_like(x)
        if has_elements:
            start(words, y.view(torch.int32) if is_whole else words_of(y))
        return y

    return run

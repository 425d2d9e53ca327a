"""The dtypes that oneDNN multiplies on this CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has GEMMs of float32 or bfloat16 here.

    Those of bfloat16 need AVX-512 on x86: on an EPYC of the first generation they raise (torch 2.13, 2026-11-28).
    """
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32

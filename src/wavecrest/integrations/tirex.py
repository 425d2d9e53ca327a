"""TiRex and TiRex-2 (time series): the recurrence of their sLSTM and mLSTM layers by wavecrest's ops, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.ops import mlstm_chunkwise, slstm_sequence


class _Cell(nn.Module):
    """The sLSTM cell of TiRex, with its parameters: `_recurrent_kernel_` [NH, D, 4 · D], `_bias_` [NH · 4 · D]."""

    def __init__(self, cell: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config, self.dtype = cell.config, dtype
        self._recurrent_kernel_, self._bias_ = cell._recurrent_kernel_, cell._bias_

    def forward(self, input: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(h [B, NH, S, D], the last states [4, B, NH · D]), of gates [B, S, 4 · NH · D] and the states before."""
        r = self._recurrent_kernel_
        heads, dim = r.shape[:2]
        before = None if state is None else state.view(4, -1, heads, dim)
        x = input.view(*input.shape[:2], 4, heads, dim)
        h, last = _run(x, r.view(heads, dim, 4, dim), self._bias_.view(heads, 4, dim), before, self.dtype)
        return h.transpose(1, 2).to(input.dtype), torch.stack(last).flatten(2).to(input.dtype)


class _Recurrence:
    """The call of a layer of TiRex-2 that package flashrnn would run."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __call__(self, Wx: Tensor, R: Tensor, b: Tensor, config: Any, states: Tensor | None = None) -> Any:
        """(h [1, B, S, NH, D], the last states [4, B, 1, NH, D]).

        Of gates Wx [B, S, 4, NH, D], R [NH, D, 4, D] from the last h to each gate, b [NH, 4, D] and the states before.
        """
        before = None if states is None else states[:, :, 0]
        h, last = _run(Wx, R, b, before, self.dtype)
        return h[None].to(Wx.dtype), torch.stack(last)[:, :, None].to(Wx.dtype)


class _Memory(nn.Module):
    """The call of an mLSTM layer of TiRex-2 that package mlstm_kernels would run."""

    def __init__(self, eps: float, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.eps, self.dtype = eps, dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        """h [B, NH, S, DV] of q, k [B, NH, S, DK], v [B, NH, S, DV] and gates i, f [B, NH, S]."""
        dtype = q.dtype if self.dtype is None else self.dtype
        h: Tensor = mlstm_chunkwise(q.to(dtype), k.to(dtype), v.to(dtype), i, f, eps=self.eps)
        return h.to(q.dtype)


def _run(x: Tensor, r: Tensor, bias: Tensor, before: Tensor | None, dtype: torch.dtype | None) -> Any:
    """`slstm_sequence` of x [B, S, 4, NH, D], r [NH, D, 4, D], bias [NH, 4, D] and states h, c, n and m."""
    dtype = x.dtype if dtype is None else dtype
    h, c, n, m = (None,) * 4 if before is None else before.float().unbind(0)
    return slstm_sequence(
        x.to(dtype), r.permute(2, 0, 1, 3).to(dtype), bias.permute(1, 0, 2), h_initial=h, c_initial=c, n_initial=n,
        m_initial=m, return_last_states=True,
    )  # fmt: skip


def patch_tirex(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Make the layers of a TiRex or TiRex-2 model run on `wavecrest.ops`, in place.

    sLSTM layers run on `slstm_sequence`, mLSTM layers of TiRex-2 on `mlstm_chunkwise`. No compiler and no other package
    of kernels is needed then, on a CPU, an AMD or an NVIDIA GPU: neither nvcc nor package flashrnn. Parameters and
    state dict stay the same. States are float32 within a call, where TiRex rounds them to bfloat16 after each token, so
    that forecasts differ by that rounding.

    Args:
        model: a loaded model of package tirex-ts or tirex-2, or a module with such layers. For TiRex take the backend
            "torch", which loads nothing.
        dtype: of sLSTM gates and recurrent weights, of q, k and v; None: that of the layer's input. torch.bfloat16 is
            what TiRex computes in.

    Returns:
        The model.

    Raises:
        InvalidArgument: the model has no such layer that is not patched already, or the dtype is another; nothing is
            changed then.
    """
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise InvalidArgument(f"patch_tirex: dtype takes torch.float32, bfloat16, float16 or None, not {dtype}")
    found = list(model.modules())
    cells = [(part, part.slstm_cell) for part in found if _is(getattr(part, "slstm_cell", None), "tirex", "sLSTMCell")]
    layers = [part for part in found if _is(part, "tirex2", "_FlashRNNLayer") and "slstm_flashrnn" not in vars(part)]
    memories = [part for part in found if _is(part, "tirex2", "mLSTMLayer") and type(part.mlstm_backend) is not _Memory]
    if not cells and not layers and not memories:
        raise InvalidArgument(
            f"patch_tirex takes a model of package tirex-ts or tirex-2 that is not patched yet; {type(model).__name__} "
            "has no sLSTM or mLSTM layer of these packages"
        )
    for owner, cell in cells:
        owner.slstm_cell = _Cell(cell, dtype).train(owner.training)
    for layer in layers:
        layer.slstm_flashrnn = _Recurrence(dtype)  # type: ignore[assignment]
    for memory in memories:
        backend: Any = memory.mlstm_backend
        memory.mlstm_backend = _Memory(backend.config.eps, dtype).train(memory.training)
    return model


def _is(module: Any, package: str, name: str) -> bool:
    """True if a module is of a class of that name in a package."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(module).__mro__)

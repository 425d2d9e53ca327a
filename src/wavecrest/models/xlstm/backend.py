"""The official package's `mLSTMBackend`: the mLSTM cell behind one configuration, over the ops of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import kernels
from wavecrest.models.xlstm.config import DTYPES, MODES, stored_dtype
from wavecrest.models.xlstm.kernels import Kernels
from wavecrest.models.xlstm.layers import SEQUENCE_BELOW


@dataclass
class mLSTMBackendConfig:
    """Kernels and settings of an `mLSTMBackend`, under the official package's names.

    Attributes:
        chunkwise_kernel, sequence_kernel, step_kernel: "auto" for the dispatcher's choice by shape, or a name of the
            official package (`get_available_mlstm_kernels` and its siblings), which wins over that choice.
        mode: for calls without a mode: "train", "train_with_padding" or "inference"; any sequence length runs in each.
        chunk_size: kept for configurations that have it; kernels choose their own, and results do not depend on it.
        return_last_states: of calls that do not say; for mode "inference" see `mLSTMBackend.forward`.
        autocast_kernel_dtype: kept for configurations that have it; kernels run in their operands' dtype.
        eps: added to the normalizer.
        inference_state_dtype: of the state c: "float32" or "float16". With "bfloat16" it is float32, with a
            warning; n and m are float32 always (for float64 operands all are float64).
        normalize_siging: whether kernels with sigmoid input gates divide by their normalizer.

    Raises:
        InvalidArgument: a name is unknown (the message lists those there are), a number outside of what is taken, or
            states are asked of a kernel or mode that has none.
    """

    chunkwise_kernel: str = kernels.AUTO
    sequence_kernel: str = kernels.AUTO
    step_kernel: str = kernels.AUTO
    mode: str = "train"
    chunk_size: int = 64
    return_last_states: bool = True
    autocast_kernel_dtype: str = "bfloat16"
    eps: float = 1e-6
    inference_state_dtype: str = "float32"
    normalize_siging: bool = True

    def __post_init__(self) -> None:
        for kind in ("chunkwise", "sequence", "step"):
            kernels.check(kind, getattr(self, f"{kind}_kernel"))
        _check_mode(self.mode)
        for name in ("autocast_kernel_dtype", "inference_state_dtype"):
            if getattr(self, name) not in DTYPES:
                raise InvalidArgument(f"mLSTMBackend: {name} takes {', '.join(DTYPES)}, not {getattr(self, name)!r}")
        for name in ("return_last_states", "normalize_siging"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"mLSTMBackend: {name} must be True or False, got {getattr(self, name)!r}")
        if type(self.chunk_size) is not int or self.chunk_size < 1:
            raise InvalidArgument(f"mLSTMBackend: chunk_size must be a whole number above 0, got {self.chunk_size!r}")
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not self.eps >= 0:
            raise InvalidArgument(f"mLSTMBackend: eps must be a number from 0 on, got {self.eps!r}")
        if self.return_last_states:
            _check_states(self.chunkwise_kernel, self.mode)


def _check_mode(mode: Any) -> None:
    if mode not in MODES:
        raise InvalidArgument(f"mLSTMBackend: mode takes {', '.join(MODES)}, not {mode!r}")


def _check_states(kernel: str, mode: str) -> None:
    """Refuse to return states where kernel or mode has no states, as the official package does."""
    if not kernels.has_state(kernel):
        raise InvalidArgument(
            f"mLSTMBackend: {kernel} has no states; set return_last_states=False or take a chunkwise kernel"
        )
    if mode == "train_with_padding":
        raise InvalidArgument("mLSTMBackend: mode train_with_padding returns no states; set return_last_states=False")


class mLSTMBackend(nn.Module):
    """The mLSTM cell over sequences and single tokens, by the kernels that a configuration names."""

    def __init__(self, config: mLSTMBackendConfig) -> None:
        """Look up the kernels of a configuration; later changes to it are not seen."""
        super().__init__()
        self.config = config
        chunkwise = kernels.check("chunkwise", config.chunkwise_kernel)
        self._kernels = Kernels(
            chunkwise,
            kernels.check("sequence", config.sequence_kernel),
            kernels.check("step", config.step_kernel),
            None,
            stored_dtype(config.inference_state_dtype),
        )
        self._options: dict[str, Any] = {"eps": float(config.eps)}
        if chunkwise.input_gate == "sigmoid":
            self._options["normalize"] = config.normalize_siging

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Any:
        """The cell, by the formulas of `wavecrest.ops.mlstm_chunkwise`.

        Args:
            q, k: [B, NH, S, DK]; v: [B, NH, S, DV] of their dtype; any S, also one that is no multiple of a chunk.
            i, f: [B, NH, S], pre-activations of the gates, any float dtype.
            c_initial, n_initial, m_initial: the states before the first token, [B, NH, DK, DV], [B, NH, DK] and
                [B, NH, 1], all or none (sigmoid gates: no m); not changed.
            return_last_states, mode: None: those of the configuration. In mode "inference" one token runs the step
                kernel, up to 15 the sequence kernel, more the chunkwise kernel; in the others always the last.

        Returns:
            h [B, NH, S, DV]; with last states (h, (c, n, m)), for sigmoid gates (h, (c, n)). In mode "inference" the
            states are always there, whatever was asked for, as in the official package; but a kernel that has none
            gives h alone.

        Raises:
            InvalidArgument: a shape, dtype or mode is outside this, or states go with a kernel or mode without any.
        """
        asked = self.config.return_last_states if return_last_states is None else return_last_states
        mode = self.config.mode if mode is None else mode
        _check_mode(mode)
        if asked or c_initial is not None:
            _check_states(self.config.chunkwise_kernel, mode)
        initial: dict[str, Any] = {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
        tokens = q.shape[2] if isinstance(q, Tensor) and q.ndim == 4 else 0
        own = self._kernels
        asked = asked or (mode == "inference" and own.chunkwise_kernel.state)
        if mode == "inference" and tokens == 1 and own.chunkwise_kernel.state:
            result = self._step(q, k, v, i, f, initial)
        else:
            short = mode == "inference" and 1 < tokens < SEQUENCE_BELOW
            run = own.sequence if short else own.chunkwise
            result = run(q, k, v, i, f, **initial, return_last_states=asked, **self._options)
        return kernels.states_of(own.chunkwise_kernel, result, asked)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, initial: dict[str, Any]) -> kernels.Result:
        own = self._kernels
        if all(one is None for one in initial.values()):
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            kept = torch.float64 if q.dtype == torch.float64 else own.state_dtype
            initial = {
                "c_initial": q.new_zeros((*q.shape[:2], q.shape[3], v.shape[-1]), dtype=kept),
                "n_initial": q.new_zeros((*q.shape[:2], q.shape[3]), dtype=wide),
                "m_initial": q.new_zeros((*q.shape[:2], 1), dtype=wide)
                if own.chunkwise_kernel.input_gate == "exp"
                else None,
            }
        q, k, v = (one.squeeze(2) for one in (q, k, v))
        h, state = own.step(q, k, v, i, f, *initial.values(), state_dtype=own.state_dtype, **self._options)
        return h.unsqueeze(2), state

    def extra_repr(self) -> str:
        """The configuration."""
        return repr(self.config)

"""The states of all layers: made, checked, and held in place for decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import kernels
from wavecrest.models.xlstm.config import xLSTMLargeConfig
from wavecrest.models.xlstm.layers import LayerState

# block number: its (c, n, m), as in the official package
State = dict[int, LayerState]


def _shapes(config: xLSTMLargeConfig, batch: int) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of c, n and m; None for m where input gates are sigmoids."""
    heads, dk, dv = config.num_heads, config.qk_dim // config.num_heads, config.v_dim // config.num_heads
    exponential = kernels.check("chunkwise", config.chunkwise_kernel).input_gate == "exp"
    return (batch, heads, dk, dv), (batch, heads, dk), (batch, heads, 1) if exponential else None


def empty_state(config: xLSTMLargeConfig, batch: int, device: torch.device | str, dtype: torch.dtype) -> State:
    """The state before the first token, zeros: c of `dtype`; n and m of float32, or float64 where c is."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    c, n, m = _shapes(config, batch)
    assert c is not None and n is not None
    return {
        index: (
            torch.zeros(c, dtype=dtype, device=device),
            torch.zeros(n, dtype=wide, device=device),
            None if m is None else torch.zeros(m, dtype=wide, device=device),
        )
        for index in range(config.num_blocks)
    }


def check_state(state: State, config: xLSTMLargeConfig, batch: int) -> None:
    """Refuse a state that is not one of this model and batch.

    Raises:
        InvalidArgument: a block is missing, or a shape is another; the message says which.
    """
    if not isinstance(state, dict) or set(state) != set(range(config.num_blocks)):
        raise InvalidArgument(f"xLSTM: a state is a dict of the {config.num_blocks} blocks' (c, n, m)")
    wanted = _shapes(config, batch)
    for index, parts in state.items():
        if not isinstance(parts, tuple) or not all(part is None or isinstance(part, Tensor) for part in parts):
            raise InvalidArgument(f"xLSTM: the state of block {index} is no tuple (c, n, m) of tensors")
        found = tuple(None if part is None else tuple(part.shape) for part in parts)
        if found != wanted:
            raise InvalidArgument(f"xLSTM: the state of block {index} has shapes {found}, this call needs {wanted}")


def select_rows(state: State, rows: Tensor) -> State:
    """A new state of some rows of the batch, in the order of `rows` (int64 [B']); for beams."""
    return {index: each(parts, lambda part: part[rows]) for index, parts in state.items()}


def clone_state(state: State) -> State:
    """A copy in memory of its own."""
    return {index: each(parts, torch.clone) for index, parts in state.items()}


def each(parts: LayerState, change: Callable[[Tensor], Tensor]) -> LayerState:
    """The same change of every tensor of a block's state; blocks of a stack have four or five of them."""
    found: LayerState = tuple(None if part is None else change(part) for part in parts)  # type: ignore[assignment]
    return found


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Tensors made inside can be written to in every mode; those of `torch.inference_mode` only inside that mode."""
    # in this order, as the first turns gradients on
    with torch.inference_mode(False), torch.no_grad():
        yield


class StatePool:
    """States at fixed addresses, which decoding updates in place and a captured graph holds on to.

    `arrivals`: int32 [blocks, B, NH] of zeros, for the steps that update them.
    """

    @lasting()
    def __init__(self, state: State) -> None:
        """Take a copy of a state."""
        self.state = clone_state(state)
        c = state[0][0]
        self.arrivals = torch.zeros((len(state), *c.shape[:2]), dtype=torch.int32, device=c.device)

    @torch.no_grad()
    def load_row(self, row: int, state: State) -> None:
        """Copy a state of one row in, at a row of the batch."""
        for index, parts in self.state.items():
            for own, given in zip(parts, state[index], strict=True):
                if own is not None and given is not None:
                    own[row].copy_(given[0])

    @torch.no_grad()
    def reorder(self, rows: Tensor) -> None:
        """Make each row that of `rows` (int64 [B] on the CPU); only those that change are moved."""
        to = torch.nonzero(rows != torch.arange(rows.shape[0]))[:, 0]
        if to.numel() == 0:
            return
        device = self.state[0][0].device
        source, target = rows[to].to(device), to.to(device)
        for parts in self.state.values():
            for own in parts:
                if own is not None:
                    own.index_copy_(0, target, own.index_select(0, source))

    def load(self, state: State) -> None:
        """Copy another state of the same shapes in."""
        for index, parts in self.state.items():
            for own, given in zip(parts, state[index], strict=True):
                if own is not None and given is not None:
                    own.copy_(given)

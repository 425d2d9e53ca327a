"""Weights in 8 or 4 bits: which of a model are packed, and how."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.layers import fused_projections
from wavecrest.models.xlstm.network import xLSTMNetwork
from wavecrest.nn.quantized_linear import pack_native
from wavecrest.ops import PackedWeight

Network = TypeVar("Network", bound=xLSTMNetwork)

# int8 and fp8 have a scale a row, int4 one for 128 columns
FORMATS = ("int8", "fp8", "int4")
# weights that a decode step reads most of. Not the gates: 16 rows whose errors would grow with exp; norms are vectors
PACKED = frozenset(
    {
        "qkv_opreact", "q", "k", "v", "ogate_preact", "out_proj", "proj_up_gate_z", "proj_up_gate", "proj_up",
        "proj_down",
    }
)  # fmt: skip


def check_format(format: str) -> None:
    """Refuse what is no format.

    Raises:
        InvalidArgument: the message lists those there are.
    """
    if format not in FORMATS:
        raise InvalidArgument(f"xLSTM: quantize takes {', '.join(FORMATS)} or None, not {format!r}")


def takes(name: str, lm_head: bool = False) -> bool:
    """True if a parameter of this name is packed."""
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and (path.rpartition(".")[2] in PACKED or (lm_head and path == "lm_head"))


def packed(name: str, weight: Tensor, format: str) -> PackedWeight:
    """A weight [N, K] in a format; fp8 in the form that the GPU's matrix units have.

    Raises:
        InvalidArgument: it holds NaN or infinity.
    """
    try:
        return pack_native(weight, format)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from error


def put(model: nn.Module, name: str, value: Tensor) -> None:
    """Make a tensor, or another's parameter, a model's parameter; packed weights get no gradients."""
    path, _, leaf = name.rpartition(".")
    if not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=not isinstance(value, PackedWeight))
    setattr(model.get_submodule(path), leaf, value)


def quantize(model: Network, format: str = "int8", *, lm_head: bool = False) -> Network:
    """Pack the projections of a model in place (`wavecrest.ops.pack`): weight-only, activations keep their dtype.

    Gates, norms and the embedding stay as they are, so does `lm_head` unless it is asked for; a tied embedding keeps
    its own values then. For inference: packed weights have no gradients.

    Args:
        model: its weights are plain.
        format: "int8" or "fp8", one scale a row; "int4", one scale for 128 columns of a row.
        lm_head: the logits' weight too.

    Returns:
        The model.

    Raises:
        InvalidArgument: there is no such format, the model has none of the weights, one is packed already, or one holds
            NaN or infinity; nothing is changed then.
    """
    check_format(format)
    # by name, so that a tied lm_head is found beside the embedding
    chosen = {name: value for name, value in model.state_dict(keep_vars=True).items() if takes(name, lm_head)}
    if not chosen:
        raise InvalidArgument(f"xLSTM: quantize takes an xLSTMLarge; {type(model).__name__} has no weights to pack")
    for name, weight in chosen.items():
        if isinstance(weight, PackedWeight):
            raise InvalidArgument(f"xLSTM: {name} is {weight.format} already; load the model again to quantize it")
        if not bool(weight.detach().isfinite().all()):
            raise InvalidArgument(f"xLSTM: {name} holds NaN or infinity, which no scale can hold")
    for name, weight in chosen.items():
        put(model, name, packed(name, weight, format))
    for one in fused_projections(model):
        # gates behind plain projections would keep the memory of both
        one.lay_out()
    return model

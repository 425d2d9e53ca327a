"""Stacks of transformers' encoder layers over the tokens of a padded batch alone.

The stack's own forward runs on one sequence [1, T, E] of all tokens, with `Rows` in place of the mask; attention, which
`attend_rows` runs, stays within each sequence. Everything else in such a layer works on single rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from wavecrest.errors import StepRefused, Unsupported
from wavecrest.nn.derived import derive
from wavecrest.nn.encoder_layer import Rows
from wavecrest.nn.hooks import plain

# the arguments of a stack: [B, S, E], a mask, and positions [B or 1, S]
HIDDEN, MASK, POSITIONS = "hidden_states", "attention_mask", "position_ids"
# what a caller may ask for that layers compute, [B, S, ...] each
ASKED = ("output_hidden_states", "output_attentions")
# arguments of attention that say more of the scores than q, k and the scale
MORE = ("position_bias", "softcap", "s_aux", "sliding_window")
# the masks whose padding is left out: all, or those with the padding at the right
Masks = Literal["any", "right"]


class Tokens(NamedTuple):
    """The tokens of a padded batch, one behind the other: their sequences, and the place of each in [B · S]."""

    rows: Rows
    places: Tensor

    @classmethod
    def of(cls, shown: Tensor, sizes: list[int]) -> Tokens:
        """The tokens of a mask [B, S], True for a token; `sizes` are those of its sequences. Nothing waits."""
        count = sum(sizes)
        # as the count is known; nonzero would wait. Padding is written to a place of its own
        order = torch.where(shown, shown.flatten().cumsum(0).view(shown.shape) - 1, count)
        places = order.new_empty(count + 1)
        places[order.flatten()] = torch.arange(shown.numel(), device=shown.device)
        starts = F.pad(shown.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        return cls(Rows(sizes, starts), places[:count])

    def pack(self, x: Tensor) -> Tensor:
        """The rows of the tokens: [B, S, ...] to [1, T, ...]."""
        return x.flatten(0, 1)[self.places][None]

    def unpack(self, x: Tensor, batch: int, length: int) -> Tensor:
        """[1, T, ...] to [B, S, ...], zeros in padded rows."""
        made = x.new_zeros(batch * length, *x.shape[2:])
        return made.index_copy_(0, self.places, x[0]).view(batch, length, *x.shape[2:])


class Unpadded(nn.Module):
    """Mixed into the class of a stack by `adopt`: padded rows are not computed, and zeros are in their places.

    They are computed, as the stack's own class does, where values cannot be read (compiling, exporting, capturing), for
    what `computes_padding` names, and where `sizes_of` gives nothing. On a GPU each call with a mask waits once, for
    the number of tokens: the sizes of all that follows depend on it.
    """

    unpadded_masks: Masks
    unpadded_config: Any
    unpadded_signature: inspect.Signature

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the stack's; padding is seen in an `attention_mask` [B, 1, 1, S] of bool."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return super().forward(*args, **kwargs)
        given = arguments(self.unpadded_signature, args, kwargs)
        shown = shown_of(given)
        if shown is None or self.computes_padding(given):
            return super().forward(*args, **kwargs)
        sizes = sizes_of(shown, self.unpadded_masks)
        if not sizes:
            return super().forward(*args, **kwargs)
        if sum(sizes) == shown.numel():
            # no mask, as transformers itself does
            return super().forward(**{**given, MASK: None})
        tokens = Tokens.of(shown, sizes)
        changed = {HIDDEN: tokens.pack(given[HIDDEN]), MASK: tokens.rows}
        if given.get(POSITIONS) is not None:
            changed[POSITIONS] = tokens.pack(given[POSITIONS].expand(shown.shape))
        made = super().forward(**{**given, **changed})
        return pytree.tree_map_only(Tensor, lambda x: tokens.unpack(x, *shown.shape), made)

    def computes_padding(self, given: Mapping[str, Any]) -> str:
        """Why a call with these arguments computes padded rows; empty if it does not."""
        hidden: Tensor = given[HIDDEN]
        if self.training:
            return "it is in training"
        if _is_capturing(hidden):
            return "a graph is captured, and the number of tokens is a value"
        if torch.is_grad_enabled() and (hidden.requires_grad or any(one.requires_grad for one in self.parameters())):
            return "gradients are needed"
        asked = [name for name in ASKED if given.get(name, getattr(self.unpadded_config, name, False))]
        if asked:
            return f"the caller asks for {' and '.join(asked)}"
        plain = (type(None), bool, int, float, str)
        rest = [name for name, value in given.items() if not isinstance(value, plain)]
        others = ", ".join(name for name in rest if name not in (HIDDEN, MASK, POSITIONS))
        return f"{others} may hold rows of the batch" if others else ""


def arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; `signature` is without self."""
    given = signature.bind(*args, **kwargs).arguments
    rest = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
    more = given.pop(rest, {})
    return {**given, **more}


def shown_of(given: Mapping[str, Any]) -> Tensor | None:
    """The tokens [B, S] under a mask [B, 1, 1, S] of bool; None where the mask is another, or the batch is empty."""
    hidden, mask = given.get(HIDDEN), given.get(MASK)
    if not isinstance(hidden, Tensor) or not isinstance(mask, Tensor) or hidden.dim() != 3 or hidden.numel() == 0:
        return None
    batch, length, _ = hidden.shape
    if mask.dtype != torch.bool or mask.shape != (batch, 1, 1, length):
        return None
    return mask[:, 0, 0]


def sizes_of(shown: Tensor, masks: Masks) -> list[int]:
    """How many tokens each sequence of a mask [B, S] has; none where `masks` excludes it, or a sequence has no token.

    It waits for the device, once.
    """
    gaps = (shown[:, 1:] > shown[:, :-1]).sum()
    *sizes, wrong = torch.cat((shown.sum(1), gaps[None])).tolist()
    return [] if not all(sizes) or (masks == "right" and wrong) else sizes


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float | None, given: Mapping[str, Any]
) -> Tensor:
    """Attention of one sequence [1, H, T, D] of packed rows, within each of its parts, as [1, T, H, D].

    Args:
        query, key, value: k and v may have fewer heads.
        rows: the parts.
        scaling: of the scores; None: 1 / √D.
        given: the other arguments of transformers' interface.

    Raises:
        Unsupported: one of them changes the scores, or the tensors are not those of the rows.
    """
    more = [name for name in MORE if given.get(name) is not None]
    if more or given.get("dropout"):
        raise Unsupported(f"attention of packed rows takes no {', '.join(more) or 'dropout'}")
    count = sum(rows.sizes)
    if any(one.dim() != 4 or one.shape[0] != 1 or one.shape[2] != count for one in (query, key, value)):
        raise Unsupported(f"attention of {count} packed rows got q {list(query.shape)} and k {list(key.shape)}")
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    return rows.attend(q, k, v, scaling)[None]


def stack_refusal(module: nn.Module) -> str:
    """Why a module is no stack of layers that can be adopted; empty if it may be one, which its answers must show."""
    names = signature_of(type(module)).parameters
    if HIDDEN not in names or MASK not in names:
        return f"its forward has no {HIDDEN} and {MASK}"
    if not any(isinstance(child, nn.ModuleList) and len(child) for child in module.children()):
        return "it has no list of layers"
    if any(getattr(part, "chunk_size_feed_forward", 0) for part in module.modules()):
        return (
            "its feed-forward runs in chunks (chunk_size_feed_forward), which the number of tokens must be divided by"
        )
    if not plain(module, type(module)) or any(
        part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    ):
        return "it, or a part of it, has hooks or a forward of its own"
    return ""


def adopt(module: nn.Module, masks: Masks, config: Any) -> None:
    """Turn a stack of layers into one that leaves padding out, in place.

    Args:
        module: `stack_refusal` has nothing against it.
        masks: that are taken; others are computed with their padding.
        config: of the transformers model that it belongs to, which says whether layers' outputs are asked for.

    Raises:
        StepRefused: with the reason of `stack_refusal`.
    """
    if reason := stack_refusal(module):
        raise StepRefused(f"{type(module).__name__}: {reason}")
    derive(module, _unpadded)
    made = cast(Unpadded, module)
    made.unpadded_masks, made.unpadded_config = masks, config


def _unpadded(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (Unpadded, kind), {"unpadded_signature": signature_of(kind)})


def signature_of(kind: type[nn.Module]) -> inspect.Signature:
    """The arguments of a class's forward, without self."""
    found = inspect.signature(kind.forward)
    return found.replace(parameters=list(found.parameters.values())[1:])

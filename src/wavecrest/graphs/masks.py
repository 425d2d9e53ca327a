"""Attention masks of transformers models under tracing: none where the eager model needs none.

In eager, transformers reads the padding mask and passes no mask to scaled_dot_product_attention where nothing is
padded. A traced or captured model cannot read values, and before torch 2.14 it cannot even see that there is no padding
mask (`torch.compiler.is_exporting()` is a constant True inside Dynamo), so it writes out a dense mask [B, 1, Sq, Sk].
SDPA then leaves its flash kernel. So it does for a prompt without a cache, as sequences that are packed into one row
show in the values of positions alone.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from wavecrest.errors import StepRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from wavecrest.measure.workload import Inputs

# transformers' names: the implementation that this file replaces, and the one it registers
SDPA, NAME = "sdpa", "wavecrest_sdpa"
# where a forward sets its positions
_POSITIONS = re.compile(r"^ *position_ids = (.*)$", re.MULTILINE)
# whether the forward under way counts its positions itself, so that no sequence starts anew in a row
_counted = False
# transformers' own search for sequences that are packed into one row
_search: Callable[[Any], Any] | None = None
# the argument of transformers models that marks padding: [B, S], 1 for a token, 0 for padding
ARGUMENT = "attention_mask"


class Registered:
    """An attention implementation that is known to transformers; an attribute of the models that use it.

    A model names its implementation and does not hold it: pickle, which makes this again, registers it again.
    """

    def __init__(self, register: Callable[[], None]) -> None:
        """Register it by a function that pickle finds by its name."""
        register()
        self.register = register

    def __reduce__(self) -> tuple[type[Registered], tuple[Callable[[], None]]]:
        return Registered, (self.register,)


def register() -> None:
    """Make "wavecrest_sdpa", `attend` with `mask`, known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    global _search
    if _search is None and hasattr(masking_utils, "find_packed_sequence_indices"):
        _search = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = packed_sequences


def packed_sequences(position_ids: Tensor) -> Tensor | None:
    """transformers' `find_packed_sequence_indices`: which sequence of its row a token belongs to, None if all are one.

    It reads the positions, and a traced model cannot: without this it always gets a mask that is written out, with
    which attention of a GPT-2 took 1.35 ms under a graph in place of 0.56 (8 x 1,024 tokens, H200, 2026-11-27).
    """
    assert _search is not None
    return None if _counted else _search(position_ids)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _counted
    # positions given by place are the third argument; calls with more than tokens by place are left alone
    _counted = kwargs.get("position_ids") is None and len(args) <= 1


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    global _counted
    _counted = False


def _counts_positions(module: nn.Module) -> bool:
    """Whether a forward makes the positions that it is not given by counting, and in no other way."""
    try:
        made = _POSITIONS.findall(inspect.getsource(type(module).forward))
    except (OSError, TypeError):
        return False
    counts = ["torch.arange(" in line for line in made]
    return any(counts) and all(
        counted or line.startswith("position_ids.") for counted, line in zip(counts, made, strict=True)
    )


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """transformers' SDPA attention; a `position_bias` [1, H, Sq, Sk] is laid out as fused kernels take it.

    T5 looks its bias up as [Sq, Sk, H] and permutes it: the stride of the keys is H, every fused kernel refuses that,
    and SDPA takes the math path (a T5 encoder, torch 2.11, H200, 2026-11-27).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    bias = kwargs.get("position_bias")
    if bias is not None and bias.stride(-1) != 1:
        kwargs["position_bias"] = bias.contiguous()
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def mask(**given: Any) -> Tensor | None:
    """The mask of one forward for SDPA (transformers' `AttentionMaskInterface`), bool, True for a key that is seen.

    None where queries see all keys, or the keys up to their own. One row [B, 1, 1, Sk] where only padding is hidden
    and its values cannot be read. Everything else is transformers' own mask.
    """
    from transformers.masking_utils import bidirectional_mask_function, prepare_padding_mask, sdpa_mask

    # versions before 5.4 describe queries by a tensor of positions
    if "q_length" not in given:
        return _own(sdpa_mask, given)
    queries, keys, first = given["q_length"], given["kv_length"], given.get("kv_offset", 0)
    local = given.get("local_size")
    padding: Tensor | None = prepare_padding_mask(given.get("attention_mask"), keys, first)
    if given.get("mask_function") is bidirectional_mask_function and given.get("allow_is_bidirectional_skip"):
        if local is not None and keys >= local:
            return _own(sdpa_mask, given)
        if padding is None:
            return None
        if is_tracing(padding):
            return padding[:, first : first + keys].bool()[:, None, None, :]
    elif (
        padding is None
        and given.get("allow_is_causal_skip", True)
        and isinstance(given.get("q_offset", 0), int)
        and (local is None or keys < local)
        and queries in (1, keys)
    ):
        return None
    return _own(sdpa_mask, given)


def _own(sdpa_mask: Any, given: dict[str, Any]) -> Tensor | None:
    made: Tensor | None = sdpa_mask(**given)
    return made


def is_tracing(tensor: Tensor) -> bool:
    """True where the values of a tensor cannot be read: compiling, exporting, capturing."""
    from transformers.utils import import_utils

    return bool(import_utils.is_tracing(tensor))


def owners(model: nn.Module) -> list[str]:
    """Paths of the outermost transformers models inside that use SDPA throughout (the empty path: the model itself)."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(owner == "" or path.startswith(f"{owner}.") for owner in found)
        if not inside and hasattr(module, "set_attn_implementation") and _implementations(module) == {SDPA}:
            found.append(path)
    return found


def _implementations(module: nn.Module) -> set[str | None]:
    configs = [getattr(part, "config", None) for part in module.modules() if hasattr(part, "set_attn_implementation")]
    return {getattr(config, "_attn_implementation", None) for config in configs}


def use(model: nn.Module, paths: Sequence[str]) -> None:
    """Let the transformers models at `paths` use `mask`, where their implementation is SDPA still; changes in place.

    Raises:
        StepRefused: the implementation of one of them cannot be set.
    """
    if paths:
        # not for other models: it imports transformers, in each process of a proof
        register()
    for path in paths:
        module: Any = model.get_submodule(path)
        for part in module.modules():
            if _counts_positions(part) and _enter not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(_enter, with_kwargs=True)
                # behind a forward that raised, too
                part.register_forward_hook(_leave, always_call=True)
        # a step that was kept since has set an implementation of its own, which uses such masks as well
        if _implementations(module) != {SDPA}:
            continue
        set_implementation(module, NAME, register)


def set_implementation(module: nn.Module, name: str, register: Callable[[], None] | None = None) -> None:
    """Set the attention implementation of a transformers model and of all models inside it, in place.

    Args:
        module: a transformers model.
        name: of the implementation.
        register: makes it known to transformers; None for those that transformers knows.

    Raises:
        StepRefused: that of one of them cannot be set.
    """
    if register is not None:
        module.wavecrest_attention = Registered(register)  # type: ignore[assignment]
    outermost: Any = module
    outermost.set_attn_implementation(name)
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "set_attn_implementation")]
    for part in parts:
        # the outer model sets those inside, but transformers 5.17 leaves the stacks of a T5 as they were
        if part.config._attn_implementation != name:
            part.set_attn_implementation(name)
    # it warns, and leaves what it cannot set
    left = {type(part).__name__ for part in parts if part.config._attn_implementation != name}
    if left:
        raise StepRefused(f"the attention implementation of {', '.join(sorted(left))} cannot be set")


class Padding(NamedTuple):
    """Where a model takes its padding mask: the name of the argument, and its position in a call without names."""

    name: str
    position: int


def padding_argument(model: nn.Module) -> Padding | None:
    """The padding mask of a transformers model; None if it takes none."""
    if not hasattr(model, "set_attn_implementation"):
        return None
    names = list(inspect.signature(model.forward).parameters)
    return Padding(ARGUMENT, names.index(ARGUMENT)) if ARGUMENT in names else None


def is_given(padding: Padding, inputs: Sequence[Inputs]) -> bool:
    """Whether some example passes a padding mask [B, S]."""
    return any(_is_mask(_get(example.args, example.kwargs, padding)) for example in inputs)


def without_full_mask(
    args: tuple[Any, ...], kwargs: dict[str, Any], padding: Padding
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with None for a padding mask that hides nothing.

    It waits for the device, as transformers' own look at the mask does in eager. Where values cannot be read, the
    arguments stay as they are.
    """
    value = _get(args, kwargs, padding)
    if not _is_mask(value) or is_tracing(value) or not bool(value.all()):
        return args, kwargs
    if padding.name in kwargs:
        return args, {**kwargs, padding.name: None}
    return (*args[: padding.position], None, *args[padding.position + 1 :]), kwargs


def _get(args: tuple[Any, ...], kwargs: Mapping[str, Any], padding: Padding) -> Any:
    return args[padding.position] if padding.position < len(args) else kwargs.get(padding.name)


def _is_mask(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()

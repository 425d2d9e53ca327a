"""Padded batches of transformers' encoders: the layers compute the tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from wavecrest.errors import StepRefused
from wavecrest.graphs import masks as graph_masks
from wavecrest.measure import numerics
from wavecrest.optimizer.steps.attention import _attention_owners
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.params import UnpaddedStacks
from wavecrest.optimizer.steps.replace_attention import set_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wavecrest.measure.workload import Inputs
    from wavecrest.nn.unpadded import Masks

# the implementation's name in transformers
NAME = "wavecrest_unpadded"
# on a GPU, by guess: one wait for the lengths, and about ten small launches to pack and unpack
PACKING_MS = 0.1
# another number in padded rows, beside the largest of the tokens' rows: a maximum over all rows must see it
FILL = 4.0
# tokens of masks that are tried, of all places
SHOWN = 0.7


@dataclass(slots=True)
class _Run:
    """One call: what the model answered, and of each stack by path its mask [B, S] or None, why it computes padding
    (empty if it does not), and its tensors.
    """

    answer: Any = None
    shown: dict[str, Tensor | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    made: dict[str, list[Tensor]] = field(default_factory=dict)


class Unpad(Step):
    """Stacks of encoder layers run on the tokens of a padded batch, and attention within each sequence.

    Zeros are in the place of padded rows, so that the step is for models whose answers hold none of them: a head over
    the first token, a masked mean. What a module computes decides, not its class: `find` runs the model's own calls
    with other masks, and compares.

    The number of tokens is a value on the device, and the size of all work after it: each call with padding waits for
    the device once (transformers' own look at the mask, which waits as well, is left out for it). Hence no compilation
    and no capture: these steps and this one exclude each other, and the faster is kept.
    """

    id = "unpad"
    title = "padded rows left out"
    level = 4
    group = "attention implementation"
    params_type = UnpaddedStacks
    eager_only = True

    def find(self, context: StepContext) -> Found:
        """The stacks that give tokens the same rows without padding, where the answers hold no padded rows.

        Raises:
            StepRefused: they hold them, or a model's attention cannot be switched.
        """
        from wavecrest.nn.unpadded import stack_refusal

        assert context.model is not None
        owners = _attention_owners(context.model)
        if not owners:
            return Found((), note="not a transformers model: no attention interface to switch")
        reasons = {path: stack_refusal(module) for path, module in _stacks(context.model, owners)}
        stacks = [path for path, reason in reasons.items() if not reason]
        told = "; ".join(f"{path}: {reason}" for path, reason in reasons.items() if reason)
        if not stacks:
            return Found((), note=told or "no stack of layers that takes hidden states and a mask")
        owners = tuple(path for path in owners if any(_inside(stack, path) for stack in stacks))
        padded = set_attention(structural_copy(context.model), owners, NAME, register)
        buckets = context.workload.buckets
        masks = {name: _shown(_call(padded, stacks, inputs)) for name, inputs in buckets.items()}
        given = {name: shown for name, shown in masks.items() if shown is not None and not bool(shown.all())}
        if not given:
            none = "no example has padding, so there is nothing to leave out"
            if all(shown is None for shown in masks.values()):
                none = f"{', '.join(stacks)}: no padding mask of transformers' own reaches the layers"
            return Found((), note=none)
        trial = _Trial(context.model, padded, owners, buckets[name := _smallest(given)], given[name])
        able = [path for path in stacks if not reasons.update({path: trial.refusal(path)}) and not reasons[path]]
        told = "; ".join(f"{path}: {reason}" for path, reason in reasons.items() if reason)
        if not able:
            return Found((), note=told)
        kind = trial.masks(able)
        shares = [_padding(masks[bucket], kind) for bucket in buckets]
        saved = sum(shares) / len(shares)
        if not saved:
            raise StepRefused(
                "padded rows are part of the outputs where padding is not at the right, as in the examples: pad at "
                "the right, or optimize a module that returns nothing of padded rows"
            )
        note = ", ".join(f"{share:.0%} of {bucket}" for bucket, share in zip(buckets, shares, strict=True))
        note = f"padding: {note}" + (f"; left out: {told}" if told else "")
        return Found(tuple(able), {"sites": able, "owners": list(owners), "masks": kind}, note, saved=saved)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The padded share of what works on rows; on a GPU less the wait and the copies."""
        rows = context.share("gemm", "attention", "normalisation", "elementwise", "memory")
        saved, basis = (found.saved or 0.0) * rows, f"{found.note}; work on rows is {rows:.0%} of the time"
        if context.device.kind != "cpu" and context.profile:
            cost = sum(min(1.0, PACKING_MS / max(bucket.wall_ms, PACKING_MS)) for bucket in context.profile)
            saved, basis = saved - cost / len(context.profile), f"{basis}, less {PACKING_MS} ms a call to pack"
        return Prediction.of_saved(saved, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Set the attention implementation on private copies of configurations, and change the class of each stack."""
        set_attention(model, params["owners"], NAME, register)
        return _adopt(model, params["sites"], params["masks"])


class _Trial:
    """The model's own calls with other masks: what stacks and answers are where padding is left out.

    Args:
        model: as it is.
        padded: the same with the attention implementation set, which computes padding.
        owners: its transformers models.
        inputs: one example with padding.
        shown: its mask [B, S].
    """

    def __init__(
        self, model: nn.Module, padded: nn.Module, owners: tuple[str, ...], inputs: Inputs, shown: Tensor
    ) -> None:
        self.model, self.padded, self.owners = model, padded, owners
        self.inputs = inputs.clone()
        self.mask = _mask_of(self.inputs, shown)
        self.any, self.right = _scattered(shown), _at_right(shown)

    def refusal(self, path: str) -> str:
        """Why a stack does not give tokens the rows that it gives them beside padding; empty if it does."""
        import torch

        expected = self._call(self.padded, [path], self.any)
        try:
            found = self._call(self._unpadded([path], "any"), [path], self.any)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            return f"its layers do not run on packed rows ({type(error).__name__}: {first})"
        if found.reasons[path]:
            return found.reasons[path]
        shown = expected.shown[path]
        if shown is None or not torch.equal(shown, self.any):
            return f"its mask is not the model's input {graph_masks.ARGUMENT}"
        pairs = list(zip(found.made[path], expected.made[path], strict=True))
        if not pairs or any(one.shape != two.shape or one.shape[:2] != shown.shape for one, two in pairs):
            return "its outputs are not rows of the batch"
        for one, two in pairs:
            limits = numerics.tolerance("model", str(one.dtype).removeprefix("torch."))
            if not numerics.compare(one[shown], two[shown]).within(limits):
                return "its layers mix rows by more than attention, or count positions"
        return ""

    def masks(self, stacks: list[str]) -> Masks:
        """The masks under which the answers hold nothing of padded rows.

        Raises:
            StepRefused: under none.
        """
        held: list[str] = []
        kinds: tuple[Masks, ...] = ("any", "right")
        for kind in kinds:
            made, shown = self._unpadded(stacks, kind), self.any if kind == "any" else self.right
            zeros, filled = (self._call(made, stacks, shown, fill) for fill in (0.0, FILL))
            held = _differing(zeros.answer, filled.answer)
            if not held:
                return kind
        raise StepRefused(
            f"padded rows are part of the outputs: {', '.join(held[:3])}. Left out, they would be zeros; optimize a "
            "module that returns what is read of the rows (a head, pooling over the mask), not the rows"
        )

    def _unpadded(self, stacks: list[str], masks: Masks) -> nn.Module:
        return _adopt(set_attention(structural_copy(self.model), self.owners, NAME, register), stacks, masks)

    def _call(self, model: nn.Module, stacks: list[str], shown: Tensor, fill: float = 0.0) -> _Run:
        self.mask.copy_(shown)
        return _call(model, stacks, self.inputs, fill)


def _stacks(model: nn.Module, owners: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules inside of transformers models whose forward takes hidden states, and that hold a list."""
    from torch import nn

    found: list[str] = []
    for path, module in model.named_modules():
        lists = any(isinstance(child, nn.ModuleList) and len(child) for child in module.children())
        inside = any(_inside(path, owner) for owner in owners) and not any(_inside(path, one) for one in found)
        if inside and lists and _takes_rows(module):
            found.append(path)
            yield path, module


def _takes_rows(module: nn.Module) -> bool:
    import inspect

    from wavecrest.nn.unpadded import HIDDEN

    return HIDDEN in inspect.signature(type(module).forward).parameters


def _inside(path: str, owner: str) -> bool:
    return owner in ("", path) or path.startswith(f"{owner}.")


def _adopt(model: nn.Module, stacks: list[str], masks: Literal["any", "right"]) -> nn.Module:
    from wavecrest.nn.unpadded import adopt

    for path in stacks:
        adopt(model.get_submodule(path), masks, _config_above(model, path))
    return model


def _config_above(model: nn.Module, path: str) -> Any:
    """The configuration of the innermost transformers model around a module."""
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if hasattr(module, "set_attn_implementation"):
            return module.config
    return None


def _call(model: nn.Module, stacks: list[str], inputs: Inputs, fill: float = 0.0) -> _Run:
    """A call on copies of the inputs; with `fill`, padded rows that stacks give are overwritten by large numbers."""
    import torch

    run = _Run()
    with torch.no_grad(), _watching(model, stacks, run, fill):
        run.answer = inputs.clone().call(model)
    return run


@contextmanager
def _watching(model: nn.Module, stacks: list[str], run: _Run, fill: float) -> Iterator[None]:
    from torch import Tensor
    from torch.utils import _pytree as pytree

    from wavecrest.nn.unpadded import Unpadded, arguments, shown_of, signature_of

    def hook(path: str) -> Callable[..., Any]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            signature = module.unpadded_signature if isinstance(module, Unpadded) else signature_of(type(module))
            given = arguments(signature, args, kwargs)
            run.shown[path] = mask = shown_of(given)
            run.reasons[path] = module.computes_padding(given) if isinstance(module, Unpadded) else ""
            tensors = [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor)]
            run.made[path] = [one.detach().clone() for one in tensors]
            if not fill or mask is None:
                return None
            return pytree.tree_map_only(Tensor, lambda x: _filled(x, mask, fill), output)

        return see

    handles = [model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in stacks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _filled(x: Tensor, shown: Tensor, fill: float) -> Tensor:
    """Padded rows as numbers beyond those of the tokens, above and below in turn: maxima and minima see them."""
    import torch

    size = fill * float(x[shown].abs().max()) + 1.0
    signs = torch.ones_like(x[~shown])
    signs[:, ::2] = -1
    made = x.clone()
    made[~shown] = size * signs
    return made


def _differing(one: Any, two: Any) -> list[str]:
    """Paths of what differs by more than rounding between two answers."""
    from wavecrest.optimizer.gate.leaves import collect

    first, second = (dict(collect(value, strict=False).numeric()) for value in (one, two))
    found = []
    for path, tensor in first.items():
        limits = numerics.tolerance("model", str(tensor.dtype).removeprefix("torch."))
        if path not in second or not numerics.compare(second[path], tensor).within(limits):
            found.append(f"{path} {list(tensor.shape)}")
    return found


def _shown(run: _Run) -> Tensor | None:
    """The mask of the first stack that has one."""
    return next((shown for shown in run.shown.values() if shown is not None), None)


def _smallest(masks: Mapping[str, Tensor]) -> str:
    return min(masks, key=lambda name: masks[name].numel())


def _padding(shown: Tensor | None, masks: Masks) -> float:
    """The share of places that is left out."""
    from wavecrest.nn.unpadded import sizes_of

    sizes = [] if shown is None else sizes_of(shown, masks)
    return 0.0 if shown is None or not sizes else 1 - sum(sizes) / shown.numel()


def _mask_of(inputs: Inputs, shown: Tensor) -> Tensor:
    """The input [B, S] that is the mask.

    Raises:
        StepRefused: no input is, so that other masks cannot be tried.
    """
    import torch

    for _, tensor in inputs.tensors():
        if tensor.shape == shown.shape and torch.equal(tensor.to(shown.device), shown.to(tensor.dtype)):
            return tensor
    raise StepRefused(
        f"no input is the padding mask {list(shown.shape)} of 0 and 1 that the layers get, so that no other mask can "
        "be tried: give it as an argument"
    )


def _scattered(shown: Tensor) -> Tensor:
    """A mask of the same shape with holes, padding at the left and at the right; each sequence has tokens."""
    import torch

    batch, length = shown.shape
    made = torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) < SHOWN
    made[0, 0] = made[-1, -1] = False
    made[:, length // 2] = True
    return made.to(shown.device)


def _at_right(shown: Tensor) -> Tensor:
    """A mask of the same shape with padding at the right, of as many lengths as there are."""
    import torch

    batch, length = shown.shape
    lengths = (torch.arange(batch) * 7 + length // 2) % length + 1
    return (torch.arange(length) < lengths[:, None]).to(shown.device)


def register() -> None:
    """Make the implementation known to transformers' attention and mask interfaces."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attention under transformers' interface: within each sequence of packed rows, else SDPA.

    Raises:
        Unsupported: packed rows with more than q, k, v and a scale.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from wavecrest.nn.encoder_layer import Rows
    from wavecrest.nn.unpadded import attend_rows

    if isinstance(attention_mask, Rows):
        return attend_rows(query, key, value, attention_mask, given.pop("scaling", None), given), None
    made: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    return made


def mask(**given: Any) -> Tensor | None:
    """The mask of one forward for `attend`: of an encoder one row of its padding, [B, 1, 1, S] of bool.

    The values are not looked at: stacks do. Every other mask, and any while tracing, is that of `graphs.masks`.
    """
    from transformers.masking_utils import bidirectional_mask_function, prepare_padding_mask

    plain = given.get("mask_function") is bidirectional_mask_function and given.get("allow_is_bidirectional_skip")
    if not plain or given.get("q_length") != given.get("kv_length") or given.get("local_size") is not None:
        return graph_masks.mask(**given)
    padding: Tensor | None = prepare_padding_mask(
        given.get("attention_mask"), given["kv_length"], given.get("kv_offset", 0)
    )
    if padding is None or graph_masks.is_tracing(padding):
        return graph_masks.mask(**given)
    return padding.bool()[:, None, None, :]

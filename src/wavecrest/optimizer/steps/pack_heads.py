"""torch.nn.MultiheadAttention with q, k and v packed, and without weights that nobody reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from wavecrest.errors import StepRefused
from wavecrest.measure.tree import iter_tensors
from wavecrest.nn.hooks import plain
from wavecrest.nn.multihead_attention import PackedMultiheadAttention, keys_refusal
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import PackedSites
from wavecrest.optimizer.steps.reads import Reads

if TYPE_CHECKING:
    from wavecrest.measure.workload import Inputs

# of MultiheadAttention.forward, in their order
ARGUMENTS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")
# parts of the time of attention, and of that of GEMMs, that go with scores that are written out, by guess
SCORES_GAIN, SCORES_OF_GEMM = 0.5, 0.1


class PackHeads(Step):
    """MultiheadAttention modules: projections as views, and the fused kernel also where a caller asks for weights.

    PyTorch's forward gives the weights unless it is told not to, and writes the scores out for them. A caller that
    takes the first of both results reads none: that is seen by following the weights through a forward.
    """

    id = "attention:pack_heads"
    title = "MultiheadAttention → packed"
    level = 3
    params_type = PackedSites
    cures = ("math_attention",)

    def find(self, context: StepContext) -> Found:
        """The modules whose weights nothing reads in a forward of any bucket, asked for or not."""
        assert context.model is not None
        modules = {
            name: one
            for name, one in context.model.named_modules()
            if isinstance(one, nn.MultiheadAttention) and plain(one, nn.MultiheadAttention)
        }
        if not modules:
            return Found((), note="no torch.nn.MultiheadAttention in the model")
        refused = {name: keys_refusal(one) for name, one in modules.items()}
        inputs = context.workload.buckets.values()
        calls = _calls(context.model, {name: one for name, one in modules.items() if not refused[name]}, inputs)
        sites = [name for name, call in calls.items() if not call.read]
        told = {why for why in refused.values() if why}
        if any(call.read for call in calls.values()):
            told.add("the weights are read")
        note = "; ".join(sorted(told))
        if not sites:
            return Found((), note=note or "no MultiheadAttention is called")
        unread = [name for name in sites if calls[name].asked]
        if unread:
            note = "; ".join(filter(None, (f"nothing reads the weights that {len(unread)} of them return", note)))
        return Found(tuple(sites), {"sites": sites, "unread": unread}, note)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The copies of q, k and v go, which the profile counts as memory work, and scores that were written out."""
        memory, attention, gemm = context.share("memory"), context.share("attention"), context.share("gemm")
        saved, basis = 0.6 * memory, f"copies are {memory:.0%} of the time"
        if found.params["unread"]:
            # scores that are written out are GEMMs of their own
            saved += SCORES_GAIN * attention + SCORES_OF_GEMM * gemm
            basis += f", attention {attention:.0%}, GEMM {gemm:.0%}; {found.note}"
        return Prediction.of_saved(saved, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change the class of each site; parameters stay."""
        for name in params["sites"]:
            module = model.get_submodule(name)
            if type(module) is not nn.MultiheadAttention or keys_refusal(module):
                raise StepRefused(f"{name} is no MultiheadAttention that can run packed")
            PackedMultiheadAttention.adopt(module, weights_unread=name in params.get("unread", ()))
        return model


class _Call(NamedTuple):
    """Whether a module was asked for weights, and whether something read or kept them."""

    asked: bool
    read: bool


def _calls(model: nn.Module, modules: dict[str, nn.MultiheadAttention], inputs: Iterable[Inputs]) -> dict[str, _Call]:
    """The calls of each module that a forward of each example makes, together."""
    found: dict[str, _Call] = {}
    for example in inputs:
        for name, call in _watched(model, modules, example).items():
            before = found.get(name, call)
            found[name] = _Call(before.asked or call.asked, before.read or call.read)
    return found


def _watched(model: nn.Module, modules: dict[str, nn.MultiheadAttention], example: Inputs) -> dict[str, _Call]:
    reads, handles = Reads(), []
    # alive during the forward, or another tensor could get the same id
    weights: list[tuple[str, torch.Tensor]] = []
    called: set[str] = set()

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, result: tuple[Any, Any]) -> None:
            called.add(name)
            if result[1] is not None:
                weights.append((name, result[1]))
                reads.count[id(result[1])] = 0

        return hook

    for name, module in modules.items():
        take = watch(name)
        handles.append(module.register_forward_hook(lambda one, _args, result, take=take: take(one, result)))
    try:
        with torch.no_grad(), reads:
            answer = example.clone().call(model)
    finally:
        for handle in handles:
            handle.remove()
    returned = {id(tensor) for _, tensor in iter_tensors("", answer, set())}
    asked = {name for name, _ in weights}
    read = {name for name, one in weights if reads.count[id(one)] or id(one) in returned}
    # one that is alive without this function was stored somewhere, for somebody to read later
    left = [(name, weakref.ref(one)) for name, one in weights]
    del answer
    weights.clear()
    read |= {name for name, one in left if one() is not None}
    return {name: _Call(name in asked, name in read) for name in called}

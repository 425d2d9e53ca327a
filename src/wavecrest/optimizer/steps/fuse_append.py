"""Rotation of q and k and the update of a static key-value cache into the launch before `flash_decoding`'s."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused, WavecrestError
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.params import RotarySites
from wavecrest.optimizer.steps.replace_rotary import KERNELS, _calls_it, _function_of, _seeing, _watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from wavecrest.measure.workload import Inputs
    from wavecrest.records import BucketProfile, OpTime

# the part of their time that is left, by guess: of a rotation and two copies in a layer one launch stays
LEFT = 1 / 3
# copies into the cache, as an op or a kernel of Inductor's, and as PyTorch's kernel in a graph; wavecrest's rotation
COPIES, ROTATION = re.compile("index_copy|index_elementwise_kernel"), re.compile("^_rope_kernel$")


class FuseAppend(Step):
    """Decode steps of transformers models on a static cache rotate and append in one launch, not three.

    The module's forward stays the model's own; it gets stand-ins for angles and cache (`nn.append_forward`).
    """

    id = "fuse_append"
    title = "rotation and cache update → flash_decoding"
    level = 4
    params_type = RotarySites
    # attention has to be ours
    needs = ("replace_attention",)
    # behind it, no other step finds the function that rotates
    tried_after = ("replace_attention", "replace_rotary", "fuse_qkv")

    def find(self, context: StepContext) -> Found:
        """Attention modules that rotate q and k, update a static cache and call attention, and nothing in between."""
        assert context.model is not None
        if context.device.kind == "cpu":
            return Found(
                (), note="on the CPU flash_decoding appends with PyTorch's operations, so nothing would change"
            )
        refused = {path: _refusal(module) for path, module in context.model.named_modules() if _calls_it(module)}
        seen = _watch(context.model, context.workload) if any(not why for why in refused.values()) else None
        styles = {} if seen is None else seen.styles
        if not refused:
            return Found((), note="no attention module that rotates q and k by a function of transformers' name")
        able = {path: styles.get(path, set()) for path, why in refused.items() if not why}
        able = {path: found for path, found in able.items() if len(found) == 1 and "" not in found}
        reasons = [why for why in refused.values() if why] + ([] if seen is None else seen.reasons)
        styles_found = {style for found in able.values() for style in found}
        if len(styles_found) != 1:
            return Found((), note="; ".join(dict.fromkeys(reasons)) or "rotations of more than one style")
        (style,) = styles_found
        try:
            taken, more = _tried(context.model, list(able), style, list(context.workload.buckets.values()))
        # Python's own operators raise a TypeError of a stand-in
        except (WavecrestError, TypeError) as error:
            return Found((), note=str(error))
        note = "; ".join(dict.fromkeys([*reasons, *more]))
        if not taken:
            return Found((), note=note or "no step of one token on a static cache")
        return Found(tuple(taken), {"sites": taken, "style": style}, f"left out: {note}" if note else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Rotations and copies are about three launches of one length, of which one is left."""
        rows = [_parts(bucket) for bucket in context.profile]
        busy, idle, count = 1 - context.idle_share(), context.idle_share(), max(len(rows), 1)
        part = busy * sum(share for share, _ in rows) / count
        gaps = idle * min(1.0, sum(launches for _, launches in rows) / count)
        return Prediction.of_saved(
            (1 - LEFT) * (part + gaps),
            f"rotations and copies into the cache are {part:.1%} of the time, their launches {gaps:.1%}",
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Give each site the forward; the first one checks that there is a place left in the cache."""
        from wavecrest.nn.derived import derive

        for number, path in enumerate(params["sites"]):
            module = model.get_submodule(path)
            reason = _refusal(module) if _calls_it(module) else "it calls no function that rotates q and k"
            if reason:
                raise StepRefused(f"{path} ({type(module).__name__}): {reason}")
            derive(module, _appending, params["style"], number == 0)
        return model


def _refusal(module: nn.Module) -> str:
    """Why the forward of a module that rotates q and k cannot be taken over; ""."""
    from wavecrest.nn.append_forward import ANGLES, CACHES
    from wavecrest.nn.hooks import plain

    kind = type(module)
    if not plain(module, kind):
        return "it has hooks, or a forward of its own"
    try:
        _function_of(kind)
    except StepRefused as error:
        return str(error)
    takes = inspect.signature(inspect.unwrap(kind.forward)).parameters
    if ANGLES not in takes or not any(name in takes for name in CACHES):
        return f"{kind.__name__} takes no {ANGLES} or no cache"
    if not isinstance(getattr(module, "layer_idx", None), int):
        return f"{kind.__name__} has no layer_idx"
    return ""


def _appending(
    kind: type[nn.Module], style: str, checks: bool, told: Callable[[str], None] | None = None
) -> type[nn.Module]:
    """A subclass whose forward holds back rotation and cache update."""
    from wavecrest.nn.append_forward import appending, rotating

    forward = _seeing(kind.forward, rotating(_function_of(kind)))
    return type(kind.__name__, (kind,), {"forward": appending(forward, style, checks, told)})


def _tried(model: nn.Module, paths: list[str], style: str, inputs: list[Inputs]) -> tuple[list[str], list[str]]:
    """The modules that append in a forward of some bucket, by a copy of the model, and why others do not.

    Raises:
        WavecrestError, TypeError: a model does something else with what its rotation or its cache gives.
    """
    import torch

    from wavecrest.nn.attention import watching
    from wavecrest.ops._flash_decoding.key import KEY_FIELDS

    made = structural_copy(model)
    told: dict[str, list[str]] = {path: [] for path in paths}
    for path in paths:
        module = made.get_submodule(path)
        module.__class__ = _appending(type(module), style, checks=False, told=told[path].append)
    access, appended = KEY_FIELDS.index("access"), 0
    with torch.no_grad(), watching() as calls:
        for one in inputs:
            one.clone().call(made)
    for call in calls:
        decision = call.decision
        if decision is not None and decision.op == "flash_decoding":
            appended += "append" in str(decision.key[access]).split()
    taken = [path for path, reasons in told.items() if "" in reasons]
    reasons = [reason for path in paths for reason in told[path] if reason]
    held = sum(reasons.count("") for reasons in told.values())
    if appended != held:
        return [], [*reasons, f"{held - appended} of {held} steps rotate or append before attention"]
    return taken, reasons


def _parts(bucket: BucketProfile) -> tuple[float, float]:
    """The shares of device time and of launches of rotations and of copies into a cache."""
    share = calls = 0.0
    for op in bucket.ops:
        times = _times(op)
        share, calls = share + times * op.share, calls + times * op.calls
    return share, calls / max(bucket.launches, 1)


def _times(op: OpTime) -> int:
    """How often an op's time counts: a rotation that is written out is five kernels, of which one negates."""
    if op.name == "aten::neg":
        return KERNELS
    return int(bool(COPIES.search(op.name) or ROTATION.search(op.name)))

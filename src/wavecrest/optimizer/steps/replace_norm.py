"""Normalisation layers over to wavecrest's ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.records import BucketProfile

# the part of a fused norm's time that one pass over memory saves: 22 trials of 13 models on H200s, which it was fitted
# on, were off by 0.032 of the logarithm with it, by 0.046 with 0.3 (evidence/nvidia-h200/2026-11-2[67]_zoo_*.jsonl.gz).
# Where the model waits for the host nothing is saved
FUSED_GAIN = 0.55
# a norm of elementwise operations is eight kernels (to float32, square, mean, + ε, 1/√, ×, back, × weight), of which
# these three tell it from other work: a profile has 2.5 times their time as norms, and one kernel of eight is left
COMPOSED = ("aten::pow", "aten::mean", "aten::rsqrt")
COMPOSED_TIME, COMPOSED_KERNELS = 2.5, 8


class ReplaceNorm(Step):
    """LayerNorm and RMSNorm modules become wavecrest.nn modules that share their parameters."""

    id = "replace_norm"
    title = "norms → wavecrest"
    level = 4
    params_type = Sites
    cures = ("norms",)
    # it replaces norms itself, and takes layers as transformers made them
    tried_after = ("replace_xlstm",)

    def find(self, context: StepContext) -> Found:
        """Norm modules that prove, on a probe, to compute what our module computes."""
        from wavecrest.nn import norm_from_module

        assert context.model is not None
        sites, reasons = [], []
        for name, module in context.model.named_modules():
            if not type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
                continue
            if context.device.kind == "cpu" and type(module).__module__.startswith("torch.nn"):
                reasons.append("on the CPU wavecrest runs PyTorch's own kernel for this module already")
                continue
            try:
                norm_from_module(module)
            except StepRefused as error:
                reasons.append(f"{name}: {error}")
            else:
                sites.append(name)
        distinct = "; ".join(dict.fromkeys(reasons))
        if not sites:
            return Found((), note=distinct or "no LayerNorm or RMSNorm in the model")
        return Found(tuple(sites), {"sites": sites}, f"left out: {distinct}" if distinct else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """One pass over memory per norm instead of several, and one launch."""
        share = context.share("normalisation")
        saved, basis = FUSED_GAIN * share, f"normalisation is {share:.0%} of the time"
        composed = [_composed(bucket) for bucket in context.profile]
        if any(calls for _, calls in composed):
            part = sum(time for time, _ in composed) / len(composed) * (1 - context.idle_share())
            launches = sum(
                calls * (COMPOSED_KERNELS - 1) / max(bucket.launches, 1)
                for (_, calls), bucket in zip(composed, context.profile, strict=True)
            )
            gaps = min(1.0, launches / len(composed)) * context.idle_share()
            saved += part * (1 - 1 / COMPOSED_KERNELS) + gaps
            basis = (
                f"norms of elementwise operations are about {part:.0%} of the time, their launches {gaps:.0%}; {basis}"
            )
        return Prediction.of_saved(saved, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Swap each site."""
        from wavecrest.nn import norm_from_module

        for name in params["sites"]:
            set_submodule(model, name, norm_from_module(model.get_submodule(name)))
        return model


def own_norms(model: nn.Module) -> tuple[bool, bool]:
    """Whether layer norms, and whether norms of any kind, are modules of wavecrest."""
    from wavecrest.nn import GemmaRMSNorm, LayerNorm, RMSNorm

    kinds = {type(module) for module in model.modules()}
    layer = any(issubclass(kind, LayerNorm) for kind in kinds)
    return layer, layer or any(issubclass(kind, (RMSNorm, GemmaRMSNorm)) for kind in kinds)


def _composed(bucket: BucketProfile) -> tuple[float, int]:
    """The share of device time of norms that are made of elementwise operations, and how many of them a call has."""
    calls = sum(op.calls for op in bucket.ops if op.name == "aten::rsqrt")
    means = {op.shapes.partition(",")[0] for op in bucket.ops if op.name == "aten::mean"}
    # a power of another shape is an activation's
    rows = [op for op in bucket.ops if op.name in COMPOSED and (op.name != "aten::pow" or op.shapes in means)]
    return (min(1.0, COMPOSED_TIME * sum(op.share for op in rows)), calls) if calls else (0.0, 0)

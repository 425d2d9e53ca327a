"""Residual additions of transformer layers into the GEMMs before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.records import BucketProfile

# the part of an addition's time that is left in the GEMM, which reads the residual
LEFT = 0.1


class FuseResidual(Step):
    """Pre-norm layers add their residuals in the GEMMs that end attention and MLP."""

    id = "fuse_residual"
    title = "residual additions → GEMM"
    level = 4
    params_type = Sites
    # these put other layers at the end of attention and MLP
    tried_after = ("route_linear", "choose_linear")

    def find(self, context: StepContext) -> Found:
        """Layers whose forward is two norms, attention, an MLP and two additions, by its source."""
        from wavecrest.nn import residual_layer

        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="on the CPU the op adds with PyTorch's own kernel, so nothing would change")
        sites, reasons = [], []
        for path, module in context.model.named_modules():
            if not all(hasattr(module, part) for part in ("input_layernorm", *residual_layer.ENDS)):
                continue
            reason = residual_layer.refusal(module)
            if reason:
                reasons.append(reason)
            else:
                sites.append(path)
        distinct = "; ".join(dict.fromkeys(reasons))
        if not sites:
            return Found((), note=distinct or "no layer of attention and MLP with input_layernorm, self_attn and mlp")
        return Found(tuple(sites), {"sites": sites}, f"left out: {distinct}" if distinct else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The additions' time and launches go."""
        rows = [_additions(bucket) for bucket in context.profile]
        busy, idle, count = 1 - context.idle_share(), context.idle_share(), max(len(rows), 1)
        part = busy * sum(share for share, _ in rows) / count
        gaps = idle * min(1.0, sum(launches for _, launches in rows) / count)
        return Prediction.of_saved(
            (1 - LEFT) * part + gaps, f"additions of equal shapes are {part:.1%} of the time, their launches {gaps:.1%}"
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change each site in place."""
        from wavecrest.nn import residual_layer

        for path in params["sites"]:
            residual_layer.adopt(model.get_submodule(path))
        return model


def _additions(bucket: BucketProfile) -> tuple[float, float]:
    """The shares of device time and of launches of additions of two tensors of one shape."""
    rows = []
    for op in bucket.ops:
        left, _, right = op.shapes.rpartition(" ")[0].partition(", ")
        if op.name == "aten::add" and left == right != "":
            rows.append(op)
    return sum(op.share for op in rows), sum(op.calls for op in rows) / max(bucket.launches, 1)

"""1-D convolutions of speech encoders as GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn

# part of the time of convolutions that goes, by guess; of a wav2vec 2.0, whose long one had no matrix units, it was 0.7
# (one H200, 2026-11-27_zoo_ninth_gpu_0.jsonl.gz)
GAIN = 0.3


class WindowConvolution(Step):
    """Conv1d modules become GEMMs over windows: strided ones without padding, and those with a long kernel."""

    id = "window_conv"
    title = "1-D convolution → GEMM"
    level = 3
    params_type = Sites

    def find(self, context: StepContext) -> Found:
        """Every Conv1d of PyTorch's, weight-normed or not, that `window_refusal` has nothing against."""
        from wavecrest.nn.window_conv import is_conv1d, window_refusal

        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="on the CPU oneDNN's convolution needs no change of layout")
        convs: dict[str, Any] = {name: one for name, one in context.model.named_modules() if is_conv1d(one)}
        reasons = {name: window_refusal(conv) for name, conv in convs.items()}
        sites = [name for name, reason in reasons.items() if not reason]
        told = "; ".join(dict.fromkeys(f"{name}: {reason}" for name, reason in reasons.items() if reason))
        if not sites:
            return Found((), note=told or "no 1-D convolution in the model")
        return Found(tuple(sites), {"sites": sites}, f"left out: {told}" if told else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """By the time of ops: kernels of libraries' convolutions are called GEMMs too."""
        shares = [sum(op.share for op in bucket.ops if op.category == "convolution") for bucket in context.profile]
        share = sum(shares) / max(len(shares), 1) * (1 - context.idle_share())
        return Prediction.of_saved(GAIN * share, f"convolution is {share:.0%} of the time, by its ops")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change the class of each site; parameters stay."""
        from wavecrest.nn.window_conv import WindowConv1d, is_conv1d, window_refusal

        for name in params["sites"]:
            conv: Any = model.get_submodule(name)
            reason = window_refusal(conv) if is_conv1d(conv) else f"it is a {type(conv).__name__}"
            if reason:
                raise StepRefused(f"{name} is no Conv1d of this step: {reason}")
            WindowConv1d.adopt(conv)
        return model

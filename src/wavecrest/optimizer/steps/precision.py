"""Lower precision, only where the user asked for it: it changes answers, so the default ladder leaves it out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from wavecrest.errors import PlanError
from wavecrest.optimizer.steps.around import Around
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import PrecisionName

if TYPE_CHECKING:
    import torch
    from torch import nn

PRECISIONS = {
    "tf32": "fp32 matrix products in TF32-class precision",
    "bf16": "weights and activations in bfloat16",
    "fp16": "weights and activations in float16",
}
# dtype whose "model" tolerance applies once the user has asked for this precision
GATE_DTYPE = {"tf32": "float16", "bf16": "bfloat16", "fp16": "float16"}


def gate_dtype(step_ids: Iterable[str]) -> str | None:
    """The dtype whose tolerance holds for a model with these steps: None (its own dtype) without a precision step."""
    for step_id in step_ids:
        group, _, name = step_id.partition(":")
        if group == "precision":
            return GATE_DTYPE[name]
    return None


class Precision(Step):
    """Run the model in one lower precision."""

    level = 3
    phase = "setting"
    group = "precision"
    params_type = PrecisionName

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = f"precision:{name}"
        self.title = f"precision {name}"

    def check_params(self, params: dict[str, Any]) -> list[str]:
        """The precision must be this step's own."""
        found = super().check_params(params)
        if params["precision"] != self.name:
            raise PlanError(f"parameters of step {self.id}: precision is {params['precision']!r}")
        return found

    def find(self, context: StepContext) -> Found:
        """Only a float32 model, and only if asked."""
        if context.precision != self.name:
            return Found((), note="not asked for (--precision)")
        if context.workload.dtype != "float32":
            return Found((), note=f"the model is {context.workload.dtype}, not float32")
        if self.name == "tf32" and context.device.kind == "cpu":
            return Found((), note="TF32-class products exist on GPUs only")
        return Found(("model",), {"precision": self.name}, PRECISIONS[self.name])

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Matrix work at the ratio of the peaks, where known."""
        share = context.share("gemm", "convolution", "attention")
        return Prediction(1 / (1 - 0.5 * share), f"matrix work is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Autocast around the call, or TF32 inside it."""
        import torch

        if params["precision"] == "tf32":
            model.forward = _TF32(model)
            return model
        device_type = next((p.device.type for p in model.parameters()), "cpu")
        dtype = torch.bfloat16 if params["precision"] == "bf16" else torch.float16
        model.forward = _Autocast(model, device_type, dtype)
        return model


class _TF32(Around):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from wavecrest.backends.torch.common import matmul_precision

        before, put_back = matmul_precision()
        put_back("high" if isinstance(before, str) else ("tf32",) * len(before))
        try:
            return self.run(*args, **kwargs)
        finally:
            put_back(before)


class _Autocast(Around):
    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.device_type, self.dtype = device_type, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils import _pytree as pytree

        dtype = self.dtype
        with torch.autocast(self.device_type, dtype=dtype):
            result = self.run(*args, **kwargs)
        # callers of a float32 model get float32
        return pytree.tree_map(
            lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype else leaf, result
        )


def precision_steps() -> list[Step]:
    """One step per precision."""
    return [Precision(name) for name in PRECISIONS]

"""Linear layers in 8 or 4 bits, only where the user asked for it and said how far answers may be from the original's.

The step comes before all others, which then work on the quantized model and are held to its answers. The quantized
model itself is held to the original by the quality that was asked for, wherever a plan is checked
(`checking.gate_for`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from wavecrest.errors import InvalidArgument, PlanError, QualityNotMet, StepRefused
from wavecrest.optimizer.options import QUANTIZE_LEVEL
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.params import QuantizedLayers

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload
    from wavecrest.quantizer.quality import Quality

ID = "quantize"
# part of the time of GEMMs that is reading weights, by guess: all of it with few rows, little with many
READING = 0.7


class Quantize(Step):
    """Layers that are faster to read, within the quality that was asked for."""

    id = ID
    title = "quantized layers"
    level = QUANTIZE_LEVEL
    phase = "weights"
    params_type = QuantizedLayers

    def check_params(self, params: dict[str, Any]) -> list[str]:
        """Formats must be known."""
        from wavecrest.quantizer import layers

        found = super().check_params(params)
        try:
            layers.schemes(tuple(dict.fromkeys(params["formats"].values())))
        except InvalidArgument as error:
            raise PlanError(f"parameters of step {self.id}: {error}") from None
        return found

    def find(self, context: StepContext) -> Found:
        """The layers that `wavecrest.quantize` chooses on the workload's inputs, without moving scales of norms."""
        from wavecrest.quantizer import api

        wish = context.quantize
        if wish is None:
            return Found((), note="not asked for (--quantize with --quality)")
        model = structural_copy(context.workload.model)
        try:
            made = api.quantize(
                model, wish.formats, calibration=_buckets(context.workload), quality=wish.quality, smooth=None
            )
        except (InvalidArgument, QualityNotMet) as error:
            raise StepRefused(str(error)) from None
        counts = Counter(made.formats.values())
        note = ", ".join(f"{count} layers in {name}" for name, count in counts.items())
        before, after = made.report.bytes_before, made.report.bytes_after
        params = {"formats": dict(made.formats), "quality": wish.quality}
        return Found(tuple(made.formats), params, note, saved=1 - after / before)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Fewer bytes of weights, where a GEMM's time is reading them."""
        share, saved = context.share("gemm"), found.saved or 0.0
        return Prediction.of_saved(
            READING * share * saved, f"{found.note}; {saved:.0%} of the bytes go, GEMM is {share:.0%} of the time"
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Pack the weights of the layers.

        Raises:
            StepRefused: a layer is not there, or cannot take its format.
        """
        from wavecrest.quantizer.place import place_formats

        try:
            place_formats(model, params["formats"]).forget()
        except InvalidArgument as error:
            raise StepRefused(str(error)) from None
        return model


def quantized(workload: Workload, params: dict[str, Any]) -> tuple[nn.Module, Quality]:
    """A copy of a workload's model with the layers of the step's parameters quantized, and how far it is off.

    Raises:
        StepRefused: it does not fit the model, or is not within the quality that the parameters name.
    """
    from wavecrest.quantizer.calibrate import workload_of
    from wavecrest.quantizer.quality import Limits, Original

    model = structural_copy(workload.model)
    beside = workload_of(model, _buckets(workload), "the workload")
    try:
        original = Original(beside)
        Quantize().apply(model, params)
        found = original.compare()
    except InvalidArgument as error:
        raise StepRefused(str(error)) from None
    finally:
        beside.restore_modes()
    broken = Limits(params["quality"]).broken(found)
    if broken:
        raise StepRefused(f"it is not within the quality of {params['quality']:.2%}: {'; '.join(broken)}")
    return model, found


def _buckets(workload: Workload) -> Any:
    """The inputs as they are before every call."""
    from wavecrest.measure.workload import Buckets

    if workload.reset is not None:
        for bucket in workload.buckets:
            workload.reset(bucket)
    return Buckets(workload.buckets)

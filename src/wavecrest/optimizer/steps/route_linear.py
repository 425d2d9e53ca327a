"""Routes linear layers to `wavecrest.ops.linear` where a measured row names another kernel than PyTorch's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused, WavecrestError
from wavecrest.nn.fused_weights import FusedSlice
from wavecrest.nn.linear import is_conv1d, linear_of_conv1d
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import linear_call
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import RoutedSites

if TYPE_CHECKING:
    from wavecrest.dispatch.decision import Decision
    from wavecrest.measure.workload import Inputs

# backends that a plain nn.Linear runs on already
NATIVE = ("torch", "reference")
# part of the GEMMs' time that measured rows save in a model
ROUTED_GAIN = 0.05


def decisions(model: nn.Module, inputs: Inputs) -> dict[str, list[Decision]]:
    """The decision of dispatch for each call of each Linear layer in one forward, by the layer's path."""
    found: dict[str, list[Decision]] = {}
    handles = []
    for path, module in model.named_modules():
        slices = isinstance(module, FusedSlice) and module.first and module.is_linear and not module.is_packed
        turned = is_conv1d(module)
        if type(module) is not nn.Linear and not turned and not slices:
            continue

        def watch(module: nn.Module, args: tuple[Any, ...], path: str = path, turned: bool = turned) -> None:
            wide = module.fused if isinstance(module, FusedSlice) else module
            weight, bias = wide.weight, wide.bias
            if turned and isinstance(weight, Tensor):
                # as it will lie in memory: rows of the table are for that
                weight = weight.new_empty(weight.shape[::-1])
            assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
            found.setdefault(path, []).append(op.decide(linear_call(args[0], weight, bias)))

        handles.append(module.register_forward_pre_hook(watch))
    try:
        with torch.no_grad():
            inputs.clone().call(model)
    finally:
        for handle in handles:
            handle.remove()
    return found


class RouteLinear(Step):
    """nn.Linear and Conv1D modules whose GEMM a measured row gives to another kernel become wavecrest.nn.Linear.

    The table is asked again at every call, by the bucket of its rows: a layer can run our kernel while decoding and
    PyTorch's in prefill.
    """

    id = "route_linear"
    title = "linear → measured"
    level = 4
    params_type = RoutedSites
    # the table has separate rows for their wide GEMMs
    tried_after = ("fuse_qkv", "fuse_gate_up", "fuse_parallel")

    def find(self, context: StepContext) -> Found:
        """Layers for which dispatch chooses another backend than PyTorch's, in any bucket of the workload."""
        assert context.model is not None
        routed: dict[str, None] = {}
        routes: list[dict[str, Any]] = []
        lines: Counter[str] = Counter()
        for bucket, inputs in context.workload.buckets.items():
            try:
                asked = decisions(context.model, inputs)
            except WavecrestError as error:
                return Found((), note=f"bucket {bucket}: {error}")
            for path, rows in asked.items():
                for decision in rows:
                    if decision.backend not in NATIVE:
                        routed[path] = None
                    lines[f"{bucket}: {_call(decision)} {decision.backend} ({decision.source})"] += 1
                    routes.append({"bucket": bucket, "layer": path, **_row(decision)})
        note = "; ".join(f"{count} × {line}" for line, count in lines.items())
        if not lines:
            return Found((), note="no Linear layer is called that another step has not replaced")
        if not routed:
            return Found((), note=f"PyTorch's kernel is the choice for every layer: {note}")
        return Found(tuple(routed), {"sites": list(routed), "routes": routes}, note)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The rows were measured, each GEMM alone; in the model a part of the gain is left, by guess."""
        share, routed, work = context.share("gemm"), 0, 0
        for row in found.params["routes"]:
            products = row["rows"] * row["columns"] * row["k"]
            work += products
            routed += products * (row["backend"] not in NATIVE)
        part = routed / work if work else 0.0
        return Prediction.of_saved(
            ROUTED_GAIN * share * part,
            f"measured rows for {len(found.sites)} layers, {part:.0%} of the products; GEMM is {share:.0%} of the time",
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Swap each site; of fused projections the wide GEMM."""
        from wavecrest.nn import Linear
        from wavecrest.nn.functional import linear

        for path in params["sites"]:
            module = model.get_submodule(path)
            if isinstance(module, FusedSlice):
                module.fused.product_of = linear
            else:
                module = linear_of_conv1d(module) if is_conv1d(module) else module
                if type(module) is not nn.Linear:
                    raise StepRefused(f"{path} is a {type(module).__name__}, not a plain Linear")
                set_submodule(model, path, Linear.from_module(module))
        return model


def _part(decision: Decision) -> dict[str, Any]:
    return dict(zip(op.key_fields, decision.key, strict=True))


def _call(decision: Decision) -> str:
    part = _part(decision)
    return f"{part['rows']}×{part['columns']}×{part['k']} {part['a']}"


def _row(decision: Decision) -> dict[str, Any]:
    """A decision as JSON: what runs for which GEMM, and why."""
    part = _part(decision)
    return {
        **{name: part[name] for name in ("rows", "columns", "k", "a", "bias")},
        "backend": decision.backend,
        "config": {} if decision.config is None else dict(decision.config.kwargs),
        "source": decision.source,
        "reason": decision.reason,
    }

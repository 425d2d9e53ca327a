"""Residual additions of post-norm transformers into the GEMMs before them, where a backend is faster with them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.graphs.activations import name_of
from wavecrest.nn import residual_output
from wavecrest.ops._gemm.backend import op
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.fuse_residual import LEFT
from wavecrest.optimizer.steps.gemm_choices import choices
from wavecrest.optimizer.steps.params import AddingOutputs

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.hardware import Device
    from wavecrest.ops._gemm.call import GemmCall


class FusePostNorm(Step):
    """BERT's outputs of attention and MLP, a linear layer whose sum with the residual is normalised: one GEMM adds."""

    id = "fuse_post_norm"
    title = "post-norm residuals → GEMM"
    level = 4
    params_type = AddingOutputs
    tried_after = ("choose_linear", "replace_norm")

    def looks_long(self, device: Device) -> bool:
        """On a GPU, where each distinct call is compiled for several backends."""
        return device.kind != "cpu"

    def hope(self, context: StepContext) -> Prediction:
        """As if all elementwise work were such additions: a captured graph does not say which kernel adds what."""
        share = context.share("elementwise")
        basis = f"at best, as its GEMMs are not timed yet; elementwise work is {share:.0%} of the time"
        return Prediction.of_saved((1 - LEFT) * share, basis)

    def find(self, context: StepContext) -> Found:
        """Modules for whose calls a backend that adds is faster than PyTorch's GEMM and addition."""
        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="on the CPU the op adds with PyTorch's own kernel, so nothing would change")
        reasons: Counter[str] = Counter()
        modules = {}
        for path, module in context.model.named_modules():
            if all(hasattr(module, part) for part in ("dense", "dropout", "LayerNorm")):
                reason = residual_output.refusal(module)
                reasons.update([reason] if reason else [])
                if not reason:
                    modules[path] = module
        left_out = "".join(f"; left out: {reason}" for reason in reasons)
        if not modules:
            return Found((), note=f"no module that normalises the sum of a linear layer and a residual{left_out}")
        calls = _calls(context, modules)
        raced = choices((call for given in calls.values() for call in given), context.workload.device)
        rows = []
        for path, given in calls.items():
            # one backend for all buckets: that of the most rows which has one
            named = [(call.M, raced.backends.get(name_of(call), "")) for call in given]
            backend = max(named, key=lambda pair: (bool(pair[1]), pair[0]), default=(0, ""))[1]
            if backend:
                rows.append({"site": path, "backend": backend})
        if not rows:
            return Found((), note=f"PyTorch's GEMM and addition are the fastest for {len(calls)} modules{raced.note}")
        used = ", ".join(sorted({row["backend"] for row in rows}))
        note = f"{len(rows)} of {len(modules)} modules add on {used}{raced.note}{left_out}"
        return Found(tuple(row["site"] for row in rows), {"outputs": rows}, note, saved=raced.saved)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The part of these GEMMs' and additions' own time that the calls saved alone, of the time of GEMMs."""
        share, saved = context.share("gemm"), found.saved or 0.0
        return Prediction.of_saved(
            saved * share,
            f"{found.note}; {saved:.0%} of their time was saved on the calls alone, GEMM is {share:.0%} of the time",
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change each site in place."""
        for row in params["outputs"]:
            if row["backend"] not in op.backends:
                raise StepRefused(f"gemm has no backend {row['backend']}; it has {', '.join(sorted(op.backends))}")
            residual_output.adopt(model.get_submodule(row["site"]), row["backend"])
        return model


def _calls(context: StepContext, modules: dict[str, nn.Module]) -> dict[str, list[GemmCall]]:
    """The GEMMs of modules in all examples, by path; modules that do not run are left out."""
    calls: dict[str, list[GemmCall]] = {}

    def before(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = {**dict(zip(residual_output.ARGUMENTS[1:], args, strict=False)), **kwargs}
            try:
                call = residual_output.call_of(module, **given)
                op.check(call)
            except (InvalidArgument, TypeError):
                # a residual that is broadcast, or other arguments
                return
            calls.setdefault(path, []).append(call)

        return hook

    handles = [module.register_forward_pre_hook(before(path), with_kwargs=True) for path, module in modules.items()]
    assert context.model is not None
    try:
        with torch.no_grad():
            for example in context.workload.buckets.values():
                example.clone().call(context.model)
    finally:
        for handle in handles:
            handle.remove()
    return calls

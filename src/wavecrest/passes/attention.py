"""Which attention implementation a model uses, and the lint that keeps a wrong causal mask out.

`is_causal=True` with q_len ≠ k_len is upper-left aligned in PyTorch: for one query over five keys the result equals
`v[0]`. No step may introduce such a call; `CausalWatch` records them while a candidate runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.passes.base import Found, Prediction, Step, StepContext

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.workload import Inputs

# torch.nn.attention.SDPBackend name per candidate
SDPA_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


class UseSDPA(Step):
    """Switch a transformers model from its written-out attention to scaled_dot_product_attention."""

    id = "attention:sdpa"
    title = "attention → SDPA"
    level = 3
    group = "attention implementation"

    def find(self, context: StepContext) -> Found:
        """Transformers models whose implementation is "eager" and that support SDPA."""
        assert context.model is not None
        config = getattr(context.model, "config", None)
        current = getattr(config, "_attn_implementation", None)
        if current is None:
            return Found((), note="not a transformers model: no attention interface to switch")
        if current == "sdpa":
            return Found((), note="the model uses SDPA already")
        if current != "eager":
            raise StepRefused(f"the model's attention is {current!r}, chosen on purpose; only 'eager' is replaced")
        if not getattr(context.model, "_supports_sdpa", False):
            raise StepRefused(f"{type(context.model).__name__} declares that it does not support SDPA")
        return Found(("model",), {"implementation": "sdpa"})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Softmax and the score matrix stay on chip: about a third of written-out attention's time is left."""
        share = context.share("attention")
        return Prediction(1 / (1 - 0.5 * share), f"attention is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Set the implementation on a private copy of the configuration."""
        setter = getattr(model, "set_attn_implementation", None)
        if setter is None:
            raise StepRefused("this transformers version cannot switch attention on a loaded model")
        setter(params["implementation"])
        return model


class SDPABackend(Step):
    """Pin scaled_dot_product_attention to one of its backends."""

    level = 3
    phase = "setting"
    group = "sdpa backend"

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = f"sdpa:{name}"
        self.title = f"SDPA {name}"

    def find(self, context: StepContext) -> Found:
        """Where the model calls SDPA, on a GPU (the CPU has one fused backend), and the backend takes these calls."""
        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="the CPU has one fused SDPA backend")
        calls = watch_sdpa(context.model, list(context.workload.buckets.values()))
        if not calls:
            return Found((), note="the model makes no SDPA call")
        return Found(("model",), {"backend": self.name}, f"{len(calls)} SDPA calls")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """No model is trusted here: which backend wins depends on shape and version."""
        share = context.share("attention")
        return Prediction(None, f"attention is {share:.0%} of the time; backends are measured, not modelled")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Run the forward under torch.nn.attention.sdpa_kernel."""
        from torch.nn.attention import SDPBackend as Backend
        from torch.nn.attention import sdpa_kernel

        backend = getattr(Backend, SDPA_BACKENDS[params["backend"]], None)
        if backend is None:
            raise StepRefused(f"this torch has no SDPA backend {params['backend']}")
        forward = model.forward

        def run_pinned(*args: Any, **kwargs: Any) -> Any:
            with sdpa_kernel(backend):
                return forward(*args, **kwargs)

        model.forward = run_pinned
        return model


def attention_steps() -> list[Step]:
    """The implementation switch, then one step per SDPA backend."""
    return [UseSDPA(), *(SDPABackend(name) for name in SDPA_BACKENDS)]


def _watch_class() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    class CausalWatch(TorchFunctionMode):
        """Records (q_len, k_len, is_causal) of every scaled_dot_product_attention call made inside."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[int, int, bool]] = []

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.nn.functional.scaled_dot_product_attention:
                query = args[0] if args else kwargs["query"]
                key = args[1] if len(args) > 1 else kwargs["key"]
                is_causal = bool(args[5] if len(args) > 5 else kwargs.get("is_causal", False))
                self.calls.append((query.shape[-2], key.shape[-2], is_causal))
            return func(*args, **kwargs)

    return CausalWatch


def watch_sdpa(model: nn.Module, inputs: list[Inputs]) -> list[tuple[int, int, bool]]:
    """Run an uncompiled model on copies of the inputs; returns its SDPA calls as (q_len, k_len, is_causal)."""
    import torch

    calls: list[tuple[int, int, bool]] = []
    for example in inputs:
        with torch.no_grad(), _watch_class()() as watch:
            example.clone().call(model)
        calls.extend(watch.calls)
    return calls


def check_causal(original: nn.Module, candidate: nn.Module, inputs: list[Inputs]) -> None:
    """Refuse a candidate that makes an `is_causal` call with q_len ≠ k_len which the original does not make.

    Raises:
        StepRefused: with the lengths.
    """

    def misaligned(model: nn.Module) -> set[tuple[int, int]]:
        return {(q, k) for q, k, causal in watch_sdpa(model, inputs) if causal and q != k}

    introduced = misaligned(candidate) - misaligned(original)
    if introduced:
        q_len, k_len = sorted(introduced)[0]
        raise StepRefused(
            f"it would call scaled_dot_product_attention with is_causal=True for q_len {q_len} and k_len {k_len}: "
            "PyTorch aligns that mask upper-left, so the last query would not see the last key"
        )

"""Which attention implementation a model uses, and the lint that keeps a wrong causal mask out.

`is_causal=True` with q_len ≠ k_len is upper-left aligned in PyTorch: for one query over five keys the result equals
`v[0]`. No step may introduce such a call; `CausalWatch` records them while a candidate runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavecrest.errors import PlanError, StepRefused
from wavecrest.graphs import masks
from wavecrest.graphs.capture import device_time
from wavecrest.optimizer.steps.around import Around
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import PackGQAOwners, SDPABackendName, SDPAOwners

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Inputs

# gain that a backend must show on the calls alone before the whole model is built and measured with it
MIN_ALONE = 0.05
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
    params_type = SDPAOwners
    cures = ("math_attention",)

    def find(self, context: StepContext) -> Found:
        """Transformers models whose implementation is "eager" and that support SDPA."""
        assert context.model is not None
        owners = _attention_owners(context.model)
        if not owners:
            return Found((), note="not a transformers model: no attention interface to switch")
        configs = {name: _config(context.model, name) for name in owners}
        eager = [name for name, config in configs.items() if config._attn_implementation == "eager"]
        if not eager:
            used = sorted({str(config._attn_implementation) for config in configs.values()})
            return Found((), note=f"the model's attention is {', '.join(used)} already; only eager is replaced")
        for name in eager:
            module = context.model.get_submodule(name)
            if not getattr(module, "_supports_sdpa", False):
                raise StepRefused(f"{type(module).__name__} declares that it does not support SDPA")
        return Found(tuple(eager), {"implementation": "sdpa", "owners": eager})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Softmax and the score matrix stay on chip: about a third of written-out attention's time is left."""
        share = context.share("attention")
        return Prediction(1 / (1 - 0.5 * share), f"attention is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Set the implementation on a private copy of the configuration."""
        for name in params["owners"]:
            masks.set_implementation(model.get_submodule(name), params["implementation"])
        return model


class PackGQA(Step):
    """Decode attention of a transformers model with grouped K/V heads, without expanding K and V.

    With one query token, the query heads that share a K/V head become the rows of one small matrix: the same scores,
    but K and V are read once instead of copied once per query head.
    """

    id = "attention:pack_gqa"
    title = "pack GQA decode"
    level = 3
    group = "attention implementation"
    params_type = PackGQAOwners

    def find(self, context: StepContext) -> Found:
        """Transformers models on SDPA that are called with one query token and fewer K/V heads than query heads."""
        assert context.model is not None
        owners = _attention_owners(context.model)
        if not owners:
            return Found((), note="not a transformers model: no attention interface to switch")
        configs = [_config(context.model, name) for name in owners]
        if any(config._attn_implementation != "sdpa" for config in configs):
            return Found((), note="the model's attention is not SDPA")
        groups = {_group(config) for config in configs}
        if groups == {1}:
            return Found((), note="every query head has a K/V head of its own")
        calls = watch_sdpa(context.model, list(context.workload.buckets.values()))
        # transformers 5.23 packs by itself, but only outside torch.compile: its rows are then the group's heads
        if not any(call.q_len == 1 or call.q_len in groups for call in calls):
            return Found((), note="no call with one query token")
        return Found(owners, {"implementation": "wavecrest_pack_gqa", "owners": list(owners)})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The copies of K and V go, which the profile counts as memory work."""
        share = context.share("memory") + 0.5 * context.share("attention")
        return Prediction(1 / (1 - 0.6 * share), f"copies and attention are {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Register the implementation and select it."""
        for name in params["owners"]:
            masks.set_implementation(model.get_submodule(name), params["implementation"], register_pack_gqa)
        return model


def _group(config: Any) -> int:
    """Query heads that share a K/V head; 1 where the configuration names no such heads (CLIP has one per tower)."""
    shared = getattr(config, "num_key_value_heads", None)
    return config.num_attention_heads // shared if shared else 1


def _config(model: nn.Module, path: str) -> Any:
    return model.get_submodule(path).config


def _attention_owners(model: nn.Module) -> tuple[str, ...]:
    """Paths of the outermost transformers models inside (the empty path: the model itself)."""
    owners: list[str] = []
    for name, module in model.named_modules():
        inside = any(owner == "" or name.startswith(f"{owner}.") for owner in owners)
        has = hasattr(module, "set_attn_implementation")
        if has and not inside and getattr(getattr(module, "config", None), "_attn_implementation", None):
            owners.append(name)
    return tuple(owners)


def register_pack_gqa() -> None:
    """Make `wavecrest_pack_gqa` known to transformers' attention and mask interfaces."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def pack_gqa(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        """query [B, H, S, D], key and value [B, Hkv, T, D] to [B, S, H, D]."""
        batch, heads, length, width = query.shape
        kv_heads = key.shape[1]
        one_mask = attention_mask is None or (attention_mask.shape[1] == 1 and attention_mask.shape[2] == 1)
        if length != 1 or kv_heads == heads or not one_mask or kwargs.get("dropout") or args:
            out: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
            return out
        from torch.nn.functional import scaled_dot_product_attention

        # head h reads K/V head h // (H / Hkv), so the heads of one group are neighbours
        packed = query.reshape(batch, kv_heads, heads // kv_heads, width)
        result = scaled_dot_product_attention(
            packed, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"), is_causal=False
        )
        return result.reshape(batch, 1, heads, value.shape[-1]), None

    AttentionInterface.register("wavecrest_pack_gqa", pack_gqa)
    AttentionMaskInterface.register("wavecrest_pack_gqa", masks.mask)


class SDPABackend(Step):
    """Pin scaled_dot_product_attention to one of its backends."""

    level = 3
    phase = "setting"
    group = "sdpa backend"
    params_type = SDPABackendName

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = f"sdpa:{name}"
        self.title = f"SDPA {name}"
        self.cures = () if name == "math" else ("math_attention",)

    def check_params(self, params: dict[str, Any]) -> list[str]:
        """The backend must be this step's own."""
        found = super().check_params(params)
        if params["backend"] != self.name:
            raise PlanError(f"parameters of step {self.id}: backend is {params['backend']!r}")
        return found

    def find(self, context: StepContext) -> Found:
        """Where the model calls SDPA on a GPU, and the backend takes these calls and is not slower on them alone."""
        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="the CPU has one fused SDPA backend")
        key = ("SDPA calls", context.model)
        if key not in context.shared:
            # for all backends: the distinct calls, and the default's time of each once it is known
            calls = watch_sdpa(context.model, list(context.workload.buckets.values()))
            context.shared[key] = {call.key: call for call in calls}, {}
        distinct, times = context.shared[key]
        if not distinct:
            return Found((), note="the model makes no SDPA call")
        ours = sum(call.time(self.name) for call in distinct.values())
        for name, call in distinct.items():
            if name not in times:
                times[name] = call.time(None)
        default = sum(times.values())
        alone = f"{ours * 1e3:.1f} µs against the default's {default * 1e3:.1f} µs, called alone"
        if ours > default * (1 - MIN_ALONE):
            raise StepRefused(f"not faster on the model's calls: {alone}")
        return Found(("model",), {"backend": self.name}, alone, saved=1 - ours / default)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The part of attention that the backend saved on the calls alone."""
        share = context.share("attention")
        basis = f"attention is {share:.0%} of the time; {found.note}"
        return Prediction(None, basis) if found.saved is None else Prediction.of_saved(found.saved * share, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Run the forward under torch.nn.attention.sdpa_kernel."""
        # raises if this torch does not have it
        _backend(params["backend"])
        model.forward = _Pinned(model, params["backend"])
        return model


class _Pinned(Around):
    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        # pickle does not take PyTorch's object
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(_backend(self.name)):
            return self.run(*args, **kwargs)


def _backend(name: str) -> Any:
    from torch.nn.attention import SDPBackend as Backend

    backend = getattr(Backend, SDPA_BACKENDS[name], None)
    if backend is None:
        raise StepRefused(f"this torch has no SDPA backend {name}")
    return backend


def attention_steps() -> list[Step]:
    """The implementation switches, then one step per SDPA backend."""
    return [UseSDPA(), PackGQA(), *(SDPABackend(name) for name in SDPA_BACKENDS)]


@dataclass(frozen=True, slots=True)
class SDPACall:
    """One scaled_dot_product_attention call that a model made, with its own tensors."""

    q_len: int
    k_len: int
    is_causal: bool
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Shape, stride and dtype of every tensor: calls with one key cost the same."""
        tensors = [*self.arguments, *self.options.values()]
        return tuple((t.shape, t.stride(), t.dtype) if hasattr(t, "stride") else str(t) for t in tensors)

    def time(self, backend: str | None) -> float:
        """Device time in ms of the call alone on one backend, or on the default choice.

        Raises:
            StepRefused: the backend does not take this call.
        """
        import contextlib

        import torch
        from torch.nn.attention import sdpa_kernel

        def work() -> Any:
            scope = contextlib.nullcontext() if backend is None else sdpa_kernel(_backend(backend))
            with torch.no_grad(), scope:
                return torch.nn.functional.scaled_dot_product_attention(*self.arguments, **self.options)

        try:
            work()
        except RuntimeError as error:
            raise StepRefused(f"does not take the model's calls: {str(error).splitlines()[0]}") from error
        return device_time(work)


def _watch_class() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    class CausalWatch(TorchFunctionMode):
        """Records every scaled_dot_product_attention call made inside."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[SDPACall] = []

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.nn.functional.scaled_dot_product_attention:
                query = args[0] if args else kwargs["query"]
                key = args[1] if len(args) > 1 else kwargs["key"]
                is_causal = bool(args[5] if len(args) > 5 else kwargs.get("is_causal", False))
                self.calls.append(SDPACall(query.shape[-2], key.shape[-2], is_causal, args, kwargs))
            return func(*args, **kwargs)

    return CausalWatch


def watch_sdpa(model: nn.Module, inputs: list[Inputs]) -> list[SDPACall]:
    """Run an uncompiled model on copies of the inputs; returns its SDPA calls."""
    import torch

    calls: list[SDPACall] = []
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
        calls = watch_sdpa(model, inputs)
        return {(call.q_len, call.k_len) for call in calls if call.is_causal and call.q_len != call.k_len}

    introduced = misaligned(candidate) - misaligned(original)
    if introduced:
        q_len, k_len = sorted(introduced)[0]
        raise StepRefused(
            f"it would call scaled_dot_product_attention with is_causal=True for q_len {q_len} and k_len {k_len}: "
            "PyTorch aligns that mask upper-left, so the last query would not see the last key"
        )

"""wavecrest inside vLLM: the plugin that vLLM loads, layers and IR implementations on wavecrest's ops.

Written against vLLM 0.33.0 (commit 4ba787ec9). Nothing is replaced unless the user names it: layers by the variable
WAVECREST_VLLM, attention by `--attention-backend CUSTOM`, IR implementations by `--ir-op-priority`, which vLLM drops in
0.34.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from wavecrest import env, ops
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.integrations._paged import Batch, attend

logger = logging.getLogger("wavecrest.integrations.vllm")

# the methods of a vLLM layer, one a platform
FORWARDS = ("forward_cuda", "forward_hip", "forward_xpu", "forward_cpu", "forward_oot")
# vLLM imports the class by this path
ATTENTION = f"{__name__}.AttentionBackend"
# columns that share a scale in quantize_fp8
GROUP = 128

# a layer's forward on wavecrest's ops: (layer, vLLM's method for other calls, *arguments)
Compute = Callable[..., Any]


# the operations of a compiled graph: vLLM traces layers with fake tensors, and a backend is chosen for real ones
@torch.library.custom_op("wavecrest::vllm_rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return ops.rms_norm(x, weight, epsilon)


@torch.library.custom_op("wavecrest::vllm_add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(x, residual, weight, epsilon)


@torch.library.custom_op("wavecrest::vllm_layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return ops.layer_norm(x, weight, bias, epsilon)


@torch.library.custom_op("wavecrest::vllm_gated", mutates_args=())
def _gated(x: Tensor, activation: str) -> Tensor:
    return ops.silu_and_mul(x) if activation == "silu" else ops.gelu_and_mul(x, approximate=activation)


@torch.library.custom_op("wavecrest::vllm_rope", mutates_args=())
def _rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, style: str) -> Tensor:
    return ops.rope(x, cos, sin, positions, style)


@torch.library.custom_op("wavecrest::vllm_quantize_fp8", mutates_args=())
def _quantize_fp8(x: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return ops.quantize_fp8(x, None, granularity, dtype)


@torch.library.custom_op("wavecrest::vllm_scaled_fp8", mutates_args=())
def _scaled_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return ops.quantize_fp8(x, scale.float().reshape(()), "tensor", dtype)[0]


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _scales_of(x: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    columns = {"token": 1, "group": -(-x.shape[-1] // GROUP)}.get(granularity)
    shape = () if columns is None else (*x.shape[:-1], columns)
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(shape, dtype=torch.float32, device=x.device)


_rms_norm.register_fake(_like)
_add_rms_norm.register_fake(lambda x, *_: (_like(x), _like(x)))
_layer_norm.register_fake(_like)
_gated.register_fake(lambda x, _: torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device))
_rope.register_fake(lambda x, *_: torch.empty_like(x))
_quantize_fp8.register_fake(_scales_of)
_scaled_fp8.register_fake(lambda x, scale, dtype: torch.empty(x.shape, dtype=dtype, device=x.device))


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """`vllm.ir.ops.rms_norm`: x [..., N] normalized by its mean square, times weight [N]; x's dtype."""
    y: Tensor = _rms_norm(x, weight, epsilon)
    return y


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """`vllm.ir.ops.fused_add_rms_norm`: (rms_norm(h), h) with h = x + x_residual [..., N]; both of x's dtype.

    vLLM normalizes the sum before it is rounded to x's dtype, wavecrest the rounded one.
    """
    both: tuple[Tensor, Tensor] = _add_rms_norm(x, x_residual, weight, epsilon)
    return both


def takes_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """True for the calls that `rms_norm` takes: the mean square is that of the whole row."""
    return variance_size is None and x.dtype.is_floating_point


def takes_fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """True for the calls that `fused_add_rms_norm` takes."""
    return variance_size is None and x.dtype.is_floating_point and x.dtype == x_residual.dtype


# operations of vLLM IR: the implementation, and which calls it takes
IMPLEMENTATIONS = {
    "rms_norm": (rms_norm, takes_rms_norm),
    "fused_add_rms_norm": (fused_add_rms_norm, takes_fused_add_rms_norm),
}


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    return _rms_norm(x, weight, epsilon) if residual is None else _add_rms_norm(x, residual, weight, epsilon)


def _rms_norm_layer(layer: Any, theirs: Compute, x: Tensor, residual: Tensor | None = None) -> Any:
    if layer.variance_size_override is not None:
        return theirs(layer, x, residual)
    return _norm(x, residual, layer.weight.data if layer.has_weight else None, layer.variance_epsilon)


def _gemma_rms_norm_layer(layer: Any, theirs: Compute, x: Tensor, residual: Tensor | None = None) -> Any:
    return _norm(x, residual, layer.weight.data.float() + 1.0, layer.variance_epsilon)


def _layer_norm_layer(layer: Any, theirs: Compute, x: Tensor) -> Any:
    return _layer_norm(x, layer.weight, layer.bias, layer.eps)


def _silu_and_mul_layer(layer: Any, theirs: Compute, x: Tensor) -> Any:
    return _gated(x, "silu")


def _gelu_and_mul_layer(layer: Any, theirs: Compute, x: Tensor) -> Any:
    return _gated(x, layer.approximate)


def _rotary_layer(layer: Any, theirs: Compute, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    cos, sin = layer._match_cos_sin_cache_dtype(query).chunk(2, dim=-1)
    places = positions.flatten()
    style = "neox" if layer.is_neox_style else "gptj"

    def turned(x: Tensor) -> Tensor:
        heads: Tensor = _rope(x.view(places.shape[0], -1, layer.head_size), cos, sin, places, style)
        return heads.reshape(x.shape)

    return turned(query), None if key is None else turned(key)


def _quantize_layer(
    layer: Any,
    theirs: Compute,
    x: Tensor,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    use_triton: bool = False,
) -> Any:
    """Scales are max |x| / 448 as vLLM's, but not held at 1 / (448 · 512) or more: rows below 1 / 512 are finer."""
    dtype = importlib.import_module("vllm.platforms").current_platform.fp8_dtype()
    group = layer.group_shape.is_per_group()
    # in e4m3fnuz vLLM scales to 224, wavecrest to its largest value, 240
    if dtype != torch.float8_e4m3fn or layer.num_token_padding is not None or scale_ub is not None:
        return theirs(layer, x, scale, scale_ub)
    if group and (
        layer.group_size != GROUP or layer.column_major_scales or layer.use_ue8m0 or layer.tma_aligned_scales
    ):
        return theirs(layer, x, scale, scale_ub)
    if layer.static:
        if scale is None or scale.numel() != 1:
            return theirs(layer, x, scale, scale_ub)
        return _scaled_fp8(x, scale, dtype), scale
    per_tensor = layer.group_shape.is_per_tensor()
    q, made = _quantize_fp8(x, "group" if group else "tensor" if per_tensor else "token", dtype)
    return q, made.reshape(1) if per_tensor else made


class Layer(NamedTuple):
    """A layer of vLLM: its module, its classes, and its forward on wavecrest's ops."""

    module: str
    classes: tuple[str, ...]
    compute: Compute


_LAYERS = "vllm.model_executor.layers"
# subclasses of RotaryEmbedding that differ in their tables alone
_ROTARY = (
    "RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding", "NTKScalingRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding", "DynamicNTKAlphaRotaryEmbedding", "YaRNScalingRotaryEmbedding",
)  # fmt: skip
# by the names that vLLM's `custom_ops` has for them
LAYERS = {
    "rms_norm": Layer(f"{_LAYERS}.layernorm", ("RMSNorm",), _rms_norm_layer),
    "gemma_rms_norm": Layer(f"{_LAYERS}.layernorm", ("GemmaRMSNorm",), _gemma_rms_norm_layer),
    "layer_norm": Layer(f"{_LAYERS}.layernorm", ("LayerNorm",), _layer_norm_layer),
    "silu_and_mul": Layer(f"{_LAYERS}.activation", ("SiluAndMul",), _silu_and_mul_layer),
    "gelu_and_mul": Layer(f"{_LAYERS}.activation", ("GeluAndMul",), _gelu_and_mul_layer),
    "rotary_embedding": Layer(f"{_LAYERS}.rotary_embedding", _ROTARY, _rotary_layer),
    "quant_fp8": Layer(f"{_LAYERS}.quantization.input_quant_fp8", ("QuantFP8",), _quantize_layer),
}


def _named_layers() -> list[str]:
    """The layers that WAVECREST_VLLM names.

    Raises:
        InvalidArgument: there is no layer of a name.
    """
    names = [name.strip() for name in env.get("WAVECREST_VLLM").split(",") if name.strip()]
    if names == ["all"]:
        return list(LAYERS)
    unknown = [name for name in names if name not in LAYERS]
    if unknown:
        raise InvalidArgument(f"WAVECREST_VLLM: no layer {', '.join(unknown)}; use all, or some of {', '.join(LAYERS)}")
    return names


def _over(theirs: Compute, compute: Compute) -> Compute:
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return compute(self, theirs, *args, **options)

    return forward


def _enabled(cls: Any) -> bool:
    """The variable enables a layer also where vLLM leaves its own to Inductor; `custom_ops` can disable it."""
    config = importlib.import_module("vllm.config").get_cached_compilation_config()
    return f"-{cls.name}" not in config.custom_ops


def _classes(layer: Layer) -> Iterator[type]:
    module = importlib.import_module(layer.module)
    base = getattr(module, layer.classes[0])
    for name in layer.classes:
        found = getattr(module, name, None)
        # a class with arithmetic of its own stays vLLM's
        if found is not None and found.forward_native is base.forward_native:
            yield found


def _register_layers(names: list[str]) -> None:
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    for name in names:
        for theirs in _classes(LAYERS[name]):
            if theirs.__name__ in custom_op.op_registry_oot:
                if custom_op.op_registry_oot[theirs.__name__].__module__ != __name__:
                    logger.warning("vLLM's %s stays what another plugin made of it", theirs.__name__)
                continue
            members: dict[str, Any] = {
                method: _over(getattr(theirs, method), LAYERS[name].compute) for method in FORWARDS
            }
            made = type(
                theirs.__name__, (theirs,), {**members, "enabled": classmethod(_enabled), "__module__": __name__}
            )
            custom_op.CustomOp.register_oot(made, name=theirs.__name__)
            # registration sets the class's name, which `custom_ops` does not know
            made.name = name  # type: ignore[attr-defined]
            logger.info("vLLM's %s runs on wavecrest", theirs.__name__)


def _register_implementations() -> None:
    try:
        registered = importlib.import_module("vllm.ir").ops
    except ImportError:
        # vLLM 0.34 has no IR
        return
    for name, (run, takes) in IMPLEMENTATIONS.items():
        op = getattr(registered, name, None)
        if op is not None and "wavecrest" not in op.impls:
            op.register_impl("wavecrest", supports_args=takes)(run)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The part that all attention layers of a batch share; vLLM reads `num_actual_tokens`."""

    batch: Batch
    num_actual_tokens: int


def _implementation(base: type) -> type:
    """The class that computes attention of a layer, a subclass of vLLM's AttentionImpl."""

    class AttentionImpl(base):  # type: ignore[misc]
        """Decoder attention of one layer on `flash_decoding` and `flash_attention`."""

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int | None = None,
            alibi_slopes: list[float] | None = None,
            sliding_window: int | None = None,
            kv_cache_dtype: str = "auto",
            logits_soft_cap: float | None = None,
            attn_type: str = "decoder",
            kv_sharing_target_layer_name: str | None = None,
            sinks: Tensor | None = None,
        ) -> None:
            if attn_type != "decoder":
                raise Unsupported(f"wavecrest's attention backend for vLLM takes decoders, not {attn_type}")
            self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
            self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
            self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
            self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
            # vLLM counts the query's own key
            self.window = -1 if sliding_window is None else sliding_window - 1
            self.softcap = logits_soft_cap or 0.0
            self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
            self.sinks = sinks

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: AttentionMetadata | None,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            """Attention of query [tokens, Hq, D] over kv_cache [pages, Hk, page, 2 · D], into output."""
            if output_scale is not None or output_block_scale is not None:
                raise Unsupported("wavecrest's attention backend for vLLM does not quantize its output")
            if attn_metadata is None:
                # a run that measures memory has no requests
                return output.zero_()
            if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
                self.alibi_slopes = self.alibi_slopes.to(query.device)
            tokens = attn_metadata.num_actual_tokens
            shares = self.kv_sharing_target_layer_name is not None or key is None
            k_cache, v_cache = torch.split(kv_cache.transpose(1, 2), self.head_size, dim=-1)
            new = None if shares else (key[:tokens], value[:tokens])
            found = attend(
                attn_metadata.batch, query[:tokens], new, k_cache, v_cache, softmax_scale=self.scale,
                window=self.window, softcap=self.softcap, alibi_slopes=self.alibi_slopes, sinks=self.sinks,
            )  # fmt: skip
            # a padded batch has requests without queries behind the others
            output[: len(found)].copy_(found.view(len(found), *output.shape[1:]))
            return output

    return AttentionImpl


@cache
def _attention_backend() -> type:
    """The class that `--attention-backend CUSTOM` names."""
    interface = importlib.import_module("vllm.v1.attention.backend")
    implementation = _implementation(interface.AttentionImpl)

    class Builder(interface.AttentionMetadataBuilder):  # type: ignore[misc, name-defined]
        """Makes a batch's metadata; decoding requests come first."""

        _cudagraph_support = interface.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        reorder_batch_threshold = 1

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.page = kv_cache_spec.block_size

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> AttentionMetadata:
            """The metadata of a batch from what vLLM's backends share."""
            common = common_attn_metadata
            if common.causal is not True:
                raise Unsupported("wavecrest's attention backend for vLLM takes causal attention")
            lengths = common.seq_lens_cpu_upper_bound
            batch = Batch.of(
                common.query_start_loc_cpu, common.seq_lens.cpu() if lengths is None else lengths, common.seq_lens,
                common.block_table_tensor, common.slot_mapping, self.page,
            )  # fmt: skip
            return AttentionMetadata(batch, common.num_actual_tokens)

    class AttentionBackend(interface.AttentionBackend):  # type: ignore[misc, name-defined]
        """Decoder attention over paged caches of 16 and 32 bits."""

        supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
        # flash_decoding writes keys and values and attends in one call
        forward_includes_kv_cache_update = True

        @staticmethod
        def get_name() -> str:
            """The member of vLLM's enumeration for backends from elsewhere."""
            return "CUSTOM"

        @staticmethod
        def get_impl_cls() -> type:
            """The class of a layer's attention."""
            return implementation

        @staticmethod
        def get_builder_cls() -> type:
            """The class that makes metadata."""
            return Builder

        @classmethod
        def supports_head_size(cls, head_size: int) -> bool:
            """Up to 256, as the ops."""
            return 1 <= head_size <= 256

        @classmethod
        def supports_sliding_window(cls) -> bool:
            """Yes."""
            return True

        @classmethod
        def supports_sink(cls) -> bool:
            """Yes."""
            return True

        @classmethod
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            """No: requests are divided by their lengths on the host."""
            return False

    AttentionBackend.__module__, AttentionBackend.__qualname__ = __name__, "AttentionBackend"
    return AttentionBackend


def __getattr__(name: str) -> Any:
    """`AttentionBackend`, which vLLM asks for by its path: a subclass of vLLM's, made when it is asked for."""
    if name == "AttentionBackend":
        return _attention_backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register_attention() -> None:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    if registry.AttentionBackendEnum.CUSTOM.is_overridden():
        if registry.AttentionBackendEnum.CUSTOM.get_path() != ATTENTION:
            logger.warning("vLLM's attention backend CUSTOM stays another plugin's")
        return
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, ATTENTION)


def register() -> None:
    """Register wavecrest with vLLM; vLLM calls it in each of its processes (entry point `vllm.general_plugins`).

    Raises:
        InvalidArgument: WAVECREST_VLLM names a layer that there is not.
    """
    names = _named_layers()
    _register_implementations()
    _register_attention()
    if names and importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT:
        # the backend of a row op may depend on how many rows there are
        logger.warning("VLLM_BATCH_INVARIANT is set: vLLM's layers stay its own")
        return
    _register_layers(names)

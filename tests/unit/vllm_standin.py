"""The interface of vLLM 0.33.0 (commit 4ba787ec9) that `wavecrest.integrations.vllm` uses, for machines without vLLM.

Names, arguments, defaults and attributes are vLLM's; the arithmetic is written here, from the formulas. Where vLLM is
installed the tests run against it, and hold these signatures to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.library import infer_schema

from wavecrest.integrations import vllm as integration

# schemas of operations of vLLM IR
SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor",
    "fused_add_rms_norm": (
        "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, SymInt? variance_size=None) -> (Tensor, Tensor)"
    ),
}
# parameters of the layers' constructors and of forward_native
SIGNATURES = {
    "RMSNorm": (("hidden_size", "eps", "var_hidden_size", "has_weight", "dtype"), ("x", "residual")),
    "GemmaRMSNorm": (("hidden_size", "eps"), ("x", "residual")),
    "LayerNorm": (("hidden_size", "eps", "elementwise_affine", "bias", "dtype"), ("x",)),
    "SiluAndMul": (("compile_native",), ("x",)),
    "GeluAndMul": (("approximate",), ("x",)),
    "RotaryEmbedding": (
        ("head_size", "rotary_dim", "max_position_embeddings", "base", "is_neox_style", "dtype", "init_cache"),
        ("positions", "query", "key"),
    ),
    "QuantFP8": (
        (
            "static", "group_shape", "num_token_padding", "column_major_scales", "tma_aligned_scales", "use_ue8m0",
            "compile_native",
        ),
        ("x", "scale", "scale_ub", "use_triton"),
    ),
}  # fmt: skip


# parameters of attention, without self
ATTENTION = {
    "AttentionImpl.__init__": (
        "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
        "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
    ),
    "AttentionImpl.forward": (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale",
    ),
    "AttentionMetadataBuilder.__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    "AttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
    "AttentionBackend.supports_head_size": ("head_size",),
    "AttentionBackend.supports_sliding_window": (),
    "AttentionBackend.supports_sink": (),
    "AttentionBackend.supports_device_cpu_query_lens_mismatch": (),
    "AttentionBackend.get_name": (),
    "AttentionBackend.get_impl_cls": (),
    "AttentionBackend.get_builder_cls": (),
}  # fmt: skip
# fields of CommonAttentionMetadata that are read
COMMON = (
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
    "max_seq_len", "block_table_tensor", "slot_mapping", "causal", "seq_lens_cpu_upper_bound",
)  # fmt: skip


class IrOp:
    """An operation of vLLM IR that takes implementations of its own schema."""

    def __init__(self, name: str) -> None:
        self.schema, self.impls = SCHEMAS[name], {"native": SimpleNamespace(supports_args=None)}

    def register_impl(self, provider: str, *, supports_args: Callable[..., bool]) -> Callable[[Any], Any]:
        def add(run: Callable[..., Any]) -> Any:
            assert infer_schema(run, mutates_args=[]) == self.schema
            assert provider not in self.impls
            self.impls[provider] = SimpleNamespace(impl_fn=run, supports_args=supports_args)
            return self.impls[provider]

        return add


class CustomOp(nn.Module):
    """A layer that another package may replace, by its class's name; here every platform runs forward_native."""

    registry: ClassVar[dict[str, type]] = {}

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(CustomOp.registry.get(cls.__name__, cls))

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._forward_method = self.forward_cpu if self.enabled() else self.forward_native

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._forward_method(*args, **options)

    def forward_native(self, *args: Any) -> Any:
        raise NotImplementedError

    def forward_cpu(self, *args: Any) -> Any:
        return self.forward_native(*args)

    forward_cuda = forward_hip = forward_xpu = forward_oot = forward_cpu

    @classmethod
    def enabled(cls) -> bool:
        return False

    @staticmethod
    def register_oot(made: Any, name: str) -> Any:
        assert name not in CustomOp.registry
        made.name = name
        CustomOp.registry[name] = made
        return made


def _normed(x: Tensor, weight: Tensor | None, eps: float, columns: int | None = None) -> Tensor:
    wide = x.double()
    y = wide / (wide[..., :columns].square().mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight.double()).to(x.dtype)


class RMSNorm(CustomOp):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.has_weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), has_weight, eps
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        given = self.weight.data if self.has_weight else None
        h = x if residual is None else x + residual
        y = _normed(h, given, self.variance_epsilon, self.variance_size_override)
        return y if residual is None else (y, h)


class GemmaRMSNorm(CustomOp):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(hidden_size)), eps

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        h = x if residual is None else x + residual
        y = _normed(h, self.weight.data + 1, self.variance_epsilon)
        return y if residual is None else (y, h)


class LayerNorm(CustomOp):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if elementwise_affine and bias else None

    def forward_native(self, x: Tensor) -> Tensor:
        weight, bias = (None if one is None else one.float() for one in (self.weight, self.bias))
        return nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)


class SiluAndMul(CustomOp):
    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class GeluAndMul(CustomOp):
    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward_native(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.gelu(gate, approximate=self.approximate) * up


class RotaryEmbedding(CustomOp):
    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        init_cache: bool = True,
    ) -> None:
        super().__init__()
        self.head_size, self.is_neox_style = head_size, is_neox_style
        rates = base ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
        angles = torch.outer(torch.arange(max_position_embeddings).float(), rates)
        self.table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)

    def _match_cos_sin_cache_dtype(self, query: Tensor) -> Tensor:
        return self.table.to(query.dtype)

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        cos, sin = self.table.double()[positions.flatten()].unsqueeze(1).chunk(2, -1)
        half = cos.shape[-1]

        def turned(x: Tensor) -> Tensor:
            y = x.double().reshape(positions.numel(), -1, self.head_size).clone()
            one, two = (
                (y[..., :half].clone(), y[..., half : 2 * half].clone())
                if self.is_neox_style
                else (y[..., 0 : 2 * half : 2].clone(), y[..., 1 : 2 * half : 2].clone())
            )
            first, second = one * cos - two * sin, two * cos + one * sin
            if self.is_neox_style:
                y[..., :half], y[..., half : 2 * half] = first, second
            else:
                y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2] = first, second
            return y.reshape(x.shape).to(x.dtype)

        return turned(query), None if key is None else turned(key)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """As vLLM's: other angles, the same arithmetic."""


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """Unlike vLLM's: arithmetic of its own, which must stay."""

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return query, key


class GroupShape(tuple[int, int]):
    PER_TENSOR: Any
    PER_TOKEN: Any

    def __new__(cls, row: int, col: int) -> GroupShape:
        return super().__new__(cls, (row, col))

    def is_per_tensor(self) -> bool:
        return tuple(self) == (-1, -1)

    def is_per_token(self) -> bool:
        return tuple(self) == (1, -1)

    def is_per_group(self) -> bool:
        return self[0] == 1 and self[1] >= 1


GroupShape.PER_TENSOR, GroupShape.PER_TOKEN = GroupShape(-1, -1), GroupShape(1, -1)


class QuantFP8(CustomOp):
    def __init__(
        self,
        static: bool,
        group_shape: GroupShape,
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
        compile_native: bool = True,
    ) -> None:
        super().__init__()
        self.static, self.group_shape, self.num_token_padding = static, group_shape, num_token_padding
        self.column_major_scales, self.tma_aligned_scales = column_major_scales, tma_aligned_scales
        self.use_ue8m0 = bool(use_ue8m0)
        if group_shape.is_per_group():
            self.group_size = group_shape[1]

    def forward_native(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> tuple[Tensor, Tensor]:
        wide, per = x.float(), self.group_shape
        size = self.group_size if per.is_per_group() else x.shape[-1]
        grouped = wide.reshape(*x.shape[:-1], -1, size)
        if scale is None:
            largest = wide.abs().max().reshape(1) if per.is_per_tensor() else grouped.abs().amax(-1)
            scale = largest / 448
        q = (grouped / (scale if scale.numel() == 1 else scale.unsqueeze(-1))).clamp(-448, 448).reshape(x.shape)
        return q.to(torch.float8_e4m3fn), scale


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec


class AttentionEnum:
    """The member CUSTOM of vLLM's enumeration, whose path a plugin sets."""

    def __init__(self) -> None:
        self.path = ""

    def is_overridden(self) -> bool:
        return bool(self.path)

    def get_path(self) -> str:
        return self.path

    def get_class(self) -> Any:
        module, _, name = self.path.rpartition(".")
        return getattr(sys.modules[module], name)


def register_backend(backend: AttentionEnum, class_path: str) -> None:
    backend.path = class_path


def _module(name: str, **members: Any) -> tuple[str, ModuleType]:
    made = ModuleType(name)
    vars(made).update(members)
    return name, made


def install(patch: Any) -> None:
    """Put the stand-in in `sys.modules` under vLLM's names until `patch` is undone."""
    layers = "vllm.model_executor.layers"
    config = SimpleNamespace(custom_ops=["none"])
    operations = SimpleNamespace(**{name: IrOp(name) for name in SCHEMAS})
    patch.setattr(CustomOp, "registry", {})
    # the class that wavecrest derives from vLLM's, made once a process
    patch.setattr(integration, "_attention_backend", cache(integration._attention_backend.__wrapped__))
    common = make_dataclass("CommonAttentionMetadata", COMMON)
    support = SimpleNamespace(UNIFORM_SINGLE_TOKEN_DECODE="decode")
    attention = {
        "AttentionBackend": type("AttentionBackend", (), {}),
        "AttentionImpl": type("AttentionImpl", (), {}),
        "AttentionMetadataBuilder": AttentionMetadataBuilder,
        "AttentionCGSupport": support,
        "CommonAttentionMetadata": common,
    }
    enumeration = SimpleNamespace(CUSTOM=AttentionEnum())
    for name, made in (
        _module("vllm"),
        _module("vllm.ir", ops=operations),
        _module("vllm.envs", VLLM_BATCH_INVARIANT=False),
        _module("vllm.config", get_cached_compilation_config=lambda: config),
        _module("vllm.platforms", current_platform=SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)),
        _module("vllm.model_executor"),
        _module("vllm.model_executor.custom_op", CustomOp=CustomOp, op_registry_oot=CustomOp.registry),
        _module(layers),
        _module(f"{layers}.layernorm", RMSNorm=RMSNorm, GemmaRMSNorm=GemmaRMSNorm, LayerNorm=LayerNorm),
        _module(f"{layers}.activation", SiluAndMul=SiluAndMul, GeluAndMul=GeluAndMul),
        _module(
            f"{layers}.rotary_embedding",
            RotaryEmbedding=RotaryEmbedding,
            Llama3RotaryEmbedding=Llama3RotaryEmbedding,
            YaRNScalingRotaryEmbedding=YaRNScalingRotaryEmbedding,
        ),
        _module("vllm.v1"),
        _module("vllm.v1.attention"),
        _module("vllm.v1.attention.backend", **attention),
        _module("vllm.v1.attention.backends"),
        _module(
            "vllm.v1.attention.backends.registry", AttentionBackendEnum=enumeration, register_backend=register_backend
        ),
        _module(f"{layers}.quantization"),
        _module(f"{layers}.quantization.input_quant_fp8", QuantFP8=QuantFP8, GroupShape=GroupShape),
    ):
        patch.setitem(sys.modules, name, made)

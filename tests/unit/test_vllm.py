"""vLLM's layers and IR operations on wavecrest's ops, against vLLM's own arithmetic; a stand-in where it is missing."""

from __future__ import annotations

import importlib.util
import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit import vllm_standin
from tests.unit.paged_oracle import BATCHES, Requests
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.integrations import vllm as integration

REAL = importlib.util.find_spec("vllm") is not None
LAYERS = "vllm.model_executor.layers"


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """vLLM on its CPU platform, with every layer registered; the stand-in where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAVECREST_VLLM", "all")
        if not REAL:
            vllm_standin.install(patch)
            integration.register()
            yield importlib.import_module
            return
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        patch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
        from vllm.config import VllmConfig, set_current_vllm_config

        integration.register()
        with set_current_vllm_config(VllmConfig()):
            yield importlib.import_module


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    """Within vLLM's own tolerances for implementations (vllm/ir/tolerances.py)."""
    rtol, atol = {torch.float32: (1.3e-6, 1e-5), torch.float16: (2e-3, 1e-2), torch.bfloat16: (1.6e-2, 1e-3)}[dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm", "LayerNorm"])
def test_a_norm_is_vllms(library: Any, name: str, dtype: torch.dtype) -> None:
    layer = getattr(library(f"{LAYERS}.layernorm"), name)(96).to(dtype)
    layer.weight.data.copy_(values(96, dtype=dtype, seed=1))
    assert type(layer).__module__ == integration.__name__
    # a slice of wider rows, as the heads of q are
    x, residual = values(5, 2, 128, dtype=dtype)[..., :96], values(5, 2, 96, dtype=dtype, seed=2)
    close(layer(x), layer.forward_native(x), dtype)
    if name != "LayerNorm":
        before = x.clone(), residual.clone()
        found = layer(x, residual)
        # vLLM's may write to x and residual; wavecrest's must not
        assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
        close(found, layer.forward_native(x.clone(), residual.clone()), dtype)


def test_calls_that_wavecrest_does_not_take_stay_vllms(library: Any) -> None:
    layer = library(f"{LAYERS}.layernorm").RMSNorm(96, var_hidden_size=32)
    x = values(5, 96, dtype=torch.float32)
    assert torch.equal(layer(x), layer.forward_native(x))
    module = library(f"{LAYERS}.quantization.input_quant_fp8")
    layer = module.QuantFP8(False, module.GroupShape(1, 64), use_ue8m0=False)
    for found, wanted in zip(layer(values(4, 256)), layer.forward_native(values(4, 256)), strict=True):
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("approximate", ["silu", "none", "tanh"])
def test_a_gated_activation_is_vllms(library: Any, approximate: str) -> None:
    module = library(f"{LAYERS}.activation")
    layer = module.SiluAndMul() if approximate == "silu" else module.GeluAndMul(approximate)
    assert type(layer).__module__ == integration.__name__
    # not in bfloat16, where both forms of GELU are within the tolerance
    x = values(3, 2, 160, dtype=torch.float32)
    close(layer(x), layer.forward_native(x), torch.float32)


@pytest.mark.parametrize("neox", [True, False])
def test_rotated_queries_and_keys_are_vllms(library: Any, neox: bool) -> None:
    layer = library(f"{LAYERS}.rotary_embedding").RotaryEmbedding(32, 24, 64, 10000.0, neox, torch.float32)
    assert type(layer).__module__ == integration.__name__
    both = values(7, 192, dtype=torch.float32)
    # views of the fused projection, as models pass them
    query, key, positions = both[:, :128], both[:, 128:], torch.tensor([0, 63, 5, 5, 1, 2, 62])
    close(layer(positions, query, key), layer.forward_native(positions, query.clone(), key.clone()), torch.float32)
    alone = layer(positions, query)
    assert alone[1] is None
    close(alone[0], layer(positions, query, key)[0], torch.float32)


def test_a_rotary_class_with_arithmetic_of_its_own_stays(library: Any) -> None:
    registry = library("vllm.model_executor.custom_op").op_registry_oot
    assert {"RotaryEmbedding", "Llama3RotaryEmbedding"} <= set(registry)
    # the stand-in's has arithmetic of its own, vLLM's has other tables alone
    assert ("YaRNScalingRotaryEmbedding" in registry) == REAL


@pytest.mark.parametrize("form", ["token", "tensor", "group", "static"])
def test_quantized_rows_are_vllms(library: Any, form: str) -> None:
    module = library(f"{LAYERS}.quantization.input_quant_fp8")
    shapes = {"token": module.GroupShape.PER_TOKEN, "group": module.GroupShape(1, 128)}
    layer = module.QuantFP8(form == "static", shapes.get(form, module.GroupShape.PER_TENSOR), use_ue8m0=False)
    assert type(layer).__module__ == integration.__name__
    x, scale = values(6, 256) * 3, torch.tensor([0.01]) if form == "static" else None
    found, wanted = layer(x, scale), layer.forward_native(x, scale)
    assert found[0].dtype == wanted[0].dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found[1].reshape(-1), wanted[1].reshape(-1), rtol=1e-6, atol=0)
    assert found[1].numel() == 1 or found[1].shape == wanted[1].shape
    # a division and a product with the reciprocal may round to neighbours
    assert (found[0].float() != wanted[0].float()).float().mean() < 0.01
    torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=0.13, atol=0.01)


def test_implementations_of_the_ir_have_its_schemas_and_answers(library: Any) -> None:
    operations = library("vllm.ir").ops
    x, residual, weight = values(5, 64), values(5, 64, seed=1), values(64, seed=2)
    found = operations.rms_norm.impls["wavecrest"].impl_fn(x, weight, 1e-5)
    close(found, vllm_standin._normed(x, weight, 1e-5), torch.bfloat16)
    y, h = operations.fused_add_rms_norm.impls["wavecrest"].impl_fn(x, residual, weight, 1e-5)
    close((y, h), (vllm_standin._normed(x + residual, weight, 1e-5), x + residual), torch.bfloat16)
    assert operations.rms_norm.impls["wavecrest"].supports_args(x, weight, 1e-5)
    assert not operations.rms_norm.impls["wavecrest"].supports_args(x, weight, 1e-5, 32)
    assert not operations.fused_add_rms_norm.impls["wavecrest"].supports_args(x, residual.float(), weight, 1e-5)


def test_the_pinned_interface_is_vllms(library: Any) -> None:
    for name, schema in vllm_standin.SCHEMAS.items():
        run, takes = integration.IMPLEMENTATIONS[name]
        assert torch.library.infer_schema(run, mutates_args=[]) == schema
        assert [*inspect.signature(takes).parameters] == [*inspect.signature(run).parameters]
        if REAL:
            assert getattr(library("vllm.ir").ops, name)._schema_str == schema
    for layer in integration.LAYERS.values():
        theirs = getattr(library(layer.module), layer.classes[0])
        init, native = vllm_standin.SIGNATURES[theirs.__name__]
        assert tuple(inspect.signature(theirs.__init__).parameters)[1:] == init
        assert tuple(name for name in inspect.signature(theirs.forward_native).parameters if name != "self") == native


def test_the_pinned_attention_interface_is_vllms(library: Any) -> None:
    """Methods take what vLLM passes, in its order; further parameters have defaults."""
    interface = library("vllm.v1.attention.backend")
    backend = integration.AttentionBackend
    ours = {
        "AttentionBackend": backend,
        "AttentionImpl": backend.get_impl_cls(),
        "AttentionMetadataBuilder": backend.get_builder_cls(),
    }
    for path, names in vllm_standin.ATTENTION.items():
        kind, method = path.split(".")
        found = inspect.signature(getattr(ours[kind], method)).parameters
        assert tuple(name for name in found if name != "self")[: len(names)] == names, path
        if REAL:
            theirs = inspect.signature(getattr(getattr(interface, kind), method)).parameters
            assert tuple(name for name in theirs if name not in ("self", "args", "kwargs")) == names, path
    theirs = {field.name for field in fields(interface.CommonAttentionMetadata)}
    assert set(vllm_standin.COMMON) <= theirs


def test_vllm_finds_the_attention_backend(library: Any) -> None:
    member = library("vllm.v1.attention.backends.registry").AttentionBackendEnum.CUSTOM
    assert member.get_class() is integration.AttentionBackend
    assert f"{member.get_class().__module__}.{member.get_class().__qualname__}" == member.get_path()
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        integration.Other  # noqa: B018
    if REAL:
        accepted = {"use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False}
        given = {"kv_cache_dtype": "auto", "block_size": 16, "use_per_head_quant_scales": False, "attn_type": "decoder"}
        check = integration.AttentionBackend.validate_configuration
        assert check(
            128, torch.bfloat16, device_capability=None, has_sliding_window=True, **accepted, **given
        ) == []  # fmt: skip
        given["kv_cache_dtype"] = "fp8"
        assert check(512, torch.bfloat16, device_capability=None, **accepted, **given) == [
            "head_size not supported", "kv_cache_dtype not supported",
        ]  # fmt: skip


def metadata_of(library: Any, requests: Requests, bound: bool = True) -> Any:
    common = library("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=requests.starts,
        query_start_loc_cpu=requests.starts,
        seq_lens=requests.seq_lens,
        num_reqs=len(requests.queries),
        num_actual_tokens=sum(requests.queries),
        max_query_len=max(requests.queries),
        max_seq_len=int(requests.seq_lens.max()),
        block_table_tensor=requests.block_table,
        slot_mapping=requests.slots,
        causal=True,
        # asynchronous speculation knows on the host only how many there may be
        seq_lens_cpu_upper_bound=requests.seq_lens + 2 if bound else None,
    )
    kind = integration.AttentionBackend.get_builder_cls()
    spec = type("Spec", (), {"block_size": requests.page})()
    return kind(spec, ["layer"], None, torch.device("cpu")).build(0, common)


@pytest.mark.parametrize("kind", BATCHES)
def test_attention_of_a_batch(library: Any, kind: str) -> None:
    requests = Requests(*BATCHES[kind], heads=4, kv_heads=2, head_dim=16, page=8)
    make = integration.AttentionBackend.get_impl_cls()
    # a window of vLLM's counts the query's own key
    layer = make(4, 16, 0.25, 2, None, sliding_window=5, logits_soft_cap=3.0)
    tokens = len(requests.q)
    # two tokens more than there are: padding of a graph
    padded = [torch.cat([one, torch.full_like(one[:2], 9.0)]) for one in (requests.q, requests.k, requests.v)]
    output = torch.full((tokens + 2, 4, 16), 5.0)
    # heads before places, as vLLM's default layout has them
    cache = requests.cache.transpose(1, 2)
    found = layer.forward(None, *padded, cache, metadata_of(library, requests), output)
    assert found is output
    torch.testing.assert_close(output[:tokens].double(), requests.attended(4, 3.0), rtol=1e-5, atol=1e-5)
    assert bool((output[tokens:] == 5.0).all())
    assert torch.equal(requests.written().double(), torch.cat(requests.keys))
    # a layer that shares the cache of another has no keys to write
    sharing = make(4, 16, 0.25, 2, None, 5, "auto", 3.0, kv_sharing_target_layer_name="other")
    again = sharing.forward(
        None, padded[0], None, None, cache, metadata_of(library, requests, False), torch.zeros_like(output)
    )
    torch.testing.assert_close(again[:tokens], output[:tokens])


def test_what_attention_does_not_take_is_refused(library: Any) -> None:
    requests = Requests(*BATCHES["decode"], heads=4, kv_heads=2, head_dim=16, page=8)
    make = integration.AttentionBackend.get_impl_cls()
    with pytest.raises(Unsupported, match="takes decoders, not encoder_only"):
        make(4, 16, 0.25, 2, attn_type="encoder_only")
    layer, output = make(4, 16, 0.25, 2), torch.ones(4, 64)
    with pytest.raises(Unsupported, match="does not quantize its output"):
        layer.forward(None, requests.q, None, None, requests.cache, None, output, torch.ones(1))
    # a run that measures memory
    assert not layer.forward(None, requests.q, None, None, requests.cache, None, output).any()


def test_operations_can_be_traced() -> None:
    x, weight, table = values(3, 128), values(128, seed=1), values(8, 16, dtype=torch.float32)
    checks = ("test_schema", "test_faketensor")
    for operation, arguments in (
        (integration._rms_norm, (x[:, :64], None, 1e-6)),
        (integration._add_rms_norm, (x, x.clone(), weight, 1e-6)),
        (integration._layer_norm, (x, weight, None, 1e-6)),
        (integration._gated, (x, "tanh")),
        (integration._rope, (x.view(3, 4, 32), table, table.clone(), torch.arange(3), "neox")),
        (integration._quantize_fp8, (x, "group", torch.float8_e4m3fn)),
        (integration._quantize_fp8, (x, "token", torch.float8_e4m3fn)),
        (integration._quantize_fp8, (x, "tensor", torch.float8_e4m3fn)),
        (integration._scaled_fp8, (x, torch.tensor([0.5]), torch.float8_e4m3fn)),
    ):
        torch.library.opcheck(operation, arguments, test_utils=checks)


def test_a_compiled_layer_is_one_operation(library: Any) -> None:
    layer = library(f"{LAYERS}.activation").SiluAndMul()
    graphs = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    x = values(3, 64)
    found = torch.compile(layer, backend=keep, fullgraph=True, dynamic=True)(x)
    assert graphs == [["wavecrest.vllm_gated.default"]]
    assert torch.equal(found, layer(x))


def test_registering_twice_changes_nothing(library: Any) -> None:
    registry = dict(library("vllm.model_executor.custom_op").op_registry_oot)
    integration.register()
    assert library("vllm.model_executor.custom_op").op_registry_oot == registry


def test_layers_are_vllms_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_standin.install(monkeypatch)
    monkeypatch.delenv("WAVECREST_VLLM", raising=False)
    integration.register()
    assert not vllm_standin.CustomOp.registry
    monkeypatch.setenv("WAVECREST_VLLM", "silu_and_mul, layer_norm")
    # of another plugin, which was first
    vllm_standin.CustomOp.register_oot(type("LayerNorm", (vllm_standin.LayerNorm,), {}), name="LayerNorm")
    integration.register()
    assert set(vllm_standin.CustomOp.registry) == {"SiluAndMul", "LayerNorm"}
    assert vllm_standin.CustomOp.registry["LayerNorm"].__module__ != integration.__name__
    assert type(vllm_standin.SiluAndMul()).name == "silu_and_mul"  # type: ignore[attr-defined]
    importlib.import_module("vllm.config").get_cached_compilation_config().custom_ops.append("-silu_and_mul")
    assert vllm_standin.SiluAndMul()._forward_method == vllm_standin.SiluAndMul.forward_native


def test_batch_invariance_leaves_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_standin.install(monkeypatch)
    monkeypatch.setenv("WAVECREST_VLLM", "all")
    monkeypatch.setattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", True)
    integration.register()
    assert not vllm_standin.CustomOp.registry


def test_e4m3fnuz_stays_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_standin.install(monkeypatch)
    monkeypatch.setenv("WAVECREST_VLLM", "quant_fp8")
    integration.register()
    platform = importlib.import_module("vllm.platforms").current_platform
    monkeypatch.setattr(platform, "fp8_dtype", lambda: torch.float8_e4m3fnuz)
    # the stand-in knows e4m3fn alone: its result shows that it ran
    layer = vllm_standin.QuantFP8(False, vllm_standin.GroupShape.PER_TOKEN)
    assert layer(values(4, 128))[0].dtype == torch.float8_e4m3fn


def test_an_unknown_layer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVECREST_VLLM", "rms_norm,rope")
    with pytest.raises(InvalidArgument, match="no layer rope; use all, or some of rms_norm"):
        integration.register()


def test_vllm_finds_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    target = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]["wavecrest"]
    assert target == f"{integration.__name__}:{integration.register.__name__}"

"""Every example of the two guides runs, on this machine's device and in small sizes, and gives PyTorch's values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wavecrest
from wavecrest import env, hardware, settings
from wavecrest.compat import aiter, xlstm
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import Device
from wavecrest.models.xlstm import xLSTMLarge, xLSTMLargeConfig


@pytest.fixture(autouse=True)
def _settings_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in settings.FOLDERS:
        monkeypatch.setenv(name, env.get(name, "/nowhere"))
    before = settings.current()
    handler, level, handlers = settings.STATE.handler, settings.logger.level, list(settings.logger.handlers)
    static = torch._dynamo.config.assume_static_by_default
    yield
    torch._dynamo.config.assume_static_by_default = static
    settings.update(precision=before.precision)
    settings.STATE.log_level, settings.STATE.handler = before.log_level, handler
    settings.STATE.cache_dir, settings.STATE.cache_size = before.cache_dir, before.cache_size
    settings.logger.setLevel(level)
    settings.logger.handlers[:] = handlers


def _close(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-4)


def test_every_name_is_at_the_top_level() -> None:
    own = {"quantize", "register_kernel", "attention"}
    for name in aiter.__all__:
        assert name in wavecrest.__all__ and (getattr(wavecrest, name) is getattr(aiter, name)) is (name not in own)


def test_the_installation_is_verified(device: str) -> None:
    assert aiter.__version__ == wavecrest.__version__
    x = torch.randn(10, 10, device=device)
    assert _close(aiter.matmul(x, x), x @ x)


def test_the_configuration_has_its_effects(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    aiter.set_log_level("INFO")
    aiter.set_cache_size(1024)
    aiter.enable_fusion(True)
    aiter.enable_tensor_cores(True)
    now = settings.current()
    assert (now.log_level, now.precision, now.cache_size) == ("info", "tf32", 1024)
    assert now.cache_dir == tmp_path / "wavecrest" / "kernels" and logging.getLogger("wavecrest").level == logging.INFO
    aiter.set_default_precision("FP16")
    aiter.enable_tensor_cores(True)
    assert settings.current().precision == "fp16"
    aiter.enable_tensor_cores(False)
    assert settings.current().precision == "ieee"


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(Unsupported, match="leave out activation"):
        aiter.enable_fusion(False)
    with pytest.raises(InvalidArgument, match="FP32, TF32, BF16, FP16, not 'INT8'"):
        aiter.set_default_precision("INT8")
    with pytest.raises(InvalidArgument, match="'verbose'"):
        aiter.set_log_level("VERBOSE")
    with pytest.raises(InvalidArgument, match="takes a function, got int"):
        aiter.register_kernel(3)  # type: ignore[type-var]


def test_the_basic_operations(device: str) -> None:
    x, y = torch.randn(32, 32, device=device), torch.randn(32, 32, device=device)
    assert _close(aiter.matmul(x, y), x @ y)
    image, weight = torch.randn(2, 3, 14, 14, device=device), torch.randn(8, 3, 3, 3, device=device)
    assert _close(aiter.conv2d(image, weight, stride=1, padding=1), F.conv2d(image, weight, stride=1, padding=1))
    q, k, v = (torch.randn(2, 4, 16, 8, device=device) for _ in range(3))
    assert _close(aiter.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


class AITERConv2d(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.stride = stride
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        return aiter.conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


class AITERLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return aiter.linear(x, self.weight, self.bias)


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = AITERConv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.linear = AITERLinear(8 * 12 * 12, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.conv(x)
        x = self.relu(x)
        x = x.view(x.size(0), -1)
        return self.linear(x)


def test_the_integration_with_pytorch(device: str) -> None:
    torch.manual_seed(0)
    model, image = SimpleModel().to(device), torch.randn(2, 3, 12, 12, device=device)
    output = model(image)
    plain = F.conv2d(image, model.conv.weight, model.conv.bias, padding=1).relu().flatten(1)
    assert torch.allclose(output, F.linear(plain, model.linear.weight, model.linear.bias), rtol=1e-4, atol=1e-3)
    output.sum().backward()
    assert model.conv.weight.grad is not None


class AITERAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, dropout_prob: float = 0.0) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Any:
        batch_size, seq_length = hidden_states.shape[:2]
        q = self.query(hidden_states)
        k = self.key(hidden_states)
        v = self.value(hidden_states)
        q = q.view(batch_size, seq_length, self.num_heads, self.head_size).transpose(1, 2)
        k = k.view(batch_size, seq_length, self.num_heads, self.head_size).transpose(1, 2)
        v = v.view(batch_size, seq_length, self.num_heads, self.head_size).transpose(1, 2)
        context_layer = aiter.attention(q, k, v, attention_mask)
        context_layer = context_layer.transpose(1, 2).contiguous()
        context_layer = context_layer.view(batch_size, seq_length, self.hidden_size)
        return self.dropout(self.output(context_layer))


@pytest.mark.parametrize("masked", [False, True])
def test_the_attention_module_is_our_own_with_the_same_state_dict(device: str, masked: bool) -> None:
    torch.manual_seed(0)
    theirs, x = AITERAttention(32, 4).to(device), torch.randn(2, 6, 32, device=device)
    ours = wavecrest.nn.Attention(32, 4).to(device)
    ours.load_state_dict(theirs.state_dict())
    mask = torch.zeros(2, 1, 1, 6, device=device).masked_fill(torch.arange(6, device=device) > 3, -1e4)
    given = mask if masked else None
    assert _close(theirs(x, given), ours(x, given))
    assert not masked or not _close(theirs(x, given), theirs(x))


@pytest.mark.parametrize("face", [aiter, wavecrest])
def test_a_custom_kernel_is_compiled(face: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    real = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        compiled.append(function)
        return real(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", counted)

    @face.register_kernel  # type: ignore[untyped-decorator]
    def custom_activation(x: Tensor) -> Tensor:
        return torch.pow(x, 2) * torch.sigmoid(x)

    x = torch.randn(10, 10, device=device)
    assert _close(custom_activation(x), x**2 * x.sigmoid()) and len(compiled) == 1


def test_a_function_of_no_op_takes_no_options_of_one() -> None:
    with pytest.raises(InvalidArgument, match=r'name the op first, as in @wavecrest\.register_kernel\("rms_norm"'):
        wavecrest.register_kernel(torch.relu, arch="gfx942")  # type: ignore[call-overload]


def test_the_guides_call_of_quantize_is_wavecrests_own(device: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device), torch.randn(8, 64)
    x = x.to(device)
    with torch.no_grad():
        wanted = model(x)
        quantized_model = wavecrest.quantize(model, dtype="int8")
        output = quantized_model(x)
        assert 0 < ((output - wanted).norm() / wanted.norm()).item() < 0.02
        quantized_model.restore()
        assert torch.equal(quantized_model(x), wanted)
    with pytest.raises(InvalidArgument, match="say the same"):
        wavecrest.quantize(model, "fp8", dtype="int8")


@pytest.mark.parametrize(("dtype", "limit"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.25)])
def test_a_model_is_quantized_and_the_original_is_not(device: str, dtype: str, limit: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    quantized_model, x = aiter.quantize(model, dtype=dtype), torch.randn(8, 64, device=device)
    with torch.no_grad():
        wanted, output = model(x), quantized_model(x)
    assert 0 < ((output - wanted).norm() / wanted.norm()).item() < limit
    assert all(type(model[place]) is nn.Linear for place in (0, 2)) and type(quantized_model[1]) is nn.ReLU
    assert quantized_model[0].bias is model[0].bias
    single = aiter.quantize(model[0], dtype=dtype)
    assert isinstance(single, wavecrest.nn.Linear)


def test_one_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(32, 32)
    made = aiter.quantize(nn.Sequential(layer, nn.Sequential(layer)))
    assert isinstance(made[0], wavecrest.nn.Linear) and made[0] is made[1][0]


def test_quantize_names_what_it_cannot() -> None:
    with pytest.raises(InvalidArgument, match="int8, int4, fp8, not 'fp16'"):
        aiter.quantize(nn.Linear(4, 4), "fp16")
    with pytest.raises(Unsupported, match=r"no nn\.Linear"):
        aiter.quantize(nn.ReLU())
    hooked = nn.Linear(32, 32)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="hooks"):
        aiter.quantize(nn.Sequential(hooked))


class DynamicModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return aiter.dynamic_conv2d(x, self.conv.weight, self.conv.bias, stride=1, padding=1)


def test_shapes_may_change(device: str) -> None:
    aiter.enable_dynamic_shapes(True)
    model = DynamicModel().to(device)
    for shape in ((4, 3, 12, 12), (8, 3, 6, 6)):
        x = torch.randn(shape, device=device)
        assert _close(model(x), model.conv(x))


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 2)])
def test_dynamic_shapes_are_one_graph(dynamic: bool, graphs: int) -> None:
    aiter.enable_dynamic_shapes(dynamic)
    seen: list[Any] = []

    def backend(module: Any, _inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    torch._dynamo.reset()
    work = torch.compile(lambda x: wavecrest.rms_norm(x) + 1, backend=backend)
    with torch.no_grad():
        for rows in (4, 7, 9):
            x = torch.randn(rows, 5)
            assert _close(work(x), F.rms_norm(x, (5,), eps=1e-6) + 1)
    assert len(seen) == graphs


def test_dynamic_shapes_are_a_context_too() -> None:
    torch._dynamo.config.assume_static_by_default = True
    with wavecrest.enable_dynamic_shapes():
        assert not torch._dynamo.config.assume_static_by_default
        with wavecrest.enable_dynamic_shapes(False):
            assert torch._dynamo.config.assume_static_by_default
        assert not torch._dynamo.config.assume_static_by_default
    assert torch._dynamo.config.assume_static_by_default


AMD = Device("cuda", 0, "gfx942", "AMD Instinct MI300X", 304, 206 * 10**9, "hip 7")


@pytest.mark.parametrize(
    ("device", "amd", "mi300x"),
    [
        (AMD, True, True),
        (Device("cuda", 0, "gfx942", "AMD Instinct MI300X", 38, 10**9, "hip 7"), True, False),
        (Device("cuda", 0, "gfx950", "AMD Instinct MI355X", 256, 10**9, "hip 7"), True, False),
        (Device("cuda", 0, "sm_90", "NVIDIA H200", 132, 10**9, "cuda 13"), False, False),
        (hardware.cpu(), False, False),
    ],
)
def test_detection_is_the_hardwares(device: Device, amd: bool, mi300x: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: device)
    assert (xlstm.is_amd_gpu(), xlstm.is_mi300x()) == (amd, mi300x)


@pytest.mark.parametrize(
    ("hip", "initialized", "made"),
    [("7.0", False, {"HSA_NO_SCRATCH_RECLAIM": "1"}), ("7.0", True, {}), (None, False, {})],
)
def test_optimizations_are_variables_set_before_the_gpu_is_used(
    hip: str | None, initialized: bool, made: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    # set and deleted, so that it is put back as it was
    monkeypatch.setenv("HSA_NO_SCRATCH_RECLAIM", "0")
    assert xlstm.enable_amd_optimizations() == {} and env.get("HSA_NO_SCRATCH_RECLAIM") == "0"
    monkeypatch.delenv("HSA_NO_SCRATCH_RECLAIM")
    assert xlstm.enable_amd_optimizations() == made and env.get("HSA_NO_SCRATCH_RECLAIM") == ("1" if made else "")


@pytest.mark.parametrize(
    ("batch", "tokens", "own"),
    [(1, 2048, False), (1, 4096, False), (2, 2048, True), (2, 4096, False), (4, 2048, True), (4, 4096, True)],
)
@pytest.mark.parametrize("head_dim", [64, 128, None])
def test_the_guides_table_decides_on_its_machine(batch: int, tokens: int, own: bool, head_dim: int | None) -> None:
    assert xlstm.should_use_amd_optimized_kernel(batch, tokens, head_dim, arch="gfx942") is own
    found = xlstm.kernel_decision(batch, tokens, head_dim, arch="gfx942")
    assert found.source == "prior" and f"batch {batch}, {tokens} tokens" in found.reason
    made = xlstm.get_optimal_kernel_config(batch, tokens, head_dim, arch="gfx942")
    assert ("native" in made["chunkwise_kernel"]) is not own


def test_on_a_cpu_the_native_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", hardware.cpu)
    assert not xlstm.should_use_amd_optimized_kernel(4, 4096)
    assert xlstm.kernel_decision(4, 4096).backend == "torch"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 0, "seq_len": 1}, "batch_size"),
        ({"batch_size": 1, "seq_len": 1.5}, "seq_len"),
        ({"batch_size": 1, "seq_len": 1, "head_dim": 33}, "even"),
        ({"batch_size": 1, "seq_len": 1, "arch": "gfx9"}, "gfx942"),
    ],
)
def test_bad_sizes_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        xlstm.kernel_decision(**given)


def test_the_guides_configuration_builds_and_takes_what_is_returned() -> None:
    small: dict[str, Any] = {"embedding_dim": 32, "num_heads": 2, "num_blocks": 1, "vocab_size": 16}
    for kernels in (
        {
            "chunkwise_kernel": "chunkwise--native_autograd",
            "sequence_kernel": "native_sequence__native",
            "step_kernel": "native",
        },
        xlstm.get_optimal_kernel_config(2, 2048, arch="gfx942"),
    ):
        model = xLSTMLarge(xLSTMLargeConfig(**small, **kernels))
        assert model.config.chunkwise_kernel == kernels["chunkwise_kernel"]

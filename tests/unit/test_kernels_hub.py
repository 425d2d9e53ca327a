"""The kernels repository: its layout, its layers beside the forwards they replace, and `kernels` if it is there."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument, MissingDependency
from wavecrest.integrations import hub_layers, kernels_hub

X = torch.linspace(-3, 3, 2 * 5 * 16).reshape(2, 5, 16)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(0.5, 2, 16)), 0.1

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 0.1)


class OtherNorm(Norm):
    """Modules differ in the name of their eps."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = self.variance_epsilon
        del self.variance_epsilon


class MLP(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class WrittenOut(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


CASES = {
    "RMSNorm": (Norm, "rms_norm"),
    "RMSNorm with eps": (OtherNorm, "rms_norm"),
    "SwiGLUMLP": (lambda: MLP(F.silu), "silu_and_mul"),
    "GeGLUMLP": (lambda: MLP(nn.GELU(approximate="tanh")), "gelu_and_mul"),
    "NewGELU": (WrittenOut, None),
    "FastGELU": (WrittenOut, None),
}


def taken_over(module: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """As `kernels` does it."""
    module.forward = MethodType(layer.forward, module)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_the_models_own(case: str) -> None:
    make, op = CASES[case]
    layer = getattr(hub_layers, kernels_hub.LAYERS[case.split()[0]].layer)
    if op is not None:
        registry.get(op).force("reference")
    with torch.no_grad():
        got, want = taken_over(make(), layer)(X), make()(X)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    if op is not None:
        assert [calls for decision, calls in registry.get(op).decisions() if decision.backend == "reference"] == [1]


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rotation_is_transformers_own(unsqueeze_dim: int) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    own = inspect.unwrap(modeling.apply_rotary_pos_emb)
    angles = torch.linspace(0, 3, 2 * 5 * 4).reshape(2, 5, 4)
    cos, sin = (torch.cat((one, one), -1) for one in (angles.cos(), angles.sin()))
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    with torch.no_grad():
        got = hub_layers.RotaryPosEmb()(q, k, cos, sin, unsqueeze_dim)
        torch.testing.assert_close(got, own(q, k, cos, sin, unsqueeze_dim), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", kernels_hub.LAYERS)
def test_layers_are_pure(name: str) -> None:
    """`kernels` asks this of a class: nothing beside forward and the two flags it knows."""
    layer = getattr(hub_layers, kernels_hub.LAYERS[name].layer)
    assert layer.__init__ is nn.Module.__init__
    assert set(vars(layer)) - set(vars(nn.Module)) <= {"can_torch_compile", "has_backward"}


def test_every_name_is_one_of_transformers() -> None:
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    source = inspect.getsource(hub)
    assert [name for name in kernels_hub.LAYERS if f'"{name}": {{' not in source] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernels_hub.build(tmp_path_factory.mktemp("hub") / "repository")


def test_the_layout(folder: Path) -> None:
    general = tomllib.loads((folder / "build.toml").read_text())
    assert general["general"]["edition"] == 5 and set(general["general"]["backends"]) == {"cpu", "cuda", "rocm"}
    assert "torch-noarch" in general
    variants = sorted(path.name for path in (folder / "build").iterdir())
    assert variants == ["torch-cpu", "torch-cuda", "torch-rocm"]
    found = [json.loads((folder / "build" / name / "metadata.json").read_text()) for name in variants]
    assert [one["backend"]["type"] for one in found] == ["cpu", "cuda", "rocm"]
    assert len({one["id"] for one in found}) == 3 and {one["name"] for one in found} == {"wavecrest"}
    layers = kernels_hub.LAYERS_FILE.read_text()
    assert {path.read_text() for path in folder.rglob("layers.py")} == {layers}
    assert len(list(folder.rglob("layers.py"))) == 4
    kernels_hub.build(folder)


def test_a_variant_is_a_package_of_its_own(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("of_the_cpu", folder / "build" / "torch-cpu" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    del sys.modules[spec.name], sys.modules[f"{spec.name}.layers"]
    assert all(hasattr(module.layers, layer) for layer, _ in kernels_hub.LAYERS.values())


def test_the_script_writes_it(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "hub"
    assert subprocess.run([script], capture_output=True).returncode == 1
    found = subprocess.run([script, tmp_path / "made"], capture_output=True, text=True)
    assert found.returncode == 0 and (tmp_path / "made" / "build.toml").is_file(), found.stderr


def test_what_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(InvalidArgument, match="something else"):
        kernels_hub.build(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kernels", None)
        with pytest.raises(MissingDependency, match="pip install kernels"):
            kernels_hub.mapping(folder)
    pytest.importorskip("kernels", reason="needs the package kernels")
    with pytest.raises(InvalidArgument, match="no kernels repository"):
        kernels_hub.mapping(tmp_path)
    with pytest.raises(InvalidArgument, match="not Linear"):
        kernels_hub.mapping(folder, names=["Linear"])
    with pytest.raises(InvalidArgument, match="not xpu"):
        kernels_hub.mapping(folder, devices=["xpu"])


def test_kernels_puts_the_layers_into_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels", reason="needs the package kernels")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    # as transformers' decorator does, which is switched off beside a version of kernels that it does not know
    for kind, name in ((modeling_llama.LlamaRMSNorm, "RMSNorm"), (modeling_llama.LlamaMLP, "SwiGLUMLP")):
        monkeypatch.setattr(kind, "kernel_layer_name", name, raising=False)
        monkeypatch.setattr(kind, "kernel_condition", staticmethod(lambda _module: True), raising=False)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(12).reshape(2, 6)
    ops = [registry.get(name) for name in ("rms_norm", "silu_and_mul")]
    for op in ops:
        op.force("reference")
    with torch.no_grad():
        want = model(ids).logits
        with kernels.use_kernel_mapping(kernels_hub.mapping(folder, ["cpu"]), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE, device="cpu")
        got = model(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert [sum(calls for _, calls in op.decisions()) for op in ops] == [5, 2]


def test_kernels_takes_a_function_too(folder: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="needs the package kernels")

    @kernels.use_kernel_forward_from_hub("rotary_pos_emb")
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        raise AssertionError("the model's own")

    @kernels.use_kernelized_func(rotate)
    class Attention(nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
            return rotate(*given)  # type: ignore[no-any-return]

    model, cos = Attention(), torch.ones(1, 5, 8)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    with kernels.use_kernel_mapping(kernels_hub.mapping(folder, ["cpu"]), inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    torch.testing.assert_close(model(q, k, cos, 0 * cos), (q, k))


def test_enable_stands_above_what_is_registered(folder: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="needs the package kernels")

    @kernels.use_kernel_forward_from_hub("NewGELU")
    class Own(WrittenOut):
        pass

    with kernels.use_kernel_mapping({}, inherit_mapping=True):
        kernels_hub.enable(folder, ["cpu"], ["NewGELU"])
        made = kernels.kernelize(Own(), mode=kernels.Mode.INFERENCE, device="cpu")
    assert made.forward.__func__.__qualname__ == "TanhGELU.forward"

"""Optimized models are copied, pickled and saved as other models are, whatever the steps have made of their modules."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from wavecrest.graphs.capture import CapturedModule
from wavecrest.ops import PackedWeight
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id, steps_up_to, tunable_op

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "pad_token_id": 0, "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip
ATTENTION = [f"model.layers.{layer}.self_attn" for layer in range(2)]
QKV = [[f"{path}.{name}_proj" for name in "qkv"] for path in ATTENTION]
ROTARY = {"sites": ATTENTION, "style": "neox"}
Params = dict[str, Any]


class Case(NamedTuple):
    """A model with steps applied, and what it is called with."""

    model: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Params]
    steps: list[tuple[str, Params]]


class Vision(nn.Module):
    """Convolutions, a norm to fold, attention of PyTorch's, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.one, self.act, self.two = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.patches(x)).flatten(2).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.scaled_dot_product_attention(*[self.two(self.act(self.one(x)))[:, None]] * 3)


def speech() -> nn.Module:
    layers = nn.Sequential(nn.Conv1d(16, 24, 3, 2, bias=False), nn.GELU(), nn.Conv1d(24, 16, 2, 2))
    return layers


def sound(_model: nn.Module) -> Params:
    return {"input": torch.linspace(-1, 1, 2 * 16 * 21).view(2, 16, 21)}


def vision() -> nn.Module:
    return Vision()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def language(name: str, attention: str = "sdpa") -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**SIZES)
        config._attn_implementation = attention
        kind = "Model" if name == "Bert" else "ForCausalLM"
        made: nn.Module = getattr(transformers, name + kind)(config)
        return made

    return make


def recurrent() -> nn.Module:
    shapes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    made: nn.Module = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**shapes))
    return made


def tokens(_model: nn.Module) -> Params:
    return {"input_ids": torch.arange(2, 16).view(2, 7), "use_cache": False}


def padded(_model: nn.Module) -> Params:
    return {"input_ids": torch.arange(2, 16).view(2, 7), "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}


def step(model: Any) -> Params:
    """A token behind a prompt in a static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=9)
    with torch.no_grad():
        model(torch.arange(2, 14).view(2, 6), cache=cache, use_cache=True)
    return {"input_ids": torch.tensor([[20], [21]]), "cache": cache, "use_cache": True}


def pixels(_model: nn.Module) -> Params:
    return {"x": torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)}


def rows(_model: nn.Module) -> Params:
    return {"src": torch.linspace(-1, 1, 2 * 5 * 16).view(2, 5, 16)}


def of_vision(step_id: str, **params: Any) -> Case:
    return Case(vision, pixels, [(step_id, params)])


def of_llama(step_id: str, **params: Any) -> Case:
    return Case(language("Llama"), tokens, [(step_id, params)])


def on_backend(linear: str, module: str = "", activation: str = "") -> Params:
    return {"linear": linear, "module": module, "activation": activation, "backend": "torch"}


ATTEND = ("replace_attention", {"owners": [""]})
NORMS = [
    f"model.layers.{layer}.{name}" for layer in range(2) for name in ("input_layernorm", "post_attention_layernorm")
]
COMPILED = (
    "default",
    "freezing",
    "reduce-overhead",
    "epilogues",
    "fusions",
    "graph",
    "coordinate-descent",
    "max-autotune",
)
CASES: dict[str, Case] = {
    "environment": of_vision("environment", candidates=[]),
    "quantize": of_llama("quantize", formats={"model.layers.0.mlp.up_proj": "int8"}, quality=1.0),
    **{f"compile:{name}": of_vision(f"compile:{name}", preset=name) for name in COMPILED},
    "masks": of_llama("compile:default", preset="default", masks=[""]),
    "channels_last": of_vision("channels_last", sites=["patches"]),
    "fold_batch_norm": of_vision("fold_batch_norm", pairs=[["patches", "norm"]]),
    "patch_conv": of_vision("patch_conv", sites=["patches"]),
    "attention:pack_heads": of_vision("attention:pack_heads", sites=["attention"], unread=[]),
    **{f"precision:{name}": of_llama(f"precision:{name}", precision=name) for name in ("tf32", "bf16", "fp16")},
    "attention:sdpa": Case(
        language("Llama", "eager"), tokens, [("attention:sdpa", {"owners": [""], "implementation": "sdpa"})]
    ),
    "attention:pack_gqa": Case(
        language("Llama"), step, [("attention:pack_gqa", {"owners": [""], "implementation": "wavecrest_pack_gqa"})]
    ),
    **{f"sdpa:{name}": of_llama(f"sdpa:{name}", backend=name) for name in ("flash", "math")},
    "fuse_qkv": of_llama("fuse_qkv", groups=QKV),
    "fuse_gate_up": of_llama("fuse_gate_up", groups=[["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]]),
    "fuse_parallel": of_llama("fuse_parallel", groups=QKV[:1]),
    "route_linear": of_vision("route_linear", sites=["one"]),
    "choose_linear": of_vision("choose_linear", layers=[on_backend("one", "act", "gelu"), on_backend("two")]),
    "tunable_op": of_vision("tunable_op", validators=[["PT_VERSION", "1"]], rows=[["a", "b", "c", "1"]]),
    "replace_encoder": Case(
        encoder, rows,
        [("replace_encoder", {"sites": ["", "layers.0", "layers.1"], "layers": [on_backend("layers.0.linear1")]})],
    ),
    "replace_attention": Case(language("Llama"), tokens, [ATTEND]),
    "replace_sdpa": of_vision("replace_sdpa", sites=[""]),
    "unpad": Case(
        language("Bert"), padded, [("unpad", {"sites": ["encoder"], "owners": [""], "masks": "any"})]
    ),
    "replace_moe": Case(
        language("Mixtral"), tokens, [("replace_moe", {"sites": ["model.layers.0.mlp.experts"]})]
    ),
    "window_conv": Case(speech, sound, [("window_conv", {"sites": ["0", "2"]})]),
    "replace_xlstm": Case(recurrent, tokens, [("replace_xlstm", {"sites": ["backbone"]})]),
    "replace_norm": of_llama("replace_norm", sites=NORMS),
    "replace_activation": of_llama("replace_activation", sites=["model.layers.0.mlp"]),
    "replace_rotary": of_llama("replace_rotary", **ROTARY),
    "fuse_append": Case(language("Llama"), step, [ATTEND, ("fuse_append", ROTARY)]),
    "fuse_residual": of_llama("fuse_residual", sites=["model.layers.0", "model.layers.1"]),
    "fuse_add_norm": Case(
        language("Bert"), tokens, [("fuse_add_norm", {"sites": ["encoder.layer.0.output"]})],
    ),
    "fuse_norm": Case(
        language("Llama"), tokens,
        [
            ("replace_norm", {"sites": NORMS}), ("fuse_qkv", {"groups": QKV}),
            ("route_linear", {"sites": [QKV[0][0]]}),
            ("fuse_norm", {"pairs": [["model.layers.0.input_layernorm", QKV[0][0]]]}),
        ],
    ),
    "tune_launches": of_llama(
        "tune_launches",
        rows=[
            {
                "key": [
                    1, 64, 64, "float32", "float32", "plain", 0, "none none", None, None, False, "float32", "ieee", 0,
                    "k k 16", "cpu", 1, False,
                ],
                "backend": "torch",
            }
        ],
    ),
    "join_ties": of_llama(
        "join_ties",
        steps=[{"id": "fuse_qkv", "params": {"groups": QKV}}, {"id": "replace_rotary", "params": ROTARY}],
    ),
    "together": Case(
        language("Llama"), step,
        [
            ("fuse_qkv", {"groups": QKV}), ("replace_norm", {"sites": NORMS}), ATTEND, ("replace_rotary", ROTARY),
            ("fuse_append", ROTARY), ("fuse_residual", {"sites": ["model.layers.0"]}),
            ("precision:tf32", {"precision": "tf32"}), ("sdpa:math", {"backend": "math"}),
        ],
    ),
}  # fmt: skip
# a fork for each, so that what one model registers helps no other. The models' own modules are imported once: they
# register nothing of wavecrest's, and take each fork longer than all else
LOADER = """
import os, sys, torch, transformers
from transformers import BertModel, LlamaForCausalLM, MixtralForCausalLM
import wavecrest.nn, wavecrest.optimizer.steps.ladder
torch.set_num_threads(1)
for path in sys.argv[1:]:
    if os.fork() == 0:
        model, inputs = torch.load(path, weights_only=False)
        with torch.no_grad():
            found = model(**inputs)
        torch.save(getattr(found, "logits", getattr(found, "last_hidden_state", found)), path + ".answer")
        os._exit(0)
    assert os.wait()[1] == 0, path
"""


def optimized(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module, Params]:
    """A model with the steps of a case, the model without, and inputs."""
    stands_in = SimpleNamespace(is_enabled=bool, enable=bool, tuning_enable=bool)
    monkeypatch.setattr(tunable_op, "tunable", stands_in)
    for function in ("read", "problem_of"):
        monkeypatch.setattr(tunable_op, function, lambda params: "")
    case, steps = CASES[name], AppliedSteps()
    torch.manual_seed(0)
    model = case.model().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    for step_id, params in case.steps:
        steps = steps.plus(step_by_id(step_id), params)
    return build(model, steps), model, case.inputs(model)


def answer(model: nn.Module, inputs: Params) -> torch.Tensor:
    with torch.no_grad():
        found: Any = model(**copy.deepcopy(inputs))
    made: torch.Tensor = getattr(found, "logits", getattr(found, "last_hidden_state", found))
    return made


def test_every_step_has_a_case() -> None:
    # that of graphs is below; these are sdpa:math with another name, and run on GPUs alone
    others = {"capture", "sdpa:cudnn", "sdpa:efficient"}
    assert {one.id for one in steps_up_to(5)} == {*CASES, *others} - {"together", "masks"}


@pytest.mark.parametrize("name", CASES)
def test_a_copy_answers_the_same_by_its_own_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, inputs = optimized(name, monkeypatch)
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    copies = [copy.deepcopy(model), torch.load(held, weights_only=False)]
    model._compiled_call_impl = None
    expected = answer(model, inputs)
    assert expected.abs().max() > 0.01
    with torch.no_grad():
        for parameter in model.parameters():
            if not isinstance(parameter, PackedWeight):
                parameter.zero_()
    assert not torch.equal(answer(model, inputs), expected)
    for one in copies:
        assert [type(module).__name__ for module in one.modules()] == [type(m).__name__ for m in model.modules()]
        assert torch.equal(answer(one, inputs), expected)
        # of a copy too
        assert torch.equal(answer(copy.deepcopy(one), inputs), expected)


@pytest.mark.slow
def test_another_process_reads_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = {}
    # tunable_op needs a library of its own
    for name in sorted(CASES.keys() - {"tunable_op"}):
        model, _, inputs = optimized(name, monkeypatch)
        model._compiled_call_impl = None
        path = str(tmp_path / name.replace(":", "-"))
        torch.save((model, inputs), path)
        expected[path] = answer(model, inputs)
    made = subprocess.run([sys.executable, "-c", LOADER, *expected], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for path, wanted in expected.items():
        assert torch.equal(torch.load(f"{path}.answer"), wanted), path


def test_a_copy_of_a_captured_model_has_no_graphs() -> None:
    model = CapturedModule(vision())
    # what cannot be pickled, as a graph
    model._graphs["signature"] = model._pool = threading.Lock()  # type: ignore[assignment]
    model._alive.append(threading.Lock())
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (one._graphs, one._pool, one._alive) == ({}, None, [])
    assert model._graphs and model._pool and model._alive


@pytest.mark.gpu
def test_a_copy_of_a_captured_model_captures_its_own() -> None:
    model = CapturedModule(nn.Linear(4, 4, device="cuda"))
    x = torch.randn(2, 4, device="cuda")
    with torch.no_grad():
        expected = model(x)
        copied, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        model.inner.weight.zero_()
        assert torch.equal(copied(x), expected) and torch.equal(read(x), expected)
        assert not torch.equal(model(x), expected) and len(copied._graphs) == 1

"""torch.nn.TransformerEncoder by its parts: the same answers with every mask, sites and refusals, replay."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Buckets, Workload, from_example
from wavecrest.nn import encoder_layer
from wavecrest.nn.linear import LinearOn
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, gemm_choices, step_by_id, structural_copy

STEP = step_by_id("replace_encoder")
GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")
E, HEADS = 16, 2
X = torch.randn(3, 6, E, generator=torch.Generator().manual_seed(0))
# True hides: at the right (of a row everything but the first), at the left, in the middle
RIGHT = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)
MASKS = {"none": None, "right": RIGHT, "left": RIGHT.flip(1), "as numbers": torch.zeros(3, 6).masked_fill(RIGHT, -1e9)}


@pytest.fixture(autouse=True)
def onednn_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is faster on oneDNN where that takes it: times of tiny layers on a busy machine mean nothing."""

    @torch.no_grad()
    def choices(calls: Any, _device: str) -> gemm_choices.Choices:
        refuse = gemm_choices.op.backends["onednn"].refuse
        return gemm_choices.Choices({gemm_choices.name_of(c): "onednn" for c in calls if refuse(c) is None}, 0.5, {})

    monkeypatch.setattr("wavecrest.optimizer.steps.choose_linear.choices", choices)


def encoder(layers: int = 2, nested: bool = True, norm: bool = True, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    options = {"activation": "gelu", "batch_first": True, **options}
    layer = nn.TransformerEncoderLayer(E, HEADS, 32, **options)
    made = nn.TransformerEncoder(layer, layers, nn.LayerNorm(E) if norm else None, enable_nested_tensor=nested)
    for parameter in made.parameters():
        # no layer is like another, and no bias is zero
        nn.init.normal_(parameter, std=0.3)
    return made.eval()


def find(workload: Workload, device: Any = None) -> Found:
    return STEP.find(StepContext(workload, device or hardware.cpu(), model=structural_copy(workload.model)))


def applied(model: nn.Module, found: Found) -> nn.Module:
    return build(model, AppliedSteps().plus(STEP, found.params))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("nested", [False, True], ids=["dense", "nested"])
def test_padded_batches_are_right_with_and_without_nested_tensors(mask: str, nested: bool) -> None:
    """PyTorch's encoder gives zeros at padded places where it uses nested tensors, and numbers elsewhere."""
    model = encoder(nested=nested)
    made = applied(model, find(from_example(model, X)))
    assert type(made) is encoder_layer.TransformerEncoder and type(made.layers[1].linear1) is LinearOn
    with torch.no_grad():
        for norm in (model.norm, None):
            model.norm, made.norm = norm, norm
            given = MASKS[mask]
            expected = model(X, src_key_padding_mask=given)
            torch.testing.assert_close(made(X, src_key_padding_mask=given), expected, rtol=1e-4, atol=1e-5)
    if nested and mask == "right":
        assert bool((expected[RIGHT] == 0).all())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_padded_rows_are_not_computed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Where PyTorch gives zeros at padded places; "cuda": the form for GPUs, by the op's reference."""
    monkeypatch.setattr(encoder_layer, "EPILOGUES", () if device == "cpu" else ("cpu",))
    seen: list[int] = []
    own = encoder_layer.TransformerEncoderLayer.of_rows

    def of_rows(layer: Any, x: Tensor, rows: encoder_layer.Rows) -> Tensor:
        seen.append(len(x))
        return own(layer, x, rows)

    monkeypatch.setattr(encoder_layer.TransformerEncoderLayer, "of_rows", of_rows)
    for first in (False, True):
        seen.clear()
        model = encoder(norm_first=first, nested=not first)
        made = applied(model, find(from_example(model, X), GPU))
        # PyTorch's own turns nested tensors off for norm_first: by hand, it is the same layer
        made.zeroes_padding = True
        with torch.no_grad():
            got, wanted = (one(X, src_key_padding_mask=RIGHT) for one in (made, model))
            torch.testing.assert_close(got[~RIGHT], wanted[~RIGHT], rtol=1e-4, atol=1e-5)
            assert seen == [11, 11]
            # nothing is padded: all rows, without a mask; padding at the left: PyTorch's encoder over the layers
            for given in (torch.zeros_like(RIGHT), RIGHT.flip(1)):
                got, wanted = (one(X, src_key_padding_mask=given) for one in (made, model))
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
            assert len(seen) == 2


def test_on_a_gpu_the_layers_that_end_in_activations_are_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a layer calls no modules of its own, in which data flow would be seen."""
    monkeypatch.setattr(encoder_layer, "EPILOGUES", ("cpu",))
    found = find(from_example(encoder(), X), hardware.Device("cuda", 0, "gfx942", "pretended", 304, 1 << 30, "hip"))
    assert [row["linear"] for row in found.params["layers"]] == ["layers.0.linear1", "layers.1.linear1"]
    made = applied(encoder(), found)
    assert not any(layer.by_modules for layer in made.layers) and type(made.layers[0].activation) is nn.Identity
    with torch.no_grad():
        torch.testing.assert_close(made(X), encoder()(X), rtol=1e-4, atol=1e-5)


def test_compiled_it_gives_what_eager_pytorch_gives() -> None:
    model = encoder()
    made = torch.compile(applied(model, find(from_example(model, X))), backend="eager", fullgraph=True)
    with torch.no_grad():
        for given in (RIGHT, RIGHT.flip(1)):
            torch.testing.assert_close(
                made(X, src_key_padding_mask=given), model(X, src_key_padding_mask=given), rtol=1e-4, atol=1e-5
            )


OPTIONS = [
    {"norm_first": first, "activation": activation, "batch_first": batch, "bias": bias}
    for first, (activation, batch, bias) in itertools.product(
        (False, True), (("gelu", True, True), (F.relu, False, True), (nn.SiLU(), True, False), (torch.tanh, True, True))
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(str(one)[:12] for one in options.values()))
def test_every_kind_of_layer_is_right(options: dict[str, Any]) -> None:
    model = encoder(nested=False, **options)
    x = X if options["batch_first"] else X.transpose(0, 1)
    workload = from_example(model, Buckets(a=x, b=x[:2, :2]))
    found = find(workload)
    assert len(found.sites) == 3
    made = applied(model, found)
    assert not failures(Gate.prepare(workload).check(made))
    assert made.state_dict().keys() == model.state_dict().keys()
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    calls: list[dict[str, Any]] = [{"mask": causal}, {"mask": causal, "is_causal": True}]
    with torch.no_grad():
        for call in calls:
            torch.testing.assert_close(made(x, **call), model(x, **call), rtol=1e-4, atol=1e-5)
        x2 = x[0] if options["batch_first"] else x[:, 0]
        torch.testing.assert_close(made(x2), model(x2), rtol=1e-4, atol=1e-5)
    made.train()
    assert made(x).requires_grad


def test_a_layer_with_epilogues_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for GPUs, on the CPU's backend."""
    calls = []

    def linear(*args: Any, **options: Any) -> Tensor:
        calls.append(sorted(options))
        return ops_linear(*args, **options)

    ops_linear = encoder_layer.linear
    monkeypatch.setattr(encoder_layer, "linear", linear)
    monkeypatch.setattr(encoder_layer, "EPILOGUES", ("cpu",))
    for first in (False, True):
        model = encoder(nested=False, norm_first=first)
        workload = from_example(model, X)
        # no backend was faster for any layer
        sites = {"sites": find(workload, GPU).params["sites"]}
        made = build(model, AppliedSteps().plus(STEP, sites))
        assert sites["sites"] and not failures(Gate.prepare(workload).check(made))
    assert ["activation"] in calls and ["residual"] in calls


def test_an_encoder_inside_a_model_and_what_is_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hooked, self.plain = encoder(1, norm=False), encoder(1, norm=False)
            self.own = nn.TransformerEncoderLayer(E, HEADS, 32, batch_first=True)
            self.hooked.layers[0].linear1.register_forward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.plain(self.hooked(x)))

    workload = from_example(Model().eval(), X)
    found = find(workload)
    assert found.sites == ("plain", "plain.layers.0", "own")
    assert "left out: hooked: a part of the layer has hooks" in found.note
    assert not failures(Gate.prepare(workload).check(applied(workload.model, found)))
    assert type(workload.model.own) is nn.TransformerEncoderLayer
    with pytest.raises(StepRefused, match=r"hooked\.layers\.0: a part of the layer has hooks"):
        STEP.apply(structural_copy(workload.model), {"sites": ["plain", "hooked.layers.0"]})


def test_nothing_is_tried_on_a_cpu_without_a_faster_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    none = gemm_choices.Choices({}, 0.0, {})
    monkeypatch.setattr("wavecrest.optimizer.steps.choose_linear.choices", lambda calls, device: none)
    found = find(from_example(encoder(), X))
    assert not found.sites and found.note.startswith(
        "on the CPU the layers gain by their linear layers' backends alone"
    )
    assert "no torch.nn.TransformerEncoderLayer" in find(from_example(nn.Linear(4, 4), torch.randn(1, 4))).note


def test_attention_is_not_dropped_behind_the_steps_back() -> None:
    """The planted fault: a layer that loses its padding mask."""
    model = encoder(nested=False)
    workload = from_example(model, {"src": X, "src_key_padding_mask": RIGHT})
    made = applied(model, find(workload))
    gate = Gate.prepare(workload)
    assert not failures(gate.check(made))
    forward = made.layers[0].forward
    made.layers[0].forward = lambda src, **_options: forward(src)
    assert failures(gate.check(made))

"""Quantized models: which layers, what the report says of them, limits on quality, and the way back."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wavecrest
from tests.unit.quantized_models import DEVICE, SIZE, Causal, causal, same_state, state_of, tokens
from wavecrest.errors import InvalidArgument, QualityNotMet, WorkloadError
from wavecrest.measure.bootstrap import Interval
from wavecrest.measure.workload import Inputs
from wavecrest.nn import Linear, QuantizedLinear
from wavecrest.ops import PackedWeight, pack
from wavecrest.quantizer import choose
from wavecrest.quantizer.quality import Quality, _Sums, limits
from wavecrest.quantizer.result import Quantized

FORMATS = ("int8", "fp8", "int4", "mxfp4", "w8a8-int8", "w8a8-fp8")
LAYERS = [f"blocks.{at}.{name}" for at in range(2) for name in ("q", "k", "up", "down")]


def row(result: Quantized, path: str) -> Any:
    return next(one for one in result.report.layers if one.path == path)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [*((name, torch.bfloat16) for name in FORMATS), ("int8", torch.float32), ("w8a8-int8", torch.float16)],
)
def test_layers_are_quantized_and_come_back(format: str, dtype: torch.dtype) -> None:
    model = causal(dtype).train()
    ids = tokens()
    before = state_of(model)
    with torch.no_grad():
        answer = model.eval()(ids)
    model.train()
    found = wavecrest.quantize(model, format, calibration={"input_ids": ids})
    assert found.formats == dict.fromkeys(LAYERS, format) and model.training and model.blocks[0].q.training
    kind = QuantizedLinear if format.startswith("w8a8") else Linear
    for path in LAYERS:
        layer = model.get_submodule(path)
        assert type(layer) is kind and isinstance(layer.weight, PackedWeight) and layer.weight.dtype == dtype
    assert isinstance(model.lm_head, nn.Linear) and model.lm_head.weight is model.embed.weight
    with torch.no_grad():
        now = model.eval()(ids)
    off = float((now.double() - answer.double()).norm() / answer.double().norm())
    quality = found.report.quality
    assert quality is not None and off == pytest.approx(quality.relative, rel=1e-6) and 1e-4 < off < 0.2
    assert found.report.bytes_after < found.report.bytes_before
    model.train()
    found.restore()
    same_state(model, before)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), answer)
    found.restore()


@pytest.mark.parametrize("format", ["int8", "w8a8-int8"])
def test_original_weights_stay_until_they_are_given_up(format: str) -> None:
    model = causal(torch.bfloat16).eval()
    weights = [weakref.ref(model.get_submodule(path).weight) for path in LAYERS]
    # with w8a8 scales of norms move, too
    found = wavecrest.quantize(model, format, calibration={"input_ids": tokens()})
    gc.collect()
    assert None not in [weight() for weight in weights]
    found.forget()
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(LAYERS)
    with pytest.raises(InvalidArgument, match="were given up"):
        found.restore()


@pytest.mark.parametrize("format", FORMATS)
def test_errors_are_those_of_the_layers(format: str) -> None:
    model = causal()
    ids = tokens()
    caught: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda _module, args, path=path: caught.__setitem__(path, args[0].reshape(-1, args[0].shape[-1]))
        )
        for path in LAYERS
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    plain = {path: model.get_submodule(path) for path in LAYERS}
    found = wavecrest.quantize(model, format, calibration=(ids,), smooth=None)
    for path in LAYERS:
        # 38 rows are seen, and each of these once in 32 picks
        picks = caught[path][torch.linspace(0, 37, 32).long()]
        layer: Any = model.get_submodule(path)
        wanted = picks.double() @ plain[path].weight.double().mT
        bias = 0 if layer.bias is None else layer.bias.double()
        off = float((layer(picks).double() - bias - wanted).detach().norm() / wanted.detach().norm())
        assert row(found, path).error == pytest.approx(off, rel=2e-2), path
        assert row(found, path).inputs == "calibration" and row(found, path).bytes_after == layer.weight.bytes_


def test_without_inputs_errors_are_of_random_ones() -> None:
    model = causal()
    before = model.training
    found = wavecrest.quantize(model, "int8")
    assert found.report.quality is None and model.training == before
    weight = row(found, "blocks.1.down")
    x = torch.randn(4000, 2 * SIZE + 3, dtype=torch.float64, device=DEVICE)
    rounded: Any = model.blocks[1].down.weight
    found.restore()
    plain = model.blocks[1].down.weight.detach().double()
    off = x @ (rounded.dequantize_float32().double() - plain).mT
    assert weight.inputs == "random" and weight.error == pytest.approx(
        float(off.norm() / (x @ plain.mT).norm()), rel=0.1
    )
    text = str(found.report)
    assert "(random)" in text and "calibration inputs say more" in text and "there were no inputs" in text


def test_patterns_keep_and_take_back() -> None:
    model = causal()
    found = wavecrest.quantize(model, "int8", keep=["*.down", "blocks.0.*", "!blocks.0.q"])
    assert set(found.formats) == {"blocks.0.q", "blocks.1.q", "blocks.1.k", "blocks.1.up"}
    assert row(found, "blocks.0.down").reason == "keep='blocks.0.*'"
    assert "kept by default (*lm_head)" in row(found, "lm_head").reason
    found.restore()
    # the embedding keeps its own values
    embedding = model.embed.weight
    found = wavecrest.quantize(model, "int8", keep=["!lm_head"])
    assert isinstance(model.lm_head.weight, PackedWeight) and model.embed.weight is embedding
    assert torch.equal(model.lm_head.weight.stored, pack(embedding, "int8").stored)
    found.restore()
    assert model.lm_head.weight is embedding
    with pytest.raises(InvalidArgument, match=r"keep has '\*\.donw', which fits no linear layer"):
        wavecrest.quantize(model, "int8", keep=["*.donw"])


class Routed(nn.Module):
    """Shared modules and weights, a router, a subclass, hooks, and torch's encoder layer with its fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.twin = nn.Linear(16, 16)
        self.twin.weight = self.first.weight
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.hooked = nn.Linear(16, 16)
        self.hooked.register_forward_hook(lambda *_args: None)
        self.embedder = nn.Embedding(9, 16)
        self.scores = nn.Linear(16, 9)
        self.scores.weight = self.embedder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(x)) + self.twin(x) * self.gate(x).mean()
        out: torch.Tensor = self.scores(self.hooked(self.encoder(x)))
        return out


def test_shared_layers_stay_shared_and_the_rest_says_why() -> None:
    torch.manual_seed(0)
    model = Routed().eval().to(DEVICE)
    x = torch.randn(2, 5, 16).to(DEVICE)
    before = state_of(model)
    found = wavecrest.quantize(model, "int8", calibration=x)
    assert found.formats == {"first": "int8", "again": "int8", "twin": "int8"}
    assert model.first is model.again and model.first.weight is model.twin.weight
    reasons = {one.path: one.reason for one in found.report.layers if one.format is None}
    assert "by default (*gate)" in reasons["gate"] and "hooks" in reasons["hooked"]
    assert "reads its weight itself" in reasons["encoder.linear1"]
    assert "NonDynamicallyQuantizableLinear" in reasons["encoder.self_attn.out_proj"]
    assert reasons["scores"] == "its weight is that of embedder too"
    # a weight that is shared counts once
    assert found.report.bytes_before - found.report.bytes_after == 16 * 16 * 4 - (16 * 16 + 16 * 4)
    found.restore()
    same_state(model, before)


def test_layers_of_wavecrest_and_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    conv = Conv1D(24, 16)
    nn.init.normal_(conv.weight)
    nn.init.normal_(conv.bias)
    tail = Linear.from_weight(pack(torch.randn(12, 16), "int8"), torch.randn(15), tail=torch.randn(3, 16))
    gated = Linear(16, 8, activation="silu_and_mul")
    model = nn.ModuleDict({"conv": conv, "tailed": tail, "gated": gated})
    x = torch.randn(6, 16)
    plain = {name: module(x).detach() for name, module in model.items()}
    found = wavecrest.quantize(model, "int8")
    assert set(found.formats) == {"conv", "gated"} and "int8 already" in row(found, "tailed").reason
    for name, module in model.items():
        assert module(x).shape == plain[name].shape
        assert float((module(x).detach() - plain[name]).norm() / plain[name].norm()) < 0.02, name
    found.restore()
    wavecrest.quantize(model, "w8a8-int8")
    for name in ("conv", "gated"):
        assert isinstance(model[name], QuantizedLinear)
        assert float((model[name](x).detach() - plain[name]).norm() / plain[name].norm()) < 0.05


def test_formats_are_taken_in_order_and_give_way_in_order() -> None:
    model = causal()
    ids = tokens()
    one = wavecrest.quantize(model, "int4", calibration=(ids,), group=32)
    limit = sorted(row(one, path).error for path in LAYERS)[5]
    one.restore()
    options: dict[str, Any] = {"calibration": (ids,), "max_error": limit, "group": 32}
    both = wavecrest.quantize(model, ("int4", "int8"), **options)
    errors = {path: row(both, path).error for path in both.formats}
    assert all(error <= limit for error in errors.values())
    assert {"int8", "int4"} == set(both.formats.values())
    eights = [path for path, name in both.formats.items() if name == "int8"]
    assert len(eights) == 2
    assert all(f"int4: error above the limit of {limit:g}" in row(both, path).reason for path in eights)
    free = both.report.quality
    both.restore()
    assert free is not None and free.kl is not None
    # half of the divergence: some layers give way, the others do not
    met = wavecrest.quantize(model, ("int4", "int8"), quality={"kl": free.kl / 2}, **options)
    quality = met.report.quality
    assert quality is not None and quality.kl is not None and quality.kl <= free.kl / 2
    gave = [one.path for one in met.report.layers if "gave way" in one.reason]
    stayed = [path for path, name in met.formats.items() if name == "int4"]
    assert gave and stayed and min(errors[path] for path in gave) >= max(errors[path] for path in stayed)
    assert met.report.limits == {"kl": free.kl / 2}
    met.restore()


def test_order_and_bisection() -> None:
    errors = {"a": [("int4", 0.1), ("int8", 0.01)], "b": [("int4", 0.2), ("int8", 0.15)], "c": []}
    choices = choose.order(errors)
    assert choices == [
        {"a": "int4", "b": "int4", "c": None},
        {"a": "int4", "b": "int8", "c": None},
        {"a": "int4", "b": None, "c": None},
        {"a": "int8", "b": None, "c": None},
        {"a": None, "b": None, "c": None},
    ]
    for best in range(5):
        asked: list[int] = []

        def meets(choice: Any, best: int = best, asked: list[int] = asked) -> bool:
            at = choices.index(dict(choice))
            asked.append(at)
            return at >= best

        assert choose.first_within(choices, meets) == best
        # the last quantizes nothing: it is not asked
        assert len(asked) == len(set(asked)) and 4 not in asked


def test_limits_that_cannot_be_met_leave_the_model_alone() -> None:
    model = causal().train()
    ids = tokens()
    before = state_of(model)
    with pytest.raises(QualityNotMet, match=r"not met with one layer quantized \(kl .*limit 1e-1[0-9]"):
        wavecrest.quantize(model, "int4", calibration=(ids,), quality=1e-12)
    same_state(model, before)
    with pytest.raises(QualityNotMet, match=r"no layer is within the limits; blocks.*is closest.*its error is 0"):
        wavecrest.quantize(model, "int8", max_error=1e-6)
    same_state(model, before)


def test_layers_whose_weight_is_read_outside_are_kept() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # as Mamba does
            return self.other(self.layer(x)) + x @ self.layer.weight.mT

    torch.manual_seed(0)
    model = Reads()
    found = wavecrest.quantize(model, "int8", calibration=torch.randn(3, 8))
    assert found.formats == {"other": "int8"}
    assert row(found, "layer").reason == "aten.mm reads its weight outside of the layer"
    found.restore()
    with pytest.raises(InvalidArgument, match=r"layer: aten\.mm reads its weight"):
        wavecrest.quantize(model, "int8", calibration=torch.randn(3, 8), keep=["other"])


def test_an_error_half_way_leaves_the_model_alone() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                # the quantized model's first call
                assert isinstance(self.layer, Linear)
                raise RuntimeError("no more")
            out: torch.Tensor = self.layer(x)
            return out

    model = Failing()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="no more"):
        wavecrest.quantize(model, "int8", calibration=torch.randn(3, 8))
    same_state(model, before)
    with pytest.raises(WorkloadError, match="is empty"):
        wavecrest.quantize(model, "int8", calibration=torch.randn(0, 8))
    with torch.no_grad():
        model.layer.weight[2, 2] = math.inf
    with pytest.raises(InvalidArgument, match=r"layer: pack: the weight holds NaN.*keep=\['layer'\]"):
        wavecrest.quantize(model, "int8")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "int3"}, "not 'int3'"),
        ({"format": ("int8", "int8")}, "each format once"),
        ({"group": 48}, "not 48"),
        ({"format": "fp8", "group": 32}, "int4 or int8"),
        ({"smooth": 2.0}, "0 to 1"),
        ({"activations": "fixed"}, "not 'fixed'"),
        ({"format": "w8a8-int8", "activations": "static"}, "needs calibration"),
        ({"only_faster": True}, "needs calibration"),
        ({"quality": "0.5%"}, "needs inputs"),
        ({"quality": "good"}, "not 'good'"),
        ({"quality": {"bleu": 1}}, "not 'bleu'"),
        ({"quality": {}}, "no limit"),
        ({"max_error": 0.0}, "above 0"),
        ({"calibration": []}, "has no inputs"),
        ({"keep": ["blocks.*"]}, "no linear layer to quantize"),
    ],
)
def test_arguments_outside_of_the_contract(options: dict[str, Any], reason: str) -> None:
    model = causal()
    before = state_of(model)
    with pytest.raises(InvalidArgument, match=reason):
        wavecrest.quantize(model, **options)
    same_state(model, before)


def test_models_that_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"embed\.weight is on the meta device"):
        wavecrest.quantize(Causal().to("meta"))
    with pytest.raises(InvalidArgument, match="of one layer take"):
        wavecrest.quantize(nn.Linear(8, 8))
    with pytest.raises(InvalidArgument, match="it has no linear layer"):
        wavecrest.quantize(nn.Sequential(nn.ReLU()))
    with pytest.raises(InvalidArgument, match=r"takes a torch\.nn\.Module, not a function"):
        wavecrest.quantize(test_models_that_are_refused)  # type: ignore[arg-type]
    model = causal()
    wavecrest.quantize(model, "int8")
    with pytest.raises(InvalidArgument, match=r"blocks\.0\.q: its weight is int8 already"):
        wavecrest.quantize(model, "int8")
    from wavecrest.models.xlstm import xLSTMLarge, xLSTMLargeConfig

    config = xLSTMLargeConfig(embedding_dim=32, num_heads=2, num_blocks=1, vocab_size=16)
    with pytest.raises(InvalidArgument, match=r"by wavecrest\.models\.xlstm\.quantize"):
        wavecrest.quantize(nn.Sequential(xLSTMLarge(config)))


def test_only_layers_that_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal()
    ids = tokens()
    asked = []

    def speedup(module: Any, made: Any, seen: Any, device: str) -> tuple[float, Interval]:
        asked.append((module, type(made), seen.most_rows, device))
        fast = module.out_features == SIZE
        return (1.4, Interval(1.2, 1.5)) if fast else (1.1, Interval(0.9, 1.3))

    monkeypatch.setattr(choose, "speedup", speedup)
    found = wavecrest.quantize(model, "int8", calibration=[(ids,), (tokens(3, 30),)], only_faster=True)
    assert {one[1:] for one in asked} == {(Linear, 90, str(model.embed.weight.device))} and len(asked) == 8
    assert set(found.formats) == {path for path in LAYERS if not path.endswith("up")}
    slow = row(found, "blocks.0.up")
    assert slow.reason == "int8: not proven faster at 90 rows" and slow.ci == Interval(0.9, 1.3)
    assert "1.400× [1.200, 1.500]" in str(found.report)


def test_the_timer_is_the_interleaved_one() -> None:
    from wavecrest.quantizer.calibrate import Seen

    sizes: list[int] = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _module, args, _out: sizes.append(args[0].shape[0]))
    ratio, ci = choose.speedup(layer, layer, Seen(torch.randn(3, 4), torch.ones(4), 7), "cpu")
    assert set(sizes) == {7} and ci.low <= ratio <= ci.high


def test_static_scales_are_the_peaks_of_calibration() -> None:
    model = causal()
    ids = tokens()
    peaks: list[float] = []
    handle = model.blocks[0].down.register_forward_pre_hook(
        lambda _module, args: peaks.append(float(args[0].detach().abs().max()))
    )
    for one in (ids, tokens(seed=5)):
        model(one)
    handle.remove()
    options: dict[str, Any] = {"calibration": [(ids,), (tokens(seed=5),)], "activations": "static"}
    found = wavecrest.quantize(model, "w8a8-int8", **options)
    layer = model.blocks[0].down
    assert isinstance(layer, QuantizedLinear) and layer.input_scale is not None
    assert float(layer.input_scale) == pytest.approx(max(peaks) / 127, rel=1e-6)
    found.restore()
    # a layer that no input reached has no scale, and is kept
    model.unused = nn.Linear(8, 8)
    found = wavecrest.quantize(model, "w8a8-fp8", **options)
    assert "did not reach it" in row(found, "unused").reason and "unused" not in found.formats
    found.restore()
    found = wavecrest.quantize(model, ("w8a8-fp8", "int8"), **options)
    assert found.formats["unused"] == "int8" and "w8a8-fp8: calibration did not" in row(found, "unused").reason
    found.restore()
    found = wavecrest.quantize(model, "w8a8-fp8", calibration=(ids,))
    assert row(found, "unused").inputs == "random"


def test_quality_is_that_of_the_definitions() -> None:
    torch.manual_seed(0)
    before = torch.randn(2, 7, 11)
    now = before + 0.3 * torch.randn(2, 7, 11)
    # an entry that is ruled out in both
    before[..., 4] = now[..., 4] = -math.inf
    ids = torch.randint(4, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    mask[0, :2] = 0
    sums = _Sums()
    sums.logits(now, before, Inputs((), {"input_ids": ids, "attention_mask": mask}), True)
    found = sums.quality()
    keep = mask.bool()
    p, q = before[keep].double().softmax(-1), now[keep].double().softmax(-1)
    terms = (p * (p.log() - q.log())).nan_to_num(0.0)
    assert found.kl == pytest.approx(float(terms.sum(-1).mean())) and found.positions == 9
    assert found.top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    pairs = keep[:, 1:] & keep[:, :-1]
    for logits, value in ((now, found.perplexity), (before, found.original_perplexity)):
        loss = F.cross_entropy(logits[:, :-1][pairs].double(), ids[:, 1:][pairs])
        assert value == pytest.approx(math.exp(float(loss)))
    assert found.tokens == int(pairs.sum())


def test_only_causal_models_have_a_perplexity() -> None:
    class Both(Causal):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(input_ids) + super().forward(input_ids.flip(1)).flip(1)

    torch.manual_seed(0)
    ids = tokens()
    kept = ids.clone()
    model = Both().to(DEVICE)
    found = wavecrest.quantize(model, "int8", calibration={"input_ids": ids}, quality="2%")
    quality = found.report.quality
    assert quality is not None and quality.perplexity is None and quality.kl is not None
    assert found.report.limits == {"kl": pytest.approx(math.log(1.02))} and torch.equal(ids, kept)
    found.restore()
    with pytest.raises(InvalidArgument, match="quality limits perplexity, which needs logits"):
        wavecrest.quantize(model, "int8", calibration={"input_ids": ids}, quality={"perplexity": "1%"})
    found = wavecrest.quantize(causal(), "int8", calibration=(ids,), evaluation=(tokens(seed=9),), quality="2%")
    assert set(found.report.limits) == {"kl", "perplexity"} and found.report.inputs == "evaluation"
    assert "on the evaluation inputs" in str(found.report)


def test_models_without_logits_are_held_to_their_relative_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(DEVICE)
    x = torch.randn(9, 16).to(DEVICE)
    plain = model(x)
    found = wavecrest.quantize(model, "w8a8-fp8", calibration=x, quality="8%")
    off = float((model(x) - plain).detach().norm() / plain.detach().norm())
    assert found.report.limits == {"relative": 0.08} and found.report.quality is not None
    assert found.report.quality.relative == pytest.approx(off, rel=1e-5) and 0 < off <= 0.08


def test_limits_read() -> None:
    good = Quality(5, 0.004, 0.99, 4, 10.04, 10.0, 0.01, 0.1, True)
    half = limits("0.5%")
    assert half is not None and half.broken(good) == [] and half.of(good)["kl"] == math.log1p(0.005)
    tight = limits({"perplexity": 0.003, "top1": "99.5%"})
    assert tight is not None
    assert tight.broken(good) == ["perplexity 0.004, limit 0.003", "top1 0.99, limit 0.995"]
    for bad in (Quality(5, math.nan, 1.0, 0, None, None, 0, 0, True), Quality(5, 0.0, 1.0, 0, None, None, 0, 0, False)):
        assert len(half.broken(bad)) == 1


def test_it_is_a_context_and_reports_in_notebooks() -> None:
    model = causal()
    before = state_of(model)
    found = wavecrest.quantize(model, "int8", calibration=(tokens(),))
    assert repr(found).startswith("Quantized(Causal: int8 8, 0.0") and "<table>" in found._repr_html_()
    with found as inside:
        assert inside is model and isinstance(model.blocks[0].q, Linear)
    same_state(model, before)
    found = wavecrest.quantize(model, "int8")
    found.forget()
    with pytest.raises(InvalidArgument, match="given up"):
        found.restore()

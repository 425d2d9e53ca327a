"""Quantized models in files: every bit comes back, into models on any device, and what does not fit changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wavecrest
from tests.unit.quantized_models import DEVICE, Causal, causal, same_state, state_of, tokens
from wavecrest.errors import CheckpointError, InvalidArgument, OutputError, Unsupported
from wavecrest.nn import QuantizedLinear

safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("int8", {"group": 32}),
        ("fp8", {}),
        ("mxfp4", {}),
        (("int4", "int8"), {"keep": ["!lm_head", "blocks.0.k"]}),
        ("w8a8-int8", {"activations": "static"}),
        ("w8a8-fp8", {}),
    ],
)
def test_every_bit_comes_back(tmp_path: Path, format: Any, options: dict[str, Any]) -> None:
    model = causal(torch.bfloat16, outlier=True)
    ids = tokens()
    found = wavecrest.quantize(model, format, calibration=(ids,), max_error=1.0, **options)
    # tied to the embedding, which reads the weight too
    assert ("lm_head" in found.formats) == ("!lm_head" in options.get("keep", ()))
    path = tmp_path / "model.safetensors"
    found.save(path)
    with torch.no_grad():
        answer = model(ids)
    other = causal(torch.bfloat16, outlier=False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    before = state_of(other)
    loaded = wavecrest.load_quantized(other, path)
    assert loaded.formats == found.formats and loaded.report.bytes_after == found.report.bytes_after
    with torch.no_grad():
        assert torch.equal(other(ids), answer)
    # what was tied is tied
    assert (other.lm_head.weight is other.embed.weight) == (model.lm_head.weight is model.embed.weight)
    second = tmp_path / "again.safetensors"
    loaded.save(second)
    assert safetensors.load_file(second).keys() == safetensors.load_file(path).keys()
    for name, value in safetensors.load_file(path).items():
        again = safetensors.load_file(second)[name]
        assert torch.equal(value.reshape(-1).view(torch.uint8), again.reshape(-1).view(torch.uint8)), name
    loaded.restore()
    same_state(other, before)


def test_a_model_without_memory_is_filled(tmp_path: Path) -> None:
    model = causal()
    found = wavecrest.quantize(model, "w8a8-int8", calibration=(tokens(),), activations="static")
    found.save(tmp_path / "model.safetensors")
    # in which the two tied weights are two
    empty = Causal().to("meta")
    wavecrest.load_quantized(empty, tmp_path / "model.safetensors", device=DEVICE).forget()
    empty.eval()
    assert isinstance(empty.blocks[0].q, QuantizedLinear)
    with torch.no_grad():
        assert torch.equal(empty(tokens()), model(tokens()))
    # a buffer that no file holds has no values
    short = Causal()
    short.register_buffer("table", torch.zeros(3), persistent=False)
    short.to("meta")
    before = [(name, id(one)) for name, one in short.named_modules()]
    with pytest.raises(CheckpointError, match="no values for table, which are on the meta device"):
        wavecrest.load_quantized(short, tmp_path / "model.safetensors")
    assert before == [(name, id(one)) for name, one in short.named_modules()] and short.embed.weight.is_meta


def test_shared_layers_are_written_once(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.second = self.first
            self.third = nn.Linear(32, 32, bias=False)
            self.third.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.third(self.second(self.first(x)))
            return out

    torch.manual_seed(0)
    model, other, x = Twice(), Twice(), torch.randn(3, 32)
    found = wavecrest.quantize(model, "int8")
    found.save(tmp_path / "m.safetensors")
    assert sum(name.endswith(".stored") for name in safetensors.load_file(tmp_path / "m.safetensors")) == 1
    wavecrest.load_quantized(other, tmp_path / "m.safetensors")
    assert other.first is other.second and other.third.weight is other.first.weight
    assert torch.equal(other(x), model(x))


def _edited(path: Path, *, header: dict[str, Any] | str | None = None, **tensors: Any) -> Path:
    """A copy of a file with another header, and with tensors replaced or, for None, left out."""
    held = safetensors.load_file(path)
    with wavecrest_open(path) as file:
        about = json.loads(file.metadata()["wavecrest"])
    text = header if isinstance(header, str) else json.dumps(about | (header or {}))
    held = {name: value for name, value in (held | tensors).items() if value is not None}
    made = path.with_name("edited.safetensors")
    safetensors.save_file(held, made, metadata={"wavecrest": text})
    return made


def wavecrest_open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"header": "{"}, "damaged header"),
        ({"header": {"version": 2}}, "has version 2, this package reads 1"),
        ({"header": {"layers": {"blocks.0.q": "int3"}}}, "unknown formats: blocks.0.q int3"),
        ({"header": {"layers": {"nowhere": "int8"}}}, "no linear layers or experts: nowhere"),
        ({"header": {"layers": {"norm": "int8"}}}, "no linear layers or experts: norm"),
        ({"header": {"layers": {"lm_head": "int8"}}}, "the weight of lm_head is not packed"),
        ({"header": {"shared": {"lm_head.weight": "gone"}}}, "is damaged"),
        ({"blocks.0.q.weight.scale": None}, "blocks.0.q.weight was saved as stored, scale; there is stored"),
        ({"norm.weight": None}, "missing: norm.weight"),
        ({"more": torch.zeros(1)}, "unexpected: more"),
        ({"norm.bias": torch.zeros(3)}, r"of another shape or dtype: norm.bias \[3\] for \[40\]"),
    ],
)
def test_damaged_and_foreign_files_change_nothing(tmp_path: Path, edit: dict[str, Any], reason: str) -> None:
    model = causal()
    found = wavecrest.quantize(model, "int8")
    found.save(tmp_path / "model.safetensors")
    found.restore()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=reason):
        wavecrest.load_quantized(model, _edited(tmp_path / "model.safetensors", **edit))
    same_state(model, before)


def test_files_that_are_none(tmp_path: Path) -> None:
    model = causal()
    with pytest.raises(CheckpointError, match="cannot be read"):
        wavecrest.load_quantized(model, tmp_path / "missing.safetensors")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        wavecrest.load_quantized(model, tmp_path / "text")
    safetensors.save_file({"a": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"is no file of Quantized\.save"):
        wavecrest.load_quantized(model, tmp_path / "other")


class Counter(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}


def test_what_cannot_be_written(tmp_path: Path) -> None:
    model = causal()
    found = wavecrest.quantize(model, "int8")
    with pytest.raises(OutputError, match="cannot write"):
        found.save(tmp_path / "no" / "folder.safetensors")
    (tmp_path / "old").write_text("as it was")
    model.counter = Counter()
    with pytest.raises(Unsupported, match=r"counter\._extra_state of the model is no tensor"):
        found.save(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "as it was" and len(list(tmp_path.iterdir())) == 1
    found.restore()
    with pytest.raises(InvalidArgument, match="was restored"):
        found.save(tmp_path / "old")

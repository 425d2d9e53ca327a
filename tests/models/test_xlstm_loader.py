"""Folders of weights of xLSTM Large: every form there and back, and what is broken."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.xlstm_harness import DEVICE, build, close, tokens
from wavecrest.errors import CheckpointError, InvalidArgument, OutputError, Unsupported
from wavecrest.models.xlstm import loader, quantize, xLSTMLarge, xLSTMLargeConfig


def _load(folder: Path, **options: Any) -> xLSTMLarge:
    return xLSTMLarge.from_pretrained(folder, device=DEVICE, **options)


def _same(a: xLSTMLarge, b: xLSTMLarge) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:not for transformers")
@pytest.mark.parametrize("form", ["huggingface", "official"])
@pytest.mark.parametrize("stored", ["single", "fused"])
@pytest.mark.parametrize("limit", [5_000_000_000, 40_000], ids=["one file", "parts"])
def test_there_and_back(form: str, stored: str, limit: int, tmp_path: Path) -> None:
    model = build(use_bias=True)
    folder = tmp_path / "new" / "model"
    model.save_pretrained(folder, form=form, weight_mode=stored, max_shard_bytes=limit)
    files = sorted(path.name for path in folder.iterdir())
    assert ("config.json" if form == "huggingface" else "config.yaml") in files
    assert ("model.safetensors" in files) == (limit > 1_000_000)
    if limit == 40_000:
        assert ("model_0.safetensors" in files) == (form == "official") and len(files) > 3
    for mode in ("single", "fused"):
        found = _load(folder, weight_mode=mode)
        assert _same(found, build(use_bias=True, weight_mode=mode))
        assert found.config.mode == "inference" and not found.training
        close(found(tokens(2, 9))[0], model(tokens(2, 9))[0])
    # what a new file of the user's has
    (tmp_path / "mine").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "mine").stat().st_mode}
    # nothing is left beside the folder
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_names_of_hugging_face(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors").keys()
    assert "backbone.embeddings.weight" in names and "embedding.weight" not in names
    build().save_pretrained(tmp_path / "o", form="official")
    assert "embedding.weight" in load_file(tmp_path / "o" / "model.safetensors")


@pytest.mark.parametrize("form", ["huggingface", "official"])
def test_tied_embeddings(form: str, tmp_path: Path) -> None:
    model = build(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m", form=form)
    # the official package ties nothing
    assert ("lm_head.weight" in load_file(tmp_path / "m" / "model.safetensors")) == (form == "official")
    found = _load(tmp_path / "m")
    assert (found.lm_head.weight is found.embedding.weight) == (form == "huggingface")
    close(found(tokens(1, 9))[0], model(tokens(1, 9))[0])


def test_parts_without_an_index(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "m", max_shard_bytes=40_000)
    (tmp_path / "m" / loader.INDEX).unlink()
    assert _same(_load(tmp_path / "m", weight_mode="single"), build())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("named", [False, True])
def test_dtypes(stored: torch.dtype, dtype: torch.dtype | None, named: bool, tmp_path: Path) -> None:
    build(dtype=stored).save_pretrained(tmp_path / "m")
    asked = str(dtype).removeprefix("torch.") if named and dtype else dtype
    found = _load(tmp_path / "m", dtype=asked, weight_mode="single")
    assert {parameter.dtype for parameter in found.parameters()} == {dtype or stored}
    assert _same(found, build(dtype=stored).to(dtype or stored))


def test_settings_can_be_changed(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "m")
    found = _load(tmp_path / "m", inference_state_dtype="float16", step_kernel="native", chunk_size=32)
    assert found.empty_state(1)[0][0].dtype == torch.float16
    assert found.config.step_kernel == "native" and found.config.chunk_size == 32
    with pytest.raises(InvalidArgument, match="the configuration has no colour"):
        _load(tmp_path / "m", colour="red")
    for theirs, ours in (("torch_dtype", "dtype"), ("device_map", "device")):
        with pytest.raises(InvalidArgument, match=f"{theirs}= is called {ours}= here"):
            _load(tmp_path / "m", **{theirs: "auto"})


def test_names_of_the_hub_are_not_downloaded() -> None:
    with pytest.raises(CheckpointError, match=r"not downloaded: huggingface_hub.snapshot_download\(name\) gives"):
        _load(Path("NX-AI/xLSTM-7b"))


@pytest.mark.parametrize(
    ("form", "mode", "stored"),
    [("huggingface", None, "single"), ("official", None, "fused"), ("huggingface", "fused", "fused")],
)
def test_weights_of_hugging_face_are_single_unless_asked_for(
    form: str, mode: str | None, stored: str, tmp_path: Path
) -> None:
    """transformers does not load fused ones."""
    build(weight_mode="fused").save_pretrained(tmp_path / "m", form=form, weight_mode=mode)
    names = load_file(tmp_path / "m" / "model.safetensors").keys()
    assert any("qkv_opreact" in name for name in names) == (stored == "fused")
    assert xLSTMLargeConfig.from_folder(tmp_path / "m").weight_mode == stored


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_packed_as_they_are_read(format: str, tmp_path: Path) -> None:
    build(weight_mode="fused").save_pretrained(tmp_path / "m")
    found, wanted = _load(tmp_path / "m", quantize=format), quantize(build(weight_mode="fused"), format)
    # what was loaded has gradients, which no kernel gives
    with torch.no_grad():
        torch.testing.assert_close(found(tokens(1, 5))[0], wanted(tokens(1, 5))[0], rtol=0, atol=0)


def test_weights_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second model in memory: what was read is gone, but the last, when the next is read."""
    model = build()
    model.save_pretrained(tmp_path / "m")
    read, alive, largest = loader._Reader.read, [], []

    def noted(reader: Any, rows: Any) -> Tensor:
        largest.append(sum(one() is not None for one in alive))
        part = read(reader, rows)
        alive.append(weakref.ref(part))
        return part

    monkeypatch.setattr(loader._Reader, "read", noted)
    _load(tmp_path / "m")
    assert len(largest) == len(model.state_dict()) and max(largest) <= 1


class _Folder:
    """A saved model whose files a test breaks."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        build().save_pretrained(path, **options)

    def tensors(self, change: Any) -> None:
        tensors = load_file(self.path / "model.safetensors")
        change(tensors)
        save_file(tensors, self.path / "model.safetensors")

    def config(self, **changes: Any) -> None:
        values = json.loads((self.path / "config.json").read_text())
        (self.path / "config.json").write_text(json.dumps(values | changes))


def _without(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"], tensors["backbone.blocks.1.ffn.proj_up.weight"]
    tensors["backbone.blocks.2.norm_ffn.weight"] = torch.ones(36)
    tensors["backbone.out_norm.weight"] = torch.ones(35)


def test_all_that_differs_is_named(tmp_path: Path) -> None:
    folder = _Folder(tmp_path / "m")
    folder.tensors(_without)
    with pytest.raises(CheckpointError) as error:
        _load(folder.path)
    text = str(error.value)
    assert "missing: backbone.blocks.1.ffn.proj_up.weight, lm_head.weight" in text
    assert "unexpected: backbone.blocks.2.norm_ffn.weight" in text
    assert "of another shape: backbone.out_norm.weight [35] for [36]" in text


def test_long_lists_are_cut(tmp_path: Path) -> None:
    folder = _Folder(tmp_path / "m")
    folder.config(num_blocks=4, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"missing: .* and 18 more"):
        _load(folder.path)


def _integers(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: shutil.rmtree(f.path), "is no folder"),
        (lambda f: (f.path / "model.safetensors").unlink(), "has no weights"),
        (lambda f: (f.path / "config.json").unlink(), "neither config.json nor"),
        (lambda f: f.config(embedding_dim=72, hidden_size=72), "of another shape"),
        (lambda f: f.config(weight_mode="half"), "weight_mode takes single, fused"),
        (lambda f: f.tensors(_integers), "lm_head.weight I8"),
        (lambda f: (f.path / "model.safetensors").write_bytes(b"not weights"), "model.safetensors cannot be read"),
        (
            lambda f: (f.path / "model.safetensors").write_bytes((f.path / "model.safetensors").read_bytes()[:-50]),
            "model.safetensors cannot be read",
        ),
        (lambda f: (f.path / loader.INDEX).write_text("{}"), "index.json is damaged"),
        (lambda f: (f.path / loader.INDEX).write_text('{"weight_map": {"a": 1}}'), "index.json is damaged"),
        (
            lambda f: (f.path / loader.INDEX).write_text('{"weight_map": {"a": "../m/model.safetensors"}}'),
            "names files outside of the folder: ../m/model.safetensors",
        ),
        (
            lambda f: (f.path / loader.INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
            "lacks model-00001-of-00002.safetensors",
        ),
    ],
)
def test_broken_folders(damage: Any, reason: str, tmp_path: Path) -> None:
    folder = _Folder(tmp_path / "m")
    damage(folder)
    with pytest.raises(CheckpointError, match=reason):
        _load(folder.path)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    folder = _Folder(tmp_path / "m", max_shard_bytes=40_000)
    first, second = sorted(folder.path.glob("model-*.safetensors"))[:2]
    save_file(load_file(second) | {"backbone.embeddings.weight": torch.ones(61, 36)}, second)
    with pytest.raises(CheckpointError, match=f"embedding.weight is in {first.name} and in {second.name}"):
        _load(folder.path)


def test_nan_cannot_be_quantized(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["backbone.blocks.1.mlstm_layer.k.weight"][0, 0] = float("nan")

    folder = _Folder(tmp_path / "m")
    folder.tensors(spoil)
    with pytest.raises(InvalidArgument, match=r"blocks\.1\.mlstm_layer\.qkv_opreact\.weight: .*NaN"):
        _load(folder.path, quantize="int8")
    for options, reason in (
        ({"quantize": "int3"}, "quantize takes int8"),
        ({"dtype": torch.int8}, "dtype takes"),
        ({"dtype": "auto"}, "dtype takes float64"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            _load(folder.path, **options)


def test_what_is_not_saved(tmp_path: Path) -> None:
    model = build()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        model.save_pretrained(tmp_path / "full")
    with pytest.raises(OutputError, match="cannot write to"):
        model.save_pretrained(tmp_path / "full" / "note" / "m")
    for options in ({"form": "onnx"}, {"weight_mode": "half"}):
        with pytest.raises(InvalidArgument):
            model.save_pretrained(tmp_path / "m", **options)
    with pytest.raises(Unsupported, match="is packed; take save_quantized"):
        quantize(model).save_pretrained(tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    (tmp_path / "empty").mkdir()
    build().save_pretrained(tmp_path / "empty")
    assert _same(_load(tmp_path / "empty", weight_mode="single"), build())


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(loader, "_write_weights", full)
    with pytest.raises(OutputError, match="no space left"):
        build().save_pretrained(tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:not for transformers")
@pytest.mark.parametrize("use_bias", [False, True])
def test_files_of_transformers_and_for_them(use_bias: bool, tmp_path: Path) -> None:
    """transformers reads what is written here, and what it writes is read here."""
    from transformers import xLSTMForCausalLM

    from tests.models.xlstm_harness import native

    theirs = native(use_bias=use_bias)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = _load(tmp_path / "theirs")
    prompt = tokens(2, 12)
    close(ours(prompt)[0], theirs(prompt, use_cache=False).logits)
    # as a model that was trained here
    ours.config.mode, ours.config.return_last_states = "train", False
    ours.save_pretrained(tmp_path / "ours")
    again, report = xLSTMForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "mismatched_keys"))
    # transformers' last norm has none, which ours was read without
    assert set(report["unexpected_keys"]) == ({"backbone.out_norm.bias"} if use_bias else set())
    close(again.to(DEVICE)(prompt, use_cache=False).logits, theirs(prompt, use_cache=False).logits)

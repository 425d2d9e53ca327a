"""--hf with a folder made here (tiny, random weights) and what is wrong with other folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from wavecrest.cli.main import main
from wavecrest.measure.workload import load

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_workload_of_a_folder(folder: Path) -> None:
    workload = load(f"hf:{folder}", device="cpu")
    assert type(workload.model).__name__ == "BertModel" and list(workload.buckets) == ["b1s32", "b8s128"]
    ids = workload.buckets["b8s128"].kwargs["input_ids"]
    assert tuple(ids.shape) == (8, 128) and int(ids.min()) >= 0 and int(ids.max()) < 100
    assert workload.run("b1s32").last_hidden_state.shape == (1, 32, 32)
    assert workload.spec == f"hf:{folder}"


def test_bench_takes_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--hf", str(folder), "--device", "cpu", "--seconds", "0.1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["bucket"] for row in record["buckets"]] == ["b1s32", "b8s128"]


def test_wrong_folders(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--hf", str(tmp_path / "none"), "--device", "cpu"]) == 1
    assert "has no config.json" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert main(["bench", "--hf", str(folder), "--device", "cpu"]) == 1
    assert "transformers cannot load" in capsys.readouterr().err

from __future__ import annotations

import json

import pytest

from wavecrest import registry
from wavecrest.cli import explain, main
from wavecrest.errors import InvalidArgument

# what M=3 N=64 dtype=float32 are in the key of an op whose key does not call them rows, columns and dtype
KEYS = {
    "dequantize": {"rows": 3, "columns": 64, "to": "float32"},
    "memcpy": {"blocks_4k": 1},
    "rope": {"tokens": 3, "heads": 1, "columns": 64, "dtype": "float32"},
}


@pytest.mark.parametrize("op", registry.names())
def test_every_op_is_explained(op: str) -> None:
    record = explain.run(op, ["M=3", "N=64", "dtype=float32"], "cpu")
    assert record.backend == "torch"
    assert record.refused.get("triton")
    expected = KEYS.get(op, {"rows": 3, "columns": 64, "dtype": "float32"})
    assert {name: record.key[name] for name in expected} == expected
    assert "CPU" in record.note


def test_defaults() -> None:
    record = explain.run("rms_norm", None, "cpu")
    assert (record.key["rows"], record.key["columns"], record.key["dtype"]) == (16, 4096, "bfloat16")
    assert record.bytes == 2 * 16 * 4096 * 2 + 4096 * 2


@pytest.mark.parametrize("setting", ["M", "M=", "M=0", "M=-1", "M=1.5", "N=x", "K=4", "dtype=int8", "dtype=", "=4"])
def test_wrong_settings(setting: str) -> None:
    with pytest.raises(InvalidArgument, match=setting.split("=")[0]):
        explain.run("rms_norm", [setting], "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "norm"], "no op named 'norm'"),
        (["explain", "rms_norm", "K=4"], "K=4"),
        (["explain", "rms_norm", "--device", "tpu"], "unknown device"),
    ],
)
def test_user_errors_exit_1(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "silu_and_mul", "N=64", "--device", "cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["kind"] == "explain" and shown["backend"] == "torch" and shown["key"]["packed"] is False


def test_table_names_backend_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "rms_norm", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text and "not triton" in text and "decided for the CPU" in text
    assert max(len(line) for line in text.splitlines()) <= 80

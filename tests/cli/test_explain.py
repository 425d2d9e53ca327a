from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toy import ToyOp, TwoCall
from wavecrest import hardware
from wavecrest.bench import sizes
from wavecrest.cli import _shared, explain, main
from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.tuned import Config, Database, Row, database, row
from wavecrest.errors import InvalidArgument
from wavecrest.ops.slstm.sequence import launch_cpu

# what M=3 N=64 dtype=float32 are in the key of an op whose key does not call them rows, columns and dtype
KEYS = {
    "dequantize": {"rows": 3, "columns": 64, "to": "float32"},
    "gemm": {"rows": 3, "columns": 64, "k": 4096, "a": "float32"},
    "memcpy": {"blocks_4k": 1},
    "moe": {"tokens": 3, "intermediate": 64, "dtype": "float32"},
    "topk_routing": {"tokens": 3, "experts": 64, "dtype": "float32"},
    "rope": {"tokens": 3, "heads": 1, "columns": 64, "dtype": "float32"},
}


@pytest.fixture
def product() -> Iterator[ToyOp]:
    """An op of three sizes and more dtypes, whose key says that it is on a GPU."""

    def inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        return torch.empty(M, K, dtype=dtype, device=device), torch.empty(N, K, dtype=dtype, device=device)

    made = ToyOp(
        "product",
        reference=lambda a, b: a @ b.t(),
        call_type=TwoCall,
        key=lambda a, b: (a.shape[0], b.shape[0], a.shape[1], dtype_name(a), "cuda"),
        key_fields=("M", "N", "K", "dtype", "device"),
        inputs=inputs,
        cost=lambda a, b: Cost(2 * a.numel() * b.shape[0], a.nbytes + b.nbytes),
        default_config=lambda key: Config(BLOCK=16),
        sizes=("M", "N", "K"),
        example_dtypes=("float16", "bfloat16", "float8_e4m3fnuz", "float8_e4m3fn", "int8"),
    )
    made.kernel("tiles", lambda a, b, *, config: a, priority=20)
    yield made
    del registry.STATE.ops["product"]


# of ops whose calls have other sizes: (settings, what they are in the key)
OTHER_SIZES = {
    "causal_conv1d": (["B=2", "S=9", "C=24"], {"batch": 2, "tokens": 16, "channels": 24, "taps": 4}),
    "conv2d": (["B=2", "C=3", "H=9", "O=4"], {"pixels": 256, "outputs": 4, "channels": 3}),
    "mla_decode": (["B=2", "H=3", "S=9"], {"batch": 2, "heads": 3, "capacity": 16, "tokens": 1, "latent": 512}),
    "mla_prefill": (["B=2", "H=3", "T=5", "S=9"], {"batch": 2, "heads": 3, "capacity": 16, "tokens": 5, "nope": 128}),
    "mlstm_chunkwise": (["B=2", "H=3", "S=9", "D=16"], {"tokens": 16, "heads": 3, "dk": 16, "dv": 32}),
    "mlstm_sequence": (["B=2", "H=3", "S=9", "D=16"], {"tokens": 16, "heads": 3, "dk": 16, "dv": 32}),
    "mlstm_step": (["B=2", "H=3", "D=16"], {"heads": 3, "dk": 16, "dv": 32}),
    "slstm_sequence": (["B=2", "H=3", "S=9", "D=16"], {"heads": 3, "head_dim": 16, "forget_gate": "sigmoid"}),
    "slstm_step": (["B=2", "H=3", "D=16"], {"heads": 3, "head_dim": 16, "bias": True}),
    "flash_attention": (["B=2", "H=3", "S=9", "D=16"], {"batch": 2, "heads": 3, "queries": 16, "keys": 16, "d": 16}),
    "flash_decoding": (["B=2", "H=8", "S=9", "D=16"], {"batch": 2, "heads": 8, "kv_heads": 2, "capacity": 16, "d": 16}),
}


@pytest.mark.parametrize("op", registry.names())
def test_every_op_is_explained(op: str) -> None:
    rows = (["M=3", "N=64"], KEYS.get(op, {"rows": 3, "columns": 64, "dtype": "float32"}))
    sizes, expected = OTHER_SIZES.get(op, rows)
    record = explain.run(op, [*sizes, "dtype=float32"], "cpu")
    assert record.backend == ("c" if op.startswith("slstm") and launch_cpu.problem() is None else "torch")
    assert record.refused.get("triton")
    assert {name: record.key[name] for name in expected} == expected
    assert "CPU" in record.note


def test_defaults() -> None:
    record = explain.run("rms_norm", None, "cpu")
    assert (record.key["rows"], record.key["columns"], record.key["dtype"]) == (16, 4096, "bfloat16")
    assert record.bytes == 2 * 16 * 4096 * 2 + 4096 * 2


@pytest.mark.parametrize(
    ("settings", "call"),
    [
        ("", (16, 4096, "bfloat16")),
        ("3", (3, 4096, "bfloat16")),
        ("3 64", (3, 64, "bfloat16")),
        ("3 64 fp16", (3, 64, "float16")),
        ("3 64 float32", (3, 64, "float32")),
        ("fp64", (16, 4096, "float64")),
        ("fp32 3", (3, 4096, "float32")),
        ("M=3 64 dtype=bf16", (3, 64, "bfloat16")),
        ("N=64 3", (3, 64, "bfloat16")),
    ],
)
def test_bare_values(settings: str, call: tuple[int, int, str]) -> None:
    key = explain.run("rms_norm", settings.split(), "cpu").key
    assert (key["rows"], key["columns"], key["dtype"]) == call


@pytest.mark.parametrize(
    ("settings", "call"),
    [
        ("", (16, 4096, 4096, "bfloat16")),
        ("2 32 8 fp16", (2, 32, 8, "float16")),
        ("2 32 K=8", (2, 32, 8, "bfloat16")),
        ("K=8 2 32", (2, 32, 8, "bfloat16")),
        ("M=2 N=32 K=8 dtype=int8", (2, 32, 8, "int8")),
        ("2 32 8 int8", (2, 32, 8, "int8")),
        ("2 32 8 float8_e4m3fn", (2, 32, 8, "float8_e4m3fn")),
    ],
)
def test_an_op_of_three_sizes(product: ToyOp, settings: str, call: tuple[int, int, int, str]) -> None:
    key = explain.run("product", settings.split(), "cpu").key
    assert (key["M"], key["N"], key["K"], key["dtype"]) == call


@pytest.mark.parametrize(
    ("arch", "flavour"), [("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn"), ("sm_90", "e4m3fn"), ("sm_80", "e4m3fnuz")]
)
def test_fp8_is_the_devices(product: ToyOp, monkeypatch: pytest.MonkeyPatch, arch: str, flavour: str) -> None:
    # an architecture without one takes the first of the op's
    found = hardware.Device("cpu", 0, arch, "stand-in", 1, 1, "")
    # what is looked up once a process, as the architecture of measured rows, is not to be the stand-in's
    explain.run("product", [], "cpu")
    monkeypatch.setattr(hardware, "detect", lambda device: found)
    assert explain.run("product", ["2", "2", "2", "fp8"]).key["dtype"] == f"float8_{flavour}"


def test_a_default_dtype_that_the_op_takes(product: ToyOp) -> None:
    product.restudy(example_dtypes=("int8", "float16"))
    assert explain.run("product", [], "cpu").key["dtype"] == "int8"


@pytest.mark.parametrize(
    ("op", "settings", "message"),
    [
        ("rms_norm", "1 2 3", "'3' is no size or dtype that rms_norm takes: give '16 4096 bfloat16' or 'M=16 N=4096 "),
        ("rms_norm", "1 2 K=3", "'K=3' is no size"),
        ("rms_norm", "n=3", "'n=3' is no size"),
        ("rms_norm", "M=3 M=3", "'M=3': M is already 3"),
        ("rms_norm", "3 M=4", "'M=4': M is already 3"),
        ("rms_norm", "bf16 fp16", "'fp16': dtype is already bf16"),
        ("rms_norm", "bf16 dtype=fp16", "'dtype=fp16': dtype is already bf16"),
        ("rms_norm", "0", "M=0: must be a whole number from 1 to"),
        ("rms_norm", "3 1.5", "N=1.5: must be"),
        ("rms_norm", "3x64", "M=3x64: must be"),
        ("rms_norm", "fp8", "dtype=fp8: rms_norm takes float64, float32, float16, bfloat16"),
        ("rms_norm", "int8", "dtype=int8: rms_norm takes"),
        ("rms_norm", "loud", "dtype=loud: rms_norm takes"),
        ("rms_norm", "--x", "'--x' is no size"),
        ("product", "1 2 3 4", "'4' is no size or dtype that product takes: give '16 4096 4096 bfloat16' or 'M=16 N="),
        ("product", "1 2 3 fp32", "dtype=fp32: product takes float16, bfloat16, float8"),
    ],
)
def test_wrong_words(product: ToyOp, op: str, settings: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        explain.run(op, settings.split(), "cpu")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("setting", ["M", "M=", "M=0", "M=-1", "M=1.5", "N=x", "K=4", "dtype=int8", "dtype=", "=4"])
def test_wrong_settings(setting: str) -> None:
    with pytest.raises(InvalidArgument, match=setting.split("=")[0] or "'=4' is no size"):
        explain.run("rms_norm", [setting], "cpu")


def test_a_measured_row_is_shown_with_its_source(
    product: ToyOp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Database(tmp_path, "sm_00")
    fields = ("M", "N", "K", "dtype")
    rows = [
        Row((2, 32, 8, "bfloat16"), "tiles", Config(BLOCK=64), 12.3, 15.0, "h200/bench.json"),
        Row((3, 32, 8, "bfloat16"), "gone", None, 12.3, 15.0, "h200/bench.json"),
    ]
    database.write(found.path("product"), fields, rows)
    with registry.measured_in(found):
        record = explain.run("product", ["2", "32", "8"], "cpu")
        assert (record.backend, record.config, record.source) == ("tiles", {"BLOCK": 64}, "exact")
        assert record.reason == "measured 12.3 µs, native 15.0 µs (h200/bench.json)"
        record = explain.run("product", ["3", "32", "8"], "cpu")
        assert (record.backend, record.config, record.source) == ("tiles", {"BLOCK": 16}, "default")
        assert record.reason.endswith("for gone, which product does not have")
        assert main.main(["explain", "product", "2", "32", "8", "--device", "cpu"]) == 0
        text = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert "measured 12.3 µs, native 15.0 µs" in text and "source: exact" in text and "BLOCK=64" in text
    found.path("product").write_text("damaged")
    with registry.measured_in(Database(tmp_path, "sm_00")):
        assert main.main(["explain", "product", "2", "32", "8", "--device", "cpu"]) == 1
    assert "product.csv, line 1" in " ".join(capsys.readouterr().err.split())


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


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
def test_a_ranking_for_an_architecture_that_is_not_here(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "gemm", "16", "1024", "1024", "bf16", "--arch", arch]) == 0
    text = capsys.readouterr().out
    assert f"gemm on {arch}" in text and "model, not measured" in text and "(default)" in text and "memory" in text
    assert ("published for" in text) == (arch in ("gfx942", "gfx950"))
    assert main.main(["explain", "gemm", "16", "1024", "1024", "bf16", "--arch", arch, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["evidence"], shown["arch"]) == ("explain-model", "model", arch)
    times = [row["us"] for row in shown["ranking"]]
    assert times == sorted(times) and min(times) > 0 and len(times) > 10
    assert all(sum(row["shares"].values()) == pytest.approx(1) for row in shown["ranking"])
    assert {row["backend"] for row in shown["ranking"] if row["default"]} >= {"triton", "triton_stream_k"}
    # as many rows as the key of a call on a GPU says, whatever is here
    assert shown["key"]["rows"] == 16 and shown["key"]["device"] == "cuda"
    decision = shown["decision"]
    assert (decision["kind"], decision["arch"], decision["key"]) == ("explain", arch, shown["key"])
    assert decision["function"] and decision["source"] in ("exact", "near", "default")


def test_what_others_published_is_shown_for_an_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    """Selection by batch on gfx942: which function runs, and that it is prior data; no ranking, and why."""
    for batch, backend, function in (
        ("1", "torch", "wavecrest.ops.mlstm.reference.chunkwise"),
        ("2", "triton", "wavecrest.ops.mlstm.chunkwise.kernel._mlstm_chunks_kernel"),
    ):
        call = ["mlstm_chunkwise", f"B={batch}", "S=2048", "D=64", "bf16", "--arch", "gfx942"]
        assert main.main(["explain", *call, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        decision = shown["decision"]
        assert (decision["backend"], decision["source"]) == (backend, "prior") and function in decision["function"]
        assert decision["reason"].startswith("prior data, published by others and not measured here")
        assert shown["ranking"] == [] and "no backend of it describes its work" in shown["note"]
        assert main.main(["explain", *call]) == 0
        text = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert "source: prior" in text and "decided for MI300X" in text and "no backend of it" in text
    # other architectures have no such data
    record = explain.rank("mlstm_chunkwise", "sm_90", ["B=1", "S=2048", "D=64", "bf16"])
    assert record.decision is not None and (record.decision.backend, record.decision.source) == ("triton", "default")


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("mlstm_chunkwise", "mlstm.chunkwise.kernel._mlstm_chunks_kernel"),
        ("mlstm_sequence", "mlstm.sequence.kernel._mlstm_recurrent_kernel"),
        ("mlstm_step", "mlstm.step.kernel._mlstm_step_kernel"),
        ("slstm_sequence", "slstm.sequence.kernel._slstm_sequence_kernel"),
        ("slstm_step", "slstm.step.kernel._slstm_step_kernel"),
    ],
)
def test_ops_of_xlstm_are_explained_for_gfx942_from_anywhere(op: str, kernel: str) -> None:
    # with the head sizes of xLSTM 7B for the mLSTM, of TiRex for the sLSTM
    sizes = ["B=16", "H=8", "D=256"] if op.startswith("mlstm") else ["B=64", "H=4", "D=128"]
    record = explain.rank(op, "gfx942", [*sizes, "bf16"])
    assert record.decision is not None and record.decision.backend == "triton"
    assert kernel in (record.decision.function or "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm", "--arch", "gfx9"], "unknown architecture 'gfx9': known are gfx90a"),
        (["gemm", "--arch", "gfx942", "--device", "cpu"], "leave --device out"),
        (["norm", "--arch", "gfx942"], "no op named 'norm'"),
    ],
)
def test_what_cannot_be_ranked_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main.main(["explain", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_row_of_another_part_is_compared_with_the_part_that_is_assumed() -> None:
    evidence = row.Evidence(device="AMD Instinct MI300A", units=228)
    with row.assumed(hardware.ARCHS["gfx942"]):
        assert row.differences(evidence) == "AMD Instinct MI300A, 228 compute units, 304 on MI300X"
        assert row.differences(row.Evidence(device="AMD Instinct MI300X OAM", units=304)) == ""
    assert row.differences(evidence).startswith("AMD Instinct MI300A, 228 compute units, ")
    assert row.differences(evidence).endswith(" here")


def _sizes_by_the_keys_words() -> list[tuple[str, str]]:
    from wavecrest import ops

    found = []
    for name in ops.names():
        op = registry.get(name)
        named = [field for field in op.key_fields if sizes.named(op, field) in op.study.sizes]
        found += [(name, field) for field in named]
    return found


@pytest.mark.parametrize(("op", "field"), _sizes_by_the_keys_words())
def test_a_size_may_be_named_as_in_the_key(op: str, field: str) -> None:
    for word in (field, field.upper()):
        assert explain.rank(op, "gfx942", [f"{word}=128"]).key[field] == 128


def test_other_parts_of_a_key_are_taken_where_the_op_makes_calls_from_keys() -> None:
    for op, words, field, value in (
        ("gemm", ["M=1", "N=64", "K=64", "activation=silu_and_mul"], "activation", "silu_and_mul"),
        ("gemm", ["Residual=true", "64", "64", "64"], "residual", True),
        ("mlstm_chunkwise", ["DV=32"], "dv", 32),
        ("flash_decoding", ["tokens=2"], "tokens", 2),
    ):
        assert explain.rank(op, "gfx942", words).key[field] == value
    # N is the columns of the result
    assert explain.rank("gemm", "gfx942", ["N=64", "activation=silu_and_mul"]).key["columns"] == 64
    with pytest.raises(InvalidArgument, match="activation=tan: gemm: activation takes relu"):
        explain.rank("gemm", "gfx942", ["activation=tan"])
    with pytest.raises(InvalidArgument, match="residual is already True"):
        explain.rank("gemm", "gfx942", ["residual=true", "residual=false"])


def test_the_keys_words_reach_most_ops_and_other_parts_of_a_key_stay_refused() -> None:
    assert {"batch", "heads", "dk", "tokens", "rows", "columns", "capacity"} <= {
        field for _, field in _sizes_by_the_keys_words()
    }
    from_sizes, unknown = "has {} from its sizes.*by batch", "is no size.*by rows"
    for op, word, problem in (
        ("mla_decode", "latent=64", from_sizes.format("latent")),
        ("rms_norm", "batch=2", unknown),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            explain.rank(op, "gfx942", [word])
    with pytest.raises(InvalidArgument, match="D is already 32"):
        explain.rank("mlstm_chunkwise", "gfx942", ["D=32", "dk=64"])


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90", "sm_100"])
def test_every_op_has_a_decision_for_every_architecture_here(arch: str) -> None:
    from wavecrest import ops

    for name in ops.names():
        record = explain.rank(name, arch)
        assert record.decision is not None, f"{name}: {record.note}"
        assert record.decision.arch == arch and record.decision.flops >= 0 and record.decision.function
        assert "compute units" not in record.decision.reason, "rows are compared with the architecture's part"


def test_a_call_larger_than_this_machine_is_decided_and_one_larger_than_a_tensor_is_refused() -> None:
    # an exabyte
    record = explain.rank("rms_norm", "gfx942", ["M=99999999999", "N=999999"])
    assert record.key["columns"] == 999999 and record.decision is not None and record.ranking
    with pytest.raises(InvalidArgument, match="M=999999999999 N=999999999999 makes no tensor"):
        explain.rank("rms_norm", "gfx942", ["M=999999999999", "N=999999999999"])


def test_a_key_that_needs_the_values_of_tensors_is_decided_where_the_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get("rms_norm")
    plain = op.key

    def key(call: Any) -> Any:
        return (*plain(call)[:-1], bool(call.x.flatten()[0] > 0))

    monkeypatch.setattr(op, "key", key)
    record = explain.rank("rms_norm", "gfx942", ["2", "8"])
    assert record.decision is None and "where the GPU is" in record.note


@pytest.mark.parametrize(("op", "sizes"), [("gemm", "rows, columns, k"), ("rms_norm", "")])
def test_the_parts_of_a_key_are_explained(
    op: str, sizes: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared.out, "_width", 1000)
    assert main.main(["explain", op, *(["64"] if op == "gemm" else []), "64", "128", "bfloat16"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("call: the parts of its key")]
    differs = f"A measured row may differ from it in {sizes}, and says" if sizes else "A measured row says"
    assert line.endswith(f"{differs} nothing of device, grad")


@pytest.mark.slow
def test_a_kernel_with_descriptors_is_explained_for_another_gpu_without_a_warning() -> None:
    """Its tensors have no memory, and PyTorch warns of an address that is asked for, once a process."""
    call = ["M=16384", "N=3072", "K=768", "dtype=fp16", "bias=n", "activation=gelu", "--arch", "sm_90"]
    command = [sys.executable, "-m", "wavecrest", "explain", "gemm", *call]
    # Triton's interpreter knows no Gluon, and makes no descriptors
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=own)
    assert "triton_hopper_epilogue" in done.stdout and "data pointer" not in done.stderr

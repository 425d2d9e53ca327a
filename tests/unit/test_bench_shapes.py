"""Files of shapes: what becomes a case, and what is refused with the line it stands in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from wavecrest.bench import shapes, sizes
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import tensors_of
from wavecrest.errors import TableError
from wavecrest.tune import child


def written(folder: Path, text: str) -> Path:
    path = folder / "shapes.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_each_shape_is_a_case_of_its_op(tmp_path: Path, device: str) -> None:
    path = written(
        tmp_path,
        "\ufeffop, M,N,K,dtype\ngemm,16,64,128,\n\ngemm,16,64,128,bf16\nrms_norm,3,40,,float32\n"
        "gemm,1,8,16,fp16\n,,,,\n",
    )
    found = shapes.read(path, device)
    assert list(found) == ["gemm", "rms_norm"]
    gemm = found["gemm"]
    assert [case.name for case in gemm.cases] == ["16x64x128 bf16", "1x8x16 fp16"]
    assert gemm.sources == {
        "16x64x128 bf16": {"sizes": [16, 64, 128], "dtype": "bfloat16"},
        "1x8x16 fp16": {"sizes": [1, 8, 16], "dtype": "float16"},
    }
    op = registry.get("gemm")
    call = gemm.cases[0].make()
    op.check(call)
    parts = dict(zip(op.key_fields, op.key(call), strict=True))
    assert (parts["columns"], parts["k"], parts["a"]) == (64, 128, "bfloat16")
    (case,) = found["rms_norm"].cases
    x = case.make().x
    assert tuple(x.shape) == (3, 40) and x.dtype == torch.float32 and x.device.type == torch.device(device).type


def test_other_parts_of_a_key_are_columns(tmp_path: Path, device: str) -> None:
    path = written(
        tmp_path,
        "op,M,N,K,bias,activation,residual,dtype\n"
        "gemm,100,64,128,n,gelu,true,\ngemm,100,64,128,,silu_and_mul,,\ngemm,100,64,128,,,,\nrms_norm,3,40,,,,,\n",
    )
    found = shapes.read(path, device)
    names = ["100x64x128 bf16 bias=n activation=gelu residual=true", "100x64x128 bf16 activation=silu_and_mul"]
    assert [case.name for case in found["gemm"].cases] == [*names, "100x64x128 bf16"]
    assert [case.name for case in found["rms_norm"].cases] == ["3x40 bf16"]
    assert found["gemm"].sources[names[1]] == {
        "sizes": [100, 64, 128], "dtype": "bfloat16", "options": {"activation": "silu_and_mul"},
    }  # fmt: skip
    op = registry.get("gemm")
    full, gated, plain = (case.make() for case in found["gemm"].cases)
    # 100 rows, and not those of their bucket; N columns of the result, for which a gated activation needs twice as many
    assert full.a.shape == gated.a.shape == (100, 128) and full.a.device.type == torch.device(device).type
    assert full.b.shape == (128, 64) and gated.b.shape == (128, 128)
    assert (full.activation, full.bias.shape, full.residual.shape) == ("gelu", (64,), (100, 64))
    keys = [dict(zip(op.key_fields, op.key(call), strict=True)) for call in (full, gated, plain)]
    assert [key["columns"] for key in keys] == [64] * 3
    assert [key["activation"] for key in keys] == ["gelu", "silu_and_mul", None]
    # another process makes the same calls
    for case in found["gemm"].cases:
        source, key = found["gemm"].sources[case.name], op.key(case.make())
        assert op.key(child._case(case.name, json.loads(json.dumps(source)), op, key, device).make()) == key


def test_the_hundred_products_of_language_models_are_shapes() -> None:
    found = shapes.read(Path(__file__).parents[2] / "benchmarks" / "shapes" / "llm_gemm.csv", "meta")
    op = registry.get("gemm")
    assert list(found) == ["gemm"] and len({op.key(case.make()) for case in found["gemm"].cases}) == 100


@pytest.mark.parametrize("fp8", ["e4m3fnuz", "e4m3fn"])
def test_gemms_of_8_bit_floats_are_the_devices(fp8: str) -> None:
    """DeepSeek's layers with scales by block, Llama's with one a row and column: fnuz on gfx942, as on no other."""
    found = shapes.read(Path(__file__).parents[2] / "benchmarks" / "shapes" / "llm_fp8.csv", "meta", fp8=fp8)
    op = registry.get("gemm")
    keys = [dict(zip(op.key_fields, op.key(case.make()), strict=True)) for case in found["gemm"].cases]
    assert len({tuple(key.values()) for key in keys}) == 37
    assert {(key["a"], key["b"]) for key in keys} == {(f"float8_{fp8}",) * 2}
    assert [key["scales"] for key in keys] == ["block block"] * 25 + ["vector vector"] * 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line names the columns, each once: op,M,N,K,dtype"),
        ("M,N,K\n1,2,3\n", "its first line names the columns"),
        ("op,M,M\ngemm,1,2\n", "its first line names the columns"),
        ("op,M,N,K\ngemm,1,2\n", "line 2: has 3 cells for 4 columns"),
        ("op,M,N,K\n,1,2,3\n", "line 2: names no op"),
        ("op,M,N,K\nnothing,1,2,3\n", "line 2: no op named 'nothing'"),
        ("op,M,N,K\ngemm,1,2,\n", "line 2: gemm has the sizes M, N, K, not M, N"),
        ("op,M,N,K,H\ngemm,1,2,3,4\n", "line 2: gemm has the sizes M, N, K, not M, N, K, H"),
        ("op,M,N,K\ngemm,1,2,3\ngemm,1,-2,3\n", "line 3: N=-2: must be a whole number from 1"),
        ("op,M,N,K\ngemm,0,2,3\n", "line 2: M=0: must be"),
        ("op,M,N,K\ngemm,1.5,2,3\n", "line 2: M=1.5: must be"),
        ("op,M,N,K,dtype\ngemm,1,2,3,int32\n", "line 2: dtype=int32: gemm takes float64, float32"),
        (
            "op,M,N,K,activation\ngemm,1,2,3,tanh\n",
            "line 2: activation=tanh: gemm: activation takes relu, .* not 'tanh'",
        ),
        ("op,M,N,K,bias\ngemm,1,2,3,k\n", "line 2: bias=k: gemm: bias_along takes n or m, not 'k'"),
        ("op,M,N,K,residual\ngemm,1,2,3,yes\n", "line 2: residual=yes: gemm makes a call with residual=true"),
        ("op,M,N,K,batch\ngemm,1,2,3,4\n", "line 2: batch=4: gemm makes no such call"),
        ("op,M,N,K,scales\ngemm,1,2,3,norm\n", "line 2: scales=norm: gemm has no such key"),
        ("op,M,N,K,activations\ngemm,1,2,3,silu\n", "line 2: gemm has the sizes M, N, K, not M, N, K, activations"),
        ("op,M,N,activation\nsoftmax,1,2,silu\n", "line 2: softmax has the sizes M, N, not M, N, activation"),
        ("op,M,N\n" + "rms_norm,0,1\n" * 7, "line 6: M=0: must .* and 2 more: correct or delete the lines"),
    ],
)
def test_what_is_no_shape_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        shapes.read(written(tmp_path, text), "cpu")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"no file of shapes at .*none.csv"):
        shapes.read(tmp_path / "none.csv", "cpu")
    (tmp_path / "shapes.csv").write_bytes(b"op,M\n\xff\xfe\n")
    with pytest.raises(TableError, match="not UTF-8 text"):
        shapes.read(tmp_path / "shapes.csv", "cpu")


@pytest.mark.parametrize("name", registry.names())
def test_every_op_takes_its_sizes(name: str) -> None:
    op = registry.get(name)
    known = {"D": 64, "N": 256, "K": 256}
    call = sizes.call(op, [known.get(size, 4) for size in op.study.sizes], "bfloat16", "meta")
    tensors = tensors_of(call)
    assert tensors and all(tensor.device.type == "meta" for tensor in tensors)
    op.check(call)

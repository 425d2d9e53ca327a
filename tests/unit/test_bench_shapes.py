"""Files of shapes: what becomes a case, and what is refused with the line it stands in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wavecrest.bench import shapes, sizes
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import tensors_of
from wavecrest.errors import TableError


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


def test_the_hundred_products_of_language_models_are_shapes() -> None:
    found = shapes.read(Path(__file__).parents[2] / "benchmarks" / "shapes" / "llm_gemm.csv", "meta")
    op = registry.get("gemm")
    assert list(found) == ["gemm"] and len({op.key(case.make()) for case in found["gemm"].cases}) == 100


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

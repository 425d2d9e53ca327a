"""Each check of a GEMM call, by its message; configurations that do not fit."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_harness import (
    BACKENDS,
    BF16,
    E4M3,
    F16,
    F32,
    I8,
    I32,
    NAN,
    Watch,
    multiply,
    product,
    random,
    scales,
    stream,
    tile,
    watched,
)
from wavecrest import ops
from wavecrest.errors import InvalidArgument
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


# --- wrong arguments


def _t(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def _bad(message: str, a: Any = None, b: Any = None, **more: Any) -> tuple[str, GemmCall]:
    return message, GemmCall(_t(3, 8) if a is None else a, _t(8, 6) if b is None else b, **more)


_A8, _B8 = _t(3, 8, dtype=I8), _t(8, 6, dtype=I8)


_ONE = torch.ones(())


BAD = {
    "a-number": _bad("a must be a tensor of at least 1 dim", 3.0),
    "a-scalar": _bad("a must be a tensor of at least 1 dim", _ONE),
    "b-text": _bad("b must be a tensor of at least 2 dim", b="b"),
    "b-vector": _bad("b must be a tensor of at least 2 dim", b=_t(8)),
    "a-int64": _bad("a must be floating-point, int8", _t(3, 8, dtype=torch.int64)),
    "a-complex": _bad("a must be floating-point", _t(3, 8, dtype=torch.complex64)),
    "b-uint8": _bad("b must be floating-point, int8", b=_t(8, 6, dtype=torch.uint8)),
    "b-bool": _bad("b must be floating-point", b=_t(8, 6, dtype=torch.bool)),
    "K": _bad("do not fit: K is 8 and 7", b=_t(7, 6)),
    "K-vector": _bad("do not fit: K is 7 and 8", _t(7)),
    "K-batch": _bad("do not fit: K is 8 and 7", b=_t(2, 7, 6)),
    "dtypes": _bad("cannot multiply torch.float32 by torch.float16", b=_t(8, 6, dtype=F16)),
    "int8-float": _bad("cannot multiply torch.int8 by torch.float32", _A8),
    "int8-float8": _bad("cannot multiply torch.int8 by torch.float8_e4m3fn", _A8, _B8.float().to(E4M3)),
    "devices": _bad("a is on cpu, b on meta", b=_t(8, 6).to("meta")),
    "batch-of-a-vector": _bad(r"needs an a \[..., M, K\]", _t(8), _t(2, 8, 6)),
    "batches": _bad("batches of a .* and b .* do not fit", _t(3, 4, 8), _t(2, 8, 6)),
    "scale_a-dtype": _bad("scale_a must be a float32 tensor", _A8, _B8, scale_a=_t(3, dtype=F16)),
    "scale_a-number": _bad("scale_a must be a float32 tensor", _A8, _B8, scale_a=0.5),
    "scale_b-device": _bad("scale_b must be a float32 tensor on cpu", _A8, _B8, scale_b=_t(6).to("meta")),
    "scale_a-shape": _bad(r"scale_a \[4\] is not one for the tensor", _A8, _B8, scale_a=_t(4)),
    "scale_a-row": _bad(r"scale_a \[1, 3\] is not", _A8, _B8, scale_a=_t(1, 3)),
    "scale_a-deep": _bad(r"scale_a \[1, 1, 1\] is not", _A8, _B8, scale_a=_t(1, 1, 1)),
    "scale_b-shape": _bad(r"scale_b \[3\] is not one for the tensor", _A8, _B8, scale_b=_t(3)),
    "scale_b-column": _bad(r"scale_b \[6, 1\] is not", _A8, _B8, scale_b=_t(6, 1)),
    "scale_b-blocks": _bad(r"scale_b \[2, 3\] is not", _t(3, 300, dtype=I8), _t(300, 200, dtype=I8), scale_b=_t(2, 3)),
    "scale-batch": _bad("scale_a is for the whole tensor", _t(2, 3, 8, dtype=I8), _t(2, 8, 6, dtype=I8), scale_a=_t(3)),
    "scale_b-batch": _bad(
        "scale_b is for the whole tensor", _t(2, 3, 8, dtype=I8), _t(2, 8, 6, dtype=I8), scale_b=_t(6)
    ),
    "scale_a-weight-only": _bad("scale_a is for an 8-bit a", b=_B8, scale_a=_ONE),
    "activation": _bad("activation takes relu, .*not 'tanh'", activation="tanh"),
    "activation-list": _bad("activation takes relu", activation=["relu"]),
    "gated-odd": _bad("even number of columns, got 7", b=_t(8, 7), activation="silu_and_mul"),
    "alpha-text": _bad("alpha must be a number", alpha="2"),
    "alpha-tensor": _bad("alpha must be a number", _A8, _B8, alpha=_t(2)),
    "alpha-bool": _bad("alpha must be a number", alpha=True),
    "slope-none": _bad("slope must be a number", slope=None),
    "overwrite-one": _bad("overwrite_residual is True or False, not 1", residual=_t(3, 6), overwrite_residual=1),
    "overwrite-nothing": _bad("there is no residual to overwrite", overwrite_residual=True),
    "bias_along": _bad("bias_along takes n or m, not 'k'", bias=_t(6), bias_along="k"),
    "bias_along-gated": _bad("takes a bias along n", bias=_t(3), bias_along="m", activation="gelu_and_mul"),
    "bias-shape": _bad(r"bias must be floating-point \[6\]", bias=_t(3)),
    "bias-m": _bad(r"bias must be floating-point \[3\]", bias=_t(6), bias_along="m"),
    "bias-rows": _bad(r"bias must be floating-point \[6\]", bias=_t(1, 6)),
    "bias-dtype": _bad("bias must be floating-point", bias=_t(6, dtype=I32)),
    "bias-device": _bad("bias must be floating-point", bias=_t(6).to("meta")),
    "bias-text": _bad("bias must be floating-point", bias="b"),
    "bias-half": _bad(r"bias must be floating-point \[6\]", bias=_t(3), activation="silu_and_mul"),
    "residual-shape": _bad(r"residual must be floating-point \[3, 6\]", residual=_t(6)),
    "residual-half": _bad(r"residual must be floating-point \[3, 3\]", residual=_t(3, 6), activation="silu_and_mul"),
    "residual-dtype": _bad("residual must be floating-point", residual=_t(3, 6, dtype=I8)),
    "residual-device": _bad("residual must be floating-point", residual=_t(3, 6).to("meta")),
    "residual-number": _bad("residual must be floating-point", residual=1.0),
    "out_dtype": _bad("out_dtype takes float32", out_dtype=torch.int64),
    "out_dtype-text": _bad("out_dtype takes float32", out_dtype="float16"),
    "int32-of-floats": _bad("int32 is the plain sum of int8", out_dtype=I32),
    "int32-scaled": _bad("int32 is the plain sum of int8", _A8, _B8, out_dtype=I32, scale_a=_ONE),
    "int32-bias": _bad("int32 is the plain sum of int8", _A8, _B8, out_dtype=I32, bias=_t(6)),
    "out_scale-missing": _bad("out_scale goes with an 8-bit out_dtype", out_dtype=I8),
    "out_scale-alone": _bad("out_scale goes with an 8-bit out_dtype", out_scale=_ONE),
    "out_scale-shape": _bad(r"out_scale must be float32 \[\]", out_dtype=I8, out_scale=_t(6)),
    "out_scale-dtype": _bad(r"out_scale must be float32 \[\]", out_dtype=E4M3, out_scale=_t(1, dtype=F16)),
    "out_scale-number": _bad(r"out_scale must be float32 \[\]", out_dtype=I8, out_scale=2.0),
    "out_scale-device": _bad(r"out_scale must be float32 \[\]", out_dtype=I8, out_scale=_t(1).to("meta")),
    "precision": _bad("precision takes ieee, tf32, tf32x3, fast_accum, not 'high'", precision="high"),
    "precision-of-floats": _bad("precision fast_accum is for 8-bit floats, not torch.float32", precision="fast_accum"),
    "precision-of-integers": _bad("is for 8-bit floats, not torch.int8", _A8, _B8, precision="fast_accum"),
    "norm-length": _bad(r"norm_weight must be floating-point \[8\] on cpu", norm_weight=_t(6)),
    "norm-rows": _bad(r"norm_weight must be floating-point \[8\]", norm_weight=_t(1, 8)),
    "norm-dtype": _bad("norm_weight must be floating-point", norm_weight=_t(8, dtype=I8)),
    "norm-device": _bad("norm_weight must be floating-point", norm_weight=_t(8).to("meta")),
    "norm-text": _bad("norm_weight must be floating-point .*got str", norm_weight="w"),
    "norm-8-bits": _bad("floating-point a of 16 bits or more, not torch.int8", _A8, _B8, norm_weight=_t(8)),
    "norm-scale_a": _bad("norm_weight and scale_a exclude", scale_a=_ONE, norm_weight=_t(8)),
    "norm-batch": _bad("for one matrix b, not a batch", _t(2, 3, 8), _t(2, 8, 6), norm_weight=_t(8)),
    "norm-eps": _bad("norm_eps must be a number of at least 0, got -1", norm_weight=_t(8), norm_eps=-1.0),
    "norm-eps-nan": _bad("norm_eps must be a number", norm_weight=_t(8), norm_eps=NAN),
    "norm-eps-text": _bad("norm_eps must be a number", norm_weight=_t(8), norm_eps="0"),
    "norm-eps-tensor": _bad("norm_eps must be a number", norm_weight=_t(8), norm_eps=_ONE),
}


# what `gemm` takes by position, and what only the op behind the public functions takes
WITHIN = ("a", "b", "bias", "form", "group", "zero", "tail")


BAD_FORMS = {
    "form": _bad("form takes plain, shuffled, int4, mxfp4, not 'packed'", form="packed"),
    "shuffled-rows": _bad("N % 16 = K % 32 = 0", form="shuffled"),
    "shuffled-layout": _bad("contiguous", _t(3, 32), _t(32, 16), form="shuffled"),
    "group": _bad("groups have 32, 64, 128 rows of b, not 16", b=_B8, group=16, scale_b=_t(1, 6)),
    "group-types": _bad("groups are for 8-bit and 4-bit weights", group=32),
    "group-scale": _bad(r"scale_b \[2, 6\] is not", b=_B8, group=32, scale_b=_t(2, 6)),
    "int4-bytes": _bad(r"uint8 \[32, N\]", b=_t(4, 6, dtype=torch.uint8), form="int4", group=32),
    "int4-dtype": _bad(r"uint8 \[32, N\]", b=_t(32, 6, dtype=I8), form="int4", group=32),
    "int4-group": _bad("groups of 32, 64, 128, not 0", b=_t(32, 6, dtype=torch.uint8), form="int4"),
    "int4-int8": _bad("cannot multiply torch.int8", _A8, _t(32, 6, dtype=torch.uint8), form="int4", group=32),
    "mxfp4-group": _bad(
        "mxfp4 has groups of 32, not 64", b=_t(32, 6, dtype=torch.uint8), form="mxfp4", group=64,
        scale_b=_t(1, 6, dtype=torch.uint8),
    ),
    "mxfp4-no-scales": _bad("mxfp4 has scales", b=_t(32, 6, dtype=torch.uint8), form="mxfp4", group=32),
    "mxfp4-float-scales": _bad(
        "scale_b must be a uint8 tensor", b=_t(32, 6, dtype=torch.uint8), form="mxfp4", group=32, scale_b=_t(1, 6)
    ),
    "mxfp4-zeros": _bad(
        "zero points are for 4-bit weights", b=_t(32, 6, dtype=torch.uint8), form="mxfp4", group=32,
        scale_b=_t(1, 6, dtype=torch.uint8), zero=_t(1, 6, dtype=torch.uint8),
    ),
    "zero-plain": _bad("zero points are for 4-bit", b=_B8, scale_b=_t(6), zero=_t(6)),
    "zero-shape": _bad(
        "zero must have scale_b's shape", b=_t(32, 6, dtype=torch.uint8), form="int4", group=32, scale_b=_t(1, 6),
        zero=_t(2, 6, dtype=torch.uint8),
    ),
    "tail-k": _bad(r"a tail is torch.float32 \[8, T\]", b=_B8, scale_b=_ONE, tail=_t(7, 2)),
    "tail-device": _bad("the tail must be on cpu", b=_B8, scale_b=_ONE, tail=_t(8, 2).to("meta")),
    "tail-plain": _bad("goes with a weight in 8 bits", tail=_t(8, 2)),
    "tail-gated": _bad("no gated activation", b=_B8, scale_b=_ONE, tail=_t(8, 2), activation="silu_and_mul"),
    "zero-alone": _bad(
        "zero must have scale_b's shape", b=_t(32, 6, dtype=torch.uint8), form="int4", group=32,
        zero=_t(1, 6, dtype=torch.uint8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *BAD_FORMS])
def test_wrong_arguments(case: str) -> None:
    """One clear error on every path, before any of them looks at its backend."""
    message, call = (BAD | BAD_FORMS)[case]
    for backend in BACKENDS:
        with pytest.raises(InvalidArgument, match=message):
            gemm.run(backend, call)
    with pytest.raises(InvalidArgument, match=message):
        gemm.decide(call)
    with pytest.raises(InvalidArgument, match=message):
        gemm(call)
    if case in BAD:
        options = {key: value for key, value in call._asdict().items() if key not in WITHIN}
        with pytest.raises(InvalidArgument, match=message):
            ops.gemm(call.a, call.b, call.bias, **options)


def test_every_message_of_the_checks_is_asked_for() -> None:
    """By the lines that raise: a check that is added here needs its case above."""
    module = ast.parse(Path(inspect.getfile(GemmCall)).read_text())
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and "check" in node.name]
    raising = {node.lineno for check in checks for node in ast.walk(check) if isinstance(node, ast.Raise)}
    asked = set()
    for _, call in (BAD | BAD_FORMS).values():
        with pytest.raises(InvalidArgument) as error:
            gemm.check(call)
        asked.add(error.traceback[-1].lineno + 1)
    assert raising == asked


def test_configurations_that_do_not_fit(device: str) -> None:
    run = gemm.run
    for dtype, config, what in (
        (I8, {"k": 16}, "BLOCK_K of 16 .* take 32"),
        (E4M3, {"k": 16}, "BLOCK_K of 16 .* take 32"),
        (BF16, {"k": 8}, "BLOCK_K of 8 .* take 16"),
        (BF16, {"m": 8}, "BLOCK_M of 8 .* take 16"),
        (I8, {"n": 8}, "BLOCK_N of 8 .* take 16"),
    ):
        for backend, make in (("triton", tile), ("triton_stream_k", stream)):
            with pytest.raises(InvalidArgument, match=what):
                run(backend, product(3, 20, 64, dtype, device=device), config=make(**config))
    blocks = product(3, 130, 256, E4M3, device=device, scale_b=scales(2, 2, device=device))
    with pytest.raises(InvalidArgument, match="more than one block of scales"):
        run("triton", blocks, config=tile(k=256))
    with pytest.raises(InvalidArgument, match="more than one block of scales"):
        run("triton_stream_k", blocks, config=stream(k=256))
    groups = product(3, 20, 256, BF16, I8, device=device, scale_b=scales(4, 20, device=device), group=64)
    with pytest.raises(InvalidArgument, match="more than one group of 64"):
        run("triton", groups, config=tile(k=128))
    for chains, size in ((0, 64), (3, 64), (4, 32)):
        with pytest.raises(InvalidArgument, match=f"cannot be divided into {chains} CHAINS"):
            run("triton", product(3, 20, 64, device=device), config=tile(k=size, CHAINS=chains))
    stored = torch.zeros(20, 128, dtype=torch.uint8, device=device).mT
    int4 = GemmCall(random(3, 256, device=device), stored, scale_b=scales(8, 20, device=device), form="int4", group=32)
    for k in (32, 128):
        with pytest.raises(InvalidArgument, match="does not fit 4-bit values in groups of 32"):
            run("triton", int4, config=tile(k=k))
    mxfp4 = int4._replace(scale_b=torch.zeros(8, 20, dtype=torch.uint8, device=device), form="mxfp4")
    for a, k in ((int4.a, 32), (int4.a.half(), 128)):
        with pytest.raises(InvalidArgument, match=f"a BLOCK_K of {k} does not fit mxfp4 for"):
            run("triton", mxfp4._replace(a=a), config=tile(k=k))
    with pytest.raises(InvalidArgument, match="has no whole units of 64"):
        run("triton_gemv", mxfp4, config=multiply(4, 32))

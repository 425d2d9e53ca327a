from __future__ import annotations

import math

import pytest
import torch

from tests.ops.op_harness import BACKENDS, DTYPES, name, random, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.ops.rows import reference
from wavecrest.ops.rows.call import RowCall

OP = "softmax"
INF, NAN = float("inf"), float("nan")
# what a bfloat16 row of 70 columns is read by: one program, several rows a program, three parts
CONFIGS = {
    "default": None,
    "several-rows": Config(BLOCK_M=4, BLOCK_N=128, PACKED=0, num_warps=1),
    "split": Config(BLOCK_M=1, BLOCK_N=32, PACKED=1, num_warps=1),
}


def relative(dtype: torch.dtype) -> float:
    # float32: e^x is 2^(x · log2 e), and the product of 40 has half a unit of its own to lose
    return {torch.float32: 5e-6, torch.float16: 2.0**-11 + 5e-6, torch.bfloat16: 2.0**-8 + 5e-6}[dtype]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_element(dtype: torch.dtype, config: Config | None, device: str) -> None:
    # probabilities are small: each is held to its own size
    if config is not None and dtype == torch.float32:
        config = Config(**{**config, "PACKED": 0})
    x = 4.0 * random((5, 70), dtype, device)
    got = run(OP, "triton", x, config=config).double()
    wide = x.double() - x.double().amax(-1, keepdim=True)
    want = wide.exp() / wide.exp().sum(-1, keepdim=True)
    # half a step of the smallest float16 there is
    torch.testing.assert_close(got, want, rtol=relative(dtype), atol=2.0**-25 if dtype == torch.float16 else 1e-40)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_infinities_and_nan(config: Config | None, device: str) -> None:
    x = random((9, 70), torch.bfloat16, device)
    # a part that holds nothing beside others that are far below 0: e^-(-200) is beyond float32
    x[8, :64], x[8, 64:] = -INF, -200.0
    x[0] = -INF
    x[1, 32:64] = -INF
    x[2, :69] = -INF
    x[3, 5] = INF
    x[4, 40], x[4, 69] = INF, -INF
    x[5, 66] = NAN
    x[6, :64], x[6, 65] = -INF, NAN
    got = run(OP, "triton", x, config=config)
    assert got[[0, 3, 4, 5, 6]].isnan().all(), "a row of -inf alone, or with +inf or NaN, is NaN"
    torch.testing.assert_close(got[[1, 2, 7, 8]], torch.softmax(x[[1, 2, 7, 8]], -1), rtol=2.0**-7, atol=0.0)
    assert not got[1, 32:64].any() and got[1, :32].all()
    assert got[2, 69] == 1.0 and not got[2, :69].any()
    # PyTorch has the same meaning
    assert torch.equal(got.isnan(), torch.softmax(x, -1).isnan())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_large_values_do_not_overflow(config: Config | None, device: str) -> None:
    # exp(88.8) is beyond float32; the largest is in another part of a split row each time
    x = torch.full((3, 70), -3.0e38, dtype=torch.bfloat16, device=device)
    x[0, 0], x[1, 40], x[2, 69] = 3.0e38, 1000.0, 3.0e38
    got = run(OP, "triton", x, config=config)
    want = torch.zeros_like(x)
    want[0, 0], want[1, 40], want[2, 69] = 1.0, 1.0, 1.0
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_dimensions(dim: int, backend: str, device: str) -> None:
    registry.get(OP).force(backend)
    x = random((3, 5, 7), torch.float32, device)
    got = ops.softmax(x, dim)
    assert got.shape == x.shape and got.movedim(dim, -1).is_contiguous()
    torch.testing.assert_close(got.double(), torch.softmax(x.double(), dim), rtol=1e-5, atol=1e-7)


def test_a_vector(device: str) -> None:
    x = random((40,), torch.float32, device)
    for dim in (0, -1):
        torch.testing.assert_close(ops.softmax(x, dim).double(), torch.softmax(x.double(), 0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(("x",), "takes a tensor", id="text"),
        pytest.param((torch.tensor(1.0),), r"\[..., N\]", id="scalar"),
        pytest.param((torch.ones(2, 4, dtype=torch.int64),), "floating-point", id="integers"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.softmax(*args)  # type: ignore[arg-type]
        else:
            run(OP, backend, *args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((torch.ones(2, 4), 2), r"dim must be from -2 to 1 for \[2, 4\], got 2", id="above"),
        pytest.param((torch.ones(2, 4), -3), "dim must be from -2 to 1", id="below"),
        pytest.param((torch.ones(2, 4), "1"), "dim must be", id="text"),
        pytest.param((torch.ones(2, 4), None), "dim must be", id="none"),
        pytest.param(("x", 0), "takes a tensor", id="no-tensor"),
    ],
)
def test_wrong_dimensions(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ops.softmax(*args)  # type: ignore[arg-type]


def test_the_definition_of_rows_beyond_32_bits_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    call = RowCall("softmax", torch.randn(5, 33, dtype=torch.float64))
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        call.x[row, 3] = value
    call.x[3] = -math.inf
    want = reference.reference(call)
    monkeypatch.setattr(reference, "WIDE", 33)
    monkeypatch.setattr(torch, "softmax", lambda *_: pytest.fail("it counts in 32 bits"))
    torch.testing.assert_close(reference.reference(call), want, rtol=1e-14, atol=0.0, equal_nan=True)

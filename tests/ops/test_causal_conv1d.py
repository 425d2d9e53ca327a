"""causal_conv1d against sums in float64 written as loops; inputs before and after, rows of several lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.mlstm_harness import moved
from tests.ops.op_harness import same_bits
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall
from wavecrest.ops._causal_conv1d.config import default
from wavecrest.ops._causal_conv1d.study.space import space

OP = "causal_conv1d"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAN = float("nan")
LIMITS = {F32: 1e-5, F16: 2.0**-9, BF16: 2.0**-6, F64: 1e-12}
# programs that end in the middle of rows and channels, beside the default
CONFIGS = (None, Config(BLOCK_S=4, BLOCK_C=16, num_warps=1))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "first inputs": {"first": True},
    "fewer tokens than taps": {"tokens": 2, "first": True},
    "one token": {"tokens": 1, "first": True, "activation": None},
    "one tap": {"taps": 1, "first": True},
    "16 taps": {"taps": 16, "tokens": 20},
    "lens": {"batch": 4, "lens": [9, 0, 3, 1], "first": True},
    "without bias": {"bias": False, "activation": None},
    "40 tokens": {"tokens": 40, "channels": 130, "batch": 1},
}


def call_of(
    batch: int = 2, tokens: int = 9, channels: int = 20, taps: int = 4, dtype: torch.dtype = F32, bias: bool = True,
    first: bool = False, lens: list[int] | None = None, activation: str | None = "silu",
) -> CausalConv1dCall:  # fmt: skip
    """A call on DEVICE; what is behind the end of a row is NaN."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    x = made(batch, tokens, channels)
    for row, length in enumerate(lens or ()):
        x[row, length:] = NAN
    return CausalConv1dCall(
        x, made(channels, taps), made(channels) if bias else None, made(batch, taps - 1, channels) if first else None,
        None if lens is None else torch.tensor(lens, dtype=torch.int32, device=DEVICE), activation,
    )  # fmt: skip


def exact(call: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """(y, the last inputs) in float64, one tap of one token at a time."""
    x, weight = call.x.cpu().double(), call.weight.cpu().double()
    batch, tokens, channels = x.shape
    kept = call.taps - 1
    y, last = torch.zeros_like(x), torch.zeros(batch, kept, channels, dtype=F64)
    for row in range(batch):
        end = tokens if call.seq_lens is None else int(call.seq_lens[row])
        before = torch.zeros(kept, channels, dtype=F64) if call.initial is None else call.initial[row].cpu().double()
        seen = [*before.unbind(0), *x[row, :end].unbind(0)]
        for s in range(end):
            total = torch.zeros(channels, dtype=F64) if call.bias is None else call.bias.cpu().double().clone()
            for tap in range(call.taps):
                total += weight[:, tap] * seen[s + tap]
            y[row, s] = total / (1 + torch.exp(-total)) if call.activation == "silu" else total
        if kept:
            last[row] = torch.stack(seen[len(seen) - kept :])
    return y, last


def assert_right(call: CausalConv1dCall, got: Tensor, want: Tensor) -> None:
    assert got.shape == call.x.shape and got.dtype == call.x.dtype and got.is_contiguous()
    off = (got.cpu().double() - want).abs() / want.abs().clamp(min=1.0)
    assert not bool(off.isnan().any()) and float(off.max()) <= LIMITS[call.x.dtype]


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    call = call_of(**CASES[name])
    want, last = exact(call)
    op = registry.get(OP)
    for config in CONFIGS:
        assert_right(call, op.run("triton", call, config=config), want)
    for backend in ("torch", "reference"):
        assert_right(call, op.run(backend, call), want)
    x, weight, bias, initial, seq_lens, activation = call
    y, kept = ops.causal_conv1d(
        x, weight, bias, initial=initial, return_last_inputs=True, seq_lens=seq_lens, activation=activation
    )
    assert_right(call, y, want)
    assert (
        torch.equal(kept.cpu().double(), last) and kept.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    )


def test_other_dtypes() -> None:
    op = registry.get(OP)
    for dtype in (F16, BF16, F64):
        call = call_of(dtype=dtype, batch=3, lens=[9, 2, 5], first=True)
        want = exact(call)[0]
        for backend in ("triton", "torch", "reference"):
            if backend == "triton" and dtype == F64:
                with pytest.raises(Unsupported, match="float64"):
                    op.run(backend, call)
            else:
                assert_right(call, op.run(backend, call), want)
    # weights of float32 beside inputs of 16 bits are not rounded
    mixed = call_of(dtype=BF16)._replace(weight=call_of().weight, bias=call_of().bias)
    want = exact(mixed)[0]
    for backend in ("triton", "torch"):
        assert_right(mixed, op.run(backend, mixed), want)


def test_a_sequence_divided_anywhere_is_the_whole() -> None:
    call = call_of(tokens=7, dtype=F16, first=True)
    registry.get(OP).force("triton")
    whole, last = ops.causal_conv1d(*call[:3], initial=call.initial, return_last_inputs=True)
    for cut in range(8):
        one, kept = ops.causal_conv1d(call.x[:, :cut], *call[1:3], initial=call.initial, return_last_inputs=True)
        two, end = ops.causal_conv1d(call.x[:, cut:], *call[1:3], initial=kept, return_last_inputs=True)
        assert same_bits(torch.cat((one, two), 1), whole) and same_bits(end, last)


@pytest.mark.parametrize("how", ["sliced", "permuted"])
def test_strides(how: str) -> None:
    call = call_of(dtype=F16, first=True, batch=3)
    other = call._replace(**{name: moved(getattr(call, name), how) for name in ("x", "weight", "bias", "initial")})
    for backend in ("triton", "torch", "reference"):
        assert_right(call, registry.get(OP).run(backend, other), exact(call)[0])
    # channels before tokens, as other packages have them
    turned = call._replace(x=call.x.mT.contiguous().mT)
    assert_right(call, registry.get(OP).run("triton", turned), exact(call)[0])


def test_a_nan_reaches_the_taps_behind_it_and_no_more() -> None:
    call = call_of(batch=2, tokens=9)
    call.x[1, 3, 5] = NAN
    for backend in ("triton", "torch", "reference"):
        lost = registry.get(OP).run(backend, call).isnan()
        assert bool(lost[1, 3:7, 5].all()) and int(lost.sum()) == 4


def test_gradients_are_those_of_the_definition() -> None:
    call = call_of(batch=2, tokens=4, channels=3, taps=3, dtype=F64, first=True)
    leaves = [one.requires_grad_() for one in call[:4] if one is not None]

    def function(x: Tensor, weight: Tensor, bias: Tensor, initial: Tensor) -> Any:
        return ops.causal_conv1d(x, weight, bias, initial=initial, return_last_inputs=True, activation="silu")

    assert torch.autograd.gradcheck(function, leaves)
    assert registry.get(OP).decide(call).backend == "torch"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda call: {"x": call.x[0]}, r"x must be .*\[B, S, C\]"),
        (lambda call: {"weight": call.weight[:, :0]}, "K from 1 to 16"),
        (lambda call: {"weight": call.weight[1:]}, r"weight must be floating \[20, K\]"),
        (lambda call: {"bias": call.bias[1:]}, "bias must be"),
        (lambda call: {"initial": call.initial[:, 1:]}, r"initial must be float32 \[2, 3, 20\]"),
        (lambda call: {"initial": call.initial.half()}, "initial must be float32"),
        (lambda call: {"seq_lens": torch.ones(2)}, "seq_lens must be int32"),
        (lambda call: {"activation": "relu"}, "activation is None or silu, not 'relu'"),
    ],
)
def test_wrong_arguments(changed: Any, words: str) -> None:
    call = call_of(first=True)
    with pytest.raises(InvalidArgument, match=words):
        registry.get(OP)(call._replace(**changed(call)))


def test_configurations_to_try_are_those_that_may_run() -> None:
    op = registry.get(OP)
    for arch in ("gfx942", "gfx1100"):
        for tokens, channels in ((1, 24), (2048, 2048)):
            key = op.key(call_of(tokens=tokens, channels=channels))
            found = list(space(key, ARCHS[arch]))
            assert found[0] == default(key[1], channels, "float32", ARCHS[arch].wave_size)
            assert len(found) == len(set(map(str, found)))
            assert all(math.log2(one["BLOCK_C"]).is_integer() for one in found)

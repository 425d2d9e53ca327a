"""Admission to timing: planted errors, memory that was never written, and impossible times are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toy import ToyOp, doubling
from wavecrest import records
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS
from wavecrest.measure import numerics
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.tune import admission
from wavecrest.tune.candidates import Candidate

BF16, F32 = torch.bfloat16, torch.float32
CONFIG = Config(BLOCK=1)


@pytest.fixture
def op() -> Iterator[ToyOp]:
    """y = 2x; `planted` runs what a test puts into `op.plant`."""
    with doubling(CONFIG) as made:
        yield made


def admit(op: ToyOp, run: Callable[[Tensor], Any], x: Tensor, role: str = "tried") -> records.TuneCandidate:
    op.kernel("planted", lambda x, *, config: run(x), priority=5)
    row = records.TuneCandidate(backend="planted")
    candidate = Candidate("planted", CONFIG, role)  # type: ignore[arg-type]
    call = admission.admit(op, candidate, op.of(x), admission.oracle(op, op.of(x)), row)
    assert (call is not None) == (row.status == "timed")
    if call is not None:
        assert torch.equal(call(), run(x))
    return row


def test_what_is_right_is_admitted_with_its_call(op: ToyOp) -> None:
    row = admit(op, lambda x: x + x, torch.randn(8, 8))
    assert row.status == "timed" and row.reason == "" and row.relative == row.worst == 0.0
    assert row.first_ms is not None and row.first_ms > 0 and row.of_bound is None


def _nan(x: Tensor) -> Tensor:
    y = 2 * x
    y[-1, -1] = float("nan")
    return y


def _raises(x: Tensor) -> Tensor:
    raise ValueError("registers spilled\nsecond line")


@pytest.mark.parametrize(
    ("run", "status", "reason"),
    [
        (lambda x: 2.1 * x, "wrong", "result 0 has error"),
        (_nan, "wrong", "result 0 has error"),
        (_raises, "failed", "raised ValueError: registers spilled"),
        (lambda x: (2 * x).half(), "wrong", "result 0 is torch.float16, not torch.float32"),
        (lambda x: (2 * x, x), "wrong", "2 results instead of 1"),
        (lambda x: 2 * x[:-1], "wrong", "result 0 has error inf"),
        (lambda x: (2 * x).double().neg(), "wrong", "result 0 is torch.float64"),
    ],
    ids=["wrong", "nan", "raises", "dtype", "two", "shape", "type and sign"],
)
def test_liars(op: ToyOp, run: Callable[[Tensor], Any], status: str, reason: str) -> None:
    row = admit(op, run, torch.randn(8, 8))
    assert row.status == status and row.reason.startswith(reason) and "second" not in row.reason


def test_an_infinity_must_be_where_the_definition_has_it(op: ToyOp) -> None:
    x = torch.randn(4, 4)
    x[0, 0] = float("inf")
    assert admit(op, lambda x: 2 * x, x).status == "timed"
    assert admit(op, lambda x: (2 * x).nan_to_num(), x).status == "wrong"


def test_what_is_not_written_is_not_by_luck_right(op: ToyOp, monkeypatch: pytest.MonkeyPatch) -> None:
    # as it is outside of the test suite
    monkeypatch.undo()
    x = torch.randn(64, 4096)
    kept = 2 * x

    def tail(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:-1] = 2 * x[:-1]
        return y

    # the memory of a right result is given back, to be taken again
    del kept
    row = admit_once(op, tail, x)
    assert row.status == "wrong" and row.reason.startswith("result 0 has error nan")


def admit_once(op: ToyOp, run: Callable[[Tensor], Any], x: Tensor) -> records.TuneCandidate:
    op.kernel("planted", lambda x, *, config: run(x), priority=5)
    row = records.TuneCandidate(backend="planted")
    assert admission.admit(op, Candidate("planted", CONFIG), op.of(x), admission.oracle(op, op.of(x)), row) is None
    return row


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float8_e4m3fn, torch.int32, torch.int8], ids=str)
def test_poison(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    like = torch.zeros(3, dtype=dtype)
    with admission.poisoned():
        for made in (torch.empty(3, dtype=dtype), torch.empty_like(like), like.new_empty(3)):
            if dtype.is_floating_point:
                assert made.float().isnan().all()
            else:
                assert (made == torch.iinfo(dtype).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_poison_leaves_settings_as_they_were_also_after_an_error() -> None:
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        with pytest.raises(KeyError), admission.poisoned():
            raise KeyError("a")
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("role", ["native", "default", "tried"])
def test_pytorch_runs_as_it_is_timed(op: ToyOp, role: str) -> None:
    seen: list[bool] = []

    def looks(x: Tensor) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return 2 * x

    admit(op, looks, torch.ones(2, 2), role)
    assert seen[0] is (role != "native")


def test_pytorch_is_held_to_wider_limits(op: ToyOp) -> None:
    limits = numerics.tolerance("row", "float32")
    x = torch.randn(8, 8)
    off = 1 + 5 * limits.relative
    assert admit(op, lambda x: 2 * x * off, x).status == "wrong"
    assert admit(op, lambda x: 2 * x * off, x, role="native").status == "timed"
    assert admit(op, lambda x: 2 * x * (1 + 20 * limits.relative), x, role="native").status == "wrong"


def test_no_element_is_beyond_the_bound_of_the_op(op: ToyOp) -> None:
    x = torch.randn(64, 64)
    op.restudy(bound=lambda x: torch.full(x.shape, 1e-6, dtype=torch.float64))

    def one_off(x: Tensor, by: float) -> Tensor:
        y = 2 * x
        y[3, 5] += by
        return y

    assert admit(op, lambda x: 2 * x, x).of_bound == 0.0
    row = admit(op, lambda x: one_off(x, 4e-6), x)
    # far inside the tolerance of the whole
    assert (row.relative or 1) < numerics.tolerance("row", "float32").relative
    assert row.status == "wrong" and row.reason.startswith("1 of 4096 elements are beyond the bound, [3, 5] by ")
    assert row.of_bound == pytest.approx(4, rel=0.2)
    # PyTorch may round on the way
    assert admit(op, lambda x: one_off(x, 4e-6), x, role="native").status == "timed"
    op.restudy(bound=lambda x: None)
    assert admit(op, lambda x: one_off(x, 4e-6), x).status == "timed"


def test_a_bound_of_nothing_wants_the_same_number(op: ToyOp) -> None:
    x = torch.randn(4, 4)
    op.restudy(bound=lambda x: torch.zeros(x.shape, dtype=torch.float64))
    assert admit(op, lambda x: x + x, x).of_bound == 0.0
    row = admit(op, lambda x: torch.nextafter(2 * x, torch.tensor(9e9)), x)
    assert row.status == "wrong" and "by inf times it" in row.reason
    assert admit(op, lambda x: 2 * x, torch.randn(0, 4)).status == "timed"


def test_a_bound_that_is_no_number_lets_nothing_pass(op: ToyOp) -> None:
    op.restudy(bound=lambda x: torch.full(x.shape, float("nan"), dtype=torch.float64))
    row = admit(op, lambda x: 2 * x + 1e-6, torch.ones(4, 4))
    assert row.status == "wrong" and row.reason.startswith("16 of 16 elements")


def test_a_call_is_bound_once(op: ToyOp) -> None:
    bound: list[Any] = []

    def bind(x: Tensor, *, config: Config) -> Callable[[Tensor], Tensor]:
        bound.append((tuple(x.shape), config))
        return lambda x: 2 * x

    op.kernel("planted", lambda x, *, config: 1 / 0, priority=5, bind=bind)
    call = admission.call_of(op, Candidate("planted", CONFIG), op.of(torch.ones(2, 3)))
    assert torch.equal(call(), 2 * torch.ones(2, 3)) and torch.equal(call(), 2 * torch.ones(2, 3))
    assert bound == [((2, 3), CONFIG)]
    op.native("plain", lambda x: 3 * x, priority=5)
    assert torch.equal(admission.call_of(op, Candidate("plain"), op.of(torch.ones(2)))(), 3 * torch.ones(2))


def test_an_interruption_is_no_failure(op: ToyOp) -> None:
    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        admit(op, interrupted, torch.ones(2, 2))


def test_a_lost_device_ends_the_run(op: ToyOp, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(admission, "_synchronize", lost)
    with pytest.raises(
        admission.DeviceLost, match=r"^planted Config\(BLOCK=1\) ended the device: CUDA error: an illegal"
    ):
        admit(op, lambda x: 2 * x, torch.ones(2, 2))


# --- times that cannot be


def product(M: int, N: int, K: int, dtype: torch.dtype) -> GemmCall:
    def made(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    return GemmCall(made(M, K), made(N, K).mT)


@pytest.mark.parametrize(
    ("dtype", "teraflops"), [(BF16, 989.4), (torch.int8, 1978.9), (torch.float8_e4m3fn, 1978.9), (F32, 494.7)], ids=str
)
def test_the_least_time_of_a_large_product_is_that_of_its_operations(dtype: torch.dtype, teraflops: float) -> None:
    assert admission.peak(ARCHS["sm_90"], dtype) == pytest.approx(teraflops)
    call = product(512, 512, 512, dtype)
    right = admission.Oracle((torch.zeros(512, 512),), None)
    least = admission.least_ms(registry.get("gemm"), call, right, replace(ARCHS["sm_90"], bandwidth=1e9))
    assert least == pytest.approx(0.85 * 2 * 512**3 / (teraflops * 1e12) * 1e3)


def test_the_least_time_of_a_few_rows_is_that_of_reading() -> None:
    call = product(1, 4096, 4096, BF16)
    result = torch.zeros(1, 4096, dtype=BF16)
    least = admission.least_ms(registry.get("gemm"), call, admission.Oracle((result,), None), ARCHS["sm_90"])
    # what is written may be in a cache at the end
    assert least == pytest.approx(0.85 * (4096 * 4096 + 4096) * 2 / 4800e9 * 1e3)
    assert admission.least_ms(registry.get("gemm"), call, admission.Oracle((result,), None), None) is None


def test_gfx90a_has_no_8_bit_floats_but_int8() -> None:
    assert admission.peak(ARCHS["gfx90a"], torch.int8) == pytest.approx(2 * 191.5)


# --- the bound of products


def cases() -> dict[str, GemmCall]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, generator=generator)
        return torch.randn(shape, generator=generator).to(dtype)

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    a, w = random(9, 70), random(24, 70)
    return {
        "plain": GemmCall(a, w.mT),
        "fp16": GemmCall(a.half(), w.half().mT),
        "fp32": GemmCall(a.float(), w.float().mT),
        "tf32": GemmCall(a.float(), w.float().mT, precision="tf32"),
        "bias and residual": GemmCall(a, w.mT, bias=random(24), residual=random(9, 24), alpha=0.3),
        "bias along m": GemmCall(a, w.mT, bias=random(9), bias_along="m"),
        "silu": GemmCall(a, w.mT, activation="silu", out_dtype=F32),
        "leaky": GemmCall(a, w.mT, activation="leaky_relu", slope=-3.0),
        "gated": GemmCall(a, w.mT, bias=random(24), activation="gelu_and_mul"),
        "int8": GemmCall(random(9, 70, dtype=torch.int8), random(24, 70, dtype=torch.int8).mT, scale_a=positive(9),
                         scale_b=positive(24)),
        "fp8": GemmCall(random(9, 70, dtype=torch.float8_e4m3fn), random(24, 70, dtype=torch.float8_e4m3fn).mT),
        "batch": GemmCall(random(3, 9, 70), random(3, 70, 24)),
        "batch, bias along m": GemmCall(random(3, 9, 70), random(3, 70, 24), bias=random(9), bias_along="m"),
        "vector": GemmCall(random(70), random(24, 70).mT),
    }  # fmt: skip


CASES = cases()


def bound_of(call: GemmCall) -> Tensor | None:
    bound = registry.get("gemm").study.bound
    assert bound is not None
    found = bound(call)
    assert found is None or isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", CASES)
def test_rounding_once_is_within_the_bound_and_another_number_is_not(name: str) -> None:
    call = CASES[name]
    op = registry.get("gemm")
    want, bound = op.reference(call), bound_of(call)
    assert bound is not None and bound.shape == want.shape and bound.dtype == torch.float64
    # the exact result, rounded once: the reference in float64
    wide = {name: value.double() for name in ("a", "b") if (value := getattr(call, name)).dtype.itemsize > 1}
    near = op.reference(call._replace(**wide, out_dtype=want.dtype)).double()
    assert ((near - want.double()).abs() <= bound).all()
    # one product of 70 left out shows in most elements; a bound that lets it pass would say nothing
    a = call.a.clone()
    a[..., 7] = torch.zeros((), dtype=a.dtype)
    other = op.reference(call._replace(a=a))
    assert ((other.double() - want.double()).abs() > bound).double().mean() > 0.4


def test_the_bound_of_a_product_is_no_wider_than_its_factors() -> None:
    reference = registry.get("gemm").reference
    call = CASES["fp32"]
    plain = bound_of(call)
    assert plain is not None
    for changes, factor in (
        ({"alpha": 0.01}, 0.01),
        ({"activation": "leaky_relu", "slope": -3.0}, 3.0),
        ({"activation": "relu"}, 1.2),
        ({"bias": torch.full((24,), 1e-3)}, 1.0),
    ):
        other = bound_of(call._replace(**changes))
        assert other is not None and float((other / plain).median()) == pytest.approx(factor, rel=0.2), changes
    # a limit on what float32 is really off by, not on what it might be
    exact = reference(GemmCall(call.a.double(), call.b.double()))
    off = (reference(call).double() - exact).abs().median()
    assert 3 * off < plain.median() < 300 * off


def test_no_bound_for_quantized_values_and_sums_of_integers() -> None:
    assert bound_of(CASES["plain"]._replace(out_dtype=torch.int8, out_scale=torch.ones(()))) is None
    ints = GemmCall(torch.ones(2, 8, dtype=torch.int8), torch.ones(8, 4, dtype=torch.int8))
    assert bound_of(ints) is None
    assert bound_of(GemmCall(torch.ones(2, 8).double(), torch.ones(8, 4).double())) is None


def test_a_kernel_in_the_interpreter_is_admitted(device: str) -> None:
    op = registry.get("gemm")
    call = GemmCall(torch.randn(5, 96, device=device).to(BF16), torch.randn(40, 96, device=device).to(BF16).mT)
    config = Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=2, SPLIT_K=2, PERSISTENT=0, TMA=0, num_warps=4,
                    num_stages=2)  # fmt: skip
    row = records.TuneCandidate(backend="triton")
    assert admission.admit(op, Candidate("triton", config), call, admission.oracle(op, call), row) is not None, (
        row.reason
    )
    assert row.of_bound is not None and row.of_bound <= 1

"""The choice of a backend of gemm: key, gradients, cost, and the cases of its study."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import wavecrest.ops._gemm.launch_cdna as _cdna
import wavecrest.ops.common.target as _target
from tests.ops.gemm_harness import (
    BF16,
    E4M3,
    F16,
    F32,
    FNUZ,
    I8,
    KERNELS,
    UNWALKED,
    Watch,
    assert_right,
    moved,
    product,
    random,
    refuses,
    scaled,
    scales,
    watched,
)
from wavecrest import ops
from wavecrest.dispatch.call import mapped
from wavecrest.hardware import ARCHS
from wavecrest.measure import numerics
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


# --- what the choice depends on


def _refused(call: GemmCall) -> dict[str, str]:
    return {refusal.backend: refusal.reason for refusal in gemm.decide(call).refused}


def test_the_default_is_pytorch_and_others_say_why(device: str) -> None:
    call = product(5, 20, 40, device=device)
    decision = gemm.decide(call)
    assert decision.backend == "torch"
    assert set(_refused(call)) >= (set(KERNELS) if device == "cpu" else {"triton_stream_k", "triton_gemv"})
    assert all(_refused(call).values())
    if device == "cpu":
        assert gemm.decide(scaled(product(5, 20, 40, E4M3))).backend == "reference"
        assert gemm.decide(product(5, 20, 40, BF16, I8)).backend == "reference"


def test_key_has_all_the_choice_depends_on(device: str) -> None:
    base = product(5, 32, 64, device=device)
    eight = product(5, 32, 64, I8, device=device, out_dtype=BF16)
    float8 = product(5, 32, 64, E4M3, device=device)
    calls = [
        base,
        product(6, 32, 64, device=device),
        product(5, 48, 64, device=device),
        product(5, 32, 80, device=device),
        product(5, 32, 64, F16, device=device),
        product(5, 32, 64, BF16, I8, device=device),
        base._replace(a=random(64, 5, device=device).t()),
        base._replace(a=random(5, 65, device=device)[:, 1:]),
        base._replace(a=random(5, 128, device=device)[:, ::2]),
        base._replace(b=random(64, 32, device=device)),
        base._replace(b=random(2, 64, 32, device=device)),
        base._replace(b=random(3, 64, 32, device=device)),
        base._replace(a=random(5, 2, 64, device=device).transpose(0, 1)),
        base._replace(bias=random(32, device=device)),
        base._replace(bias=random(5, device=device), bias_along="m"),
        base._replace(activation="relu"),
        base._replace(activation="silu_and_mul"),
        base._replace(residual=random(5, 32, device=device)),
        base._replace(out_dtype=F32),
        base._replace(out_dtype=I8, out_scale=torch.ones((), device=device)),
        base._replace(precision="tf32"),
        base._replace(a=base.a.clone().requires_grad_()),
        base._replace(norm_weight=random(64, device=device)),
        base._replace(norm_weight=random(128, device=device)[::2]),
        product(5, 32, 64, BF16, I8, device=device, norm_weight=random(64, device=device)),
        eight,
        eight._replace(scale_a=scales(device=device)),
        eight._replace(scale_a=scales(5, device=device)),
        eight._replace(scale_b=scales(device=device)),
        eight._replace(scale_b=scales(32, device=device)),
        float8,
        float8._replace(precision="fast_accum"),
        *(UNWALKED[case](device) for case in ("a", "residual", "residual-of-rows")),
    ]
    keys = [gemm.key(call) for call in calls]
    for call in calls:
        gemm.check(call)
    same = [(i, j) for i, j in itertools.combinations(range(len(keys)), 2) if keys[i] == keys[j]]
    assert not same
    assert all(len(key) == len(gemm.key_fields) for key in keys)
    # sizes of a bucket share a key
    assert gemm.key(product(17, 32, 64)) == gemm.key(product(32, 32, 64)) != gemm.key(product(33, 32, 64))


@pytest.mark.parametrize("which", ["a", "b", "bias", "residual", "scale_a", "scale_b", "norm_weight"])
def test_gradients(which: str, device: str) -> None:
    """A call that needs gradients gets them, from no kernel, and the decision says why."""
    if which.startswith("scale"):
        # sizes that PyTorch takes on a GPU too
        call = product(20, 24, 40, I8, device=device, out_dtype=F32)
        call = call._replace(scale_a=scales(20, device=device), scale_b=scales(24, device=device))
    else:
        call = product(5, 18, 40, F32, device=device, bias=random(18, dtype=F32, device=device), activation="gelu")
        call = call._replace(residual=random(5, 18, dtype=F32, device=device))
    if which == "norm_weight":
        call = call._replace(norm_weight=random(40, dtype=F32, device=device))
    leaf = getattr(call, which).detach().clone().requires_grad_()
    call = call._replace(**{which: leaf})
    # stream-K normalises nothing
    for forced in KERNELS[:1] if which == "norm_weight" else KERNELS[:2]:
        gemm.force(forced)
        assert "gradients" in _refused(call)[forced]
        assert gemm.decide(call).backend == "torch"
        with torch.no_grad():
            assert gemm.decide(call).backend == forced
    gemm(call).square().sum().backward()
    assert leaf.grad is not None
    # by the definition, in float64
    parts = {
        key: value.detach().double().requires_grad_(key == which) if isinstance(value, Tensor) else value
        for key, value in call._asdict().items()
    }
    a, b = parts["a"], parts["b"]
    a = a if parts["scale_a"] is None else a * parts["scale_a"][:, None]
    b = b if parts["scale_b"] is None else b * parts["scale_b"]
    if parts["norm_weight"] is not None:
        a = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * parts["norm_weight"]
    y = a @ b
    if parts["bias"] is not None:
        y = torch.nn.functional.gelu(y + parts["bias"]) + parts["residual"]
    y.square().sum().backward()
    torch.testing.assert_close(
        leaf.grad.double(), parts[which].grad, rtol=1e-4, atol=1e-4 * float(parts[which].grad.abs().max())
    )


def test_float8_scales_get_their_gradient(device: str) -> None:
    call = scaled(product(5, 32, 32, E4M3, device=device, out_dtype=F32))
    leaf = call.scale_b.clone().requires_grad_()  # type: ignore[union-attr]
    if device == "cuda":
        pytest.skip("_scaled_mm has no derivative")
    ops.gemm(call.a, call.b, scale_a=call.scale_a, scale_b=leaf, out_dtype=F32).sum().backward()  # type: ignore[no-untyped-call]
    want = (call.a.double() @ call.b.double()).sum() * float(call.scale_a)  # type: ignore[arg-type]
    torch.testing.assert_close(leaf.grad.double(), want, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


def test_cost(device: str) -> None:
    cost = gemm.study.cost
    call = product(6, 20, 40, device=device, bias=random(20, dtype=F32, device=device))
    assert cost(call).flops == 2 * 6 * 20 * 40
    assert cost(call).bytes == 2 * (6 * 40 + 40 * 20 + 6 * 20) + 4 * 20
    batch = GemmCall(random(3, 6, 40, device=device), random(3, 40, 20, device=device), out_dtype=F32)
    assert cost(batch).flops == 3 * 2 * 6 * 20 * 40
    assert cost(batch).bytes == 3 * (2 * (6 * 40 + 40 * 20) + 4 * 6 * 20)
    normed = product(6, 20, 40, device=device, norm_weight=random(40, dtype=F32, device=device))
    assert cost(normed).bytes == 2 * (6 * 40 + 40 * 20 + 6 * 20) + 4 * 40
    gated = product(6, 20, 40, device=device, activation="silu_and_mul")
    assert cost(gated).flops == 2 * 6 * 20 * 40 and cost(gated).bytes == 2 * (6 * 40 + 40 * 20 + 6 * 10)
    three = GemmCall(random(2, 3, 40, device=device), random(40, 20, device=device))
    assert cost(three).flops == 2 * 6 * 20 * 40


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn), ("sm_90", torch.float8_e4m3fn)],
)
def test_8_bit_floats_to_tune_are_the_gpus(arch: str, dtype: torch.dtype) -> None:
    """e4m3fn on gfx942 is a call that no matrix instruction of it takes: rows tuned for it would serve nobody."""
    bench_cases = gemm.study.bench_cases
    assert bench_cases is not None
    with _target.assumed(ARCHS[arch]):
        cases = {name: case() for name, case in bench_cases("shared", "meta").items() if name.endswith("fp8")}
        assert len(cases) == 15 and {(call.a.dtype, call.b.dtype) for call in cases.values()} == {(dtype, dtype)}
        refusals = {_cdna._refused_types(call, ARCHS[arch]) for call in cases.values() if arch in _cdna.FLOAT8}
        assert refusals <= {None}
        # what is made on the CPU, which has no GPU's type
        call = bench_cases("shared", "cpu")["1024x1024x1024 fp8"]()
    assert call.a.dtype == torch.float8_e4m3fn


def test_bench_and_emulate_cases_are_calls(device: str) -> None:
    quick = gemm.study.bench_cases("quick", device)  # type: ignore[misc]
    assert len(quick) == 3
    for case in quick.values():
        gemm.check(case())
    assert len(gemm.study.bench_cases("shared", "meta")) > 80  # type: ignore[misc]
    for case in gemm.study.bench_cases("shared", "meta").values():  # type: ignore[misc]
        gemm.check(case())
    for label, case in gemm.study.emulate_cases("gfx942").items():  # type: ignore[misc]
        # they are made on the CPU
        call = mapped(case(), lambda value: moved(value, device))
        if call.a.dtype in FNUZ:
            assert device == "cuda" or "has no" in str(refuses("triton", call)), label
        elif call.form == "plain":
            assert_right("triton" if call.tail is None else "triton_gemv", call)
        else:
            assert numerics.compare(gemm.run("triton", call), gemm.reference(call)).within(
                numerics.tolerance("gemm", "bfloat16")
            ), label

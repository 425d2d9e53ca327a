from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, assert_matches, random, run
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported

OP = "add_rms_norm"


SPLIT = Config(BLOCK_M=1, BLOCK_N=16, PACKED=1, num_warps=1)


@pytest.mark.parametrize(
    ("backend", "config"),
    [*((backend, None) for backend in BACKENDS), ("triton", SPLIT)],
    ids=[*BACKENDS, "triton-split"],
)
def test_the_norm_is_of_the_rounded_sum(backend: str, config: Config | None, device: str) -> None:
    # 1 + 2^-9 rounds to 1 in bfloat16; the norm of the unrounded sum would differ in many elements
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    x[0, ::2] = 3.0
    r = torch.full_like(x, 2.0**-8)
    w = torch.linspace(0.5, 200.0, 64, device=device).bfloat16()
    y, h = run(OP, backend, x, r, w, 0.0, config=config)
    assert torch.equal(h, x)
    want = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True)) * w.float()
    assert torch.equal(y, want.bfloat16())
    unrounded = x.float() + r.float()
    other = unrounded * torch.rsqrt(unrounded.square().mean(-1, keepdim=True)) * w.float()
    assert not torch.equal(other.bfloat16(), want.bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    x, r = 1e-3 * random((4, 64), torch.float32, device), 1e-3 * random((4, 64), torch.float32, device, 1)
    assert_matches(OP, backend, x, r, None, eps)


def test_float64_stays_float64(device: str) -> None:
    x, r = random((5, 40), torch.float64, device), random((5, 40), torch.float64, device, 1)
    y, h = ops.add_rms_norm(x, r)
    torch.testing.assert_close(h, x + r, rtol=0, atol=0)
    want = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(y, want, rtol=1e-13, atol=1e-13)


def test_weight_of_another_dtype_is_not_pytorchs(device: str) -> None:
    x, w = random((5, 40), torch.bfloat16, device), random((40,), torch.float32, device, 2)
    with pytest.raises(Unsupported, match="weight of x's dtype"):
        run(OP, "torch", x, x, w)


def test_results_do_not_alias_the_arguments(device: str) -> None:
    x, r = random((4, 8), torch.float32, device), torch.zeros(4, 8, device=device)
    for backend in BACKENDS:
        y, h = run(OP, backend, x, r)
        assert len({t.data_ptr() for t in (x, r, y, h)}) == 4


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0, torch.ones(2, 4)), "takes a tensor", id="number"),
        pytest.param((torch.ones(2, 4), 1.0), "residual must be", id="residual-number"),
        pytest.param((torch.ones(2, 4), torch.ones(4)), "residual must be", id="residual-shape"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4).half()), "residual must be", id="residual-dtype"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4, device="meta")), "residual must be", id="residual-elsewhere"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), torch.ones(3)), "weight must be", id="weight-short"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), None, -1.0), "eps", id="eps-negative"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.add_rms_norm(*args)  # type: ignore[arg-type]
        else:
            run(OP, backend, *args)

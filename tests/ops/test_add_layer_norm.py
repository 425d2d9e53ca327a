from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, assert_matches, random, run
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported

OP = "add_layer_norm"
SPLIT = Config(BLOCK_M=1, BLOCK_N=16, PACKED=1, num_warps=1)


@pytest.mark.parametrize(
    ("backend", "config"),
    [*((backend, None) for backend in BACKENDS), ("triton", SPLIT)],
    ids=[*BACKENDS, "triton-split"],
)
def test_the_norm_is_of_the_rounded_sum(backend: str, config: Config | None, device: str) -> None:
    # 1 + 2^-8 and 3 + 2^-8 round to 1 and 3 in bfloat16, 2^-8 + 2^-8 does not round: the mean moves if they are not
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    x[0, ::2], x[0, 1] = 3.0, 2.0**-8
    r = torch.full_like(x, 2.0**-8)
    w = torch.linspace(0.5, 200.0, 64, device=device).bfloat16()
    y, h = run(OP, backend, x, r, w, None, 0.0, config=config)
    rounded = x.clone()
    rounded[0, 1] = 2.0**-7
    assert torch.equal(h, rounded)

    def norm(values: torch.Tensor) -> torch.Tensor:
        centred = values.double() - values.double().mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True)) * w.double()

    torch.testing.assert_close(y.double(), norm(rounded), rtol=2.0**-8, atol=0.0)
    # the norm of the unrounded sum is another one
    other = norm(x.float() + r.float())
    assert ((other - norm(rounded)).abs() > 2.0**-10 * norm(rounded).abs()).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    x, r = 1e-3 * random((4, 64), torch.float32, device), 1e-3 * random((4, 64), torch.float32, device, 1)
    assert_matches(OP, backend, x, r, None, None, eps)


def test_results_do_not_alias_the_arguments(device: str) -> None:
    x, r = random((4, 8), torch.float32, device), torch.zeros(4, 8, device=device)
    for backend in BACKENDS:
        y, h = run(OP, backend, x, r)
        assert len({t.data_ptr() for t in (x, r, y, h)}) == 4


def test_float64_stays_float64(device: str) -> None:
    x, r = random((5, 40), torch.float64, device), random((5, 40), torch.float64, device, 1)
    y, h = ops.add_layer_norm(x, r)
    assert torch.equal(h, x + r)
    centred = h - h.mean(-1, keepdim=True)
    want = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)


def test_parameters_of_another_dtype_are_not_pytorchs(device: str) -> None:
    x, w = random((5, 40), torch.bfloat16, device), random((40,), torch.float32, device, 2)
    with pytest.raises(Unsupported, match="weight of x's dtype"):
        run(OP, "torch", x, x, w)
    with pytest.raises(Unsupported, match="bias of x's dtype"):
        run(OP, "torch", x, x, None, w)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0, torch.ones(2, 4)), "takes a tensor", id="number"),
        pytest.param((torch.ones(2, 4), None), "residual must be", id="residual-none"),
        pytest.param((torch.ones(2, 4), torch.ones(4)), "residual must be", id="residual-shape"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4).half()), "residual must be", id="residual-dtype"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), torch.ones(3)), "weight must be", id="weight-short"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), None, torch.ones(5)), "bias must be", id="bias-long"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), None, None, -1.0), "eps", id="eps-negative"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.add_layer_norm(*args)  # type: ignore[arg-type]
        else:
            run(OP, backend, *args)

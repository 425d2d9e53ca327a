from __future__ import annotations

import pytest
import torch

from tests.ops.op_harness import BACKENDS, assert_matches, random, run
from wavecrest import ops
from wavecrest.errors import InvalidArgument, Unsupported

OP = "post_layer_norm"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_it_is_add_layer_norm_without_the_sum(backend: str, dtype: torch.dtype, device: str) -> None:
    x, r = random((9, 200), dtype, device), random((9, 200), dtype, device, 1)
    w, b = random((200,), dtype, device, 2), random((200,), dtype, device, 3)
    both, _ = run("add_layer_norm", backend, x, r, w, b)
    assert torch.equal(run(OP, backend, x, r, w, b), both)
    # a sum of its own shows: it is not the norm of x
    assert not torch.equal(both, run("layer_norm", backend, x, w, b))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_arguments_stay_and_the_result_is_memory_of_its_own(backend: str, device: str) -> None:
    x, r = random((4, 40), torch.float32, device), random((4, 40), torch.float32, device, 1)
    before = x.clone(), r.clone()
    y = run(OP, backend, x, r)
    assert torch.equal(x, before[0]) and torch.equal(r, before[1])
    assert len({t.data_ptr() for t in (x, r, y)}) == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_eps_is_inside_the_root(eps: float, backend: str, device: str) -> None:
    x, r = 1e-3 * random((4, 64), torch.float32, device), 1e-3 * random((4, 64), torch.float32, device, 1)
    assert_matches(OP, backend, x, r, None, None, eps)


def test_float64_stays_float64(device: str) -> None:
    x, r = random((5, 40), torch.float64, device), random((5, 40), torch.float64, device, 1)
    centred = x + r - (x + r).mean(-1, keepdim=True)
    want = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(ops.post_layer_norm(x, r), want, rtol=1e-12, atol=1e-12)


def test_gradients_reach_both_summands(device: str) -> None:
    x, r = (random((3, 16), torch.float64, device, seed).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(ops.post_layer_norm, (x, r))


def test_parameters_of_another_dtype_are_not_pytorchs(device: str) -> None:
    x, w = random((5, 40), torch.bfloat16, device), random((40,), torch.float32, device, 2)
    with pytest.raises(Unsupported, match="weight of x's dtype"):
        run(OP, "torch", x, x, w)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0, torch.ones(2, 4)), "takes a tensor", id="number"),
        pytest.param((torch.ones(2, 4), None), "residual must be", id="residual-none"),
        pytest.param((torch.ones(2, 4), torch.ones(4)), "residual must be", id="residual-shape"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4).half()), "residual must be", id="residual-dtype"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), torch.ones(3)), "weight must be", id="weight-short"),
        pytest.param((torch.ones(2, 4), torch.ones(2, 4), None, None, -1.0), "eps", id="eps-negative"),
    ],
)
def test_wrong_arguments(args: tuple[object, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.post_layer_norm(*args)  # type: ignore[arg-type]
        else:
            run(OP, backend, *args)

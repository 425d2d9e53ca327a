"""The cases of the norms that round to 8 bits, for the four ops: each has a file that names its op.

Not a test file. Arguments are given by name and put in the op's order, which is another for each.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.op_harness import BACKENDS, assert_refuses, assert_rounds_once, random, reference, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config

X = torch.ones(2, 4)
CONFIGS = {
    "default": None,
    "packed": Config(BLOCK_M=2, BLOCK_N=256, PACKED=1, num_warps=1),
    "split": Config(BLOCK_M=1, BLOCK_N=64, PACKED=1, num_warps=1),
}
REFUSALS = {
    "number": ({"x": 3.0}, "takes a tensor"),
    "weight-short": ({"weight": torch.ones(3)}, "weight must be"),
    "bias-long": ({"bias": torch.ones(5)}, "bias must be"),
    "residual-none": ({"residual": None}, "residual must be"),
    "residual-shape": ({"residual": torch.ones(2, 5)}, "residual must be"),
    "residual-dtype": ({"residual": torch.ones(2, 4).half()}, "residual must be"),
    "eps-negative": ({"eps": -1.0}, "eps"),
    "dtype": ({"dtype": torch.int16}, "dtype takes int8, float8_e4m3fn, .*int16"),
    "no dtype": ({"dtype": None}, "dtype takes int8, float8_e4m3fn, .*not None"),
    "granularity": ({"granularity": "row"}, "granularity takes"),
    "tensor-dynamic": ({"granularity": "tensor"}, "cannot be worked out in one pass; give it, or use token"),
    "scale-shape": ({"granularity": "tensor", "scale": torch.ones(1)}, "tensor scale must be"),
    "scale-dtype": ({"scale": torch.ones(2, 1).half()}, "torch.float32"),
}


class NormQuantize:
    """`op`: the op's name; `norm`: the norm whose result it rounds; `residual`: added first."""

    op: str
    norm: str
    residual: bool

    def arguments(self, **given: Any) -> tuple[Any, ...]:
        bound = inspect.signature(getattr(ops, self.op)).bind(**given)
        bound.apply_defaults()
        return bound.args

    def tensors(self, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        made = {"x": random((3, 140), dtype, device)}
        return made | ({"residual": random((3, 140), dtype, device, 1)} if self.residual else {})

    def takes(self, name: str) -> bool:
        return name in inspect.signature(getattr(ops, self.op)).parameters

    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
    def test_rounds_once(self, config: Config | None, device: str) -> None:
        assert_rounds_once(self.op, config, device)

    def test_public_function(self, device: str) -> None:
        registry.get(self.op).force("triton")
        tensors = self.tensors(device)
        public = getattr(ops, self.op)(*tensors.values(), granularity="group")
        named = run(self.op, "triton", *tensors.values(), granularity="group")
        assert len(public) == len(named)
        assert all(torch.equal(got, want) for got, want in zip(public, named, strict=True))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_given_scale_is_used_and_saturates(self, backend: str, device: str) -> None:
        tensors = self.tensors(device)
        summed = sum(tensors.values())
        assert isinstance(summed, Tensor)
        for granularity, shape in (("tensor", ()), ("token", (3, 1)), ("group", (3, 2))):
            scale = torch.full(shape, 2.0**-8, device=device)
            given = self.arguments(**tensors, eps=1e-5, granularity=granularity, scale=scale)
            q, used, *_ = run(self.op, backend, *given)
            assert used is scale or torch.equal(used, scale)
            assert q.max() == 127 and q.min() == -127
            y = reference(self.norm, summed.double(), eps=1e-5) * 256
            inside = y.abs() < 126
            assert ((q.double() - y).abs()[inside] <= 0.5 + 1e-3).all() and inside.any()

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_the_sum_is_rounded_first(self, dtype: torch.dtype, backend: str, device: str) -> None:
        tensors = self.tensors(device, dtype)
        results = run(self.op, backend, *tensors.values())
        if not self.residual:
            assert len(results) == 2
            return
        x, r = tensors.values()
        q, scale, h = results
        assert torch.equal(h, x + r)
        assert len({t.data_ptr() for t in (x, r, h)}) == 3
        # the norm of the rounded sum has another scale than that of the sum in float32
        y = reference(self.norm, h.double())
        torch.testing.assert_close(scale.double(), y.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0.0)
        other = reference(self.norm, x.double() + r.double())
        assert ((other.abs().amax(-1, keepdim=True) / 127 / scale - 1).abs() > 1e-5).any()
        assert q.dtype == torch.int8

    @pytest.mark.parametrize("backend", [None, *BACKENDS])
    @pytest.mark.parametrize("case", REFUSALS)
    def test_wrong_arguments(self, case: str, backend: str | None) -> None:
        wrong, message = REFUSALS[case]
        if not all(self.takes(name) for name in wrong):
            # an argument that this op does not have: nor does it take one of that name
            with pytest.raises(TypeError):
                getattr(ops, self.op)(X, **wrong)
            return
        given = {"x": X, **({"residual": X} if self.residual else {}), **wrong}
        assert_refuses(self.op, backend, self.arguments(**given), message)

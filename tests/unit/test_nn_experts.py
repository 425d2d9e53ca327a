"""Experts in MXFP4: from gpt-oss's blocks and from weights in 16 bits, beside the values that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.nn import Experts
from wavecrest.ops import moe, pack

EXPERTS, HIDDEN, INTERMEDIATE = 4, 96, 64


def checkpoint() -> dict[str, Tensor]:
    """The entries of a layer's experts in a checkpoint of gpt-oss."""
    torch.manual_seed(0)
    made = {}
    for name, rows, columns in (("gate_up", 2 * INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
        made[f"{name}_blocks"] = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
        made[f"{name}_scales"] = torch.randint(118, 124, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        made[f"{name}_bias"] = torch.randn(EXPERTS, rows)
    return made


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, rows, columns] in float64: the even column is in the low half of a byte."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    return (torch.cat([sizes, -sizes])[codes] * torch.exp2(scales.double() - 127)[..., None]).flatten(-2)


def routed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights, ids = torch.randn(9, EXPERTS, generator=generator).softmax(-1).topk(2)
    return torch.randn(9, HIDDEN, generator=generator), ids, weights


def test_blocks_of_gpt_oss_value_by_value() -> None:
    held = checkpoint()
    experts = Experts.from_mxfp4(**held)
    x, ids, weights = routed()
    got = experts(x, ids, weights)
    w1, w2 = (unpacked(held[f"{name}_blocks"], held[f"{name}_scales"]) for name in ("gate_up", "down"))
    want = moe(
        x.double(), w1, w2, weights, ids, held["gate_up_bias"].double(), held["down_bias"].double(), "swigluoai", True
    )
    assert got.dtype == torch.float32 and float((got - want).norm() / want.norm()) < 1e-5
    flat = {name: value.flatten(2) if name.endswith("blocks") else value for name, value in held.items()}
    assert torch.equal(Experts.from_mxfp4(**flat)(x, ids, weights), got)
    assert "mxfp4" in repr(experts) and not any(one.requires_grad for one in experts.parameters())
    # bytes and scales come back; a change of dtype is one of the biases alone
    other = Experts.from_mxfp4(**{name: torch.zeros_like(value) for name, value in held.items()})
    other.load_state_dict(experts.state_dict())
    assert torch.equal(other(x, ids, weights), got)
    half = other.to(torch.bfloat16)
    assert half.gate_up_proj.dtype == torch.uint8 and half.gate_up_proj_bias is not None
    assert half.gate_up_proj_bias.dtype == torch.bfloat16 and half(x.bfloat16(), ids, weights).dtype == torch.bfloat16


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_in_16_bits_are_packed(transposed: bool) -> None:
    torch.manual_seed(0)
    w1, w2 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 9, torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 8
    given = [nn.Parameter(one.mT.contiguous() if transposed else one) for one in (w1, w2)]
    plain = Experts(*given, activation="gelu", transposed=transposed)
    experts = plain.eval().to_mxfp4()
    x, ids, weights = routed()
    rounded = [torch.stack([pack(one, "mxfp4").unpack() for one in weight]) for weight in (w1, w2)]
    want = moe(x.double(), *(one.double() for one in rounded), weights, ids, activation="gelu")
    got = experts(x, ids, weights)
    assert not experts.training and float((got - want).norm() / want.norm()) < 1e-5
    assert 0.01 < float((got - plain(x, ids, weights).detach()).norm() / want.norm()) < 0.4
    with pytest.raises(InvalidArgument, match="in MXFP4 already"):
        experts.to_mxfp4()
    # nothing proves what another module's bytes stand for
    with pytest.raises(StepRefused, match="parameters beside weights and biases"):
        Experts.from_module(experts)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"gate_up_scales": torch.zeros(EXPERTS, 5, 3, dtype=torch.uint8)}, "blocks are .experts, rows"),
        ({"down_blocks": torch.zeros(EXPERTS, HIDDEN, 2, 15, dtype=torch.uint8)}, "K in multiples of 32"),
        ({"down_scales": torch.zeros(EXPERTS, HIDDEN, 2)}, "scale must be"),
    ],
)
def test_blocks_that_do_not_fit(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        Experts.from_mxfp4(**(checkpoint() | change))

"""Vision-LSTM on wavecrest's mLSTM: layers of both directions, by their formulas in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.errors import InvalidArgument
from wavecrest.integrations.vision_lstm import _Cell, patch_vision_lstm

HEADS, DIM = 2, 6
WIDTH = HEADS * DIM


class _Norm(nn.Module):
    """The parameters of a cell's norm; the weight is 1 + the parameter."""

    def __init__(self, bias: bool, weight: bool = True) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.zeros(WIDTH)) if weight else None
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    @property
    def weight_proxy(self) -> Tensor | None:
        return None if self.weight is None else 1.0 + self.weight


class MatrixLSTMCell(nn.Module):
    """The parts of a cell by the package's names, and what it computes: token by token, in float64."""

    def __init__(self, bias: bool = True, weight: bool = True) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.igate, self.fgate = nn.Linear(3 * WIDTH, HEADS), nn.Linear(3 * WIDTH, HEADS)
        self.outnorm = _Norm(bias, weight)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = torch.cat((q, k, v), -1).double()
        i, f = (given @ one.weight.double().T + one.bias.double() for one in (self.igate, self.fgate))  # [B, S, heads]
        rows = []
        for row in range(q.shape[0]):
            c, n = (torch.zeros(HEADS, *shape, dtype=torch.float64) for shape in ((DIM, DIM), (DIM,)))
            tokens = []
            for t in range(q.shape[1]):
                q_t, k_t, v_t = (one[row, t].double().view(HEADS, DIM) for one in (q, k, v))
                keep, take = f[row, t].sigmoid(), i[row, t].exp()
                c = keep[:, None, None] * c + take[:, None, None] * k_t[:, :, None] * v_t[:, None, :]
                n = keep[:, None] * n + take[:, None] * k_t
                read = q_t / DIM**0.5
                below = torch.einsum("hd,hd->h", read, n).abs().clamp(min=1.0)
                h = torch.einsum("hd,hde->he", read, c) / below[:, None]
                tokens.append(F.layer_norm(h, (DIM,), eps=self.outnorm.eps).flatten())
            rows.append(torch.stack(tokens))
        y = torch.stack(rows)
        weight, bias = self.outnorm.weight_proxy, self.outnorm.bias
        y = y if weight is None else y * weight.double()
        return (y if bias is None else y + bias.double()).to(q.dtype)


class _Layer(nn.Module):
    """A layer's way to its cell: one that goes backwards turns its input and its output around."""

    def __init__(self, backwards: bool, **options: Any) -> None:
        super().__init__()
        self.backwards = backwards
        self.proj = nn.Linear(5, 3 * WIDTH)
        self.mlstm_cell = MatrixLSTMCell(**options)
        self.proj_down = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flip(1) if self.backwards else x
        x = self.proj_down(self.mlstm_cell(*self.proj(x).chunk(3, -1)))
        return x.flip(1) if self.backwards else x


def _model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(_Layer(False, **options), _Layer(True, **options)).eval()
    with torch.no_grad():
        for name, one in made.named_parameters():
            if "outnorm" in name:
                one.normal_(std=0.5)
            # a memory of some 20 tokens
            if "fgate.bias" in name:
                one.add_(3.0)
    return made


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bias": False, "weight": False}])
@torch.no_grad()
def test_layers_of_both_directions_are_their_formulas(options: dict[str, Any]) -> None:
    model = _model(**options)
    made = patch_vision_lstm(copy.deepcopy(model))
    assert made.state_dict().keys() == model.state_dict().keys()
    assert sum(isinstance(part, _Cell) for part in made.modules()) == 2
    x = torch.randn(2, 19, 5)
    torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)
    # the second one reads from the end: a change of the last token shows in the first
    other = x.clone()
    other[:, -1] += 1.0
    assert float((made(other) - made(x))[:, 0].abs().max()) > 1e-4


def test_gradients_and_weights_stay_the_models() -> None:
    model = _model()
    made = patch_vision_lstm(copy.deepcopy(model))
    x = torch.randn(1, 7, 5)
    for one in (model, made):
        one(x).square().sum().backward()
    for (name, mine), (_, theirs) in zip(made.named_parameters(), model.named_parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_what_is_refused_and_cells_that_layers_share() -> None:
    with pytest.raises(InvalidArgument, match="Linear has no MatrixLSTMCell"):
        patch_vision_lstm(nn.Linear(3, 3))
    shared = _model()
    shared[1].mlstm_cell = shared[0].mlstm_cell  # type: ignore[index]
    made = patch_vision_lstm(shared)
    assert made[0].mlstm_cell is made[1].mlstm_cell  # type: ignore[index]
    with pytest.raises(InvalidArgument, match="not patched yet"):
        patch_vision_lstm(made)


@torch.no_grad()
def test_the_packages_own_model() -> None:
    """Where its folder vision_lstm can be imported; the patched model is held to it."""
    package = pytest.importorskip(
        "vision_lstm.vision_lstm2", reason="compares with vision_lstm, a folder of NX-AI/vision-lstm, not on the path"
    )
    model = package.VisionLSTM2(dim=32, input_shape=(3, 32, 32), patch_size=8, depth=2, output_shape=(5,)).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    image = torch.randn(2, 3, 32, 32, generator=generator)
    want = model(image)
    torch.testing.assert_close(patch_vision_lstm(model)(image), want, rtol=1e-4, atol=1e-4)

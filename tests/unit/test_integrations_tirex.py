"""TiRex and TiRex-2 on wavecrest's sLSTM: forecasts of the packages' own models, and the recurrence by its formulas."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.integrations.tirex import _Cell, _Memory, _Recurrence, patch_tirex
from wavecrest.ops import mlstm_sequence

WITHOUT = "compares with {0}, which is not installed (pip install --no-deps {0}, and what it imports)"
HEADS, DIM = 2, 16


def _formulas(gates: Tensor, r: Tensor, bias: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(h [B, S, NH, D], last states [4, B, NH, D]) in float64, of gates [B, S, 4, NH, D], r [NH, D, 4, D] and bias."""
    x, r, bias = gates.double(), r.double(), bias.double()
    batch = x.shape[0]
    zeros = torch.zeros(4, batch, HEADS, DIM, dtype=torch.float64)
    h, c, n, m = (zeros if state is None else state.double()).unbind(0)
    found = []
    for t in range(x.shape[1]):
        i, f, z, o = (x[:, t] + torch.einsum("bhd,hdge->bghe", h, r) + bias.transpose(0, 1)).unbind(1)
        lf = f - torch.log1p(f.exp())
        new = torch.where(n == 0, i, torch.maximum(lf + m, i))
        keep, take = torch.where(n == 0, torch.zeros_like(i), (lf + m - new).exp()), (i - new).exp()
        c, n, m = keep * c + take * z.tanh(), keep * n + take, new
        h = o.sigmoid() * c / n
        found.append(h)
    return torch.stack(found, 1), torch.stack((h, c, n, m))


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class _Layer(nn.Module):
    """Parameters as the cell of TiRex has them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self._recurrent_kernel_ = nn.Parameter(_random(HEADS, DIM, 4 * DIM) / 4)
        self._bias_ = nn.Parameter(_random(HEADS * 4 * DIM, seed=1))


@pytest.mark.parametrize("first", [False, True])
def test_cells_are_the_formulas(first: bool) -> None:
    layer = _Layer()
    gates = _random(3, 11, 4, HEADS, DIM, seed=2)
    r, bias = layer._recurrent_kernel_.view(HEADS, DIM, 4, DIM), layer._bias_.view(HEADS, 4, DIM)
    state = None
    if first:
        state = _formulas(_random(3, 5, 4, HEADS, DIM, seed=3), r, bias, None)[1].float()
    wanted, last = _formulas(gates, r, bias, state)
    with torch.no_grad():
        h, after = _Cell(layer, None)(gates.flatten(2), None if state is None else state.flatten(2))
        y, states = _Recurrence(None)(gates, r, bias, None, None if state is None else state[:, :, None])
    for found, own in ((h.transpose(1, 2), after.view(4, 3, HEADS, DIM)), (y[0], states[:, :, 0])):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own.double(), last, rtol=1e-5, atol=1e-5)


class _MemoryLayer(nn.Module):
    """An mLSTM layer as TiRex-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlstm_backend = nn.Identity()
        self.mlstm_backend.config = SimpleNamespace(eps=1e-3)  # type: ignore[assignment]


_MemoryLayer.__name__, _MemoryLayer.__module__ = "mLSTMLayer", "tirex2.model.component.mlstm_block"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_mlstm_layers_are_the_formulas(dtype: torch.dtype | None) -> None:
    model = patch_tirex(nn.Sequential(_MemoryLayer(), nn.Linear(2, 2)), dtype=dtype)
    assert type(model[0].mlstm_backend) is _Memory and not model.state_dict().keys() ^ {"1.weight", "1.bias"}
    q, k, v = (_random(2, HEADS, 70, DIM, seed=seed) for seed in (1, 2, 3))
    i, f = (_random(2, HEADS, 70, seed=seed) for seed in (4, 5))
    h = model[0].mlstm_backend(q=q, k=k, v=v, i=i, f=f)
    wanted = mlstm_sequence(q.double(), k.double(), v.double(), i.double(), f.double(), eps=1e-3)
    assert h.dtype == torch.float32 and _apart(h.double(), wanted) < (1e-5 if dtype is None else 2**-5)
    with pytest.raises(InvalidArgument, match="not patched yet"):
        patch_tirex(model)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="Linear has no sLSTM or mLSTM layer of these packages"):
        patch_tirex(nn.Linear(3, 3))
    with pytest.raises(InvalidArgument, match="dtype takes"):
        patch_tirex(nn.Linear(3, 3), dtype=torch.int8)


def _fill(model: nn.Module) -> None:
    """Random weights that all show in a forecast."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_bias_") or weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _patched(model: nn.Module, **options: Any) -> Any:
    made = patch_tirex(copy.deepcopy(model), **options)
    assert made.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(InvalidArgument, match="not patched yet"):
        patch_tirex(made)
    return made


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_forecasts_of_tirex(dtype: torch.dtype | None) -> None:
    tirex = pytest.importorskip("tirex.models.tirex", reason=WITHOUT.format("tirex-ts"))
    sizes = {"embedding_dim": 64, "num_heads": 2, "num_blocks": 3, "ffn_proj_factor": 2.6667}
    model = tirex.TiRexZero(
        "torch",
        {
            "input_patch_size": 8, "output_patch_size": 8, "quantiles": [0.1, 0.5, 0.9], "block_kwargs": sizes,
            "input_ff_dim": 96,
        },
        train_ctx_len=128,
    )  # fmt: skip
    _fill(model)
    series = _random(3, 150, seed=5).cumsum(1)
    wanted = model._forecast_quantiles(series, 24)[0]
    # the package rounds gates and states to bfloat16, 2^-8, after each token
    assert _apart(_patched(model, dtype=dtype)._forecast_quantiles(series, 24)[0], wanted) < 2**-7


def test_forecasts_of_tirex_2() -> None:
    tirex = pytest.importorskip("tirex2.model.tirex2", reason=WITHOUT.format("tirex-2"))
    for name in ("flashrnn", "mlstm_kernels"):
        pytest.importorskip(name, reason=WITHOUT.format(name))
    series = pytest.importorskip("tirex2.model.types").TimeseriesType

    def block(kind: str) -> dict[str, Any]:
        mixer = {"embedding_dim": 64, "num_heads": 2}
        time = {"model_type": kind, "num_slstm_heads": 2, **mixer}
        return {"time_mixer": time, "variate_mixer": mixer, "dropout": 0.0, "eps": 1e-6}

    patch = {"output_patch_size": 8, "input_patch_size": 8, "input_patch_stride": 8}
    stack = {"templates": {"s": block("bi-slstm"), "m": block("bi-mlstm")}, "recipe": ["s", "m", "s"]}
    model = tirex.TiRex2(
        stack, 3, 64, 8, 8, [0.1, 0.5, 0.9], patch, {}, 1.0, 64, 16, 96, "ReLU", 0.0, device="cpu"
    ).eval()  # fmt: skip
    _fill(model)
    # two targets, a covariate of the past, two that are known ahead, which both directions read
    given = [series(_random(2, 50, seed=6).cumsum(1), _random(1, 50), _random(2, 66, seed=7))]
    (wanted,), (found,) = model.predict(given, 16), _patched(model).predict(given, 16)
    assert wanted.isfinite().all() and _apart(found, wanted) < 1e-5

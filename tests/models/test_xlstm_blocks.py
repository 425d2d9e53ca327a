"""The block stack: equal to package xlstm where it is installed, to plain formulas everywhere; states, state dicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import xLSTMBlockStack, xLSTMBlockStackConfig, xLSTMLMModel

NESTED: dict[str, Any] = {
    "embedding_dim": 64,
    "num_blocks": 3,
    "slstm_at": [1],
    "context_length": 12,
    "bias": True,
    "mlstm_block": {"mlstm": {"conv1d_kernel_size": 4, "num_heads": 2, "qkv_proj_blocksize": 4}},
    "slstm_block": {
        "slstm": {"conv1d_kernel_size": 3, "num_heads": 4, "backend": "vanilla"},
        "feedforward": {"proj_factor": 1.3, "act_fn": "gelu"},
    },
    "vocab_size": 19,
}


def filled(module: torch.nn.Module) -> None:
    """Parameters that all matter: nothing is left at 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.randn(one.shape, generator=generator) * 0.3)


def model(**changes: Any) -> xLSTMLMModel:
    made = xLSTMLMModel(xLSTMBlockStackConfig.of(NESTED | changes))
    filled(made)
    return made.eval()


def tokens(length: int = 12) -> Tensor:
    return torch.randint(0, 19, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_it_is_the_official_package() -> None:
    """xlstm 2.0.6 from PyPI (pip install --no-deps xlstm): logits, and the names and shapes of all weights."""
    xlstm = pytest.importorskip("xlstm", reason="compares with package xlstm, which is not installed")
    mlstm = xlstm.mLSTMBlockConfig(mlstm=xlstm.mLSTMLayerConfig(**NESTED["mlstm_block"]["mlstm"]))
    slstm = xlstm.sLSTMBlockConfig(
        slstm=xlstm.sLSTMLayerConfig(**NESTED["slstm_block"]["slstm"], dtype="float32"),
        feedforward=xlstm.FeedForwardConfig(**NESTED["slstm_block"]["feedforward"]),
    )
    plain = {name: value for name, value in NESTED.items() if not name.endswith("_block")}
    for slstm_at in ([1], [0, 2], "all"):
        official = xlstm.xLSTMLMModel(
            xlstm.xLSTMLMModelConfig(mlstm_block=mlstm, slstm_block=slstm, **plain | {"slstm_at": slstm_at})
        )
        filled(official)
        ours = xLSTMLMModel(xLSTMBlockStackConfig.of(NESTED | {"slstm_at": slstm_at}))
        ours.load_state_dict(official.state_dict())
        want, (got, _) = official.eval()(tokens()), ours.eval()(tokens())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        # token by token, as it decodes
        state: Any = None
        states: Any = None
        for t in range(4):
            want, state = official.step(tokens()[:, t : t + 1], state)
            got, states = ours(tokens()[:, t : t + 1], states)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_slstm_block_is_its_formulas() -> None:
    """In float64, from the names in a state dict, with loops."""
    stack = model(slstm_at="all", num_blocks=1).xlstm_block_stack.double()
    p = stack.state_dict()
    x = torch.randn(2, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def of(name: str) -> Tensor:
        return p[f"blocks.0.{name}"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-5) * (1 + weight)

    def by_head(x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bshd,hod->bsho", x.unflatten(2, (4, 16)), weight)

    y = norm(x, of("xlstm_norm.weight"))
    past = F.pad(y, (0, 0, 2, 0))
    made = sum(past[:, k : k + 5] * of("xlstm.conv1d.conv.weight")[:, 0, k] for k in range(3))
    made = F.silu(made + of("xlstm.conv1d.conv.bias"))
    # the gate i is made by fgate
    a = [by_head(made, of(f"xlstm.{gate}gate.weight")) for gate in "fi"]
    a += [by_head(y, of(f"xlstm.{gate}gate.weight")) for gate in "zo"]
    r = of("xlstm.slstm_cell._recurrent_kernel_").view(4, 4, 16, 16)
    b = of("xlstm.slstm_cell._bias_").view(4, 4, 16)
    h = c = n = m = torch.zeros(2, 4, 16, dtype=torch.float64)
    found = []
    for t in range(5):
        i, f, z, o = (a[g][:, t] + torch.einsum("bhj,hkj->bhk", h, r[:, g]) + b[g] for g in range(4))
        lf = F.logsigmoid(f)
        m_new = i if t == 0 else torch.maximum(lf + m, i)
        c = torch.exp(lf + m - m_new) * c + torch.exp(i - m_new) * torch.tanh(z)
        n = torch.exp(lf + m - m_new) * n + torch.exp(i - m_new)
        m, h = m_new, torch.sigmoid(o) * c / n
        found.append(F.layer_norm(h, (16,), eps=1e-5))
    y = x + torch.stack(found, 1).flatten(2) * (1 + of("xlstm.group_norm.weight"))
    gate, up = (norm(y, of("ffn_norm.weight")) @ of("ffn.proj_up.weight").T).chunk(2, -1)
    y = y + (F.gelu(gate) * up) @ of("ffn.proj_down.weight").T
    torch.testing.assert_close(stack(x)[0], norm(y, p["post_blocks_norm.weight"]))


@torch.no_grad()
def test_states_go_on_where_a_call_ended_and_are_values() -> None:
    made = model()
    want, _ = made(tokens())
    first, states = made(tokens()[:, :5])
    kept = [[part.clone() for part in state] for state in states]
    for _ in range(2):
        found, now = [first], states
        for begin, end in ((5, 6), (6, 7), (7, 12)):
            got, now = made(tokens()[:, begin:end], now)
            found.append(got)
        torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-4, atol=1e-4)
    for state, before in zip(states, kept, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True))


@torch.no_grad()
def test_state_dicts_of_the_cuda_backend_load() -> None:
    made, other = model(), model()
    given = made.state_dict()
    place = "xlstm_block_stack.blocks.1.xlstm.slstm_cell."
    r, b = given[f"{place}_recurrent_kernel_"], given[f"{place}_bias_"]
    cuda = dict(given)
    # [heads, D, 4 D], and [heads, 4, D]
    cuda[f"{place}_recurrent_kernel_"] = r.view(4, 4, 16, 16).permute(0, 3, 1, 2).reshape(4, 16, 64)
    cuda[f"{place}_bias_"] = b.view(4, 4, 16).transpose(0, 1).reshape(-1)
    before = cuda[f"{place}_bias_"].clone()
    for one in other.parameters():
        one.zero_()
    other.load_state_dict(cuda)
    assert torch.equal(other(tokens())[0], made(tokens())[0])
    assert torch.equal(cuda[f"{place}_bias_"], before)


def test_configurations() -> None:
    config = xLSTMBlockStackConfig.of(NESTED)
    assert (config.inner_dim, config.ffn_dim, config.slstm_at) == (128, 128, (1,))
    assert xLSTMBlockStackConfig.of({"embedding_dim": 8, "num_blocks": 2, "slstm_block": {}}).slstm_at == (0, 1)
    no_mlp = NESTED | {
        "slstm_block": {"slstm": {"conv1d_kernel_size": 0, "group_norm_weight": False}, "feedforward": None}
    }
    stack = xLSTMBlockStack(xLSTMBlockStackConfig.of(no_mlp))
    filled(stack)
    names = [name for name in stack.state_dict() if name.startswith("blocks.1.")]
    assert not [name for name in names if "ffn" in name or "conv" in name or "group_norm" in name]
    y, states = stack(torch.randn(2, 3, 64))
    assert y.shape == (2, 3, 64) and stack(torch.randn(2, 1, 64), states)[0].shape == (2, 1, 64)
    tied = model(tie_weights=True)
    assert tied.lm_head.weight is tied.token_embedding.weight
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"slstm_at": [3]}, "places of 3 blocks"),
        ({"embedding_dim": 66}, "slstm_num_heads=4 must divide"),
        ({"slstm_block": {"slstm": {"function": "lstm"}}}, "no cell function 'lstm'"),
        ({"slstm_block": {"feedforward": {"act_fn": "tanh"}}}, "ffn_act_fn='tanh'"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
    )
    for changes, words in wrong:
        with pytest.raises(InvalidArgument, match=words):
            model(**changes)
    with pytest.raises(InvalidArgument, match="embedding_dim is missing"):
        xLSTMBlockStackConfig.of({})

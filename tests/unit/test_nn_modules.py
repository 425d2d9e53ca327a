"""Modules with torch.nn's constructors: parameters, state_dict and results are torch.nn's, and the work is the ops'."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wavecrest
from wavecrest import nn as wnn
from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.nn import attention as _attention

E, HEADS = 32, 4


@pytest.fixture(autouse=True)
def _nothing_said_before() -> Iterator[None]:
    before = set(_attention._warned)
    _attention._warned.clear()
    yield
    _attention._warned.clear()
    _attention._warned.update(before)


def _close(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and torch.allclose(got, wanted, atol=2e-5)


def _pair(ours: Any, theirs: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Both made from one seed."""
    torch.manual_seed(0)
    made = ours(*arguments, **options)
    torch.manual_seed(0)
    return made, theirs(*arguments, **options)


CONSTRUCTED = [
    ("Linear", (6, 3), {}),
    ("Linear", (6, 3), {"bias": False, "dtype": torch.bfloat16}),
    ("Conv2d", (4, 6, 3), {"padding": 1, "groups": 2}),
    ("Conv2d", (4, 6, (3, 1)), {"bias": False, "padding_mode": "circular", "padding": (2, 1)}),
    ("MultiheadAttention", (E, HEADS), {}),
    ("MultiheadAttention", (E, HEADS), {"bias": False, "kdim": 8, "vdim": 12, "batch_first": True}),
    ("MultiheadAttention", (E, HEADS), {"add_bias_kv": True, "add_zero_attn": True}),
]


@pytest.mark.parametrize(("name", "arguments", "options"), CONSTRUCTED)
def test_parameters_and_state_dict_are_those_of_torch_nn(name: str, arguments: Any, options: dict[str, Any]) -> None:
    ours, theirs = _pair(getattr(wnn, name), getattr(nn, name), *arguments, **options)
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items())
    # and each loads the other's
    ours.load_state_dict(state)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(("name", "arguments", "options"), CONSTRUCTED)
def test_from_module_shares_every_parameter(name: str, arguments: Any, options: dict[str, Any]) -> None:
    theirs = getattr(nn, name)(*arguments, **options).eval()
    made = getattr(wnn, name).from_module(theirs)
    mine, its = dict(made.named_parameters()), dict(theirs.named_parameters())
    assert mine.keys() == its.keys() and all(mine[key] is its[key] for key in mine)
    assert not made.training or name == "Linear"


@pytest.mark.parametrize("name", ["Conv2d", "MultiheadAttention", "Attention"])
def test_from_module_refuses_what_it_would_change(name: str) -> None:
    plain: nn.Module = nn.Conv2d(2, 2, 1) if name == "Conv2d" else nn.MultiheadAttention(E, HEADS, batch_first=True)

    class Own(type(plain)):  # type: ignore[misc]
        def forward(self, *given: Any) -> Any:
            return super().forward(*given)

    hooked = copy.deepcopy(plain)
    hooked.register_forward_hook(lambda *_: None)
    own = copy.deepcopy(plain)
    own.__class__ = Own
    for module in (hooked, own, nn.ReLU()):
        with pytest.raises(StepRefused, match="is not an nn"):
            getattr(wnn, name).from_module(module)
    getattr(wnn, name).from_module(plain)


def test_linear_names_what_it_takes() -> None:
    with pytest.raises(InvalidArgument, match="from_weight"):
        wnn.Linear(torch.zeros(3, 4), 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="at least 1, got 4 and 0"):
        wnn.Linear(4, 0)
    with pytest.raises(InvalidArgument, match="swish"):
        wnn.Linear(4, 3, activation="swish")


def test_a_gated_linear_has_its_features_after_the_activation() -> None:
    made = wnn.Linear(6, 3, activation="silu_and_mul")
    assert made.weight.shape == (6, 6) and made.out_features == 3 and made(torch.randn(2, 6)).shape == (2, 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1, "bias": False},
        {"padding": "same", "dilation": 2},
        {"padding": (2, 1), "padding_mode": "reflect"},
        {"padding": "same", "padding_mode": "circular"},
        {"groups": 2, "stride": (1, 2)},
    ],
)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_conv2d_is_torchs(options: dict[str, Any], batch: tuple[int, ...]) -> None:
    ours, theirs = _pair(wnn.Conv2d, nn.Conv2d, 4, 6, 3, **options)
    x = torch.randn(*batch, 4, 9, 8)
    with wavecrest.coverage() as seen:
        got = ours(x)
    assert _close(got, theirs(x)) and [decision.op for decision, _ in seen] == ["conv2d"]
    assert _close(wnn.Conv2d.from_module(theirs, activation="silu")(x), nn.functional.silu(theirs(x)))


def test_conv2d_names_an_unknown_activation() -> None:
    with pytest.raises(InvalidArgument, match="swish"):
        wnn.Conv2d(2, 2, 1, activation="swish")


def _masks(batch: int, queries: int, keys: int) -> dict[str, dict[str, Any]]:
    torch.manual_seed(3)
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    padded = torch.arange(keys) >= torch.tensor([keys, 3])[:batch, None]
    return {
        "none": {},
        "pairs": {"attn_mask": hidden},
        "pairs added": {"attn_mask": torch.randn(queries, keys)},
        "pairs of each head": {"attn_mask": torch.randn(batch * HEADS, queries, keys)},
        "padding": {"key_padding_mask": padded},
        "padding added": {"key_padding_mask": torch.randn(batch, keys)},
        "both": {"attn_mask": hidden, "key_padding_mask": padded},
        "both, one added": {
            "attn_mask": torch.zeros(queries, keys).masked_fill(hidden, float("-inf")),
            "key_padding_mask": padded.float() * -1e4,
        },
        "causal": {"attn_mask": hidden, "is_causal": True},
        "causal and padding": {"attn_mask": hidden, "key_padding_mask": padded, "is_causal": True},
    }


@pytest.mark.parametrize("name", list(_masks(2, 5, 5)))
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False, "batch_first": True}])
def test_multihead_attention_is_torchs_under_every_mask(name: str, options: dict[str, Any]) -> None:
    ours, theirs = _pair(wnn.MultiheadAttention, nn.MultiheadAttention, E, HEADS, **options)
    x = torch.randn((2, 5, E) if options else (5, 2, E))
    given = _masks(2, 5, 5)[name] | {"need_weights": False}
    wanted, _ = theirs(x, x, x, **given)
    with wavecrest.coverage() as seen:
        got, weights = ours(x, x, x, **given)
    assert _close(got, wanted) and weights is None
    # one GEMM for q, k and v, attention, the last projection
    assert [(decision.op, calls) for decision, calls in seen] == [("flash_attention", 1), ("gemm", 1), ("gemm", 1)]


@pytest.mark.parametrize("options", [{}, {"kdim": 8, "vdim": 12}, {"kdim": 8, "vdim": 12, "bias": False}])
@pytest.mark.parametrize("same", [True, False])
def test_multihead_attention_over_other_inputs_is_torchs(options: dict[str, Any], same: bool) -> None:
    ours, theirs = _pair(wnn.MultiheadAttention, nn.MultiheadAttention, E, HEADS, batch_first=True, **options)
    q, k, v = torch.randn(2, 5, E), torch.randn(2, 7, options.get("kdim", E)), torch.randn(2, 7, options.get("vdim", E))
    given = (q, k, k if same and not options else v)
    mask = _masks(2, 5, 7)["both"]
    wanted, _ = theirs(*given, need_weights=False, **mask)
    assert _close(ours(*given, need_weights=False, **mask)[0], wanted)


def test_multihead_attention_takes_one_sequence_without_a_batch() -> None:
    ours, theirs = _pair(wnn.MultiheadAttention, nn.MultiheadAttention, E, HEADS)
    x, padded = torch.randn(5, E), torch.arange(5) > 3
    wanted, _ = theirs(x, x, x, key_padding_mask=padded, need_weights=False)
    assert _close(ours(x, x, x, key_padding_mask=padded, need_weights=False)[0], wanted)


@pytest.mark.parametrize(
    ("made", "called", "reason"),
    [
        ({}, {"need_weights": True}, "need_weights=False"),
        ({"add_zero_attn": True}, {"need_weights": False}, "keys that the module adds"),
        ({"add_bias_kv": True}, {"need_weights": False}, "keys that the module adds"),
        ({"dropout": 0.5}, {"need_weights": False}, "dropout"),
    ],
)
def test_what_multihead_attention_leaves_to_torch_it_says(made: Any, called: Any, reason: str) -> None:
    ours, theirs = _pair(wnn.MultiheadAttention, nn.MultiheadAttention, E, HEADS, **made)
    x = torch.randn(5, 2, E)
    torch.manual_seed(1)
    wanted = theirs(x, x, x, **called)
    torch.manual_seed(1)
    with pytest.warns(_attention.AttentionFallback, match=reason):
        got = ours(x, x, x, **called)
    assert torch.equal(got[0], wanted[0]) and (got[1] is None) == (wanted[1] is None)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "bias": False}])
def test_attention_is_projections_around_pytorchs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = wnn.Attention(E, HEADS, **options)
    x, mask = torch.randn(2, 5, E), torch.rand(2, 1, 5, 5) < 0.8

    def heads(layer: nn.Module) -> Tensor:
        y: Tensor = nn.functional.linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]
        return y.view(2, 5, -1, E // HEADS).transpose(1, 2)

    q, k, v = heads(made.query), heads(made.key), heads(made.value)
    for given in ({}, {"attn_mask": mask}, {"is_causal": True}):
        wanted = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given)  # type: ignore[arg-type]
        wanted = wanted.transpose(1, 2).reshape(2, 5, E)
        wanted = nn.functional.linear(wanted, made.output.weight, made.output.bias)
        assert _close(made(x, **given), wanted)


def test_attention_drops_of_its_result_while_training_alone() -> None:
    made = wnn.Attention(E, HEADS, 0.5)
    x = torch.randn(2, 50, E)
    assert ((made.train()(x) == 0).float().mean() - 0.5).abs() < 0.1 and (made.eval()(x) != 0).all()


@pytest.mark.parametrize("bias", [True, False])
def test_attention_from_torchs_has_views_of_its_parameters(bias: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, HEADS, bias=bias, batch_first=True)
    made, x = wnn.Attention.from_module(theirs), torch.randn(2, 5, E)
    assert _close(made(x), theirs(x, x, x, need_weights=False)[0])
    with torch.no_grad():
        theirs.in_proj_weight.mul_(2)
    assert _close(made(x), theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, r"\[S, B, E\]"),
        ({"batch_first": True, "kdim": 8}, "width of their own"),
        ({"batch_first": True, "add_zero_attn": True}, "keys of its own"),
        ({"batch_first": True, "dropout": 0.1}, "drops weights"),
    ],
)
def test_attention_refuses_modules_that_compute_something_else(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(StepRefused, match=reason):
        wnn.Attention.from_module(nn.MultiheadAttention(E, HEADS, **options))


def test_attention_names_heads_that_do_not_divide() -> None:
    for given in ({"num_heads": 5}, {"num_heads": 4, "num_kv_heads": 3}, {"num_heads": 0}):
        with pytest.raises(InvalidArgument, match="must divide embed_dim"):
            wnn.Attention(E, **given)


def test_the_modules_are_whole_in_a_graph() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = wnn.Conv2d(3, E, 2, padding=1, padding_mode="reflect", activation="relu")
            self.own = wnn.Attention(E, HEADS, num_kv_heads=2)
            self.torchs = wnn.MultiheadAttention(E, HEADS, batch_first=True)
            self.last = wnn.Linear(E, 3, activation="gelu")

        def forward(self, image: Tensor, mask: Tensor) -> Tensor:
            x = self.own(self.conv(image).flatten(2).mT, mask)
            x = x + self.torchs(x, x, x, attn_mask=~mask, need_weights=False)[0]
            result: Tensor = self.last(x)
            return result

    torch.manual_seed(0)
    model, image = Model(), torch.randn(2, 3, 4, 4)
    mask = torch.ones(25, 25, dtype=torch.bool).tril()
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="eager")(image, mask)
        assert _close(got, model(image, mask))

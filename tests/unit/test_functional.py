"""The names of PyTorch at the top level: the values of PyTorch's functions, over the dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

import wavecrest
from wavecrest.errors import InvalidArgument, LayoutWarning
from wavecrest.nn import attention as _attention

B, H, SQ, SK, D = 2, 4, 5, 7, 16
BOTTOM = torch.ones(SQ, SK, dtype=torch.bool).tril(SK - SQ)


@pytest.fixture(autouse=True)
def _nothing_said_before() -> Iterator[None]:
    before = set(_attention._warned)
    _attention._warned.clear()
    yield
    _attention._warned.clear()
    _attention._warned.update(before)


def _qkv(heads: int = H, dtype: torch.dtype = torch.float32, queries: int = SQ) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    made = torch.randn(B, H, queries, D), torch.randn(B, heads, SK, D), torch.randn(B, heads, SK, 24)
    return tuple(one.to(dtype) for one in made)  # type: ignore[return-value]


def _masks() -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    padding = torch.arange(SK) < torch.tensor([4, 7])[:, None, None, None]
    blind = BOTTOM.clone()
    blind[2] = False
    return {
        "none": None,
        "bool": BOTTOM,
        "bool of padding": padding,
        "bool of each head": torch.rand(B, H, SQ, SK) < 0.7,
        "bool that hides all keys of a query": blind,
        "added": torch.randn(SQ, SK),
        "added to each head": torch.randn(H, SQ, SK),
        "added to each sequence": torch.randn(B, 1, 1, SK),
        "added with infinities": torch.zeros(SQ, SK).masked_fill(~BOTTOM, float("-inf")),
    }


@pytest.mark.parametrize("forced", [None, "triton"])
@pytest.mark.parametrize("name", list(_masks()))
def test_attention_is_pytorchs_for_every_kind_of_mask(name: str, forced: str | None) -> None:
    wavecrest.ops.get("flash_attention").force(forced)
    (q, k, v), mask = _qkv(), _masks()[name]
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    assert torch.allclose(wavecrest.attention(q, k, v, mask), wanted, atol=1e-5)
    # and from the layout of a projection
    q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v))
    assert torch.allclose(wavecrest.attention(q, k, v, attn_mask=mask), wanted, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_the_result_lies_in_memory_as_query_does(backend: str) -> None:
    wavecrest.ops.get("flash_attention").force(backend)
    q, k, v = _qkv()
    # a copy into another layout takes a good part of the time of short sequences
    assert wavecrest.attention(q, k, v, BOTTOM).is_contiguous()
    q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v))
    assert wavecrest.attention(q, k, v, BOTTOM).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("queries", [1, 5, 7])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 0.0}])
def test_attention_takes_pytorchs_options(queries: int, options: dict[str, Any]) -> None:
    q, k, v = _qkv(queries=queries)
    wanted = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.allclose(wavecrest.attention(q, k, v, **options), wanted, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_are_shared_where_it_is_asked_for(heads: int) -> None:
    q, k, v = _qkv(heads, torch.bfloat16)
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), BOTTOM, enable_gqa=True)
    got = wavecrest.attention(q, k, v, BOTTOM, enable_gqa=True)
    assert got.dtype == torch.bfloat16 and torch.allclose(got.float(), wanted, atol=0.03)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda x: x[0], {}, "tensors that are not"),
        (lambda x: x, {"attn_mask": causal_lower_right(SQ, SK)}, "a mask of class CausalBias"),
        (lambda x: x.repeat(1, 1, 1, 20), {}, "head_dim of 480"),
        (lambda x: torch.cat((x, x, x), 2) if x.shape[2] == SQ else x, {"is_causal": True}, "upper left"),
    ],
)
def test_what_the_op_does_not_take_runs_in_pytorch_and_says_so(change: Any, options: Any, reason: str) -> None:
    q, k, v = (change(one) for one in _qkv())
    with pytest.warns(_attention.AttentionFallback, match=reason), _attention.watching() as calls:
        got = wavecrest.attention(q, k, v, **options)
    assert torch.equal(got, F.scaled_dot_product_attention(q, k, v, **options))
    assert [(call.decision, reason in call.reason) for call in calls] == [(None, True)]


def test_dropout_is_pytorchs_and_says_so() -> None:
    q, k, v = _qkv()
    torch.manual_seed(5)
    wanted = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    with pytest.warns(_attention.AttentionFallback, match="dropout"):
        assert torch.equal(wavecrest.attention(q, k, v, dropout_p=0.5), wanted)


def test_a_call_that_pytorch_refuses_is_refused() -> None:
    q, k, v = _qkv()
    with pytest.warns(_attention.AttentionFallback), pytest.raises(RuntimeError):
        wavecrest.attention(q, k, v, BOTTOM, is_causal=True)
    with pytest.raises(InvalidArgument, match="bias"):
        wavecrest.attention(q, k, v, torch.ones(3, SK, dtype=torch.bool))


def test_a_decision_of_the_op_stands_behind_attention() -> None:
    with wavecrest.coverage() as seen:
        wavecrest.attention(*_qkv())
    assert [(decision.op, calls) for decision, calls in seen] == [("flash_attention", 1)]


def test_the_functions_are_whole_in_a_graph() -> None:
    image, kernel = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)

    def work(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = wavecrest.attention(q, k, v, mask)
        z = wavecrest.attention(q, k[:, :, :SQ], v[:, :, :SQ], dropout_p=0.0, is_causal=True)
        scores = wavecrest.softmax(wavecrest.matmul(q, k.mT), 1)
        rows = wavecrest.rms_norm(wavecrest.linear(y, z[0, 0]))
        return y, z, scores, rows, wavecrest.conv2d(image, kernel, padding=1)

    given = (*_qkv(), BOTTOM)
    with torch.no_grad():
        compiled = torch.compile(work, fullgraph=True, backend="eager")(*given)
        for got, wanted in zip(compiled, work(*given), strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)


def test_gradients_reach_the_tensors() -> None:
    given = [one.requires_grad_() for one in _qkv()]
    (wavecrest.attention(*given, BOTTOM) * torch.arange(24)).sum().backward()
    found = [one.grad for one in given]
    plain = [one.detach().clone().requires_grad_() for one in given]
    (F.scaled_dot_product_attention(*plain, BOTTOM) * torch.arange(24)).sum().backward()
    for got, one in zip(found, plain, strict=True):
        assert got is not None and one.grad is not None and torch.allclose(got, one.grad, atol=1e-3)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((6,), (6,)),
        ((6,), (6, 3)),
        ((4, 6), (6,)),
        ((4, 6), (6, 3)),
        ((6,), (2, 6, 3)),
        ((2, 4, 6), (6,)),
        ((2, 4, 6), (6, 3)),
        ((4, 6), (2, 6, 3)),
        ((5, 1, 4, 6), (2, 6, 3)),
        ((0, 6), (6, 3)),
    ],
)
def test_matmul_takes_the_shapes_of_pytorchs(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(a), torch.randn(b)
    got, wanted = wavecrest.matmul(x, y), torch.matmul(x, y)
    assert got.shape == wanted.shape and torch.allclose(got, wanted, atol=1e-5)


def test_matmul_names_the_fault() -> None:
    with pytest.raises(InvalidArgument):
        wavecrest.matmul(torch.randn(4, 6), torch.randn(5, 3))
    with pytest.raises(InvalidArgument):
        wavecrest.matmul(torch.randn(4, 6), 2.0)  # type: ignore[arg-type]


def test_conv2d_takes_one_image_as_pytorch_does() -> None:
    torch.manual_seed(0)
    image, weight, bias = torch.randn(4, 9, 8), torch.randn(6, 2, 3, 3), torch.randn(6)
    options: dict[str, Any] = {"stride": (2, 1), "padding": 1, "dilation": 2, "groups": 2}
    for x in (image, image[None].expand(3, -1, -1, -1)):
        wanted = F.conv2d(x, weight, bias, **options)
        assert torch.allclose(wavecrest.conv2d(x, weight, bias, **options), wanted, atol=1e-5)


def _doubts(q: Tensor, k: Tensor, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wavecrest.ops.flash_attention(q, k, k, **options)
    return [str(one.message) for one in said if issubclass(one.category, LayoutWarning)]


def test_a_likely_mistake_of_layout_is_a_warning_that_a_word_turns_off() -> None:
    # 512 tokens of 8 heads, passed as they lie in a model
    x = torch.randn(1, 8, 512, 4)
    (said,) = _doubts(x, x)
    assert "[1, 8, 512, 4] is read as 8 tokens of 512 heads" in said and 'layout="bhsd"' in said
    for layout in ("bshd", "bhsd"):
        assert not _doubts(x, x, layout=layout)


@pytest.mark.parametrize(
    ("q", "k"),
    [
        # the most heads that a model has; a few tokens of them
        ((1, 2, 232, 4), (1, 2, 8, 4)),
        ((1, 2, 256, 4), (1, 2, 256, 4)),
        # more tokens than heads
        ((1, 300, 300, 4), (1, 300, 300, 4)),
        # heads that are shared: of keys there are few
        ((1, 2, 512, 4), (1, 2, 8, 4)),
        ((0, 8, 16, 4), (0, 8, 16, 4)),
    ],
)
def test_a_layout_that_may_be_meant_is_not_doubted(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    assert not _doubts(torch.randn(q), torch.randn(k))


def test_heads_that_do_not_fit_name_the_other_layout_if_it_would() -> None:
    q, k = torch.randn(1, 8, 256, 4), torch.randn(1, 8, 200, 4)
    with pytest.raises(InvalidArgument, match=r"multiple .* if q, k and v are \[B, H, S, D\], pass layout=\"bhsd\""):
        wavecrest.ops.flash_attention(q, k, k)
    with pytest.raises(InvalidArgument, match=r"if q, k and v are \[B, S, H, D\], pass layout=\"bshd\""):
        wavecrest.ops.flash_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), layout="bhsd")
    with pytest.raises(InvalidArgument, match=r"\(5\) must be a multiple of those of k and v \(3\)$"):
        wavecrest.ops.flash_attention(torch.randn(1, 5, 5, 4), torch.randn(1, 3, 3, 4), torch.randn(1, 3, 3, 4))

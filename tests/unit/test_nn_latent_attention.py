"""The MLA layer: both of its paths against a plain one in float64, caches with and without pages, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument
from wavecrest.nn import MultiHeadLatentAttention

SIZES: dict[str, Any] = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "max_positions": 64,
}  # fmt: skip
HIDDEN, HEADS, TOKENS = 20, 3, 23


def layer(dtype: torch.dtype = torch.float32, **options: Any) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    made = MultiHeadLatentAttention(HIDDEN, HEADS, **(SIZES | options))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # norms that are not ones, and scores that differ enough for a wrong one to show
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 2 / math.sqrt(parameter.shape[-1]))
    return made.to(dtype)


def plain(made: MultiHeadLatentAttention, x: Tensor) -> Tensor:
    """The layer's formula in float64, token by token and head by head, from its parameters alone."""
    weights = {name: value.detach().cpu().double() for name, value in made.state_dict().items()}
    x = x.detach().cpu().double()

    def linear(name: str, value: Tensor) -> Tensor:
        out = value @ weights[f"{name}.weight"].T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    def norm(name: str, value: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def turn(value: Tensor, place: int) -> Tensor:
        out, half = value.clone(), value.shape[0] // 2
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if made.rotary_emb.style == "gptj" else (i, i + half)
            angle = place * made.rotary_emb.base ** (-2 * i / value.shape[0])
            out[a] = value[a] * math.cos(angle) - value[b] * math.sin(angle)
            out[b] = value[b] * math.cos(angle) + value[a] * math.sin(angle)
        return out

    q = linear("q_proj", x) if made.q_lora_rank is None else linear(
        "q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x))
    )  # fmt: skip
    rows = linear("kv_a_proj_with_mqa", x)
    latents = norm("kv_a_layernorm", rows[..., : made.latent])
    kv = linear("kv_b_proj", latents)
    out = torch.zeros(*x.shape[:2], made.heads * made.values, dtype=torch.float64)
    for b in range(x.shape[0]):
        shared = [turn(rows[b, j, made.latent :], j) for j in range(x.shape[1])]
        for h in range(made.heads):
            own = q[b].view(x.shape[1], made.heads, -1)[:, h]
            both = kv[b].view(x.shape[1], made.heads, -1)[:, h]
            for t in range(x.shape[1]):
                turned = turn(own[t, made.nope :], t)
                scores = torch.stack(
                    [own[t, : made.nope] @ both[j, : made.nope] + turned @ shared[j] for j in range(t + 1)]
                )
                share = torch.softmax(scores * made.scale, 0)
                out[b, t, h * made.values : (h + 1) * made.values] = share @ both[: t + 1, made.nope :]
    return linear("o_proj", out)


def stepped(
    made: MultiHeadLatentAttention, x: Tensor, chunks: list[int], page: int = 0, room: int = 32
) -> tuple[Tensor, Tensor]:
    """(the outputs of chunks of tokens, one after another through a cache, that cache)."""
    batch, width = x.shape[0], made.latent + made.rotary
    shape = (batch * room // page + 1, page, width) if page else (batch, room, width)
    cache = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    table = None
    if page:
        order = torch.randperm(batch * room // page, generator=torch.Generator().manual_seed(1)) + 1
        table = order.view(batch, -1).to(x.device, torch.int32)
    out, done = [], 0
    for count in chunks:
        lens = torch.full((batch,), done + count, dtype=torch.int32, device=x.device)
        out.append(made(x[:, done : done + count], cache, lens, table))
        done += count
    return torch.cat(out, 1), cache


@pytest.mark.parametrize("style", ["gptj", "neox"])
@pytest.mark.parametrize(
    "options", [{}, {"q_lora_rank": 9}, {"q_lora_rank": 9, "bias": True, "softmax_scale": 0.1}], ids=str
)
def test_both_paths_are_the_formula(options: dict[str, Any], style: str, device: str) -> None:
    made = layer(rope_style=style, **options).to(device)
    x = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    want = plain(made, x)
    with torch.no_grad():
        torch.testing.assert_close(made(x).cpu().double(), want, rtol=1e-4, atol=1e-4)
        for page in (0, 8):
            for chunks in ([TOKENS], [1] * TOKENS, [18, 1, 4], [3, 16, 4]):
                got, cache = stepped(made, x, chunks, page)
                torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)
                # a token writes its own row and no other
                assert int((~cache.isnan().any(-1)).sum()) == 2 * TOKENS


def test_the_paths_are_told_apart(device: str) -> None:
    """The comparison can fail: each part of the formula shows in the output."""
    made = layer().to(device)
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    want = plain(made, x)
    for name in ("kv_a_layernorm", "kv_b_proj", "o_proj", "q_proj", "kv_a_proj_with_mqa"):
        other = layer().to(device)
        with torch.no_grad():
            other.get_submodule(name).weight.mul_(1.01)  # type: ignore[operator, union-attr]
            assert float((other(x).cpu() - want).abs().max()) > 1e-3, name
    with torch.no_grad():
        assert float((layer(rope_style="neox").to(device)(x).cpu() - want).abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype, device: str) -> None:
    made = layer(dtype).to(device)
    x = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    want, limit = plain(made, x), 40 * torch.finfo(dtype).eps
    assert made.rotary_emb.cos.dtype == torch.float32
    with torch.no_grad():
        for got in (made(x), stepped(made, x, [18, 1, 4], 8)[0]):
            assert got.dtype == dtype
            assert float((got.cpu().double() - want).abs().max()) < limit * float(want.abs().max())


def test_the_absorbed_path_is_the_ops(device: str) -> None:
    """Few tokens are decoding, more a prefill, and without a cache neither."""
    made = layer().to(device)
    x = torch.randn(1, 20, HIDDEN, device=device)
    for chunks, names in (([16, 4], ["mla_decode"]), ([20], ["mla_prefill"]), (None, ["flash_attention"])):
        registry.forget()
        with torch.no_grad():
            made(x) if chunks is None else stepped(made, x, chunks)
        seen = {decision.op for decision, _ in registry.coverage()}
        assert seen & {"mla_decode", "mla_prefill", "flash_attention"} == set(names)


def test_parameters_are_deepseeks() -> None:
    names = {name: tuple(value.shape) for name, value in layer(q_lora_rank=9, bias=True).state_dict().items()}
    assert names == {
        "q_a_proj.weight": (9, 20), "q_a_proj.bias": (9,), "q_a_layernorm.weight": (9,), "q_b_proj.weight": (60, 9),
        "kv_a_proj_with_mqa.weight": (32, 20), "kv_a_proj_with_mqa.bias": (32,), "kv_a_layernorm.weight": (24,),
        "kv_b_proj.weight": (66, 24), "o_proj.weight": (20, 30), "o_proj.bias": (20,),
    }  # fmt: skip
    assert "q_proj.weight" in layer().state_dict()


def test_it_trains(device: str) -> None:
    made = layer().to(device)
    made(torch.randn(1, 5, HIDDEN, device=device)).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name


def test_bad_arguments() -> None:
    made, x = layer(), torch.zeros(1, 2, HIDDEN)
    lens = torch.tensor([2], dtype=torch.int32)
    for call, message in (
        (lambda: made(x, None, lens), "go with a latent_cache"),
        (lambda: made(x, torch.zeros(1, 8, 32)), "needs seq_lens"),
        (lambda: made(x, torch.zeros(1, 8, 31), lens), r"\[..., tokens, 32\]"),
        (lambda: made(x, torch.zeros(1, 8, 32).half(), lens), "must be torch.float32"),
        (lambda: layer(rope_style="llama"), "neox or gptj"),
        (lambda: layer(v_head_dim=0), "v_head_dim must be a whole number"),
        (lambda: layer(q_lora_rank=0), "q_lora_rank must be a whole number"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call()

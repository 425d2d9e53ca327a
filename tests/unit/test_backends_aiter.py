"""aiter behind gemm and flash_attention, with a stand-in for it: what it is given, and what is refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention_harness import packed, tensors
from wavecrest import hardware
from wavecrest.backends import aiter
from wavecrest.dispatch import registry
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall, linear_call
from wavecrest.ops.packed import pack

FP8 = torch.float8_e4m3fn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """aiter's four functions as their sources describe them, in float64."""
    seen: list[str] = []

    def gemm_a16w16(A: Tensor, B: Tensor, bias: Tensor | None = None, otype: Any = None) -> Tensor:
        assert A.ndim == 2 and B.shape == (B.shape[0], A.shape[1]) and B.is_contiguous()
        preshuffled = getattr(B, "is_shuffled", False) is True
        seen.append("a16w16" + " preshuffled" * preshuffled + " bias" * (bias is not None))
        y = A.double() @ (_in_order(B) if preshuffled else B).double().mT
        return (y if bias is None else y + bias).to(otype)

    def gemm_a8w8(
        XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Any = None, dtype: Any = None
    ) -> Tensor:
        assert x_scale.shape == (XQ.shape[0], 1) and w_scale.shape == (1, WQ.shape[0]) and bias is None
        seen.append("a8w8")
        return ((XQ.double() * x_scale) @ (WQ.double() * w_scale.mT).mT).to(dtype)

    def gemm_a8w8_bpreshuffle(
        XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Any = None, dtype: Any = None
    ) -> Tensor:
        assert x_scale.shape == (XQ.shape[0], 1) and w_scale.shape == (WQ.shape[0], 1) and bias is None
        assert WQ.is_contiguous() and WQ.dtype.is_floating_point
        seen.append("a8w8 preshuffled")
        return ((XQ.double() * x_scale) @ (_in_order(WQ).double() * w_scale).mT).to(dtype)

    def gemm_a8w8_blockscale(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: Any = None) -> Tensor:
        (m, k), n = XQ.shape, WQ.shape[0]
        assert x_scale.shape == (m, -(-k // 128)) and w_scale.shape == (-(-n // 128), -(-k // 128))
        assert w_scale.is_contiguous()
        seen.append("blockscale")
        x = XQ.double() * x_scale.repeat_interleave(128, 1)[:, :k]
        w = WQ.double() * w_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return (x @ w.mT).to(dtype)

    package, tuned = ModuleType("aiter"), ModuleType("aiter.tuned_gemm")
    package.gemm_a8w8, package.gemm_a8w8_blockscale = gemm_a8w8, gemm_a8w8_blockscale  # type: ignore[attr-defined]
    package.gemm_a8w8_bpreshuffle = gemm_a8w8_bpreshuffle  # type: ignore[attr-defined]
    tuned.gemm_a16w16 = gemm_a16w16  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", package)
    monkeypatch.setitem(sys.modules, "aiter.tuned_gemm", tuned)
    yield seen


def _in_order(stored: Tensor) -> Tensor:
    """The weight [N, K] that aiter's `shuffle_weight` would store so: element by element, by the place of each."""
    (n, k), run = stored.shape, 16 // stored.element_size()
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
    tile = rows // 16 * (k // 32) + columns // 32
    place = ((tile * (32 // run) + columns % 32 // run) * 16 + rows % 16) * run + columns % run
    return stored.flatten()[place.flatten()].view(n, k)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm build with aiter, whose tensors are on the CPU."""
    monkeypatch.setattr(aiter, "_unavailable", lambda: None)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)


def _int8(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


CASES = {
    "plain": ("a16w16", lambda: GemmCall(_random(2, 5, 64), _random(48, 64).mT)),
    "bias": ("a16w16 bias", lambda: GemmCall(_random(5, 64), _random(48, 64).mT, bias=_random(48))),
    "bias of another dtype": (
        "a16w16",
        lambda: GemmCall(_random(5, 64), _random(48, 64).mT, bias=torch.randn(48), activation="silu", alpha=0.5),
    ),
    "gated, residual": (
        "a16w16",
        lambda: GemmCall(_random(5, 64), _random(48, 64).mT, activation="silu_and_mul", residual=_random(5, 24)),
    ),
    "int8": ("a8w8", lambda: GemmCall(_int8(5, 64), _int8(48, 64).mT, scale_a=torch.rand(5), scale_b=torch.rand(48))),
    "preshuffled": ("a16w16 preshuffled", lambda: linear_call(_random(2, 5, 64), pack(_random(48, 64), "shuffled"))),
    "preshuffled bias gated": (
        "a16w16 preshuffled bias",
        lambda: linear_call(
            _random(5, 64), pack(_random(48, 64), "shuffled"), _random(48), activation="silu_and_mul"
        ),
    ),
    "preshuffled fp8": (
        "a8w8 preshuffled",
        lambda: linear_call(
            _random(5, 64, dtype=FP8), pack(_random(48, 64), "shuffled", dtype=FP8), torch.randn(48),
            scale_x=torch.rand(5), activation="relu",
        ),
    ),
    "fp8 blocks": (
        "blockscale",
        lambda: GemmCall(
            _random(5, 200, dtype=FP8), _random(140, 200, dtype=FP8).mT,
            scale_a=torch.rand(5, 2), scale_b=torch.rand(2, 2),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_gets_what_it_takes_and_the_rest_is_done_after(name: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    called, make = CASES[name]
    given = make()
    got, want = aiter.run_gemm(given), gemm.reference(given)
    assert calls == [called] and got.shape == want.shape and got.dtype == want.dtype
    assert (got.double() - want.double()).abs().max() <= 2e-2 * want.double().abs().max()


def test_without_it_the_reason_is_in_the_decision() -> None:
    decision = gemm.decide(GemmCall(_random(5, 64), _random(48, 64).mT))
    (reason,) = [refusal.reason for refusal in decision.refused if refusal.backend == "aiter"]
    assert "no ROCm build" in reason or "not installed" in reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda: GemmCall(_random(5, 64), _random(48, 64).mT), "runs where a measured row names it"),
        (lambda: GemmCall(_random(5, 64), _random(64, 48)), "contiguous along K"),
        (lambda: GemmCall(_random(3, 5, 64), _random(3, 48, 64).mT), "one plain or preshuffled weight"),
        (lambda: GemmCall(torch.randn(5, 64), torch.randn(48, 64).mT), "not float32"),
        (lambda: GemmCall(_int8(5, 64), _int8(48, 64).mT), "not none and none"),
        (lambda: GemmCall(_random(5, 64), _int8(48, 64).mT, scale_b=torch.rand(48)), "one plain or"),
        (
            lambda: GemmCall(
                _int8(5, 64), _int8(48, 64).mT, scale_a=torch.rand(5), scale_b=torch.rand(48), out_dtype=torch.float32
            ),
            "not torch.float32",
        ),
        (
            lambda: GemmCall(_random(5, 64).requires_grad_(), _random(48, 64).mT),
            "without gradients",
        ),
    ],
    ids=["taken", "other-order", "batch", "float32", "no-scales", "weight-only", "out", "grad"],
)
def test_what_it_refuses(gpu: None, given: Any, reason: str) -> None:
    call = given()
    refused = aiter._refuse_gemm(call) or aiter._opt_in_gemm(call)
    assert refused is not None and reason in refused


def _shuffled(dtype: torch.dtype = torch.bfloat16, n: int = 64, k: int = 64, stored: Any = None) -> GemmCall:
    weight = pack(torch.randn(n, k).to(dtype), "shuffled", dtype=stored)
    scale = {} if stored is None else {"scale_x": torch.rand(5)}
    return linear_call(torch.randn(5, k).to(dtype if stored is None else stored), weight, **scale)


FNUZ = torch.float8_e4m3fnuz


@pytest.mark.parametrize(
    ("arch", "made", "reason"),
    [
        ("gfx942", {}, "runs where a measured row names it"),
        ("gfx942", {"dtype": torch.float16, "n": 48, "k": 32}, "runs where a measured row names it"),
        ("gfx950", {}, "runs where a measured row names it"),
        ("gfx950", {"dtype": torch.float16}, "gfx950 in bfloat16"),
        ("gfx950", {"n": 48}, "multiples of 64"),
        ("gfx950", {"k": 96}, "multiples of 64"),
        ("gfx90a", {}, "on gfx942 and gfx950, not on gfx90a"),
        ("gfx942", {"stored": FNUZ, "n": 16, "k": 32}, "runs where a measured row names it"),
        ("gfx950", {"stored": FP8}, "runs where a measured row names it"),
        ("gfx942", {"stored": FP8}, "8-bit floats of gfx942, not float8_e4m3fn"),
        ("gfx950", {"stored": FNUZ}, "8-bit floats of gfx950, not float8_e4m3fnuz"),
        ("gfx90a", {"stored": FNUZ}, "8-bit floats of gfx90a"),
        ("gfx942", {"stored": torch.int8}, "not int8"),
    ],
)
def test_which_preshuffled_weights_it_takes(
    arch: str, made: dict[str, Any], reason: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.cpu(), arch=arch))
    call = _shuffled(**made)
    gemm.check(call)
    refused = aiter._refuse_gemm(call) or aiter._opt_in_gemm(call)
    assert refused is not None and reason in refused


def test_a_graph_keeps_no_mark_of_the_layout(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.cpu(), arch="gfx942"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile does not keep" in str(aiter._refuse_gemm(_shuffled()))
    # the name of the function says the layout
    assert aiter._refuse_gemm(_shuffled(stored=FNUZ)) is None


def test_the_weight_of_the_caller_gets_no_mark(calls: list[str]) -> None:
    call = _shuffled()
    aiter.run_gemm(call)
    assert calls == ["a16w16 preshuffled"] and not hasattr(call.b, "is_shuffled")


def test_a_key_of_a_preshuffled_weight_makes_a_call_to_tune() -> None:
    call = _shuffled()
    parts = dict(zip(gemm.key_fields, gemm.key(call), strict=True))
    made = gemm.study.call_of_key(parts, "cpu")  # type: ignore[misc]
    assert made is not None and made.form == "shuffled" and gemm.key(made) == gemm.key(call)


HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName"


@pytest.fixture
def tables(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An MI300X, and a folder that is an installed aiter."""
    device = replace(hardware.cpu(), name="MI300X", arch="gfx942", compute_units=304)
    monkeypatch.setattr(hardware, "detect", lambda: device)
    monkeypatch.delenv("AITER_CONFIG_GEMM_BF16", raising=False)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "aiter" else None)
    (tmp_path / "configs" / "model_configs").mkdir(parents=True)
    aiter._tables.cache_clear()
    yield tmp_path
    aiter._tables.cache_clear()


def _row(M: int, us: float, library: str) -> str:
    return f"gfx942,304,{M},48,64,False,torch.bfloat16,torch.bfloat16,False,False,{library},1,0,{us},k\n"


def _said(M: int = 30, **options: Any) -> str | None:
    return aiter._opt_in_gemm(GemmCall(_random(M, 64), _random(48, 64).mT, **options))


def test_a_decision_says_what_its_own_tables_have(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tables / "configs" / "bf16_tuned_gemm.csv").write_text(HEADER + "\n" + _row(32, 6.25, "asm"))
    (tables / "configs" / "model_configs" / "x_bf16_tuned_gemm.csv").write_text(HEADER + "\n" + _row(64, 0, "skinny"))
    plain = "runs where a measured row names it"
    # 30 rows are of the bucket of 32
    said = "its table bf16_tuned_gemm.csv has 6.2 µs by asm for 32 rows: `wavecrest tune gemm` compares"
    assert _said() == f"{plain}; {said}"
    assert "x_bf16_tuned_gemm.csv has a placeholder by skinny for 64 rows" in (_said(50) or "")
    assert _said(100) == plain
    # the list of the environment takes the place of all that
    mine = tables / "mine.csv"
    mine.write_text(HEADER + "\n" + _row(128, 9.0, "hipblaslt"))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(mine))
    aiter._tables.cache_clear()
    assert _said() == plain and "mine.csv has 9.0 µs by hipblaslt for 128 rows" in (_said(100) or "")


def test_a_table_that_cannot_be_read_is_named(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, good = tables / "broken.csv", tables / "good.csv"
    broken.write_text("a,b\n1,2\n")
    good.write_text(HEADER + "\n" + _row(32, 6.25, "asm"))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", f"{broken}:{good}")
    # also where another table has the row
    assert "good.csv has 6.2 µs by asm" in (_said() or "") and "broken.csv is no table" in (_said() or "")
    problem = "broken.csv is no table of 16-bit matrix products: no column cu_num, M, N, K, dtype"
    assert (_said(100) or "").endswith(f"; {problem}")


# attention


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """aiter's two functions as their documentation describes them, in float64; what they were given."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def attend(call: FlashAttentionCall, window: tuple[int, int, int], causal: bool, dtype: torch.dtype) -> Any:
        # a newer version reads three numbers, an older one two
        left, right, always_seen = window
        assert always_seen == 0 and dtype in (torch.float16, torch.bfloat16)
        wide = {one: x.double() for one, x in call._asdict().items() if isinstance(x, Tensor) and x.dtype == dtype}
        call = call._replace(**wide, causal=causal, window=(left, right), return_lse=True)
        out, lse = registry.get("flash_attention").reference(call)
        return out.to(dtype), lse.float()

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int, int] = (-1, -1, 0), bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, deterministic: bool = True, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert q.ndim == 4 and dropout_p == 0.0 and (bias is None or bias.shape == (q.shape[1], k.shape[1]))
        seen.append(("dense", {"causal": causal, "window_size": window_size}))
        call = FlashAttentionCall(q, k, v, softmax_scale=softmax_scale, bias=bias, alibi_slopes=alibi_slopes)
        out, lse = attend(call, window_size, causal, q.dtype)
        return (out, lse) if return_lse else out

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, logits_soft_cap: float = 0.0,
        causal: bool = False, window_size: tuple[int, int, int] = (-1, -1, 0), bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, deterministic: bool = False, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert q.ndim == 3 and bias is None and not return_lse
        seen.append(("packed", {"causal": causal, "window_size": window_size}))
        call = FlashAttentionCall(
            q, k, v, "thd", softmax_scale=softmax_scale, softcap=logits_soft_cap, alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
        # an older version's result
        return (attend(call, window_size, causal, q.dtype)[0],)

    package = ModuleType("aiter")
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", package)
    yield seen


def _attention(layout: str = "bshd", dtype: torch.dtype = torch.bfloat16, **options: Any) -> FlashAttentionCall:
    return FlashAttentionCall(*tensors(2, 12, 20, 4, 2, dtype=dtype, layout=layout), layout, **options)


def _packed_attention(**options: Any) -> FlashAttentionCall:
    (q, k, v), starts = packed([5, 12], [20, 12], 4, 2, 16, torch.float16, "cpu")
    return FlashAttentionCall(q, k, v, **starts, **options)


# name -> the function, what its mask is said by, the call
ATTENTION = {
    "plain": ("dense", False, (-1, -1, 0), _attention),
    "heads before tokens": ("dense", True, (-1, -1, 0), lambda: _attention("bhsd", causal=True)),
    "window": ("dense", False, (3, 2, 0), lambda: _attention(window=(3, 2))),
    "causal window": ("dense", True, (3, 0, 0), lambda: _attention(causal=True, window=(3, -1))),
    "wide window": ("dense", False, (-1, -1, 0), lambda: _attention(window=(1 << 40, 19))),
    "wide on the left": ("dense", False, (-1, 4, 0), lambda: _attention(window=(19, 4))),
    "scale": ("dense", False, (-1, -1, 0), lambda: _attention(dtype=torch.float16, softmax_scale=0.7)),
    "bias": ("dense", False, (-1, -1, 0), lambda: _attention(bias=_random(1, 12, 20))),
    "slopes": ("dense", True, (-1, -1, 0), lambda: _attention(alibi_slopes=torch.rand(4), causal=True)),
    "logarithms": ("dense", True, (-1, -1, 0), lambda: _attention("bhsd", causal=True, return_lse=True)),
    "packed": ("packed", True, (-1, -1, 0), lambda: _packed_attention(causal=True)),
    "packed window cap": ("packed", False, (4, 3, 0), lambda: _packed_attention(window=(4, 3), softcap=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_gets_what_it_takes(name: str, gpu: None, attention: list[Any]) -> None:
    function, causal, window, make = ATTENTION[name]
    call = make()
    assert aiter._attention_refuse(call) is None
    assert aiter._attention_opt_in(call) == "runs where a measured row names it"
    got, want = aiter._attention(call), registry.get("flash_attention").reference(call)
    assert attention == [(function, {"causal": causal, "window_size": window})]
    if call.return_lse:
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
        assert got[1].is_contiguous()
        got, want = got[0], want[0]
    assert got.dtype == want.dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


def test_attention_without_it_says_so() -> None:
    decision = registry.get("flash_attention").decide(_attention())
    (reason,) = [refusal.reason for refusal in decision.refused if refusal.backend == "aiter"]
    assert "no ROCm build" in reason or "not installed" in reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _attention(dtype=torch.float32), "not float32"),
        (lambda: _attention(sinks=torch.zeros(4)), "sinks"),
        (lambda: _attention(softcap=3.0), "packed sequences alone"),
        (lambda: _attention(window=(-1, 0))._replace(k=_random(2, 5, 2, 16), v=_random(2, 5, 2, 16)), "without keys"),
        (lambda: _attention()._replace(q=_random(2, 0, 4, 16)), "without queries"),
        (lambda: _packed_attention(return_lse=True), "logarithms"),
        (lambda: _attention(bias=torch.zeros(12, 20)), "bias of q's dtype"),
        (lambda: _attention(bias=_random(12, 20), alibi_slopes=torch.rand(4)), "without slopes"),
        (lambda: _packed_attention(bias=_random(12, 20, dtype=torch.float16)), "not packed"),
        (lambda: _attention(bias=_random(4, 12, 20)), "one bias"),
        (lambda: _attention(bias=_random(2, 1, 1, 20)), "one bias"),
        (lambda: _attention()._replace(q=_random(2, 12, 4, 16).requires_grad_()), "without gradients"),
    ],
    ids=[
        "float32", "sinks", "softcap", "blind", "no-queries", "packed-lse", "bias-dtype", "bias-slopes", "packed-bias",
        "bias-heads", "bias-keys", "grad",
    ],
)  # fmt: skip
def test_what_attention_refuses(gpu: None, make: Any, reason: str) -> None:
    refused = aiter._attention_refuse(make())
    assert refused is not None and reason in refused

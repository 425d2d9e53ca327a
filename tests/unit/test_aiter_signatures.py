"""The calls of the backends aiter and flydsl fit the signatures of versions of aiter, and are the ones on record."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import aiter_signatures as signatures
from tests.unit.test_backends_aiter import ATTENTION, CASES, _random
from wavecrest import hardware
from wavecrest.backends import aiter, flydsl
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall

Calls = dict[str, list[tuple[int, tuple[str, ...]]]]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """aiter with functions that bind what they are given to every version's signature, and return zeros."""
    seen: Calls = {}

    def spy(name: str) -> Any:
        known = [signatures.signature(text) for rows in signatures.SNAPSHOTS.values()
                 for (_, function), text in rows.items() if function == name]  # fmt: skip

        def called(*given: Any, **named: Any) -> Any:
            for one in known:
                one.bind(*given, **named)
            seen.setdefault(name, []).append((len(given), tuple(sorted(named))))
            if name.startswith("flash"):
                out = torch.zeros_like(given[0])
                lse = torch.zeros(given[0].shape[:-1], dtype=torch.float32)
                return (out, lse) if named["return_lse"] else out
            dtype = named.get("otype") or named.get("dtype") or given[0].dtype
            return torch.zeros(given[0].shape[0], given[1].shape[0], dtype=dtype)

        return called

    for module, names in (
        ("aiter", [name for name in signatures.CALLS if name not in ("gemm_a16w16", "flydsl_hgemm")]),
        ("aiter.tuned_gemm", ["gemm_a16w16"]),
        ("aiter.ops", []),
        ("aiter.ops.flydsl", ["flydsl_hgemm"]),
    ):
        made = ModuleType(module)
        for name in names:
            setattr(made, name, spy(name))
        monkeypatch.setitem(sys.modules, module, made)
    return seen


def test_every_call_fits_every_version_and_is_on_record(spied: Calls) -> None:
    for _, make in CASES.values():
        aiter.run_gemm(make())
    for *_, attend in ATTENTION.values():
        aiter._attention(attend())
    for bias in (None, _random(128)):
        flydsl.run(GemmCall(_random(5, 128), _random(128, 128).mT, bias))
    assert spied.keys() == signatures.CALLS.keys()
    for name, calls in spied.items():
        named = {one for _, names in calls for one in names}
        assert ({count for count, _ in calls}, named) == (
            {signatures.CALLS[name][0]},
            set(signatures.CALLS[name][1]),
        ), name


def test_a_call_that_does_not_fit_is_said() -> None:
    assert signatures.misfit("A B bias? otype?", "gemm_a16w16") == ""
    assert "missing a required argument" in signatures.misfit("A B scale bias? otype?", "gemm_a16w16")
    assert "unexpected keyword" in signatures.misfit("A B bias? out_dtype?", "gemm_a16w16")
    assert "too many positional" in signatures.misfit("A * B? bias? otype?", "gemm_a16w16")
    source = "def other(a): ...\ndef f(a, b: int, c=1, *, d, e=2): ...\n"
    assert signatures.described(source, "f") == "a b c? * d e?" and signatures.described(source, "g") is None
    line = signatures.signature("a b? * c d?")
    assert [one.kind for one in line.parameters.values()][2:] == [inspect.Parameter.KEYWORD_ONLY] * 2


def test_a_checkout_is_read_without_importing_it(tmp_path: Path) -> None:
    newest = next(iter(signatures.SNAPSHOTS.values()))
    for (file, name), text in newest.items():
        words = ", ".join(word.replace("?", "=None") for word in text.split())
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "raise ImportError\n") + f"def {name}({words}): ...\n")
    lines, fits = signatures.report(tmp_path)
    assert fits and all(line.endswith("is as it was read") for line in lines) and len(lines) == 7
    tuned, flat = tmp_path / signatures.TUNED, tmp_path / signatures.FLYDSL
    tuned.write_text("def gemm_a16w16(A, B, bias=None, otype=None): ...")
    flat.unlink()
    lines, fits = signatures.report(tmp_path)
    assert fits and "has other parameters, which fit" in lines[0] and lines[-1].endswith("is not there")
    tuned.write_text("def gemm_a16w16(A, B, bias=None): ...")
    assert not signatures.report(tmp_path)[1]


@pytest.mark.skipif("AITER_CHECKOUT" not in os.environ, reason="AITER_CHECKOUT names no clone of ROCm/aiter")
def test_a_real_checkout_fits() -> None:
    lines, fits = signatures.report(Path(os.environ["AITER_CHECKOUT"]))
    assert fits, "\n".join(lines)


# flydsl -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flydsl, "_unavailable", lambda: None)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.cpu(), arch="gfx942"))


FLYDSL = {
    "plain": {},
    "bias": {"bias": _random(128)},
    "bias of another dtype": {"bias": torch.randn(128), "activation": "silu"},
    "gated": {"activation": "silu_and_mul"},
}


@pytest.mark.parametrize("name", FLYDSL)
def test_flydsl_gets_what_it_takes(name: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def flydsl_hgemm(a: Tensor, b: Tensor, out: Any = None, *, bias: Tensor | None = None, **tile: Any) -> Tensor:
        assert b.is_contiguous() and (bias is None or bias.dtype == a.dtype)
        seen.append(tile | {"bias": bias is not None})
        y = a.double() @ b.double().mT
        return (y if bias is None else y + bias).to(a.dtype)

    module = ModuleType("aiter.ops.flydsl")
    module.flydsl_hgemm = flydsl_hgemm  # type: ignore[attr-defined]
    for parent in ("aiter", "aiter.ops"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, "aiter.ops.flydsl", module)
    call = GemmCall(_random(2, 9, 192), _random(128, 192).mT, **FLYDSL[name])
    assert flydsl._refuse(call) is None and "measured row" in flydsl._opt_in(call)
    got, want = flydsl.run(call), gemm.reference(call)
    assert (got.double() - want.double()).abs().max() <= 2e-2 * want.double().abs().max() and got.dtype == want.dtype
    assert seen[0]["bias"] == (name == "bias") and seen[0]["split_k"] == 1 and seen[0]["tile_m"] == 64


def test_every_tile_keeps_to_the_rules_of_its_source() -> None:
    """Waves of 16 × 16 instructions, whole vectors of 8 a lane of 64, and LDS of gfx942 for two stages."""
    for tile in (*(one for _, one in flydsl.TILES), flydsl.LARGE, flydsl.WHOLE_TILE):
        assert tile.m % (16 * tile.m_warps) == tile.n % (16 * tile.n_warps) == tile.k % 32 == 0, tile
        vectors = 8 * 64 * tile.m_warps * tile.n_warps
        for size in (tile.m * tile.k, tile.n * tile.k, tile.m * tile.n):
            assert size % vectors == 0, tile
        lds = hardware.ARCHS[flydsl.WHOLE_ARCH if tile == flydsl.WHOLE_TILE else "gfx942"].lds_kib * 1024
        assert max(2 * (tile.m + tile.n) * tile.k * 2, tile.m * tile.n * 2) <= lds, tile


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GemmCall(_random(5, 96), _random(128, 96).mT), "128 of K"),
        (lambda: GemmCall(_random(5, 128), _random(96, 128).mT), "64 columns"),
        (lambda: GemmCall(_random(300, 128), _random(192, 128).mT), "128 columns"),
        (lambda: GemmCall(_random(5, 128), _random(128, 128)), "contiguous along K"),
        (lambda: GemmCall(torch.randn(5, 128), torch.randn(128, 128).mT), "not float32"),
        (lambda: GemmCall(_random(0, 128), _random(128, 128).mT), "multiples of"),
        (lambda: GemmCall(_random(5, 128).requires_grad_(), _random(128, 128).mT), "without gradients"),
    ],
    ids=["K", "N", "large-N", "order", "float32", "empty", "grad"],
)
def test_what_flydsl_refuses(make: Any, reason: str, gpu: None) -> None:
    assert reason in str(flydsl._refuse(make()))


def test_large_gemms_have_one_tile(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    call = GemmCall(empty, empty.mT)
    assert "does not fit into the LDS of gfx942" in str(flydsl._refuse(call))
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.cpu(), arch="gfx950"))
    assert flydsl._refuse(call) is None and flydsl.tile_of(4096, 4096, 4096) == flydsl.WHOLE_TILE
    # 2,049 rows are of the same bucket, and get the same answer
    assert flydsl._refuse(call._replace(a=empty[:2049])) is None


def test_where_flydsl_is_not(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = GemmCall(_random(5, 128), _random(128, 128).mT)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "does not trace" in str(flydsl._refuse(call))
    monkeypatch.setattr(hardware, "detect", lambda: replace(hardware.cpu(), arch="gfx1201"))
    assert "not for gfx1201" in str(flydsl._refuse(call))
    flydsl._missing.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flydsl" else object())
    assert flydsl._missing() == "needs the packages aiter and flydsl; flydsl not installed"
    flydsl._missing.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    assert "no ROCm build" in str(flydsl._missing())
    flydsl._missing.cache_clear()

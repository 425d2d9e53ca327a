"""mla_prefill: absorbed and decompressed are one function, against float64, and the one with fewer FLOPs is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.mla_harness import BF16, CONFIGS, F16, F32, NAN, Exact, assert_right, case, config, exact, run
from tests.ops.op_harness import assert_few_calls, same_bits
from wavecrest import hardware, ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._mla_prefill import launch as launches
from wavecrest.ops._mla_prefill.backend import op
from wavecrest.ops._mla_prefill.call import MlaPrefillCall

OP = "mla_prefill"
BACKENDS = ("triton", "decompressed", "torch", "reference")
SIZES: dict[str, Any] = {"nope": 16, "values": 24, "heads": 3}

CASES: dict[str, dict[str, Any]] = {
    "prompt": {"lens": [20], "tokens": 20, "capacity": 20},
    "chunk": {"lens": [60, 35], "tokens": 18, "return_lse": True},
    "longer than the sequence": {"lens": [5, 0, 30], "tokens": 11, "return_lse": True},
    "one query": {"lens": [33, 7], "tokens": 1},
    "pages of 16": {"lens": [60, 17], "tokens": 19, "page": 16, "return_lse": True},
    "pages of 1": {"lens": [21, 40], "tokens": 6, "page": 1},
    "cap": {"lens": [30], "tokens": 9, "logit_cap": 0.7},
    "neox": {"lens": [30, 12], "tokens": 12, "tables": "neox"},
    "gptj positions": {"lens": [30, 12], "tokens": 5, "tables": "gptj", "places": torch.int32},
    "scale": {"lens": [30], "tokens": 5, "softmax_scale": 0.5},
    "twenty heads": {"lens": [25, 9], "tokens": 3, "heads": 20},
    "odd columns": {"lens": [25], "tokens": 9, "latent": 21, "rotary": 5, "nope": 7, "values": 3},
    "everything": {
        "lens": [60, 3], "tokens": 9, "page": 8, "logit_cap": 2.0, "tables": "gptj", "places": torch.int64,
        "return_lse": True, "batch_invariant": True,
    },
}  # fmt: skip


def prefill(*values: Any, **options: Any) -> MlaPrefillCall:
    return MlaPrefillCall(*case(*values, **options))


def named(values: dict[str, Any], device: str, **options: Any) -> MlaPrefillCall:
    return prefill(**(SIZES | values | options), device=device)


def wanted(call: MlaPrefillCall, backend: str) -> Exact:
    """Keys and values that are rounded to the call's dtype, as the decompressed form's are, are further off."""
    return exact(call, rounded=backend == "decompressed")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, dtype: torch.dtype, backend: str, device: str) -> None:
    call = named(CASES[name], device, dtype=dtype)
    for one in (config(splits=1), CONFIGS["three splits"]) if backend == "triton" else (None,):
        assert_right(call, run(OP, call, one, backend), wanted(call, backend))


@pytest.mark.parametrize("name", CASES)
def test_definition(name: str, device: str) -> None:
    call = named(CASES[name], device, dtype=torch.float64)
    want = exact(call)
    for backend in ("reference", "torch"):
        got = run(OP, call, None, backend)
        y = got[0] if call.return_lse else got
        torch.testing.assert_close(y.cpu(), want.y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [0, 4])
def test_what_lies_beyond_the_keys_never_takes_part(page: int, backend: str, device: str) -> None:
    made = [
        named({"lens": [30, 0, 17], "tokens": 9}, device, page=page, beyond=one, return_lse=True) for one in (0.0, NAN)
    ]
    clean, dirty = (run(OP, one, backend=backend) for one in made)
    assert_right(made[1], dirty, wanted(made[1], backend))
    assert all(same_bits(a, b) for a, b in zip(clean, dirty, strict=True))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lens=st.lists(st.integers(0, 48), min_size=1, max_size=2),
    tokens=st.integers(1, 9),
    heads=st.sampled_from((1, 3, 5)),
    columns=st.tuples(*(st.sampled_from((2, 8, 18)) for _ in range(4))),
    page=st.sampled_from((0, 0, 1, 6, 16)),
    dtype=st.sampled_from((F32, F16, BF16)),
    tables=st.sampled_from((None, "neox", "gptj")),
    cap=st.sampled_from((0.0, 3.0)),
    lse=st.booleans(),
    how=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 100),
)
def test_any_call(
    lens: list[int], tokens: int, heads: int, columns: tuple[int, ...], page: int, dtype: torch.dtype,
    tables: str | None, cap: float, lse: bool, how: str, seed: int,
) -> None:  # fmt: skip
    """Any sizes and options, in both forms."""
    latent, rotary, nope, values = columns
    call = prefill(
        lens, heads, tokens, latent, rotary, nope, values, 48, page, dtype,
        "cuda" if torch.cuda.is_available() else "cpu", tables=tables, logit_cap=cap, return_lse=lse, seed=seed,
    )  # fmt: skip
    for backend in ("triton", "decompressed"):
        one = CONFIGS[how]
        if one is not None and one["SPLITS"] == 0:
            one = Config(**(one.kwargs | {"SPLITS": 2}))
        assert_right(call, run(OP, call, one, backend), wanted(call, backend))


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (5, 9), (9, 5), (7, 7), (170, 100000), (172, 100000)])
def test_flops(tokens: int, keys: int) -> None:
    """Counted pair by pair for small ones; from 171 queries of many keys on, DeepSeek-V3 has fewer decompressed."""
    if keys < 100:
        seen = sum(j <= i + keys - tokens for i in range(tokens) for j in range(keys))
        assert launches.pairs(tokens, keys) == seen
    absorbed, expanded = launches.flops(tokens, keys, 512, 64, 128, 128)
    if keys == 100000:
        assert (absorbed < expanded) == (tokens < 171)
    if tokens == keys:
        assert expanded <= absorbed
    one, two = launches.flops(5, 9, 8, 2, 3, 4)
    assert one == 2 * 35 * (16 + 2) + 5 * 2 * 8 * 7 and two == 2 * 35 * (3 + 2 + 4) + 9 * 2 * 8 * 7


def test_the_form_with_fewer_flops_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = {
        "prompt": (1, 16, 4096, 4096), "chunk": (1, 16, 512, 8192), "few": (1, 16, 64, 65536),
        "more": (4, 128, 512, 65536),
    }  # fmt: skip
    calls = {name: op.study.inputs(*sizes, BF16, "meta") for name, sizes in makes.items()}
    # to the dispatcher these are on a GPU
    monkeypatch.setattr(Tensor, "device", property(lambda _self: torch.device("cuda")))
    decided = {name: op.decide(call) for name, call in calls.items()}
    backends = {name: decision.backend for name, decision in decided.items()}
    assert backends == {"prompt": "decompressed", "chunk": "decompressed", "few": "triton", "more": "triton"}
    reasons = {name: {one.backend: one.reason for one in decided[name].refused} for name in ("few", "more")}
    assert "fewer FLOPs absorbed" in reasons["few"]["decompressed"]
    assert "more than 4 GiB" in reasons["more"]["decompressed"]


def test_on_the_cpu_it_is_pytorchs(device: str) -> None:
    if device == "cuda":
        pytest.skip("on a CPU alone")
    decision = op.decide(named(CASES["chunk"], device))
    assert decision.backend == "torch"
    assert {one.backend for one in decision.refused} == {"triton", "triton_hopper", "decompressed"}


def test_the_same_bits_in_any_batch(device: str) -> None:
    call = named(CASES["chunk"], device, dtype=BF16, batch_invariant=True, tables="neox")
    op.force("triton")
    whole = op(call)
    for b in range(2):
        alone = call._replace(
            q_nope=call.q_nope[b : b + 1], q_rope=call.q_rope[b : b + 1], seq_lens=call.seq_lens[b : b + 1],
            latent_cache=call.latent_cache[b : b + 1],
        )  # fmt: skip
        assert all(same_bits(x, y[b : b + 1]) for x, y in zip(op(alone), whole, strict=True))
    assert all(same_bits(x, y) for x, y in zip(op(call), whole, strict=True))


@pytest.mark.parametrize("arch", list(ARCHS))
def test_invariant_calls_are_not_split(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.ops.common.target.arch", lambda: ARCHS[arch])
    space = op.study.kernel("triton").space
    assert space is not None
    for tokens in (17, 4096):
        call = op.study.inputs(1, 16, tokens, 8192, BF16, "meta")._replace(batch_invariant=True)
        tried = list(space(op.key(call), ARCHS[arch]))
        assert tried[0] == op.config_of("triton", op.key(call)) and len(set(tried)) == len(tried)
        assert all(one["SPLITS"] == 1 for one in tried)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no w_uk": ("w_uk must be given", {"w_uk": None}),
    "no w_uv": ("w_uv must be given", {"w_uv": None}),
    "no queries": ("takes 1 to 536870912 queries", {"q_nope": torch.zeros(1, 0, 3, 16)}),
    "heads": (r"must have one \[B, T, H\]", {"q_nope": torch.zeros(1, 5, 2, 16)}),
    "w_uk shape": (r"w_uk must be \[3, 16, 32\]", {"w_uk": torch.zeros(3, 17, 32)}),
    "lens": ("seq_lens must be int32", {"seq_lens": torch.zeros(2, dtype=torch.int32)}),
    "style": ("rope_style is neox or gptj", {"rope_style": "x"}),
    "cap": ("logit_cap must be", {"logit_cap": -1.0}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    message, change = BAD[name]
    options = named({"lens": [30], "tokens": 5}, "cpu")._replace(**change)._asdict()
    arguments = [options.pop(key) for key in ("q_nope", "q_rope", "latent_cache")]
    with pytest.raises(InvalidArgument, match=f"^mla_prefill: .*{message}"):
        ops.mla_prefill(*arguments, **options)


def test_what_is_refused(device: str) -> None:
    call = named({"lens": [20], "tokens": 5, "beyond": 0.0}, device)
    with pytest.raises(Unsupported, match="no backward"):
        run(OP, call._replace(q_nope=call.q_nope.clone().requires_grad_()))
    with pytest.raises(Unsupported, match="256 columns at most"):
        run(OP, named({"lens": [20], "tokens": 5, "values": 257}, device), backend="decompressed")


def test_gradients(device: str) -> None:
    call = named({"lens": [20, 7], "tokens": 5, "beyond": 0.0}, device)
    names = ("q_nope", "q_rope", "latent_cache", "w_uk", "w_uv")
    grads = []
    for dtype, backend in ((F32, "torch"), (F32, "decompressed"), (torch.float64, "reference")):
        leaves = {name: getattr(call, name).to(dtype).clone().requires_grad_() for name in names}
        op.run(backend, call._replace(**leaves)).square().sum().backward()
        grads.append([leaves[name].grad for name in names])
    for mine, other, want in zip(*grads, strict=True):
        assert float(want.abs().max()) > 0
        torch.testing.assert_close(mine.double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other.double(), want, rtol=1e-4, atol=1e-4)


def test_cost() -> None:
    """The lesser of both forms."""
    cost = op.study.cost
    few, many = ([30], 5), ([30], 30)
    for lens, tokens in (few, many):
        call = named({"lens": lens, "tokens": tokens, "capacity": 30}, "cpu")
        absorbed, expanded = launches.flops(tokens, 30, 32, 16, 16, 24)
        assert cost(call).flops == 3 * min(absorbed, expanded)
        assert cost(call).bytes == 4 * (30 * 48 + tokens * 3 * (16 + 16 + 24) + 3 * 40 * 32)


def test_the_cases_of_tools_are_calls(device: str) -> None:
    study = op.study
    assert study.bench_cases is not None and study.emulate_cases is not None
    for make in study.bench_cases("shared", "meta").values():
        op.check(make())
    quick = study.bench_cases("quick", device)
    assert len(quick) == 1
    for make in (*quick.values(), *study.emulate_cases("gfx942").values()):
        call = make()
        assert_right(call, op(call), wanted(call, "decompressed"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["chunk", "everything"])
def test_a_bound_call_is_short(name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = named(CASES[name], device, beyond=0.0)._asdict()
    tensors = [options.pop(field) for field in ("q_nope", "q_rope", "latent_cache")]
    assert_few_calls(OP, backend, monkeypatch, *tensors, **options)


@pytest.mark.parametrize("backend", ["torch", "decompressed"])
def test_compile_fullgraph(backend: str, device: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager" if device == "cpu" else "inductor")
    call = named(CASES["everything"], device, beyond=0.0)
    op.force(backend)
    options = call._asdict()
    moving = [options.pop(key) for key in ("q_nope", "q_rope", "latent_cache", "seq_lens")]

    def attend(q: Tensor, q_rope: Tensor, cache: Tensor, lens: Tensor) -> Any:
        return ops.mla_prefill(q, q_rope, cache, seq_lens=lens, **options)

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    with torch.no_grad():
        for less in (0, 2):
            lens = (call.seq_lens - less).clamp(min=0)
            again = call._replace(seq_lens=lens)
            assert_right(again, compiled(*moving[:3], lens), wanted(again, backend))
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "decompressed"])
def test_large_on_a_gpu(backend: str) -> None:
    call = prefill(
        [700, 130], 16, 130, 512, 64, 128, 128, 768, 64, BF16, "cuda", tables="neox", return_lse=True
    )  # fmt: skip
    assert_right(call, run(OP, call, None, backend), wanted(call, backend))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "values",
    [
        {"lens": [300], "tokens": 300, "capacity": 300},
        {"lens": [400, 129], "tokens": 100, "capacity": 400, "return_lse": True},
        {"lens": [5, 0, 90], "tokens": 40, "capacity": 96, "return_lse": True},
        {"lens": [200, 64], "tokens": 33, "capacity": 256, "page": 64, "heads": 20},
        {"lens": [1500], "tokens": 20, "capacity": 1536, "batch_invariant": True},
    ],
    ids=["prompt", "chunk", "longer than the sequence", "pages of 64", "no batch"],
)
def test_hopper(values: dict[str, Any]) -> None:
    """sm_90's kernel, of any number of queries."""
    if hardware.detect().arch != "sm_90":
        pytest.skip(f"is for sm_90; this is {hardware.detect().arch}")
    call = named(values, "cuda", dtype=BF16, latent=512, rotary=64)
    assert_right(call, op.run("triton_hopper", call))

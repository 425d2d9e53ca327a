from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.gemm_harness import Watch, watched
from tests.ops.op_harness import BACKENDS, DTYPES, assert_call_never_copies, name, specialised
from wavecrest import ops
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._topk_routing.backend import op as routing_op
from wavecrest.ops._topk_routing.call import TopkRoutingCall
from wavecrest.ops._topk_routing.kernel import _topk_routing_kernel
from wavecrest.ops.common.interpreted import takes_scalar_masks
from wavecrest.ops.common.triton import interpreted

INF, NAN = math.inf, math.nan
DEEPSEEK: dict[str, Any] = {"scores": "sigmoid", "scale": 2.5, "num_groups": 8, "topk_groups": 4}


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Kernels touch their arguments alone, and memory that they do not write holds no luck."""
    if interpreted:
        # asked once a process, by a kernel of its own
        takes_scalar_masks()
    made = watched(monkeypatch)
    made.outputs += ("weights_ptr", "ids_ptr")
    return made


def a_call(
    tokens: int, experts: int, k: int, dtype: torch.dtype = torch.float32, device: str = "cpu", *, biased: bool = False,
    **options: Any,
) -> TopkRoutingCall:  # fmt: skip
    generator = torch.Generator().manual_seed(tokens + 31 * experts)
    logits = torch.randn(tokens, experts, generator=generator)
    if biased:
        # large enough to change what is chosen
        options["bias"] = 0.5 * torch.randn(experts, generator=generator).to(device)
    return TopkRoutingCall(logits.to(device, dtype), k, **options)


def oracle(call: TopkRoutingCall) -> tuple[Tensor, list[list[int]]]:
    """Token by token in plain Python over float64."""
    weights, every = [], []
    bias = [0.0] * call.experts if call.bias is None else call.bias.double().tolist()
    for row in call.logits.double().tolist():
        scores = [1 / (1 + math.exp(-one)) for one in row]
        if call.scores == "softmax":
            exps = [math.exp(one - max(row)) for one in row]
            scores = [one / sum(exps) for one in exps]
        choice = [score + more for score, more in zip(scores, bias, strict=True)]
        size = call.experts // call.num_groups
        sums = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(call.num_groups)]
        groups = sorted(range(call.num_groups), key=lambda g: (-sums[g], g))[: call.topk_groups]
        allowed = [e for e in range(call.experts) if e // size in groups]
        ids = sorted(allowed, key=lambda e: (-choice[e], e))[: call.k]
        own = [scores[e] for e in ids]
        total = sum(own) + 1e-20 if call.renormalize else 1.0
        weights.append([call.scale * one / total for one in own])
        every.append(ids)
    return torch.tensor(weights, dtype=torch.float64).view(call.num_tokens, call.k), every


def assert_right(call: TopkRoutingCall, backend: str, config: Config | None = None) -> None:
    weights, ids = routing_op.run(backend, call, config=config)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert weights.is_contiguous() and ids.is_contiguous()
    wanted, every = oracle(call)
    assert ids.tolist() == every
    torch.testing.assert_close(weights.double().cpu(), wanted, rtol=2e-6, atol=1e-9)


CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one": (1, 1, 1, {}),
    "mixtral": (7, 8, 2, {}),
    "qwen3 plain": (5, 128, 8, {"renormalize": False}),
    "odd": (9, 37, 5, {"scores": "sigmoid", "scale": 0.5}),
    "all": (3, 6, 6, {}),
    "bias": (6, 20, 3, {"biased": True}),
    "deepseek": (6, 64, 8, DEEPSEEK | {"biased": True}),
    "groups of one": (5, 8, 2, {"num_groups": 8, "topk_groups": 3}),
    "one group of two": (5, 8, 4, {"num_groups": 2, "topk_groups": 1}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values(backend: str, case: str, dtype: torch.dtype, device: str) -> None:
    tokens, experts, k, options = CASES[case]
    assert_right(a_call(tokens, experts, k, dtype, device, **options), backend)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_tokens_of_a_program(rows: int, device: str) -> None:
    config = Config(BLOCK_T=rows, num_warps=4)
    for case in ("odd", "deepseek"):
        tokens, experts, k, options = CASES[case]
        assert_right(a_call(tokens, experts, k, torch.float32, device, **options), "triton", config)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend: str, device: str) -> None:
    call = a_call(6, 20, 3, torch.float32, device, biased=True)
    room = torch.full((13, 41), NAN, device=device)
    logits = room[1::2, 1::2].copy_(call.logits)
    assert call.bias is not None
    bias = torch.full((41,), NAN, device=device)[1::2].copy_(call.bias)
    assert_right(call._replace(logits=logits, bias=bias), backend)
    assert_right(call._replace(logits=call.logits.mT.contiguous().mT, bias=call.bias.half()), backend)


def test_inputs_are_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call(6, 20, 3, torch.float32, device, biased=True)
    assert_call_never_copies(routing_op, monkeypatch, call._replace(logits=call.logits.mT.contiguous().mT))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"scores": "sigmoid"}, {"num_groups": 4, "topk_groups": 2}], ids=str)
def test_equal_scores_go_to_the_lower_number(backend: str, options: dict[str, Any], device: str) -> None:
    logits = torch.zeros(3, 16, device=device)
    logits[1, 5] = logits[1, 9] = 1.0
    logits[2] = -INF
    logits[2, 15] = 0.0
    call = TopkRoutingCall(logits, 4, **options)
    weights, ids = routing_op.run(backend, call)
    grouped = bool(options.get("num_groups"))
    assert ids.tolist()[0] == [0, 1, 2, 3]
    assert ids.tolist()[1] == ([5, 9, 4, 6] if grouped else [5, 9, 0, 1])
    assert ids.tolist()[2] == ([15, 0, 1, 2])
    if not options:
        assert weights[2].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"scores": "sigmoid"}, {"scores": "sigmoid", "num_groups": 4}], ids=str)
def test_nan_is_chosen_first_and_stays_with_its_token(backend: str, options: dict[str, Any], device: str) -> None:
    call = a_call(3, 16, 2, torch.float32, device, **options)
    logits = call.logits.clone()
    logits[1, 9] = NAN
    clean, (weights, ids) = routing_op.run(backend, call), routing_op.run(backend, call._replace(logits=logits))
    # of a softmax all scores are NaN
    assert ids[1, 0] == 9 and weights[1].isnan().all()
    kept = [0, 2]
    assert torch.equal(ids[kept], clean[1][kept]) and torch.equal(weights[kept], clean[0][kept])
    assert len(set(ids[1].tolist())) == 2 and bool((ids >= 0).all()) and bool((ids < 16).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_can_be_closed_by_its_bias(backend: str, device: str) -> None:
    call = a_call(5, 7, 3, torch.float32, device)
    bias = torch.zeros(7, device=device)
    bias[:4] = -INF
    weights, ids = routing_op.run(backend, call._replace(bias=bias))
    assert all(sorted(row) == [4, 5, 6] for row in ids.tolist()) and weights.isfinite().all()
    # more than are open: closed ones last, each once
    _, ids = routing_op.run(backend, call._replace(bias=bias, k=5))
    assert all(sorted(row[:3]) == [4, 5, 6] and row[3:] == [0, 1] for row in ids.tolist())


def test_transformers_routers_choose_the_same(device: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_experts_per_tok": 4}
    deepseek = transformers.DeepseekV3Config(
        **sizes, n_routed_experts=32, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True
    )
    groups = {"scores": "sigmoid", "scale": 2.5, "num_groups": 4, "topk_groups": 2}
    routers: list[tuple[Any, dict[str, Any]]] = [
        (MixtralTopKRouter(transformers.MixtralConfig(**sizes, num_local_experts=16)), {}),
        (
            Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**sizes, num_experts=16, norm_topk_prob=False)),
            {"renormalize": False},
        ),
        (GptOssTopKRouter(transformers.GptOssConfig(**sizes, num_local_experts=16)), {}),
        (DeepseekV3TopkRouter(deepseek), groups),
    ]
    for router, options in routers:
        router.to(device)
        for tensor in router.state_dict().values():
            tensor.normal_(std=0.3)
        if "num_groups" in options:
            options = options | {"bias": router.e_score_correction_bias}
        with torch.no_grad():
            logits, weights, ids = router(torch.randn(11, 32, device=device))
            for backend in BACKENDS:
                got_weights, got_ids = routing_op.run(backend, TopkRoutingCall(logits, 4, **options))
                # DeepSeek's are in no order
                order, got_order = ids.argsort(-1), got_ids.argsort(-1)
                assert torch.equal(ids.gather(1, order), got_ids.gather(1, got_order).long()), type(router).__name__
                torch.testing.assert_close(got_weights.gather(1, got_order), weights.gather(1, order))


def test_routing_feeds_moe(device: str) -> None:
    x, w1, w2 = torch.randn(6, 16), torch.randn(4, 16, 16) / 4, torch.randn(4, 16, 8) / 3
    weights, ids = ops.topk_routing(x @ torch.randn(16, 4), 2)
    assert ops.moe(x, w1, w2, weights, ids).shape == (6, 16)


def test_gradients_of_weights(device: str) -> None:
    call = a_call(4, 12, 3, torch.float64, device, biased=True)
    logits = call.logits.requires_grad_()
    weights, ids = ops.topk_routing(logits, 3, call.bias)
    (got,) = torch.autograd.grad(weights.square().sum(), logits)
    own = logits.softmax(-1).gather(1, ids.long())
    (want,) = torch.autograd.grad((own / own.sum(-1, keepdim=True)).square().sum(), logits)
    torch.testing.assert_close(got, want)
    assert weights.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.randn(2, 3, 8)}, "logits must be float32"),
        ({"logits": torch.randn(2, 0)}, "with an expert"),
        ({"k": 0}, "k must be a whole number of at least 1, got 0"),
        ({"k": 9}, "k is 9, and 1 of 1 groups of 8 experts have 8"),
        ({"num_groups": 4, "k": 3}, "k is 3, and 1 of 4 groups of 8 experts have 2"),
        ({"num_groups": 3}, "8 experts must be a multiple of num_groups .3."),
        ({"num_groups": 2, "topk_groups": 3}, "topk_groups .3. at most these"),
        ({"bias": torch.zeros(7)}, "bias must be floating-point .8."),
        ({"scores": "relu"}, "scores are softmax or sigmoid, not 'relu'"),
        ({"renormalize": 1}, "renormalize must be True or False"),
        ({"scale": NAN}, "scale must be a finite number"),
    ],
    # not the values: processes that share tests must name them alike
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_wrong_calls_are_clear_errors(change: dict[str, Any], message: str) -> None:
    call = a_call(2, 8, 2)._replace(**change)
    with pytest.raises(InvalidArgument, match=f"^topk_routing: .*{message}"):
        ops.topk_routing(*call)


def test_what_the_kernel_refuses(device: str) -> None:
    for call, reason in (
        (
            a_call(2, 12, 2, torch.float32, device, num_groups=3),
            "both numbers are powers of two",
        ),
        (a_call(1, 4097, 2, torch.float32, device), "up to 4096 experts"),
        (a_call(2, 8, 2, torch.float64, device), "not float64"),
    ):
        with pytest.raises(Unsupported, match=reason):
            routing_op.run("triton", call)


def test_sizes_that_change_in_serving_compile_nothing_anew() -> None:
    assert all(one.endswith("_ptr") for one in specialised(_topk_routing_kernel)), specialised(_topk_routing_kernel)


def test_the_search_starts_with_the_default_and_repeats_none() -> None:
    space = routing_op.study.kernel("triton").space
    assert space is not None
    for tokens, experts in ((1, 8), (0, 128), (4096, 256), (64, 4000)):
        key = (tokens, *routing_op.key(mapped(a_call(2, experts, 2), lambda one: one.to("meta")))[1:])
        for arch in ("gfx942", "sm_90"):
            found = list(space(key, ARCHS[arch]))
            assert len(found) == len(set(found)) > (1 if experts > 8 else 0)

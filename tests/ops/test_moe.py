from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.gemm_harness import Watch, watched
from tests.ops.op_harness import (
    BACKENDS,
    DTYPES,
    assert_call_never_copies,
    name,
    specialised,
)
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import ARCHS
from wavecrest.measure import numerics
from wavecrest.ops._moe import config as configs
from wavecrest.ops._moe import launch as launches
from wavecrest.ops._moe.backend import op as moe_op
from wavecrest.ops._moe.call import MoeCall
from wavecrest.ops._moe.kernel import _moe_combine_kernel, _moe_down_kernel, _moe_gate_up_kernel
from wavecrest.ops._moe.study import cases
from wavecrest.ops.common.interpreted import takes_scalar_masks
from wavecrest.ops.common.triton import interpreted
from wavecrest.ops.packed import pack

INF, NAN = math.inf, math.nan
SMALL = Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, DOWN_N=16, DOWN_K=16, GROUP_M=2, DIRECT=0, num_warps=4, num_stages=2)
GPT_OSS: dict[str, Any] = {"biased": True, "transposed": True, "interleaved": True, "activation": "swigluoai"}


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Kernels touch their arguments alone, and memory that they do not write holds no luck."""
    if interpreted:
        # asked once a process, by a kernel of its own
        takes_scalar_masks()
    made = watched(monkeypatch)
    made.outputs += ("pairs_ptr", "experts_ptr", "h_ptr", "parts_ptr", "y_ptr")
    return made


def a_call(
    tokens: int,
    experts: int,
    k: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    biased: bool = False,
    transposed: bool = False,
    **fields: Any,
) -> MoeCall:
    generator = torch.Generator().manual_seed(tokens + 31 * experts)

    def random(*shape: int) -> Tensor:
        # an offset, so that a bias or a weight that is left out shows
        return ((torch.randn(shape, generator=generator) + 0.25) * shape[-1] ** -0.5).to(device, dtype)

    w1, w2 = random(experts, 2 * intermediate, hidden), random(experts, hidden, intermediate)
    if transposed:
        w1, w2 = w1.mT.contiguous().mT, w2.mT.contiguous().mT
    # some experts get more tokens than others
    scores = torch.randn(tokens, experts, generator=generator) + torch.linspace(0, 2, experts)
    weights, ids = scores.softmax(-1).topk(k, dim=-1)
    if biased:
        fields = {"b1": random(experts, 2 * intermediate), "b2": random(experts, hidden)} | fields
    x = random(tokens, hidden) * hidden**0.5
    return MoeCall(x, w1, w2, weights.to(device), ids.to(device), **fields)


def quantized(call: MoeCall, stored: torch.dtype, by_row: bool) -> MoeCall:
    """The same call with weights in 8 bits, and scales of experts or of their rows."""

    def made(weight: Tensor) -> tuple[Tensor, Tensor]:
        top = weight.float().abs().amax(-1 if by_row else (-1, -2), keepdim=True) / (
            100 if stored == torch.int8 else 200
        )
        whole = weight.float() / top
        # the strides of the weight
        held = torch.empty_like(weight, dtype=stored).copy_(whole.round() if stored == torch.int8 else whole)
        return held, top.squeeze(-1) if by_row else top.flatten()

    (w1, w1_scale), (w2, w2_scale) = made(call.w1), made(call.w2)
    return call._replace(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)


def by_columns(call: MoeCall, form: str) -> MoeCall:
    """The same call with scales of 128 × 128 ("block") or, in 4 bits, as "int4-GROUP[-zeros]" or "mxfp4"."""
    zeros: list[Tensor | None] = []

    def made(weight: Tensor) -> tuple[Tensor, Tensor]:
        if form == "block":
            packed = [pack(one, "fp8_block") for one in weight]
        else:
            name, group, shifted = (*form.split("-"), "", "")[:3]
            packed = [pack(one, name, group=int(group) if group else None, symmetric=not shifted) for one in weight]
        zeros.append(torch.stack([one.zero for one in packed if one.zero is not None]) if "zeros" in form else None)
        stored = torch.stack([one.stored for one in packed])
        # the strides of the weight
        stored = stored if weight.stride(-1) == 1 else stored.mT.contiguous().mT
        return stored, torch.stack([one.scale for one in packed if one.scale is not None])

    (w1, w1_scale), (w2, w2_scale) = made(call.w1), made(call.w2)
    call = call._replace(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)
    return call._replace(w1_zero=zeros[0], w2_zero=zeros[1])


def _in_float64(weight: Tensor, scale: Tensor, zero: Tensor | None, columns: int) -> Tensor:
    """Weights with scales [experts, rows or blocks, groups], element by element from where the formats say they lie."""
    weight, scale = weight.cpu(), scale.cpu()
    row, column = torch.arange(weight.shape[1])[:, None], torch.arange(columns)[None, :]
    if weight.dtype != torch.uint8:
        return weight.double() * scale.double()[:, row // 128, column // 128]
    byte = weight[:, row, column // 64 * 32 + column % 32].int()
    codes = torch.where(column % 64 < 32, byte % 16, byte // 16)
    if scale.dtype == torch.uint8:
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
        values = torch.cat([sizes, -sizes])[codes]
        return values * torch.exp2(scale.double()[:, row, column // 32] - 127)
    group = next(one for one in (128, 64, 32) if -(-columns // one) == scale.shape[2])
    middle = 8.0 if zero is None else zero.cpu().double()[:, row, column // group]
    return (codes - middle).double() * scale.double()[:, row, column // group]


def oracle(call: MoeCall) -> Tensor:
    """Pair by pair, in float64."""
    if call.w1_scale is not None and call.w2_scale is not None and call.w1_scale.ndim == 3:
        w1 = _in_float64(call.w1, call.w1_scale, call.w1_zero, call.hidden)
        w2 = _in_float64(call.w2, call.w2_scale, call.w2_zero, call.w1.shape[1] // 2)
        call = call._replace(w1=w1, w2=w2, w1_scale=None, w2_scale=None, w1_zero=None, w2_zero=None)
    if call.w1_scale is not None and call.w2_scale is not None:
        s1, s2 = (one.double().reshape(call.experts, -1, 1) for one in (call.w1_scale, call.w2_scale))
        w1, w2 = call.w1.double() * s1, call.w2.double() * s2
        call = call._replace(w1=w1, w2=w2, w1_scale=None, w2_scale=None)
    wide = mapped(call, lambda tensor: tensor.double().cpu() if tensor.is_floating_point() else tensor.cpu())
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
    }
    y = torch.zeros(wide.x.shape, dtype=torch.float64)
    for token in range(wide.num_tokens):
        for j in range(wide.k):
            e = int(wide.topk_ids[token, j])
            if not 0 <= e < wide.experts:
                continue
            both = wide.w1[e] @ wide.x[token] + (0.0 if wide.b1 is None else wide.b1[e])
            gate, up = (both[::2], both[1::2]) if wide.interleaved else both.chunk(2)
            if wide.activation == "swigluoai":
                gate, up = gate.clamp(max=wide.limit), up.clamp(-wide.limit, wide.limit)
                h = gate / (1 + torch.exp(-wide.alpha * gate)) * (up + 1)
            else:
                h = acts[wide.activation](gate) * up
            row = wide.w2[e] @ h + (0.0 if wide.b2 is None else wide.b2[e])
            y[token] += wide.topk_weights[token, j] * row
    return y


def assert_right(call: MoeCall, backend: str, config: Config | None = None) -> Tensor:
    y: Tensor = moe_op.run(backend, call, config=config)
    assert y.dtype == call.x.dtype and y.shape == call.x.shape and y.is_contiguous()
    compared = numerics.compare(y.cpu(), oracle(call))
    assert compared.within(numerics.tolerance("gemm", name(y.dtype))), compared
    return y


# tokens, experts, k, hidden, intermediate: one of each; no size a multiple of another; more experts than pairs; every
# expert chosen; blocks that end in the middle
SIZES = ((1, 1, 1, 1, 1), (7, 5, 3, 33, 18), (3, 40, 2, 64, 32), (4, 4, 4, 48, 40), (50, 3, 2, 40, 24))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values(backend: str, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str) -> None:
    assert_right(a_call(*sizes, dtype, device), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"activation": "gelu"},
        {"activation": "gelu_tanh", "biased": True},
        {"interleaved": True, "biased": True},
        {"transposed": True},
        GPT_OSS,
        GPT_OSS | {"limit": 0.2, "alpha": 1.3},
        GPT_OSS | {"limit": INF, "interleaved": False},
    ],
    ids=lambda fields: " ".join(f"{key}={value}" for key, value in fields.items()),
)
def test_options(backend: str, fields: dict[str, Any], device: str) -> None:
    call = a_call(9, 4, 2, 40, 24, torch.float32, device, **fields)
    assert_right(call, backend)
    # biases of the tokens' dtype or another
    if call.b1 is not None and call.b2 is not None:
        assert_right(call._replace(b1=call.b1.half(), b2=call.b2.half()), backend)


STORED = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("fields", [{"biased": True}, GPT_OSS], ids=["plain", "gpt_oss"])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("stored", STORED, ids=name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_in_8_bits(
    backend: str, stored: torch.dtype, by_row: bool, fields: dict[str, Any], device: str
) -> None:
    for dtype in (torch.float32, torch.float16):
        assert_right(quantized(a_call(9, 4, 2, 40, 24, dtype, device, **fields), stored, by_row), backend)


FORMS = ["block", "int4-32", "int4-32-zeros", "int4-64", "int4-128", "int4-128-zeros", "mxfp4"]


@pytest.mark.parametrize("fields", [{"biased": True}, GPT_OSS], ids=["plain", "gpt_oss"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_with_scales_along_columns(form: str, fields: dict[str, Any], device: str) -> None:
    """Columns that are no whole group, unit or block; blocks that begin inside of gate and reach into up."""
    cases = ((torch.bfloat16, 136, 70), (torch.float16, 40, 100), (torch.float32, 70, 33))
    for (dtype, hidden, intermediate), backends in zip(cases, (("triton",), BACKENDS, ("triton",)), strict=True):
        call = by_columns(a_call(5, 3, 2, hidden, intermediate, dtype, device, **fields), form)
        assert call.intermediate == intermediate
        for backend in backends:
            assert_right(call, backend)


@pytest.mark.parametrize("form", FORMS)
def test_steps_over_scales(form: str, device: str) -> None:
    """Several steps of one scale, and of several units where scales multiply values; pairs as blocks, empty experts."""
    call = by_columns(a_call(3, 6, 2, 200, 96, torch.bfloat16, device), form)
    ids = torch.tensor([[5, -1], [0, 5], [9, 2]], device=device)
    call = call._replace(topk_ids=ids)
    sizes = (64, 128) if form in ("int4-128", "int4-128-zeros", "mxfp4") else (32, 128) if form == "block" else (64,)
    for direct, k in enumerate(sizes):
        tiles = {"BLOCK_N": 64, "DOWN_N": 128, "BLOCK_K": k, "DOWN_K": k, "DIRECT": direct}
        config = Config(**(SMALL.kwargs | tiles))
        first = assert_right(call, "triton", config)
        assert torch.equal(first, moe_op.run("triton", call, config=config))


def test_steps_that_do_not_fit_scales(device: str) -> None:
    for form, k in (("block", 256), ("int4-64", 128), ("int4-64", 32), ("mxfp4", 32)):
        call = by_columns(a_call(2, 2, 2, 200, 160, torch.bfloat16, device), form)
        with pytest.raises(InvalidArgument, match=f"moe: a BLOCK_K of {k} does not fit weights of"):
            moe_op.run("triton", call, config=Config(**(SMALL.kwargs | {"BLOCK_K": k, "DOWN_K": 64})))


def test_weights_in_4_bits_of_any_strides(device: str) -> None:
    for form in ("int4-64", "int4-64-zeros", "mxfp4"):
        call = by_columns(a_call(6, 4, 2, 72, 40, torch.float32, device, biased=True), form)
        assert_right(mapped(call, _spread), "triton")
        assert_right(call._replace(w1=_spread(call.w1), w1_scale=_spread(call.w1_scale)), "triton")  # type: ignore[arg-type]


def test_a_scale_that_is_not_a_number_stays_with_its_tokens(device: str) -> None:
    call = by_columns(a_call(6, 4, 2, 72, 40, torch.bfloat16, device), "mxfp4")
    ids = torch.tensor([[0, 1], [0, 2], [1, 2], [2, 3], [1, 0], [2, 0]], device=device)
    scale = call.w2_scale.clone()  # type: ignore[union-attr]
    scale[3, 5, 1] = 255
    y = moe_op.run("triton", call._replace(topk_ids=ids, w2_scale=scale))
    assert y[3, 5].isnan() and int(y.isnan().sum()) == 1


def test_weights_in_8_bits_of_any_strides(device: str) -> None:
    call = quantized(a_call(9, 4, 2, 40, 24, torch.float32, device, biased=True), torch.int8, by_row=True)
    assert call.w1_scale is not None
    for one in (mapped(call, _spread), call._replace(w1_scale=call.w1_scale.mT.contiguous().mT)):
        assert_right(one, "triton")


def test_fnuz_weights_run_in_pytorch_where_no_kernel_takes_them(device: str) -> None:
    call = quantized(a_call(5, 3, 2, 24, 16, torch.float32, device), torch.float8_e4m3fnuz, by_row=False)
    taking = [backend for backend in BACKENDS if moe_op.backends[backend].refuse(call) is None]
    assert taking[-2:] == ["torch", "reference"]
    for backend in taking:
        assert_right(call, backend)


def _spread(tensor: Tensor) -> Tensor:
    """The same values with NaN between and around them, in no dimension contiguous."""
    room = torch.full([2 * size + 1 for size in tensor.shape], NAN if tensor.is_floating_point() else 1 << 30)
    room = room.to(tensor.device, tensor.dtype)
    view = room[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides(backend: str, interleaved: bool, device: str) -> None:
    call = a_call(6, 4, 2, 40, 24, torch.float32, device, biased=True, interleaved=interleaved)
    assert_right(mapped(call, _spread), backend)
    # each with its own strides and integers
    other = call._replace(x=call.x.mT.contiguous().mT, topk_ids=call.topk_ids.int())
    assert_right(other._replace(topk_weights=call.topk_weights.mT.contiguous().mT), backend)


def test_inputs_are_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call(6, 4, 2, 40, 24, torch.float32, device, **GPT_OSS)
    assert_call_never_copies(moe_op, monkeypatch, mapped(call, _spread))


ROUTINGS = {
    "all to one": [[2, 2]] * 20,
    "one expert twice": [[1, 1], [0, 1], [3, 3]],
    "none here": [[-1, 9]] * 3,
    "some elsewhere": [[-1, 2], [0, -7], [4, 3], [1 << 30, 1], [3, 0], [-1, 4]],
    "the last": [[3, -1]] * 17 + [[0, 3]],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("direct", [0, 1])
def test_routing(backend: str, routing: str, direct: int, device: str) -> None:
    if direct and backend != "triton":
        pytest.skip("a choice of the kernel's")
    ids = torch.tensor(ROUTINGS[routing], device=device)
    call = a_call(len(ids), 4, 2, 40, 24, torch.float32, device, biased=True)._replace(topk_ids=ids)
    config = Config(**(SMALL.kwargs | {"DIRECT": direct})) if backend == "triton" else None
    y = assert_right(call, backend, config)
    if routing == "none here":
        assert not y.any()


@pytest.mark.parametrize("block_m", [16, 64])
def test_sorts_more_pairs_than_one_step(block_m: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "SORTED_PAIRS", 16)
    call = a_call(45, 7, 3, 24, 16, torch.float32, device)
    ids = torch.where(torch.arange(45, device=device)[:, None] % 4 == 0, -1, call.topk_ids)
    assert_right(call._replace(topk_ids=ids), "triton", Config(**(SMALL.kwargs | {"BLOCK_M": block_m})))


@pytest.mark.parametrize("fields", [{}, {"transposed": True}, {"interleaved": True}], ids=str)
def test_offsets_of_64_bits_are_the_same(fields: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call(9, 4, 2, 40, 24, torch.float32, device, **fields)
    narrow = moe_op.run("triton", call)
    monkeypatch.setattr(launches, "FAR", 1)
    launched = launches.plan(call, moe_op.config_of("triton", moe_op.key(call)), None)
    assert launched.gate_up.constants["WIDE"] and launched.down.constants["WIDE"]
    assert torch.equal(moe_op.run("triton", call), narrow)


def test_offsets_are_wide_where_they_pass_31_bits() -> None:
    """By the size of what they are offsets in: tokens, one expert's weights, rows of pairs."""

    def wide(tokens: int, hidden: int, intermediate: int, experts: int = 4) -> tuple[bool, bool]:
        made = partial(torch.empty, device="meta")
        call = MoeCall(
            made(tokens, hidden), made(experts, 2 * intermediate, hidden), made(experts, hidden, intermediate),
            made(tokens, 2), made(tokens, 2, dtype=torch.int32),
        )  # fmt: skip
        planned = launches.plan(call, SMALL, None)
        return planned.gate_up.constants["WIDE"], planned.down.constants["WIDE"]

    assert wide(64, 4096, 14336, experts=4096) == (False, False)
    assert wide(1 << 20, 4096, 16) == (True, False)
    assert wide(1 << 16, 16, 1 << 15) == (False, True)
    assert wide(2, 1 << 15, 1 << 15) == (True, False)
    assert wide(2, 1 << 16, 1 << 15) == (True, True)


@pytest.mark.parametrize("luck", [0, 3])
def test_blocks_that_are_left_run_nothing(luck: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an earlier call may hold the number of an expert, and pairs."""
    allocate = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = allocate(*args, **kwargs)
        return made.fill_(luck) if made.dtype == torch.int32 else made

    monkeypatch.setattr(torch, "empty", empty)
    stored: list[Tensor] = []
    bind = launches.allocator

    def watching(*args: Any) -> Callable[[MoeCall], launches.Buffers]:
        allocate = bind(*args)

        def allocated(call: MoeCall) -> launches.Buffers:
            made = allocate(call)
            stored.append(made.experts)
            return made

        return allocated

    monkeypatch.setattr(launches, "allocator", watching)
    call = a_call(40, 4, 2, 24, 16, torch.float32, device)
    ids = torch.tensor([[2, -1]] * 20 + [[0, 2]] * 20, device=device)
    assert_right(call._replace(topk_ids=ids), "triton", SMALL)
    # 20 pairs of expert 0 in two blocks, 40 of expert 2 in three, and what is left of at most 8
    assert stored[-1].tolist() == [0, 0, 2, 2, 2, 4, 4, 4]


def test_blocks_are_enough_for_any_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        pairs, experts, block = (int(torch.randint(1, high, (), generator=generator)) for high in (70, 12, 20))
        ids = torch.randint(experts, (pairs,), generator=generator)
        needed = sum(-(-int(count) // block) for count in torch.bincount(ids))
        assert needed <= configs.most_blocks(pairs, experts, block) <= pairs
    # one expert with all pairs, and as many experts as pairs
    assert configs.most_blocks(33, 1, 16) == 3 and configs.most_blocks(5, 8, 16) == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_an_expert_stays_with_its_tokens(backend: str, device: str) -> None:
    call = a_call(6, 4, 2, 40, 24, torch.float32, device)
    ids = torch.tensor([[0, 1], [0, 2], [1, 2], [2, 3], [1, 0], [2, 0]], device=device)
    w2 = call.w2.clone()
    w2[3, 5, 7] = NAN
    w1 = call.w1.clone()
    w1[1, 4, 6] = INF
    clean = moe_op.run(backend, call._replace(topk_ids=ids))
    y = moe_op.run(backend, call._replace(topk_ids=ids, w1=w1, w2=w2))
    assert y[3, 5].isnan() and y[3].isnan().sum() == 1
    touched = ~y[[0, 2, 4]].isfinite()
    assert touched.any(-1).all()
    assert torch.equal(y[[1, 5]], clean[[1, 5]])


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_a_token_stays_with_it(backend: str, activation: str, device: str) -> None:
    call = a_call(5, 4, 2, 40, 24, torch.float32, device, activation=activation)
    x = call.x.clone()
    x[2, 3] = NAN
    y, clean = moe_op.run(backend, call._replace(x=x)), moe_op.run(backend, call)
    assert y[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(y[kept], clean[kept])


@pytest.mark.usefixtures("sums_by_row")
def test_a_tokens_bits_do_not_depend_on_the_others(device: str) -> None:
    call = a_call(23, 5, 2, 40, 24, torch.float32, device)
    whole = moe_op.run("triton", call, config=SMALL)
    for picked in ([3], [22, 3, 7], list(range(11, 23))):
        part = call._replace(x=call.x[picked], topk_weights=call.topk_weights[picked], topk_ids=call.topk_ids[picked])
        assert torch.equal(moe_op.run("triton", part, config=SMALL), whole[picked])


class _Recorded(TorchDispatchMode):
    """The operations of PyTorch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_allocates_and_launches_and_reads_nothing_on_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call(6, 4, 2, 40, 24, torch.float32, device)
    config = moe_op.config_of("triton", moe_op.key(call))
    monkeypatch.setattr("wavecrest.ops.common.launcher.starter", lambda *_args: lambda *_args, **_options: None)
    run = launches.bind(call, config)
    with _Recorded() as recorded:
        run(call)
    # the tests fill new memory with NaN
    assert {one.split(".")[0] for one in recorded.names} <= {"aten::empty", "aten::fill_"}, recorded.names


def test_a_wrong_id_reads_no_memory_outside(device: str) -> None:
    """Ids beyond 32 bits too: they are compared before they become an offset."""
    call = a_call(3, 4, 2, 40, 24, torch.float32, device)
    ids = torch.tensor([[1 << 40, 0], [-(1 << 40), 1], [(1 << 32) + 1, 2]], device=device)
    for direct in (0, 1):
        assert_right(call._replace(topk_ids=ids), "triton", Config(**(SMALL.kwargs | {"DIRECT": direct})))


def test_gradients(device: str) -> None:
    call = a_call(5, 4, 2, 24, 16, torch.float64, device, biased=True)
    leaves = mapped(call, lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    inputs = [value for value in leaves if isinstance(value, Tensor) and value.requires_grad]
    got = torch.autograd.grad(moe_op.run("torch", leaves).square().sum(), inputs)
    want = torch.autograd.grad(moe_op.reference(leaves).square().sum(), inputs)
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two)


def test_gradients_in_a_graph_are_the_references(device: str) -> None:
    call = a_call(5, 3, 2, 24, 16, torch.float32, device)
    x = call.x.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return ops.moe(x, *call[1:5]).square().sum()

    torch._dynamo.reset()
    (want,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="eager")(x), x)
    torch.testing.assert_close(got, want)


U8_1, U8_2 = torch.ones(4, 48, 32, dtype=torch.uint8), torch.ones(4, 40, 32, dtype=torch.uint8)
INT4: dict[str, Any] = {"w1": U8_1, "w2": U8_2, "w1_scale": torch.ones(4, 48, 2), "w2_scale": torch.ones(4, 40, 1)}
I8_1, I8_2 = torch.ones(4, 48, 40, dtype=torch.int8), torch.ones(4, 40, 24, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 2, 20)}, "x must be float32, float16, bfloat16 or float64 .tokens, hidden."),
        ({"x": torch.randn(6, 39)}, "must have one hidden size"),
        ({"w1": torch.randn(4, 48, 40, dtype=torch.float64)}, "w1 must be torch.float32"),
        ({"w1": torch.randn(4, 46, 40)}, "twice the intermediate size"),
        ({"w2": torch.randn(3, 40, 24)}, "same number of experts"),
        ({"w2": torch.randn(4, 40, 0), "w1": torch.randn(4, 0, 40)}, "no other size is 0"),
        ({"topk_ids": torch.zeros(6, 2)}, "topk_ids must be int32 or int64"),
        ({"topk_ids": torch.zeros(5, 2, dtype=torch.int32)}, "topk_ids must be .6, k."),
        ({"topk_ids": torch.zeros(6, 0, dtype=torch.int32)}, "k of at least 1"),
        ({"topk_weights": torch.zeros(6, 3)}, "topk_weights must be floating-point .6, 2."),
        ({"b1": torch.zeros(4, 24)}, "b1 must be floating-point .4, 48."),
        ({"b2": torch.zeros(4, 40, dtype=torch.int32)}, "b2 must be floating-point .4, 40."),
        ({"w1_scale": torch.ones(4)}, "weights of torch.float32 take no w1_scale"),
        ({"w1": torch.ones(4, 48, 40, dtype=torch.int8)}, "w1 and w2 must have one dtype"),
        ({"w1": I8_1, "w2": I8_2, "w1_scale": torch.ones(4)}, "weights of torch.int8 take a w2_scale, got None"),
        ({"w1": I8_1, "w2": I8_2, "w1_scale": torch.ones(48), "w2_scale": torch.ones(4)}, "w1_scale must be float32"),
        ({"w1": I8_1, "w2": I8_2, "w1_scale": torch.ones(4, 2, 1), "w2_scale": torch.ones(4)}, "w1_scale must be"),
        ({"w1": U8_1, "w2": U8_2[:, :, :20]}, r"w2 .experts, 40, 32 . ceil.intermediate / 64.."),
        ({"w1": U8_1, "w2": U8_2, "w1_scale": torch.ones(4, 48), "w2_scale": torch.ones(4)}, "w1_scale must be"),
        (
            {"w1": U8_1, "w2": U8_2, "w1_scale": torch.ones(4, 48, 2), "w2_scale": U8_2[:, :, :1]},
            r"must both be float32 .int4., or both uint8",
        ),
        ({"w1_zero": U8_1[:, :, :2]}, "are of weights in int4, with float32 scales of groups"),
        (INT4 | {"w1_zero": U8_1[:, :, :2]}, r"w2_zero must be uint8 .4, 40, 1. .* of w1 and w2 alike, got None"),
        (INT4 | {"w1_zero": U8_1[:, :, :1], "w2_zero": U8_2[:, :, :1]}, r"w1_zero must be uint8 .4, 48, 2."),
        ({"activation": "relu"}, "activation takes silu, gelu, gelu_tanh, swigluoai, not 'relu'"),
        ({"interleaved": 1}, "interleaved must be True or False"),
        ({"limit": 0.0}, "limit must be a number above 0"),
        ({"alpha": INF}, "alpha must be a finite number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_calls_are_clear_errors(change: dict[str, Any], message: str) -> None:
    call = a_call(6, 4, 2, 40, 24)._replace(**change)
    with pytest.raises(InvalidArgument, match=f"^moe: .*{message}"):
        ops.moe(*call)


def test_no_tokens(device: str) -> None:
    call = a_call(0, 4, 2, 40, 24, torch.bfloat16, device)
    for backend in BACKENDS:
        y = moe_op.run(backend, call)
        assert y.shape == (0, 40) and y.dtype == torch.bfloat16


def test_sizes_compile_no_kernel_anew() -> None:
    for kernel in (_moe_gate_up_kernel, _moe_down_kernel, _moe_combine_kernel):
        assert all(one.endswith("_ptr") for one in specialised(kernel)), specialised(kernel)


@pytest.mark.parametrize("arch", ARCHS)
def test_default_configurations_fit(arch: str) -> None:
    known = ARCHS[arch]
    for tokens in (0, 1, 8, 64, 512, 131072):
        for experts, k, hidden, intermediate in ((8, 2, 4096, 14336), (128, 8, 2048, 768), (1, 1, 8, 8)):
            for bits in (16, 32):
                shape = configs.Shape(tokens, experts, k, hidden, intermediate, bits)
                made = configs.default(shape, known)
                lanes = made["num_warps"] * known.wave_size
                assert made["BLOCK_M"] * 2 * made["BLOCK_N"] <= 128 * lanes, (shape, made)
                kept = made["num_stages"] - 1 if known.vendor == "amd" else made["num_stages"]
                tile = max(
                    made["BLOCK_K"] * (made["BLOCK_M"] + 2 * made["BLOCK_N"]),
                    made["DOWN_K"] * (made["BLOCK_M"] + made["DOWN_N"]),
                )
                assert kept * tile * bits // 8 <= known.lds_kib << 10, (shape, made)
                assert not made["DIRECT"] or made["BLOCK_M"] == 16


def test_pairs_are_blocks_where_few_share_an_expert() -> None:
    def direct(tokens: int, experts: int, k: int) -> bool:
        return bool(configs.default(configs.Shape(tokens, experts, k, 2048, 768, 16), ARCHS["sm_90"])["DIRECT"])

    assert direct(1, 8, 2) and direct(2, 128, 8) and not direct(2, 8, 2) and not direct(4, 128, 8)
    assert not configs.default(configs.Shape(131072, 8, 2, 2048, 768, 16), ARCHS["gfx942"])["DIRECT"]


def test_the_search_starts_with_the_default_and_repeats_none() -> None:
    space = moe_op.study.kernel("triton").space
    assert space is not None
    for tokens in (1, 64, 2048):
        call = mapped(a_call(1, 8, 2, 256, 128, torch.bfloat16), lambda tensor: tensor.to("meta"))
        key = (tokens, *moe_op.key(call)[1:])
        for arch in ("gfx942", "sm_90"):
            found = list(space(key, ARCHS[arch]))
            assert len(found) == len(set(found)) > 3
            assert found[0] == configs.default(configs.Shape(tokens, 8, 2, 256, 128, 16), ARCHS[arch])


def test_a_call_can_be_made_from_its_key(device: str) -> None:
    remake = moe_op.study.call_of_key
    assert remake is not None
    stored = quantized(a_call(6, 4, 2, 40, 24), torch.int8, by_row=False)
    stored = stored._replace(w1_scale=torch.ones(4, 48))
    # of as many columns that w1 and w2 have several groups
    plain = a_call(6, 4, 2, 140, 136, torch.bfloat16)
    formed = [by_columns(plain, form) for form in FORMS]
    for call in (a_call(6, 4, 2, 40, 24), a_call(6, 4, 2, 40, 24, torch.float16, **GPT_OSS), stored, *formed):
        key = moe_op.key(call)
        made = remake(dict(zip(moe_op.key_fields, key, strict=True)), "cpu")
        assert made is not None and moe_op.key(made) == (8 if key[0] == 8 else key[0], *key[1:])
    parts = dict(zip(moe_op.key_fields, moe_op.key(mapped(a_call(6, 4, 2, 40, 24), _spread)), strict=True))
    assert remake(parts, "cpu") is None


def test_cost_counts_the_experts_that_are_chosen() -> None:
    call = a_call(3, 8, 2, 40, 24)._replace(topk_ids=torch.tensor([[0, 1], [1, 0], [-1, 1]]))
    cost = moe_op.study.cost(call)
    assert cost.flops == 2 * 5 * 3 * 40 * 24
    assert cost.bytes == 2 * 3 * 40 * 24 * 4 + 2 * call.x.nbytes + call.topk_ids.nbytes + call.topk_weights.nbytes


@pytest.mark.gpu
def test_a_captured_graph_follows_new_routing() -> None:
    call = a_call(16, 8, 2, 256, 128, torch.bfloat16, "cuda")
    static = mapped(call, lambda tensor: tensor.clone())
    moe_op(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe_op(static)
    for seed in range(3):
        torch.manual_seed(seed)
        static.topk_ids.copy_(torch.randint(-1, 8, (16, 2)))
        static.x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        compared = numerics.compare(y.cpu(), oracle(static))
        assert compared.within(numerics.tolerance("gemm", "bfloat16")), compared


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("form", ["mxfp4 gpt-oss", "mxfp4", "int4", "block"])
def test_layers_with_scales_along_columns(form: str, tokens: int) -> None:
    """Sizes of gpt-oss-20b and Qwen3-30B-A3B, in the default tiles."""
    options: dict[str, dict[str, Any]] = {
        "mxfp4 gpt-oss": cases.GPT_OSS_MXFP4,
        "mxfp4": {"stored": torch.uint8, "by": "e8m0"},
        "int4": {"stored": torch.uint8, "by": "group 128"},
        "block": {"stored": torch.float8_e4m3fn, "by": "block"},
    }
    sizes = cases.GPT_OSS_20B if "gpt-oss" in form else cases.QWEN3_30B_A3B
    call = cases.example(sizes._replace(tokens=tokens), torch.bfloat16, "cuda", **options[form])
    y = moe_op.run("triton", call)
    wide = {name: value.double() for name, value in call._asdict().items() if name in ("x", "topk_weights")}
    exact = moe_op.reference(call._replace(**wide))
    compared = numerics.compare(y, exact)
    assert compared.within(numerics.tolerance("gemm", "bfloat16")), compared
    assert torch.equal(moe_op.run("triton", call), y)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "config"), [(1, None), (5, None), (64, None), (700, None), (300, "large")])
def test_published_layers(tokens: int, config: str | None) -> None:
    """Sizes of Qwen3-30B-A3B, with each default tile."""
    sizes = {"hidden": 2048, "intermediate": 768}
    call = a_call(tokens, 128 if config is None else 4, 8 if config is None else 2, **sizes, dtype=torch.bfloat16)
    call = mapped(call, lambda tensor: tensor.cuda())
    y = registry.get("moe").run("triton", call)
    exact = moe_op.reference(mapped(call, lambda one: one.double() if one.is_floating_point() else one))
    compared = numerics.compare(y, exact)
    assert compared.within(numerics.tolerance("gemm", "bfloat16")), compared

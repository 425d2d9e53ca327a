"""sm_90's own kernel of chunks: values on such a GPU; what it does with tiles and barriers, and the rest, anywhere."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import gluon
from tests.ops.mlstm_harness import BF16, DEVICE, F16, F32, assert_near, assert_right, case, exact, run
from tests.ops.op_harness import same_bits
from wavecrest import hardware, registry
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops import _mlstm_op, _rows, _triton
from wavecrest.ops._mlstm_operands import Operands
from wavecrest.ops.mlstm_chunkwise import config as configs
from wavecrest.ops.mlstm_chunkwise import hopper as hopper_launch
from wavecrest.ops.mlstm_chunkwise import launch as launches
from wavecrest.tuned import Config

OP, HOPPER = "mlstm_chunkwise", "triton_hopper"
ARCH = ARCHS["sm_90"]
STATES = importlib.import_module("wavecrest.ops.mlstm_chunkwise.states_kernel")
# a chunk that is not full, of one group's tokens and of both; a row of one token; whole chunks
CASES: dict[str, dict[str, Any]] = {
    "plain": {"tokens": 300},
    "states": {"heads": 2, "tokens": 400, "first": True, "return_last_states": True},
    "one token": {"tokens": 1, "first": True, "return_last_states": True},
    "a group": {"tokens": 64, "epilogue": "norm"},
    "one more": {"tokens": 65, "epilogue": "gate"},
    "whole chunks": {"batch": 1, "tokens": 512, "epilogue": "gate", "return_last_states": True},
    "gates at 15": {"gates": (15.0, -15.0, 2.0), "tokens": 300, "batch": 1, "return_last_states": True},
    "gates at -15": {"gates": (-15.0, 15.0, 2.0), "tokens": 300, "batch": 1},
    "closed input gate": {"gates": (-10.0, 4.0, 1.0), "tokens": 300, "batch": 1, "epilogue": "gate"},
    "capped": {"gate_soft_cap": 15.0, "gates": (0.0, 0.0, 20.0), "tokens": 130, "batch": 1},
    "sigmoid": {"input_gate": "sigmoid", "first": True, "tokens": 270, "batch": 1, "return_last_states": True},
    "no normaliser": {"input_gate": "sigmoid", "normalize": False, "tokens": 270, "batch": 1},
    "chunks of 128": {"tokens": 300, "chunk_size": 128, "first": True, "epilogue": "gate"},
    "as many columns": {"dv": 64, "tokens": 300, "epilogue": "gate", "first": True},
    "another order": {"tokens": 150, "order": "bhsd", "epilogue": "gate"},
}  # fmt: skip


def call_of(dk: int = 64, dv: int = 128, **options: Any) -> Operands:
    return case(dk=dk, dv=dv, dtype=BF16, gate_dtype=F32, **options)


def shape_of(call: Operands) -> configs.Shape:
    return configs.Shape(call.dk, call.dv, "bfloat16", call.chunk_size or 0)


def _denominator(den: Tensor, m: Tensor, eps: Tensor, exponential: bool) -> Tensor:
    return torch.maximum(den.abs(), torch.exp(-m) if exponential else torch.ones(())) + eps


def standing_in(**planted: str) -> gluon.Kernels:
    """The kernel's file, with `planted` errors: what it says, and what it says instead."""
    names = {name: getattr(STATES, name).value for name in ("LN_2", "LOCAL", "PLANES", "REST", "SUMS", "TOP")}
    path = Path(hopper_launch.__file__).with_name("hopper_kernel.py")
    return gluon.Kernels(path, planted, denominator=_denominator, sigmoid=torch.sigmoid, **names)


def stand_in(
    call: Operands, config: Config, programs: int, monkeypatch: pytest.MonkeyPatch, kernels: gluon.Kernels | None = None
) -> Any:
    """A call with the kernel of chunks on a CPU, and what comes before it in Triton's interpreter."""
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "described_tiles", gluon.Descriptor)
        sizes = launches.sizes_of(call, config)
        memory = launches.allocate(sizes, call.v, "cpu")
        made = launches.launches_of(call, memory, sizes, config, ARCH, hopper_launch.LAST)
    *before, last = made
    for one in before:
        one.kernel[one.grid](*one.args, **one.options())
    args = [gluon.Pointer(one) if isinstance(one, Tensor) else one for one in last.args]
    (kernels or standing_in()).run("_mlstm_hopper_kernel", min(programs, *last.grid), *args, **last.constants)
    states = (memory.c, memory.n, memory.m)
    return (memory.h, *(one for one in states if one is not None)) if sizes.last else memory.h


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on a CPU")


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_tiles_and_barriers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each configuration; fewer programs than tiles, an odd number of them, and one a tile."""
    call = call_of(**CASES[name])
    want = exact(call)
    tried = list(hopper_launch.space(shape_of(call), ARCH))
    for config, programs in zip((tried[0], tried[-1], tried[0]), (3, 2, 1000), strict=True):
        assert_right(call, stand_in(call, config, programs, monkeypatch), want)


@interpreted
def test_heads_of_256_and_512(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(256, 512, batch=1, tokens=280, epilogue="gate", return_last_states=True)
    want = exact(call)
    for config in hopper_launch.space(shape_of(call), ARCH):
        assert_right(call, stand_in(call, config, 2, monkeypatch), want)


@interpreted
@pytest.mark.parametrize(
    ("say", "instead"),
    [
        # turns that are not counted; tiles and queries that are copied over before they are read; tiles that are never
        # given back; the other group's, not passed; tiles twice; then values
        ("turn = gl.where(at == STAGES, turn ^ 1, turn)", "turn = turn"),
        ("acc = hopper.warpgroup_mma_wait(1, deps=[acc])", "pass"),
        ("hopper.mbarrier.wait(q_empty.index(0), q_turn)", "pass"),
        ("hopper.mbarrier.arrive(empty.index(at), count=1)", "pass"),
        ("for _ in range(seen, until, BLOCK):", "for _ in range(0):"),
        ("tile = (index + rest //", "tile = (index + index //"),
        ("acc = acc * gl.convert_layout(kept, OF_SUMS)[:, None]", "pass"),
        (">= (other + offs_s)", "> (other + offs_s)"),
        ("mean = mean / (HALVES * DK)", "mean = mean / DK"),
        ("half * DK], bar", "0], bar"),
    ],
)
def test_planted_errors_are_seen(say: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "PATIENCE", 1.0)
    call = call_of(128, 256, batch=1, heads=3, tokens=290, epilogue="gate")
    made = hopper_launch.default(shape_of(call), ARCH)
    # fewer slots than the state has tiles
    config = Config(**(made.kwargs | {"BLOCK_S": 32, "STAGES": 2}))
    with pytest.raises((AssertionError, TimeoutError)):
        assert_right(call, stand_in(call, config, 3, monkeypatch, standing_in(**{say: instead})))


@pytest.fixture
def hopper() -> registry.Op:
    if hardware.detect().arch != "sm_90":
        pytest.skip(f"is for sm_90; this is {hardware.detect().arch}")
    return registry.get(OP)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, hopper: registry.Op) -> None:
    call = call_of(**CASES[name])
    want = exact(call)
    for config in hopper_launch.space(shape_of(call), ARCH):
        assert_right(call, hopper.run(HOPPER, *call, config=config), want)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2048, 2049, 777])
def test_values_of_large_heads(tokens: int, hopper: registry.Op) -> None:
    """In the op's bound with every configuration; the same bits each time."""
    call = Operands(
        *_mlstm_op.example((2, 8, tokens, 256, 512), BF16, "cuda", epilogue=True, return_last_states=True, first=True)
    )
    assert hopper.bound is not None
    wanted, bounds = hopper.reference(*call), hopper.bound(*call)
    for config in hopper_launch.space(shape_of(call), ARCH):
        found = hopper.run(HOPPER, *call, config=config)
        for name, one, want, bound in zip("hcnm", found, wanted, bounds, strict=True):
            assert_near(name, one, want.double().cpu(), bound.cpu())
    first = hopper.run(HOPPER, *call)[0]
    assert all(torch.equal(hopper.run(HOPPER, *call)[0], first) for _ in range(5))


@pytest.mark.gpu
def test_calls_that_begin_elsewhere(hopper: registry.Op) -> None:
    """An address is in no key: the portable kernel runs, also in a bound call."""
    call = call_of(tokens=150)
    odd = torch.empty(call.q.numel() + 1, dtype=BF16, device="cuda")[1:].view(2, 150, 1, 64).transpose(1, 2)
    odd.copy_(call.q)
    moved = call._replace(q=odd)
    assert same_bits(hopper.run(HOPPER, *moved), hopper.run("triton", *moved))
    hopper.pin(hopper.key(*call), HOPPER, None, "user", "for this test")
    try:
        for one, backend in ((call, HOPPER), (moved, "triton"), (call, HOPPER)):
            assert same_bits(hopper(*one), hopper.run(backend, *one))
    finally:
        hopper.unpin()


@pytest.fixture
def as_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launch asks, as on a machine with an sm_90."""
    monkeypatch.setattr(_rows, "arch", lambda: ARCH)
    monkeypatch.setattr(_triton, "interpreted", False)
    monkeypatch.setattr(_triton, "no_gluon", None)


def test_what_it_does_not_take(as_sm_90: None) -> None:
    call = call_of(tokens=20, epilogue="gate")
    assert hopper_launch.refusal(call) is None
    wide = torch.empty(2, 20, 1, 68, dtype=BF16, device=DEVICE).transpose(1, 2)[..., :64]
    weight = torch.empty(256, dtype=BF16, device=DEVICE)[::2]
    given = {
        "takes bfloat16": case(dk=64, dv=128, dtype=F16, tokens=20),
        "64, 128, 256 columns": call_of(48, 96, tokens=20),
        "twice as many of v": call_of(64, 256, tokens=20),
        "takes whole rows": call_of(tokens=20, lens=[20, 4]),
        "without resets": call_of(tokens=20, resets=0.5),
        "batch_invariant": call_of(tokens=20, batch_invariant=True),
        "chunks of multiples of 128": call_of(tokens=20, chunk_size=64),
        "elements lie side by side": call._replace(norm_weight=weight),
        "a multiple of 16 bytes": call._replace(q=wide),
        "side by side, every other": call._replace(v=torch.empty(2, 1, 128, 20, dtype=BF16, device=DEVICE).mT),
        "and not 0": call._replace(k=call.k[:, :, :1].expand(2, 1, 20, 64)),
    }
    for reason, refused in given.items():
        assert reason in str(hopper_launch.refusal(refused)), reason


def test_it_is_not_for_torch_compile(as_sm_90: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile does not trace" in str(hopper_launch.refusal(call_of(tokens=20)))


def test_it_is_for_sm_90() -> None:
    call = call_of(tokens=20)
    if hardware.detect().arch == "sm_90":
        pytest.skip("this is one")
    with pytest.raises(Unsupported, match=r"sm_90|Gluon"):
        run(OP, call, backend=HOPPER)


def test_it_runs_where_a_measured_row_names_it() -> None:
    found, call = registry.get(OP), call_of(tokens=20)
    assert found.backends[HOPPER].reserved(*call) is not None
    assert found.decide(*call).backend != HOPPER


@pytest.mark.parametrize(("dk", "dv"), [(64, 64), (64, 128), (128, 256), (256, 256), (256, 512)])
def test_configurations_fit(dk: int, dv: int) -> None:
    shape = configs.Shape(dk, dv, "bfloat16", 0)
    tried = list(hopper_launch.space(shape, ARCH))
    assert tried[0] == hopper_launch.default(shape, ARCH) and len(tried) == len(set(tried)) > 1
    for one in tried:
        assert hopper_launch.shared_bytes(one, shape) <= 227 << 10
        assert one["CHUNK"] % one["STATE_T"] == 0 and dk % one["BLOCK_S"] == 0
    assert hopper_launch.default(configs.Shape(dk, dv, "bfloat16", 128), ARCH)["CHUNK"] == 128


@pytest.mark.parametrize("change", [{"CHUNK": 64, "STATE_T": 64}, {"BLOCK_S": 128}, {"BLOCK_S": 48}], ids=str)
def test_tiles_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    call = Operands(*_mlstm_op.example((1, 2, 300, 64, 128), BF16, "meta"))
    made = hopper_launch.default(shape_of(call), ARCH)
    with pytest.raises(InvalidArgument, match="chunks of 128 tokens or multiples"):
        launches.planned(call, Config(**(made.kwargs | change)), ARCH, hopper_launch.LAST)


@interpreted
@pytest.mark.parametrize("chunk", [128, 256, 512])
def test_each_tile_once_and_turns_are_fair(chunk: int) -> None:
    """Whatever the number of programs; of 132 each has tiles that see as much, but for what does not come out even."""
    tiles = chunk // 128
    for programs, items in itertools.product((1, 2, 3, 7, 132), (tiles, 6 * tiles, 4 * 132)):
        kernels = standing_in()
        kernels._place.programs = programs
        place = kernels._names["_place"]
        seen = [tuple(map(int, place(torch.tensor(index), 3, 2, chunk))) for index in range(items)]
        assert len(set(seen)) == items
        assert {one[-1] for one in seen} == set(range(tiles))
        if programs == 132 and items == 4 * 132:
            work = Counter[int]()
            for index, one in enumerate(seen):
                work[index % programs] += one[-1]
            assert max(work.values()) - min(work.values()) <= tiles - 1

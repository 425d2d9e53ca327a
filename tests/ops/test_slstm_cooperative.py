"""slstm_sequence by programs that share a head and wait for each other: how many, for what, and races on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.ops.op_harness import same_bits
from tests.ops.slstm_harness import BF16, DEVICE, F16, F32, F64, LIMITS, case, run
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.common import elsewhere, target
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.sequence import launch_cooperative
from wavecrest.ops.slstm.sequence.config import KEPT, default_cooperative, kept_bytes, programs
from wavecrest.ops.slstm.sequence.study.space import space_cooperative
from wavecrest.ops.slstm.study.cases import example

OP, NAME = "slstm_sequence", "triton_cooperative"
SHARED = Config(BLOCK_B=16, BLOCK_N=16, num_warps=1, num_stages=1)


def same(got: Any, want: Any) -> bool:
    """True if all results have the same bits."""
    return all(same_bits(one, other) for one, other in zip(got, want, strict=True))


def refusal(arch: str, *shape: int, dtype: torch.dtype = BF16) -> str | None:
    """The reason that a call of B, S, NH, D is refused for on an architecture."""
    with elsewhere.assumed(ARCHS[arch]):
        call = elsewhere.claimed(example(shape, dtype, "meta"), "cuda:0")  # type: ignore[arg-type]
        return registry.get(OP).backends[NAME].refuse(call)


def test_programs_that_do_not_fit_at_once_are_refused() -> None:
    # 16 columns of a head of 1,024 a program, on 304, 256, 132 and 110 units
    for arch, most in (("gfx942", 4), ("gfx950", 4), ("sm_90", 2), ("gfx90a", 1)):
        assert refusal(arch, 16, 4, most, 1024) is None
        assert f"needs {64 * (most + 1)} programs" in str(refusal(arch, 16, 4, most + 1, 1024))
    # 64 columns of a head of 256 where 32 are too many programs
    assert refusal("gfx942", 1, 4, 76, 256) is None and "308 programs" in str(refusal("gfx942", 1, 4, 77, 256))
    assert "128 KiB" in str(refusal("gfx942", 1, 4, 1, 1025)) and refusal("sm_90", 1, 4, 1, 1025) is not None
    # two terms of tf32
    assert refusal("gfx942", 1, 4, 1, 512, dtype=F32) is None and "128 KiB" in str(
        refusal("sm_90", 1, 4, 1, 512, dtype=F32)
    )
    assert "too few" in str(refusal("gfx1100", 16, 4, 4, 256))
    with pytest.raises(Unsupported, match="float64"):
        run(OP, case(dtype=F64, tokens=2), backend=NAME)


def test_the_batch_is_never_too_large() -> None:
    """The key does not have it: what takes one row takes any number, some of them at a time."""
    for batch in (1, 16, 64, 1000):
        assert refusal("sm_90", batch, 4, 4, 512) is None
    with elsewhere.assumed(ARCHS["sm_90"]):
        call = elsewhere.claimed(example((64, 4, 4, 512), BF16, "meta"), "cuda:0")
        config = registry.get(OP).config_of(NAME, registry.get(OP).key(call))
        launches = launch_cooperative.planned(call, config, ARCHS["sm_90"])
        if DEVICE == "cuda":
            # 16 programs a head: 2 blocks of 16 rows of 4 heads on 132 units
            assert [one.grid for one in launches] == [(128,), (128,)]
        assert all(one.grid[0] <= 132 and one.constants["launch_cooperative_grid"] for one in launches)


def test_configurations_that_cannot_run_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="512 threads are more than"):
        run(OP, case(), Config(BLOCK_B=16, BLOCK_N=16, num_warps=16, num_stages=1), NAME)
    monkeypatch.setattr(target, "units", lambda _device: 3)
    with pytest.raises(InvalidArgument, match="4 programs would have to run at once, and 3 can"):
        launch_cooperative.bind(case(dim=32), SHARED)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "sm_90"])
def test_configurations_to_try_are_those_that_may_run(arch: str) -> None:
    known = ARCHS[arch]
    for heads, dim, dtype in ((4, 1, "bfloat16"), (4, 256, "bfloat16"), (4, 512, "float16"), (2, 128, "float32")):
        found = list(space_cooperative(heads, dim, dtype, known))
        assert found[0] == default_cooperative(heads, dim, dtype, known, known.compute_units)
        assert len(found) == len(set(found)) and (len(found) > 2 or dim == 1)
        with elsewhere.assumed(known):
            call = elsewhere.claimed(example((16, 2, heads, dim), getattr(torch, dtype), "meta"), "cuda:0")
            for one in found:
                assert launch_cooperative.planned(call, one, known)
                assert programs(heads, dim, one["BLOCK_N"]) <= known.compute_units
                assert kept_bytes(dim, one["BLOCK_N"], dtype, known) <= KEPT


def test_it_is_the_default_where_it_was_measured() -> None:
    for arch in ("gfx942", "sm_90"):
        for dtype in (BF16, F32):
            for dim in (64, 256, 512, 2048):
                with elsewhere.assumed(ARCHS[arch]):
                    op, call = registry.get(OP), elsewhere.claimed(example((2, 4, 2, dim), dtype, "meta"), "cuda:0")
                    decision = op.decide_as(op.key(call), call)
                chosen = arch == "sm_90" and dtype == BF16 and dim in (256, 512)
                assert (decision.backend == NAME) == chosen, (arch, dtype, dim)
                assert chosen or any(one.backend == NAME for one in decision.refused)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's number of units is its own")
def test_rows_in_turn_have_the_bits_of_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call = case(batch=34, tokens=3, dim=32, dtype=F16, first=True, resets=0.3)
    at_once = run(OP, call, SHARED, NAME)
    monkeypatch.setattr(target, "units", lambda _device: 9)
    launches = launch_cooperative.planned(call, SHARED, None)
    # 2 heads of 2 programs: 2 blocks of rows, then 1, at each token
    assert [one.grid for one in launches] == 3 * [(8,), (4,)]
    assert same(run(OP, call, SHARED, NAME), at_once)


@pytest.fixture
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter, too, gets all tokens in one launch; its programs run one after the other."""
    monkeypatch.setattr(launch_cooperative, "_spans", lambda call: iter([(0, call.tokens)]))
    # looks are counted there, too
    monkeypatch.setattr(launch_cooperative, "PATIENCE", 2)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU all programs are there")
@pytest.mark.usefixtures("one_launch")
def test_a_program_that_waits_in_vain_ends_with_nan() -> None:
    for dtype in (F32, F16):
        call = case(batch=2, tokens=3, heads=1, dim=32, dtype=dtype, first=True)
        y, h, *_ = run(OP, call, SHARED, NAME)
        want = run(OP, call, Config(BLOCK_B=16, BLOCK_N=32, num_warps=1, num_stages=1), NAME)
        # a whole head waits for nobody but itself
        assert bool(want[0].isfinite().all())
        torch.testing.assert_close(y[:, 0, :, :16], want[0][:, 0, :, :16])
        assert bool(y[:, 1:].isnan().all()) and bool(h.isnan().all())


@pytest.mark.skipif(DEVICE != "cpu", reason="reads what the interpreter writes")
def test_words_are_those_of_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """h of the last token but one and of the last, each behind its tag; padded rows repeat what they had."""
    found: list[Tensor] = []
    made = launch_cooperative.slots_of

    def kept(call: SlstmCall) -> Tensor:
        found.append(made(call))
        return found[-1]

    monkeypatch.setattr(launch_cooperative, "slots_of", kept)
    for dtype, bits in ((F16, 16), (F32, 32)):
        call = case(batch=2, tokens=4, dim=32, dtype=dtype, first=True, lens=[4, 1])
        y = run(OP, call, SHARED, NAME)[0]
        words = found.pop()
        assert bool((words[0] >> bits == 3).all()) and bool((words[1] >> bits == 4).all())
        values = words.view(dtype).unflatten(-1, (32, 2))[..., 0]
        assert same_bits(values[0, 0], y[0, 2]) and same_bits(values[1, 0], y[0, 3])
        assert same_bits(values[0, 1], y[1, 0]) and same_bits(values[1, 1], y[1, 0])
        initial = made(call).view(dtype).unflatten(-1, (32, 2))
        assert call.h_initial is not None and same_bits(initial[1, ..., 0], call.h_initial.to(dtype))
        assert not bool(initial[..., 1].any()) and not bool(initial[0].any())


@pytest.mark.skipif(DEVICE != "cpu", reason="in the interpreter, a launch for each token")
@pytest.mark.parametrize("dtype", [F16, F32])
def test_tags_of_15_bits_begin_anew(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Tokens around 2¹⁵, of which one's tag is 0."""
    begin, count = (1 << 15) - 4, 8
    call = case(batch=1, tokens=1, heads=1, dim=32, dtype=dtype)
    many = call._replace(x=call.x.expand(1, begin + count, 4, 1, 32))
    want = run(OP, call._replace(x=call.x.expand(1, count, 4, 1, 32)), SHARED, NAME)

    def spans(_call: SlstmCall) -> Iterator[tuple[int, int]]:
        return ((token, token + 1) for token in range(begin, begin + count))

    def slots(call: SlstmCall) -> Tensor:
        bits, of = (32, torch.int64) if dtype == F32 else (16, torch.int32)
        # what the two tokens before have left
        return torch.tensor([begin << bits, (begin - 1) << bits], dtype=torch.int64).to(of).view(2, 1, 1, 1).repeat(
            1, 1, 1, 32
        )  # fmt: skip

    monkeypatch.setattr(launch_cooperative, "_spans", spans)
    monkeypatch.setattr(launch_cooperative, "slots_of", lambda call: slots(call).roll((begin + 1) % 2, 0))
    got = run(OP, many, SHARED, NAME)
    assert same((got[0][:, begin:], *got[1:]), want)


def test_torch_compile_has_one_operation() -> None:
    op = registry.get(OP)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda *tensors: op(SlstmCall(*tensors, return_last_states=True)), fullgraph=True, backend=counter
    )
    op.force(NAME)
    try:
        for tokens in (3, 5):
            call = case(tokens=tokens)
            with torch.no_grad():
                assert same(compiled(*call[:3]), run(OP, call, backend=NAME))
        assert counter.op_count <= 20
        assert [decision.backend for decision, _ in op.decisions()] == [NAME] * len(op.decisions())
    finally:
        op.force(None)


# --- on a GPU: B, S, NH, D

SHAPES = [
    (batch, tokens, 2 if dim == 1024 else 4, dim) for dim in (256, 512, 1024) for batch in (1, 16, 64)
    for tokens in (1, 2, 257)
]  # fmt: skip


@functools.cache
def on_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype, padded: bool) -> SlstmCall:
    batch, tokens, heads, dim = shape
    more: dict[str, Any] = {"lens": [max(0, tokens - row) for row in range(batch)], "resets": 0.02} if padded else {}
    return case(batch, tokens, heads, dim, dtype, first=True, **more)


def fits(call: SlstmCall) -> None:
    """Skip where this GPU has too few units."""
    reason = registry.get(OP).backends[NAME].refuse(call)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_times_the_bits_of_a_launch_for_each_token(
    shape: tuple[int, int, int, int], dtype: torch.dtype, padded: bool
) -> None:
    call = on_gpu(shape, dtype, padded)
    fits(call)
    want = run(OP, call, backend="triton_steps")
    for time in range(20):
        got = run(OP, call, backend=NAME)
        assert same(got, want), f"the {time + 1}. time"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [256, 512, 1024])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_definition_in_float64(dim: int, dtype: torch.dtype) -> None:
    call = on_gpu((17, 65, 2, dim), dtype, True)
    fits(call)
    names = ("h_initial", "c_initial", "n_initial", "m_initial")
    exact = call._replace(
        x=call.x.double(), r=call.r.double(), **{name: getattr(call, name).double() for name in names}
    )
    for one, right in zip(run(OP, call, backend=NAME), run(OP, exact, backend="reference"), strict=True):
        off = ((one.double() - right).abs() / right.abs().clamp(min=1.0)).max()
        assert float(off) <= 2 * LIMITS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_float32_has_the_bits_of_the_same_products(dim: int) -> None:
    """Three terms of tf32 are summed a tile of the weights at a time: the launch for each token gets one as long."""
    call = on_gpu((33, 65, 2, dim), F32, True)
    fits(call)
    want = run(OP, call, Config(BLOCK_B=16, BLOCK_N=16, BLOCK_K=dim, STAGES=1, num_warps=4), "triton_steps")
    config = Config(BLOCK_B=16, BLOCK_N=16, num_warps=min(8, dim // 16), num_stages=1)
    for _ in range(20):
        assert same(run(OP, call, config, NAME), want)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 64, 4, 256), (64, 64, 4, 512)], ids=str)
def test_replays_in_a_cuda_graph(shape: tuple[int, int, int, int]) -> None:
    call = on_gpu(shape, BF16, False)
    call = call._replace(x=call.x.clone())
    fits(call)
    run(OP, call, backend=NAME)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(OP, call, backend=NAME)
    for _ in range(20):
        call.x.copy_(torch.randn_like(call.x))
        want = run(OP, call, backend="triton_steps")
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, want)


@pytest.mark.gpu
def test_two_streams_and_other_work_at_once() -> None:
    """Two launches, neither of which leaves room for the other, beside GEMMs: none waits for what cannot start."""
    call = on_gpu((32, 129, 4, 512), BF16, False)
    fits(call)
    want = run(OP, call, backend="triton_steps")
    a = torch.randn(4096, 4096, device=DEVICE, dtype=BF16)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        with torch.cuda.stream(streams[2]):
            for _ in range(4):
                _ = a @ a
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                found.append(run(OP, call, backend=NAME))
        torch.cuda.synchronize()
        assert all(same(got, want) for got in found)

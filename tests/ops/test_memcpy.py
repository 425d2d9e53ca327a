from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.op_harness import BACKENDS, assert_compiles, assert_few_calls, assert_never_copies, name, reference, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._memcpy.backend import op as memcpy_op
from wavecrest.ops._memcpy.call import MemcpyCall

OP = "memcpy"
MODES = ("copy", "read", "write")
# one unit of 16 bytes, less than a tile, a tile, one and a bit, several and a bit: in 32-bit words
WORDS = (4, 1000, 4096, 4100, 3 * 4096 + 12)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.float64)


def words(count: int, device: str, seed: int = 0) -> Tensor:
    """Any bits: as floats there are NaNs of all kinds among them, which a copy must keep."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32).to(device)


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.int32)


def total(x: Tensor) -> int:
    """The sum of the words by Python's integers."""
    return sum(bits(x).tolist())


def backends(programs: int | None) -> tuple[str, ...]:
    return BACKENDS if programs is None else ("triton", "reference")


def assert_moves(x: Tensor, backend: str, programs: int | None, config: Config | None = None) -> None:
    before = bits(x).clone()
    copied = run(OP, backend, x, "copy", programs, config=config)
    read = run(OP, backend, x, "read", programs, config=config)
    written = run(OP, backend, x, "write", programs, 0x8BADF00D, config=config)
    assert torch.equal(bits(copied), before) and torch.equal(bits(x), before)
    assert copied.data_ptr() != x.data_ptr()
    assert read.dtype == torch.int64 and read.shape == () and int(read) == total(x)
    assert torch.equal(bits(written), torch.full_like(before, 0x8BADF00D - (1 << 32)))
    for made in (copied, written):
        assert made.shape == x.shape and made.dtype == x.dtype and made.is_contiguous()


@pytest.mark.parametrize("programs", [None, 1, 3, 1000])
@pytest.mark.parametrize("count", WORDS)
def test_sizes(count: int, programs: int | None, device: str) -> None:
    for backend in backends(programs):
        assert_moves(words(count, device), backend, programs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_dtypes(dtype: torch.dtype, backend: str, device: str) -> None:
    assert_moves(words(1024, device).view(dtype).view(2, 2, -1), backend, None)


@pytest.mark.parametrize("shape", [(16, 3), (16, 1), (2, 8, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=name)
def test_rows_that_end_inside_a_word(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    for backend in BACKENDS:
        assert_moves(words(math.prod(shape) * dtype.itemsize // 4, device).view(dtype).view(shape), backend, None)


def test_bool(device: str) -> None:
    x = torch.arange(64, device=device) % 3 == 0
    for backend in BACKENDS:
        assert torch.equal(run(OP, backend, x), x)


@pytest.mark.parametrize("config", [(64, 1), (1024, 2), (8192, 4)])
def test_configurations(config: tuple[int, int], device: str) -> None:
    for programs in (None, 5):
        made = Config(BLOCK=config[0], num_warps=config[1])
        assert_moves(words(1500 * 4, device), "triton", programs, made)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_what_is_tried_by_tune(arch: str, mode: str, device: str) -> None:
    known, study = ARCHS[arch], memcpy_op.study.kernel("triton")
    assert study.space is not None and study.launches is not None
    call = MemcpyCall(torch.arange(5 * 4096 + 12, dtype=torch.int32, device=device), mode)
    want = memcpy_op.run("reference", call)
    configs = list(study.space(memcpy_op.key(call), known))
    assert len(configs) == len(set(configs)) > 8
    for config in configs:
        assert 4 * config["BLOCK"] >= 16 and config["num_warps"] * known.wave_size <= 1024
        assert torch.equal(memcpy_op.run("triton", call, config=config), want)
        (launch,) = study.launches(call._replace(x=call.x.to("meta")), config, known)
        assert launch.grid == (-(-call.x.numel() // config["BLOCK"]),)
    assert study.launches(call._replace(x=call.x[:0]), configs[0], known) == []


def test_read_reads_every_word(device: str) -> None:
    x = torch.zeros(64, dtype=torch.int32, device=device)
    config = Config(BLOCK=16, num_warps=1)
    for programs in (None, 3):
        for i in range(64):
            x.zero_()
            x[i] = 1 << (i % 31)
            assert int(run(OP, "triton", x, "read", programs, config=config)) == 1 << (i % 31)


@pytest.mark.parametrize("count", [512, 1020, 1536, 1024 + 256])
def test_read_stops_at_the_end(count: int, device: str) -> None:
    """Sizes that fill a part of the last tile of 1,024 words, with other words behind them."""
    storage = torch.ones(4096, dtype=torch.int32, device=device)
    for programs in (None, 1):
        got = run(OP, "triton", storage[:count], "read", programs, config=Config(BLOCK=1024, num_warps=1))
        assert int(got) == count


def test_sum_of_extremes_does_not_wrap_at_32_bits(device: str) -> None:
    x = torch.full((4096,), -(1 << 31), dtype=torch.int32, device=device)
    for backend in BACKENDS:
        assert int(run(OP, backend, x, "read")) == -(1 << 43)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0, 1, -1, (1 << 32) - 1, -(1 << 31), 1 << 31])
def test_value(value: int, backend: str, device: str) -> None:
    x = torch.empty(16, dtype=torch.float32, device=device)
    got = run(OP, backend, x, "write", None, value)
    assert set(bits(got).tolist()) == {value - (1 << 32) if value >= 1 << 31 else value}


def test_write_does_not_read(device: str) -> None:
    # what is read would come back as NaN payloads; and x keeps its own
    x = torch.full((32,), float("nan"), device=device)
    assert ops.memcpy(x, "write", None, 0x3F800000).tolist() == [1.0] * 32
    assert x.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty(shape: tuple[int, ...], backend: str, device: str) -> None:
    x = torch.empty(shape, device=device)
    assert run(OP, backend, x).shape == shape
    assert int(run(OP, backend, x, "read")) == 0
    assert run(OP, backend, x, "write").shape == shape


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("programs", [None, 2])
def test_bound_call(mode: str, programs: int | None, device: str) -> None:
    """The second call of a signature, with other data, and with data that start elsewhere."""
    found = registry.get(OP)
    found.force("triton")
    longer = words(2048, device, 2)
    for x in (words(1024, device), words(1024, device, 1), longer[1:1025], longer[4:1028]):
        got = ops.memcpy(x, mode, programs)
        want = reference(OP, x, mode, programs)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("mode", "backend"), [*(("read", backend) for backend in BACKENDS), ("copy", "triton"), ("write", "triton")]
)
def test_inside_a_word(mode: str, backend: str, device: str) -> None:
    x = words(64, device).view(torch.bfloat16)
    found = registry.get(OP)
    found.force(backend)
    assert ops.memcpy(x[2:66], mode).numel() in (1, 64)
    # the signature is the same, the start is not
    with pytest.raises(InvalidArgument, match="inside a 32-bit word"):
        ops.memcpy(x[1:65], mode)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_a_bound_call_is_short(mode: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_few_calls(OP, backend, monkeypatch, words(256, device), mode)


def test_no_copy(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = words(256, device).view(torch.float16).view(4, 128)
    for mode in MODES:
        assert_never_copies(OP, monkeypatch, x, mode, 3)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param((3.0,), "takes a dense tensor", id="number"),
        pytest.param((torch.ones(4, 4).to_sparse(),), "must be a dense tensor", id="sparse"),
        pytest.param((torch.ones(4, dtype=torch.complex64),), "not complex", id="complex"),
        pytest.param((torch.ones(4, 8).t(),), "contiguous", id="transposed"),
        pytest.param((torch.ones(8).expand(4, 8),), "contiguous", id="expanded"),
        pytest.param((torch.ones(5),), "multiples of 16 bytes, got 20", id="20-bytes"),
        pytest.param((torch.ones(4), "move"), "copy, read or write", id="mode"),
        pytest.param((torch.ones(4), ["copy"]), "copy, read or write", id="mode-list"),
        pytest.param((torch.ones(4), "copy", 0), "programs is", id="no-programs"),
        pytest.param((torch.ones(4), "copy", (1 << 20) + 1), "programs is", id="too-many-programs"),
        pytest.param((torch.ones(4), "copy", True), "programs is", id="programs-bool"),
        pytest.param((torch.ones(4), "copy", 2.0), "programs is", id="programs-float"),
        pytest.param((torch.ones(4), "write", None, 1 << 32), "32-bit pattern", id="value-large"),
        pytest.param((torch.ones(4), "write", None, 0.5), "32-bit pattern", id="value-float"),
        pytest.param((torch.ones(4), "read", None, 1), "has no use for it", id="value-of-read"),
    ],
)
def test_wrong_arguments(args: tuple[Any, ...], message: str, backend: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        if backend is None:
            ops.memcpy(*args)
        else:
            run(OP, backend, *args)


def test_torch_says_that_it_takes_no_number_of_programs(device: str) -> None:
    x = words(64, device)
    with pytest.raises(Unsupported, match="number of programs"):
        run(OP, "torch", x, "copy", 4)
    reasons = {refusal.backend: refusal.reason for refusal in memcpy_op.decide(MemcpyCall(x, "copy", 4)).refused}
    assert "number of programs" in reasons["torch"]


def test_gradients(device: str) -> None:
    x = torch.randn(8, device=device, requires_grad=True)
    registry.get(OP).force("triton")
    decision = memcpy_op.decide(MemcpyCall(x))
    assert decision.backend == "torch"
    assert "gradients" in {refusal.backend: refusal.reason for refusal in decision.refused}["triton"]
    ops.memcpy(x).square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_key_and_cost() -> None:
    x = torch.empty(4096)
    calls = [
        MemcpyCall(x),
        MemcpyCall(x[:1024]),
        MemcpyCall(x, "read"),
        MemcpyCall(x, "copy", 4),
        MemcpyCall(x.clone().requires_grad_()),
    ]
    keys = [memcpy_op.key(call) for call in calls]
    assert len(set(keys)) == len(keys) and all(len(key) == len(memcpy_op.key_fields) for key in keys)
    assert [memcpy_op.study.cost(MemcpyCall(x, mode)).bytes for mode in MODES] == [2 * 16384, 16384, 16384]


def test_bench_cases(device: str) -> None:
    bench_cases = memcpy_op.study.bench_cases
    assert bench_cases is not None
    made = bench_cases("quick", device)
    assert sorted(made) == ["copy 1 MiB", "read 1 MiB", "write 1 MiB"]
    for label, case in made.items():
        call = case()
        assert call.x.nbytes == 1 << 20 and label.startswith(call.mode)
        assert call.programs is None
        memcpy_op.check(call)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
def test_compile_fullgraph(mode: str, dynamic: bool) -> None:
    assert_compiles(OP, dynamic, 48, (mode, 3))
    assert_compiles(OP, dynamic, 48, (mode,))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    units=st.integers(0, 300),
    programs=st.one_of(st.none(), st.integers(1, 40)),
    block=st.sampled_from((32, 128, 512)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_size(units: int, programs: int | None, block: int, dtype: torch.dtype, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = words(4 * units, device, seed).view(dtype)
    if units:
        assert_moves(x, "triton", programs, Config(BLOCK=block, num_warps=1))
    else:
        assert run(OP, "triton", x, "copy", programs).shape == x.shape


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [None, 264])
def test_words_past_two_to_the_31(programs: int | None) -> None:
    count = (1 << 31) + 4096 + 4
    x = torch.zeros(count, dtype=torch.int32, device="cuda")
    x[-1], x[0] = 7, 3
    assert int(run(OP, "triton", x, "read", programs)) == 10
    copied = run(OP, "triton", x, "copy", programs)
    assert (int(copied[-1]), int(copied[0]), int(copied.sum())) == (7, 3, 10)
    del copied
    assert int(run(OP, "triton", x, "write", programs, 2).sum()) == 2 * count

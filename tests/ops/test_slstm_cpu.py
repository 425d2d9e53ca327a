"""The sLSTM's C code: the functions of its gates, its rows by any number of threads, and what happens without it."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.op_harness import same_bits
from tests.ops.slstm_harness import C_CODE, DEVICE, F16, F32, F64, NAN, assert_right, case, row_of, run
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.errors import CompileWarning, Unsupported
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.sequence import launch_cpu

SEQUENCE, STEP = registry.get("slstm_sequence"), registry.get("slstm_step")
INF = float("inf")
compiled = pytest.mark.skipif(not C_CODE, reason="the C code cannot be compiled here, or this is a GPU's run")


@pytest.fixture
def threads() -> Iterator[Any]:
    """A function that sets PyTorch's number of threads, for the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def again() -> Iterator[None]:
    """The code is looked for and loaded anew, in the test and after it."""

    def forget() -> None:
        launch_cpu.load.cache_clear()
        launch_cpu._problem.cache_clear()
        for op in (SEQUENCE, STEP):
            op.forget()

    forget()
    yield
    forget()


def function(which: int, x: Tensor) -> Tensor:
    """exp of x ≤ 0, log σ or tanh, of the C code."""
    y = torch.empty_like(x)
    launch_cpu.load().functions(x.data_ptr(), y.data_ptr(), x.numel(), which)
    return y


def spread(low: float, high: float) -> Tensor:
    """Numbers of all sizes between two powers of two, in steps that no other has."""
    return torch.exp2(torch.linspace(low, high, 40_001, dtype=F64)).float()


@compiled
def test_functions_of_the_gates_are_within_three_units_in_the_last_place() -> None:
    small = spread(-100, 6.4)
    both = torch.cat((small, -small))
    unit, normal = 2.0**-23, 2.0**-126
    for which, x, exact in (
        (0, -small[small < 87.0], lambda x: torch.exp(x)),
        (1, both[both.abs() < 80.0], torch.nn.functional.logsigmoid),
        (2, both, torch.tanh),
    ):
        want = exact(x.double())
        off = (function(which, x).double() - want).abs() / want.abs().clamp(min=normal)
        assert float(off.max()) <= 3 * unit, (which, float(x[off.argmax()]), float(off.max() / unit))


@compiled
def test_functions_of_the_gates_at_their_ends() -> None:
    ends = torch.tensor([-0.0, 0.0, -87.0, -88.0, -1e4, -3e38, -INF, NAN])
    made = function(0, ends)
    assert made[:2].tolist() == [1.0, 1.0] and 0 < float(made[2]) < 2e-38
    assert made[3:7].tolist() == [0.0] * 4 and bool(made[7].isnan())
    ends = torch.tensor([INF, 1e30, 100.0, -1e30, -INF, NAN])
    made = function(1, ends)
    assert made[:3].abs().tolist() == [0.0] * 3 and made[3:5].tolist() == [float(ends[3]), -INF]
    assert bool(made[5].isnan())
    made = function(2, torch.tensor([INF, 50.0, -50.0, -INF, 0.0, 1e-40, NAN]))
    assert made[:5].tolist() == [1.0, 1.0, -1.0, -1.0, 0.0] and abs(float(made[5])) < 1e-39 and bool(made[6].isnan())


@compiled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_is_read_and_written_as_pytorch_does(dtype: torch.dtype) -> None:
    """Without recurrent weights h is σ(o) tanh(z) after a reset: z and o read, h written, beside PyTorch's rounding."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.zeros(1, 16, 4, 256, 16, dtype=dtype)
    x[:, :, 2], x[:, :, 3] = bits.view(16, 256, 16), bits.flip(0).view(16, 256, 16)
    call = SlstmCall(x, torch.zeros(4, 256, 16, 16, dtype=dtype), resets=torch.ones(1, 16, dtype=torch.bool))
    narrow = run("slstm_sequence", call, backend="c")
    wide = run("slstm_sequence", call._replace(x=x.float(), r=call.r.float()), backend="c")
    assert bool(narrow.isnan().any()) and torch.equal(narrow.nan_to_num(9.0), wide.to(dtype).nan_to_num(9.0))


@compiled
def test_bits_depend_on_no_thread_block_or_layout(threads: Any) -> None:
    """More rows than a block has, by one thread and more, row by row, and with weights where the caller has them."""
    call = case(batch=37, heads=3, tokens=16, dim=16, first=True, resets=0.1, lens=[16, 5, 0] * 12 + [9])
    threads(1)
    want = run("slstm_sequence", call, backend="c")
    assert_right(call, want)
    for number in (2, 3, 7):
        threads(number)
        got = run("slstm_sequence", call, backend="c")
        assert all(same_bits(one, other) for one, other in zip(got, want, strict=True)), number
    for row in (0, 31, 32, 36):
        got = run("slstm_sequence", row_of(call, row), backend="c")
        assert all(same_bits(one, other[row : row + 1]) for one, other in zip(got, want, strict=True)), row
    # 15 tokens read the weights in place, 16 from what is laid out
    short = call._replace(x=call.x[:, :15], resets=call.resets[:, :15])  # type: ignore[index]
    assert same_bits(run("slstm_sequence", short, backend="c")[0], want[0][:, :15])


@compiled
def test_other_flags_are_other_instructions_and_the_same_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: None
) -> None:
    """Without flags for the processor: vectors of 4, odd sizes, no fused multiply-and-add."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _name: tmp_path)
    monkeypatch.setattr(launch_cpu, "FLAGS", ((),))
    for options in ({"dim": 19, "batch": 5}, {"dim": 16, "lens": [3, 6], "resets": 0.3}, {"dtype": F16, "dim": 40}):
        call = case(first=True, **options)
        assert_right(call, run("slstm_sequence", call, backend="c"))
    assert len(list((tmp_path / "ops").iterdir())) == 1


@compiled
def test_large_and_small_states_stay_what_they_are() -> None:
    """n near the largest float32, and weights of e^(10⁴): no infinity on the way to h."""
    call = case(batch=1, tokens=1, heads=1, first=True, bias=False, scale=0.0)
    assert call.n_initial is not None and call.c_initial is not None and call.m_initial is not None
    call.n_initial.fill_(3e38)
    call.c_initial.fill_(-1.5e38)
    call.m_initial.fill_(1e4)
    call.x[:, :, 1] = 100.0
    y, _, c, n, m = run("slstm_sequence", call, backend="c")
    torch.testing.assert_close(y, -0.5 * torch.sigmoid(call.x[:, :, 3]), rtol=1e-6, atol=0)
    assert bool((c == -1.5e38).all()) and bool((n == 3e38).all()) and bool((m == 1e4).all())
    call.x[:, :, 0] = INF
    want = run("slstm_sequence", call, backend="reference")
    for one, other in zip(run("slstm_sequence", call, backend="c"), want, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@compiled
def test_it_is_the_default_for_heads_that_were_measured() -> None:
    for dtype, dim, backend in ((F32, 128, "c"), (F16, 16, "c"), (F32, 129, "torch"), (F64, 16, "torch")):
        call = case(tokens=1, dim=dim, heads=1, dtype=dtype)
        decision = SEQUENCE.decide(call)
        assert decision.backend == backend, decision
        given = torch.zeros(2, 1, dim, dtype=F64 if dtype == F64 else F32)
        assert STEP.decide(STEP.call_of((call.x[:, 0], call.r, *[given] * 4, None, "exp"))).backend == backend
    call = case(tokens=2)
    assert SEQUENCE.decide(call._replace(x=call.x.requires_grad_())).backend == "torch"


def _without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _name: folder)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)


def _reason(backend: str) -> str:
    decision = SEQUENCE.decide(case(tokens=1))
    assert decision.backend == "torch"
    return next(one.reason for one in decision.refused if one.backend == backend)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU it is refused before")
def test_without_a_compiler_pytorch_runs_and_explain_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: None
) -> None:
    _without_compiler(monkeypatch, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "cannot be compiled" in _reason("c") and "gcc or clang" in _reason("c")
    call = case(tokens=2)
    assert_right(call, SEQUENCE(call))
    with pytest.raises(Unsupported, match="gcc or clang"):
        run("slstm_sequence", call, backend="c")


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU it is refused before")
@pytest.mark.parametrize("broken", ["the compiler", "what it writes"])
def test_a_bad_build_is_one_warning_and_pytorch_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: None, broken: str
) -> None:
    fake = tmp_path / "cc"
    does = "echo no space left >&2; exit 1" if broken == "the compiler" else "echo no library"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) exit 0;; esac\n{does}\n')
    fake.chmod(0o755)
    _without_compiler(monkeypatch, tmp_path)
    call = case(tokens=2)
    with pytest.warns(CompileWarning, match="PyTorch's operations run in its place") as seen:
        for _ in range(2):
            y, states = ops.slstm_sequence(*call[:3], return_last_states=True)
            assert_right(call, (y, *states))
    assert len([one for one in seen if issubclass(one.category, CompileWarning)]) == 1
    assert ("no space left" if broken == "the compiler" else "cannot be loaded; remove it") in _reason("c")


@compiled
def test_without_pytorchs_openmp_one_thread_works(monkeypatch: pytest.MonkeyPatch, threads: Any) -> None:
    call = case(batch=40, heads=2, tokens=17, dim=32)
    threads(3)
    want = run("slstm_sequence", call, backend="c")
    launch_cpu.parallel.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda _path: object())
    try:
        assert launch_cpu.parallel() is None
        got = run("slstm_sequence", call, backend="c")
    finally:
        launch_cpu.parallel.cache_clear()
    assert all(same_bits(one, other) for one, other in zip(got, want, strict=True))

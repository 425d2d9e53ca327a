"""Kernels of users: planted wrong ones are refused with the rule named, right ones run where something names them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wavecrest
from wavecrest import ops
from wavecrest.backends import user, user_files
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import MissingKernel
from wavecrest.dispatch.tuned import Config, Database, Row
from wavecrest.errors import InvalidArgument, KernelRefused, WorkloadError
from wavecrest.ops.rows.call import RowCall
from wavecrest.tune import candidates, verdicts


@pytest.fixture(autouse=True)
def _no_kernel_stays() -> Iterator[None]:
    yield
    for op, name in list(user.KERNELS):
        registry.get(op).force(None)
        registry.get(op).unpin()
        registry.get(op).detach_user(name)
        del user.KERNELS[op, name]


def call(rows: int = 4, columns: int = 40, dtype: torch.dtype = torch.float32) -> RowCall:
    torch.manual_seed(1)
    return RowCall("rms", torch.randn(rows, columns, dtype=dtype), None, torch.randn(columns).to(dtype), None, 1e-6)


def right(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def last_block(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = right(x, weight, eps)
    # blocks of 64: the last one, if it is not full, ends an element early
    return y if x.shape[-1] % 64 == 0 or x.numel() == 0 else F.pad(y[..., :-1], (0, 1))


def loses_nan(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return right(x.nan_to_num(), weight, eps)


def writes(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = right(x, weight, eps)
    x.mul_(2)
    return y


def flat(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return right(torch.as_strided(x, x.shape, (*[x.shape[-1]] * (x.ndim - 1), 1)), weight, eps)


def next_columns(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return right(torch.as_strided(x, x.shape, (*x.stride()[:-1], 1)), weight, eps)


_calls: list[int] = []


def comes_and_goes(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    _calls.append(0)
    return right(x, weight, eps) * (1 + 3e-7 * (len(_calls) // 2 % 2))


def wide(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return right(x.double(), weight, eps)


def in_place(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.copy_(right(x, weight, eps))


_buffers: dict[tuple[int, ...], Tensor] = {}


def one_buffer(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = right(x, weight, eps)
    return _buffers.setdefault(tuple(x.shape), torch.empty_like(y)).copy_(y)


def constant_eps(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return right(x, weight, 1e-6)


def forgets_the_end(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y[..., : max(1, x.shape[-1] - 1)] = right(x, weight, eps)[..., : max(1, x.shape[-1] - 1)]
    return y


def leaks(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return right(x, weight, eps) + 0 * x.sum(0, keepdim=True)


def never_empty(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return right(x if x.shape[0] else x.new_zeros(1, *x.shape[1:]), weight, eps)


def raises(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    raise RuntimeError("out of LDS")


PLANTED = {
    last_block: "values", loses_nan: "nan", writes: "inputs", flat: "strides", next_columns: "strides",
    comes_and_goes: "repeatable", wide: "form", in_place: "alias", one_buffer: "kept", forgets_the_end: "values",
    constant_eps: "values", leaks: "nan", never_empty: "empty", raises: "raises",
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED, ids=lambda function: function.__name__)
def test_a_wrong_kernel_is_refused_with_the_rule(planted: Any) -> None:
    wavecrest.register_kernel("rms_norm")(planted)
    op, name = registry.get("rms_norm"), planted.__name__
    broken = f"breaks the contract of rms_norm: {PLANTED[planted]}, case"
    with pytest.raises(KernelRefused, match=f"{name} refuses: {broken}"):
        op.run(name, call())
    op.force(name)
    with torch.no_grad():
        decision = op.decide(call())
    # another backend runs, and the decision says why
    assert decision.backend == "torch" and "forced, refuses it" in decision.reason
    assert {one.backend: one.reason for one in decision.refused}[name].startswith(broken)


def test_a_finding_names_shape_dtype_error_and_limit() -> None:
    wavecrest.register_kernel("rms_norm")(last_block)
    kernel = user.KERNELS["rms_norm", "last_block"]
    found = kernel.verdict("cpu", kernel.form(call(dtype=torch.bfloat16))).finding
    assert (found.rule, found.case, found.shapes, found.dtype) == ("values", "odd", ("5x72", "72"), "bfloat16")
    assert found.limit == 4e-3 < found.error and "5x72 72 bfloat16" in str(found)


def test_a_right_kernel_runs_only_where_it_is_named() -> None:
    ran: list[int] = []

    @wavecrest.register_kernel("rms_norm", name="mine")
    def _mine(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        ran.append(x.shape[0])
        return right(x, weight, eps)

    op, one = registry.get("rms_norm"), call()
    with torch.no_grad():
        decision = op.decide(one)
        assert decision.backend == "torch"
        assert {other.backend: other.reason for other in decision.refused}["mine"] == user.OPT_IN
        ran.clear()
        torch.testing.assert_close(op.run("mine", one), ops.rms_norm(one.x, one.weight))
        assert ran == [4]
        op.pin(op.key(one), "mine", None, "exact", "measured")
        for _ in range(2):
            ops.rms_norm(one.x, one.weight)
        assert ran == [4, 4, 4] and op.decide(one).backend == "mine"


def test_each_form_has_its_own_check() -> None:
    @wavecrest.register_kernel("rms_norm", name="plain", dtypes="float32")
    def _plain(x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None and weight.dtype == x.dtype and x.ndim == 2
        return right(x, weight, 1e-6)

    op, one = registry.get("rms_norm"), call()
    refuse = op.backends["plain"].refuse
    assert refuse(one) is None
    assert "AssertionError" in refuse(one._replace(weight=None))
    assert "AssertionError" in refuse(one._replace(weight=one.weight.double()))
    assert "AssertionError" in refuse(one._replace(x=one.x[None]))
    assert refuse(one._replace(eps=1e-5)) == "takes no eps other than 1e-06"
    assert refuse(call(dtype=torch.bfloat16)) == "is declared for float32, not bfloat16"
    assert refuse(one._replace(x=one.x.clone().requires_grad_())) == "gives no gradients"


def test_a_refusal_that_the_key_does_not_know_holds_for_each_call() -> None:
    ran: list[bool] = []

    @wavecrest.register_kernel(
        "rms_norm", name="dense", refuse=lambda x: None if x.is_contiguous() else "takes no gaps"
    )
    def _dense(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        ran.append(x.is_contiguous())
        return flat(x, weight, eps)

    op, one = registry.get("rms_norm"), call(8)
    gaps = one._replace(x=torch.randn(8, 50)[:, :40])
    assert op.key(one) == op.key(gaps)
    op.force("dense")
    with torch.no_grad():
        for each in (one, gaps):
            torch.testing.assert_close(op(each), op.run("torch", each))
    assert all(ran)
    with pytest.raises(KernelRefused, match="takes no gaps"):
        op.run("dense", gaps)


def test_configurations_are_checked_tried_and_no_others_run() -> None:
    @wavecrest.register_kernel("softmax", name="blocks", configs=[{"BLOCK": 2}, {"BLOCK": 7}, {"BLOCK": 2}])
    def _blocks(x: Tensor, BLOCK: int) -> Tensor:
        return torch.softmax(x, -1)

    op = registry.get("softmax")
    one = op.study.inputs(3, 8, torch.float32, "cpu")
    tried = candidates.field(op, one, op.key(one), None, ("blocks",)).candidates
    own = [other for other in tried if other.backend == "blocks"]
    assert [other.config for other in own] == [Config(BLOCK=2), Config(BLOCK=7)]
    # a tie with PyTorch is no win: only a default may keep one
    assert {other.role for other in own} == {"tried"}
    assert lookup.misfit(op, op.key(one), "blocks", Config(BLOCK=7)) == ""
    assert lookup.misfit(op, op.key(one), "blocks", Config(BLOCK=9)) == "which was not registered with BLOCK=9"
    with pytest.raises(InvalidArgument, match="was not registered with"):
        op.run("blocks", one, config=Config(BLOCK=9))

    @wavecrest.register_kernel("softmax", name="blocks", configs=[{"BLOCK": 2}, {"BLOCK": 7}])
    def _wrong(x: Tensor, BLOCK: int) -> Tensor:
        return torch.softmax(x, -1) * (1 if BLOCK == 2 else 2)

    assert "values, case odd, BLOCK=7" in op.backends["blocks"].refuse(one)


def test_it_is_one_operation_of_a_compiled_graph() -> None:
    @wavecrest.register_kernel("add_rms_norm", name="two")
    def _two(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        # a graph break, if Dynamo saw it
        torch._dynamo.graph_break()
        return right(x + residual, weight, eps), x + residual

    op = registry.get("add_rms_norm")
    op.force("two")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: ops.add_rms_norm(x, x, w), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (3, 4, 5):
            x, w = torch.randn(rows, 24), torch.randn(24)
            for got, want in zip(
                compiled(x, w), op.run("torch", op.call_type("rms", x, x, w, None, 1e-6)), strict=True
            ):
                torch.testing.assert_close(got, want)
    assert [decision.backend for decision, _ in op.decisions()] == ["two"], op.decisions()
    ran: list[int] = []

    @wavecrest.register_kernel("add_rms_norm", name="two")
    def _unchecked(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        ran.append(0)
        return x, residual

    # the graph keeps the kernel that was checked
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w)[1], 2 * x)
    assert not ran


def test_wrong_declarations_are_one_clear_error() -> None:
    register = wavecrest.register_kernel
    with pytest.raises(InvalidArgument, match="no op named 'rmsnorm'"):
        register("rmsnorm")
    with pytest.raises(InvalidArgument, match="no architecture 'mi300x'; there are cpu, gfx"):
        register("rms_norm", arch="mi300x")
    with pytest.raises(InvalidArgument, match="no dtype 'bf16'"):
        register("rms_norm", dtypes="bf16")
    with pytest.raises(InvalidArgument, match="rms_norm has no argument 'gamma'"):
        register("rms_norm", name="k")(lambda x, gamma: x)
    with pytest.raises(InvalidArgument, match="takes no BLOCK, which configs gives"):
        register("rms_norm", name="k", configs=[{"BLOCK": 1}])(lambda x: x)
    with pytest.raises(InvalidArgument, match="dictionaries of the same whole numbers"):
        register("rms_norm", configs=[{"BLOCK": 1}, {"BLOCKS": 1}])
    with pytest.raises(InvalidArgument, match="'<lambda>' cannot be the name"):
        register("rms_norm")(lambda x: x)
    with pytest.raises(InvalidArgument, match="has a backend 'torch' of its own"):
        register("rms_norm", name="torch")(right)
    with pytest.raises(InvalidArgument, match="takes no backend that nothing checks"):
        registry.get("rms_norm").attach("mine", lambda call: call.x, priority=999)


def test_a_row_of_a_missing_kernel_is_ignored_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get("rms_norm")
    monkeypatch.setattr(lookup, "_missing", set())
    key = {"rows": 4, "columns": 40, "dtype": "float32", "weight": "float32", "bias": None, "device": "cuda",
           "leading": 1, "grad": False, "strided": False}  # fmt: skip
    database = Database(arch="sm_90", overlay=None)
    row = Row(tuple(key[name] for name in lookup.fields_of(op)), "mine", None, 1.0, 2.0, "-")
    monkeypatch.setattr(Database, "look_up", lambda *_args: type("Found", (), {
        "backend": row.backend, "config": None, "source": "exact", "reason": "measured"})())  # fmt: skip
    with pytest.warns(MissingKernel, match="name the kernel 'mine', which is not registered in this process"):
        found = lookup.find(op, tuple(key.values()), ("torch",), "torch", database)
    assert found[0] != "mine" and "which rms_norm does not have" in found[3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lookup.find(op, tuple(key.values()), ("torch",), "torch", database)


SOURCE = """
import wavecrest
from kernel_parts import scaled
@wavecrest.register_kernel("softmax")
def from_file(x):
    return scaled(x)
"""


def test_a_verdict_is_kept_until_its_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVECREST_DATABASE", str(tmp_path / "tuned.sqlite"))
    (tmp_path / "kernel_parts.py").write_text("import torch\ndef scaled(x):\n    return torch.softmax(x, -1)\n")
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    user_files.load(str(file))
    kernel = user.KERNELS["softmax", "from_file"]
    form = kernel.form(registry.get("softmax").study.inputs(3, 8, torch.float32, "cpu"))
    key = verdicts.key_of(kernel, "cpu", form)
    assert kernel.verdict("cpu", form).passed and verdicts.look_up(key).passed
    # another process finds it and checks nothing
    kernel.verdicts.clear()
    monkeypatch.setattr("wavecrest.tune.contract.verify", lambda *_args: pytest.fail("it was checked again"))
    assert kernel.verdict("cpu", form).passed
    # a helper beside it counts
    (tmp_path / "kernel_parts.py").write_text("import torch\ndef scaled(x):\n    return 2 * x\n")
    assert (
        verdicts.key_of(kernel, "cpu", form) != key and verdicts.look_up(verdicts.key_of(kernel, "cpu", form)) is None
    )
    # a damaged file is no verdict
    next((tmp_path / "verdicts").iterdir()).write_text("{")
    assert verdicts.look_up(key) is None


def test_a_file_that_cannot_be_loaded_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no file .*nowhere\.py"):
        user_files.load(str(tmp_path / "nowhere.py"))
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(WorkloadError, match="cannot be loaded, ZeroDivisionError"):
        user_files.load(str(tmp_path / "broken.py"))
    with pytest.raises(WorkloadError, match="No module named 'no_such_kernels'"):
        user_files.load("no_such_kernels")


@pytest.mark.gpu
def test_it_is_captured_after_its_check_and_compiled_by_inductor() -> None:
    wavecrest.register_kernel("rms_norm", name="mine")(right)
    op = registry.get("rms_norm")
    op.force("mine")
    x, w = torch.randn(8, 64, device="cuda"), torch.randn(64, device="cuda")
    with torch.no_grad():
        want = op.run("torch", RowCall("rms", x, None, w, None, 1e-6))
        # the check of this form ran above the capture
        torch.testing.assert_close(ops.rms_norm(x, w), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ops.rms_norm(x, w)
        graph.replay()
        torch.testing.assert_close(got, want)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: ops.rms_norm(x, w), fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.testing.assert_close(compiled(x), want)


@pytest.mark.gpu
def test_a_form_is_not_checked_while_a_graph_is_captured() -> None:
    wavecrest.register_kernel("rms_norm", name="late")(right)
    op, one = registry.get("rms_norm"), RowCall("rms", torch.randn(8, 64, device="cuda"), None, None, None, 1e-6)
    op.run("torch", one)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        reason = op.backends["late"].refuse(one)
        op.run("torch", one)
    assert reason == "is not checked yet, and cannot be while a graph is captured: run a call before"
    assert op.backends["late"].refuse(one) is None

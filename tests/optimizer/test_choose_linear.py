"""Linear layers on the fastest backend: found by data flow, right, and replayed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest import hardware, records
from wavecrest.errors import PlanError, StepRefused, Unsupported
from wavecrest.measure.workload import Buckets, Workload, from_example
from wavecrest.nn import linear
from wavecrest.nn.linear import Linear, LinearOn
from wavecrest.ops._gemm.call import linear_call
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import (
    AppliedSteps,
    Found,
    StepContext,
    backend_times,
    build,
    gemm_choices,
    step_by_id,
    structural_copy,
)

STEP = step_by_id("choose_linear")
GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")
AMD = hardware.Device("cuda", 0, "gfx942", "pretended", 304, 1 << 30, "hip")


@pytest.fixture(autouse=True)
def onednn_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is faster on oneDNN, where that takes it: times of tiny layers on a busy machine mean nothing."""

    @torch.no_grad()
    def choices(calls: Any, _device: str) -> gemm_choices.Choices:
        backend = gemm_choices.op.backends["onednn"]
        taken = {gemm_choices.name_of(call): "onednn" for call in calls if backend.refuse(call) is None}
        return gemm_choices.Choices(taken, 0.5, {})

    monkeypatch.setattr("wavecrest.optimizer.steps.choose_linear.choices", choices)


class Mlp(nn.Module):
    """As in timm: a layer, its activation, dropout, a layer."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(8, 32), act, nn.Dropout(0.5), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Shared(Mlp):
    """One module of an activation for two layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc2(self.act(self.fc1(x))))


class ReadTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return self.fc2(self.act(y) + 0.1 * y)


class ReadBefore(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        scale = y.mean()
        return self.fc2(self.act(y)) * scale


class CalledTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)) + self.fc1(x))


def find(workload: Workload, device: Any = None) -> Found:
    return STEP.find(StepContext(workload, device or hardware.cpu(), model=structural_copy(workload.model)))


def rows(found: Found) -> list[tuple[str, str, str]]:
    return [(row["linear"], row["module"], row["activation"]) for row in found.params["layers"]]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Mlp(nn.GELU()), [("fc1", "act", "gelu"), ("fc2", "", "")]),
        (Mlp(nn.GELU("tanh")), [("fc1", "act", "gelu_tanh"), ("fc2", "", "")]),
        (Mlp(nn.SiLU(inplace=True)), [("fc1", "act", "silu"), ("fc2", "", "")]),
        (Mlp(nn.Tanh()), [("fc1", "", ""), ("fc2", "", "")]),
        (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), [("0", "1", "gelu"), ("2", "", "")]),
        (Shared(nn.GELU()), [("fc1", "", ""), ("fc2", "", "")]),
        (ReadTwice(nn.GELU()), [("fc1", "", ""), ("fc2", "", "")]),
        (ReadBefore(nn.GELU()), [("fc1", "", ""), ("fc2", "", "")]),
        (CalledTwice(nn.GELU()), [("fc2", "", "")]),
    ],
    ids=["gelu", "tanh form", "in place", "another", "sequential", "shared", "read twice", "read before", "twice"],
)
def test_found_by_data_flow_and_right(model: nn.Module, expected: list[tuple[str, str, str]]) -> None:
    workload = from_example(model.eval(), Buckets(a=torch.randn(3, 5, 8), b=torch.randn(1, 8)))
    found = find(workload)
    assert rows(found) == expected
    made = build(workload.model, AppliedSteps().plus(STEP, found.params))
    assert not failures(Gate.prepare(workload).check(made))
    assert made.state_dict().keys() == workload.model.state_dict().keys()
    assert all(type(made.get_submodule(path)) is LinearOn for path, _, _ in expected)
    assert type(workload.model.get_submodule(expected[0][0])) is nn.Linear


def test_a_wrong_activation_is_caught_by_the_gate() -> None:
    """The planted fault: the tanh form in the place of the exact one, behind the step's back."""
    workload = from_example(Mlp(nn.GELU()).eval(), torch.randn(3, 5, 8))
    made = build(workload.model, AppliedSteps().plus(STEP, find(workload).params))
    gate = Gate.prepare(workload)
    assert not failures(gate.check(made))
    made.fc1.activation = "silu"
    assert failures(gate.check(made))


def test_compiled_as_one_graph() -> None:
    workload = from_example(Mlp(nn.GELU()).eval(), torch.randn(3, 5, 8))
    made = build(workload.model, AppliedSteps().plus(STEP, find(workload).params))
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(made, fullgraph=True)(x), workload.model(x), rtol=1e-5, atol=1e-5)
    made.train()
    assert made(x).requires_grad


def test_calls_that_the_chosen_backend_refuses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the row of the step, and when such a call comes: eager and while tracing."""
    monkeypatch.setattr(linear, "_warned", set())
    backend = gemm_choices.op.backends["onednn"]
    few = "takes no fewer than 4 rows"
    picky = replace(backend, refuse=lambda call: few if call.M < 4 else backend.refuse(call))
    monkeypatch.setitem(gemm_choices.op.backends, "onednn", picky)
    workload = from_example(Mlp(nn.Tanh()).eval(), Buckets(a=torch.randn(3, 5, 8), b=torch.randn(1, 8)))
    found = find(workload)
    assert found.note.endswith(f"; 2 of their calls run on dispatch's choice, as onednn {few}")
    made = build(workload.model, AppliedSteps().plus(STEP, found.params))
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for call in (made, made, torch.compile(made, backend="eager", fullgraph=True)):
            for rows in (8, 1, 2):
                torch.testing.assert_close(call(torch.ones(rows, 8)), workload.model(torch.ones(rows, 8)))
    (one,) = [row for row in told if row.category is linear.LinearFallback]
    assert str(one.message) == f"linear runs on dispatch's choice: gemm: backend onednn refuses: {few}"


def test_a_backend_that_raises_is_named() -> None:
    call = linear_call(torch.randn(4, 8), torch.randn(6, 8), None, activation="gelu")

    def timer(work: Any) -> float:
        if work.args[0] == "onednn":
            raise Unsupported("onednn broke\nin two lines")
        return 1.0

    raced = gemm_choices.choices([call, call], "cpu", timer)
    assert not raced.backends and raced.left_out == {"onednn": "onednn broke"}
    assert raced.note == "; left out of the race: onednn (onednn broke)"


def test_conv1d_of_gpt2_with_its_activation() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2Model(config).eval()
    workload = from_example(model, {"input_ids": torch.arange(5)[None]})
    found = find(workload)
    mlp = "h.0.mlp"
    assert rows(found) == [
        ("h.0.attn.c_attn", "", ""), ("h.0.attn.c_proj", "", ""), (f"{mlp}.c_fc", f"{mlp}.act", "gelu_tanh"),
        (f"{mlp}.c_proj", "", ""),
    ]  # fmt: skip
    made = build(workload.model, AppliedSteps().plus(STEP, found.params))
    assert not failures(Gate.prepare(workload).check(made))
    own = workload.model.get_submodule(f"{mlp}.c_fc")
    assert type(own).__name__ == "Conv1D" and made.get_submodule(f"{mlp}.c_fc").bias is own.bias
    # one with a forward of its own is something else
    own.forward = lambda x: type(own).forward(own, x)
    assert f"{mlp}.c_fc" not in find(workload).sites


def test_wide_layers_of_fused_projections() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], -1)

    workload = from_example(Two().eval(), torch.randn(3, 8))
    fuse = step_by_id("fuse_parallel")
    context = StepContext(workload, hardware.cpu(), model=structural_copy(workload.model))
    applied = AppliedSteps().plus(fuse, fuse.find(context).params)
    context.model = build(workload.model, applied)
    found = STEP.find(context)
    assert rows(found) == [("a", "", "")]
    made = build(workload.model, applied.plus(STEP, found.params))
    assert not failures(Gate.prepare(workload).check(made))


def test_on_a_gpu_layers_without_activation_are_left_to_measured_rows() -> None:
    workload = from_example(Mlp(nn.GELU()).eval(), torch.randn(3, 5, 8))
    assert rows(find(workload, AMD)) == [("fc1", "act", "gelu")]
    assert "no linear layer" in find(from_example(nn.Linear(4, 4), torch.randn(1, 4)), AMD).note


def test_float32_on_nvidia_is_three_products_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = from_example(Mlp(nn.GELU()).eval(), torch.randn(3, 5, 8))
    found = find(workload, GPU)
    assert rows(found) == [("fc1", "act", "gelu"), ("fc2", "", "")]
    assert [row["precision"] for row in found.params["layers"]] == ["tf32x3", "tf32x3"]
    assert "2 in three products of tf32 for one of float32" in found.note
    made = build(workload.model, AppliedSteps().plus(STEP, found.params))
    assert repr(made.get_submodule("fc2")).endswith("by onednn in tf32x3)")
    with monkeypatch.context() as patch:
        patch.setattr("wavecrest.optimizer.steps.choose_linear.rounds", {"cuda": True}.__getitem__)
        assert [row["precision"] for row in find(workload, GPU).params["layers"]] == ["ieee"]
    # on some CPUs oneDNN has no bfloat16
    monkeypatch.setattr("wavecrest.backends.onednn.HAS_BFLOAT16", True)
    half = from_example(Mlp(nn.GELU()).eval().bfloat16(), torch.randn(3, 5, 8).bfloat16())
    assert [row["precision"] for row in find(half, GPU).params["layers"]] == ["ieee"]


class Residual(nn.Module):
    """Layers of wavecrest: one that normalises and adds, one of a 4-bit weight, and one with an activation after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(32))
        self.inner, self.act, self.outer = Linear(32, 32), nn.GELU(), Linear(32, 32, bias=False)
        self.packed = Linear.from_module(nn.Linear(32, 32), "int4")

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.act(self.inner(x, norm_weight=self.scale)), x)
        return self.packed(y)


def test_layers_of_wavecrest_are_left_to_dispatch_but_for_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def choices(calls: Any, _device: str) -> gemm_choices.Choices:
        return gemm_choices.Choices(dict.fromkeys(map(gemm_choices.name_of, calls), "torch"), 0.5, {})

    monkeypatch.setattr("wavecrest.optimizer.steps.choose_linear.choices", choices)
    workload = from_example(Residual().eval(), torch.randn(3, 5, 32))
    assert "no linear layer" in find(workload).note and "no linear layer" in find(workload, AMD).note
    found = find(workload, GPU)
    # the activation stays where it is: a layer of wavecrest has its own
    assert rows(found) == [("inner", "", ""), ("outer", "", "")]
    made = build(workload.model, AppliedSteps().plus(STEP, found.params))
    assert not failures(Gate.prepare(workload).check(made))
    assert repr(made.get_submodule("outer")) == "Linear(32, 32, bias=False by torch in tf32x3)"
    assert repr(workload.model.get_submodule("outer")) == "Linear(32, 32, bias=False)"


def test_rows_of_older_plans_have_no_precision() -> None:
    row = {"linear": "fc2", "module": "", "activation": "", "backend": "torch"}
    assert STEP.check_params({"layers": [row]}) == ["fc2"]
    made = build(Mlp(nn.GELU()), AppliedSteps().plus(STEP, {"layers": [row]}))
    assert made.get_submodule("fc2").precision == "ieee"


def test_the_hope_counts_float32_products_on_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    context = StepContext(from_example(Mlp(nn.GELU()).eval(), torch.randn(3, 5, 8)), GPU)
    monkeypatch.setattr(StepContext, "share", lambda _self, kind: {"elementwise": 0.1, "gemm": 0.8}[kind])
    ours, least = STEP.hope(context).ratio, STEP.hope(replace(context, device=AMD)).ratio
    assert ours is not None and least is not None and ours > 1.5 > least


def test_parameters_from_a_plan_are_checked() -> None:
    model = Mlp(nn.GELU()).eval()
    row = {"linear": "fc1", "module": "act", "activation": "gelu", "backend": "onednn"}
    assert STEP.check_params({"layers": [row]}) == ["fc1", "act"]
    for change in ({"activation": "tanh"}, {"more": 1}):
        with pytest.raises(PlanError):
            STEP.check_params({"layers": [{**row, **change}]})
    for change, reason in (
        ({"activation": "silu"}, "is a GELU, which is not silu"),
        ({"backend": "nowhere"}, "gemm has no backend nowhere"),
        ({"linear": "drop"}, "is a Dropout, not a plain Linear"),
        ({"module": ""}, "go together"),
    ):
        with pytest.raises(StepRefused, match=reason):
            STEP.apply(structural_copy(model), {"layers": [{**row, **change}]})


def test_the_fastest_is_chosen_and_a_tie_is_pytorchs() -> None:
    call = linear_call(torch.randn(4, 8), torch.randn(6, 8), None, activation="gelu")
    name = gemm_choices.name_of(call)

    def timer(gain: float) -> Any:
        def time(work: Any) -> float:
            torch.testing.assert_close(work(), work())
            backend = work.args[0]
            # in the interpreter kernels of wavecrest take the call too
            return {"torch": 1.0, "onednn": 1.0 - gain}.get(backend, 9.0)

        return time

    assert gemm_choices.choices([call, call], "cpu", timer(0.5)) == ({name: "onednn"}, 1.0, {})
    assert gemm_choices.choices([call], "cpu", timer(0.02)) == ({}, 0.0, {})
    # by the clock, once in a process
    first = gemm_choices.choices([call], "cpu")
    assert gemm_choices.choices([call], "cpu") == first
    assert gemm_choices.host_time(lambda: F.gelu(torch.zeros(2))) > 0


def test_the_prediction_is_what_the_calls_saved_of_a_call_of_the_model() -> None:
    context = StepContext(from_example(Mlp(nn.GELU()), torch.randn(2, 8)), GPU)
    context.profile = [
        records.BucketProfile.model_construct(
            bucket=name, wall_ms=wall, kernel_ms=wall, idle_ms=0.0, launches=4, ops=[], categories=[]
        )
        for name, wall in (("short", 1.0), ("long", 3.0))
    ]
    predicted = STEP.predict(Found(("fc1",), note="1 of 2 layers on triton", saved_ms=0.4), context)
    assert predicted.ratio == pytest.approx(1 / (1 - 0.1)) and "0.4 of 4 ms less" in predicted.basis
    # without a profile nothing is known
    context.profile = []
    assert STEP.predict(Found(("fc1",), saved_ms=0.4), context).ratio == 1.0


def test_on_a_gpu_layers_are_timed_only_where_that_is_worth_its_seconds() -> None:
    cpu = hardware.cpu()
    assert STEP.looks_long(GPU) and not STEP.looks_long(cpu)
    context = StepContext(from_example(Mlp(nn.GELU()), torch.randn(2, 8)), GPU)
    hoped = STEP.hope(context)
    assert hoped.ratio == 1.0 and "elementwise work is 0%" in hoped.basis


def test_kernels_of_all_backends_are_compiled_before_any_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct call once; an error of a backend is told when it is timed."""
    events: list[str] = []

    def rehearse(work: Any) -> None:
        events.append("rehearse")
        work()

    def call_on(name: str, call: Any) -> Tensor:
        events.append(name)
        if name == "broken":
            raise Unsupported("not here")
        return torch.empty(())

    def measure(work: Any, rounds: int = 9) -> float:
        work()
        return 1.0

    monkeypatch.setattr(backend_times.warmup, "possible", lambda device: True)
    monkeypatch.setattr(backend_times.warmup, "rehearse", rehearse)
    monkeypatch.setattr(gemm_choices, "_names", lambda call: ["torch", "broken", "other"])
    monkeypatch.setattr(gemm_choices.op, "call_on", call_on)
    monkeypatch.setattr(gemm_choices, "host_time", measure)
    monkeypatch.setattr(gemm_choices, "_timed", {})
    a, b = (linear_call(torch.randn(2, 8), torch.randn(size, 8), None) for size in (16, 24))
    found = gemm_choices.choices([a, b, a], "cpu")
    each = ["torch", "broken", "other"]
    assert events == ["rehearse", *each, *each, *each, *each] and list(found.left_out) == ["broken"]
    events.clear()
    # what was timed is not compiled again
    gemm_choices.choices([b], "cpu")
    assert "torch" not in events

"""The torch.compile backend: found by name, applies a plan or dispatch's choices, says what it did, refuses loudly."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends import registry as theirs

from wavecrest import hardware
from wavecrest.errors import InvalidArgument, PlanError, PlanMismatch, PlanWarning, WavecrestError
from wavecrest.integrations import compile_backend
from wavecrest.measure.workload import from_example
from wavecrest.ops._flash_attention.backend import op as flash_attention
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.records import StepOutcome

ROOT = Path(__file__).parents[2]
X = torch.linspace(-1, 1, 160).reshape(2, 5, 16)
# nothing is compiled where PyTorch's own kernels run the graph
GRAPH = {"preset": "graph"}
# what the planted step divides answers by
BY = 1.01


class Model(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, size)

    def forward(self, x: Tensor, *, scale: Tensor | None = None, doubled: bool = False) -> dict[str, Any]:
        q = F.gelu(self.a(x)).view(2, 5, 2, 8).transpose(1, 2)
        y = self.b(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 5, 16))
        y = y if scale is None else y * scale
        return {"x": x + 1, "y": [2 * y if doubled else y]}


@pytest.fixture(scope="module", autouse=True)
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The entry point that pyproject.toml declares, as an installed package has it."""
    folder = tmp_path_factory.mktemp("installed")
    found = re.search(
        r"(?m)^\[project\.entry-points\.(torch_dynamo_backends)\]\n(.+)$", (ROOT / "pyproject.toml").read_text()
    )
    assert found is not None
    info = folder / "declared-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{found[1]}]\n{found[2].replace(chr(34), '')}\n")
    sys.path.insert(0, str(folder))
    # what is installed was looked up once, perhaps by an earlier test
    theirs._discover_entrypoint_backends.cache_clear()
    theirs._discover_entrypoint_backends()
    yield
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    compile_backend._reports.clear()


def compiled(model: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="wavecrest", options=options)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def report() -> compile_backend.Report:
    found = compile_backend.last_report()
    assert found is not None
    return found


def test_dispatchs_choices_are_made_said_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    gemm.force("onednn")
    flash_attention.force("reference")
    model = Model().eval()
    with torch.no_grad(), caplog.at_level(logging.INFO, "wavecrest.compile"):
        same(compiled(model, **GRAPH)(X), model(X))
    assert report().routed == ("2 × gemm on onednn (forced)",) and report().counts.activations == 1
    assert str(report()) in caplog.text and "PyTorch's own kernels" in str(report())
    assert [decision.backend for decision, calls in gemm.decisions() if calls] == ["onednn", "onednn"]


def test_attention_goes_where_dispatch_says() -> None:
    flash_attention.force("triton")
    model = Model().eval()
    with torch.no_grad():
        same(compiled(model, **GRAPH)(X), model(X))
    assert report().routed == ("1 × flash_attention on triton (forced)",)
    assert sum(calls for _, calls in flash_attention.decisions()) == 1


class WritesAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x @ x.mT * 0.5, dim=-1) @ x


def test_short_attention_that_stays_written_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its choice is of a GPU: here every call counts as one of few keys."""
    x = torch.randn(2, 3, 5, 8)
    with torch.no_grad():
        torch.compile(WritesAttention(), backend="wavecrest", options={"preset": "graph"})(x)
        assert report().notes == ()
        torch._dynamo.reset()
        monkeypatch.setattr("wavecrest.graphs.attention.is_short", lambda _call: True)
        torch.compile(WritesAttention(), backend="wavecrest", options={"preset": "graph"})(x)
    (note,) = report().notes
    assert note == (
        "1 × attention 2x3x5x5x8x8 float32 stays written out: it has fewer than 128 keys, and dispatch has PyTorch's "
        "kernel for it"
    )


class Bare(nn.Module):
    """Nothing that Inductor would write C++ for, which takes ten seconds to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.a(x), x, x)


def test_inductor_compiles_what_is_left() -> None:
    gemm.force("onednn")
    flash_attention.force("triton")
    model, x = Bare().eval(), X.reshape(2, 2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="wavecrest", dynamic=False)(x), model(x))
    assert len(report().routed) == 2 and report().end == "Inductor"


def test_nothing_to_change_is_said_too() -> None:
    model = Model().eval()
    with torch.no_grad():
        same(compiled(model, **GRAPH)(X), model(X))
    assert report().routed == () and "nothing changed" in str(report())


def test_gradients_and_autocast_stay_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm.force("onednn")
    # attention on a backend that has gradients, which it would lose as an operation of a graph
    monkeypatch.setattr(compile_backend, "NATIVE", ())
    flash_attention.force("torch")
    model = Model().eval()
    call = compiled(model, **GRAPH)
    call(X)["y"][0].sum().backward()
    assert model.a.weight.grad is not None and report().routed == ()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert call(X)["y"][0].dtype == torch.bfloat16
    assert report().routed == () and "autocast" in report().notes[0]


def test_sizes_that_are_not_known_are_left_alone() -> None:
    gemm.force("onednn")
    layer = nn.Sequential(nn.Linear(16, 16))
    call = torch.compile(layer, backend="wavecrest", options=GRAPH, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(call(X), layer(X))
    assert report().routed == () and "dynamic=False" in report().notes[0]


class Halved(Step):
    """A step that can be seen: the last layer's answers are halved, or not, as a good step's."""

    id, title, level = "halved", "halved", 3

    def find(self, context: StepContext) -> Found:
        return Found(("b",))

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(1.0, "")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        by = params["by"]
        model.get_submodule("b").register_forward_hook(lambda _module, _args, result: result / by)
        return model


@pytest.fixture
def plan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The file of a plan for a model with a step that divides its answers."""
    from wavecrest.optimizer import replay
    from wavecrest.optimizer.steps import applied

    for module in (applied, replay):
        monkeypatch.setattr(module, "step_by_id", lambda _id: Halved())

    def make(model: nn.Module, by: float = BY, arch: str | None = None, torch_version: str | None = None) -> str:
        plan = Plan.start(from_example(model, X), hardware.cpu(), {"default": {}})
        outcome = StepOutcome(id="halved", title="halved", level=3, verdict="kept", reason="", params={"by": by})
        plan.steps, plan.stack = [outcome], ["halved"]
        changes = {"arch": arch, "torch": torch_version}
        plan.fingerprint = plan.fingerprint.model_copy(update={k: v for k, v in changes.items() if v})
        plan.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    return make


def test_a_plan_runs_its_model(plan_of: Callable[..., str]) -> None:
    model = Model().eval()
    call = compiled(model, plan=plan_of(model))
    with torch.no_grad():
        expected = model(X)
        same(call(X), {"x": expected["x"], "y": [expected["y"][0] / BY]})
        # Dynamo makes a graph of its own for other arguments
        expected = model(X, scale=X, doubled=True)
        same(call(X, scale=X, doubled=True), {"x": expected["x"], "y": [expected["y"][0] / BY]})
        # the inputs of this call, not of the first one
        expected = model(X, scale=2 * X, doubled=True)
        same(call(X, scale=2 * X, doubled=True), {"x": expected["x"], "y": [expected["y"][0] / BY]})
    assert report().steps == ("halved",) and report().end == "the plan's model"
    assert not model.b._forward_hooks


def test_weights_that_were_replaced_since_are_seen(plan_of: Callable[..., str]) -> None:
    model = Model().eval()
    call = compiled(model, plan=plan_of(model))
    with torch.no_grad():
        call(X)
        model.b.weight = nn.Parameter(torch.ones(16, 16))
        same({"y": call(X)["y"][0]}, {"y": model(X)["y"][0] / BY})
        model.a.load_state_dict({"weight": torch.ones(16, 16), "bias": torch.ones(16)})
        same({"y": call(X)["y"][0]}, {"y": model(X)["y"][0] / BY})


def test_a_plan_with_a_compiled_model_runs_it(plan_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def build(model: nn.Module, params: dict[str, Any]) -> nn.Module:
        def backend(graph: torch.fx.GraphModule, _examples: Any) -> Any:
            ran.append("compiled")
            return lambda *args: (ran.append("called"), graph.forward(*args))[1]

        model.compile(backend=backend, dynamic=False)
        return model

    monkeypatch.setattr(Halved, "apply", lambda _self, model, params: build(model, params))
    model = Model().eval()
    call = compiled(model, plan=plan_of(model))
    with torch.no_grad():
        for _ in range(2):
            same(call(X), model(X))
    # once to look at its answers
    assert ran == ["compiled", "called", "called", "called"]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"arch": "gfx942"}, PlanMismatch, "measured on gfx942"),
        ({"model": 4}, PlanMismatch, "other modules or shapes"),
        ({"file": "{}"}, PlanError, "plan"),
        ({"file": ""}, PlanError, "plan"),
    ],
    ids=["other machine", "other model", "foreign file", "no file"],
)
def test_a_plan_for_something_else_is_refused_at_every_call(
    change: dict[str, Any], error: type[WavecrestError], text: str, plan_of: Callable[..., str]
) -> None:
    model = Model().eval()
    file = plan_of(Model(change["model"]) if "model" in change else model, arch=change.get("arch"))
    if "file" in change:
        Path(file).write_text(change["file"]) if change["file"] else Path(file).unlink()
    call = compiled(model, plan=file)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(error, match=text):
            call(X)


def test_a_step_that_no_longer_verifies_is_dropped_and_noted(plan_of: Callable[..., str]) -> None:
    model = Model().eval()
    call = compiled(model, plan=plan_of(model, 2.0, torch_version="1.0"))
    with torch.no_grad(), pytest.warns(PlanWarning, match="no longer verifies"):
        same(call(X), model(X))
    assert "no longer verifies" in report().notes[0]


class Broken(Model):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.b(y)


class Writes(Model):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.b(self.a(x.add_(1)))


class Swaps(nn.Module):
    """Dynamo's graph gives the answers in another order than the model."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(16, 16)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.b(x)
        return self.last * 2


class Hooked(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda _module, _args, result: result)


@pytest.mark.parametrize(
    ("model", "text"),
    [(Broken, "breaks its graph"), (Writes, "writes into"), (Swaps, "gives"), (Hooked, "hooks")],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_no_whole_call_takes_no_plan(model: Any, text: str, plan_of: Callable[..., str]) -> None:
    made = model().eval()
    with torch.no_grad(), pytest.raises(PlanMismatch, match=text):
        compiled(made, plan=plan_of(made))(X.clone())


def test_answers_in_another_order_are_refused(plan_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(_self: Any, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.register_forward_hook(lambda _module, _args, found: {"x": found["y"], "y": [found["x"]]})
        return model

    monkeypatch.setattr(Halved, "apply", swap)
    model = Model().eval()
    with torch.no_grad(), pytest.raises(PlanMismatch, match="another order"):
        compiled(model, plan=plan_of(model))(X)


def test_a_function_takes_no_plan(plan_of: Callable[..., str]) -> None:
    model = Model().eval()
    with torch.no_grad(), pytest.raises(PlanMismatch, match="a plan is for a model"):
        compiled(lambda x: model(x)["y"], plan=plan_of(model))(X)


def test_an_object_as_argument_takes_no_plan(plan_of: Callable[..., str]) -> None:
    class State:
        scale = 2.0

    class Reads(Model):
        def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
            return self.b(x) * state.scale

    model = Reads().eval()
    with torch.no_grad(), pytest.raises(PlanMismatch, match="class State"):
        compiled(model, plan=plan_of(model))(X, State())


@pytest.mark.parametrize(
    "options",
    [{"plans": "x"}, {"preset": "none"}, {"plan": 3}, {"plan": "x", "preset": "graph"}],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with torch.no_grad(), pytest.raises(InvalidArgument, match="backend wavecrest"):
        compiled(Model().eval(), **options)(X)


def test_a_mode_is_inductors() -> None:
    with pytest.raises(InvalidArgument, match="leave mode"):
        compile_backend.wavecrest(None, [], mode="max-autotune", options={"plan": "x"})()  # type: ignore[arg-type]


def test_a_mode_is_handed_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, list_mode_options

    given: list[Any] = []

    def compile_nothing(graph: torch.fx.GraphModule, _examples: Any, *, config_patches: Any) -> Any:
        given.append(config_patches)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)
    model = Model().eval()
    for mode in (None, "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        with torch.no_grad():
            same(torch.compile(model, backend="wavecrest", mode=mode)(X), model(X))
    assert given == [None, list_mode_options("max-autotune-no-cudagraphs")] and given[1]

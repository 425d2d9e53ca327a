"""Loading a workload: what is accepted, and one clear line for everything else."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest.errors import WorkloadError
from wavecrest.measure import workload
from wavecrest.measure.workload import Buckets, Inputs, Workload, from_example

HEAD = "import torch\nfrom torch import nn\nfrom wavecrest import Buckets, Workload\nmodel = nn.Linear(4, 4)\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"{HEAD}{body}\n")
        return f"{path}:make"

    return make


def _refusal(spec: str, **options: Any) -> str:
    with pytest.raises(WorkloadError) as caught:
        workload.load(spec, **options)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


@pytest.mark.parametrize(
    ("body", "buckets"),
    [
        ("def make(): return model, torch.ones(2, 4)", {"default": "args[0]"}),
        ("def make(): return model, (torch.ones(2, 4),)", {"default": "args[0]"}),
        ("def make(): return model, [torch.ones(2, 4)]", {"default": "args[0]"}),
        ("def make(): return model, {'input': torch.ones(2, 4)}", {"default": "input"}),
        (
            "def make(): return model, Buckets(b1=torch.ones(1, 4), b2={'input': torch.ones(2, 4)})",
            {"b1": "args[0]", "b2": "input"},
        ),
        ("def make(): return Workload(model, {'b3': (torch.ones(3, 4),)})", {"b3": "args[0]"}),
        ("def make(): return Workload(model, {'b3': torch.ones(3, 4)})", {"b3": "args[0]"}),
        ("class make:\n    def __new__(cls): return model, torch.ones(2, 4)", {"default": "args[0]"}),
    ],
    ids=["tensor", "tuple", "list", "dict", "buckets", "workload", "workload-raw-tensor", "callable"],
)
def test_accepted_forms(write: Any, body: str, buckets: dict[str, str]) -> None:
    spec = write(body)
    loaded = workload.load(spec)
    assert {name: next(inputs.tensors())[0] for name, inputs in loaded.buckets.items()} == buckets
    assert loaded.spec == spec and not loaded.model.training
    for bucket in buckets:
        out = loaded.run(bucket)
        assert out.shape[-1] == 4 and not out.requires_grad


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("def other(): pass", "has no function 'make'"),
        ("make = 3", "make is not a function"),
        ("def make(): raise ValueError('first line\\nsecond line')", "raised ValueError: first line"),
        ("def make(): raise RuntimeError()", "raised RuntimeError: (no message)"),
        ("def make(needed): return model, torch.ones(2, 4)", "raised TypeError"),
        ("def make(): return None", "returned NoneType; it must return (model, inputs)"),
        ("def make(): yield model, torch.ones(2, 4)", "returned generator; it must return (model, inputs)"),
        ("async def make(): return model, torch.ones(2, 4)", "returned coroutine; it must return (model, inputs)"),
        ("def make(): return model", "returned Linear; it must return (model, inputs)"),
        ("def make(): return model, torch.ones(2, 4), 3", "returned tuple; it must return (model, inputs)"),
        ("def make(): return model.forward, torch.ones(2, 4)", "model is a method, not a torch.nn.Module"),
        ("def make(): return nn.Linear, torch.ones(2, 4)", "model is a type, not a torch.nn.Module"),
        ("def make(): return model, ()", "there is no tensor in the example inputs"),
        ("def make(): return model, {}", "there is no tensor in the example inputs"),
        ("def make(): return model, Buckets()", "the workload has no example inputs"),
        ("def make(): return model, 'text'", "example inputs are a str"),
        ("def make(): return model, torch.ones(0, 4)", "args[0] is empty (shape (0, 4))"),
        ("def make(): return Workload(model, {'b': 3})", "example inputs are a int"),
        (
            "def make(): return model, Buckets(b1=torch.ones(2, 4), b2=torch.ones(2, 4, device='meta'))",
            "bucket b2: args[0] is on meta but the model is on cpu",
        ),
        (
            "def make(): return nn.Sequential(model, nn.Linear(4, 4, device='meta')), torch.ones(2, 4)",
            "the model is spread over cpu, meta",
        ),
        ("import nothing_of_that_name\ndef make(): pass", "No module named 'nothing_of_that_name'"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("def make(:", "raised SyntaxError"),
    ],
    ids=[
        "no-function", "not-callable", "raises", "raises-without-text", "needs-arguments", "none", "generator",
        "coroutine", "model-alone", "three-things", "method", "class", "no-inputs", "no-keywords", "no-buckets",
        "text", "empty-tensor", "raw-number", "other-device", "two-devices", "missing-import", "import-raises",
        "syntax",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_bad_workloads(write: Any, body: str, wanted: str) -> None:
    assert wanted in _refusal(write(body))


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("gone.py:make", "no file gone.py"),
        ("nothing_of_that_name:make", "No module named 'nothing_of_that_name'"),
        ("mine.py", "written file.py:function"),
        (":make", "written file.py:function"),
        ("mine.py:", "written file.py:function"),
        ("", "written file.py:function"),
    ],
    ids=["no-file", "no-module", "no-function", "no-target", "empty-function", "empty"],
)
def test_bad_specs(spec: str, wanted: str) -> None:
    assert wanted in _refusal(spec)


def test_a_function_that_takes_a_device_gets_it(write: Any) -> None:
    spec = write("def make(device): return nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)")
    assert workload.load(spec, device="meta").device == "meta"


def test_a_function_that_ignores_the_device_is_refused(write: Any) -> None:
    spec = write("def make(): return model, torch.ones(2, 4)")
    assert "built its model on cpu, but meta was asked for" in _refusal(spec, device="meta")


def test_neighbours_of_the_file_can_be_imported(write: Any, tmp_path: Path) -> None:
    (tmp_path / "beside_the_workload.py").write_text("WIDTH = 4\n")
    body = "from beside_the_workload import WIDTH\ndef make(): return model, torch.ones(2, WIDTH)"
    assert workload.load(write(body)).run("default").shape == (2, 4)


def test_tensors_inside_containers_and_objects_are_found() -> None:
    @dataclass
    class Cache:
        keys: list[torch.Tensor]

    inputs = Inputs((torch.ones(1), {"a": [torch.ones(2)]}), {"cache": Cache([torch.ones(3)])})
    assert {path: tensor.numel() for path, tensor in inputs.tensors()} == {
        "args[0]": 1,
        "args[1].a[0]": 2,
        "cache.keys[0]": 3,
    }


def test_a_clone_shares_nothing() -> None:
    inputs = Inputs((torch.zeros(2),))
    inputs.clone().args[0].add_(1)
    assert inputs.args[0].tolist() == [0, 0]


def test_device_and_dtype_follow_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 64).to(torch.bfloat16), nn.LayerNorm(64))
    loaded = from_example(model, torch.ones(1, 64, dtype=torch.bfloat16))
    assert (loaded.device, loaded.dtype) == ("cpu", "bfloat16")
    bare = from_example(nn.ReLU(), torch.ones(1, device="meta"))
    assert (bare.device, bare.dtype) == ("meta", "float32")


def test_a_scalar_of_another_device_is_no_mismatch() -> None:
    Workload(nn.Linear(4, 4), {"b": Inputs((torch.ones(1, 4),), {"scale": torch.tensor(2.0)})})


def test_bucket_names_become_text() -> None:
    assert list(from_example(nn.Linear(4, 4), Buckets({1: torch.ones(1, 4)})).buckets) == ["1"]


def test_graph_trees_are_told_of_every_call_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    trees, told = "torch._inductor.cudagraph_trees", list[str]()
    made = workload.Call(from_example(nn.Linear(2, 2), torch.ones(1, 2)), "default")
    monkeypatch.delitem(sys.modules, trees, raising=False)
    made.prepare()
    assert trees not in sys.modules, "loading them loads all of inductor"
    monkeypatch.setitem(sys.modules, trees, SimpleNamespace(mark_step_begin=lambda: told.append("a step")))
    made.prepare()
    made.prepare()
    assert told == ["a step"] * 2

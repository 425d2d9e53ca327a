"""The jobs of a survey: configurations, cases, users' functions. Nothing is compiled here, see tests/compile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import EnvironmentProblem, InvalidArgument, MissingDependency, WorkloadError
from wavecrest.isa import Launch, compiler, survey
from wavecrest.ops.common import triton as _triton


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("shipped", {}),
        ("num_warps=8", {"num_warps": 8}),
        (" BLOCK_N=1024 , num_warps=4", {"BLOCK_N": 1024, "num_warps": 4}),
        ("waves_per_eu=-1", {"waves_per_eu": -1}),
    ],
)
def test_configurations(text: str, values: dict[str, int]) -> None:
    assert survey.parse_override(text) == values


@pytest.mark.parametrize(
    "text", ["", "num_warps", "num_warps=", "=4", "num_warps=x", "a b=4", "num_warps=1.5", "a=1,,b=2"]
)
def test_wrong_configurations(text: str) -> None:
    with pytest.raises(InvalidArgument, match="KEY=NUMBER"):
        survey.parse_override(text)


def test_a_key_twice() -> None:
    with pytest.raises(InvalidArgument, match="num_warps is given twice"):
        survey.parse_override("num_warps=4,num_warps=8")


def _op() -> str:
    """An op whose cases have a block size."""
    return next(name for name in registry.names() if registry.get(name).study.compile_cases is not None)


def test_order_of_jobs() -> None:
    name = _op()
    work = survey.jobs(name, ["gfx942", "gfx1100"], [{}, {"num_warps": 1}])
    assert [(job.chosen, job.arch) for job in work[:4]] == [
        ("shipped", "gfx942"), ("shipped", "gfx1100"), ("num_warps=1", "gfx942"), ("num_warps=1", "gfx1100"),
    ]  # fmt: skip
    assert len({job.case for job in work[:4]}) == 1 and len(work) == 4 * len({job.case for job in work})
    assert work[2].launch.config["num_warps"] == 1
    cases = registry.get(name).study.compile_cases
    assert cases is not None
    shipped = cases(compiler.arch_of("gfx942"), None)[work[0].case]
    assert work[0].launch.config == shipped.config


def test_a_launch_option_that_the_shipped_configuration_leaves_alone() -> None:
    (job, *_) = survey.jobs(_op(), ["gfx942"], [{"waves_per_eu": 2}])
    assert job.reason == "" and job.launch.config["waves_per_eu"] == 2


def test_one_case() -> None:
    name = _op()
    case = survey.jobs(name, ["gfx942"])[-1].case
    assert [job.case for job in survey.jobs(name, ["gfx942", "sm_90"], case=case)] == [case, case]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["gfx94"],), "no architecture 'gfx94'; there are gfx90a"),
        ((["gfx942"], [{}], "N=5"), "has no case 'N=5'; it has "),
        ((["gfx942"], [{"BLOCKS": 1}]), "no configuration key BLOCKS; there are "),
    ],
)
def test_what_is_not_there(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        survey.jobs(_op(), *arguments)


def test_a_launch_that_an_op_does_not_make_is_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("""
from wavecrest.isa import Launch
from wavecrest.dispatch.tuned import Config

class kernel:
    __name__ = "kernel"

def cases(arch, config=None):
    config = config or Config(BLOCK=4)
    return {"a": Launch(kernel, (16 // config["BLOCK"],), (), {"EVEN": 16 % config["BLOCK"] == 0}, config)}
""")
    good, bad = survey.jobs(f"{path}:cases", ["gfx942"], [{"BLOCK": 5}, {"BLOCK": 0}])
    # constants and grid follow from the block size
    assert good.reason == "" and good.launch.grid == (3,) and good.launch.constants == {"EVEN": False}
    assert bad.reason.startswith("no launch with Config(BLOCK=0): ") and "ZeroDivisionError" in bad.reason
    assert bad.launch.config == Config(BLOCK=0)


@pytest.mark.parametrize("parameters", ["", "arch", "arch, config=None"])
def test_functions_of_users(parameters: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"""
from wavecrest.isa import Launch
from wavecrest.dispatch.tuned import Config

def cases({parameters}):
    return {{"a": Launch(object, (1,), (), {{}}, locals().get("config") or Config(num_warps=2))}}
""")
    cases = survey.cases_of(f"{path}:cases")
    arch = compiler.arch_of("gfx942")
    assert cases(arch)["a"].config == Config(num_warps=2)
    assert cases(arch, Config(num_warps=8))["a"].config == Config(num_warps=8)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("raising", WorkloadError, "raised ValueError: nothing for gfx942"),
        ("gone", WorkloadError, "no function 'gone'"),
        ("not_launches", InvalidArgument, "case 'a' is a str, not a wavecrest.isa.Launch"),
        ("nothing", InvalidArgument, "with at least one"),
        ("KERNEL", WorkloadError, "is not a function"),
    ],
)
def test_functions_that_give_no_launches(function: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("""
KERNEL = 1

def not_launches():
    return {"a": "b"}

def nothing():
    return {}

def raising(arch):
    raise ValueError(f"nothing for {arch.name}")
""")
    with pytest.raises(error, match=message):
        survey.jobs(f"{path}:{function}", ["gfx942"])


def test_no_such_file() -> None:
    with pytest.raises(WorkloadError, match="no file"):
        survey.jobs("/nowhere/mine.py:cases", ["gfx942"])


def test_every_case_of_every_op_is_a_launch() -> None:
    found = [name for name in registry.names() if registry.get(name).study.compile_cases is not None]
    assert found
    for name in found:
        launches = survey.cases_of(name)(compiler.arch_of("gfx950"))
        assert isinstance(launches, Mapping) and all(isinstance(one, Launch) for one in launches.values()), name


def test_kernels_of_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", True)
    with pytest.raises(EnvironmentProblem, match="TRITON_INTERPRET=1 is set"):
        survey.survey(survey.jobs(_op(), ["gfx942"]))


def test_no_triton_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "unavailable", "triton is not importable")
    with pytest.raises(MissingDependency, match="pip install triton"):
        compiler.require_compiler()


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", False)
    assert survey.survey([]) == []


def test_a_process_compiles_for_one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", False)
    work = survey.jobs(_op(), ["gfx942", "gfx950"])[:6]
    pools: list[list[str]] = []

    def pooled(indices: Any, *_args: Any) -> Any:
        pools.append([work[index].arch for index in indices])
        return [(index, survey._row(work[index], reason="not compiled")) for index in indices]

    monkeypatch.setattr(survey, "_pooled", pooled)
    rows = survey.survey(work)
    assert [row.arch for row in rows] == [job.arch for job in work]
    assert pools == [["gfx942"] * 3, ["gfx950"] * 3]

"""Doctor's checks on made-up machines, and the comparison with a clean process on this one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from wavecrest import env, hardware
from wavecrest.doctor import CHECKS, Context, Dump, Finding, checks, context, run_checks
from wavecrest.records.provenance import LEAST_TRANSFORMERS

ROOT = Path(__file__).parents[2]

MI300X = hardware.Device("cuda", 0, "gfx942", "AMD Instinct MI300X", 304, 206_158_430_208, "hip 7.2.26015")
H200 = hardware.Device("cuda", 0, "sm_90", "NVIDIA H200", 132, 150_000_000_000, "cuda 13.0")
CPU = hardware.Device("cpu", 0, "cpu-x86_64", "some processor", 8, 34_359_738_368, "6.1")

GFX = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
OLD = GFX.removeprefix("gfx,")


def machine(
    device: hardware.Device = MI300X,
    *,
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    **facts: object,
) -> Context:
    """A healthy machine, with what a test changes."""
    healthy = Context(
        device=device,
        environment=environment or {},
        read=dict(files or {}).get,
        hip="7.1.25424" if device.vendor == "amd" else None,
        rocm="7.1.1" if device.vendor == "amd" else None,
        compiler="/usr/bin/g++",
        threads=8,
        allowed_cpus=8,
        cpus=8,
    )
    return replace(healthy, **facts)  # type: ignore[arg-type]


def levels(findings: list[Finding], check: str) -> list[str]:
    return [finding.level for finding in findings if finding.check == check]


def run(check: Callable[..., object], **facts: object) -> list[Finding]:
    device = facts.pop("device", MI300X)
    return list(check(machine(device, **facts)))  # type: ignore[arg-type, call-overload]


@pytest.mark.parametrize("device", [MI300X, H200, CPU], ids=["amd", "nvidia", "cpu"])
def test_a_healthy_machine_has_nothing_to_report(device: hardware.Device) -> None:
    files = {"/proc/sys/kernel/numa_balancing": "0\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert {finding.level for finding in run_checks(machine(device, files=files))} == {"ok"}


def test_every_finding_says_what_why_action_and_source() -> None:
    environment = {row.name: "7" for row in env.table()} | {"AITER_CONFIG_GEMM_BF16": "/a.csv:/gone.csv"}
    files = {"/proc/sys/kernel/numa_balancing": "1", "/sys/fs/cgroup/cpu.max": "150000 100000", "/a.csv": f"{OLD}\n"}
    environment |= {"AITER_JIT_DIR": "", "VLLM_ROCM_USE_AITER": "0", "MIOPEN_FIND_MODE": "1"}
    packages = {"aiter": "0.1", "vllm": "0.20", "flashinfer": "0.6", "transformers": "4.57.6", "triton": "3.7.1"}
    sick = machine(
        environment=environment, files=files, compiler=None, hip="7.2.26015", rocm="7.2.1", threads=64,
        packages=packages, sdpa={"causal": "MATH"}, blas="Cublas", gpu_node=1, cpu_nodes=(0,),
    )  # fmt: skip
    findings = run_checks(sick)
    assert {finding.check for finding in findings} >= {
        check.__name__ for check in CHECKS if check.__name__ != "inductor"
    }
    for finding in findings:
        assert finding.what and finding.why and finding.action and finding.source, finding
    order = [finding.level for finding in findings]
    assert order == sorted(order, key=("problem", "warn", "info", "ok").index)


def test_an_older_transformers_than_is_tested_is_named() -> None:
    (finding,) = run(checks.transformers, packages={"transformers": "4.57.6"})
    assert finding.level == "warn" and "transformers 4.57.6 is older than 5.14" in finding.what
    for version in ("5.14.0", "5.100.1", "6.0.0.dev0"):
        assert not run(checks.transformers, packages={"transformers": version})
    assert not run(checks.transformers)
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"][0]
    assert least == f"transformers>={LEAST_TRANSFORMERS}"


# the variables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "variable", "level", "text"),
    [
        (MI300X, ("AMD_LOG_LEVEL", "0"), "info", "already the default"),
        (MI300X, ("AMD_LOG_LEVEL", "3"), "warn", "the default is 0"),
        (MI300X, ("HIP_FORCE_DEV_KERNARG", "1"), "info", "already the default"),
        (MI300X, ("HIP_FORCE_DEV_KERNARG", "0"), "warn", "the default is 1"),
        (MI300X, ("TORCH_ROCM_USE_HIPBLASLT", "1"), "info", "no library reads this name"),
        (CPU, ("TORCH_ROCM_USE_HIPBLASLT", "1"), "info", "no library reads this name"),
        (MI300X, ("GPU_MAX_HW_QUEUES", "2"), "info", "right only in the case named"),
        (MI300X, ("AMD_SERIALIZE_KERNEL", "3"), "warn", "read by the library"),
        (H200, ("CUDA_LAUNCH_BLOCKING", "1"), "warn", "read by the library"),
        (CPU, ("TORCHDYNAMO_DISABLE", "1"), "warn", "read by the library"),
        (MI300X, ("OMP_NUM_THREADS", "8"), "info", "read by the library"),
    ],
)
def test_verdict_of_a_variable(device: hardware.Device, variable: tuple[str, str], level: str, text: str) -> None:
    (finding,) = run(checks.variables, device=device, environment=dict([variable]))
    assert finding.level == level
    assert finding.what.startswith(f"{variable[0]}={variable[1]} (") and text in finding.what


def test_a_variable_of_another_platform_is_no_warning() -> None:
    (finding,) = run(checks.variables, device=H200, environment={"AMD_SERIALIZE_KERNEL": "3"})
    assert finding.level == "info" and "only on amd" in finding.why


def test_unknown_and_unset_variables_are_left_alone() -> None:
    assert not run(checks.variables, environment={"PATH": "/bin", "MY_SECRET_TOKEN": "hush"})


# settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "level"), [("0\n", "ok"), ("1\n", "warn"), ("2\n", "warn"), ("3", "warn")])
def test_numa_balancing_any_value_but_zero(value: str, level: str) -> None:
    findings = run(checks.settings, files={"/proc/sys/kernel/numa_balancing": value})
    assert [finding.level for finding in findings] == [level]


def test_numa_balancing_not_readable_or_without_gpu() -> None:
    assert not run(checks.settings)
    assert not run(checks.settings, device=CPU, files={"/proc/sys/kernel/numa_balancing": "1"})


# device visibility --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, []),
        ({"HIP_VISIBLE_DEVICES": "0"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0"}, []),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, []),
        ({"ROCR_VISIBLE_DEVICES": "0"}, ["info"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, ["warn"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["warn"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}, ["warn"]),
    ],
    ids=["none", "hip", "cuda", "hip-and-cuda-agree", "rocr-alone", "rocr-and-hip", "disagree", "cuda-empty"],
)
def test_visibility(environment: dict[str, str], wanted: list[str]) -> None:
    assert [finding.level for finding in run(checks.visibility, environment=environment)] == wanted


def test_visibility_is_no_matter_on_nvidia() -> None:
    assert not run(checks.visibility, device=H200, environment={"ROCR_VISIBLE_DEVICES": "0"})


def test_a_pretended_architecture_is_a_problem_once() -> None:
    findings = run_checks(machine(environment={"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}))
    named = [finding for finding in findings if "HSA_OVERRIDE_GFX_VERSION" in finding.what]
    assert [finding.level for finding in named] == ["problem"]


# graph replay -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rocm", "hip", "wanted"),
    [
        ("7.2.0", "7.2.26015", ["problem"]),
        ("7.2.3", "7.2.53211", ["problem"]),
        ("7.2.4", "7.2.53211", []),
        ("7.1.1", "7.1.25424", []),
        ("7.20.1", "7.20.1", []),
        (None, "7.2.26015-abc", ["warn"]),
        (None, "7.1.25424", []),
        (None, None, []),
    ],
    ids=["7.2.0", "7.2.3", "7.2.4", "7.1.1", "7.20", "hip-7.2-only", "hip-7.1-only", "no-rocm"],
)
def test_graph_replay_risk(rocm: str | None, hip: str | None, wanted: list[str]) -> None:
    findings = run(checks.graph_replay, rocm=rocm, hip=hip)
    assert [finding.level for finding in findings] == wanted
    assert all("ROCm/clr#279" in finding.source for finding in findings)


# aiter's tables -----------------------------------------------------------------------------------------------------


def _row(gfx: str | None = "gfx942", cu: int = 304, m: int = 16, dtype: str = "torch.bfloat16") -> str:
    first = "" if gfx is None else f"{gfx},"
    return f"{first}{cu},{m},4096,4096,False,{dtype},{dtype},False,False,asm,1,0,5.5,k,0.0,1.0,1.0"


def _tables(**files: str) -> list[tuple[str, str]]:
    paths = {f"/{name}.csv": text for name, text in files.items()}
    environment = {"AITER_CONFIG_GEMM_BF16": ":".join(paths)}
    findings = run(checks.aiter_config, environment=environment, files=paths)
    return [(finding.level, finding.what.removeprefix("AITER_CONFIG_GEMM_BF16: ")) for finding in findings]


def test_aiter_table_of_this_gpu() -> None:
    text = "\n".join([GFX, _row(), _row(m=32), _row(gfx="gfx950", cu=256)])
    assert _tables(a=text) == [("ok", "2 of 3 tuned rows are for gfx942 with 304 CUs")]


@pytest.mark.parametrize(
    "row", [_row(gfx="gfx950"), _row(cu=80), _row(gfx="gfx950", cu=256)], ids=["arch", "partition", "both"]
)
def test_aiter_table_of_another_gpu(row: str) -> None:
    assert _tables(a=f"{GFX}\n{row}") == [("warn", "none of the 1 tuned rows is for gfx942 with 304 CUs")]


def test_aiter_table_without_rows() -> None:
    assert _tables(a=f"{GFX}\n") == [("warn", "none of the 0 tuned rows is for gfx942 with 304 CUs")]


def test_aiter_table_of_seventeen_columns() -> None:
    found = _tables(a=f"{OLD}\n{_row(gfx=None)}")
    assert ("ok", "1 of 1 tuned rows are for gfx942 with 304 CUs") in found
    assert [level for level, what in found if "without the column gfx" in what] == ["warn"]
    assert len(found) == 2


def test_aiter_table_of_seventeen_columns_for_other_cus() -> None:
    assert ("warn", "none of the 1 tuned rows is for gfx942 with 304 CUs") in _tables(
        a=f"{OLD}\n{_row(gfx=None, cu=80)}"
    )


def test_aiter_keys_twice_in_one_table_or_across_two() -> None:
    doubled = ("warn", "1 keys occur more than once in the tuned tables")
    assert doubled in _tables(a="\n".join([GFX, _row(), _row()]))
    assert doubled in _tables(a=f"{GFX}\n{_row()}", b=f"{GFX}\n{_row()}")
    # the same shape in another dtype or for another GPU is another key
    assert doubled not in _tables(a="\n".join([GFX, _row(), _row(dtype="torch.float16"), _row(cu=80)]))


def test_aiter_missing_file_beside_a_good_one() -> None:
    environment = {"AITER_CONFIG_GEMM_BF16": "/gone.csv:/a.csv:"}
    findings = run(checks.aiter_config, environment=environment, files={"/a.csv": f"{GFX}\n{_row()}"})
    assert [finding.level for finding in findings] == ["warn", "ok"]
    assert "/gone.csv cannot be read" in findings[0].what


def test_aiter_missing_file_alone_says_only_that() -> None:
    findings = run(checks.aiter_config, environment={"AITER_CONFIG_GEMM_BF16": "/gone.csv"})
    assert ["cannot be read" in finding.what for finding in findings] == [True]


def test_aiter_foreign_file() -> None:
    assert _tables(a="name,value\nx,1\n") == [
        ("warn", "/a.csv is no table of 16-bit matrix products: no column cu_num, M, N, K, dtype")
    ]


def test_aiter_dtype_that_never_matches() -> None:
    assert ("warn", "/a.csv writes the dtype as bf16") in _tables(a=f"{GFX}\n{_row(dtype='bf16')}")


def test_aiter_tables_are_no_matter_elsewhere() -> None:
    assert not run(checks.aiter_config, device=H200, environment={"AITER_CONFIG_GEMM_BF16": "/gone.csv"})


# processors and compiler --------------------------------------------------------------------------------------------

V2, V1 = "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_{}_us"


@pytest.mark.parametrize(
    ("files", "facts", "wanted"),
    [
        ({V2: "max 100000\n"}, {}, []),
        ({}, {}, []),
        ({V2: "200000 100000\n"}, {"threads": 2}, ["info"]),
        ({V2: "200000 100000\n"}, {}, ["info", "warn"]),
        ({V2: "50000 100000\n"}, {"threads": 1}, ["info"]),
        ({V1.format("quota"): "200000", V1.format("period"): "100000"}, {"threads": 2}, ["info"]),
        ({V1.format("quota"): "-1", V1.format("period"): "100000"}, {}, []),
        ({}, {"allowed_cpus": 2, "threads": 2}, ["info"]),
        ({}, {"threads": 4}, []),
        ({}, {"threads": 3}, ["warn"]),
        ({}, {"threads": 1}, ["warn"]),
        ({}, {"threads": 9}, ["warn"]),
    ],
    ids=[
        "v2-max", "no-cgroup", "v2-two", "v2-two-too-many-threads", "v2-half", "v1-two", "v1-unlimited", "affinity",
        "one-thread-a-core", "fewer-threads-than-cores", "one-thread", "more-threads-than-processors",
    ],
)  # fmt: skip
def test_processors(files: dict[str, str], facts: dict[str, int], wanted: list[str]) -> None:
    findings = run(checks.processors, device=CPU, files=files, **facts)
    assert [finding.level for finding in findings] == wanted


def test_few_threads_name_the_variable_and_matter_less_beside_a_gpu() -> None:
    (finding,) = run(checks.processors, threads=1, environment={"OMP_NUM_THREADS": "1"})
    assert finding.level == "info" and "OMP_NUM_THREADS=1" in finding.what


@pytest.mark.parametrize(("device", "level"), [(CPU, "problem"), (MI300X, "warn")], ids=["cpu", "gpu"])
def test_no_compiler(device: hardware.Device, level: str) -> None:
    (finding,) = run(checks.compiler, device=device, compiler=None, environment={"CXX": "icpx"})
    assert finding.level == level and "icpx is not on the path" in finding.what


def test_which_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.sys, "platform", "linux")
    assert context.compiler({}, which=lambda name: f"/bin/{name}") == "/bin/g++"
    assert context.compiler({"CXX": "clang++"}, which=lambda name: f"/bin/{name}") == "/bin/clang++"
    assert context.compiler({}, which=lambda name: None) is None


# Inductor -----------------------------------------------------------------------------------------------------------

CONFIG = """
import os
def launcher() -> bool:
    if "TORCHINDUCTOR_LAUNCHER" in os.environ:
        return True
    return False
max_autotune = os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE") == "1"
static: bool = launcher()
plain = 3
class triton:
    cudagraphs = os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1"
if plain:
    split = int(os.environ.get("TORCHINDUCTOR_SPLIT", 0))
"""


def test_which_variables_a_setting_reads() -> None:
    assert context.inductor_variables(CONFIG) == {
        "max_autotune": ("TORCHINDUCTOR_MAX_AUTOTUNE",),
        "static": ("TORCHINDUCTOR_LAUNCHER",),
        "triton.cudagraphs": ("TORCHINDUCTOR_CUDAGRAPHS",),
        "split": ("TORCHINDUCTOR_SPLIT",),
    }


def _inductor(here: dict[str, str], environment: dict[str, str]) -> Context:
    clean = {"max_autotune": "False", "static": "False", "plain": "3"}
    return machine(
        environment=environment,
        inductor_here=Dump({**clean, **here}),
        inductor_clean=Dump(clean),
        inductor_variables=context.inductor_variables(CONFIG),
    )


def test_inductor_names_the_variable_and_reports_it_once() -> None:
    sick = _inductor({"max_autotune": "True"}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_CUDAGRAPHS": "0"})
    named = [finding for finding in run_checks(sick) if "MAX_AUTOTUNE" in finding.what]
    assert [(finding.check, finding.level) for finding in named] == [("inductor", "warn")]
    assert "max_autotune is True, not False, because of TORCHINDUCTOR_MAX_AUTOTUNE=1" in named[0].what
    assert "CUDAGRAPHS" not in named[0].what


def test_inductor_setting_of_an_unknown_variable_is_info() -> None:
    (finding,) = checks.inductor(_inductor({"static": "True"}, {"TORCHINDUCTOR_LAUNCHER": "1"}))
    assert finding.level == "info" and "unset TORCHINDUCTOR_LAUNCHER" in finding.action


def test_inductor_difference_without_a_variable_is_not_blamed_on_one() -> None:
    (finding,) = checks.inductor(_inductor({"plain": "4"}, {"TORCHINDUCTOR_LAUNCHER": "1"}))
    assert "a variable not identified" in finding.what and "LAUNCHER" not in finding.what


def test_inductor_settings_that_cannot_be_read_are_said() -> None:
    broken = replace(machine(), inductor_clean=Dump(failure="ImportError: no torch"))
    (finding,) = checks.inductor(broken)
    assert finding.level == "warn" and "ImportError: no torch" in finding.why


@pytest.mark.slow
def test_inductor_of_this_torch_in_real_processes() -> None:
    """Two processes of this machine: the variable that an image sets is found by what it did, not by its name."""
    import torch

    clean = env.clean_child()
    dirty = context.inductor_settings({**clean, "TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    plain = context.inductor_settings(clean)
    assert not dirty.failure and not plain.failure and len(plain.values) > 100
    source = (context.Path(torch.__file__).parent / "_inductor" / "config.py").read_text()
    sick = machine(
        environment={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
        inductor_here=dirty,
        inductor_clean=plain,
        inductor_variables=context.inductor_variables(source),
    )
    (finding,) = checks.inductor(sick)
    assert "max_autotune is True, not False, because of TORCHINDUCTOR_MAX_AUTOTUNE=1" in finding.what


def test_a_child_that_fails_gives_its_last_line() -> None:
    broken = context.inductor_settings({"PATH": "", "PYTHONHOME": "/nowhere"})
    assert broken.failure and not broken.values


# versions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "release"), [("7.2.1-43\n", "7.2.1"), ("6.4.0\n", "6.4.0"), ("unknown", None), (None, None)]
)
def test_rocm_release(text: str | None, release: str | None) -> None:
    assert context.rocm_release(lambda path: text) == release


def test_kernel_driver() -> None:
    assert context.kernel_driver("amd", {"/sys/module/amdgpu/version": "6.16.13\n"}.get) == "amdgpu 6.16.13"
    assert context.kernel_driver("amd", {}.get) == "amdgpu of the Linux kernel"
    assert context.kernel_driver("nvidia", {"/sys/module/nvidia/version": "580.95\n"}.get) == "nvidia 580.95"
    assert context.kernel_driver("nvidia", {}.get) is None and context.kernel_driver("cpu", {}.get) is None


@pytest.mark.parametrize(
    ("text", "share", "usable"),
    [("200000 100000", "2", 2), ("100000 50000", "2", 2), ("150000 100000", "1.5", 2), ("50000 100000", "0.5", 1)],
)
def test_share_of_a_control_group(text: str, share: str, usable: int) -> None:
    findings = run(checks.processors, device=CPU, files={V2: text}, threads=usable)
    assert [finding.what for finding in findings] == [
        f"this process may use {usable} of 8 processors (a control group grants {share})"
    ]

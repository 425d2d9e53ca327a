"""AMD's silent failures on made-up machines: what is found, what is not, and that each says where it was reported."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_doctor import CPU, GFX, H200, MI300X, machine
from wavecrest.doctor import CHECKS, Context, Finding, context, model, run_checks, silent
from wavecrest.measure.workload import Inputs, Workload

MI350X = replace(MI300X, arch="gfx950", name="AMD Instinct MI350X", compute_units=256)
RADEON = replace(MI300X, arch="gfx1201", name="AMD Radeon RX 9070 XT", compute_units=64)
DOCS = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def said(check: Any, device: Any = MI300X, **facts: Any) -> list[Finding]:
    return list(check(machine(device, **facts)))


def test_the_twenty_have_threads_a_measurement_and_a_check_that_exists() -> None:
    found = silent.failures()
    assert sorted(found) == list(range(1, 21))
    checks = {check.__name__ for check in CHECKS} | {"model", ""}
    page = DOCS.read_text()
    for failure in found.values():
        assert failure.check in checks and failure.what and failure.measure
        assert failure.threads and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in failure.threads)
        # the page has the same row
        named = "" if not failure.check else f"`{failure.check}`"
        row = next(line for line in page.splitlines() if line.startswith(f"| {failure.number} |"))
        for part in (failure.what, named, failure.measure, *failure.threads):
            assert part in row, (failure.number, part)
    # those that doctor looks for are looked for by code that says so
    source = "".join(Path(module.__file__ or "").read_text() for module in (silent, model))
    for failure in found.values():
        if failure.check not in ("", "graph_replay"):
            assert re.search(rf'"{failure.check}", {failure.number},', source), failure.number


@pytest.mark.parametrize("device", [H200, CPU])
def test_other_machines_hear_nothing_of_amd(device: Any) -> None:
    packages = {"aiter": "0.1", "vllm": "0.20", "flashinfer": "0.6", "triton": "3.7.1"}
    environment = {"PYTORCH_TUNABLEOP_ENABLED": "1", "MIOPEN_FIND_MODE": "1"}
    for check in silent.SILENT:
        assert not said(check, device, packages=packages, environment=environment, blas="Cublas")


def table(*rows: str) -> str:
    return "\n".join([GFX, *rows]) + "\n"


def row(arch: str = "gfx942", units: int = 304, m: int = 16, n: int = 8, k: int = 4, bias: bool = False) -> str:
    return f"{arch},{units},{m},{n},{k},{bias},torch.bfloat16,torch.bfloat16,False,False,asm,1,0,5.0,k,0.0,1,1"


def installed(device: Any = MI300X, **tables: str) -> Context:
    files = {f"/a/configs/{name}.csv": text for name, text in tables.items()}
    return machine(device, files=files, packages={"aiter": "0.1.9"}, aiter_tables=tuple(files))


def test_tables_of_the_installed_aiter() -> None:
    here = installed(
        bf16_tuned_gemm=table(row("gfx950", 256), row(units=80)),
        a8w8_tuned_gemm=table(row()),
        x_a8w8_tuned_gemm_llama=table(row(), row("gfx950")),
        a8w8_bpreshuffle_tuned_gemm=table(row()),
        a8w8_blockscale_untuned_gemm=table(row()),
        bf16_tuned_batched_gemm=table(row()),
    )
    missing, there = silent.aiter_tables(here)
    assert missing.level == "warn" and "gfx942 with 304 CUs: 16-bit GEMM (0 of 2)" in missing.what
    assert "8-bit GEMM with block scales (0 of 0)" in missing.what and "ROCm/aiter#5380" in missing.source
    assert there.level == "ok" and there.what.endswith("8-bit GEMM 2; 8-bit GEMM, preshuffled weights 1")
    # an older form has no architecture: any GPU with as many CUs
    old = installed(tuned_fmoe="cu_num,token\n304,1\n80,1\n")
    assert "fused MoE 1" in list(silent.aiter_tables(old))[1].what
    # a file that cannot be read is not there, and without aiter nothing is said
    assert (
        "0 of 0"
        in said(silent.aiter_tables, packages={"aiter": "1"}, aiter_tables=("/gone/bf16_tuned_gemm.csv",))[0].what
    )
    assert not said(silent.aiter_tables)


def test_aiter_on_a_gpu_that_it_has_no_kernels_for() -> None:
    (found,) = silent.aiter_tables(installed(RADEON, bf16_tuned_gemm=table(row())))
    assert found.level == "warn" and "installed on gfx1201" in found.what and "vllm#32180" in found.source


@pytest.mark.parametrize(
    ("packages", "environment", "device", "texts"),
    [
        ({"vllm": "0.20"}, {}, MI300X, ["runs without aiter: VLLM_ROCM_USE_AITER is not set"]),
        ({"vllm": "0.20"}, {"VLLM_ROCM_USE_AITER": "0"}, MI300X, ["VLLM_ROCM_USE_AITER is 0"]),
        ({"vllm": "0.20", "aiter": "1"}, {"VLLM_ROCM_USE_AITER": "1"}, MI300X, []),
        ({"vllm": "0.20"}, {"VLLM_ROCM_USE_AITER": "True"}, MI300X, ["aiter is not installed"]),
        ({"vllm": "0.20", "aiter": "1"}, {"VLLM_ROCM_USE_AITER": "1"}, MI350X, ["picks its attention backend"]),
        (
            {"vllm": "0.20", "aiter": "1"}, {"VLLM_ROCM_USE_AITER": "1", "VLLM_ATTENTION_BACKEND": "X"}, MI350X, [],
        ),
        ({"vllm": "0.20"}, {}, RADEON, []),
        ({"flashinfer-python": "0.6"}, {}, MI300X, ["flashinfer-python 0.6 is installed on an AMD GPU"]),
        ({}, {}, MI300X, []),
    ],
)  # fmt: skip
def test_serving(packages: Any, environment: Any, device: Any, texts: list[str]) -> None:
    found = said(silent.serving, device, packages=packages, environment=environment)
    assert len(found) == len(texts) and all(text in one.what for one, text in zip(found, texts, strict=True))


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [
        ({}, []),
        ({"PYTORCH_TUNABLEOP_ENABLED": "0"}, []),
        ({"PYTORCH_TUNABLEOP_ENABLED": "1"}, ["pytorch/pytorch#159070", "ROCm/rocm-libraries#12226"]),
        ({"PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_TUNING": "0"}, []),
        (
            {"PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_NUMERICAL_CHECK": "1"},
            ["pytorch/pytorch#159070"],
        ),
    ],
)
def test_tunable_op(environment: dict[str, str], numbers: list[str]) -> None:
    found = said(silent.tunable, environment=environment)
    assert [one.source.partition(";")[0] for one in found] == numbers


@pytest.mark.parametrize(
    ("version", "warns"), [("3.6.0", False), ("3.7.1", True), ("3.8.0+rocm", True), ("3.9.0", False), ("13.7.0", False)]
)
def test_a_triton_that_was_reported(version: str, warns: bool) -> None:
    for name in ("triton", "pytorch-triton-rocm"):
        assert bool(said(silent.compilers, packages={name: version})) == warns


def test_the_path_of_attention() -> None:
    fast = {"causal": "FLASH", "with a mask": "EFFICIENT"}
    (found,) = said(silent.attention, sdpa=fast)
    assert found.level == "ok" and "causal: flash, with a mask: efficient" in found.what
    (found,) = said(silent.attention, sdpa=fast | {"with a mask": "MATH"})
    assert found.level == "warn" and found.what.endswith("math path for: with a mask")
    assert "AOTRITON" not in found.action
    (found,) = said(silent.attention, RADEON, sdpa={"causal": "MATH"})
    assert "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" in found.action
    (found,) = said(silent.attention, H200, sdpa={"causal": "MATH"})
    assert found.level == "info"
    assert not said(silent.attention)


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, ""), ({"MIOPEN_FIND_MODE": "5"}, ""), ({"MIOPEN_FIND_MODE": "NORMAL"}, "warn"),
        ({"MIOPEN_FIND_MODE": "2"}, "info"), ({"MIOPEN_FIND_ENFORCE": "4"}, "warn"), ({"MIOPEN_FIND_ENFORCE": "1"}, ""),
    ],
)  # fmt: skip
def test_searches_of_miopen(environment: dict[str, str], level: str) -> None:
    assert "".join(one.level for one in said(silent.convolutions, environment=environment)) == level


def test_library_cold_start_and_memory_nodes() -> None:
    assert said(silent.libraries, blas="Cublas") and not said(silent.libraries, blas="Cublaslt")
    assert not said(silent.libraries, RADEON, blas="Cublas")
    assert said(silent.cold_start, packages={"aiter": "1"})
    assert not said(silent.cold_start, packages={"aiter": "1"}, environment={"AITER_JIT_DIR": "/a"})
    (found,) = said(silent.numa, gpu_node=1, cpu_nodes=(0,))
    assert found.level == "warn" and found.action == "numactl --cpunodebind=1 --membind=1 COMMAND"
    (found,) = said(silent.numa, H200, gpu_node=1, cpu_nodes=(0, 1))
    assert found.level == "info"
    assert not said(silent.numa, gpu_node=1, cpu_nodes=(1,)) and not said(silent.numa, cpu_nodes=(0,))


def test_nodes_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context.nodes_of("0-2,8\n") == {0, 1, 2, 8} and context.nodes_of(None) == context.nodes_of("x") == set()
    files = {
        "/sys/devices/system/node/online": "0-1\n",
        "/sys/devices/system/node/node0/cpulist": "0-3\n",
        "/sys/devices/system/node/node1/cpulist": "4-7\n",
        "/sys/bus/pci/devices/0001:c1:00.0/numa_node": "1\n",
    }
    place = type("Properties", (), {"pci_domain_id": 1, "pci_bus_id": 0xC1, "pci_device_id": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: place)
    assert context.numa_nodes(MI300X, {5, 6}, files.get) == (1, (1,))
    assert context.numa_nodes(MI300X, {3, 4}, files.get) == (1, (0, 1))
    files["/sys/bus/pci/devices/0001:c1:00.0/numa_node"] = "-1\n"
    assert context.numa_nodes(MI300X, {5}, files.get) == (None, (1,))
    files["/sys/devices/system/node/online"] = "0\n"
    assert context.numa_nodes(MI300X, {5}, files.get) == context.numa_nodes(CPU, {5}, files.get) == (None, ())


# a model ------------------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(16, 32, bias=False).bfloat16()
        self.biased = nn.Linear(32, 16).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y = self.biased(self.plain(x))
        q = y.view(1, 2, -1, 8)
        wide = q.float()
        # a mask that a graph of gradients would need is the math path's on a CPU
        nn.functional.scaled_dot_product_attention(wide, wide, wide, dropout_p=0.5)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_a_models_hits_and_misses() -> None:
    made = Workload(
        Attend(), {"two": Inputs((torch.randn(2, 16).bfloat16(),)), "five": Inputs((torch.randn(5, 16).bfloat16(),))}
    )
    seen = model.look(made)
    assert seen.products == {
        (2, 32, 16, "bfloat16", False): 1, (2, 16, 32, "bfloat16", True): 1,
        (5, 32, 16, "bfloat16", False): 1, (5, 16, 32, "bfloat16", True): 1,
    }  # fmt: skip
    assert seen.attention.total() == 4 and {backend for backend, _ in seen.attention} == {"math", "flash"}
    here = installed(bf16_tuned_gemm=table(row(m=16, n=32, k=16), row(m=2, n=16, k=32)))
    missed, slow = [one for one in model.findings(seen, here) if one.level == "warn"]
    # 2 and 5 rows are padded to 16 in its look-up; a row without a bias is not for a call with one
    assert "2 of the model's 4 GEMM shapes have a tuned row" in missed.what
    assert "without one: 5 × 16 × 32 bfloat16 with bias; 2 × 16 × 32 bfloat16 with bias" in missed.what
    assert "2 of the model's 4 SDPA calls take the math path" in slow.what and "float32" in slow.what
    whole = installed(bf16_tuned_gemm=table(row(m=16, n=32, k=16), row(m=16, n=16, k=32, bias=True)))
    assert next(model.findings(seen, whole)).what.startswith("4 of the model's 4 GEMM shapes")
    broken = installed(bf16_tuned_gemm="a,b\n1,2\n")
    assert "cannot be read" in next(model.findings(seen, broken)).what
    assert [one.level for one in model.findings(seen, machine(CPU))] == ["info"]


@pytest.mark.parametrize(
    ("device", "dtypes", "levels"),
    [
        (MI300X, ["float8_e4m3fn"], ["problem"]), (MI300X, ["float8_e4m3fnuz"], []),
        (MI350X, ["float8_e4m3fnuz"], ["problem"]), (MI350X, ["float8_e4m3fn"], []),
        (replace(MI300X, arch="gfx90a"), ["float8_e4m3fn"], ["warn"]), (CPU, ["float8_e4m3fn"], []),
        (MI300X, ["float8_e8m0fnu"], ["warn"]), (MI350X, ["float8_e8m0fnu"], []), (MI300X, ["float8_e5m2"], []),
    ],
)  # fmt: skip
def test_8_bit_floats_of_another_gpu(device: Any, dtypes: list[str], levels: list[str]) -> None:
    holder = nn.Module()
    for place, name in enumerate(dtypes):
        holder.register_buffer(f"b{place}", torch.zeros(2, dtype=getattr(torch, name)))
    seen = model.Seen()
    model._floats(holder, seen.floats)
    assert [one.level for one in model.findings(seen, machine(device))] == levels


def test_findings_come_with_the_rest_in_order() -> None:
    found = run_checks(installed(bf16_tuned_gemm=table(row("gfx950"))))
    assert [one.check for one in found if one.level == "warn"] == ["aiter_tables"]

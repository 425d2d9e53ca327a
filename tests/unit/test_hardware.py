"""Which GPU is here, with a made-up torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wavecrest import hardware
from wavecrest.errors import EnvironmentProblem, InvalidArgument
from wavecrest.hardware import memory


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> object:
    def install(*, hip: str | None, count: int = 1, gcn: str = "", capability: tuple[int, int] = (9, 0)) -> None:
        properties = SimpleNamespace(
            name="some product name", gcnArchName=gcn, multi_processor_count=304, total_memory=206_158_430_208
        )
        if hip is None:
            del properties.gcnArchName
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)

    return install


@pytest.mark.parametrize(
    "environment",
    [{}, {"ROCM_PATH": "/nowhere"}, {"CUDA_HOME": "/usr/local/cuda"}, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}],
    ids=["none", "rocm-path", "cuda-home", "override"],
)
def test_amd_is_known_by_hip_and_gcn_arch_alone(gpu, monkeypatch: pytest.MonkeyPatch, environment) -> None:  # type: ignore[no-untyped-def]
    for name in ("ROCM_PATH", "CUDA_HOME", "HSA_OVERRIDE_GFX_VERSION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    gpu(hip="7.1.25424", gcn="gfx942:sramecc+:xnack-")
    device = hardware.detect()
    assert (device.arch, device.vendor, device.torch_name) == ("gfx942", "amd", "cuda:0")
    assert device.compute_units == 304 and device.memory_bytes == 206_158_430_208
    assert device.driver == "hip 7.1.25424"
    assert device.known is hardware.ARCHS["gfx942"]
    assert device.known.wave_size == 64 and device.known.lds_kib == 64 and device.known.fp8 == "e4m3fnuz"


@pytest.mark.parametrize(
    ("name", "arch"),
    [("gfx90a:sramecc+:xnack-", "gfx90a"), ("gfx1100", "gfx1100"), ("gfx950:sramecc+", "gfx950")],
)
def test_features_are_cut_off_the_arch(name: str, arch: str) -> None:
    assert hardware.base_arch(name) == arch


def test_unknown_amd_arch_is_amd_without_a_record(gpu) -> None:  # type: ignore[no-untyped-def]
    gpu(hip="7.1", gcn="gfx1030")
    device = hardware.detect()
    assert device.vendor == "amd" and device.known is None


def test_nvidia_by_capability(gpu) -> None:  # type: ignore[no-untyped-def]
    gpu(hip=None, capability=(10, 0))
    device = hardware.detect("cuda:0")
    assert (device.arch, device.vendor, device.driver) == ("sm_100", "nvidia", "cuda 13.0")


@pytest.mark.parametrize("name", ["hip", "hip:0", "cuda", "cuda:0"])
def test_names_of_an_amd_device(gpu, name: str) -> None:  # type: ignore[no-untyped-def]
    gpu(hip="7.1", gcn="gfx942")
    assert hardware.detect(name).torch_name == "cuda:0"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:0", "rocm", "", "cuda:-1"])
def test_bad_names_are_refused(gpu, name: str) -> None:  # type: ignore[no-untyped-def]
    gpu(hip="7.1", gcn="gfx942")
    with pytest.raises(InvalidArgument, match="use cpu, cuda"):
        hardware.detect(name)


def test_a_device_that_is_not_here(gpu) -> None:  # type: ignore[no-untyped-def]
    gpu(hip="7.1", gcn="gfx942", count=1)
    with pytest.raises(EnvironmentProblem, match=r"cuda:1 is not here.*sees 1 GPU"):
        hardware.detect("cuda:1")
    gpu(hip=None, count=0)
    with pytest.raises(EnvironmentProblem, match="sees 0 GPUs"):
        hardware.detect("cuda")


def test_hip_asked_of_a_cuda_build(gpu) -> None:  # type: ignore[no-untyped-def]
    gpu(hip=None)
    with pytest.raises(EnvironmentProblem, match="CUDA build"):
        hardware.detect("hip")


def test_no_gpu_means_the_cpu(gpu) -> None:  # type: ignore[no-untyped-def]
    gpu(hip=None, count=0)
    device = hardware.detect()
    assert (device.kind, device.vendor, device.torch_name, device.known) == ("cpu", "cpu", "cpu", None)
    assert device.compute_units >= 1 and device.memory_bytes > 0


@pytest.mark.parametrize("arch", hardware.ARCHS.values(), ids=lambda arch: arch.name)
def test_arch_records_are_plausible(arch: hardware.Arch) -> None:
    assert arch.wave_size == (64 if arch.name.startswith("gfx9") else 32)
    assert arch.vendor == ("amd" if arch.name.startswith("gfx") else "nvidia")
    assert (arch.peak_fp8 is None) == (arch.fp8 is None)
    assert arch.peak("float32") < arch.peak("bfloat16") == arch.peak("float16")
    if arch.peak_fp8 is not None:
        assert arch.peak("float8_e4m3fn") > arch.peak("bfloat16")
    assert 16 <= arch.lds_kib <= 256 and arch.compute_units > 0 and arch.bandwidth > 100


# vendor datasheets: GB/s, then dense TFLOP/s of float32, 16-bit floats, 8-bit floats, and Top/s of int8
# (AMD Instinct MI250X, of which one GCD is half; MI300X; MI355X; Radeon RX 7900 XTX; 8060S of a Ryzen AI Max+ 395;
# RX 9070 XT; NVIDIA A100 80GB;
# H200 and B200, whose sheets give twice as much, with sparsity)
DATASHEETS = {
    "gfx90a": (3276 / 2, 95.7 / 2, 383 / 2, None, 383 / 2),
    "gfx942": (5300, 163.4, 1307.4, 2614.9, 2614.9),
    "gfx950": (8000, 157.3, 2516.6, 5033.2, 5033.2),
    "gfx1100": (960, 61.4, 122.8, None, 122.8),
    "gfx1151": (256, 29.7, 59.4, None, 59.4),
    "gfx1201": (640, 48.7, 195, 389, 389),
    "sm_80": (2039, 19.5, 312, None, 624),
    "sm_90": (4800, 67, 1979 / 2, 3958 / 2, 3958 / 2),
    "sm_100": (8000, 80, 4500 / 2, 9000 / 2, 9000 / 2),
}
# bits of the memory bus, Gbit/s a pin; operations a clock and compute unit for 16-bit floats
MADE_OF = {
    "gfx90a": (4096, 3.2, 1024),
    "gfx942": (8192, 5.2, 2048),
    "gfx950": (8192, 8.0, 4096),
    "gfx1100": (384, 20.0, 512),
    "gfx1151": (256, 8.0, 512),
    "gfx1201": (256, 20.0, 1024),
    "sm_80": (5120, 3.186, 2048),
    "sm_90": (6144, 6.25, 4096),
    "sm_100": (8192, 8.0, 8192),
}


@pytest.mark.parametrize("name", hardware.ARCHS)
def test_peaks_are_those_of_the_datasheets(name: str) -> None:
    arch = hardware.ARCHS[name]
    found = (arch.bandwidth, arch.peak_fp32, arch.peak_16bit, arch.peak_fp8, arch.peak_int8)
    for value, wanted in zip(found, DATASHEETS[name], strict=True):
        assert value == (None if wanted is None else pytest.approx(wanted, rel=0.0015))
    assert arch.source == ("AMD datasheet" if arch.vendor == "amd" else "NVIDIA datasheet")


@pytest.mark.parametrize("name", hardware.ARCHS)
def test_peaks_follow_from_what_the_part_is_made_of(name: str) -> None:
    arch = hardware.ARCHS[name]
    bits, gigabits, operations = MADE_OF[name]
    # datasheets round 5.3 and 8 TB/s down
    assert arch.bandwidth == pytest.approx(bits * gigabits / 8, rel=0.025)
    assert arch.peak_16bit == pytest.approx(arch.compute_units * arch.clock * operations / 1000, rel=0.003)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:       5 kB\n", 5 << 10),
        ("MemTotal: 9 kB\nMemFree: 1 kB\n", 3 << 12),
        ("MemAvailable: many\n", 3 << 12),
        (None, 3 << 12),
    ],
)
def test_files_in_memory_count_as_free(
    text: str | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    if text is not None:
        meminfo.write_text(text)
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 1 << 12}.get)
    assert hardware.free_host_memory() == found


def test_what_onednn_multiplies_here(monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.backends.mkldnn.is_available()
    assert hardware.onednn_multiplies(torch.float32) == there and not hardware.onednn_multiplies(torch.float64)
    if hardware.onednn_multiplies(torch.bfloat16):
        one = torch.ones(2, 2, dtype=torch.bfloat16)
        assert torch.ops.mkldnn._linear_pointwise(one, one, None, "none", [], "").tolist() == [[2, 2], [2, 2]]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not hardware.onednn_multiplies(torch.float32) and not hardware.onednn_multiplies(torch.bfloat16)

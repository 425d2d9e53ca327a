"""The space of the convolution's kernel: within the limits of every architecture; nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.tuned import LAUNCH_OPTIONS, Config
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._conv2d import config as configs
from wavecrest.ops._conv2d.backend import op as conv2d_op
from wavecrest.ops._conv2d.call import Conv2dCall
from wavecrest.ops._conv2d.study.cases import bench_cases

F16, F32 = torch.float16, torch.float32
TRITON = conv2d_op.study.kernel("triton")


def meta_call(
    x: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype = F16, last: bool = False, **options: Any
) -> Conv2dCall:
    layout = torch.channels_last if last else torch.contiguous_format
    made = (torch.empty(shape, dtype=dtype, device="meta", memory_format=layout) for shape in (x, weight))
    return Conv2dCall(*made, **options)


BENCHED = {name: make() for name, make in bench_cases("shared", "meta").items()}
ODD = {
    "7x7 stride 2 C=3": meta_call((32, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3),
    "7x7 stride 2 C=3 last": meta_call((32, 3, 224, 224), (64, 3, 7, 7), last=True, stride=2, padding=3),
    "depthwise": meta_call((32, 144, 56, 56), (144, 1, 3, 3), padding=1, groups=144),
    "groups": meta_call((32, 512, 14, 14), (512, 16, 3, 3), last=True, padding=1, groups=32),
    "two groups": meta_call((8, 256, 28, 28), (512, 128, 3, 3), last=True, padding=1, groups=2),
    "1x1": meta_call((32, 256, 56, 56), (64, 256, 1, 1), last=True),
    "1x1 of few channels": meta_call((32, 5, 56, 56), (64, 5, 1, 1)),
    "float32": meta_call((8, 64, 56, 56), (64, 64, 3, 3), F32, last=True, padding=1),
    "float32 C=3": meta_call((8, 3, 56, 56), (20, 3, 3, 3), F32, padding=1),
    "one output": meta_call((32, 64, 56, 56), (1, 64, 3, 3), last=True, padding=1),
    "24 outputs": meta_call((32, 64, 56, 56), (24, 64, 3, 3), last=True, padding=1),
    "40 channels": meta_call((1, 40, 9, 9), (72, 40, 3, 3), padding=1),
    "one pixel": meta_call((1, 512, 1, 1), (1000, 512, 1, 1)),
}
CALLS = BENCHED | ODD


def shape_of(call: Conv2dCall) -> configs.Shape:
    """As the op should have it: rows by bucket, outputs and channels of one group."""
    outputs, channels, taps_r, taps_s = call.weight.shape
    bits = 8 * call.x.dtype.itemsize
    rows = row_bucket(call.M)
    return configs.Shape(rows, outputs // call.groups, channels, taps_r * taps_s, call.groups, bits)


def tried(call: Conv2dCall, arch: Arch) -> list[Config]:
    """The configurations of the backend's space, the default among them."""
    assert TRITON.space is not None
    return list(TRITON.space(conv2d_op.key(call), arch))


def spaces(arch: Arch) -> Iterator[tuple[str, Conv2dCall, list[Config]]]:
    for name, call in CALLS.items():
        conv2d_op.check(call)
        yield name, call, tried(call, arch)


def within_limits(where: str, config: Config, call: Conv2dCall, arch: Arch) -> None:
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    lanes = config["num_warps"] * arch.wave_size
    for size in (m, n, k):
        assert size >= 16 and size & (size - 1) == 0, f"{where}: {size} is no power of two of at least 16"
    assert lanes <= 1024, f"{where}: threads"
    # the tiles of every stage, both operands; on AMD those that are multiplied are in registers
    step = (m + n) * k * call.x.dtype.itemsize
    kept = config["num_stages"] - (arch.vendor == "amd")
    assert kept * step <= arch.lds_kib * 1024, f"{where}: shared memory"
    assert m * n / lanes <= 128, f"{where}: registers"
    # the next smaller tile, or step, would not hold all there is
    assert n == 16 or n // 2 < call.N, f"{where}: wider than the outputs"
    along = call.K if config["FLAT"] else call.channels
    assert k == 16 or k // 2 < along, f"{where}: longer than the channels"
    assert config.get("matrix_instr_nonkdim", 16) <= min(m, n), f"{where}: the instruction is larger than the tile"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_every_configuration_is_within_the_limits(arch: Arch) -> None:
    checked = 0
    for name, call, (first, *others) in spaces(arch):
        assert first == configs.default(shape_of(call), arch), name
        assert len({first, *others}) == 1 + len(others), f"{name}: twice the same"
        for config in (first, *others):
            where = f"{name}, {arch.name}: {config}"
            within_limits(where, config, call, arch)
            # a measured row with other parameters than the default's is one that dispatch does not take
            assert set(config) == set(first) and config["FLAT"] == first["FLAT"], where
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_there_is_something_to_try(arch: Arch) -> None:
    for name, call in BENCHED.items():
        _, *others = tried(call, arch)
        # K of 3 · 9 is one step of 32, of which waves of 64 have two tiles
        least = 2 if call.channels < 8 and arch.wave_size == 64 else 3
        assert least <= len(others) <= 40, f"{name}: {len(others)}"
    if arch.wave_size == 64 or arch.vendor == "nvidia":
        _, *others = tried(BENCHED["b32c256hw28o512 nhwc"], arch)
        tiles = {(config["BLOCK_M"], config["BLOCK_N"]) for config in others}
        assert {(64, 64), (128, 64), (64, 128), (128, 256)} <= tiles
        assert {config["BLOCK_K"] for config in others} >= {32, 64} and {c["GROUP_M"] for c in others} == {1, 8}
        assert {config["num_warps"] for config in others} == {4, 8}


def test_the_groups_of_a_convolution_are_its_shape() -> None:
    """Outputs and channels of all groups together would allow tiles that one group does not fill."""
    arch = ARCHS["sm_90"]
    for name, wide, long in (("groups", 16, 16), ("depthwise", 16, 16), ("two groups", 256, 128)):
        found = tried(ODD[name], arch)
        assert max(config["BLOCK_N"] for config in found) == wide, name
        assert max(config["BLOCK_K"] for config in found) == long, name
    assert {config["FLAT"] for config in tried(ODD["depthwise"], arch)} == {1}
    assert {config["FLAT"] for config in tried(ODD["1x1 of few channels"], arch)} == {0}


def test_shared_memory_that_just_holds_a_configuration() -> None:
    call, largest = BENCHED["b32c256hw28o512 nhwc"], (128, 256, 64, 3)

    def sizes(arch: Arch) -> set[tuple[int, ...]]:
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages")
        return {tuple(config[name] for name in names) for config in tried(call, arch)}

    needed = 3 * (128 + 256) * 64 * 2 // 1024
    assert largest in sizes(replace(ARCHS["sm_90"], lds_kib=needed))
    less = sizes(replace(ARCHS["sm_90"], lds_kib=needed - 1))
    assert largest not in less and (64, 128, 64, 4) in less
    # of two stages gfx942 holds one
    assert (256, 128, 64, 2) in sizes(ARCHS["gfx942"])
    assert (256, 128, 64, 2) not in sizes(replace(ARCHS["gfx942"], lds_kib=47))


def test_half_the_lanes_hold_half_the_sums() -> None:
    """No architecture there is has too few registers for a tile of the list; one with waves of 16 would."""
    call, arch = BENCHED["b32c256hw28o512 nhwc"], replace(ARCHS["sm_90"], wave_size=16)
    found = tried(call, arch)
    for config in found:
        within_limits(repr(config), config, call, arch)
    dropped = {config for config in tried(call, ARCHS["sm_90"]) if config not in found}
    assert {(config["BLOCK_M"], config["BLOCK_N"]) for config in dropped} >= {(128, 256), (256, 128)}
    assert (128, 64, 4) in {(c["BLOCK_M"], c["BLOCK_N"], c["num_warps"]) for c in found}


def test_a_type_of_32_bits_has_tiles_of_its_own() -> None:
    for arch in ARCHS.values():
        _, *others = tried(ODD["float32"], arch)
        assert others and {config["BLOCK_K"] for config in others} == {32}, arch.name
        assert max(config["BLOCK_M"] * config["BLOCK_N"] for config in others) == 128 * 64, arch.name


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
def test_a_launch_has_its_configuration(arch: str) -> None:
    assert TRITON.launches is not None
    for name, call in CALLS.items():
        for config in tried(call, ARCHS[arch]):
            (made,) = TRITON.launches(call, config, ARCHS[arch])
            options = made.options()
            assert {key: options[key] for key in config} == config.kwargs, name
            assert set(options) - set(made.constants) - set(LAUNCH_OPTIONS) == {
                "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "FLAT",
            }  # fmt: skip
            tiles = -(-call.M // config["BLOCK_M"]) * -(-call.N // config["BLOCK_N"])
            assert made.grid == (tiles * call.groups,), name
            unit = call.K if config["FLAT"] else call.channels
            assert made.constants["EVEN_K"] == (unit % config["BLOCK_K"] == 0), name
            assert made.constants["CHANNELS_LAST"] == call.channels_last, name
            assert made.constants["XCDS"] == (8 if arch == "gfx942" else 1)
            # what kernels are told apart by: the result is of x's type
            assert [value.dtype for value in made.args[:4]] == [call.x.dtype] * 4


def test_no_images_launch_nothing() -> None:
    assert TRITON.launches is not None
    call = meta_call((0, 16, 8, 8), (16, 16, 3, 3))
    (config, *_) = tried(call, ARCHS["sm_90"])
    assert TRITON.launches(call, config, ARCHS["sm_90"]) == []

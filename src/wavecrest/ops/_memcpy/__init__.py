"""The bandwidth test: copy a tensor, read it, or write one, with as many workgroups as asked for.

Each mode gives something that can be checked, so that no access can be left out: a copy, the sum of all 32-bit words
(an integer, the same in any order), a filled tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest import hardware
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.keys import m_bucket, needs_grad
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.dispatch.tuned.cost_model import propose
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops.common.device import column_mask
from wavecrest.ops.common.triton import tl, triton

MODES = ("copy", "read", "write")
# what one thread moves at once: sizes are multiples of it
UNIT_BYTES = 16
WORD_BYTES = 4
# far more than any device runs at once; tile numbers, which go up in steps of it, stay below 2³¹
MAX_PROGRAMS = 1 << 20


def _bytes(x: Tensor) -> int:
    # Dynamo does not trace `nbytes` of a tensor whose size it does not know
    return x.numel() * x.element_size()


def _check(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> None:
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.dtype.is_complex:
        found = f"{x.dtype} ({x.layout})" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidArgument(f"memcpy: takes a dense tensor that is not complex, got {found}")
    if not x.is_contiguous():
        raise InvalidArgument(f"memcpy: takes a contiguous tensor, got strides {x.stride()} of {list(x.shape)}")
    if _bytes(x) % UNIT_BYTES != 0:
        raise InvalidArgument(f"memcpy: takes multiples of {UNIT_BYTES} bytes, got {_bytes(x)}")
    if mode not in MODES:
        raise InvalidArgument(f"memcpy: mode is copy, read or write, not {mode!r}")
    # True is an int too
    if programs is not None and (type(programs) is not int or not 1 <= programs <= MAX_PROGRAMS):
        raise InvalidArgument(f"memcpy: programs is None or a number from 1 to {MAX_PROGRAMS:,}, not {programs!r}")
    if type(value) is not int or not -(1 << 31) <= value < 1 << 32:
        raise InvalidArgument(f"memcpy: value is a 32-bit pattern, not {value!r}")
    if value != 0 and mode != "write":
        raise InvalidArgument(f"memcpy: value is what mode write fills with; mode {mode} has no use for it")


def _words(x: Tensor) -> Tensor:
    """The 32-bit words of a tensor, as a view.

    Raises:
        InvalidArgument: it starts inside a word.
    """
    # Dynamo does not trace the offset; there it is the view that refuses
    if not torch.compiler.is_compiling() and x.storage_offset() * x.element_size() % WORD_BYTES != 0:
        raise InvalidArgument(f"memcpy: x starts at element {x.storage_offset()} of its storage, inside a 32-bit word")
    return x.detach().view(-1).view(torch.int32)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _reference(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Tensor:
    if mode == "copy":
        return x.clone()
    words = _words(x)
    if mode == "read":
        return words.sum(dtype=torch.int64)
    filled = torch.empty_like(x)
    _words(filled).fill_(_signed(value))
    return filled


KEY_FIELDS = ("blocks_4k", "mode", "programs", "device", "grad")


def _key(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Key:
    return (m_bucket((_bytes(x) + 4095) // 4096), mode, programs, x.device.type, needs_grad(x))


def _cost(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Cost:
    words = _bytes(x) // WORD_BYTES
    return Cost(flops=words if mode == "read" else 0, bytes=_bytes(x) * (2 if mode == "copy" else 1))


def _inputs(M: int, N: int, dtype: torch.dtype, device: str) -> tuple[Tensor]:
    """[M, N], which must be a multiple of 16 bytes."""
    return (torch.randn(M, N, dtype=dtype, device=device),)


def _bench_cases(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Every mode at 1 MiB, and but for the quick suite at 64 MiB and 1 GiB, and by more and more workgroups."""
    mebibytes = (1,) if suite == "quick" else (1, 64, 1024)

    def make(size: int, mode: str, programs: int | None = None) -> tuple[Any, ...]:
        # random, as zeros can move faster than data
        return torch.randn(size << 19, dtype=torch.bfloat16, device=device), mode, programs

    cases: dict[str, Callable[[], tuple[Any, ...]]]
    cases = {f"{mode} {size} MiB": partial(make, size, mode) for size in mebibytes for mode in MODES}
    if suite != "quick":
        units = hardware.detect(device).compute_units
        for each in (1, 2, 4, 8, 16):
            cases[f"copy 1024 MiB programs={each * units}"] = partial(make, 1024, "copy", each * units)
    return cases


def _emulate_cases(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Every mode, also by fewer workgroups than there are tiles."""
    return {
        f"{mode} programs={programs}": lambda mode=mode, programs=programs: (  # type: ignore[misc]
            torch.randint(-(1 << 20), 1 << 20, (3, 6000), dtype=torch.int32),
            mode,
            programs,
        )
        for mode in MODES
        for programs in (None, 2)
    }


def _default_config(key: Key) -> Config:
    return _config(_target.wave_size())


def _config(wave: int) -> Config:
    """16 KiB a tile and 256 threads: four 16-byte accesses a thread in flight. Reasoned, not swept."""
    return Config(BLOCK=4096, num_warps=256 // wave)


# words of a tile and threads that `wavecrest tune memcpy` tries
_SPACE = (
    (512, 128), (1024, 64), (1024, 128), (1024, 256), (2048, 64), (2048, 128), (2048, 256), (4096, 128), (4096, 512),
    (8192, 256), (8192, 512), (16384, 512), (16384, 1024),
)  # fmt: skip


def _space(key: Key, arch: Arch) -> Iterator[Config]:
    yield _config(arch.wave_size)
    for block, threads in _SPACE:
        yield Config(BLOCK=block, num_warps=threads // arch.wave_size)


def _work_of(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """For the cost model; sums of what is read go to one address."""
    blocks, mode, programs, *_ = key
    if blocks == 0:
        return ()
    tile, size = config["BLOCK"] * WORD_BYTES, blocks * 4096
    tiles = _layout.ceil_div(size, tile)
    at_once = min(tiles, programs or tiles)
    steps = _layout.ceil_div(tiles, at_once)
    read, written = (tile if mode != "write" else 0), (tile if mode != "read" else 0)
    registers = 2 * config["BLOCK"] / (config["num_warps"] * arch.wave_size)
    return (
        _work.moved(
            config, at_once, read, steps * written, registers=registers, steps=steps, fresh=size if read else 0,
            atomics=0 if written else 1,
        ),
    )  # fmt: skip


@triton.jit
def _move_tile(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, tile, N, value, READS: tl.constexpr, WRITES: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """One tile; its words, 0 past the end where they were read."""
    # int64: words pass 2³¹ at 8 GiB
    offs = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column_mask(offs, N, BLOCK, EVEN)
    words = tl.load(x_ptr + offs, mask=mask, other=0) if READS else tl.full([BLOCK], 0, tl.int32) + value
    if WRITES:
        tl.store(y_ptr + offs, words, mask=mask)
    return words


@triton.jit(do_not_specialize=["units", "tiles", "programs", "value"])
def _memcpy_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    units,
    tiles,
    programs,
    value,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    LOOP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # the size comes in units of 16 bytes, which tells the compiler that a masked access is still 16 bytes wide
    N = tl.cast(units, tl.int64) * 4
    program = tl.program_id(0)
    words = tl.full([BLOCK], 0, tl.int64)
    if LOOP:
        for tile in range(program, tiles, programs):
            words += _move_tile(x_ptr, y_ptr, tile, N, value, READS, WRITES, EVEN, BLOCK).to(tl.int64)
    else:
        words += _move_tile(x_ptr, y_ptr, program, N, value, READS, WRITES, EVEN, BLOCK).to(tl.int64)
    if not WRITES:
        # integers: the sum is the same in whatever order the programs come
        tl.atomic_add(y_ptr, tl.sum(words, axis=0), sem="relaxed")


def _launch(x: Tensor, y: Tensor, mode: str, programs: int | None, value: int, config: Config) -> _launcher.Launch:
    """x and y by their words."""
    words = x.numel()
    tiles = (words + config["BLOCK"] - 1) // config["BLOCK"]
    return _launcher.Launch(
        _memcpy_kernel,
        (tiles if programs is None else programs,),
        (x, y, words // (UNIT_BYTES // WORD_BYTES), tiles, programs or 1, _signed(value)),
        {
            "READS": mode != "write",
            "WRITES": mode != "read",
            "LOOP": programs is not None,
            "EVEN": words % config["BLOCK"] == 0,
        },
        config,
    )


def _launches(
    x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0, *, config: Config, arch: Arch
) -> list[_launcher.Launch]:
    words = _words(x)
    y = torch.empty((), dtype=torch.int64, device=x.device) if mode == "read" else words
    return [_launch(words, y, mode, programs, value, config)] if x.numel() > 0 else []


def _bind(
    x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0, *, config: Config
) -> Callable[..., Tensor]:
    words = _words(x)
    made = _launch(words, words, mode, programs, value, config)
    start, sizes = _launcher.starter(made, x.device), made.args[2:]

    def call(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Tensor:
        words = _words(x)
        if mode == "read":
            total = torch.zeros((), dtype=torch.int64, device=x.device)
            if x.numel() > 0:
                start(words, total, *sizes)
            return total
        y = torch.empty_like(x)
        if x.numel() > 0:
            start(words, _words(y), *sizes)
        return y

    return call


def _declines(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> str | None:
    # to the kernel all dtypes are words
    return _checks.kernel_refusal("float32", x.device.type, 1, needs_grad(x))


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    cases = {}
    made = config or _config(arch.wave_size)
    for mode in MODES:
        for label, words, programs in (("", 1 << 20, None), (" ragged", 1020, None), (" programs", 1 << 20, 304)):
            x = torch.empty(words, dtype=torch.int32, device="meta")
            y = torch.empty((), dtype=torch.int64, device="meta") if mode == "read" else x
            cases[mode + label] = _launch(x, y, mode, programs, 0, made)
    return cases


_op = LegacyOp(
    "memcpy",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=KEY_FIELDS,
    key_sizes=("blocks_4k",),
    inputs=_inputs,
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
    bench_cases=_bench_cases,
    emulate_cases=_emulate_cases,
)
_launcher.attach_kernel(_op, _bind, _declines, space=_space, launches=_launches, work=_work_of)
_op.modelled(propose)


def memcpy(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Tensor:
    """Move the bytes of a tensor through the memory of its device once: to measure bandwidth, not to save a line.

    Args:
        x: contiguous, of any dtype but complex, a multiple of 16 bytes.
        mode: "copy" reads and writes; "read" only reads, "write" only writes (x gives shape, dtype and device).
        programs: workgroups of the Triton kernel, each of which takes every `programs`-th tile; None: one a tile.
            The result does not depend on it.
        value: the 32-bit pattern that "write" fills with, 0 to 2³² − 1 or as a signed number; 0 in other modes.

    Returns:
        "copy": a tensor equal to x, bit by bit. "read": the sum of x's 32-bit words, each as a signed number, as an
        int64 tensor [] (modulo 2⁶⁴). "write": a tensor like x, each of its 32-bit words `value`.

    Raises:
        InvalidArgument: an argument is outside this, or x starts inside a 32-bit word of its storage.
    """
    result: Tensor = _op(x, mode, programs, value)
    return result

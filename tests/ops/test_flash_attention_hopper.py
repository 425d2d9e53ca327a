"""sm_90's kernels of attention: on that GPU, and their text on the CPU (`tests/gluon.py`), which it has no interpreter
for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import gluon
from tests.ops.attention_harness import (
    CASES,
    HEADS,
    assert_attends,
    assert_lse,
    assert_within,
    by_reference,
    lost_to_subnormals,
    option,
    tensors,
)
from tests.ops.op_harness import name, random
from wavecrest import hardware
from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention import config as configs
from wavecrest.ops._flash_attention import kernel_hopper as roles_kernel
from wavecrest.ops._flash_attention import kernel_hopper_group as group_kernel
from wavecrest.ops._flash_attention import launch_hopper as roles_launch
from wavecrest.ops._flash_attention import launch_hopper_group as group_launch
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall, key_of
from wavecrest.ops._flash_attention.study.space import space_hopper_group_of, space_hopper_of
from wavecrest.ops.common import launcher as _launcher
from wavecrest.ops.common import triton as _triton

# cases that they take: all without a bias
TAKEN = [one for one in CASES if "bias" not in one and one != "everything"]
# the head_dims that each is tested with
WIDTHS = {"triton_hopper": (16, 40, 64, 80, 96, 128, 192, 256), "triton_hopper_group": (32, 64, 96, 128)}
each_kernel = pytest.mark.parametrize("backend", WIDTHS)
each_width = pytest.mark.parametrize(("backend", "d"), [(one, d) for one, widths in WIDTHS.items() for d in widths])
KERNELS = {
    "triton_hopper": roles_kernel._hopper_attention_kernel,
    "triton_hopper_group": group_kernel._hopper_group_attention_kernel,
}


@pytest.fixture
def hopper() -> Op:
    if hardware.detect().arch != "sm_90":
        pytest.skip(f"is for sm_90; this is {hardware.detect().arch}")
    return op


@pytest.mark.gpu
@each_width
@pytest.mark.parametrize("key", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_hopper(dtype: torch.dtype, key: str, backend: str, d: int, hopper: Op) -> None:
    """Lengths that fill no tile, fill it, and are of one row; more tiles than programs; heads that share keys."""
    for batch, queries, keys in (
        (2, 300, 533),
        (2, 533, 300),
        (2, 1, 200),
        (1, 256, 256),
        (3, 1000, 1),
        (20, 1000, 1000),
    ):
        q, k, v = tensors(batch, queries, keys, HEADS, 2, d, dtype=dtype, device="cuda")
        assert_attends(backend, FlashAttentionCall(q, k, v, **option(key, queries, keys, "cuda", batch)))


@pytest.mark.gpu
@each_width
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_hopper_configurations(causal: bool, backend: str, d: int, hopper: Op) -> None:
    call = FlashAttentionCall(*tensors(4, 700, 900, 8, 2, d, dtype=torch.bfloat16, device="cuda"), causal=causal)
    want, space = by_reference(call), hopper.study.kernel(backend).space
    assert space is not None
    for config in space(hopper.key(call), ARCHS["sm_90"]):
        assert_attends(backend, call, config, want)


@pytest.mark.gpu
@each_kernel
@pytest.mark.parametrize("key", CASES)
def test_hopper_says_what_it_does_not_take(key: str, backend: str, hopper: Op) -> None:
    call = FlashAttentionCall(
        *tensors(2, 100, 130, HEADS, 2, 64, dtype=torch.bfloat16, device="cuda"), **option(key, 100, 130, "cuda")
    )
    taken = key in TAKEN
    assert (hopper.backends[backend].refuse(call) is None) == taken
    if taken:
        assert_attends(backend, call)
    else:
        with pytest.raises(Unsupported, match="does not know"):
            hopper.run(backend, call)


@pytest.mark.gpu
@each_kernel
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_hopper_strides(layout: str, backend: str, hopper: Op) -> None:
    """Views into one projection, in a sea of NaN; an odd address, which the portable kernel takes."""
    sea = torch.full((2, 350, 3, HEADS, 72), math.nan, dtype=torch.float16, device="cuda")
    views = [sea[:, 20:320, i, :, :64] for i in range(3)]
    for seed, one in enumerate(views):
        one.copy_(random(tuple(one.shape), torch.float16, "cuda", seed))
    given = [one.transpose(1, 2) for one in views] if layout == "bhsd" else views
    assert_attends(backend, FlashAttentionCall(*given, layout=layout, causal=True))
    odd = torch.empty(2 * 300 * HEADS * 64 + 1, dtype=torch.float16, device="cuda")[1:].view(2, 300, HEADS, 64)
    odd.copy_(views[0])
    _launcher.replaced.cache_clear()
    with pytest.warns(PortableKernel, match="flash_attention: "):
        assert_attends(backend, FlashAttentionCall(odd, *views[1:], causal=True))
    expanded = views[1][:, :, :1].expand(2, 300, HEADS, 64)
    with pytest.raises(Unsupported, match="not 0"):
        hopper.run(backend, FlashAttentionCall(views[0], expanded, views[2]))


@pytest.mark.gpu
@each_kernel
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_hopper_has_the_same_bits_alone_and_together(causal: bool, backend: str, hopper: Op) -> None:
    q, k, v = tensors(9, 700, 700, HEADS, 2, 128, dtype=torch.bfloat16, device="cuda")
    together = hopper.run(backend, FlashAttentionCall(q, k, v, causal=causal))
    for _ in range(3):
        assert torch.equal(hopper.run(backend, FlashAttentionCall(q, k, v, causal=causal)), together)
    for one in (0, 4, 8):
        alone = hopper.run(
            backend, FlashAttentionCall(q[one : one + 1], k[one : one + 1], v[one : one + 1], causal=causal)
        )
        assert torch.equal(alone, together[one : one + 1])


@pytest.mark.gpu
@each_kernel
def test_hopper_replays_in_a_cuda_graph_and_does_not_compile_for_a_length(backend: str, hopper: Op) -> None:
    kernel = KERNELS[backend]
    hopper.force(backend)
    call = FlashAttentionCall(*tensors(2, 500, 600, HEADS, 2, 64, dtype=torch.bfloat16, device="cuda"), causal=True)
    hopper(call)
    torch.cuda.synchronize()
    before = len(kernel.device_caches[torch.cuda.current_device()][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = hopper(call)
    for seed in (5, 6):
        fresh = tensors(2, 500, 600, HEADS, 2, 64, dtype=torch.bfloat16, device="cuda", seed=seed)
        for one, other in zip(call[:3], fresh, strict=True):
            one.copy_(other)
        result.fill_(math.nan)
        graph.replay()
        want = by_reference(call)
        assert_within(result, want[0], want[2], 1.01 * 2.0**-8 + 1.5e-5)
    for queries, keys, batch in ((501, 600, 2), (16, 4096, 3), (1024, 1, 1), (333, 777, 7)):
        other = tensors(batch, queries, keys, HEADS, 2, 64, dtype=torch.bfloat16, device="cuda")
        hopper(FlashAttentionCall(*other, causal=True))
    assert len(kernel.device_caches[torch.cuda.current_device()][0]) == before


@pytest.mark.parametrize("right", [False, True], ids=["all", "diagonal"])
@pytest.mark.parametrize(
    ("tiles", "section", "total", "programs"),
    [
        (32, 8, 128, 132),
        (32, 1, 3, 96),
        (1, 5, 7, 7),
        (8, 64, 256, 132),
        (128, 2, 32, 132),
        (32, 4, 32, 132),
        (3, 4, 18, 54),
        (5, 9, 9, 1),
    ],
)
def test_hopper_work_is_shared_out(
    tiles: int, section: int, total: int, programs: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile of every head once; with a diagonal no program has much more to do than another."""
    if _triton.no_gluon is not None:
        pytest.skip(_triton.no_gluon)
    program = [0]
    monkeypatch.setattr(roles_kernel, "gl", SimpleNamespace(
        num_programs=lambda _axis: programs, program_id=lambda _axis: program[0], cdiv=lambda a, b: -(-a // b),
        where=lambda a, b, c: b if a else c, minimum=min,
    ))  # fmt: skip
    seen: list[tuple[int, int]] = []
    loads = []
    for program[0] in range(programs):
        turns, all_turns = roles_kernel._turns.fn(tiles, section, total)
        work = [roles_kernel._work.fn(turn, turns, tiles, section, total, right) for turn in range(all_turns)]
        mine = [(tile, head) for tile, head in work if tile >= 0]
        seen += mine
        loads.append(sum(tile + 1 for tile, _ in mine))
    assert sorted(seen) == [(tile, head) for tile in range(tiles) for head in range(total)]
    if right and tiles * total > 8 * programs:
        assert max(loads) <= 1.06 * sum(loads) / programs


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "d"), [(2, 16, 4096, 256), (4, 8, 1024, 256), (1, 32, 16384, 128)]
)
def test_sections_fill_two_turns(batch: int, heads: int, tokens: int, d: int) -> None:
    """A section of fewer tiles than programs has each wait for the longest one."""
    if _triton.no_gluon is not None:
        pytest.skip(_triton.no_gluon)
    q = torch.empty(batch, tokens, heads, d, dtype=torch.bfloat16, device="meta")
    call = FlashAttentionCall(q, q, q, causal=True)
    config = roles_launch.default(configs.shape_of(key_of(call)))
    args = roles_launch.launch(call, q, None, config, ARCHS["sm_90"]).args
    section, tiles = args[13:15]
    assert tiles == tokens // config["BLOCK_M"] and 1.9 * 132 < section * tiles <= 4 * 132


@pytest.mark.parametrize("d", [64, 128, 256])
def test_hopper_configurations_fit(d: int) -> None:
    shape = configs.Shape(4096, d, 16, True, 0)
    tried = list(space_hopper_of(shape, ARCHS["sm_90"]))
    assert tried[0] == roles_launch.default(shape) and len(tried) == len(set(tried)) > 1
    for one in tried:
        assert 2 * d * (one["BLOCK_M"] + 2 * one["STAGES"] * one["BLOCK_N"]) < 227 << 10


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("queries", [256, 4096])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_group_configurations_fit(d: int, queries: int, causal: bool) -> None:
    """The default first, each once; two programs a multiprocessor at least."""
    shape = configs.Shape(queries, d, 16, causal, 0)
    tried = list(space_hopper_group_of(shape))
    assert tried[0] == group_launch.default(shape) and len(tried) == len(set(tried))
    for one in tried:
        assert 2 * 2 * d * (one["BLOCK_M"] + 4 * one["BLOCK_N"]) < 227 << 10


# on the CPU


def _on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, backend: str, call: FlashAttentionCall, config: Config, **planted: str
) -> tuple[Tensor, Tensor]:
    """A call's result and logarithms by a kernel's own text; `planted`: what it says, and what it says instead."""
    o = torch.full(call.shape, math.nan, dtype=call.dtype)
    lse = torch.full(call.lse_shape, math.nan)
    launch = roles_launch.launch if backend == "triton_hopper" else group_launch.launch
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "tile_descriptor", gluon.Descriptor)
        # two programs, which take several tiles
        made = launch(call, o, lse, config, replace(ARCHS["sm_90"], compute_units=2))
    paths = [Path(str(one.__file__)) for one in (roles_kernel, group_kernel)]
    path, beside = (paths[0], None) if backend == "triton_hopper" else (paths[1], paths[0])
    kernels = gluon.Kernels(path, planted, beside=beside, LN_2=math.log(2.0), LOG2_E=1 / math.log(2.0))
    constants = {name: value for name, value in config.kwargs.items() if not name.startswith("num_")}
    if backend == "triton_hopper_group":
        constants["num_warps"] = config["num_warps"]
    args = [gluon.Pointer(one) if isinstance(one, Tensor) else one for one in made.args]
    kernels.run(made.kernel.__name__, *made.grid, *args, **made.constants, **constants)
    return o, lse


def _assert_attends_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, backend: str, call: FlashAttentionCall, config: Config, **planted: str
) -> None:
    o, lse = _on_the_cpu(monkeypatch, backend, call, config, **planted)
    want = by_reference(call)
    assert_lse(lse, want[1], call.q.dtype, 0.0)
    assert_within(o, want[0], want[2], torch.tensor(1.01 * 2.0**-11 + 1.5e-5), lost_to_subnormals(call))


def _call(queries: int, keys: int, d: int, **options: Any) -> FlashAttentionCall:
    return FlashAttentionCall(*tensors(2, queries, keys, 4, 2, d, dtype=torch.float16), return_lse=True, **options)


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU runs is held on it")
TILES = {
    "triton_hopper": [roles_launch.made_of(128, 64, 2, 1), roles_launch.made_of(128, 128, 3, 0)],
    "triton_hopper_group": [group_launch.made_of(64), group_launch.made_of(128)],
}


@interpreted
@each_kernel
@pytest.mark.parametrize("key", TAKEN)
def test_text(key: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of keys to five, full and ragged; queries without keys; heads that share keys."""
    for queries, keys, d in ((70, 150, 64), (128, 128, 32), (1, 300, 40), (290, 70, 128), (190, 330, 96), (3, 1, 16)):
        for config in TILES[backend]:
            call = _call(queries, keys, d, **option(key, queries, keys, "cpu"))
            _assert_attends_on_the_cpu(monkeypatch, backend, call, config)


@interpreted
@each_kernel
@pytest.mark.parametrize("d", [72, 80, 160, 192])
def test_text_without_the_padding(d: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of two parts of a head_dim; (190, 330, 96) above is one of these too."""
    for causal in (False, True):
        call = _call(70, 150, d, causal=causal)
        assert roles_launch.rest(call) > 0
        for config in TILES[backend]:
            _assert_attends_on_the_cpu(monkeypatch, backend, call, config)


# several tiles of keys between the edges
WINDOWS = [(100, 20), (200, -1), (0, 300), (150, 0), (64, 64)]


@interpreted
@each_kernel
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_text_of_windows(window: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for queries, keys in ((330, 500), (500, 330), (128, 640)):
        for config in TILES[backend]:
            _assert_attends_on_the_cpu(monkeypatch, backend, _call(queries, keys, 32, window=window), config)


@pytest.mark.gpu
@each_kernel
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_hopper_windows(window: tuple[int, int], backend: str, hopper: Op) -> None:
    for queries, keys in ((330, 500), (500, 330), (128, 640), (2000, 2000)):
        q, k, v = tensors(2, queries, keys, HEADS, 2, 64, dtype=torch.bfloat16, device="cuda")
        assert_attends(backend, FlashAttentionCall(q, k, v, window=window, softcap=2.0 if queries == 330 else 0.0))


# what a kernel says, and what it says instead: of each kernel, and of what they share
ERRORS = {
    "tile": {"(end - 1 - i) * BLOCK_N": "(end - i) * BLOCK_N"},
    "scale": {"_times(acc, rest, alpha, REST)": "_times(acc, rest, 0 * alpha + 1, REST)"},
    "division": {"1.0 / gl.where(denominator": "1.1 / gl.where(denominator"},
}
SHARED_ERRORS = {
    "sink": {"0.0, 0.125": "0.0, 1.0"},
    "left edge": {"cols[None, :] >= lower": "cols[None, :] > lower"},
    "left tiles": {"gl.cdiv(gl.maximum(place + BLOCK_M - 1 - left, 0), BLOCK_N)": "begin"},
    "softcap": {"softcap - 2.0 * softcap": "softcap - softcap"},
}


@interpreted
@pytest.mark.parametrize(
    ("backend", "error"),
    [(one, error) for one in WIDTHS for error in ERRORS] + [("triton_hopper", error) for error in SHARED_ERRORS],
)
def test_text_with_an_error(backend: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call(300, 400, 64, window=(120, 3), softcap=2.0, **option("sinks", 300, 400, "cpu"))
    _assert_attends_on_the_cpu(monkeypatch, backend, call, TILES[backend][0])
    with pytest.raises(AssertionError):
        _assert_attends_on_the_cpu(monkeypatch, backend, call, TILES[backend][0], **(ERRORS | SHARED_ERRORS)[error])


@pytest.mark.parametrize("queries", [1, 32, 33, 4096])
@pytest.mark.parametrize("d", [16, 32, 40, 64, 80, 96, 128, 256])
def test_which_is_above_the_portable_kernel(d: int, queries: int) -> None:
    """Few queries were not timed: the portable kernel stays the default of these."""
    q = torch.empty(1, queries, 2, d, dtype=torch.float16, device="meta")
    first = [one for one in WIDTHS if op.backends[one].opt_in(FlashAttentionCall(q, q, q)) is None]
    expected = "triton_hopper_group" if d in (32, 64) else "triton_hopper"
    assert first == ([expected] if queries > 32 else [])
    assert all(op.backends[one].priority > op.backends["triton"].priority for one in WIDTHS)


@each_kernel
def test_hopper_is_for_sm_90(backend: str, device: str) -> None:
    if device == "cuda":
        pytest.skip("without a GPU")
    call = FlashAttentionCall(*tensors(1, 4, 4, d=64, dtype=torch.float16, device=device))
    reason = op.backends[backend].refuse(call)
    assert reason is not None and "sm_90" in reason

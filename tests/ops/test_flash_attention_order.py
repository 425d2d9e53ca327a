"""The order of the portable kernel's programs: every tile once, the longest first, and the same results in each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention_harness import SMALL, assert_attends, by_reference, packed, tensors
from tests.ops.gemm_harness import machine
from wavecrest.dispatch.lookup import misfit
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention import config as configs
from wavecrest.ops._flash_attention import launch as launches
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall, key_of
from wavecrest.ops._flash_attention.config import shape_of
from wavecrest.ops._flash_attention.kernel import place_of
from wavecrest.ops._flash_attention.study import compile_cases
from wavecrest.ops._flash_attention.study.space import space
from wavecrest.ops.common.triton import tl, triton

TOTALS, TILES, SECTIONS = 29, (1, 2, 3, 7), (1, 2, 3, 5, 8, 29)
SECTIONED = Config(**(SMALL.kwargs | {"SECTION_MIB": 1}))


@triton.jit
def _places_kernel(  # type: ignore[no-untyped-def]
    tile_ptr, head_ptr, tiles_ptr, section_ptr, total_ptr, XCDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row of programs for each triple of sizes; places behind the last program are the last one's again."""
    row = tl.program_id(0)
    tiles, section, total = tl.load(tiles_ptr + row), tl.load(section_ptr + row), tl.load(total_ptr + row)
    place = tl.arange(0, WIDTH)
    program = tl.minimum(place, tiles * total - 1)
    tile, head = place_of(program, tiles * total, tiles, section, total, XCDS, True, True)
    tl.store(tile_ptr + row * WIDTH + place, tile)
    tl.store(head_ptr + row * WIDTH + place, head)


@pytest.mark.parametrize("xcds", [1, 2, 8])
def test_every_tile_of_every_head_once_and_the_longest_first(xcds: int, device: str) -> None:
    """Heads that no number of dies or section divides, and fewer of them than dies."""
    triples = [(tiles, section, total) for total in range(1, TOTALS + 1) for tiles in TILES for section in SECTIONS]
    given = [torch.tensor(one, dtype=torch.int32, device=device) for one in zip(*triples, strict=True)]
    width = 256
    tile, head = (torch.full((len(triples), width), -1, dtype=torch.int32, device=device) for _ in range(2))
    _places_kernel[(len(triples),)](tile, head, *given, XCDS=xcds, WIDTH=width)
    for (tiles, section, total), all_tiles, all_heads in zip(triples, tile.tolist(), head.tolist(), strict=True):
        where = f"{tiles} tiles, sections of {section}, {total} heads, {xcds} dies"
        order = list(zip(all_tiles, all_heads, strict=True))[: tiles * total]
        assert sorted(order) == [(t, h) for t in range(tiles) for h in range(total)], where
        own, work = total // xcds, []
        for die in range(xcds):
            mine = order[die::xcds]
            work.append(sum(t + 1 for t, _ in mine))
            # first the die's part of what cannot be shared out by heads, then sections of its own heads
            shared = [(t, h) for t, h in mine if h >= own * xcds]
            assert mine[: len(shared)] == shared, where
            mine = mine[len(shared) :]
            ours = [mine[i : i + section * tiles] for i in range(0, len(mine), section * tiles)]
            heads = [{h for _, h in part} for part in ours]
            # heads that are neighbours, and so share k and v, are on one die and in one section as far as they go
            together = sorted(h for part in heads for h in part)
            assert together == list(range(together[0], together[0] + own)) if own else not together, where
            assert [len(part) for part in heads[:-1]] == [section] * (len(heads) - 1 if heads else 0), where
            for part in (shared, *ours):
                assert [t for t, _ in part] == sorted((t for t, _ in part), reverse=True), where
        assert max(work) - min(work) <= tiles, where


def _calls(device: str) -> dict[str, FlashAttentionCall]:
    ragged, starts = packed([40, 0, 3, 33], [50, 7, 3, 20], 6, 2, 16, torch.float32, device)
    return {
        "more heads than dies": FlashAttentionCall(*tensors(2, 33, 50, 11, device=device), causal=True),
        "fewer heads than dies": FlashAttentionCall(*tensors(1, 50, 33, 3, device=device), causal=True),
        "grouped heads": FlashAttentionCall(*tensors(3, 35, 35, 6, 2, device=device), causal=True),
        "window": FlashAttentionCall(*tensors(1, 49, 49, 10, 5, device=device), window=(20, 3)),
        "packed": FlashAttentionCall(*ragged, **starts, causal=True),
        "one tile": FlashAttentionCall(*tensors(3, 16, 40, 3, device=device), causal=True),
    }


@pytest.mark.parametrize("name", _calls("cpu"))
def test_results_are_the_same_in_every_order(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that no program computes, or the wrong one, shows: memory of results holds NaN."""
    call = _calls(device)[name]
    want: tuple[Tensor, Tensor, Tensor] | None = None if call.packed else by_reference(call)
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

    plain = assert_attends("triton", call, SMALL, want)
    for xcds, section in ((1, 2), (8, 1), (8, 2), (2, 3), (8, 100)):
        with monkeypatch.context() as patch:
            machine(patch, 304, xcds)
            patch.setattr(launches, "section", lambda _call, _config, section=section: section)
            patch.setattr(torch, "empty", filled)
            got = op.run("triton", call, config=SECTIONED)
        assert isinstance(got, Tensor) and torch.equal(got, plain), (xcds, section)


def _meta(heads: int, kv_heads: int, tokens: int, d: int = 128, **options: Any) -> FlashAttentionCall:
    made = [torch.empty(1, tokens, of, d, dtype=torch.bfloat16, device="meta") for of in (heads, kv_heads, kv_heads)]
    return FlashAttentionCall(*made, **options)


def _launched(call: FlashAttentionCall, arch: str, config: Config | None = None) -> tuple[bool, int]:
    """Whether heads go together in a launch, and how many."""
    config = config or configs.default(shape_of(key_of(call)), ARCHS[arch])
    made = launches.launch(call, *launches.empty_results(call), config, ARCHS[arch])
    assert "SECTION_MIB" not in made.options()
    given = dict(zip(made.kernel.arg_names, made.args, strict=False))
    assert given["total"] == call.heads * call.batch
    return made.constants["SECTIONS"], given["section"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "d", "section"),
    [
        (64, 64, 2048, 128, 4),
        (64, 64, 2048, 64, 8),
        (64, 64, 4096, 128, 2),
        (64, 64, 8192, 128, 1),
        (64, 8, 2048, 128, 32),
        (64, 8, 3000, 128, 16),
        (64, 8, 65536, 128, 8),
        (5, 5, 100, 128, 5),
    ],
)
def test_heads_go_together_whose_keys_the_l2_cache_holds(
    heads: int, kv_heads: int, tokens: int, d: int, section: int
) -> None:
    """Whole groups of heads that share k and v, one group at least; on MI200 in an L2 cache of 8 MiB."""
    call = _meta(heads, kv_heads, tokens, d, causal=True)
    assert _launched(call, "gfx942") == _launched(call, "gfx950") == (True, section)
    if section * 2 <= heads and tokens in (2048, 4096, 8192):
        assert _launched(call, "gfx90a") == (True, section * 2)


def test_other_calls_and_architectures_keep_their_order() -> None:
    """Without a diagonal, behind a window's left edge, on other GPUs, and where a row was timed without sections."""
    causal = _meta(64, 64, 2048, causal=True)
    for arch in ("gfx1100", "gfx1201", "sm_80", "sm_90"):
        assert not _launched(causal, arch)[0]
    for options in ({}, {"window": (1023, -1)}, {"window": (1023, 0)}, {"causal": True, "window": (1023, 0)}):
        assert not _launched(_meta(64, 64, 2048, **options), "gfx942")[0], options
    assert _launched(_meta(64, 64, 2048, window=(-1, 7)), "gfx942")[0]
    # a configuration that asks for sections where no tile is longer than another
    assert not _launched(_meta(64, 64, 2048), "gfx942", SECTIONED)[0]
    default = configs.default(shape_of(key_of(causal)), ARCHS["gfx942"])
    older = Config(**{name: value for name, value in default.kwargs.items() if name != "SECTION_MIB"})
    assert not _launched(causal, "gfx942", older)[0]
    assert misfit(op, key_of(causal), "triton", SECTIONED) == misfit(op, key_of(causal), "triton", SMALL) == ""
    tried = list(space(key_of(causal), ARCHS["gfx942"]))
    assert {0, 2, 4, 16} == {one["SECTION_MIB"] for one in tried} and len(tried) == len(set(tried))
    # tiles that `wavecrest isa --config` names leave the order as it is
    for order, config in ((True, SMALL), (False, Config(**(SMALL.kwargs | {"SECTION_MIB": 0})))):
        assert compile_cases(ARCHS["gfx942"], config)["D=128 causal"].constants["SECTIONS"] == order

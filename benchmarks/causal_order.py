"""How evenly the programs of causal attention fill a GPU, and what they read, by their order: a model, nothing is run.

TRITON_INTERPRET=1 python benchmarks/causal_order.py 568 2519 [gfx942]

Instructions of a wave for 64 keys that a program's queries see in full, and for the rest of a program
(docs/attention.md has both from `wavecrest isa run`). bfloat16, D = 128. A program takes as long as it has
instructions, and reads 64 keys and their values after another. Each die has its share of the compute units, which run
two programs at a time, and an L2 cache that forgets what was read longest ago. The order is the kernel's: its function
runs in Triton's interpreter with the arguments of its launch, and programs are dealt to the dies in turn.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._flash_attention import config as _config
from wavecrest.ops._flash_attention import launch as _launch
from wavecrest.ops._flash_attention.call import FlashAttentionCall, key_of
from wavecrest.ops._flash_attention.config import shape_of
from wavecrest.ops._flash_attention.kernel import place_of
from wavecrest.ops.common.triton import tl, triton

RESIDENT, KEYS, D = 2, 64, 128
# bytes of KEYS keys and their values
TILE = KEYS * 2 * D * 2
# room for the heads of a whole die
ALL_MIB = 1 << 20


class Shape(NamedTuple):
    """Query heads and heads of k and v of each sequence, and the sequences' tokens."""

    heads: int
    kv_heads: int
    tokens: tuple[int, ...]


class Program(NamedTuple):
    """A program's tiles of keys, its length, and its head of k and v, counted over all sequences."""

    steps: int
    length: float
    kv_head: int


class Filled(NamedTuple):
    """A die at its end: when that was, tiles read from behind its L2 cache, most heads of k and v read at one time."""

    end: float
    misses: int
    at_once: int


SHAPES = (
    *(Shape(heads, heads, (tokens,)) for tokens in (2048, 4096, 8192) for heads in (32, 64, 128, 256)),
    Shape(32, 32, (16384,)), Shape(64, 8, (2048,)), Shape(64, 8, (4096,)), Shape(64, 8, (8192,)),
    Shape(32, 8, (16384,)), Shape(32, 8, (4096, 4096)), Shape(28, 4, (4096,)), Shape(12, 12, (4096,)),
    Shape(4, 1, (8192,)), Shape(32, 8, (4096, 700, 2500, 1100)),
)  # fmt: skip


@triton.jit
def _places_kernel(  # type: ignore[no-untyped-def]
    tile_ptr, head_ptr, programs, tiles, section, total, XCDS: tl.constexpr, RIGHT: tl.constexpr,
    SECTIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # places of the block behind the last program are its again
    program = tl.minimum(tl.arange(0, BLOCK), programs - 1)
    tile, head = place_of(program, programs, tiles, section, total, XCDS, RIGHT, SECTIONS)
    tl.store(tile_ptr + program, tile)
    tl.store(head_ptr + program, head)


def places(programs: int, tiles: int, section: int, total: int, xcds: int, sections: bool) -> list[tuple[int, int]]:
    """Each program's tile of queries and head, by the kernel's own function."""
    found = [torch.full((programs,), -1, dtype=torch.int32) for _ in range(2)]
    block = triton.next_power_of_2(programs)
    _places_kernel[(1,)](*found, programs, tiles, section, total, XCDS=xcds, RIGHT=True, SECTIONS=sections, BLOCK=block)
    return list(zip(*(one.tolist() for one in found), strict=True))


def call_of(shape: Shape) -> FlashAttentionCall:
    """A causal call, packed if it has several sequences; its tensors hold nothing."""
    whole = sum(shape.tokens)
    q, k, v = (
        torch.empty(whole, heads, D, dtype=torch.bfloat16, device="meta")
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    starts = torch.empty(len(shape.tokens) + 1, dtype=torch.int32, device="meta")
    longest = max(shape.tokens)
    return FlashAttentionCall(
        q, k, v, "thd", causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest,
        max_seqlen_k=longest,
    )  # fmt: skip


def dies(shape: Shape, config: Config, arch: Arch, step: float, rest: float) -> tuple[list[list[Program]], int]:
    """The programs of each die in the order in which they begin there, and the heads that go together."""
    call = call_of(shape)
    made = _launch.launch(call, *_launch.empty_results(call), config, arch)
    given = dict(zip(made.kernel.arg_names, made.args, strict=False))
    (programs,), sections = made.grid, made.constants["SECTIONS"]
    rows, group = config["BLOCK_M"], shape.heads // shape.kv_heads
    found: list[list[Program]] = [[] for _ in range(arch.xcds)]
    order = places(programs, given["tiles"], given["section"], given["total"], made.constants["XCDS"], sections)
    for program, (tile, head) in enumerate(order):
        tokens = shape.tokens[head // shape.heads]
        # behind the end of a sequence a program returns at once
        if tile * rows < tokens:
            steps = -(-min(tile * rows + rows, tokens) // KEYS)
            found[program % arch.xcds].append(Program(steps, steps * step + rest, head // group))
    return found, given["section"] if sections else 1


def spans(programs: list[Program], at_a_time: int) -> Iterator[tuple[float, Program]]:
    """When each program begins: where one before it ended first."""
    ends = [0.0] * at_a_time
    for program in programs:
        begin = heapq.heappop(ends)
        heapq.heappush(ends, begin + program.length)
        yield begin, program


def filled(programs: list[Program], at_a_time: int, step: float, tiles_of_l2: int) -> Filled:
    """One die, from its first program to the end of its last one."""
    reads: list[tuple[float, int, int]] = []
    changes: list[tuple[float, int, int]] = []
    end = 0.0
    for begin, program in spans(programs, at_a_time):
        end = max(end, begin + program.length)
        reads += [(begin + tile * step, program.kv_head, tile) for tile in range(program.steps)]
        changes += [(begin, 1, program.kv_head), (begin + program.length, 0, program.kv_head)]
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = 0
    for _, kv_head, tile in sorted(reads):
        if (kv_head, tile) in cache:
            cache.move_to_end((kv_head, tile))
        else:
            misses += 1
            cache[kv_head, tile] = None
            if len(cache) > tiles_of_l2:
                cache.popitem(last=False)
    running: Counter[int] = Counter()
    at_once = 0
    # those that end before those that begin at the same time
    for _, begins, kv_head in sorted(changes):
        running[kv_head] += 1 if begins else -1
        at_once = max(at_once, sum(count > 0 for count in running.values()))
    return Filled(end, misses, at_once)


def paired(programs: list[Program], step: float, rest: float) -> list[Program]:
    """A head's longest tile of queries with its shortest, and so on, in one program each."""
    of_head: dict[int, list[Program]] = {}
    # a die has whole heads here, each of them its own k and v
    for program in programs:
        of_head.setdefault(program.kv_head, []).append(program)
    made = []
    for head, own in of_head.items():
        own.sort()
        pairs = [(own[i].steps, own[-1 - i].steps) for i in range(len(own) // 2)]
        made += [Program(a + b, (a + b) * step + 2 * rest, head) for a, b in pairs]
        made += [own[len(own) // 2]] if len(own) % 2 else []
    return made


def main(step: float, rest: float, name: str = "gfx942") -> None:
    """Print, for each shape and order, the busy share of all places, reads, and heads at once."""
    if not _triton.interpreted:
        raise SystemExit("set TRITON_INTERPRET=1: the kernel's function of the order is run in Triton's interpreter")
    arch = ARCHS[name]
    at_a_time = arch.compute_units // arch.xcds * RESIDENT
    tiles_of_l2 = int(arch.l2_mib * (1 << 20)) // TILE
    write: Callable[[str], object] = sys.stdout.write
    write(
        f"*model*, {name}: {arch.xcds} dies with {at_a_time} programs at a time and {arch.l2_mib} MiB of L2 each\n"
        "busy: share of all places until the last program ends; read: k and v from behind the L2 caches, times their "
        "size;\nMiB: k and v of the heads that a die reads at one time\n"
        "                                  head after head    the default              all heads of a die pairs bound\n"
        "heads kv tokens                   busy  read   MiB   heads  busy  read   MiB   busy  read   MiB   busy  busy\n"
    )
    for shape in SHAPES:
        default = _config.default(shape_of(key_of(call_of(shape))), arch)
        kept = sum(-(-tokens // KEYS) for tokens in shape.tokens) * shape.kv_heads
        columns = []
        for mib in (0, default["SECTION_MIB"], ALL_MIB):
            config = Config(**(default.kwargs | {"SECTION_MIB": mib}))
            programs, section = dies(shape, config, arch, step, rest)
            went = [filled(one, at_a_time, step, tiles_of_l2) for one in programs]
            work = sum(program.length for one in programs for program in one)
            busy = work / (arch.xcds * at_a_time * max(one.end for one in went))
            read = sum(one.misses for one in went) / kept
            most = max(one.at_once for one in went) * max(shape.tokens) * TILE / KEYS / (1 << 20)
            label = f"{section:7} " if 0 < mib < ALL_MIB else ""
            columns.append(f"{label}{busy:5.2f} {read:5.1f} {most:5.1f}")
        longest = max(program.length for one in programs for program in one)
        bound = min(1.0, work / (arch.xcds * at_a_time * longest))
        pairs = "     "
        if shape.heads == shape.kv_heads and shape.heads % arch.xcds == 0 and len(shape.tokens) == 1:
            made = paired(programs[0], step, rest)
            end = max(begin + program.length for begin, program in spans(made, at_a_time))
            pairs = f"{work / (arch.xcds * at_a_time * end):5.2f}"
        tokens = "+".join(map(str, shape.tokens))
        write(f"{shape.heads:5} {shape.kv_heads:3} {tokens:22} {'  '.join(columns)}  {pairs} {bound:5.2f}\n")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:3]), *sys.argv[3:])

"""Places and times of the programs of a kernel that starts before the previous one has ended (PDL). NVIDIA, sm_90.

    PYTHONPATH=src python -m benchmarks.early_starts > DATE_early-starts_chains.log

A graph of 24 GEMVs in a chain, each of one row and a weight [4096, 4096] in bfloat16; the row is the result of the GEMV
before. Each program stores its multiprocessor and the times of its start, of the end of its wait and of its end.

The output has one line per configuration (columns per program, columns of K per step, warps, stages) and start. Start
"no": the launch begins when the one before has ended. "top" and "loop": it begins early, because every launch lets the
next one start at its top, or after its loop. A line has the µs per launch. For three launches it has the number of
multiprocessors that ran any of its programs, and the most and the fewest programs on one of these. It also has, in ns
from the end of the launch before: the first start, the first and the last end of the wait, and the last end.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import sys

import torch
import triton
import triton.language as tl

from wavecrest.ops.common.device import allow_next, await_previous

N, K, LAUNCHES = 4096, 4096, 24
CONFIGS = (
    (4, 512, 1, 4), (4, 512, 1, 7), (4, 512, 2, 4), (4, 512, 2, 7), (8, 512, 2, 4), (8, 512, 2, 6), (16, 256, 4, 4),
    (16, 512, 4, 4), (16, 512, 8, 6), (32, 256, 8, 4), (32, 256, 8, 6), (32, 512, 16, 4), (32, 512, 16, 6),
)  # fmt: skip
Shape = tuple[int, int, int, int]
STARTS = ("no", "top", "loop")


@triton.jit
def _now():  # type: ignore[no-untyped-def]
    """The device's clock in ns."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _multiprocessor():  # type: ignore[no-untyped-def]
    """The number of the multiprocessor that runs this program."""
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    w_ptr, x_ptr, y_ptr, seen_ptr, K, EARLY: tl.constexpr, TOP: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of a GEMV; the program stores its three times and its multiprocessor as four words in `seen`."""
    program = tl.program_id(0)
    begun = _now()
    allow_next(TOP)
    if EARLY:
        await_previous(True)
    going = _now()
    cols = program * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    rows = w_ptr + cols.to(tl.int64)[:, None] * K
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = tl.load(rows + k + offs[None, :]).to(tl.float32)
        x = tl.load(x_ptr + k + offs[None, :]).to(tl.float32)
        sums += w * x
    allow_next(not TOP)
    tl.store(y_ptr + cols, tl.sum(sums, 1).to(y_ptr.dtype.element_ty))
    ended = _now()
    tl.store(seen_ptr + program * 4, begun)
    tl.store(seen_ptr + program * 4 + 1, going)
    tl.store(seen_ptr + program * 4 + 2, ended)
    tl.store(seen_ptr + program * 4 + 3, _multiprocessor().to(tl.int64))


class Chain:
    """The captured GEMVs of a chain; configurations take turns."""

    def __init__(self, weights: list[torch.Tensor], x: torch.Tensor, shapes: list[Shape], start: str):
        self.shapes = [shapes[index % len(shapes)] for index in range(LAUNCHES)]
        self.seen = [torch.zeros(4 * N, device=x.device, dtype=torch.int64) for _ in weights]
        rows = [x.clone() for _ in range(LAUNCHES + 1)]

        def work() -> None:
            for index, (columns, step, warps, stages) in enumerate(self.shapes):
                options = {"num_warps": warps, **({} if start == "no" else {"launch_pdl": 1})}
                _product_kernel[(N // columns,)](
                    weights[index], rows[index], rows[index + 1], self.seen[index], K, start != "no", start == "top",
                    stages, columns, step, **options,
                )  # fmt: skip

        work()
        torch.cuda.synchronize()
        stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()
            with torch.cuda.graph(self.graph, stream=stream):
                work()
        torch.cuda.synchronize()

    def us(self) -> float:
        """Time of a launch in µs: median of 20 replays."""
        found = []
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
        return statistics.median(found)

    def what(self, index: int) -> tuple[int, ...]:
        """Places and times of the programs of a launch in the last replay; the top of this file explains them."""
        words = self.seen[index].view(-1, 4)[: N // self.shapes[index][0]].cpu()
        before = int(self.seen[index - 1].view(-1, 4)[: N // self.shapes[index - 1][0], 2].max())
        places = collections.Counter(words[:, 3].tolist())
        begun, going, ended = (words[:, column] - before for column in range(3))
        times = (begun.min(), going.min(), going.max(), ended.max())
        return len(places), max(places.values()), min(places.values()), *(int(time) for time in times)


def main() -> None:
    """Measure all configurations with all starts."""
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(LAUNCHES)]
    x = torch.randn(K, device="cuda", dtype=torch.bfloat16)
    mixed: list[Shape] = [(4, 512, 1, 4), (32, 256, 8, 6)]
    for shapes, start in itertools.product([*([one] for one in CONFIGS), mixed], STARTS):
        chain = Chain(weights, x, shapes, start)
        took = chain.us()
        seen = [chain.what(index) for index in (10, 11, 12)]
        sys.stdout.write(
            f"{shapes} {start}: {took:.2f} us/launch; (SMs, most, least, start-prevend, go min, go max, end) {seen}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()

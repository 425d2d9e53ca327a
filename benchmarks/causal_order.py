"""How evenly the programs of causal attention fill an MI300X, by their order: a model, nothing is run.

python benchmarks/causal_order.py 631 2519

Instructions of a wave for a tile of 64 keys that a program's 128 queries see in full, and for the rest of a program
(docs/attention.md has both from `wavecrest isa run`). A program takes as long as it has instructions; each of the 8
dies has 38 compute units, which run two programs at a time, and an eighth of all programs, in their order.
"""

from __future__ import annotations

import heapq
import sys

DIES, UNITS, RESIDENT, ROWS, KEYS = 8, 38, 2, 128, 64


def longest(programs: list[float]) -> float:
    """When the last program ends: each begins where one ended first."""
    ends = [0.0] * (UNITS * RESIDENT)
    for length in programs:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


def main(step: float, rest: float) -> None:
    """Print, for sequence heads and tokens, the share of all places that is busy until the last program ends."""
    sys.stdout.write("heads  tokens  longest first in a head  longest first of a die\n")
    for heads in (32, 64, 128, 256):
        for tokens in (2048, 4096, 8192):
            tiles = tokens // ROWS
            of_head = [(tile * ROWS // KEYS) * step + rest for tile in reversed(range(tiles))]
            ends = [0.0, 0.0]
            for first in range(0, heads, heads // DIES):
                ours = [length for _ in range(first, first + heads // DIES) for length in of_head]
                ends = [max(ends[0], longest(ours)), max(ends[1], longest(sorted(ours, reverse=True)))]
            total = sum(of_head) * heads / (DIES * UNITS * RESIDENT)
            sys.stdout.write(f"{heads:5}  {tokens:6}  {total / ends[0]:23.2f}  {total / ends[1]:22.2f}\n")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:3]))

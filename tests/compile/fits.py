"""LDS (shared memory) of mla_decode's default configurations, as JSON: `python fits.py ARCH …`.

By case (bytes that the compiled kernel takes, bytes that there are). `python fits.py --all ARCH …`: every combination
of queries, heads, formats, pages and options, instead of those that take the most. Compilers know what a kernel takes;
that it is too much is an error on the GPU alone, OutOfResources.
A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch

from wavecrest.hardware import ARCHS
from wavecrest.isa import compiler
from wavecrest.ops._mla_decode import launch
from wavecrest.ops._mla_decode.config import default
from wavecrest.ops._mla_decode.key import key_of, shape_of
from wavecrest.ops._mla_decode.study.cases import Sizes, example

# queries, heads, columns of latent and rotary part, tokens of a page, rotation and cap
LARGEST = [
    (16, 128, 512, 64, 0, False),
    (16, 128, 512, 64, 1, True),
    (16, 128, 512, 128, 0, False),
    (1, 16, 512, 128, 0, True),
]
EVERY = itertools.product((1, 4, 16), (8, 16, 128), (128, 512), (16, 64, 128), (0, 1, 64), (False, True))


def main(arguments: list[str]) -> None:
    cases = list(EVERY) if "--all" in arguments else LARGEST
    types = (torch.float16, torch.float32) if "--all" in arguments else (torch.float16,)
    found: dict[str, tuple[int, int]] = {}
    for arch in arguments:
        if arch == "--all":
            continue
        known, made = ARCHS[arch], {}
        for (tokens, heads, latent, rope, page, more), dtype, invariant in itertools.product(
            cases, types, (False, True) if "--all" in arguments else (True,)
        ):
            sizes = Sizes(1, tokens, heads, 1024, latent, rope, page)
            call = example(sizes, dtype, "meta", rotary="neox" if more else None, batch_invariant=invariant)
            call = call._replace(logit_cap=30.0 if more else 0.0)
            attend = launch.plan(call, default(shape_of(key_of(call)), known), known).attend
            # one kernel serves many sizes
            key = (*attend.options().items(), dtype)
            if key not in made:
                made[key] = compiler.build(attend, arch).metadata.shared
            name = f"{arch} T={tokens} H={heads} R={latent}+{rope} page={page} {dtype} {more} {invariant}"
            found[name] = made[key], known.lds_kib << 10
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

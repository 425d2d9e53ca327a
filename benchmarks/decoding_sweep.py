"""flash_decoding's kernel against its definition in float64, over pages, caches, queries, windows and sizes of heads.

    PYTHONPATH=src python3 -m benchmarks.decoding_sweep [--budget 100] [--jobs 14]
        [--out evidence/<machine>/<date>_decoding-sweep_flash_decoding.jsonl.gz]

One process compiles and runs a share of the calls; each call is one kernel. A line for each wrong call says how many
elements are beyond the bound, where they are, and with which configuration; the last line counts. Exit code 1 if any
is wrong. The bound is that of tests/ops/test_flash_decoding.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import WavecrestError
from wavecrest.ops._flash_decoding.backend import default_config, op
from wavecrest.ops._flash_decoding.call import FlashDecodingCall
from wavecrest.ops._flash_decoding.reference import reference
from wavecrest.records import files, provenance

DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# half a unit in the last place
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LENGTHS = (411, 389, 400, 37)
CAPACITY = 448


class Case(NamedTuple):
    """One call: `scales` is "one", "heads" or "tokens", and "none" for a cache in q's dtype; page 0: without pages."""

    page: int
    cache: str
    queries: int
    window: int
    d: int
    dv: int
    scales: str = "heads"
    q: str = "bf16"
    heads: int = 24
    kv_heads: int = 3
    lengths: tuple[int, ...] = LENGTHS

    def call(self, device: str) -> FlashDecodingCall:
        """The call's tensors: random ones, with the pages in a random order and pages of nobody between them."""
        generator = torch.Generator().manual_seed(7)
        dtype, batch = DTYPES[self.q], len(self.lengths)
        pages = CAPACITY // self.page if self.page else 1
        count = batch * pages + (3 if self.page else 0)
        leading = (count, self.page or CAPACITY, self.kv_heads)

        def stored(head_dim: int) -> Tensor:
            values = torch.randn(*leading, head_dim, generator=generator)
            if self.scales == "none":
                return values.to(dtype).to(device)
            return (values * 30).clamp(-100, 100).to(DTYPES[self.cache]).to(device)

        def scale() -> Tensor | None:
            if self.scales == "none":
                return None
            shape = {"one": (), "heads": (self.kv_heads,), "tokens": (*leading, 1)}[self.scales]
            return (torch.rand(shape, generator=generator) / 30 + 0.005).to(device)

        table = torch.randperm(count, generator=generator)[: batch * pages].view(batch, pages).to(torch.int32)
        return FlashDecodingCall(
            torch.randn(batch, self.queries, self.heads, self.d, generator=generator).to(dtype).to(device),
            stored(self.d), stored(self.dv), torch.tensor(self.lengths, dtype=torch.int32, device=device),
            table.to(device) if self.page else None, window=self.window, k_scale=scale(), v_scale=scale(),
        )  # fmt: skip


def cases() -> list[Case]:
    """The sweep, in a random order that is the same every time: a budget that ends early leaves a fair part."""
    sizes = ((80, 64), (64, 64), (80, 80), (128, 64), (96, 48), (128, 128))
    made = [
        Case(page, cache, queries, window, d, dv, "none" if cache == "bf16" else scales)
        for page, cache, queries, window, (d, dv), scales in itertools.product(
            (1, 2, 16, 0), ("e4m3", "e5m2", "int8", "bf16"), (16, 4, 1), (20, -1), sizes, ("heads", "tokens")
        )
        if not (cache == "bf16" and scales == "tokens")
    ]
    random.Random(0).shuffle(made)
    # the neighbourhood of the fault that was found comes first
    return sorted(
        made, key=lambda one: (one.page != 1) + (one.queries != 16) + (one.window != 20) + ((one.d, one.dv) != (80, 64))
    )


def judge(case: Case, config: Config | None = None, device: str = "cuda") -> dict[str, Any]:
    """Run a case and compare it: the share of elements beyond the bound, the largest error, and where they are."""
    call = case.call(device)
    config = default_config(op.key(call)) if config is None else config
    told = {"case": case._asdict(), "config": dict(config.kwargs)}
    try:
        got = op.run("triton", call, config=config)
    except RuntimeError:
        # what a GPU reports breaks the process
        raise
    # a compiler may raise anything
    except Exception as error:
        return told | {"error": f"{type(error).__name__}: {error}"[:300]}
    assert isinstance(got, Tensor)
    wide = call._replace(q=call.q.double())
    if case.scales == "none":
        wide = wide._replace(k_cache=call.k_cache.double(), v_cache=call.v_cache.double())
    y = reference(wide)
    sized = wide._replace(
        v_cache=wide.v_cache.abs() if case.scales == "none" else wide.v_cache.float().abs().to(call.v_cache.dtype)
    )
    size = reference(sized)
    assert isinstance(y, Tensor) and isinstance(size, Tensor)
    unit = ROUNDING[call.q.dtype]
    bound = size * (3 * unit + 2.0**-24 * 32 * call.head_dim**0.5) + y.abs() * unit + 1e-12
    off = (got.double() - y).abs().nan_to_num(float("inf"))
    beyond = off > bound
    told |= {"wrong": float(beyond.double().mean()), "largest": float(off.max()), "ratio": float((off / bound).max())}
    if bool(beyond.any()):
        for name, dims in (
            ("sequences", (1, 2, 3)),
            ("queries", (0, 2, 3)),
            ("heads", (0, 1, 3)),
            ("columns", (0, 1, 2)),
        ):
            told[name] = beyond.any(dims[2]).any(dims[1]).any(dims[0]).nonzero().flatten().tolist()
    return told


def _work(jobs: Any, results: Any, until: float) -> None:
    """Do cases until the queue ends. A process with a broken GPU context ends."""
    while (case := jobs.get()) is not None:
        if time.time() > until:
            continue
        try:
            one = judge(*case)
            torch.cuda.synchronize()
        except RuntimeError as error:
            config = case[1] or Config()
            text = str(error).splitlines()[0]
            results.put({"case": case[0]._asdict(), "config": dict(config.kwargs), "error": text, "broken": True})
            os._exit(1)
        results.put(one)
    results.put(None)


def run(wanted: list[tuple[Case, Config | None]], budget: float, processes: int) -> list[dict[str, Any]]:
    """The results of all cases that are done within `budget` seconds, by several processes on the current GPU."""
    context = multiprocessing.get_context("spawn")
    # a queue whose `put` has written when it returns
    jobs, results, until = context.Queue(), context.SimpleQueue(), time.time() + budget
    for case in wanted:
        jobs.put(case)
    workers: list[Any] = []

    def begin() -> None:
        jobs.put(None)
        workers.append(context.Process(target=_work, args=(jobs, results, until)))
        workers[-1].start()

    for _ in range(processes):
        begin()
    done, left = [], processes
    while left > 0:
        one = results.get()
        if one is None:
            left -= 1
            continue
        done.append(one)
        if one.pop("broken", False):
            if time.time() < until:
                begin()
            else:
                left -= 1
    jobs.cancel_join_thread()
    for worker in workers:
        worker.join()
    return done


def line(one: dict[str, Any]) -> str:
    """A result as a line of text."""
    case = Case(**one["case"])
    name = (
        f"page {case.page:2} {case.cache:4} {case.scales:6} T {case.queries:2} window {case.window:3} "
        f"D {case.d:3} Dv {case.dv:3}"
    )
    config = " ".join(f"{key}={value}" for key, value in one["config"].items())
    if "error" in one:
        return f"{name}  {one['error']}  {config}"
    text = f"{name}  wrong {one['wrong']:.4f} largest {one['largest']:.3g} ratio {one['ratio']:.2f}  {config}"
    if one["wrong"]:
        text += "".join(f"  {key} {one[key] if len(one[key]) < 20 else f'{len(one[key])}: {one[key][:8]}…'}"
                        for key in ("sequences", "queries", "heads", "columns"))  # fmt: skip
    return text


def stored(one: dict[str, Any]) -> dict[str, Any]:
    """A result for a record: JSON has no infinity, nor NaN."""
    return {
        key: value if not isinstance(value, float) or math.isfinite(value) else str(value) for key, value in one.items()
    }


def main() -> int:
    """Sweep, print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=100, help="seconds; what is not begun by then is left out")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path, help="write the result to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise WavecrestError("the sweep needs a GPU")
    wanted = cases()
    done = run([(case, None) for case in wanted], args.budget, args.jobs)
    bad = [one for one in done if one.get("wrong", 1)]
    for one in bad:
        sys.stdout.write(line(one) + "\n")
    sys.stdout.write(f"{len(done)} of {len(wanted)} cases done, {len(bad)} wrong\n")
    if args.out is not None:
        header = provenance.header(hardware.detect(), command=provenance.command_line()).model_dump(mode="json")
        result = {"kind": "decoding_sweep", "header": header, "planned": len(wanted), "wrong": len(bad)}
        result["cases"] = [stored(one) for one in done]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_document(args.out, result)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

"""Configurations of the GEMMs of an xLSTM 7B decoding step, tried where they run: between the other kernels.

    PYTHONPATH=src python -m benchmarks.xlstm_chain --out evidence/MACHINE/DATE_xlstm-chain_times.jsonl.gz [PART …]

`wavecrest tune` times a call alone. It cannot see the cost of a launch between others: how soon the launch may begin
(EARLY), and whether its programs crowd on few multiprocessors, since they start one after another as multiprocessors
become free. Here one GEMM after the other is changed in a captured step: stages with EARLY, and block sizes for a GEMM
that begins early. For the mLSTM step only EARLY is tried, because the rest of its configuration changes its results
bitwise. At the end the changed step and the original one are timed in turn.

A run starts from the configurations that earlier runs of the file found. It searches the GEMMs that those runs did not
reach first, then the others, the oldest result first. For each GEMM it also tries the configurations found for GEMMs
with the same rows, the same K and elements of the same number of bits.

The part `rows` then takes the file's last result for each GEMM. As `wavecrest tune --config` does, it checks the GEMM
against the op's reference and times it alone beside PyTorch. A correct and faster one is written into the package's
table as the row of its key.

The part `counted` times steps whose mLSTM counts its programs (`arrivals`) and launches no norm, in turn with others.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks import parts, xlstm_peers
from benchmarks.parts import Part, Report, Row
from benchmarks.xlstm_peers import Place
from torch import Tensor

from wavecrest import hardware
from wavecrest.bench import suites
from wavecrest.dispatch import lookup, registry, tuned
from wavecrest.dispatch.decision import Decision
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config, database, table
from wavecrest.errors import InvalidArgument
from wavecrest.measure import cuda_graph, numerics, timing
from wavecrest.models.xlstm import generation
from wavecrest.models.xlstm.quantize import quantize
from wavecrest.records import files, provenance
from wavecrest.tune import candidates, compile_ahead, session, untuned_calls

# stages beyond those of the row, and starts (EARLY) that are tried with each
STAGES, STARTS = (0, 2, -1, -2), (0, 1, 2)
LEAST_STAGES = 2
# values of EARLY for the mLSTM step, which has no stages
FIRST_STARTS = (0, 1, 2, 3, 4)
SIZES = ("BLOCK_N", "BLOCK_K", "num_warps")
# factors of SIZES, as exponents of two
NEAR = (
    (1, -1, 0), (-1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 2), (0, -1, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1), (-1, -1, -1),
)  # fmt: skip
# a change is kept if it shortens the step by more than this fraction
LEAST = 5e-4
# only ops that a step calls at least this often are tried: those that are in every layer
LEAST_CALLS = 2
WORKERS = max(1, (os.cpu_count() or 2) - 2)


def changed(config: Config, **values: int) -> Config:
    """A configuration with other values; EARLY=0 is not written."""
    made = config.kwargs | values
    return Config(**{name: value for name, value in made.items() if (name, value) != ("EARLY", 0)})


def starts(config: Config) -> Iterator[Config]:
    """Stages and starts of a configuration."""
    for more, early in itertools.product(STAGES, STARTS):
        if more >= 0 or config["num_stages"] + more >= LEAST_STAGES:
            yield changed(config, num_stages=config["num_stages"] + more, EARLY=early)


def sizes(config: Config) -> Iterator[Config]:
    """Other block sizes for GEMMs that begin early, with the same number of stages and two more."""
    for powers, more in itertools.product(NEAR, STAGES[:2]):
        values = {name: int(config[name] * 2.0**power) for name, power in zip(SIZES, powers, strict=True)}
        if all(values.values()):
            yield changed(config, **values, num_stages=config["num_stages"] + more, EARLY=1)


def tries(op: str, config: Config) -> list[Config]:
    """Configurations to try for a call of the step, beside the given one."""
    if op != "gemm":
        return [changed(config, EARLY=early) for early in FIRST_STARTS]
    return list(dict.fromkeys([*starts(config), *sizes(config)]))


def words(path: Path) -> dict[tuple[Any, ...], Row]:
    """The last result for each call in a file of this script, by op and key; the oldest first."""
    if not path.exists():
        return {}
    found: dict[tuple[Any, ...], Row] = {}
    for run in files.read_json(path, what="file of parts")["runs"]:
        for row in run["rows"]:
            if "best" in row:
                name = (row.get("op", "gemm"), *row["key"].values())
                found.pop(name, None)
                found[name] = row
    return found


def kind(key: Row) -> tuple[Any, ...] | None:
    """The kind of a GEMM: a good configuration of one may be good for others of its kind. None: not a GEMM.

    Rows, K, bytes of an element of a and of b, and whether one byte holds two quantized values.
    """
    if "rows" not in key:
        return None
    sizes = [getattr(torch, key[name]).itemsize for name in ("a", "b")]
    return (key["rows"], key["k"], *sizes, key["form"] == "int4")


def alike(key: Row, earlier: dict[tuple[Any, ...], Row]) -> Iterator[Config]:
    """The configurations that earlier runs found best for GEMMs of the same kind as this key."""
    for row in earlier.values():
        config = table.parse_config(row["best"])
        if config is not None and kind(key) is not None and kind(row["key"]) == kind(key):
            yield config


class Step:
    """A decoding step of a model, captured anew after each change."""

    def __init__(self, place: Place, form: str | None, batch: int) -> None:
        self.place, self.tokens = place, place.tokens(batch, 16)
        self.model = xlstm_peers.ours(place)
        if form is not None:
            quantize(self.model, form, lm_head=True)
            torch.cuda.empty_cache()
        self.ops = [registry.get(name) for name in ("gemm", "mlstm_step")]
        for op in self.ops:
            op.forget()
        decoder = xlstm_peers.our_decoder(self.model, self.tokens, False)
        before = {(made.op, made.key): calls for made, calls in self._made()}
        decoder.step(self.model, None)
        # calls of the step alone: those that the prompt made before are subtracted
        self.found: list[Decision] = [
            made for made, calls in self._made()
            if made.config is not None and calls - before.get((made.op, made.key), 0) >= LEAST_CALLS
        ]  # fmt: skip

    def _made(self) -> Iterator[tuple[Decision, int]]:
        for op in self.ops:
            yield from op.decisions()

    def op(self, made: Decision) -> Op:
        """The op of a decision."""
        return next(op for op in self.ops if op.name == made.op)

    def capture(self, counted: bool = False) -> Callable[[], Any]:
        """A replay of the step as things are now; `counted`: as of `Decoder`."""
        generation._decoders.pop(self.model, None)
        decoder = xlstm_peers.our_decoder(self.model, self.tokens, False)
        decoder.counted = counted
        work = partial(decoder._work, self.model)
        cuda_graph.warm_up(work)
        graph, _ = cuda_graph.record(work, torch.cuda.graph_pool_handle(), "the decoding step")

        def replay(_alive: Any = decoder) -> None:
            graph.replay()

        return replay

    def logits(self, counted: bool = False, backend: str | None = None) -> Tensor:
        """Logits of one step behind the prompt; `backend`: the one that runs its mLSTM step."""
        decoder = xlstm_peers.our_decoder(self.model, self.tokens, False)
        decoder.counted = counted
        mixes = registry.get("mlstm_step")
        mixes.force(backend)
        try:
            return decoder._work(self.model).clone()
        finally:
            mixes.force(None)

    def ms(self) -> float:
        """Time of a step in ms: median of six samples, each over four replays."""
        replay, found = self.capture(), []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 4)
        return statistics.median(found[1:])

    def call(self, made: Decision) -> tuple[Any, ...]:
        """Arguments of a call of the step."""
        op = self.op(made)
        return untuned_calls.call(op, untuned_calls.parts_of(op, made.key), self.place.device)

    def use(self, made: Decision, config: Config) -> None:
        """Run a call with a configuration from now on."""
        self.op(made).pin(made.key, made.backend, config, made.source, "tried in the chain")


def described(config: Config) -> str:
    """A configuration as text."""
    return " ".join(f"{name}={value}" for name, value in config.kwargs.items())


def searched(
    step: Step, made: Decision, now: Config, tried: list[Config], kernels: compile_ahead.Kernels, first: float
) -> Row:
    """The best configuration of a call of the step, which it has from now on."""
    assert made.config is not None
    op = step.op(made)
    best, least, found = now, first, dict[str, float | str]()
    for config in tried:
        candidate = candidates.Candidate(made.backend, config)
        problem = lookup.misfit(op, made.key, made.backend, config) or kernels.error(str(made.key), candidate)
        if not problem and kernels.spilled(str(made.key), candidate):
            problem = "spills"
        if not problem:
            step.use(made, config)
            try:
                took = step.ms()
            except (InvalidArgument, triton.runtime.errors.OutOfResources) as error:
                problem = str(error)
        if problem:
            found[described(config)] = problem
            continue
        found[described(config)] = round(took, 5)
        if took < least * (1 - LEAST):
            best, least = config, took
    step.use(made, best)
    return {
        "op": op.name, "key": untuned_calls.parts_of(op, made.key), "backend": made.backend,
        "before": described(made.config), "best": described(best), "ms_before": round(first, 5),
        "ms": round(least, 5), "tried": found,
    }  # fmt: skip


@torch.no_grad()
def chain(form: str | None, batch: int, report: Report, args: argparse.Namespace) -> None:
    """Search the step of one kind of weights and one batch."""
    place = xlstm_peers.start(report, args)
    step = Step(place, form, batch)
    arch = hardware.detect(args.device).known
    assert arch is not None
    base = step.capture()
    earlier = words(args.out)
    names = {made: (made.op, *untuned_calls.parts_of(step.op(made), made.key).values()) for made in step.found}
    kernels, tried, now = compile_ahead.kernels(False, arch), {}, {}
    for made in step.found:
        assert made.config is not None
        now[made] = made.config
        if names[made] in earlier:
            now[made] = table.parse_config(earlier[names[made]]["best"]) or made.config
            step.use(made, now[made])
        tried[made] = tries(made.op, now[made])
        if made.op == "gemm":
            key = untuned_calls.parts_of(step.op(made), made.key)
            tried[made] = list(dict.fromkeys([*tried[made], *alike(key, earlier)]))
        # the few of the mLSTM compile where they run
        for config in tried[made] if made.op == "gemm" else ():
            # a configuration that the kernel refuses is refused again, with the reason, when it is tried
            with contextlib.suppress(InvalidArgument):
                some = [candidates.Candidate(made.backend, config)]
                kernels.add(step.op(made), str(made.key), step.call(made), some, arch)
    compile_ahead.compile_all(kernels, WORKERS, deadline=math.inf)
    took = step.ms()
    places = {name: place for place, name in enumerate(earlier)}
    for made in sorted(step.found, key=lambda made: places.get(names[made], -1)):
        row = searched(step, made, now[made], tried[made], kernels, took)
        took = row["ms"]
        report.row(f"{made.key[1]}x{made.key[2]}" if made.op == "gemm" else made.op, **row)
    pair = timing.measure_pair(base, step.capture(), device=place.device, min_blocks=8, seconds=4.0)
    report.row(
        "step", before_ms=pair.base_ms, ms=pair.new_ms, ratio=pair.ratio, ratio_ci=[pair.ci.low, pair.ci.high],
        blocks=pair.n,
    )  # fmt: skip


@torch.no_grad()
def counted(report: Report, args: argparse.Namespace) -> None:
    """Steps whose mLSTM counts its programs, beside steps with a launch for the norm."""
    place = xlstm_peers.start(report, args)
    for form, batch in ((None, 1), (None, 16), ("fp8", 1)):
        step = Step(place, form, batch)
        name = f"{form or 'bf16'} b{batch}"
        # beside the definition of the mLSTM: what layers make of other roundings of h is as much with either
        wanted = step.logits(backend="torch")
        before, after = (numerics.compare(step.logits(counted), wanted) for counted in (False, True))
        errors = {"error": after.relative, "error_before": before.relative}
        allowed = max(numerics.tolerance("model", "bfloat16").relative, 2 * before.relative)
        if not after.nonfinite_match or after.relative > allowed:
            # a wrong result gets no time
            report.row(name, problem="with arrivals logits are further from the definition", **errors)
            continue
        base, new = step.capture(), step.capture(counted=True)
        pair = timing.measure_pair(base, new, device=place.device, min_blocks=8, seconds=4.0)
        report.row(
            name, before_ms=pair.base_ms, ms=pair.new_ms, ratio=pair.ratio, ratio_ci=[pair.ci.low, pair.ci.high],
            blocks=pair.n, **errors,
        )  # fmt: skip
        # before the next model is made
        del base, new, step
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def rows(report: Report, args: argparse.Namespace) -> None:
    """Write the results of other parts as rows of the table."""
    device, op = hardware.detect(args.device), registry.get("gemm")
    report.header(provenance.header(device).model_dump(mode="json"))
    path = files.beside(args.out, "tune")
    place, fields = table_of(op, device), lookup.fields_of(op)
    before = database.read(place, fields)
    # without the rows from this record: they lose their evidence when the record is written anew
    others = {key: row for key, row in before.items() if row.record.partition("@")[0] != session.place(path)}
    cases: list[suites.Case] = []
    configs: dict[str, tuple[Config, ...]] = {}
    own: dict[str, None] = {}
    for row in words(args.out).values():
        config = table.parse_config(row["best"])
        if row.get("op", "gemm") != op.name or config is None:
            continue
        key = tuple(row["key"][name] for name in fields)
        # nothing was faster than the present configuration, whose row, if it has one, is kept
        if row["best"] == row["before"] and (key in others or key not in before):
            continue
        case = " ".join(f"{part}={value}" for part, value in row["key"].items())
        cases.append(suites.Case(case, partial(untuned_calls.call, op, row["key"], device.torch_name)))
        configs[case] = (config,)
        own[row["backend"]] = None
    if not cases:
        raise InvalidArgument(f"{args.out} has no product with another configuration: run a search first, as batch-1")
    record = session.tune(
        op.name, device, session.Settings(backends=tuple(own), configs=configs, workers=WORKERS), session.Targets(path),
        cases=cases, command=" ".join(["xlstm_chain.py", *sys.argv[1:]]),
    )  # fmt: skip
    called = session.named(path)
    for tuned_key in record.keys:
        if tuned_key.backend in own:
            made = session.row_of(tuned_key, fields, called, record.header)
            others[made.key] = made
        report.row(
            tuned_key.case, config=described(configs[tuned_key.case][0]), us=tuned_key.us,
            native_us=tuned_key.native_us, written=tuned_key.backend in own,
        )  # fmt: skip
    for case, problem in record.left.items():
        report.row(case, problem=problem)
    database.write(place, fields, others.values())


def table_of(op: Op, device: hardware.Device) -> Path:
    """The package's table of an op."""
    return Path(tuned.__file__).parent / "data" / device.arch / f"{op.name}.csv"


PARTS = [
    Part("batch-1", 240.0, partial(chain, None, 1)),
    Part("batch-16", 240.0, partial(chain, None, 16)),
    Part("fp8-batch-1", 240.0, partial(chain, "fp8", 1)),
    Part("int8-batch-1", 240.0, partial(chain, "int8", 1)),
    Part("counted", 180.0, counted),
    Part("rows", 180.0, rows),
]

if __name__ == "__main__":
    raise SystemExit(parts.main(__doc__ or "", "benchmarks.xlstm_chain", PARTS))

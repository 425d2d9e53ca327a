"""Forecasts of TiRex-2 on a CPU, its own layers beside those of `patch_tirex`, at the cases that its authors publish.

    PYTHONPATH=src python -m benchmarks.tirex_cpu --out DATE_tirex-cpu_tirex2.jsonl.gz

Needs a quiet machine with 8 cores, and packages tirex-2 0.4.0, flashrnn, mlstm_kernels and narwhals (pip install
--no-deps). Takes up to 10 minutes. The cases are those of NX-AI/tirex-2#47 (2026-09-14), with 8 threads; the times that
it gives, in milliseconds on a machine that it does not name, stand beside each case where they are known here. What
counts is the package and wavecrest in turn on the same machine: "eager" as the package is by default, "compiled" as by
`load_model(compile=True)`, where torch.compile has a C++ compiler.

Weights are random, in a model of TiRex-2's width and heads: times do not depend on weights. wavecrest is held to the
package's forecast first.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks import mlstm_peers, parts, slstm_peers
from benchmarks.parts import Part, Report, Row
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.integrations.tirex import patch_tirex
from wavecrest.records import provenance

OURS = "wavecrest"
THREADS = 8
# how far forecasts may be apart, relative to their norm: both are float32
APART = 1e-3
# series, variates, covariates of the past, known ahead; context 512 and horizon 128 in all
CASES: dict[str, tuple[int, int, int, int]] = {
    "s1_uni": (1, 1, 0, 0), "s2_batch": (64, 1, 0, 0), "s3_multi": (1, 12, 0, 0), "s3_multi_batch": (8, 12, 0, 0),
    "s4_cov": (1, 4, 4, 4), "s5_cov_batch": (8, 4, 4, 4),
}  # fmt: skip
CONTEXT, HORIZON = 512, 128
# least and mean milliseconds that tirex-2#47 gives
PUBLISHED = {
    "s1_uni": {"eager": (35.5, 37.2), "compiled": (19.7, 20.4)},
    "s2_batch": {"eager": (933.0, 977.2), "compiled": (727.1, 753.4)},
}
# width, heads, blocks, patch
SIZES, SMALL = (512, 4, 12, 32), (64, 2, 3, 8)

Call = Callable[[], Tensor]


def model_of(sizes: tuple[int, int, int, int]) -> nn.Module:
    """A TiRex-2 with random weights: sLSTM and mLSTM blocks of both directions in turn.

    Raises:
        ImportError: a package is not installed.
    """
    from tirex2.model.tirex2 import TiRex2

    width, heads, blocks, patch = sizes

    def block(kind: str) -> dict[str, Any]:
        mixer = {"embedding_dim": width, "num_heads": heads}
        time = {"model_type": kind, "num_slstm_heads": heads, **mixer}
        return {"time_mixer": time, "variate_mixer": mixer, "dropout": 0.0, "eps": 1e-6}

    stack = {
        "templates": {"s": block("bi-slstm"), "m": block("bi-mlstm")},
        "recipe": ["sm"[place % 2] for place in range(blocks)],
    }
    patches = {"output_patch_size": patch, "input_patch_size": patch, "input_patch_stride": patch}
    context, future = CONTEXT // patch * patch, max(HORIZON, patch)
    made: nn.Module = TiRex2(
        stack, blocks, width, patch, patch, [0.1 * one for one in range(1, 10)], patches, {}, 1.0, context, future,
        2 * width, "ReLU", 0.0, device="cpu",
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("_bias_") or weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    return made


def series_of(case: str) -> list[Any]:
    """The series of a case."""
    from tirex2.model.types import TimeseriesType

    count, variates, past, ahead = CASES[case]
    generator = torch.Generator().manual_seed(1)

    def made(rows: int, length: int) -> Tensor | None:
        return torch.randn(rows, length, generator=generator).cumsum(1) if rows else None

    return [
        TimeseriesType(made(variates, CONTEXT), made(past, CONTEXT), made(ahead, CONTEXT + HORIZON))
        for _ in range(count)
    ]


def forecast(model: Any, series: list[Any]) -> Tensor:
    """The forecasts of all series as one tensor."""
    return torch.cat([one.flatten() for one in model.predict(series, HORIZON)])


def compiled(model: nn.Module) -> nn.Module:
    """The model with its recurrent layers compiled, as the package does it: the layers around the cells."""
    for part in model.modules():
        if type(part).__name__ in ("mLSTMLayer", "_FlashRNNLayer"):
            part.compile()
    return model


def implementations(model: nn.Module) -> dict[str, Callable[[], nn.Module]]:
    """Who takes part, by name."""
    return {
        "eager": lambda: model,
        OURS: lambda: patch_tirex(copy.deepcopy(model)),
        "compiled": lambda: compiled(copy.deepcopy(model)),
    }


def judged(call: Call, wanted: Tensor) -> Row:
    """A first call, held to the package's forecast."""
    try:
        found = call()
    except Exception as error:
        # a compiler that is not there, or aborts a graph, is a row of the result
        return {"problem": f"{type(error).__name__}: {str(error)[:300]}"}
    apart = float((found - wanted).norm() / wanted.norm())
    row: Row = {"apart": apart}
    return row if apart <= APART else row | {"problem": f"wrong: {apart:.1e} from the package's forecast"}


@torch.no_grad()
def forecasts(report: Report, args: argparse.Namespace) -> None:
    """All implementations at every case."""
    report.header(provenance.header(hardware.detect("cpu")).model_dump(mode="json"))
    torch.set_num_threads(2 if args.small else THREADS)
    try:
        model = model_of(SMALL if args.small else SIZES)
    except ImportError as error:
        report.row("packages", problem=f"not there: {error}")
        return
    made: dict[str, nn.Module] = {name: maker() for name, maker in implementations(model).items()}
    for case in list(CASES)[: 1 if args.small else None]:
        if report.has(case):
            continue
        series = series_of(case)
        wanted = forecast(model, series)
        rows: dict[str, Row] = {}
        works: dict[str, Call] = {}
        for name, one in made.items():
            if not report.at(f"{name} {case}"):
                rows[name] = {"problem": "an earlier process died of it"}
                continue
            work = partial(forecast, one, series)
            rows[name] = judged(work, wanted)
            if "problem" not in rows[name]:
                works[name] = work
        if report.at(f"times {case}") and OURS in works:
            for name, times in slstm_peers.timed(works, "cpu").items():
                rows[name] |= times
        more = {"threads": torch.get_num_threads(), "published": PUBLISHED.get(case)}
        report.row(case, **more, **mlstm_peers.best_peer(rows, OURS), rows=rows)


def all_parts() -> list[Part]:
    """One part."""
    return [Part("forecasts", 570.0, forecasts, summary=mlstm_peers.geomean)]


if __name__ == "__main__":
    raise SystemExit(parts.main(__doc__ or "", "benchmarks.tirex_cpu", all_parts()))

"""Hold the cost model against times that AMD published for MI300X and MI355X: ROCm/aiter's tuned tables (MIT).

    python -m benchmarks.published_times read CHECKOUT --out FILE    # a record of the facts in a checkout of ROCm/aiter
    python -m benchmarks.published_times score FILE                  # the model against it, on the half held out
    python -m benchmarks.published_times fit FILE --trials 600       # constants for the other half
    python -m benchmarks.published_times priors FILE --out FOLDER    # dispatch's priors: where PyTorch won or lost

No GPU is needed. Tables are in Markdown. Their kernels are not wavecrest's (Composable Kernel, assembly, FlyDSL,
hipBLASLt): the model predicts the fastest configuration of wavecrest's own for the same GEMM. So a score says how well
times over shapes are predicted, and nothing about the speed of wavecrest's kernels.

Shapes are divided by their weight [N, K]: half of the weights for fitting, half held out. In samples every octave of M
counts alike: the tables have most of their shapes at M above 4,096.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import io
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wavecrest import hardware
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.tuned import Config, Work, cost_model, published
from wavecrest.dispatch.tuned.cost_model import Constants
from wavecrest.errors import RecordError, WavecrestError
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops._gemm.key import KEY_FIELDS, key_of
from wavecrest.records import files, provenance

TABLES, TILES = "aiter/configs", "aiter/ops/triton/configs/gemm"
# the parts whose peaks the model has, by architecture and compute units: MI300X, MI355X
UNITS = {"gfx942": 304, "gfx950": 256}
# their results with more wrong elements are no results
MOST_WRONG = 0.05
# sample: shapes of a table and octave of M
A_OCTAVE = 40
# configurations of a shape that a fit looks at, the fastest with the constants it starts from
CANDIDATES = 8
# constants that published times can tell; latencies, vector instructions and registers stay as measured on the H200
FREE = ("overlap", "launch", "matrix", "matrix_8bit", "bandwidth", "l2", "program_cycles")
# names of aiter's Triton configurations by our words
TILED = {"A16W16": "bfloat16", "A8W8_BLOCKSCALE": "float8 blocks", "A8W8": "8-bit"}
REGIMES = {"1–16": 16, "17–128": 128, "129–2,047": 2047, "2,048 and more": math.inf}
WITHIN = 1.35


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A GEMM with its published time: M, N, K, µs, the library, and the key of our call."""

    M: int
    N: int
    K: int
    us: float
    library: str
    key: Key

    @property
    def held_out(self) -> bool:
        """Whether its weight is in the half that no constant is fitted to."""
        return hashlib.sha256(f"{self.N} {self.K}".encode()).digest()[0] % 2 == 1


# --- a checkout read


def read(checkout: Path) -> dict[str, Any]:
    """The record of a checkout: the best published time of each shape, and the tiles of Triton configurations.

    Raises:
        RecordError: the folder is no checkout of ROCm/aiter, bare or not.
    """
    said = _git(checkout, "log", "-1", "--format=%H %cs")
    names = _git(checkout, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    commit, date = said.split()
    best: dict[tuple[str, str], dict[tuple[int, int, int], tuple[float, str]]] = {}
    dropped: Counter[str] = Counter()
    read_from = []
    for name in names:
        if name.startswith(f"{TABLES}/") and name.endswith(".csv") and "untuned" not in name and "gemm" in name:
            read_from.append(name)
            for arch, kind, shape, us, library in _rows(name, _git(checkout, "show", f"HEAD:{name}"), dropped):
                table = best.setdefault((arch, kind), {})
                if shape not in table or us < table[shape][0]:
                    table[shape] = us, library
    if not best:
        raise RecordError(f"{checkout}: no tuned GEMM of a known part in {TABLES}: give a checkout of ROCm/aiter")
    tables = []
    for (arch, kind), table in sorted(best.items()):
        rows = sorted((*shape, *found) for shape, found in table.items())
        columns = dict(zip(("M", "N", "K", "us", "library"), map(list, zip(*rows, strict=True)), strict=True))
        tables.append({"arch": arch, "compute_units": UNITS[arch], "kind": kind, **columns})
    return {
        "kind": "published-times",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": provenance.command_line(),
        "source": {"repository": "ROCm/aiter", "commit": commit, "committed": date, "licence": "MIT"},
        "files": read_from,
        "dropped": dict(sorted(dropped.items())),
        "tables": tables,
        "tiles": list(_tiles(checkout, names)),
    }


def _git(checkout: Path, *words: str) -> str:
    said = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=False)
    if said.returncode:
        raise RecordError(f"{checkout}: {said.stderr.strip()[:200]}: give a checkout of ROCm/aiter")
    return said.stdout


def _rows(name: str, text: str, dropped: Counter[str]) -> Iterator[tuple[str, str, tuple[int, int, int], float, str]]:
    for row in csv.DictReader(io.StringIO(text)):
        row = {key.lower(): value for key, value in row.items() if key}
        kind = _kind(name.rpartition("/")[2], row)
        try:
            us, wrong = float(row["us"]), float(row.get("errratio") or row.get("err_ratio") or 0)
            shape = int(row["m"]), int(row["n"]), int(row["k"])
            arch, units = row["gfx"], int(row["cu_num"])
        except (KeyError, ValueError, TypeError):
            dropped["without a time, shape or part"] += 1
            continue
        if kind is None or "b" in row:
            dropped["preshuffled weights, 4-bit types, batches, other results: no kernel of wavecrest is alike"] += 1
        elif UNITS.get(arch) != units:
            dropped["other parts"] += 1
        elif not (0 < us < math.inf) or wrong > MOST_WRONG:
            dropped["no valid result"] += 1
        else:
            # four digits: they do not time better
            yield arch, kind, shape, float(f"{us:.4g}"), row.get("libtype") or "ck"


def _kind(file: str, row: dict[str, str]) -> str | None:
    """The types multiplied; None where no kernel of wavecrest multiplies the like."""
    if "bpreshuffle" in file or "a4w4" in file or "fp4" in file or row.get("bpreshuffle") == "True":
        return None
    if "blockscale" in file:
        return "float8 blocks"
    if "bf16" in file:
        plain = row.get("outdtype") == row.get("dtype") == "torch.bfloat16" and row.get("scaleab") == "False"
        return "bfloat16" if plain and row.get("bias") == "False" else None
    weight = row.get("q_dtype_w", "")
    return "int8" if weight == "torch.int8" else "float8" if weight.startswith("torch.float8") else None


def _tiles(checkout: Path, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """aiter's Triton configurations that are for one weight: the tile of each range of M."""
    for name in names:
        found = re.fullmatch(rf"{TILES}/(gfx\d+)-GEMM-(\w+)-N=(\d+)-K=(\d+)\.json", name)
        if found is None or found[2] not in TILED or found[1] not in UNITS:
            continue
        for words, config in json.loads(_git(checkout, "show", f"HEAD:{name}")).items():
            most = re.fullmatch(r"M_LEQ_(\d+)", words)
            if most is not None:
                names_of = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "NUM_KSPLIT", "num_warps")
                tile = [config.get(one, 1) for one in names_of]
                kind = TILED[found[2]]
                yield {
                    "arch": found[1],
                    "kind": kind,
                    "shape": [int(most[1]), int(found[3]), int(found[4])],
                    "tile": tile,
                }


# --- the model


def key_for(arch: hardware.Arch, kind: str, M: int, N: int, K: int) -> Key:
    """The key of our call on a GPU of `arch`, with its rows as they are: keys of calls have rows in buckets."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if kind == "bfloat16":
        made = GemmCall(empty(M, K, dtype=torch.bfloat16), empty(N, K, dtype=torch.bfloat16).mT)
    else:
        dtype = torch.int8 if kind == "int8" else getattr(torch, f"float8_{arch.fp8}")
        blocks = kind == "float8 blocks"
        rows = empty(M, -(-K // 128)) if blocks else empty(M)
        columns = empty(-(-K // 128), -(-N // 128)) if blocks else empty(N)
        made = GemmCall(
            empty(M, K, dtype=dtype), empty(N, K, dtype=dtype).mT, scale_a=rows, scale_b=columns,
            out_dtype=torch.bfloat16,
        )  # fmt: skip
    key = dict(zip(KEY_FIELDS, key_of(made), strict=True))
    return tuple((key | {"rows": M, "device": "cuda"}).values())


def launches(arch: hardware.Arch, key: Key) -> list[tuple[str, Config, tuple[Work, ...]]]:
    """The configurations of our kernels for a key, each with its launches."""
    found = []
    for name, kernel in op.study.kernels.items():
        if kernel.work is not None and kernel.space is not None:
            for config in dict.fromkeys(kernel.space(key, arch)):
                works = kernel.work(key, config, arch)
                if cost_model.predict(works, arch) is not None:
                    found.append((name, config, works))
    return found


def predicted(arch: hardware.Arch, works: Iterable[Sequence[Work]], constants: Constants | None) -> float:
    """µs of the fastest configuration."""
    made = (cost_model.predict(one, arch, constants) for one in works)
    return min((one.us for one in made if one is not None), default=math.inf)


def shapes(record: dict[str, Any], only: tuple[str, str] | None = None) -> dict[tuple[str, str], list[Shape]]:
    """The shapes of a record by architecture and kind, of all tables or of the `only` one."""
    found = {}
    for table in record["tables"]:
        arch = hardware.ARCHS[table["arch"]]
        if only not in (None, (arch.name, table["kind"])):
            continue
        rows = zip(table["M"], table["N"], table["K"], table["us"], table["library"], strict=True)
        found[arch.name, table["kind"]] = [
            Shape(*row, key=key_for(arch, table["kind"], row[0], row[1], row[2])) for row in rows
        ]
    return found


def sample(rows: Sequence[Shape]) -> list[Shape]:
    """At most A_OCTAVE shapes of each octave of M, the same ones each time."""
    octaves: dict[int, list[Shape]] = {}
    for row in rows:
        octaves.setdefault(row.M.bit_length(), []).append(row)
    draw = random.Random(0)
    return [row for one in octaves.values() for row in draw.sample(one, min(len(one), A_OCTAVE))]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> Any:
        _, where, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[where]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


# --- fit


def fit(arch: hardware.Arch, rows: dict[str, list[Shape]], trials: int) -> Constants:
    """Constants by random search from the H200's: the mean over kinds of their mean |log(predicted ÷ published)|.

    A shape counts as off by at most a factor of e, so that a few odd times do not decide.
    """
    works = {}
    for kind, part in rows.items():
        for row in part:
            made = [one for _, _, one in launches(arch, row.key)]
            order = sorted(made, key=lambda one: predicted(arch, [one], cost_model.CONSTANTS))
            if order:
                works.setdefault(kind, []).append((row.us, order[:CANDIDATES]))

    def off(constants: Constants) -> float:
        means = [
            sum(min(1.0, abs(math.log(predicted(arch, one, constants) / us))) for us, one in part) / len(part)
            for part in works.values()
        ]
        return sum(means) / len(means)

    draw = random.Random(0)
    # without a GEMM of 16 bits nothing tells that share of the peak
    names = [name for name in FREE if name != "matrix" or "bfloat16" in works]
    best = cost_model.CONSTANTS
    least, deviation = off(best), 0.3
    for number in range(1, trials + 1):
        changed = {name: getattr(best, name) * math.exp(draw.gauss(0, deviation)) for name in draw.sample(names, 2)}
        # no more of a peak than there is
        changed |= {name: min(changed[name], 1.0) for name in changed if getattr(cost_model.CONSTANTS, name) < 1}
        trial = dataclasses.replace(best, **changed)
        if (value := off(trial)) < least:
            best, least = trial, value
        if number % 100 == 0:
            deviation *= 0.8
            sys.stderr.write(f"{number}: {least:.4f}\n")
    return best


# --- tables


def _print(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    for row in (names, ["---"] * len(names), *rows):
        sys.stdout.write(f"| {' | '.join(map(str, row))} |\n")
    sys.stdout.write("\n")


def _scores(arch: hardware.Arch, rows: Sequence[Shape], constants: Constants | None) -> list[str]:
    """Shapes, rank correlation, and how the predicted times lie to the published ones."""
    times = [(predicted(arch, [one for _, _, one in launches(arch, row.key)], constants), row.us) for row in rows]
    times = [pair for pair in times if pair[0] < math.inf]
    ratios = np.asarray([made / us for made, us in times])
    near = float(np.mean((ratios >= 1 / WITHIN) & (ratios <= WITHIN)))
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    rank = correlation([made for made, _ in times], [us for _, us in times])
    return [f"{len(times):,}", f"{rank:.3f}", f"{100 * near:.0f} %", f"{low:.2f}", f"{middle:.2f}", f"{high:.2f}"]


SCORES = ("shapes", "Spearman", "within ±35 %", "predicted ÷ published, 10 %", "median", "90 %")


def score(record: dict[str, Any], *, every: bool) -> None:
    """Write the tables."""
    held = {table: [row for row in rows if row.held_out] for table, rows in shapes(record).items()}
    drawn = {table: rows if every else sample(rows) for table, rows in held.items()}
    before, by_kind, by_rows = [], [], []
    for arch_name in dict.fromkeys(arch for arch, _ in held):
        arch = hardware.ARCHS[arch_name]
        kinds = {kind: rows for (one, kind), rows in drawn.items() if one == arch_name and len(rows) > 4}
        together = [row for rows in kinds.values() for row in rows]
        for kind, rows in {**kinds, "all": together}.items():
            before.append([arch_name, kind, *_scores(arch, rows, cost_model.CONSTANTS)])
            by_kind.append([arch_name, kind, *_scores(arch, rows, None)])
        least = 0.0
        for name, most in REGIMES.items():
            by_rows.append([arch_name, name, *_scores(arch, [r for r in together if least < r.M <= most], None)])
            least = most
    sys.stdout.write("With the constants of the H200:\n\n")
    _print(("arch", "kind", *SCORES), before)
    sys.stdout.write("With the architecture's own:\n\n")
    _print(("arch", "kind", *SCORES), by_kind)
    _print(("arch", "M", *SCORES), by_rows)
    _print(
        ("arch", "kind", "configurations", "their tile in our first 8", "in our space", "tiles in our space"),
        tiles(record),
    )


def tiles(record: dict[str, Any]) -> Iterator[list[Any]]:
    """Where aiter's own Triton tile for a weight and M stands in the model's ranking of our configurations."""
    found: dict[tuple[str, str], list[tuple[int | None, int]]] = {}
    for one in record["tiles"]:
        arch, (M, N, K), tile = hardware.ARCHS[one["arch"]], one["shape"], tuple(one["tile"][:2])
        kind = "int8" if one["kind"] == "8-bit" else one["kind"]
        ranked = sorted(
            (predicted(arch, [works], None), (config["BLOCK_M"], config["BLOCK_N"]))
            for name, config, works in launches(arch, key_for(arch, kind, M, N, K))
            if "BLOCK_M" in config
        )
        order = list(dict.fromkeys(pair for _, pair in ranked))
        place = order.index(tile) if tile in order else None
        found.setdefault((arch.name, one["kind"]), []).append((place, len(order)))
    for (arch_name, kind), places in sorted(found.items()):
        inside = [place for place, _ in places if place is not None]
        first = sum(place < 8 for place in inside)
        mean = sum(count for _, count in places) / len(places)
        yield [arch_name, kind, len(places), f"{first} ({100 * first / len(places):.0f} %)", len(inside), f"{mean:.1f}"]


# the tables whose tuner timed PyTorch beside the library's own kernels, and parts of the keys that they name
AGAINST_TORCH = {("gfx950", "bfloat16"): {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16", "scales": "none none"}}
PLAIN = {"form": "plain", "activation": "", "bias": "", "residual": "false", "batch": "0", "order": "k k 16"}


def priors(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """By architecture, the CSV of gemm's priors: keys for which PyTorch, or aiter's own kernels, won at every size.

    A key has rows in buckets. Where PyTorch was the fastest at some of a bucket's sizes and not at others, there is no
    prior. Tables of Composable Kernel alone name no winner over PyTorch.
    """
    source = f"tuned table of {record['source']['repository']}, commit {record['source']['commit'][:8]}"
    for (arch, kind), parts in AGAINST_TORCH.items():
        won: dict[tuple[int, int, int], list[Shape]] = {}
        for row in shapes(record, (arch, kind))[arch, kind]:
            won.setdefault((row.N, row.K, row_bucket(row.M)), []).append(row)
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        named = {**parts, **PLAIN}
        out.writerow(["rows", "columns", "k", *named, *published.COLUMNS])
        for (N, K, rows), found in sorted(won.items()):
            if len({one.library == "torch" for one in found}) > 1:
                continue
            words = ", ".join(f"M={one.M} {one.library} {one.us:g} us" for one in sorted(found, key=lambda x: x.M)[-2:])
            backend = "torch" if found[0].library == "torch" else "aiter"
            chip = hardware.ARCHS[arch].part
            out.writerow([rows, N, K, *named.values(), backend, f"fastest: {words}", f"{source}, {chip}"])
        yield arch, text.getvalue()


def main() -> int:
    """Read, score, fit, or write priors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("read", "score", "fit", "priors"))
    parser.add_argument("source", type=Path, help="a checkout (read), or the record of one (others)")
    parser.add_argument("--out", type=Path, help="read: write the record here; priors: the folder")
    parser.add_argument("--trials", type=int, default=600, help="fit: sets of constants to try (default 600)")
    parser.add_argument("--every", action="store_true", help="score: every shape held out, not a sample")
    options = parser.parse_args()
    try:
        if options.command == "read":
            made = read(options.source)
            for table in made["tables"]:
                sys.stdout.write(f"{table['arch']} {table['kind']}: {len(table['us']):,} shapes\n")
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                files.write_document(options.out, made)
            return 0
        record = files.read_json(options.source, what="record")
        if options.command == "score":
            score(record, every=options.every)
            return 0
        if options.command == "priors":
            for arch_name, text in priors(record):
                path = (options.out or published.PRIOR) / arch_name / "gemm.csv"
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_text(path, text)
                sys.stdout.write(f"{path.parent.name}/{path.name}: {len(text.splitlines()) - 1:,} keys\n")
            return 0
    except WavecrestError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    halves = {table: [row for row in sample(rows) if not row.held_out] for table, rows in shapes(record).items()}
    for arch_name in dict.fromkeys(arch for arch, _ in halves):
        part = {kind: rows for (one, kind), rows in halves.items() if one == arch_name and len(rows) > 4}
        sys.stdout.write(f"{arch_name}: {fit(hardware.ARCHS[arch_name], part, options.trials)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

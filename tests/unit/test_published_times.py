"""AMD's published times: a checkout read, shapes divided, the score and the fit."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks import published_times

from wavecrest import hardware
from wavecrest.cli import explain
from wavecrest.dispatch.tuned import cost_model, published
from wavecrest.errors import RecordError
from wavecrest.records import files

RECORD = Path(__file__).parents[2] / "evidence/published/2026-11-25_published-times_aiter_gemm.jsonl.gz"
BLOCKS = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
PLAIN = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,us,err_ratio"
TRITON = '{"M_LEQ_16": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}, "any": {}}'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with two tables, a table of preshuffled weights and a Triton configuration."""
    made = {
        "aiter/configs/a8w8_blockscale_tuned_gemm.csv": [
            BLOCKS, "gfx942,304,16,4096,2048,ck,1,0,9.12345,x,1,1,0.0", "gfx942,304,16,4096,2048,ck,1,0,8.0,x,1,1,0.0",
            "gfx942,304,32,4096,2048,ck,1,0,7.0,x,1,1,0.9", "gfx942,80,16,4096,2048,ck,1,0,5.0,x,1,1,0.0",
            "gfx942,304,64,4096,2048,ck,1,0,inf,x,1,1,0.0", "gfx942,304,,4096,2048,ck,1,0,3.0,x,1,1,0.0",
        ],
        "aiter/configs/model_configs/x_bf16_tuned_gemm.csv": [
            PLAIN, "gfx950,256,8,512,1024,False,torch.bfloat16,torch.bfloat16,False,False,asm,4.5,0.0",
            "gfx950,256,8,512,1024,True,torch.bfloat16,torch.bfloat16,False,False,asm,4.0,0.0",
        ],
        "aiter/configs/a8w8_bpreshuffle_tuned_gemm.csv": [BLOCKS, "gfx942,304,16,4096,2048,ck,1,0,1.0,x,1,1,0.0"],
        "aiter/configs/a8w8_untuned_gemm.csv": ["M,N,K", "1,2,3"],
        "aiter/ops/triton/configs/gemm/gfx942-GEMM-A8W8_BLOCKSCALE-N=4096-K=2048.json": [TRITON],
    }  # fmt: skip
    for name, lines in made.items():
        path = tmp_path / "aiter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    root = tmp_path / "aiter"
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)
    return root


def test_a_checkout_gives_the_best_valid_time_of_each_shape(checkout: Path) -> None:
    made = published_times.read(checkout)
    assert [(one["arch"], one["kind"]) for one in made["tables"]] == [
        ("gfx942", "float8 blocks"), ("gfx950", "bfloat16"),
    ]  # fmt: skip
    first, second = made["tables"]
    assert (first["M"], first["us"]) == ([16], [8.0])
    assert second["us"] == [4.5]
    assert sum(made["dropped"].values()) == 6
    assert made["tiles"] == [
        {"arch": "gfx942", "kind": "float8 blocks", "shape": [16, 4096, 2048], "tile": [16, 64, 128, 1, 1]}
    ]
    assert len(made["source"]["commit"]) == 40


def test_another_folder_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="give a checkout of ROCm/aiter"):
        published_times.read(tmp_path)


def test_both_halves_of_the_record_have_weights_and_none_has_both() -> None:
    record = files.read_json(RECORD, what="record")
    table = next(one for one in record["tables"] if one["arch"] == "gfx942")
    rows = [
        published_times.Shape(*row, key=())
        for row in zip(*(table[c] for c in ("M", "N", "K", "us", "library")), strict=True)
    ]
    halves = [{(row.N, row.K) for row in rows if row.held_out is held} for held in (True, False)]
    assert min(map(len, halves)) > 10 and not halves[0] & halves[1]
    drawn = published_times.sample(rows)
    octaves = {row.M.bit_length() for row in rows}
    assert {row.M.bit_length() for row in drawn} == octaves
    assert len(drawn) <= published_times.A_OCTAVE * len(octaves)


def test_rank_correlation() -> None:
    assert published_times.correlation([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1.0)
    assert published_times.correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # equal values: Spearman's of 1, 2.5, 2.5, 4 and 1, 2, 3, 4
    assert published_times.correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(
    ("arch_name", "kind", "least"), [("gfx942", "float8 blocks", 0.9), ("gfx950", "bfloat16", 0.75)]
)
def test_the_shipped_constants_keep_their_score(arch_name: str, kind: str, least: float) -> None:
    """On some of the shapes held out; the whole tables are in docs/cost_model.md."""
    record: dict[str, Any] = files.read_json(RECORD, what="record")
    arch = hardware.ARCHS[arch_name]
    table = next(one for one in record["tables"] if (one["arch"], one["kind"]) == (arch_name, kind))
    columns = zip(*(table[name] for name in ("M", "N", "K", "us", "library")), strict=True)
    held = [row for row in (published_times.Shape(*row, key=()) for row in columns) if row.held_out]
    drawn = published_times.sample(held)[::8]

    def near(constants: cost_model.Constants | None) -> float:
        found = []
        for row in drawn:
            key = published_times.key_for(arch, kind, row.M, row.N, row.K)
            works = [one for _, _, one in published_times.launches(arch, key)]
            found.append(published_times.predicted(arch, works, constants) / row.us)
        return sum(1 / 1.35 <= ratio <= 1.35 for ratio in found) / len(found)

    assert near(None) >= least
    assert near(None) >= near(cost_model.CONSTANTS)


def test_the_priors_are_those_of_the_record() -> None:
    record = files.read_json(RECORD, what="record")
    made = dict(published_times.priors(record))
    assert set(made) == {"gfx950"}
    assert made["gfx950"] == (published.PRIOR / "gfx950" / "gemm.csv").read_text(encoding="utf-8")
    # a bucket of rows whose sizes PyTorch won in part has no prior
    table = next(one for one in record["tables"] if (one["arch"], one["kind"]) == ("gfx950", "bfloat16"))
    table |= {name: [table[name][0]] * 2 for name in ("N", "K", "us")} | {"M": [9, 16], "library": ["torch", "asm"]}
    assert len(dict(published_times.priors(record))["gfx950"].splitlines()) == 1
    table["library"] = ["flydsl", "asm"]
    (_, line) = dict(published_times.priors(record))["gfx950"].splitlines()
    assert line.startswith("16,") and ",aiter," in line


@pytest.mark.parametrize(
    ("rows", "source", "said"),
    [(32768, "prior", "M=32768 torch 3208 us"), (32, "default", "for aiter, which refuses it")],
)
def test_dispatch_on_gfx950_says_what_was_published(rows: int, source: str, said: str) -> None:
    """PyTorch is the reserve where aiter's kernels won and aiter is not there."""
    decision = explain.rank("gemm", "gfx950", [f"M={rows}", "N=6144", "K=12288", "dtype=bf16"]).decision
    assert decision is not None and decision.backend == "torch" and decision.source == source
    assert said in decision.reason and "published by others and not measured here" in decision.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch_name", "kind", "row"),
    [
        ("gfx942", "float8 blocks", "gfx942, MI300X: float8 blocks"), ("gfx950", "bfloat16", "of these bfloat16"),
        ("gfx950", "float8", "of these float8"),
    ],
)  # fmt: skip
def test_the_page_has_the_scores_of_the_half_held_out(arch_name: str, kind: str, row: str) -> None:
    """The model and the configurations that it ranks change, and with them what the page says of them."""
    table = arch_name, kind
    rows = published_times.shapes(files.read_json(RECORD, what="record"), table)[table]
    drawn = published_times.sample([one for one in rows if one.held_out])
    scores = published_times._scores(hardware.ARCHS[arch_name], drawn, None)
    page = (RECORD.parents[2] / "docs/cost_model.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    # without the column of the H200's constants
    assert [*cells[:3], *cells[4].split(", ")] == scores


def test_a_fit_finds_a_constant_that_was_changed() -> None:
    arch = hardware.ARCHS["gfx942"]
    truth = cost_model.Constants(matrix_8bit=0.35, launch=6.0)
    rows = []
    for M, N, K in ((1, 4096, 4096), (64, 8192, 4096), (512, 4096, 7168), (4096, 4096, 4096), (8192, 8192, 8192)):
        key = published_times.key_for(arch, "float8 blocks", M, N, K)
        works = [one for _, _, one in published_times.launches(arch, key)]
        us = published_times.predicted(arch, works, truth)
        rows.append(published_times.Shape(M, N, K, us, "ck", key))
    found = published_times.fit(arch, {"float8 blocks": rows}, 150)

    def off(constants: cost_model.Constants) -> float:
        works = [[one for _, _, one in published_times.launches(arch, row.key)] for row in rows]
        pairs = zip(works, rows, strict=True)
        return sum(abs(math.log(published_times.predicted(arch, one, constants) / row.us)) for one, row in pairs)

    assert off(found) < off(cost_model.CONSTANTS) / 5
    assert found.matrix_8bit < 0.5 and found.launch > 4.0
    # nothing tells what is reached at 16 bits
    assert found.matrix == cost_model.CONSTANTS.matrix

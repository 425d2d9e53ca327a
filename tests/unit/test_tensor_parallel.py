"""benchmarks/tensor_parallel.py: two processes with gloo from the command to the record; a rank that dies; parts."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.zoo import registry

from wavecrest import env
from wavecrest.graphs.capture import CapturedModule
from wavecrest.records import files

ROOT = Path(__file__).parents[2]

pytest.importorskip("transformers", reason="needs the package transformers")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

tensor_parallel = pytest.importorskip("benchmarks.tensor_parallel")
# ends rank 1 where the parallel model would be timed; rank 0 waits for it then
DYING = """
import os
from benchmarks import tensor_parallel

def timed(call):
    if os.environ["RANK"] == "1":
        os._exit(7)
    tensor_parallel.dist.barrier()

tensor_parallel.on_all = timed
try:
    tensor_parallel.main()
except Exception as error:
    os._exit(tensor_parallel.ended(error))
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    # a GPU is not for two processes
    changes = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    # benchmarks are no part of the package
    variables = env.python_child(changes, [str(ROOT)])
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_step_of_decoding_from_the_command_to_the_record(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl.gz"
    done = torchrun(
        "-m", "benchmarks.tensor_parallel", "decode 16", "--tiny", "--rounds", "3", "--budget", "1",
        "--out", str(out), "--variants", "one gpu eager", "eager", "optimized", "shard",
        # none that compiles: within this budget that is tried on an idle machine alone, for half a minute of its time
        "--steps", "fuse_qkv", "fuse_gate_up", "replace_norm", "replace_activation",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "answers that are not those of one GPU: none"
    record = files.read_json(out, what="record")
    assert record["kind"] == "tensor-parallel" and record["ranks"] == len(record["devices"]) == 2
    assert record["header"]["command"].startswith(
        "torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel 'decode 16'"
    )
    assert record["backend"] == "gloo" and record["nccl"] is None
    rows = {row["variant"]: row for row in record["rows"]}
    assert list(rows) == [*tensor_parallel.ONE_GPU, *tensor_parallel.VARIANTS]
    for name in ("one gpu optimized", "compiled"):
        assert rows[name]["left_out"] == "not asked for" and "samples" not in rows[name]
    for name in ("one gpu eager", "eager", "optimized", "shard"):
        assert len(rows[name]["samples"]) == 3 and rows[name]["median_ms"] > 0 and not rows[name]["captured"]
        assert ("agrees" in rows[name]) == (name != "shard"), "a shard's answer is a part"
    for name in ("eager", "optimized"):
        assert rows[name]["agrees"] and rows[name]["ranks_agree"] and rows[name]["error"] < rows[name]["limit"]
    assert rows["optimized"]["kept"] == rows["shard"]["kept"]


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    begin = time.perf_counter()
    done = torchrun(str(script), "decode 1", "--tiny", "--variants", "one gpu eager", "eager", "--rounds", "2")
    # not at the timeout of the process group
    assert done.returncode and time.perf_counter() - begin < tensor_parallel.TIMEOUT.total_seconds()
    assert re.search(r"exitcode\s*: 7", done.stderr), done.stderr[-3000:]


def test_the_reason_of_an_end_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from wavecrest.errors import RankFailed

    assert tensor_parallel.ended(RankFailed("rank 0 failed: ValueError: x\nmore")) == 3
    assert capsys.readouterr().err == "error: rank 0 ends: RankFailed: rank 0 failed: ValueError: x\n"
    tensor_parallel.ended(KeyError("k"))
    assert capsys.readouterr().err.splitlines()[-1] == "error: rank 0 ends: KeyError: 'k'"


def test_answers_are_held_to_twice_the_error_of_one_gpu() -> None:
    entry = registry.entries()["llama-8b-decode"]
    module, finish = entry.module(registry.Site("cpu", entry.tiny, True))
    answers = tensor_parallel.Answers(finish(module), finish)
    assert answers.right.dtype == torch.float64 and answers.judged(answers.right.float())["agrees"]
    assert not answers.judged(answers.right.float() * (1 + 2 * answers.limit))["agrees"]
    assert answers.judged(torch.full_like(answers.right, float("nan")).float())["error"] == float("inf")


def test_a_graph_that_was_not_replayed_is_not_captured() -> None:
    captured = CapturedModule(torch.nn.Linear(2, 2))
    assert tensor_parallel.is_captured(torch.nn.Sequential(captured))
    captured.eager_calls = 1
    assert not tensor_parallel.is_captured(captured) and not tensor_parallel.is_captured(torch.nn.Linear(2, 2))

"""A model divided over two processes with gloo: answers, plans that all ranks follow, failures of a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wavecrest import env
from wavecrest.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
HELD = [
    "answers Llama", "answers Qwen2", "answers Mistral", "followed", "refused", "compiled", "rounded", "out of memory",
    "stored", "cached", "own caches", "commanded", "not captured", "refusals", "failures",
]  # fmt: skip

pytest.importorskip("transformers", reason="needs the package transformers")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], str]]:
    """The lines that two ranks printed, and their errors."""
    store = tmp_path_factory.mktemp("job") / "store"
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.unit.distributed_ranks", str(rank), str(store)],
            cwd=ROOT,
            env=env.python_child({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=240) for child in children]
    finally:
        for child in children:
            child.kill()
    return [(out.splitlines(), errors) for out, errors in outputs]


@pytest.mark.parametrize("held", HELD)
def test_two_ranks(ranks: list[tuple[list[str], str]], held: str) -> None:
    for lines, errors in ranks:
        assert held in lines, errors[-3000:]


def test_the_command_line_speaks_for_all_ranks(ranks: list[tuple[list[str], str]]) -> None:
    (lines, told), (_, others) = ranks
    assert lines.count("printed") == 2
    for said in (
        "--resume is for a run of one process",
        "--quantize is for a run of one process",
        "every rank has the whole model",
        "WAVECREST_MISSES=FILE.jsonl",
    ):
        assert said in " ".join(told.split()) and said in " ".join(others.split())
    assert "in force on no rank: planted" in told and "in force on no rank: planted" in others
    assert "rank 1: follows rank 0's plan, fuse" in others and "follows" not in told
    assert "rank 1: nothing to do, rank 0 tunes" in others


def test_a_rank_that_ends_is_one_clear_line_for_the_other(ranks: list[tuple[list[str], str]]) -> None:
    assert "ended" in ranks[0][0], ranks[0][1][-3000:]


def test_without_a_job_is_an_error() -> None:
    from wavecrest.integrations import distributed

    with pytest.raises(InvalidArgument, match="start with torchrun"):
        distributed.on_rank_zero(lambda: 1)
    with pytest.raises(InvalidArgument, match="start with torchrun"):
        distributed.parallelize(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match=r"takes a model that distributed\.parallelize"):
        distributed.optimize(torch.nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(InvalidArgument, match=r"takes a model that distributed\.parallelize"):
        distributed.apply(torch.nn.Linear(2, 2), "plan.json", torch.ones(2, 2))

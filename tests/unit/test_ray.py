"""Keys spread over a Ray cluster of two nodes with one core each: crash, silence, a node that is lost in the middle."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wavecrest import hardware, records
from wavecrest.errors import InvalidArgument, MissingDependency
from wavecrest.integrations import ray as integration
from wavecrest.tune import session

# an architecture is known, so that spaces are asked, and everything runs on the CPU
DEVICE = replace(hardware.cpu(), arch="sm_90")
MADE = session.Settings(seconds=0.01, modules=("tests.unit.tune_standins",))


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that the planted backend "meet" waits for, on every node."""
    path = tmp_path_factory.mktemp("meeting") / "all here"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_MEETING", str(path))
        yield path


@pytest.fixture(scope="module")
def cluster(standins: None, meeting: Path) -> Iterator[Any]:
    """A head without a core, and two nodes with one each."""
    ray = pytest.importorskip("ray", reason="needs the package ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args=head)
    nodes = [made.add_node(num_cpus=1, num_gpus=0, object_store_memory=80_000_000) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False)
    yield made, nodes
    ray.shutdown()
    made.shutdown()


def tune(count: int | None = None, *, on_step: Any = None, **settings: Any) -> records.TuneRecord:
    starts = integration.workers_of(DEVICE, count)
    made = replace(MADE, **settings) if settings else MADE
    return session.tune("planted", DEVICE, made, starts=starts, on_step=on_step)


@pytest.mark.slow
def test_a_cluster_tunes_every_key_once_also_without_a_node(
    cluster: Any, meeting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, nodes = cluster
    with pytest.raises(InvalidArgument, match="the Ray cluster has 2 CPUs for 3 children"):
        integration.workers_of(DEVICE, 3)
    record = tune(backends=("kernel", "crash", "hang"), matching="64", timeout=8.0)
    (key,) = record.keys
    found = {one.backend: (one.status, one.reason) for one in key.candidates}
    assert found["crash"] == ("failed", "ended its process with SIGSEGV")
    assert found["hang"] == ("failed", "did not come to an end within 8 s")
    assert (key.backend, key.config) == ("kernel", {"BLOCK": 3})
    assert record.children == 2 and len(record.endings) == 2

    lost: list[str] = []

    def lose(what: str, done: int, planned: int) -> None:
        # no key ends before the meeting: when the second is begun both workers are in the middle of one
        if what.startswith("rows"):
            lost.append(what)
            if len(lost) == 2:
                made.remove_node(nodes[1], allow_graceful=False)

    def noticed(reason: str) -> dict[str, Any]:
        # the workers of the run before are lost as well
        if len(lost) > 1:
            meeting.touch()
        return said(reason)

    # a node that is gone may still answer: the meeting ends when its end is known
    said = integration._lost
    monkeypatch.setattr(integration, "_lost", noticed)

    # nobody waits for another node in the place of the one that is lost
    begin = time.monotonic()
    record = tune(backends=("kernel", "meet"), on_step=lose)
    assert time.monotonic() - begin < 60
    assert [key.case for key in record.keys] == ["rows 4", "rows 16", "rows 64"] and not record.left
    assert all((key.backend, key.config) == ("kernel", {"BLOCK": 3}) for key in record.keys)
    assert len(record.endings) == 1 and "was lost with its node" in record.endings[0]
    assert not any(one.status == "failed" for key in record.keys for one in key.candidates), "no candidate is to blame"
    assert lost.count(record.endings[0].split(":")[0]) == 2, "what the node had was begun again"


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"--executor ray needs the package ray; install it with: pip install"):
        integration.workers_of(DEVICE, None)

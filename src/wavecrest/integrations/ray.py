"""Tuning on a Ray cluster: one actor per GPU (on a CPU, per core), each with a worker process as on one machine."""

from __future__ import annotations

from typing import Any

from wavecrest.errors import InvalidArgument, MissingDependency
from wavecrest.hardware import Device
from wavecrest.tune import workers

# seconds beyond the timeout after which a silent node counts as gone
GRACE = 30.0


class Node:
    """An actor: runs a worker process on its node, which sees the GPUs that Ray gave the actor."""

    def __init__(self) -> None:
        self._child = workers.Child()

    def send(self, message: dict[str, Any]) -> None:
        """Send the child a line."""
        self._child.send(message)

    def next(self, timeout: float) -> dict[str, Any]:
        """The child's next event."""
        return self._child.next(timeout)


class RayWorker:
    """A worker on a node of the cluster; a lost actor counts as ended from outside."""

    def __init__(self, gpus: int) -> None:
        ray = _ray()
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._ray, self._actor = ray, ray.remote(Node).options(**options).remote()

    def send(self, message: dict[str, Any]) -> None:
        """Send the child a line; `next` reports a lost node."""
        # it returns nothing; `next` raises its error
        self._actor.send.remote(message)

    def next(self, timeout: float) -> dict[str, Any]:
        """The child's next event; see `wavecrest.tune.workers.Worker`."""
        try:
            # a copy, as Ray owns the original
            return dict(self._ray.get(self._actor.next.remote(timeout), timeout=timeout + GRACE))
        except self._ray.exceptions.GetTimeoutError:
            return _lost(f"its node said nothing for {timeout + GRACE:.0f} s, or the cluster has no room for it")
        except self._ray.exceptions.RayActorError as error:
            return _lost(f"was lost with its node or actor: {str(error).strip().splitlines()[0]}")
        except self._ray.exceptions.RayTaskError as error:
            return _lost(f"could not be started on its node: {str(error).strip().splitlines()[-1]}")

    def stop(self) -> None:
        """End the actor; its child ends when its input closes."""
        self._ray.kill(self._actor)


def _lost(reason: str) -> dict[str, Any]:
    return {"event": "ended", "reason": reason, "outside": True}


def workers_of(device: Device, count: int | None) -> list[workers.Start]:
    """The functions that start workers on the cluster that RAY_ADDRESS names, or on one that Ray starts here.

    Args:
        device: the device to tune for; a node that reports another device is refused.
        count: number of workers; None: all GPUs of the cluster, or all its cores if the device is the CPU.

    Raises:
        MissingDependency: ray is not installed.
        InvalidArgument: the cluster has fewer GPUs or cores.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    kind = "CPU" if device.kind == "cpu" else "GPU"
    there = int(ray.cluster_resources().get(kind, 0))
    if not there or (count is not None and count > there):
        raise InvalidArgument(f"the Ray cluster has {there} {kind}s for {count or 'any'} children")
    gpus = 0 if device.kind == "cpu" else 1
    return [lambda: RayWorker(gpus)] * (count or there)


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingDependency("ray", "--executor ray", "pip install ray") from error
    return ray

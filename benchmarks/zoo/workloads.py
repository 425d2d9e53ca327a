"""The zoo as workloads, from the root of the tree: `resnet_50`, and `resnet_50_tiny` for tests.

wavecrest optimize benchmarks.zoo.workloads:resnet_50 --device cuda
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo.registry import TINY, entries

from wavecrest.measure.workload import Workload


def __getattr__(name: str) -> Callable[[str], Workload]:
    # the whole name first: a model may be called tiny itself
    tiny = name.replace("_", "-") not in entries()
    found = entries().get((name.removesuffix(TINY) if tiny else name).replace("_", "-"))
    if found is None or (tiny and not name.endswith(TINY)):
        raise AttributeError(f"no model {name!r} in the zoo")
    entry = found

    def make(device: str) -> Workload:
        return entry.workload(device, tiny=tiny)

    return make

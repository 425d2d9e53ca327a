"""What dispatch keeps for the calls of a signature does not keep the tensors of the first one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from wavecrest.dispatch import registry

KERNELS = [
    (name, backend)
    for name in registry.names()
    for backend in registry.get(name).backends
    if backend.startswith("triton") or backend == "torch"
]
SIZES = {"M": 4, "N": 32, "K": 32, "B": 1, "C": 3, "H": 6, "O": 4, "S": 5, "D": 16, "T": 3}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for name in registry.names():
        registry.get(name).force(None)


@pytest.mark.parametrize(("name", "backend"), KERNELS)
def test_tensors_of_the_first_call_are_let_go(name: str, backend: str, device: str) -> None:
    op = registry.get(name)
    op.force(backend)
    # a kernel for one architecture, of 16 bits
    special = backend == "triton_hopper"
    args = op.inputs(*(SIZES[size] for size in op.sizes), torch.bfloat16 if special else torch.float32, device)
    reason = op.backends[backend].supports(*args)
    if special and reason is not None:
        pytest.skip(reason)
    decision = op.decide(*args)
    assert decision.backend == backend, decision
    kept = [weakref.ref(value) for value in args if isinstance(value, torch.Tensor)]
    with torch.no_grad():
        result = op(*args)
    assert kept and op._bound
    del args, result
    gc.collect()
    assert not [reference() for reference in kept if reference() is not None]

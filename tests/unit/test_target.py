"""The architecture that kernels are made for, inside torch.compile."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.ops.common import target


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[hardware.Arch]:
    """An H200, detected by code that Dynamo cannot trace."""
    arch = hardware.ARCHS["sm_90"]

    def detect() -> hardware.Device:
        assert importlib.import_module("platform").machine()
        return hardware.Device("cuda", 0, arch.name, arch.part, arch.compute_units, 1 << 37, "cuda 13.0")

    monkeypatch.setattr(hardware, "detect", detect)
    target._detected.cache_clear()
    torch._dynamo.reset()
    yield arch
    target._detected.cache_clear()


def test_detection_is_not_traced(found: hardware.Arch) -> None:
    """mlstm_chunkwise and mlstm_sequence failed on imports in it (torch 2.11: "_gcd_import" cannot be traced)."""

    def scaled(x: Tensor) -> Tensor:
        known = target.arch()
        return x if known is None or known.vendor != "nvidia" else x * known.compute_units

    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    assert compiled(torch.ones(())).item() == found.compute_units
    assert target.arch() is found

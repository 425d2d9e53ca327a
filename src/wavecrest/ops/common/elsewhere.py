"""Decisions for a GPU that need not be here: calls that claim to be on it, and rows and kernels of its architecture."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import wavecrest.ops.common.target as _target
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import CallT, mapped
from wavecrest.dispatch.tuned import Database, Overlay, row
from wavecrest.hardware import Arch


def claimed(call: CallT, device: str = "cuda:0") -> CallT:
    """A call of tensors on the device "meta" as one of tensors without memory that claim to be on another device."""
    mode, where = FakeTensorMode(), torch.device(device)
    return mapped(call, lambda tensor: FakeTensor(mode, tensor, where))


@contextlib.contextmanager
def assumed(target: Arch) -> Iterator[None]:
    """Inside, ops decide for an architecture, without gradients and anew; what a backend needs is looked for here."""
    rows = Database(arch=target.name, overlay=Overlay.of_user())
    with warnings.catch_warnings():
        # Triton asks what has no memory for its address, to see that it is a multiple of 16
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with torch.no_grad(), _target.assumed(target), row.assumed(target), registry.measured_in(rows):
            yield

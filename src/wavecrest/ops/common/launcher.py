"""A kernel launch as data, what starts one without Triton's own look-up, and the warning where another one runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.interpreted as _interpreted
import wavecrest.ops.common.triton as _triton
import wavecrest.ops.common.warmup as _ahead
from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.tuned import Config

# above PyTorch (10) and the reference (0)
KERNEL_PRIORITY = 20


class Launch(NamedTuple):
    """One kernel launch: `kernel[grid](*args, **options())`. `switches`: options that are the compiler's alone."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    config: Config
    switches: tuple[tuple[str, str], ...] = ()

    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {**self.constants, **self.config.kwargs, **dict(self.switches)}


def starter(launch: Launch, device: torch.device, num_descriptors: int = 0) -> Callable[..., None]:
    """The function that takes the kernel's tensors and launches it: `launch.args` are these, then numbers it keeps.

    The first `num_descriptors` of `launch.args` are tensor descriptors. The function takes the tensors that they
    describe, whose addresses the caller knows to be multiples of 16.

    Valid for one signature (sizes, strides, dtypes, device). Each call checks only that addresses are multiples of 16;
    if they are, the compiled kernel is called without Triton's own look-up, which is most of the cost of a launch.

    Inside `ops.common.warmup.rehearse` the kernel is compiled for the arguments, not launched.
    """
    if _triton.interpreted and not torch.compiler.is_compiling():
        _interpreted.warn_of(launch.args)
    tensors = num_descriptors + sum(isinstance(value, Tensor) for value in launch.args)
    numbers = launch.args[tensors:]
    # Triton checks what the signature fixes each time it makes a descriptor: a call's are copies with its own tensors
    forms = [
        (type(one), {name: value for name, value in vars(one).items() if name != "base"})
        for one in launch.args[:num_descriptors]
    ]
    # do not capture `launch`: the closure is cached and would keep the first call's tensors alive
    kernel, grid = launch.kernel, launch.grid
    slow, options = kernel[grid], launch.options()
    if torch.compiler.is_compiling():
        return lambda *args: slow(*args, *numbers, **options)
    fast: Callable[..., None] | None = None
    constants = numbers
    under_way, rehearsed = _ahead.under_way.get, False

    def start(*args: Any) -> None:
        nonlocal fast, constants, rehearsed
        # by the tensor's own method, which a subclass without memory of its own refuses (PackedWeight); in a loop, as
        # operator.methodcaller takes twice the time (Python 3.11)
        pointers = []
        for x in args[num_descriptors:]:
            pointers.append(x.data_ptr())
        if num_descriptors:
            descriptors = []
            # written out: a function would be another call for each
            for (kind, fields), x in zip(forms, args, strict=False):
                descriptor = object.__new__(kind)
                descriptor.__dict__.update(fields, base=x)
                descriptors.append(descriptor)
            args = (*descriptors, *args[num_descriptors:])
        aligned = reduce(or_, pointers, 0) % 16 == 0
        ahead = under_way()
        if ahead is not None:
            # once is enough for the blocks of a model, which come here one after the other
            if not rehearsed:
                ahead.compile(kernel, grid, (*args, *numbers), options)
                rehearsed = aligned
        elif not aligned:
            slow(*args, *numbers, **options)
        elif fast is not None:
            fast(*args[:num_descriptors], *pointers, *constants)
        else:
            compiled = slow(*args, *numbers, **options)
            # None in Triton's interpreter
            if compiled is not None:
                named = kernel.params[len(args) + len(numbers) :]
                constants = (*numbers, *(options[parameter.name] for parameter in named))
                fast = _triton.direct(compiled, grid, device.index)

    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return start

    def guarded(*args: Any) -> None:
        # Triton launches on the current device, which need not be the tensors'
        if torch.cuda.current_device() == device.index:
            start(*args)
            return
        with torch.cuda.device(device):
            start(*args)

    return guarded


def aligned(op: str, addresses: int, backend: str) -> bool:
    """True if tensors begin at multiples of 16 bytes, as wide copies do and no key says; else there is a warning.

    `addresses`: of all of them, or-ed.
    """
    if addresses % 16 == 0:
        return True
    reason = "copies from multiples of 16 bytes, where one of the tensors does not begin; a clone of it does"
    replaced(op, reason, backend)
    return False


@functools.cache
def replaced(op: str, reason: str, backend: str) -> None:
    """Warn that an op's portable kernel runs a call in place of the chosen one; once of each reason."""
    warnings.warn(f"{op}: its portable kernel runs in place of {backend}, which {reason}", PortableKernel, stacklevel=2)

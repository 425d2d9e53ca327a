"""The cases of `wavecrest bench OP`: shapes by suite, what the op itself declares, or the sizes asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from wavecrest.bench import sizes
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Cell
from wavecrest.errors import InvalidArgument

SHORT_DTYPES = {long: short for short, long in sizes.SHORT.items()}

# (M, N, dtype)
Shape = tuple[int, int, str]

# shapes that wavecrest is compared with its peers on
TABLE: tuple[Shape, ...] = (
    (1, 4096, "bfloat16"),
    (16, 4096, "bfloat16"),
    (4096, 1024, "bfloat16"),
    (4096, 4096, "bfloat16"),
    (8192, 8192, "bfloat16"),
    (4096, 16384, "bfloat16"),
    (2048, 65536, "bfloat16"),
)
# shapes that show the distance from the memory limit: tensors of 64 MiB and more, other dtypes, rows wider than a
# program holds
LIMIT: tuple[Shape, ...] = (
    (16384, 2048, "bfloat16"),
    (8192, 5120, "bfloat16"),
    (8192, 8192, "float16"),
    (8192, 8192, "float32"),
    (4096, 32768, "bfloat16"),
    (1024, 131072, "bfloat16"),
    (512, 262144, "bfloat16"),
)
SUITES: dict[str, tuple[Shape, ...]] = {
    "shared": TABLE + LIMIT,
    # takes seconds on a CPU
    "quick": ((16, 1024, "bfloat16"), (64, 4096, "bfloat16"), (7, 1000, "float32")),
}

# options that a peer needs to have a counterpart (liger-kernel's GELU is the tanh form), measured on all but the
# cases of LIMIT
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {"gelu_and_mul": {"tanh": {"approximate": "tanh"}}}


@dataclass(frozen=True, slots=True)
class Case:
    """One set of arguments of one op, made when its turn comes (large ones do not fit into memory together)."""

    name: str
    make: Callable[[], AnyCall]
    # as asked for by name; empty for the cases of a suite
    sizes: Mapping[str, int] = field(default_factory=dict)


def sized(op: AnyOp, shape: sizes.Shape, device: str, options: Mapping[str, Cell] | None = None) -> Case:
    """The case of sizes, a dtype and other parts of the key; its name has the sizes in the order of `Study.sizes`."""
    numbers, dtype = shape
    words = [sizes.shown(name, value) for name, value in (options or {}).items()]
    name = " ".join(("x".join(map(str, numbers)), SHORT_DTYPES.get(dtype, dtype), *words))
    make = partial(sizes.call, op, numbers, dtype, device, options)
    return Case(name, make, dict(zip(op.study.sizes, numbers, strict=True)))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16" or "bf16".

    Raises:
        InvalidArgument: there is no floating-point dtype of that name.
    """
    full = next((long for long, short in SHORT_DTYPES.items() if name in (long, short)), name)
    found = getattr(torch, full, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidArgument(f"--dtype takes {', '.join(SHORT_DTYPES)}, not {name!r}")
    return found


def cases(op: AnyOp, suite: str, device: str, *, dtype: str | None = None, matching: str = "") -> list[Case]:
    """The cases of an op in a suite whose name contains `matching`; with `dtype` every shape once, in that dtype.

    Raises:
        InvalidArgument: no such suite or dtype.
    """
    if suite not in SUITES:
        raise InvalidArgument(f"no suite {suite!r}; there are {', '.join(SUITES)}")
    if dtype is not None:
        dtype = str(dtype_of(dtype)).removeprefix("torch.")
    bench_cases = op.study.bench_cases
    if bench_cases is not None:
        found = [Case(name, make) for name, make in bench_cases(suite, device).items()]
    else:
        shapes = dict.fromkeys((M, N, dtype or own) for M, N, own in SUITES[suite])
        found = []
        for label, extra in {"": {}, **VARIANTS.get(op.name, {})}.items():
            found += [_case(op, shape, device, label, extra) for shape in shapes if not label or shape not in LIMIT]
    return [case for case in found if matching in case.name]


def _case(op: AnyOp, shape: Shape, device: str, label: str, extra: dict[str, Any]) -> Case:
    M, N, dtype = shape
    name = f"{M}x{N} {SHORT_DTYPES.get(dtype, dtype)}{f' {label}' if label else ''}"
    return Case(name, partial(_make, op, M, N, dtype_of(dtype), device, extra))


def _make(op: AnyOp, M: int, N: int, dtype: torch.dtype, device: str, extra: dict[str, Any]) -> AnyCall:
    call = op.study.inputs(M, N, dtype, device)
    return call._replace(**extra) if extra else call

"""The child that compiles: `python -m wavecrest.tune.compile_worker` reads jobs and answers them, a line of JSON each.

A compiler can abort its process or hang; in a child process that costs one kernel.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor

from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import EnvironmentProblem, InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.isa import compiler
from wavecrest.records import decode

_PLAIN = (bool, int, float, str)


def described(args: tuple[Any, ...]) -> list[Any]:
    """The arguments of a call as JSON; of tensors, the properties that a kernel is compiled for.

    Raises:
        Unsupported: an argument of another type.
    """
    return [_described(value) for value in args]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return {"items": described(tuple(value))}
    raise Unsupported(f"an argument of type {type(value).__name__} is compiled for when it is called")


def arguments(values: list[Any]) -> tuple[Any, ...]:
    """The arguments that `described` was given, with tensors of the device "meta"."""
    return tuple(map(_argument, values))


def _argument(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "items" in value:
        return arguments(value["items"])
    dtype = getattr(torch, value["dtype"])
    return (
        torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta") if "shape" in value else dtype
    )


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Compile the launch of a job; returns seconds, bytes of shared memory and scratch, or the compiler's error."""
    begin = time.perf_counter()
    try:
        arch = ARCHS[job["arch"]]
        op = ops.get(job["op"])
        launches = op.study.kernel(job["backend"]).launches
        assert launches is not None
        made = launches(op.call_of(arguments(job["args"])), Config(**job["config"]), arch)
        compiled = compiler.build(made[job["index"]], arch.name)
    except (Unsupported, InvalidArgument) as error:
        return {"error": str(error)}
    except EnvironmentProblem as error:
        return {"error": str(error), "fatal": True}
    found = {"seconds": time.perf_counter() - begin, "shared": compiled.metadata.shared}
    try:
        return found | {"scratch": compiler.scratch(compiled, arch.name)}
    except EnvironmentProblem:
        # it compiles; whether it spills is unknown
        return found


def main() -> None:
    """Answer jobs until the other side closes."""
    # output of a compiler must not mix with the answers
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(answer(decode.json_of(line, finite=False))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()

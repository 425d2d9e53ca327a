"""The child that runs candidates: `python -m wavecrest.tune.child` reads a greeting, then keys, a line of JSON each.

Before each step it announces the step (`trial.Step`), and at the end of a key its result. A kernel that crashes or
hangs costs the parent this child, and the candidate its place.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from wavecrest import hardware, ops
from wavecrest.backends import user_files
from wavecrest.bench import sizes, suites
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.records import decode, provenance
from wavecrest.tune import admission, candidates, race, trial, untuned_calls

Say = Callable[[dict[str, Any]], None]


def greeting(
    device: hardware.Device,
    modules: tuple[str, ...],
    seconds: float,
    kernels: tuple[str, ...] = (),
    in_a_row: int = 1,
) -> dict[str, Any]:
    """The first message to a child: the device (as it is named in the child), what to import and what to load, and how
    to time (`trial.tune_key`).
    """
    named = device.to_dict() | {"index": 0}
    return {
        "device": named, "modules": list(modules), "seconds": seconds, "kernels": list(kernels), "in_a_row": in_a_row,
    }  # fmt: skip


def job(op: AnyOp, one: trial.Trial) -> dict[str, Any]:
    """A key as JSON."""
    return {
        "op": op.name,
        "source": dict(one.source),
        "case": one.case.name,
        "key": list(one.key),
        "candidates": [
            [other.backend, None if other.config is None else dict(other.config.kwargs), other.role]
            for other in one.field.candidates
        ],
        "declined": [list(pair) for pair in one.field.refused],
        # JSON has no numbers for names
        "refused": sorted(one.refused.items()),
        "ended": sorted(one.ended.items()),
        "alone": one.alone,
    }


def trial_of(asked: dict[str, Any], op: AnyOp, device: str) -> trial.Trial:
    """The trial that `job` describes, with a case of this process.

    Raises:
        InvalidArgument: there is no such case here.
    """
    key = tuple(asked["key"])
    found = tuple(
        candidates.Candidate(backend, None if config is None else Config(**config), role)
        for backend, config, role in asked["candidates"]
    )
    field = candidates.Field(found, tuple((name, reason) for name, reason in asked["declined"]))
    case = _case(asked["case"], asked["source"], op, key, device)
    return trial.Trial(case, key, field, dict(asked["refused"]), dict(asked["ended"]), asked["alone"], asked["source"])


def _case(name: str, source: dict[str, Any], op: AnyOp, key: Key, device: str) -> suites.Case:
    if "suite" in source:
        case = next((case for case in suites.cases(op, source["suite"], device) if case.name == name), None)
        if case is None:
            raise InvalidArgument(f"suite {source['suite']} of {op.name} has no case {name!r} in this process")
    elif "sizes" in source:
        case = suites.Case(
            name, partial(sizes.call, op, source["sizes"], source["dtype"], device, source.get("options"))
        )
    else:
        # a call that is made from its key has that key, or is refused
        return suites.Case(name, partial(untuned_calls.call, op, untuned_calls.parts_of(op, key), device))
    call = case.make()
    op.check(call)
    other = op.key(call)
    if other != key:
        raise InvalidArgument(f"{name} has the key {other} in this process, not {key}: is this the same wavecrest?")
    return case


def answer(
    asked: dict[str, Any], device: hardware.Device, seconds: float, say: Say, in_a_row: int = 1
) -> dict[str, Any]:
    """The result of a key, or the reason why this process could not tune it."""

    def tell(step: trial.Step) -> None:
        say({"event": "step", **asdict(step)})

    tell(trial.Step("make"))
    try:
        with torch.no_grad():
            op = ops.get(asked["op"])
            one = trial_of(asked, op, device.torch_name)
            timer = race.timer_of(device.torch_name, in_a_row=in_a_row)
            tuned = trial.tune_key(op, one, device, seconds=seconds, timer=timer, in_a_row=in_a_row, tell=tell)
    except admission.DeviceLost as error:
        return {"event": "lost", "reason": str(error)}
    except (InvalidArgument, Unsupported, torch.OutOfMemoryError) as error:
        return {"event": "problem", "reason": admission.first_line(error)}
    # a mistake of the tuner's own costs a key, and says so there
    except Exception as error:
        return {"event": "problem", "reason": f"raised {type(error).__name__}: {admission.first_line(error)}"}
    return {"event": "done", "key": tuned.model_dump(mode="json")}


def _listen(arrived: SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        arrived.put(decode.json_of(line, finite=False))
    # the parent is gone: stop at once, since the step under way may never end
    os._exit(0)


def main() -> None:
    """Answer until the other side closes, or the device is lost."""
    # output of a kernel or its compiler must not mix with the answers
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    arrived: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(arrived,), daemon=True).start()
    first = arrived.get()
    for name in first["modules"]:
        importlib.import_module(name)
    for spec in first["kernels"]:
        user_files.load(spec)
    device = hardware.Device(**first["device"])
    here = hardware.detect("cpu" if device.kind == "cpu" else "cuda:0")
    versions = provenance.versions()
    found = {name: getattr(versions, name) for name in ("wavecrest", "torch", "triton")}
    say({"event": "ready", "name": here.name, "versions": found})
    while True:
        reply = answer(arrived.get(), device, first["seconds"], say, first["in_a_row"])
        say(reply)
        if reply["event"] == "lost":
            return


if __name__ == "__main__":
    main()

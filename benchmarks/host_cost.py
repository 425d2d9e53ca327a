"""Host cost of op calls, in µs: what the CPU does before a kernel runs.

Each op's call beside the cheaper of two: PyTorch's function for the same, and the bare `kernel[grid](...)` of our own
kernel with the arguments that the call launches it with (on a GPU alone). Tensors are small, so that the device waits
for the host. All are timed in turn: figures are medians over rounds, ratios medians of a round's ratios.

`floor` is the least checked call in Python around PyTorch's function: one function with the op's arguments that reads
shape, strides, dtype and device of the tensors it is given and looks them up. Where `floor_ratio`, that beside
PyTorch's function, is above MOST, so is any op's call that PyTorch's function runs.

    python benchmarks/host_cost.py [OP …] [--out evidence/<machine>/<date>_host-cost_ops.jsonl.gz]
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import wavecrest.ops.common.launcher as _launcher
from wavecrest import hardware, ops
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.op import AnyOp
from wavecrest.records import files, provenance

ROUNDS, CALLS, WARM = 15, 200, 50
# an op's call may take up to this multiple of the cheaper of the two
MOST = 1.3

Work = Callable[[], Any]


def _made(device: str) -> dict[str, tuple[Work, Work | None]]:
    """By op: its public function, and PyTorch's, of the same small tensors."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, r, w, b = random(16, 256), random(16, 256), random(256), random(256)
    weight, bias = random(256, 256), random(256)
    q, k, v = (random(1, 4, 16, 64) for _ in range(3))
    image, filters = random(1, 16, 8, 8), random(16, 16, 3, 3)
    flat = random(4096)
    return {
        "rms_norm": (lambda: ops.rms_norm(x, w, 1e-6), lambda: F.rms_norm(x, (256,), w, 1e-6)),
        "layer_norm": (lambda: ops.layer_norm(x, w, b, 1e-5), lambda: F.layer_norm(x, (256,), w, b, 1e-5)),
        "add_rms_norm": (lambda: ops.add_rms_norm(x, r, w, 1e-6), lambda: F.rms_norm(x + r, (256,), w, 1e-6)),
        "add_layer_norm": (lambda: ops.add_layer_norm(x, r, w, b), lambda: F.layer_norm(x + r, (256,), w, b)),
        "softmax": (lambda: ops.softmax(x), lambda: F.softmax(x, -1)),
        "silu_and_mul": (lambda: ops.silu_and_mul(x, r), lambda: F.silu(x) * r),
        "gelu_and_mul": (lambda: ops.gelu_and_mul(x, r), lambda: F.gelu(x) * r),
        "linear": (lambda: ops.linear(x, weight, bias), lambda: F.linear(x, weight, bias)),
        "gemm": (lambda: ops.gemm(x, weight), lambda: torch.matmul(x, weight)),
        "flash_attention": (
            lambda: ops.flash_attention(q, k, v, layout="bhsd"),
            lambda: F.scaled_dot_product_attention(q, k, v),
        ),
        "conv2d": (lambda: ops.conv2d(image, filters, padding=1), lambda: F.conv2d(image, filters, padding=1)),
        "memcpy": (lambda: ops.memcpy(flat), lambda: flat.clone()),
    }


# sizes of the example calls of ops that PyTorch has no function for
EXAMPLES = {
    "quantize_int8": (16, 256),
    "quantize_fp8": (16, 256),
    "rms_norm_quantize": (16, 256),
    "rope": None,
    "flash_decoding": None,
    "mla_decode": None,
    "mlstm_step": None,
    "mlstm_chunkwise": None,
}
SMALL = {"M": 16, "N": 256, "B": 1, "H": 4, "S": 16, "D": 64, "T": 16, "NH": 2, "K": 64}


def _of_study(name: str, device: str) -> Work:
    op = ops.get(name)
    sizes = EXAMPLES[name] or tuple(SMALL.get(size, 16) for size in op.study.sizes)
    call = op.study.inputs(*sizes, torch.bfloat16 if device == "cuda" else torch.float32, device)
    return lambda: op(call)


def bare(op: AnyOp, call: AnyCall) -> Work | None:
    """The launches of a call by our portable kernel, as Triton's own launcher makes them; None where it refuses."""
    backend = op.backends.get("triton")
    if backend is None or backend.bind is None or backend.refuse(call) is not None:
        return None
    seen: list[tuple[_launcher.Launch, tuple[Any, ...]]] = []
    starter = _launcher.starter

    def noting(launch: _launcher.Launch, device: torch.device, num_descriptors: int = 0) -> Callable[..., None]:
        start = starter(launch, device, num_descriptors)

        def run(*args: Any) -> None:
            # descriptors, the call's tensors, and the numbers that stay
            described = launch.args[:num_descriptors]
            seen.append((launch, (*described, *args[num_descriptors:], *launch.args[len(args) :])))
            start(*args)

        return run

    with mock.patch.object(_launcher, "starter", noting):
        backend.bind(call, op.config_of("triton", op.key(call)))(call)
    prepared = [(launch.kernel[launch.grid], args, launch.options()) for launch, args in seen]

    def work() -> None:
        for kernel, args, options in prepared:
            kernel(*args, **options)

    return work


def floor(name: str, ours: Work, native: Work) -> Work:
    """The work of `ours`, with a function in the op's place that only looks up its tensors and calls `native`."""

    def given_to(function: Callable[..., Any]) -> Work:
        """The work with this function in place of the op's."""
        work: Any = ours
        scope = {"ops": SimpleNamespace(**{name: function})}
        return types.FunctionType(work.__code__, scope, closure=work.__closure__)

    form = inspect.signature(getattr(ops, name))
    bare_form = form.replace(
        parameters=[one.replace(annotation=inspect.Parameter.empty) for one in form.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    given = given_to(form.bind)().arguments
    tensors = [one for one, value in given.items() if isinstance(value, Tensor)]
    facts = ", ".join(f"{one}.shape, {one}.stride(), {one}.dtype, {one}.device" for one in tensors)
    scope: dict[str, Any] = {"known": {}, "native": native}
    exec(f"def function{bare_form}:\n    known.setdefault(({facts}), True)\n    return native()\n", scope)
    return given_to(scope["function"])


def _call_of(work: Work, op: AnyOp) -> AnyCall:
    """The call that a public function makes: its first one is checked."""
    with mock.patch.object(op, "check", wraps=op.check) as check:
        op.forget()
        work()
    return check.call_args.args[0]


def measured(works: list[Work]) -> list[list[float]]:
    """Microseconds of a call by work and round; the device is waited for between works."""
    for work in works:
        for _ in range(WARM):
            work()
    rounds: list[list[float]] = [[] for _ in works]
    for number in range(ROUNDS):
        for place in range(len(works)) if number % 2 else reversed(range(len(works))):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                works[place]()
            rounds[place].append((time.perf_counter() - start) / CALLS * 1e6)
    return rounds


def host_cost(name: str, ours: Work, native: Work | None, device: str) -> dict[str, Any]:
    """The figures of one op."""
    op = ops.get({"linear": "gemm"}.get(name, name))
    kernel = bare(op, _call_of(ours, op)) if device == "cuda" else None
    least = None if native is None else floor(name, ours, native)
    works = {"ours": ours, "torch": native, "floor": least, "bare": kernel}
    present = {label: work for label, work in works.items() if work is not None}
    rounds = dict(zip(present, measured(list(present.values())), strict=True))
    row: dict[str, Any] = {label: round(statistics.median(series), 2) for label, series in rounds.items()}
    row["backend"] = op.decide(_call_of(ours, op)).backend
    others = [rounds[label] for label in ("torch", "bare") if label in rounds]
    if others:
        row["ratio"] = _ratio(rounds["ours"], min(others, key=statistics.median))
    if native is not None:
        row["floor_ratio"] = _ratio(rounds["floor"], rounds["torch"])
    return row


def _ratio(series: list[float], others: list[float]) -> float:
    return round(statistics.median([one / other for one, other in zip(series, others, strict=True)]), 3)


def main() -> int:
    """Measure, print, and write with --out; 1 if an op takes more than MOST times the cheaper of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="ops to measure; all if none is named")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {}
    with torch.no_grad():
        works = _made(device)
        if device == "cuda":
            works |= {name: (_of_study(name, device), None) for name in EXAMPLES}
        for name, (ours, native) in works.items():
            if not arguments.ops or name in arguments.ops:
                rows[name] = host_cost(name, ours, native, device)
                sys.stdout.write(f"{name:18} {json.dumps(rows[name])}\n")
    over = [name for name, row in rows.items() if row.get("ratio", 0.0) > MOST]
    sys.stdout.write(f"over {MOST} times: {', '.join(over) or 'no op'}\n")
    if arguments.out is not None:
        header = provenance.header(hardware.detect(), command=provenance.command_line()).model_dump(mode="json")
        result = {"kind": "host_cost", "header": header, "unit": "µs a call", "rows": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_document(arguments.out, result)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())

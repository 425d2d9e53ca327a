"""slstm_sequence on a CPU: the C code of `kernel_cpu.c`, compiled at its first use, and its calls."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest import cc
from wavecrest.dispatch.custom_op import configured_operation_of
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.errors import CompileWarning, EnvironmentProblem, MissingDependency
from wavecrest.ops.slstm.call import STATES, SlstmCall, SlstmStepCall
from wavecrest.ops.slstm.sequence.launch_steps import fake, result_of

# above PyTorch's operations
PRIORITY = 15
NEEDED_FOR = "the sLSTM's backend c"
SOURCE = "kernel_cpu.c"
# the first that the compiler takes; with none the code is right, and slower. What would trap is not asked for, only
# what it gives: choices of floats become vector instructions then
FLAGS = (("-fno-trapping-math", "-march=native"), ("-fno-trapping-math", "-mcpu=native"), ())
# the largest heads that it is the default for; of larger ones a step read weights slower than PyTorch did
LARGEST_HEAD_DIM = 128
# numbers of dtypes in the C code
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_POINTERS = (
    "x", "r", "bias", *(f"{name}_initial" for name in STATES), "starts", "lens", "resets", "y", *STATES, "scratch",
)  # fmt: skip
# of x and r the code knows the strides; from this one on tensors are contiguous
LAID_OUT = 2
_NUMBERS = (
    "batch", "tokens", "heads", "dim", "dtype", "exponential", "threads", "x_row", "x_token", "x_gate", "x_head",
    "x_column", "r_gate", "r_head", "r_from", "r_to",
)  # fmt: skip


class Arguments(ctypes.Structure):
    """A call as the C code takes it: its struct Call."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


@cache
def load() -> Any:
    """The compiled code.

    Raises:
        EnvironmentProblem: there is no compiler, the code does not compile, or cannot be kept or loaded.
    """
    text = resources.files(__package__).joinpath(SOURCE).read_text(encoding="utf-8")
    path = cc.library(text, "ops", "slstm_sequence", NEEDED_FOR, FLAGS)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EnvironmentProblem(f"{NEEDED_FOR}: {path} cannot be loaded; remove it: {error}") from error
    call, pointer, number = ctypes.POINTER(Arguments), ctypes.c_void_p, ctypes.c_int64
    library.scratch_floats.argtypes, library.scratch_floats.restype = (call,), number
    library.run.argtypes, library.run.restype = (call, pointer), None
    library.functions.argtypes, library.functions.restype = (pointer, pointer, number, number), None
    return library


@cache
def parallel() -> int | None:
    """The address of GOMP_parallel in the OpenMP that PyTorch runs on; None where it has none.

    A second OpenMP would have threads of its own, which wait for work on the same cores.
    """
    try:
        found = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


# Dynamo does not trace a compiler; it would look through a cache
@constant_in_graphs
def problem() -> str | None:
    """The reason why the C code cannot be compiled here, or None; a failure is a warning, once a process."""
    return _problem()


@cache
def _problem() -> str | None:
    try:
        load()
    except MissingDependency as error:
        return f"cannot be compiled: {error}"
    except EnvironmentProblem as error:
        warnings.warn(f"{error}\nPyTorch's operations run in its place.", CompileWarning, stacklevel=3)
        return f"cannot be compiled: {' '.join(str(error).split())[:300]}"
    return None


def refuse(call: SlstmCall | SlstmStepCall) -> str | None:
    """The reason why the C code cannot run a call; None if it can."""
    if call.x.device.type != "cpu":
        return f"runs on a CPU; these tensors are on {call.x.device.type}"
    if needs_grad(*call.floats):
        return "has no backward; a call that needs gradients runs in PyTorch"
    if call.x.dtype not in DTYPES:
        return f"takes {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(call.x)}"
    return problem()


def opt_in(call: SlstmCall | SlstmStepCall) -> str | None:
    """The reason why the C code runs a call only where it is asked for."""
    if call.head_dim > LARGEST_HEAD_DIM:
        return f"is not known to be faster than PyTorch for heads of more than {LARGEST_HEAD_DIM} elements"
    return None


def bind(call: SlstmCall) -> Callable[[SlstmCall], Tensor | tuple[Tensor, ...]]:
    """The function that runs calls with the signature of this one."""
    library, shape, dtype = load(), (call.batch, call.heads, call.head_dim), call.x.dtype
    tokens, last, device = call.tokens, call.return_last_states, call.x.device
    no_states = (None,) * len(STATES)
    fixed = bytes(Arguments(
        **dict(zip(_NUMBERS, (
            call.batch, tokens, call.heads, call.head_dim, DTYPES[dtype], call.forget_gate == "exp", 1,
            *call.x.stride(), *call.r.stride(),
        ), strict=True)),
    ))  # fmt: skip

    def run(call: SlstmCall) -> Tensor | tuple[Tensor, ...]:
        y = torch.empty((shape[0], tokens, *shape[1:]), dtype=dtype, device=device)
        states = [torch.empty(shape, dtype=torch.float32, device=device) for _ in STATES] if last else []
        if shape[0] > 0:
            given = Arguments.from_buffer_copy(fixed)
            given.threads = torch.get_num_threads()
            bias = None if call.bias is None else call.bias.float()
            scratch = torch.empty(library.scratch_floats(given), dtype=torch.float32, device=device)
            tensors = (
                call.x, call.r, bias, *call.initial, call.seq_starts, call.seq_lens, call.resets, y,
                *(states or no_states), scratch,
            )  # fmt: skip
            # what is held here lives until the code has run
            held = []
            for place, (name, one) in enumerate(zip(_POINTERS, tensors, strict=True)):
                if one is not None:
                    held.append(one.contiguous() if place >= LAID_OUT else one)
                    setattr(given, name, held[-1].data_ptr())
            library.run(given, parallel())
        return (y, *states) if last else y

    return run


def run(call: SlstmCall) -> Tensor | tuple[Tensor, ...]:
    """One call; one operation in a graph."""
    if torch.compiler.is_compiling():
        return result_of(call, _in_graph(call, []))
    return bind(call)(call)


def bind_step(call: SlstmStepCall) -> Callable[[SlstmStepCall], tuple[Tensor, ...]]:
    """The function that runs steps with the signature of this one: sequences of one token."""
    work = bind(call.sequence())

    def run(call: SlstmStepCall) -> tuple[Tensor, ...]:
        y, *states = work(call.sequence())
        return (y[:, 0], *states)

    return run


def run_step(call: SlstmStepCall) -> tuple[Tensor, ...]:
    """One step; one operation in a graph."""
    y, *states = run(call.sequence())
    return (y[:, 0], *states)


def _run(call: SlstmCall, _config: list[int]) -> list[Tensor]:
    found = bind(call)(call)
    return list(found) if isinstance(found, tuple) else [found]


_in_graph = configured_operation_of("slstm_c", SlstmCall, _run, fake)

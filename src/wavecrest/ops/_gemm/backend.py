"""The op gemm and its Triton backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import wavecrest.ops._gemm.config as _config
import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops._gemm.launch_cdna as _cdna
import wavecrest.ops._gemm.launch_gemv as _gemv
import wavecrest.ops._gemm.launch_hopper as _hopper
import wavecrest.ops._gemm.launch_hopper_blocks as _blocks
import wavecrest.ops._gemm.launch_hopper_words as _words
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.custom_op import custom_op_of
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import name_of, row_bucket
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, GemmCall, check
from wavecrest.ops._gemm.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._gemm.reference import reference, values_of_a

# below PyTorch's: a library's GEMM is the default until a measured row says otherwise
PRIORITY = 5
EPILOGUE = "triton_hopper_epilogue"
MEASURED = "runs where a measured row names it"
# of kernels for some calls, above the portable one: it takes twice the time of `triton_hopper_blocks` from 128 rows on
# (one H200, 2026-11-26)
SPECIAL_PRIORITY = PRIORITY + 1
TAILED = "has one dtype for all columns of b"

op: Op[GemmCall, Tensor] = Op(
    "gemm",
    GemmCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._gemm.study",
    key_fields=KEY_FIELDS,
    key_sizes=("rows", "columns", "k"),
    op_class="gemm",
)


def fake(call: GemmCall) -> Tensor:
    """An empty result of a call."""
    return torch.empty(call.shape, dtype=call.dtype, device=call.a.device)


# for calls whose addresses are read, which Dynamo does not trace: the graph calls the op, which decides again.
# The residual of a graph is the graph's: it is not overwritten
_in_graph = custom_op_of(op, GemmCall, fake, without=("overwrite_residual",))


def _refuse(call: GemmCall) -> str | None:
    """The reason why none of wavecrest's kernels runs a call; None if one can."""
    for name, dtype in (("a", call.a.dtype), ("b", call.b.dtype), ("the result", call.dtype)):
        if dtype in _quantized.LARGEST and dtype != torch.int8:
            reason: str | None = _quantized.kernel_refusal(dtype)
            if reason is not None:
                return f"{name}: {reason}"
    wide = "bfloat16" if call.a.dtype.itemsize == 1 else name_of(call.a.dtype)
    reason = _checks.kernel_refusal(wide, call.a.device.type, 1, call.needs_grad)
    if reason is None and call.dtype == torch.float64:
        reason = "makes no float64"
    if reason is None and call.norm_weight is not None and call.K == 0:
        reason = "normalises no row without elements"
    return reason or _launch.refuse_strides(call)


def _refuse_tiles(call: GemmCall) -> str | None:
    return _refuse(call) or _launch.cannot_normalise(call) or (TAILED if call.tail is not None else None)


def _refuse_stream_k(call: GemmCall) -> str | None:
    reason = "does not make gated activations" if call.activation in GATED else None
    if call.tail is not None:
        reason = TAILED
    if call.norm_weight is not None:
        reason = "does not normalise the rows of a: no program has all of K"
    return _refuse(call) or reason or ("has no steps to share out: K is 0" if call.K == 0 else None)


def _refuse_gemv(call: GemmCall) -> str | None:
    return _refuse(call) or _gemv.refusal(call)


def _refuse_hopper(call: GemmCall) -> str | None:
    return _refuse(call) or _hopper.refusal(call)


def _refuse_epilogue(call: GemmCall) -> str | None:
    return _refuse(call) or _hopper.refusal_of_epilogue(call)


def _refuse_blocks(call: GemmCall) -> str | None:
    return _refuse(call) or _blocks.refusal(call)


def _refuse_words(call: GemmCall) -> str | None:
    return _refuse(call) or _words.refusal(call)


def _refuse_cdna(call: GemmCall) -> str | None:
    return _refuse(call) or (TAILED if call.tail is not None else _cdna.refusal(call))


def _opt_in(_call: GemmCall) -> str:
    return MEASURED


def _opt_in_gemv(call: GemmCall) -> str | None:
    if call.tail is not None:
        return None
    # of one row and weights in 8 bits 16 of the 17 measured rows of sm_90 are its (2026-11-28). A decode step of Llama
    # 3.1 8B in int8, which has no row for one of its four GEMMs, was 5 % shorter by it (H200, 2026-11-28, no record)
    narrow = call.form == "plain" and call.b.dtype.itemsize == 1 and call.a.dtype.itemsize > 1
    return None if narrow and row_bucket(call.M) == 1 and not _is_amd() else MEASURED


# Dynamo would trace the detection of the GPU, which it cannot
@constant_in_graphs
def _is_amd() -> bool:
    arch = _target.arch()
    return arch is not None and arch.vendor == "amd"


def _opt_in_words(call: GemmCall) -> str | None:
    # of 4-bit values: 10.6, 9.6 and 17.7 µs for three GEMMs of a layer of Llama 3.1 8B and one row, where GEMVs take
    # 13.0, 11.0 and 23.0; 10.9 and 18.4 for two rows, where these take 17.5 and 35.6. Of int8 and one row GEMVs are
    # faster when timed alone, by 4 to 30 % (H200, 2026-11-29_tune_llm_quantized.jsonl.gz)
    return None if call.form == "int4" and row_bucket(call.M) <= 2 else MEASURED


def _opt_in_blocks(call: GemmCall) -> str | None:
    # tiles of 16 rows of the portable kernel are faster there, in each shape of benchmarks/fp8_blocks.py
    return MEASURED if row_bucket(call.M) <= _config.FEW_ROWS else None


def default_config(make: Callable[[_config.Shape, Arch | None], Config], key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return make(shape_of(key), _target.arch())


def _run(planner: _launch.Planner, call: GemmCall, config: Config) -> Tensor:
    """One call; inside torch.compile as one operation of the graph where its addresses are read."""
    if torch.compiler.is_compiling() and _reads_addresses(planner, call, config):
        return _in_graph(call)
    return _launch.bind(planner, call, config)(call)


def _reads_addresses(planner: _launch.Planner, call: GemmCall, config: Config) -> bool:
    return _launch.with_descriptors(call, config) or (planner is _gemv.gemv and _gemv.reads_words(call))


def is_one_operation(backend: str, call: GemmCall) -> bool:
    """True where torch.compile's graph has a call on a backend as one operation, which decides again when it runs.

    So a caller who names the backend makes an operation that names it too.
    """
    if backend in ("triton_hopper", EPILOGUE, _blocks.NAME, _words.NAME):
        return True
    planner = _PLANNERS.get(backend)
    return planner is not None and _reads_addresses(planner, call, op.config_of(backend, op.key(call)))


# of kernels that a graph traces, or has as one operation, call by call
_PLANNERS = {"triton": _launch.tiles, "triton_stream_k": _launch.stream, "triton_gemv": _gemv.gemv}


def _portable(call: GemmCall) -> Callable[[GemmCall], Tensor]:
    return _launch.bind(_launch.tiles, call, default_config(_config.tiled, key_of(call)))


def _portable_normed(call: GemmCall) -> Callable[[GemmCall], Tensor]:
    """As `_portable`, with the norm in a launch of its own, as tiles normalise no rows for 4-bit weights."""
    run = _portable(call._replace(norm_weight=None))

    def normed(call: GemmCall) -> Tensor:
        return run(call._replace(a=values_of_a(call).to(call.a.dtype), norm_weight=None))

    return normed


def _bind_hopper(call: GemmCall, config: Config) -> Callable[[GemmCall], Tensor]:
    return _hopper.bind(call, config, _portable(call))


def _run_hopper(call: GemmCall, config: Config) -> Tensor:
    """One call; inside torch.compile as one operation of the graph, since a launch makes the descriptors."""
    return _in_graph(call) if torch.compiler.is_compiling() else _bind_hopper(call, config)(call)


def _bind_epilogue(call: GemmCall, config: Config) -> Callable[[GemmCall], Tensor]:
    return _hopper.bind(call, config, _portable(call), EPILOGUE)


def _run_epilogue(call: GemmCall, config: Config) -> Tensor:
    """As `_run_hopper`."""
    return _in_graph(call) if torch.compiler.is_compiling() else _bind_epilogue(call, config)(call)


def _bind_blocks(call: GemmCall, config: Config) -> Callable[[GemmCall], Tensor]:
    return _blocks.bind(call, config, _portable(call))


def _run_blocks(call: GemmCall, config: Config) -> Tensor:
    """As `_run_hopper`."""
    return _in_graph(call) if torch.compiler.is_compiling() else _bind_blocks(call, config)(call)


def _bind_words(call: GemmCall, config: Config) -> Callable[[GemmCall], Tensor]:
    return _words.bind(call, config, _portable(call) if call.norm_weight is None else _portable_normed(call))


def _run_words(call: GemmCall, config: Config) -> Tensor:
    """As `_run_hopper`, since a launch looks at addresses."""
    return _in_graph(call) if torch.compiler.is_compiling() else _bind_words(call, config)(call)


def _bind_cdna(call: GemmCall, config: Config) -> Callable[[GemmCall], Tensor]:
    return _cdna.bind(call, config, _portable(call))


op.attach_kernel(
    "triton",
    partial(_launch.bind, _launch.tiles),
    run=partial(_run, _launch.tiles),
    refuse=_refuse_tiles,
    priority=PRIORITY,
    default_config=partial(default_config, _config.tiled),
    optional=("CHAINS", "EARLY"),
)
op.attach_kernel(
    "triton_stream_k",
    partial(_launch.bind, _launch.stream),
    run=partial(_run, _launch.stream),
    refuse=_refuse_stream_k,
    opt_in=_opt_in,
    priority=PRIORITY,
    default_config=partial(default_config, _config.stream_k),
)
op.attach_kernel(
    "triton_gemv",
    partial(_launch.bind, _gemv.gemv),
    run=partial(_run, _gemv.gemv),
    refuse=_refuse_gemv,
    opt_in=_opt_in_gemv,
    priority=SPECIAL_PRIORITY,
    default_config=partial(default_config, _config.gemv),
    optional=("EARLY",),
)
op.attach_kernel(
    "triton_hopper",
    _bind_hopper,
    run=_run_hopper,
    refuse=_refuse_hopper,
    opt_in=_opt_in,
    priority=PRIORITY,
    default_config=lambda _key: _config.hopper(),
)
op.attach_kernel(
    EPILOGUE,
    _bind_epilogue,
    run=_run_epilogue,
    refuse=_refuse_epilogue,
    opt_in=_opt_in,
    priority=PRIORITY,
    default_config=lambda _key: _config.hopper_epilogue(),
    as_native=True,
)
op.attach_kernel(
    _blocks.NAME,
    _bind_blocks,
    run=_run_blocks,
    refuse=_refuse_blocks,
    opt_in=_opt_in_blocks,
    priority=SPECIAL_PRIORITY,
    default_config=partial(default_config, _config.hopper_blocks_of),
)
op.attach_kernel(
    _words.NAME,
    _bind_words,
    run=_run_words,
    refuse=_refuse_words,
    opt_in=_opt_in_words,
    priority=SPECIAL_PRIORITY,
    default_config=partial(default_config, _config.hopper_words_of),
    optional=("EARLY", "PROGRAMS"),
)
op.attach_kernel(
    "triton_cdna",
    _bind_cdna,
    refuse=_refuse_cdna,
    opt_in=_opt_in,
    priority=PRIORITY,
    default_config=partial(default_config, _config.cdna_default),
)

"""Changes of a call that compile a GEMM kernel anew, and GEMM inside torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from tests.ops.gemm_harness import (
    BF16,
    E4M3,
    F32,
    I8,
    SPLIT,
    Watch,
    assert_result,
    assert_right,
    configs,
    multiply,
    noted_launches,
    product,
    random,
    scales,
    stream,
    tile,
    watched,
)
from wavecrest import ops
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


# --- compilation


UNITS = (16, 8, 4, 2, 1)


def _unspecialized(kernel: Any) -> set[str]:
    """The parameters whose value Triton does not look at when it decides whether to compile."""
    if hasattr(kernel, "params"):
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return set(kernel.kwargs["do_not_specialize"])


def _divisor(number: int) -> int:
    return next(unit for unit in UNITS if number % unit == 0)


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        pytest.param("triton", tile(), id="tiles"),
        pytest.param("triton", tile(**SPLIT), id="split"),
        pytest.param("triton_stream_k", stream(), id="stream_k"),
        pytest.param("triton_gemv", multiply(), id="multiply"),
    ],
)
def test_what_is_compiled_anew(backend: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes compile a kernel anew only by what divides N and K, and whether steps fill K; rows where there are few."""
    noted = noted_launches(monkeypatch)
    sizes = (1, 2, 3, 8, 16, 17, 24, 31, 32, 33, 48, 64, 80, 96, 100, 112, 160, 1000, 1001, 1024, 4096, 4128)
    few = backend == "triton_gemv"
    variants: dict[Any, set[Any]] = {}
    for i, K in enumerate(sizes):
        for j, N in enumerate(sizes):
            M = (1, 5, 8)[(i + j) % 3] if few else (1, 5, 16, 700, 4096)[(i + j) % 5]
            call = GemmCall(
                torch.empty(M, K, dtype=BF16, device="meta"), torch.empty(N, K, dtype=BF16, device="meta").mT
            )
            noted.clear()
            gemm.backends[backend].run(call, config=config)
            for launch in noted:
                options = launch.options()
                # one row has any stride; one column of K lies together with its neighbours
                bucket = (
                    launch.kernel, _divisor(N), _divisor(K), K % config["BLOCK_K"] == 0, M if few else M == 1,
                    K == 1, N == 1,
                )  # fmt: skip
                numbers = {
                    key: value
                    for key, value in zip(launch.kernel.arg_names, launch.args, strict=False)
                    if isinstance(value, (int, float)) and key not in _unspecialized(launch.kernel)
                }
                assert not numbers, f"specialised on {numbers}"
                variants.setdefault(bucket, set()).add(tuple(sorted(options.items(), key=str)))
    assert all(len(found) == 1 for found in variants.values())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "triton_stream_k"])
def test_new_sizes_do_not_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        noted = noted_launches(patch)
        gemm.run(backend, product(40, 96, 64, device="cuda"), config=configs(backend)[-1])
    kernels = [launch.kernel for launch in noted]

    def compiled_for(M: int, N: int, K: int) -> int:
        assert_right(backend, product(M, N, K, device="cuda"), configs(backend)[-1])
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    before = compiled_for(40, 96, 64)
    for shape in ((41, 96, 64), (2, 96, 64), (700, 112, 128), (64, 1008, 1024)):
        assert compiled_for(*shape) == before, f"{shape} compiled anew"
    # stated borders: another divisor of N, of K
    assert compiled_for(40, 97, 64) > before
    assert compiled_for(40, 96, 65) > before + 1


@pytest.mark.parametrize(
    ("kind", "dynamic"),
    [
        *((kind, True) for kind in ("fp32", "epilogue", "batch", "int8", "e4m3", "weight")),
        *((kind, False) for kind in ("fp32", "int8")),
    ],
    ids=lambda value: {True: "dynamic", False: "static"}.get(value, value),
)
def test_compile_fullgraph(kind: str, dynamic: bool, device: str) -> None:
    """One graph without breaks, equal to eager; with dynamic shapes rows of one bucket do not compile again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dtype = {"int8": I8, "e4m3": E4M3}.get(kind, F32)
    b = random(32, 48, dtype=I8 if kind == "weight" else dtype, device=device).mT
    options: dict[str, Any] = {"out_dtype": F32}
    if kind in ("int8", "e4m3"):
        options |= {"scale_a": scales(device=device, size=0.01), "scale_b": scales(32, device=device)}
    if kind == "epilogue":
        options |= {"bias": random(32, dtype=F32, device=device), "activation": "silu_and_mul", "alpha": 0.5}
    if kind == "batch":
        b = torch.stack((b, b + 1))

    def call(a: Tensor) -> Tensor:
        return ops.gemm(a, b, options.get("bias"), **{k: v for k, v in options.items() if k != "bias"})

    backend = "eager" if device == "cpu" else "inductor"
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
    with torch.no_grad():
        for rows in (20, 31):
            shape = (2, rows, 48) if kind == "batch" else (rows, 48)
            a = random(*shape, dtype=dtype, device=device)
            torch.testing.assert_close(compiled(a), call(a), rtol=1e-5, atol=1e-5)
    # not calls of the backend: Inductor has a graph traced again where it must take Python floats for constants
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dynamic else 2)
    # the decision made while tracing is on record
    assert any(calls == 0 and decision.key[2] == 48 for decision, calls in gemm.decisions())


def test_compile_with_gradients(device: str) -> None:
    torch._dynamo.reset()
    a, b = random(6, 20, dtype=F32, device=device), random(20, 18, dtype=F32, device=device)
    leaf, other = a.clone().requires_grad_(), a.clone().requires_grad_()
    backend = "aot_eager" if device == "cpu" else "inductor"
    torch.compile(lambda x: ops.gemm(x, b, activation="gelu"), fullgraph=True, backend=backend)(leaf).sum().backward()
    torch.nn.functional.gelu(other @ b).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


_COMPILE = """
import itertools
import torch
from wavecrest.hardware import ARCHS
from wavecrest.isa.compiler import compile_launch
from wavecrest.ops._gemm import launch as L
from wavecrest.ops._gemm import launch_gemv as few
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.dispatch.call import mapped
from wavecrest.dispatch.tuned import Config

import tests.ops.gemm_harness as h

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

calls = {}
for dtype in (torch.int8, torch.float8_e4m3fn):
    for blocks_a, blocks_b in itertools.product((0, 1), repeat=2):
        calls[f"{dtype} {blocks_a}{blocks_b}"] = GemmCall(
            empty(5, 300, dtype=dtype), empty(20, 300, dtype=dtype).mT, out_dtype=torch.float32,
            scale_a=empty(5, 3) if blocks_a else empty(5), scale_b=empty(3, 1) if blocks_b else empty(20))
bf16 = torch.bfloat16
int4 = empty(20, 160, dtype=torch.uint8).mT
zero = empty(3, 20, dtype=torch.uint8)
calls["int4"] = GemmCall(empty(5, 300, dtype=bf16), int4, scale_b=empty(3, 20), form="int4", group=128, zero=zero)
calls["weight groups"] = GemmCall(
    empty(5, 300, dtype=bf16), empty(20, 300, dtype=torch.int8).mT, scale_b=empty(10, 20), group=32)
calls["shuffled"] = GemmCall(empty(5, 320, dtype=bf16), empty(32, 320, dtype=bf16).mT, form="shuffled")
far = torch.empty_strided((5, 320), (2**31 + 16, 1), dtype=bf16, device="meta")
calls["far rows"] = GemmCall(far, empty(32, 320, dtype=bf16).mT)
far = torch.empty_strided((3, 20), (2**31 + 16, 1), dtype=bf16, device="meta")
calls["far columns"] = GemmCall(empty(5, 3, dtype=bf16), far)
three = empty(2, 3, 4, 320, dtype=bf16).permute(2, 1, 0, 3)
calls["three strides"] = GemmCall(three, empty(32, 320, dtype=bf16).mT)
calls["steps"] = GemmCall(empty(10, 600, dtype=bf16)[::2, ::2], empty(300, 60, dtype=bf16)[:, ::3])
calls["columns"] = GemmCall(empty(300, 5, dtype=bf16).t(), empty(300, 20, dtype=bf16))
calls["gated int8 out"] = GemmCall(
    empty(5, 300), empty(40, 300).mT, empty(40), activation="gelu_and_mul", residual=empty(5, 20), out_dtype=torch.int8,
    out_scale=empty())
calls["batch"] = GemmCall(empty(3, 5, 300), empty(3, 300, 20), empty(5), bias_along="m", activation="leaky_relu")
calls["int32"] = GemmCall(empty(5, 300, dtype=torch.int8), empty(20, 300, dtype=torch.int8).mT)
normed = {"norm_weight": empty(300, dtype=bf16)}
calls["normed"] = GemmCall(empty(8, 300, dtype=bf16), empty(20, 300, dtype=bf16).mT, **normed)
calls["normed gated"] = GemmCall(
    empty(3, 300, dtype=torch.float16), empty(40, 300, dtype=torch.float8_e5m2).mT, empty(40), None, empty(40),
    empty(3, 20), activation="silu_and_mul", **normed)
calls["normed tiles"] = GemmCall(
    empty(40, 300, dtype=bf16), empty(40, 300, dtype=torch.int8).mT, empty(40), None, empty(40), empty(40, 20),
    activation="silu_and_mul", **normed)
calls["normed fp32"] = GemmCall(empty(5, 300), empty(300, 20), **normed)
calls["normed int4"] = GemmCall(
    empty(2, 300, dtype=bf16), int4, scale_b=empty(3, 20), form="int4", group=128, **normed)
plans = [(L.tiles, h.tile(k=64, num_warps=1)), (L.stream, h.stream(k=64)), (few.gemv, h.multiply(split=2)),
         (L.tiles, h.tile(k=64, num_warps=1, SPLIT_K=2, PERSISTENT=1))]
count = 0
for turn, (name, call) in enumerate(calls.items()):
    planner, config = plans[turn % 4]
    if planner is L.stream and call.activation in h.GATED or planner is few.gemv and few.refusal(call):
        planner, config = plans[3]
    if call.norm_weight is not None:
        planner, config = L.tiles, h.tile(k=64, num_warps=1)
        if L.cannot_normalise(call) or name == "normed":
            planner, config = few.gemv, h.multiply(k=128)
    if call.group == 32:
        config = Config(**(config.kwargs | {"BLOCK_K": 32}))
    arch = ARCHS["gfx942" if turn % 3 else "sm_90"]
    plan = planner(call, empty(0, dtype=call.dtype), empty(0, dtype=L.partial_dtype(call)), config, arch, False)
    for launch in (plan.first, plan.second):
        if launch is not None:
            compile_launch(launch, arch.name)
            count += 1
print("compiled", count)
"""


def test_all_paths_pass_the_compiler() -> None:
    """The interpreter has no types that must agree: each combination of options is compiled, with small tiles."""
    pytest.importorskip("triton", reason="compiles kernels")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), os.getcwd()])
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 35


# --- on a GPU


def test_calls_with_descriptors_are_one_operation_of_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are not traced: the graph calls the op, which decides again. Here without real descriptors."""
    launch = sys.modules["wavecrest.ops._gemm.launch"]
    monkeypatch.setattr(launch, "with_descriptors", lambda _call, _config: torch.compiler.is_compiling())
    a, b, bias = random(20, 48, device=device), random(48, 40, device=device), random(40, dtype=F32, device=device)
    gemm.force("triton")
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: ops.gemm(x, b, bias, activation="silu", out_dtype=F32), fullgraph=True, backend=backend
    )
    with torch.no_grad():
        assert_result("triton", compiled(a), GemmCall(a, b, bias, activation="silu", out_dtype=F32))
    assert len(graphs) == 1 and "wavecrest.gemm" in graphs[0], graphs


@pytest.mark.gpu
@pytest.mark.parametrize("orders", ["by k", "across"])
def test_descriptors_inside_compile(orders: str) -> None:
    a, b = random(304, 512, device="cuda"), random(512, 640, device="cuda")
    a, b = (a, b.mT.contiguous().mT) if orders == "by k" else (a.mT.contiguous().mT, b)
    call = GemmCall(a, b, bias=random(640, device="cuda"), activation="silu")
    config = tile(128, 128, 64, TMA=1, num_warps=8, num_stages=3)
    gemm.pin(gemm.key(call), "triton", config, "exact", "a test")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.gemm(x, b, call.bias, activation="silu"), fullgraph=True)
    with torch.no_grad():
        assert_result("triton", compiled(a), call)
        assert gemm.decide(call).backend == "triton"

"""Changes of a call that compile a GEMM kernel anew, and GEMM inside torch.compile."""

from __future__ import annotations

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

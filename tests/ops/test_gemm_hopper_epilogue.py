"""sm_90's kernel whose epilogue has warps of its own: values on such a GPU; its tiles and barriers anywhere."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import gluon
from tests.ops.gemm_harness import BF16, F16, Watch, assert_right, random, watched
from tests.ops.hopper_harness import (
    SHAPES,
    activate_on_cpu,
    biases,
    definition,
    gated,
    gemm_on_sm_90,
    interpreted,
    plain,
    pretend_sm_90,
    stand_in,
)
from tests.ops.op_harness import name, same_bits, shape_id
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.graphs import activations
from wavecrest.hardware import ARCHS
from wavecrest.nn.linear import LinearOn
from wavecrest.ops._gemm import backend as gemm_backend
from wavecrest.ops._gemm import config as configs
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GATED, GemmCall
from wavecrest.ops._gemm.key import key_of
from wavecrest.ops._gemm.study import space
from wavecrest.ops.common.activation import ACTIVATIONS

EPILOGUE = "triton_hopper_epilogue"


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


@pytest.fixture
def hopper() -> AnyOp:
    return gemm_on_sm_90()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=name)
def test_values(dtype: torch.dtype, shape: tuple[int, ...], hopper: AnyOp) -> None:
    for activation in (None, *ACTIVATIONS):
        assert_right(EPILOGUE, plain(*shape, dtype, activation=activation, slope=0.25))
    for bias in biases(shape[1]):
        assert_right(EPILOGUE, plain(*shape, dtype, activation="gelu", bias=bias, alpha=0.75))
    residual = random(*shape[:2], dtype=dtype, device="cuda", seed=3)
    assert_right(EPILOGUE, plain(*shape, dtype, bias=biases(shape[1])[0], residual=residual))
    assert_right(EPILOGUE, plain(*shape, dtype, activation="silu", residual=residual))
    for activation in GATED:
        assert_right(EPILOGUE, gated(*shape, dtype, activation=activation, residual=residual))
    assert_right(EPILOGUE, gated(*shape, dtype, bias=biases(2 * shape[1])[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5, 40, 64), (1000, 328, 520), (2100, 2056, 72)], ids=shape_id)
def test_configurations(shape: tuple[int, ...], hopper: AnyOp) -> None:
    for call in (gated(*shape, alpha=0.75), plain(*shape, bias=biases(shape[1])[0], activation="gelu")):
        tried = space.epilogue_space(hopper.key(call), ARCHS["sm_90"])
        results = [assert_right(EPILOGUE, call, one) for one in tried]
        assert len(results) > 1 and all(same_bits(one, results[0]) for one in results)


@pytest.mark.gpu
def test_the_same_bits_each_time_and_in_a_graph(hopper: AnyOp) -> None:
    call = plain(3000, 1032, 1024, bias=biases(1032)[0], activation="gelu")
    bound = hopper.backends[EPILOGUE].bind
    assert bound is not None
    run = bound(call, configs.hopper_epilogue())
    first = run(call)
    assert all(same_bits(run(call), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call)
    captured.fill_(float("nan"))
    graph.replay()
    assert same_bits(captured, first)


def near(found: Tensor, call: GemmCall) -> bool:
    """True if each value is within a rounding of its definition and one of its sum."""
    want, unit = definition(call), 2.0**-8
    sums = (call.alpha * (call.a.double() @ call.b.double())).abs()
    before = definition(call._replace(activation=None)).abs()
    # no activation has a slope above 1.2, and up's rounding is multiplied by gate
    if call.activation in GATED:
        (gate_sums, up_sums), (gate, up) = sums.chunk(2, -1), before.chunk(2, -1)
        slack = 1.2 * gate_sums * up + up_sums * gate
    else:
        slack = 1.2 * sums
    if call.residual is not None:
        want = want + call.residual.double()
    return bool(((found.double() - want).abs() <= unit * (want.abs() + slack) + 1e-4).all())


@interpreted
@pytest.mark.parametrize("shape", [(128, 128, 256), (5, 40, 64), (300, 256, 64), (290, 328, 392)], ids=shape_id)
def test_tiles_and_barriers(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With each configuration, and fewer programs than tiles."""
    dense, gapped = biases(shape[1], "cpu")
    calls = [
        gated(*shape, BF16, "cpu", activation="gelu_and_mul", alpha=0.75),
        gated(*shape, F16, "cpu", bias=biases(2 * shape[1], "cpu")[1]),
        plain(*shape, F16, "cpu", alpha=0.75),
        plain(*shape, BF16, "cpu", bias=dense, activation="gelu"),
        plain(*shape, BF16, "cpu", bias=gapped, activation="leaky_relu", slope=0.25),
        plain(*shape, BF16, "cpu", bias=dense, residual=random(*shape[:2], dtype=BF16)),
        gated(*shape, BF16, "cpu", residual=random(*shape[:2], dtype=BF16)),
    ]
    for call in calls:
        for config in space.epilogue_space(key_of(call), ARCHS["sm_90"]):
            assert near(stand_in(call, config, 2, monkeypatch), call)


@interpreted
@pytest.mark.parametrize(
    ("say", "instead"),
    [
        ("left, right = hopper.warpgroup_mma_wait(2, deps=[left, right])", "pass"),
        ("hopper.mbarrier.wait(ended.index(me), (turn & 1) ^ 1)", "pass"),
        ("if me > 0 or turn > 0:", "if True:"),
        ("ended.index((me + GROUPS - 1) % GROUPS)", "ended.index(me)"),
        ("index((2 * me + 1) * PARTS + j).store(second", "index((2 * me + 1) * PARTS + j).store(first"),
        ("(me * SUMS + PARTS + j)", "(me * SUMS + j)"),
        ("after = first + (j + 1) % PARTS * WIDTH", "after = first + j * WIDTH"),
        ("bias_ptr, N + after, 2 * N", "bias_ptr, after, 2 * N"),
        ("UNITS + i)\n", "UNITS)\n"),
        ("[row, first + j * WIDTH]", "[row, first]"),
        (
            "_copy_residual(r_desc, r_tiles, arrived, next_row, after",
            "_copy_residual(r_desc, r_tiles, arrived, row, after",
        ),
        ("next_row, after, (me", "next_row, first, (me"),
        ("% 2 * UNITS + i).load", "% 2 * UNITS).load"),
    ],
)
def test_planted_errors_are_seen(say: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(x: Tensor, slope: float, activation: int) -> Tensor:
        # the groups that multiply get ahead where they may
        time.sleep(0.01)
        return activate_on_cpu(x, slope, activation)

    monkeypatch.setattr(gluon, "PATIENCE", 1.0)
    residual = random(290, 328, dtype=BF16)
    call = gated(290, 328, 392, device="cpu", bias=biases(656, "cpu")[1], residual=residual)
    with pytest.raises((AssertionError, TimeoutError)):
        assert near(stand_in(call, configs.hopper_epilogue(), 2, monkeypatch, slowly, **{say: instead}), call)


@interpreted
def test_sums_that_are_not_waited_for_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = gluon._multiplied

    def slowly(*args: Any, **kwargs: Any) -> Any:
        # the group that ends tiles gets ahead where it may
        time.sleep(0.005)
        return multiplied(*args, **kwargs)

    monkeypatch.setattr(gluon, "_multiplied", slowly)
    monkeypatch.setattr(gluon, "PATIENCE", 1.0)
    call = plain(290, 328, 392, device="cpu", activation="gelu")
    with pytest.raises((AssertionError, TimeoutError)):
        planted = {"hopper.mbarrier.wait(summed.index(me), turn & 1)": "pass"}
        assert near(stand_in(call, configs.hopper_epilogue(), 2, monkeypatch, **planted), call)


def test_it_runs_where_a_measured_row_names_it(device: str) -> None:
    call = plain(8, 16, 32, device=device)
    assert gemm.backends[EPILOGUE].opt_in(call) is not None and gemm.decide(call).backend != EPILOGUE
    # it rounds between the sums and the end, as PyTorch does
    assert gemm.backends[EPILOGUE].as_native and not gemm.backends["triton_hopper"].as_native


def test_configurations_fit() -> None:
    tried = list(space.epilogue_space(key_of(plain(8, 16, 32, device="cpu")), ARCHS["sm_90"]))
    assert tried[0] == configs.hopper_epilogue() and len(tried) == len(set(tried)) > 1
    for one in tried:
        assert space.hopper_shared_bytes(one, halves=2) <= 227 << 10


def test_in_torch_compile_it_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_sm_90(monkeypatch)
    asked: list[GemmCall] = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(gemm_backend, "_in_graph", asked.append)
    call = plain(20, 40, 64, device="cpu")
    config: Config = configs.hopper_epilogue()
    gemm_backend._run_epilogue(call, config)
    assert asked == [call]


def test_the_operations_that_name_a_backend_have_results_of_the_right_form() -> None:
    forms = ("test_schema", "test_faketensor")
    call = plain(20, 40, 64, device="cpu", bias=biases(40, "cpu")[0], residual=random(20, 40, dtype=BF16))
    torch.library.opcheck(torch.ops.wavecrest.gemm_on, (*call, "torch"), test_utils=forms)
    layer = random(20, 64), random(40, 64), None, None, "reference", "tf32x3"
    torch.library.opcheck(activations._in_graph, layer, test_utils=forms)


def test_a_compiled_layer_runs_on_the_backend_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on dispatch's choice, which a graph's own operation of gemm would ask for."""
    layer = torch.nn.Linear(64, 40, dtype=BF16)
    LinearOn.adopt(layer, "gelu", EPILOGUE)
    ran: list[str] = []
    call_on = type(gemm).call_on

    def recorded(op: AnyOp, backend: str, call: GemmCall) -> Tensor:
        if torch.compiler.is_compiling():
            return call_on(op, backend, call)
        ran.append(backend)
        return gemm.reference(call)

    monkeypatch.setattr(type(gemm), "call_on", recorded)
    monkeypatch.setattr("wavecrest.ops._gemm.launch_hopper.refusal_of_epilogue", lambda call: None)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        x = torch.randn(20, 64, dtype=BF16)
        assert same_bits(compiled(x), layer(x))
    assert ran == [EPILOGUE, EPILOGUE]

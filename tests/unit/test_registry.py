from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from wavecrest import ops, registry
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.registry import Cost, DispatchMiss, Op
from wavecrest.tuned import Config


@pytest.fixture
def op() -> Iterator[Op]:
    """An op of one tensor with backends that say who ran."""

    def check(x: torch.Tensor, scale: float = 1.0) -> None:
        if x.ndim != 2:
            raise InvalidArgument("sample: takes [M, N]")

    made = Op(
        "sample",
        reference=lambda x, scale=1.0: ("reference", None),
        check=check,
        key=lambda x, scale=1.0: (registry.m_bucket(x.shape[0]), x.shape[1], registry.dtype_name(x)),
        key_fields=("rows", "columns", "dtype"),
        inputs=lambda M, N, dtype, device: (torch.zeros(M, N, dtype=dtype, device=device),),
        cost=lambda x, scale=1.0: Cost(x.numel(), 2 * x.nbytes),
        default_config=lambda key: Config(BLOCK_N=key[1]),
    )
    made.attach(
        "fast",
        lambda x, scale=1.0, *, config: ("fast", config),
        supports=lambda x, scale=1.0: None if x.shape[1] <= 8 else "takes 8 columns at most",
        priority=20,
        takes_config=True,
    )
    made.attach("plain", lambda x, scale=1.0: ("plain", None), supports=lambda *_a, **_k: None, priority=10)
    made.attach(
        "shy",
        lambda x, scale=1.0: ("shy", None),
        supports=lambda *_a, **_k: None,
        reserved=lambda *_a, **_k: "only when asked for",
        priority=30,
    )
    yield made
    del registry._OPS["sample"]


def test_highest_priority_that_takes_the_call(op: Op) -> None:
    assert op(torch.zeros(2, 4)) == ("fast", Config(BLOCK_N=4))
    assert op(torch.zeros(2, 16)) == ("plain", None)


def test_decision_says_who_was_declined_and_why(op: Op) -> None:
    decision = op.decide(torch.zeros(2, 16))
    assert (decision.backend, decision.source, decision.config) == ("plain", "default", None)
    assert {(r.backend, r.reason) for r in decision.refused} == {
        ("shy", "only when asked for"),
        ("fast", "takes 8 columns at most"),
    }
    assert "plain" in decision.describe() and "default" in decision.describe()


def test_check_runs_before_every_path(op: Op) -> None:
    bad = torch.zeros(3)
    for call in (op, op.decide, lambda x: op.run("plain", x), lambda x: op.run("reference", x)):
        with pytest.raises(InvalidArgument, match="takes"):
            call(bad)
    with pytest.raises(InvalidArgument, match="takes"):
        op(bad, scale=2.0)


def test_calls_are_counted_by_key(op: Op) -> None:
    for rows in (1, 1, 9, 16, 10):
        op(torch.zeros(rows, 4))
    op(torch.zeros(9, 4), scale=3.0)
    counts = {decision.key: calls for decision, calls in op.decisions()}
    assert counts == {(1, 4, "float32"): 2, (16, 4, "float32"): 4}
    assert [row for row in registry.coverage() if row[0].op == "sample"] == op.decisions()


def test_deciding_is_not_calling(op: Op) -> None:
    op.decide(torch.zeros(2, 4))
    assert [calls for _, calls in op.decisions()] == [0]


def test_a_signature_is_more_than_its_key(op: Op) -> None:
    seen: list[Any] = []

    def bind(x: torch.Tensor, scale: float = 1.0) -> Any:
        seen.append((tuple(x.shape), x.stride(), x.dtype, scale))
        return lambda x, scale=1.0: "bound"

    op.attach("bound", op.backends["plain"].run, bind=bind, supports=lambda *_a, **_k: None, priority=40)
    calls = [
        (torch.zeros(9, 4),), (torch.zeros(9, 4),), (torch.zeros(10, 4),), (torch.zeros(4, 9).t(),),
        (torch.zeros(9, 4).half(),), (torch.zeros(9, 4), 2.0), (torch.zeros(9, 4), 2.0),
    ]  # fmt: skip
    for args in calls:
        assert op(*args) == "bound"
    assert len(seen) == 5
    assert op(torch.zeros(9, 4), scale=2.0) == ("plain", None), "keyword calls are not bound"


def test_gradients_change_the_signature() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        ops.rms_norm(x)
    assert ops.rms_norm(x).requires_grad
    grad = registry.get("rms_norm").key_fields.index("grad")
    grads = [decision.key[grad] for decision, _ in registry.get("rms_norm").decisions()]
    assert grads == [False, True]
    # the same grad mode, shape and strides: only the tensor says whether gradients are needed
    assert not ops.rms_norm(x.detach()).requires_grad
    assert ops.rms_norm(x).requires_grad
    calls = {decision.key[grad]: calls for decision, calls in registry.get("rms_norm").decisions()}
    assert calls == {False: 2, True: 2}


def test_the_signature_cache_is_bounded(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_SIGNATURES", 4)
    for rows in range(1, 20):
        op(torch.zeros(rows, 4))
    assert len(op._bound) <= 4
    assert sum(calls for _, calls in op.decisions()) == 19


def test_run_names_a_backend(op: Op) -> None:
    assert op.run("shy", torch.zeros(2, 4)) == ("shy", None)
    assert op.run("fast", torch.zeros(2, 4), config=Config(BLOCK_N=2)) == ("fast", Config(BLOCK_N=2))
    with pytest.raises(Unsupported, match="takes 8 columns at most"):
        op.run("fast", torch.zeros(2, 16))
    with pytest.raises(InvalidArgument, match="has no backend 'slow'; it has fast, plain, reference, shy"):
        op.run("slow", torch.zeros(2, 4))


def test_force(op: Op) -> None:
    x = torch.zeros(2, 4)
    assert op(x)[0] == "fast"
    op.force("shy")
    assert op(x)[0] == "shy"
    assert op.decide(x).source == "forced"
    op.force(None)
    assert op(x)[0] == "fast"
    with pytest.raises(InvalidArgument, match="no backend"):
        op.force("slow")


def test_a_forced_backend_that_declines_is_named_in_the_reason(op: Op) -> None:
    op.force("fast")
    decision = op.decide(torch.zeros(2, 16))
    assert decision.backend == "plain"
    assert "fast, forced, declines it" in decision.reason


def test_pin_fixes_one_key(op: Op) -> None:
    op.pin((2, 4, "float32"), "fast", Config(BLOCK_N=1), "exact", "measured")
    op.pin((4, 4, "float32"), "shy", None, "exact", "measured")
    assert op(torch.zeros(2, 4)) == ("fast", Config(BLOCK_N=1))
    assert op(torch.zeros(3, 4)) == ("fast", Config(BLOCK_N=4))
    assert op(torch.zeros(4, 4))[0] == "shy"
    assert op.decide(torch.zeros(2, 4)).source == "exact"
    op.unpin()
    assert op(torch.zeros(4, 4))[0] == "fast"


def test_a_pin_after_calls_takes_effect(op: Op) -> None:
    assert op(torch.zeros(2, 4))[0] == "fast"
    op.pin((2, 4, "float32"), "plain", None, "exact", "measured")
    assert op(torch.zeros(2, 4))[0] == "plain"


def test_a_pinned_backend_that_declines_is_named_in_the_reason(op: Op) -> None:
    op.pin((2, 16, "float32"), "fast", None, "exact", "measured")
    decision = op.decide(torch.zeros(2, 16))
    assert decision.backend == "plain" and "fast, pinned, declines it" in decision.reason


def test_attach_forgets_decisions(op: Op) -> None:
    assert op(torch.zeros(2, 4))[0] == "fast"
    op.attach("new", lambda x, scale=1.0: ("new", None), supports=lambda *_a, **_k: None, priority=99)
    assert op(torch.zeros(2, 4))[0] == "new"


def test_strict_reports_a_call_without_a_measured_row(op: Op) -> None:
    registry.strict("warn")
    with pytest.warns(DispatchMiss, match="no measured row: sample"):
        op(torch.zeros(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(torch.zeros(2, 4))
        op.pin((3, 4, "float32"), "plain", None, "exact", "measured")
        op(torch.zeros(3, 4))
    registry.strict("error")
    with pytest.raises(Unsupported, match="no measured row"):
        op(torch.zeros(5, 4))
    with pytest.raises(Unsupported, match="no measured row"):
        op(torch.zeros(5, 4))
    with pytest.raises(InvalidArgument, match="off, warn or error"):
        registry.strict("loud")  # type: ignore[arg-type]


def test_strict_looks_at_decisions_made_before(op: Op) -> None:
    op(torch.zeros(2, 4))
    registry.strict("error")
    with pytest.raises(Unsupported, match="no measured row"):
        op(torch.zeros(2, 4))


@pytest.mark.parametrize(("value", "code"), [("error", 1), ("loud", 1), ("off", 0)])
def test_strict_from_the_environment(value: str, code: int) -> None:
    import os

    script = "import torch; from wavecrest import ops; ops.rms_norm(torch.ones(2, 4))"
    environment = {**os.environ, "WAVECREST_STRICT": value}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr


def test_names_and_get() -> None:
    assert registry.names() == sorted(ops.__all__)
    with pytest.raises(InvalidArgument, match="no op named 'norm'; there are add_layer_norm"):
        registry.get("norm")


def test_a_name_registers_once(op: Op) -> None:
    with pytest.raises(InvalidArgument, match="already registered"):
        Op("sample", op.reference, op.check, op.key, op.inputs, op.cost, op.default_config)


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(0, 0), (1, 1), (8, 8), (9, 16), (16, 16), (17, 32), (65536, 65536), (65537, 131072), (10**9, 131072)],
)
def test_m_bucket(rows: int, bucket: int) -> None:
    assert registry.m_bucket(rows) == bucket


def test_compiled_calls_honour_force_and_pins() -> None:
    found = registry.get("rms_norm")
    x = torch.randn(3, 8)

    def compiled() -> str:
        torch._dynamo.reset()
        torch.compile(lambda x: ops.rms_norm(x), fullgraph=True, backend="eager")(x)
        (decision,) = found._traced.values()
        assert decision.key[0] == 0
        return f"{decision.backend} {decision.source}"

    assert compiled() == "torch default"
    found.force("reference")
    assert compiled() == "reference forced"
    found.force(None)
    found.pin((0, *found.key(x)[1:]), "reference", None, "exact", "plan")
    assert compiled() == "reference exact"


def test_interpreted_kernels_are_not_the_default_on_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here")
    decision = registry.get("rms_norm").decide(torch.randn(3, 8))
    assert decision.backend == "torch"
    assert "interpreter" in decision.refused[0].reason


def test_config_is_immutable_enough_to_be_a_key() -> None:
    one, two = Config(BLOCK_N=8, num_warps=4), Config(num_warps=4, BLOCK_N=8)
    assert one == two and hash(one) == hash(two) and {one: 1}[two] == 1
    assert dict(**one) == {"BLOCK_N": 8, "num_warps": 4}
    assert repr(one) == "Config(BLOCK_N=8, num_warps=4)"
    assert one != Config(BLOCK_N=8, num_warps=8)


@pytest.mark.parametrize(
    ("name", "flops", "bytes_"),
    [
        ("rms_norm", 4 * 24, 2 * 96 + 32),
        ("add_rms_norm", 5 * 24, 4 * 96 + 32),
        ("layer_norm", 7 * 24, 2 * 96 + 64),
        ("silu_and_mul", 5 * 24, 3 * 96),
        ("gelu_and_mul", 12 * 24, 3 * 96),
    ],
)
def test_least_cost(name: str, flops: int, bytes_: int) -> None:
    found = registry.get(name)
    cost = found.cost(*found.inputs(3, 8, torch.float32, "cpu"))
    assert (cost.flops, cost.bytes) == (flops, bytes_)

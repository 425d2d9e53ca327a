from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toy import ToyOp, takes
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Cost, DispatchMiss, Refusal
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.dispatch.lookup import UNLISTED
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config, Database, Row, database
from wavecrest.errors import InvalidArgument, TableError, Unsupported
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops.rows.call import RowCall


@pytest.fixture
def op() -> Iterator[Op]:
    """An op of one tensor with backends that say who ran."""

    def check(x: torch.Tensor, scale: float = 1.0) -> None:
        if x.ndim != 2:
            raise InvalidArgument("sample: takes [M, N]")

    made = ToyOp(
        "sample",
        reference=lambda x, scale=1.0: ("reference", None),
        check=check,
        key=lambda x, scale=1.0: (m_bucket(x.shape[0]), x.shape[1], dtype_name(x)),
        key_fields=("rows", "columns", "dtype"),
        inputs=lambda M, N, dtype, device: (torch.zeros(M, N, dtype=dtype, device=device),),
        cost=lambda x, scale=1.0: Cost(x.numel(), 2 * x.nbytes),
        default_config=lambda key: Config(BLOCK_N=key[1]),
    )
    made.kernel(
        "fast",
        lambda x, scale=1.0, *, config: ("fast", config),
        refuse=lambda x, scale=1.0: None if x.shape[1] <= 8 else "takes 8 columns at most",
        priority=20,
    )
    made.native("plain", lambda x, scale=1.0: ("plain", None), priority=10)
    made.native("shy", lambda x, scale=1.0: ("shy", None), opt_in=lambda *_a, **_k: "only when asked for", priority=30)
    yield made
    del registry.STATE.ops["sample"]


def test_highest_priority_that_takes_the_call(op: Op) -> None:
    assert op(torch.zeros(2, 4)) == ("fast", Config(BLOCK_N=4))
    assert op(torch.zeros(2, 16)) == ("plain", None)


def test_a_notebook_shows_a_decision_as_text(op: Op) -> None:
    decision = op.decide(op.of(torch.zeros(2, 16)))
    hostile = replace(decision, reason="<script>alert(1)</script>", refused=(Refusal("<img src=x>", "a & b"),))
    shown = hostile._repr_html_()
    assert "<script" not in shown and "<img" not in shown
    assert "&lt;script&gt;" in shown and "not &lt;img src=x&gt;" in shown and "a &amp; b" in shown


def test_a_decision_says_who_refused_and_why(op: Op) -> None:
    decision = op.decide(op.of(torch.zeros(2, 16)))
    assert (decision.backend, decision.source, decision.config) == ("plain", "default", None)
    assert {(r.backend, r.reason) for r in decision.refused} == {
        ("shy", "only when asked for"),
        ("fast", "takes 8 columns at most"),
    }
    assert "plain" in decision.describe() and "default" in decision.describe()


def test_check_runs_before_every_path(op: Op) -> None:
    bad = torch.zeros(3)
    for call in (
        op,
        lambda x: op.decide(op.of(x)),
        lambda x: op.run("plain", op.of(x)),
        lambda x: op.run("reference", op.of(x)),
    ):
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
    op.decide(op.of(torch.zeros(2, 4)))
    assert [calls for _, calls in op.decisions()] == [0]


def test_a_signature_is_more_than_its_key(op: Op) -> None:
    seen: list[Any] = []

    def bind(x: torch.Tensor, scale: float = 1.0) -> Any:
        seen.append((tuple(x.shape), x.stride(), x.dtype, scale))
        return lambda x, scale=1.0: "bound"

    op.native("bound", lambda x, scale: "unbound", bind=bind, priority=40)
    calls = [
        (torch.zeros(9, 4),), (torch.zeros(9, 4),), (torch.zeros(10, 4),), (torch.zeros(4, 9).t(),),
        (torch.zeros(9, 4).half(),), (torch.zeros(9, 4), 2.0), (torch.zeros(9, 4), 2.0),
    ]  # fmt: skip
    for args in calls:
        assert op(*args) == "bound"
    assert len(seen) == 5
    assert op(torch.zeros(9, 4), scale=2.0) == "bound" and len(seen) == 5


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
    monkeypatch.setattr("wavecrest.dispatch.op.MAX_SIGNATURES", 4)
    for rows in range(1, 20):
        op(torch.zeros(rows, 4))
    assert len(op._bound) <= 4
    assert sum(calls for _, calls in op.decisions()) == 19


def test_run_names_a_backend(op: Op) -> None:
    assert op.run("shy", op.of(torch.zeros(2, 4))) == ("shy", None)
    assert op.run("fast", op.of(torch.zeros(2, 4)), config=Config(BLOCK_N=2)) == ("fast", Config(BLOCK_N=2))
    with pytest.raises(Unsupported, match="takes 8 columns at most"):
        op.run("fast", op.of(torch.zeros(2, 16)))
    with pytest.raises(InvalidArgument, match="has no backend 'slow'; it has fast, plain, reference, shy"):
        op.run("slow", op.of(torch.zeros(2, 4)))


def test_force(op: Op) -> None:
    x = torch.zeros(2, 4)
    assert op(x)[0] == "fast"
    op.force("shy")
    assert op(x)[0] == "shy"
    assert op.decide(op.of(x)).source == "forced"
    assert op.decide(op.of(x)).refused == ()
    op.pin(op.key(op.of(x)), "shy", Config(BLOCK_N=1), "exact", "plan")
    assert (op.decide(op.of(x)).source, op.decide(op.of(x)).config) == ("forced", None)
    op.unpin()
    op.force(None)
    assert op(x)[0] == "fast"
    with pytest.raises(InvalidArgument, match="no backend"):
        op.force("slow")


def test_a_forced_backend_that_declines_is_named_in_the_reason(op: Op) -> None:
    op.force("fast")
    decision = op.decide(op.of(torch.zeros(2, 16)))
    assert decision.backend == "plain"
    assert "fast, forced, refuses it" in decision.reason


def test_pin_fixes_one_key(op: Op) -> None:
    op.pin((2, 4, "float32"), "fast", Config(BLOCK_N=1), "exact", "measured")
    op.pin((4, 4, "float32"), "shy", None, "exact", "measured")
    assert op(torch.zeros(2, 4)) == ("fast", Config(BLOCK_N=1))
    assert op(torch.zeros(3, 4)) == ("fast", Config(BLOCK_N=4))
    assert op(torch.zeros(4, 4))[0] == "shy"
    assert op.decide(op.of(torch.zeros(2, 4))).source == "exact"
    op.unpin()
    assert op(torch.zeros(4, 4))[0] == "fast"


def test_a_pin_after_calls_takes_effect(op: Op) -> None:
    assert op(torch.zeros(2, 4))[0] == "fast"
    op.pin((2, 4, "float32"), "plain", None, "exact", "measured")
    assert op(torch.zeros(2, 4))[0] == "plain"


def test_a_pinned_backend_that_declines_is_named_in_the_reason(op: Op) -> None:
    op.pin((2, 16, "float32"), "fast", None, "exact", "measured")
    decision = op.decide(op.of(torch.zeros(2, 16)))
    assert decision.backend == "plain" and "fast, pinned, refuses it" in decision.reason


def test_attach_forgets_decisions(op: Op) -> None:
    assert op(torch.zeros(2, 4))[0] == "fast"
    op.native("new", lambda x, scale=1.0: ("new", None), priority=99)
    assert op(torch.zeros(2, 4))[0] == "new"


def test_the_epoch_changes_with_decisions_and_not_with_calls(op: Op) -> None:
    op(torch.zeros(3, 4))
    before = Op.epoch
    op(torch.zeros(3, 4))
    op(torch.zeros(3, 5))
    op.decide(op.of(torch.zeros(3, 6)))
    assert Op.epoch == before
    changes: list[Callable[[], Any]] = [
        lambda: op.force("plain"),
        lambda: op.force(None),
        lambda: op.pin(op.key(op.of(torch.zeros(3, 4))), "shy", None, "exact", "a test"),
        op.unpin,
        lambda: op.swap(None),
        lambda: op.native("other", lambda x: x, refuse=lambda *_a: "no", priority=1),
        registry.reread,
    ]
    for change in changes:
        before = Op.epoch
        change()
        assert Op.epoch > before


def test_a_miss_points_at_the_line_that_calls_the_op() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: ops.rms_norm(torch.ones(3, 1111)),
        lambda: ops.gemm(torch.ones(3, 1111), torch.ones(1111, 3)),
    ]
    registry.strict("warn")
    for call in calls:
        with pytest.warns(DispatchMiss) as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]


def test_an_op_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"no op named 'rmsnorm' \(did you mean rms_norm\?\); there are "):
        registry.get("rmsnorm")
    with pytest.raises(InvalidArgument, match=r"no op named 'nothing'; there are .*gemm"):
        registry.get("nothing")
    monkeypatch.setattr(registry.STATE, "ops", {})
    with pytest.raises(InvalidArgument, match=r"none are registered: import wavecrest\.ops first"):
        registry.get("gemm")


def test_a_backend_is_named_by_its_old_name_too() -> None:
    op = ops.get("gemm")
    call = GemmCall(torch.ones(3, 16), torch.ones(16, 8), activation="silu_and_mul")
    assert torch.equal(op.call_on("torch_and_mul", call), op.call_on("gemm_then_act", call))
    assert not [key for key in op._cache if "torch_and_mul" in key]


def test_a_named_backend_refuses_what_is_no_tensor_as_a_call_does() -> None:
    op = ops.get("gemm")
    for a in (None, "w", 3.0):
        with pytest.raises(InvalidArgument, match="gemm: a must be a tensor"):
            op.call_on("torch", GemmCall(a, torch.ones(16, 8)))  # type: ignore[arg-type]


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


def test_strict_from_the_environment() -> None:
    # a fork a value: what takes long to import is imported once
    script = """
import os, sys
import torch, torch._dynamo
for value in ("error", "loud", "off"):
    pid = os.fork()
    if pid == 0:
        os.environ["WAVECREST_STRICT"] = value
        try:
            from wavecrest import ops
            ops.rms_norm(torch.ones(2, 4))
        except Exception as error:
            print(value, type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    print(value, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, strict, loud, refused, off = done.stdout.splitlines()
    assert error.startswith("error Unsupported") and "no measured row" in error and strict == "error 1"
    assert loud.startswith("loud InvalidArgument") and "'loud'" in loud and refused == "loud 1"
    assert off == "off 0"


def test_names_and_get() -> None:
    assert set(registry.names()) == set(ops.__all__) - {
        "PackedWeight",
        "get",
        "linear",
        "mlstm_parallel",
        "names",
        "pack",
    }
    with pytest.raises(InvalidArgument, match="no op named 'norm'; there are add_layer_norm"):
        registry.get("norm")


def test_a_name_registers_once(op: Op) -> None:
    with pytest.raises(InvalidArgument, match="already registered"):
        ToyOp("sample", reference=takes, key=takes, inputs=takes, cost=takes)


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(0, 0), (1, 1), (8, 8), (9, 16), (16, 16), (17, 32), (65536, 65536), (65537, 131072), (10**9, 131072)],
)
def test_m_bucket(rows: int, bucket: int) -> None:
    assert m_bucket(rows) == bucket


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
    found.pin((0, *found.key(RowCall("rms", x))[1:]), "reference", None, "exact", "plan")
    assert compiled() == "reference exact"


def test_interpreted_kernels_are_not_the_default_on_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here")
    decision = registry.get("rms_norm").decide(RowCall("rms", torch.randn(3, 8)))
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
    cost = found.study.cost(found.study.inputs(3, 8, torch.float32, "cpu"))
    assert (cost.flops, cost.bytes) == (flops, bytes_)


def test_a_backend_may_have_its_own_default_configuration(op: Op) -> None:
    x, key = torch.zeros(2, 4), (2, 4, "float32")
    op.kernel(
        "own",
        lambda x, scale=1.0, *, config: ("own", config),
        priority=40,
        default_config=lambda key: Config(SPLIT=key[1] + 1),
    )
    assert op.config_of("own", key) == Config(SPLIT=5)
    assert op.config_of("fast", key) == Config(BLOCK_N=4)
    assert op.run("own", op.of(x)) == ("own", Config(SPLIT=5))
    assert op.run("own", op.of(x), config=Config(SPLIT=9)) == ("own", Config(SPLIT=9))
    assert op.run("fast", op.of(x)) == ("fast", Config(BLOCK_N=4))
    assert op(x) == op(x, scale=2.0) == ("own", Config(SPLIT=5))
    assert op.decide(op.of(x)).config == Config(SPLIT=5)
    op.pin(key, "fast", None, "exact", "plan")
    assert op(x) == ("fast", Config(BLOCK_N=4))
    op.pin(key, "own", None, "exact", "plan")
    assert op(x) == ("own", Config(SPLIT=5))
    with pytest.raises(InvalidArgument, match="no backend 'slow'"):
        op.config_of("slow", key)


FIELDS = ("rows", "columns", "dtype")
RECORD = "h200/bench.json"


@pytest.fixture
def tabled() -> Iterator[Op]:
    """An op of one tensor whose key says that it is on a GPU, unless it is float64; results tell the backend."""
    made = ToyOp(
        "tabled",
        reference=lambda x: x * 1,
        check=lambda x: None,
        key=lambda x: (
            "cpu" if x.dtype == torch.float64 else "cuda", m_bucket(x.shape[0]), needs_grad(x),
            x.shape[1], dtype_name(x),
        ),
        key_fields=("device", "rows", "grad", "columns", "dtype"),
        inputs=lambda M, N, dtype, device: (torch.zeros(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(x.numel(), 2 * x.nbytes),
        default_config=lambda key: Config(BLOCK=10, SPLIT=1, num_warps=4),
    )  # fmt: skip
    made.native("plain", lambda x: x * 2, priority=30)
    made.native("shy", lambda x: x * 3, opt_in=lambda *_a, **_k: "only when asked for", priority=40)
    made.kernel(
        "tiles",
        lambda x, *, config: x * 100 * config["BLOCK"],
        refuse=lambda x: None if x.shape[1] <= 8 else "takes 8 columns at most",
        priority=20,
    )
    yield made
    del registry.STATE.ops["tabled"]


def measured(key: tuple[Any, ...], backend: str, config: Config | None = None) -> Row:
    return Row(key, backend, config, 12.3, 15.0, RECORD)


def table(folder: Path, *rows: Row, op: str = "tabled") -> Database:
    found = Database(folder, "sm_00")
    database.write(found.path(op), FIELDS, rows)
    return found


TILED = Config(BLOCK=7, SPLIT=1, num_warps=8, waves_per_eu=2)


def test_a_measured_row_decides_its_key_alone(tabled: Op, tmp_path: Path) -> None:
    one, two = torch.ones(2, 4), torch.ones(3, 4)
    assert tabled(one)[0, 0] == 2
    rows = (measured((2, 4, "float32"), "tiles", TILED), measured((16, 4, "float32"), "reference"))
    with registry.measured_in(table(tmp_path, *rows)):
        assert tabled(one)[0, 0] == 700
        assert tabled(torch.ones(13, 4))[0, 0] == 1
        decision = tabled.decide(tabled.of(one))
        assert (decision.backend, decision.config, decision.source) == ("tiles", TILED, "exact")
        assert decision.reason == "measured 12.3 µs, native 15.0 µs (h200/bench.json)"
        assert [(refusal.backend, refusal.reason) for refusal in decision.refused] == [("shy", "only when asked for")]
        for other in (two, torch.ones(2, 5), one.half(), one.double(), one.clone().requires_grad_()):
            decision = tabled.decide(tabled.of(other))
            assert (decision.backend, decision.source) == ("plain", "default")
            assert decision.reason == "highest priority that takes the call"
        with torch.no_grad():
            assert tabled.decide(tabled.of(one.clone().requires_grad_())).source == "exact"
    assert tabled(one)[0, 0] == 2


def test_other_architectures_have_other_rows(tabled: Op, tmp_path: Path) -> None:
    table(tmp_path, measured((2, 4, "float32"), "tiles", TILED))
    with registry.measured_in(Database(tmp_path, "sm_01")):
        assert tabled.decide(tabled.of(torch.ones(2, 4))).source == "default"
    with registry.measured_in(Database(tmp_path)):
        assert tabled.decide(tabled.of(torch.ones(2, 4))).source == "default"


def test_an_op_whose_key_has_no_device_has_no_rows(op: Op, tmp_path: Path) -> None:
    with registry.measured_in(table(tmp_path, measured((2, 4, "float32"), "plain"), op="sample")):
        assert op.decide(op.of(torch.zeros(2, 4))).source == "default"


def test_a_measurement_stands_above_a_reservation(tabled: Op, tmp_path: Path) -> None:
    with registry.measured_in(table(tmp_path, measured((2, 4, "float32"), "shy"))):
        decision = tabled.decide(tabled.of(torch.ones(2, 4)))
    assert (decision.backend, decision.source, decision.refused) == ("shy", "exact", ())


def test_pins_and_force_come_before_measured_rows(tabled: Op, tmp_path: Path) -> None:
    x, wide = torch.ones(2, 4), torch.ones(2, 16)
    rows = (measured((2, 4, "float32"), "tiles", TILED), measured((2, 16, "float32"), "shy"))
    with registry.measured_in(table(tmp_path, *rows)):
        tabled.pin(tabled.key(tabled.of(x)), "reference", None, "exact", "plan")
        assert tabled.decide(tabled.of(x)).reason == "plan"
        tabled.pin(tabled.key(tabled.of(wide)), "tiles", None, "exact", "plan")
        decision = tabled.decide(tabled.of(wide))
        assert (decision.backend, decision.source) == ("shy", "exact")
        assert decision.reason.startswith("measured 12.3") and decision.reason.endswith("; tiles, pinned, refuses it")
        tabled.unpin()
        tabled.force("plain")
        assert tabled.decide(tabled.of(x)).source == "forced"
        tabled.force("tiles")
        assert tabled.decide(tabled.of(x)).config == Config(BLOCK=10, SPLIT=1, num_warps=4)
        assert tabled.decide(tabled.of(wide)).reason.endswith("; tiles, forced, refuses it")
        assert tabled.decide(tabled.of(wide)).backend == "shy"


def test_a_backend_named_by_the_caller_runs_as_measured(tabled: Op, tmp_path: Path) -> None:
    """Whatever the dispatcher chooses for the key: by the row where it is of that backend, else by its default."""
    x, other = torch.ones(2, 4), torch.ones(3, 4)
    rows = (measured((2, 4, "float32"), "tiles", TILED), measured((3, 4, "float32"), "reference"))
    with registry.measured_in(table(tmp_path, *rows)):
        registry.strict("error")
        assert tabled.call_on("tiles", tabled.of(x))[0, 0] == 700
        assert tabled.call_on("tiles", tabled.of(other))[0, 0] == 1000
        assert tabled.call_on("plain", tabled.of(x))[0, 0] == 2
        assert tabled(x)[0, 0] == 700 and tabled(other)[0, 0] == 1
        tabled.call_on("tiles", tabled.of(x))
        made = {(one.backend, one.key[1], one.source): (one.reason, count) for one, count in tabled.decisions()}
        assert made["tiles", 2, "forced"][0].startswith("named by the caller; measured 12.3")
        assert made["tiles", 3, "forced"][0] == "named by the caller; no measured row for it"
        assert {key: count for key, (_, count) in made.items()} == {
            ("tiles", 2, "forced"): 2, ("tiles", 3, "forced"): 1, ("plain", 2, "forced"): 1,
            ("tiles", 2, "exact"): 1, ("reference", 3, "exact"): 1,
        }  # fmt: skip
    assert tabled.call_on("tiles", tabled.of(x))[0, 0] == 1000
    with pytest.raises(Unsupported, match="tiles refuses: takes 8 columns at most"):
        tabled.call_on("tiles", tabled.of(torch.ones(2, 16)))
    with pytest.raises(InvalidArgument, match="no backend 'gone'"):
        tabled.call_on("gone", tabled.of(x))


def test_a_named_backend_is_bound_once(op: Op) -> None:
    made = []

    def bind(call: Any, config: Config) -> Callable[..., Any]:
        made.append(config)
        return lambda call: ("bound", config)

    op.backends["fast"] = replace(op.backends["fast"], bind=bind)
    for _ in range(3):
        assert op.call_on("fast", op.of(torch.zeros(2, 4))) == ("bound", Config(BLOCK_N=4))
    assert len(made) == 1
    op.forget()
    op.call_on("fast", op.of(torch.zeros(2, 4)))
    assert len(made) == 2


UNUSABLE = [
    (4, "gone", None, "for gone, which tabled does not have"),
    (16, "tiles", TILED, "for tiles, which refuses it"),
    (4, "tiles", Config(BLOCK=1, SPLIT=1, BLOCK_Q=3, STAGE=5), "for tiles, which does not know BLOCK_Q=3 STAGE=5"),
    (4, "tiles", Config(BLOCK=1), "for tiles, which needs SPLIT too"),
    (4, "tiles", None, "for tiles, which needs BLOCK SPLIT too"),
    (4, "reference", Config(num_warps=1), "for reference, which takes no configuration (num_warps=1)"),
]


@pytest.mark.parametrize("more", [{}, {"DEPTH": 3}])
def test_a_row_may_lack_what_is_optional(tabled: Op, tmp_path: Path, more: dict[str, int]) -> None:
    """A parameter that was added after rows had been measured: they stay, and new ones may have it."""
    tabled.backends["tiles"] = replace(tabled.backends["tiles"], optional=("DEPTH",))
    config = Config(**(TILED.kwargs | more))
    with registry.measured_in(table(tmp_path, measured((2, 4, "float32"), "tiles", config))):
        decision = tabled.decide(tabled.of(torch.ones(2, 4)))
        assert (decision.backend, decision.config, decision.source) == ("tiles", config, "exact")


@pytest.mark.parametrize(("columns", "backend", "config", "said"), UNUSABLE)
def test_a_row_that_cannot_be_used_is_said_in_the_reason(
    tabled: Op, tmp_path: Path, columns: int, backend: str, config: Config | None, said: str
) -> None:
    x = torch.ones(2, columns)
    with registry.measured_in(table(tmp_path, measured((2, columns, "float32"), backend, config))):
        assert tabled(x)[0, 0] == 2
        decision = tabled.decide(tabled.of(x))
        assert (decision.backend, decision.source) == ("plain", "default")
        assert decision.reason == (
            f"highest priority that takes the call; measured 12.3 µs, native 15.0 µs ({RECORD}) {said}"
        )
        registry.strict("warn")
        with pytest.warns(DispatchMiss, match="which "):
            tabled(x)


def test_a_call_with_a_measured_row_is_not_untuned(tabled: Op, tmp_path: Path) -> None:
    with registry.measured_in(table(tmp_path, measured((2, 4, "float32"), "shy"))):
        registry.strict("error")
        tabled(torch.ones(2, 4))
        with pytest.raises(Unsupported, match="no measured row"):
            tabled(torch.ones(3, 4))


def test_rows_are_read_at_the_first_decision_and_not_again(tabled: Op, tmp_path: Path) -> None:
    found = table(tmp_path, measured((2, 4, "float32"), "shy"), measured((3, 4, "float32"), "reference"))
    with registry.measured_in(found):
        found.path("tabled").rename(tmp_path / "kept")
        tabled(torch.ones(2, 4).double())
        (tmp_path / "kept").rename(found.path("tabled"))
        assert tabled(torch.ones(2, 4))[0, 0] == 3
        found.path("tabled").write_text("damaged")
        assert tabled(torch.ones(3, 4))[0, 0] == 1
        tabled.forget()
        assert tabled(torch.ones(2, 4))[0, 0] == 3
    with registry.measured_in(Database(tmp_path, "sm_00")):
        for _ in range(2):
            with pytest.raises(TableError, match=r"sm_00/tabled\.csv, line 1: the columns are 'damaged'"):
                tabled(torch.ones(2, 4))
        # calls that no table is for do not mind
        tabled(torch.ones(2, 4).double())


def test_no_table_is_read_at_import() -> None:
    script = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import torch
from wavecrest import ops, registry
ops.rms_norm(torch.ones(2, 4))
assert any("registry" in path for path in opened), "the hook sees no files"
read = [path for path in opened if path.endswith(".csv") or path.endswith("tuned/data")]
assert not read, read
"""
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_database_before_is_back_after_an_error(tabled: Op, tmp_path: Path) -> None:
    before = registry.STATE.database
    with pytest.raises(ZeroDivisionError), registry.measured_in(table(tmp_path, measured((2, 4, "float32"), "shy"))):
        assert tabled(torch.ones(2, 4))[0, 0] == 3
        raise ZeroDivisionError
    assert registry.STATE.database is before
    assert tabled(torch.ones(2, 4))[0, 0] == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_run_what_was_measured(tabled: Op, tmp_path: Path, dynamic: bool) -> None:
    rows = (
        measured((0, 4, "float32"), "tiles", TILED), measured((0, 5, "float32"), "shy"),
        measured((0, 6, "float32"), "tiles", Config(BLOCK=1)), measured((2, 7, "float32"), "shy"),
    )  # fmt: skip

    def compiled(columns: int, **options: Any) -> tuple[float, str]:
        torch._dynamo.reset()
        tabled.forget()
        call = torch.compile(lambda x: tabled(x) + 0, fullgraph=True, dynamic=dynamic, backend="eager")
        value = float(call(torch.ones(2, columns, **options)).detach()[0, 0])
        (decision,) = tabled._traced.values()
        config = "" if decision.config is None else f" {dict(decision.config)['BLOCK']}"
        return value, f"{decision.backend}{config} {decision.source} {decision.reason}"

    text = f"measured 12.3 µs, native 15.0 µs ({RECORD})"
    default = "plain default highest priority that takes the call"
    with registry.measured_in(table(tmp_path, *rows)):
        assert compiled(4) == (700.0, f"tiles 7 exact {text}")
        assert compiled(5) == (3.0, f"shy exact {text}")
        assert compiled(6) == (2.0, f"{default}; {text} for tiles, which needs SPLIT too")
        assert compiled(7) == (2.0, default)
        assert compiled(4, dtype=torch.float64) == (2.0, default)
        assert compiled(4, requires_grad=True) == (2.0, default)
        tabled.force("tiles")
        assert compiled(4) == (1000.0, "tiles 10 forced forced by the caller")
        tabled.force(None)
        tabled.pin(("cuda", 0, False, 4, "float32"), "reference", None, "exact", "plan")
        assert compiled(4) == (1.0, "reference exact plan")
    tabled.unpin()
    assert compiled(4) == (2.0, default)


def test_compiled_calls_use_the_backends_own_default_configuration(tabled: Op) -> None:
    tabled.kernel(
        "own",
        lambda x, *, config: x * config["SPLIT"],
        priority=50,
        default_config=lambda key: Config(SPLIT=key[3] + 5),
    )
    torch._dynamo.reset()
    assert float(torch.compile(lambda x: tabled(x), fullgraph=True, backend="eager")(torch.ones(2, 4))[0, 0]) == 9


def test_sizes_of_keys_are_parts_that_rows_have() -> None:
    for name in registry.names():
        found = registry.get(name)
        assert set(found.key_sizes) <= set(found.key_fields) - set(UNLISTED)

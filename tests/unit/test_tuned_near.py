"""Near rows: which rows are neighbours, when one is taken, what a decision says of it; and where nothing is known."""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wavecrest
from tests.toy import ToyOp
from wavecrest import hardware, records
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import Cost, DispatchMiss
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.dispatch.tuned import Config, Database, Evidence, Proposal, Row, database, near, untuned_calls
from wavecrest.errors import InvalidArgument, OutputError, TableError, Unsupported
from wavecrest.tune import evaluate_near_rows

EVIDENCE = Path(__file__).parents[2] / "evidence"
FIELDS = ("rows", "columns", "dtype")
SIZES = (0, 1)
TILES = Config(BLOCK=64)
RECORD = "h200/a.json"


def row(
    rows: int, columns: int, *, us: float = 10.0, native: float | None = 20.0, default: float | None = 20.0,
    backend: str = "tiles", config: Config | None = TILES, dtype: str = "float32", origin: str = "",
) -> Row:  # fmt: skip
    evidence = Evidence(default_us=default, origin=origin)
    return Row((rows, columns, dtype), backend, config, us, native, RECORD, evidence)


def test_the_distance_is_that_of_the_logarithms() -> None:
    sizes = (1, 2, 3, 7, 16, 4096)
    for a, b, c, d in itertools.product(sizes, repeat=4):
        # independent of logarithms: 2 to the distance is the product of the larger over the smaller
        found = near.distance((a, b, "x"), (c, d, "x"), SIZES)
        assert found is not None
        assert 2.0**found == pytest.approx(max(a, c) / min(a, c) * max(b, d) / min(b, d), rel=1e-12)
        assert found == pytest.approx(near.distance((c, d, "x"), (a, b, "x"), SIZES), rel=1e-12)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((16, 64, "x"), (16, 64, "y")),
        ((16, 64, None), (16, 64, "")),
        ((16, 64, 1), (16, 64, True)),
        ((0, 64, "x"), (16, 64, "x")),
        ((16, -1, "x"), (16, 64, "x")),
        ((16, None, "x"), (16, 64, "x")),
        ((True, 64, "x"), (2, 64, "x")),
    ],
)
def test_keys_that_differ_in_more_than_sizes_are_none(one: Any, other: Any) -> None:
    assert near.distance(one, other, SIZES) is None
    assert near.distance(one, one, SIZES) == 0
    # where nothing is a size only a key itself is near
    assert near.distance((16, 64, "x"), (17, 64, "x"), ()) is None


def test_neighbours_are_sorted_and_within_the_limit() -> None:
    rows = [row(1, 64), row(16, 64), row(16, 512), row(16, 513), row(128, 64), row(8, 64), row(16, 64, dtype="x")]
    found = near.neighbours([*rows, row(32, 64, origin="aiter")], (16, 64, "float32"), SIZES)
    # eight times as much is the limit, and what others measured has no baseline
    assert [(one.row.key[:2], one.distance) for one in found] == [((8, 64), 1.0), ((16, 512), 3.0), ((128, 64), 3.0)]
    tie = near.neighbours([row(32, 64, us=9.0), row(8, 64, us=4.0)], (16, 64, "float32"), SIZES)
    assert [one.row.us for one in tie] == [4.0, 9.0]


def chosen(*rows: Row, fallback: str = "torch", fits: Any = lambda _row: "") -> near.Found:
    neighbours = near.neighbours(rows, (16, 64, "float32"), SIZES)
    return near.choose(neighbours, fallback, lambda one: one.native_us, fits)


def test_a_near_row_is_taken_only_beyond_doubt() -> None:
    lead, tie = {"us": 10.0}, {"us": 20.0 / (near.LEAD - 1e-9)}
    nearest, second, third = row(8, 64, **lead), row(16, 256, **lead), row(16, 512, **lead)
    assert chosen(nearest, second).row == nearest
    assert chosen(nearest, second, third).row == nearest
    # ties, at the nearest or at the second, go to what runs otherwise
    for rows in ((replace(nearest, us=tie["us"]), second), (nearest, replace(second, us=tie["us"]))):
        found = chosen(*rows, third)
        assert found.row is None and "is 1.05 times, less than 1.05" in found.reason
    assert chosen(nearest, second, replace(third, us=30.0)).row == nearest, "only the nearest are asked"
    assert chosen(nearest, replace(second, us=20.0 / near.LEAD)).row == nearest
    assert "one measured row" in chosen(nearest).reason and chosen(nearest).row is None
    assert chosen() == near.Found(None, "")
    assert "was not timed" in chosen(nearest, replace(second, native_us=None)).reason


def test_the_nearest_row_that_fits_is_taken() -> None:
    rows = [row(8, 64), row(16, 256), row(16, 512, us=19.9), row(128, 64, config=Config(BLOCK=1))]
    assert chosen(*rows, fits=lambda one: "" if one.key[0] != 8 else "too large").row == rows[1]
    # a row without a lead is not taken, however well it fits
    assert chosen(*rows, fits=lambda one: "" if one.key[1] == 512 else "too large").row is None
    found = chosen(*rows, fits=lambda one: f"of {one.key[0]}")
    assert found.row is None and found.reason == "no measured row near it fits: of 8"


def test_the_nearest_row_may_agree_with_what_runs_otherwise() -> None:
    same = row(8, 64, backend="torch", config=None, us=20.0)
    assert chosen(same).row == same and "runs torch too" in chosen(same).reason
    assert chosen(same, fits=lambda _row: "declines").row is None
    # one that is farther away only takes part in the proof
    found = chosen(row(32, 64, us=5.0), same)
    assert found.row is None and "is 1.00 times" in found.reason


def attach_tiles(op: ToyOp, priority: int) -> None:
    def space(key: Any, _arch: Any) -> list[Config]:
        return [Config(BLOCK=size) for size in (16, 32, 64, 128) if size <= key[1]]

    op.kernel(
        "tiles",
        lambda x, *, config: x * config["BLOCK"],
        refuse=lambda x: None if x.shape[1] != 66 else "not 66",
        priority=priority,
        space=space,
    )


@pytest.fixture
def op(tmp_path: Path) -> Iterator[ToyOp]:
    """An op with sizes whose key says that it is on a GPU; tiles beat PyTorch where the table says so."""
    made = ToyOp(
        "nearly",
        reference=lambda x: x * 1,
        check=lambda x: None,
        key=lambda x: (
            m_bucket(x.shape[0]), x.shape[1], dtype_name(x), "cuda", needs_grad(x)
        ),
        key_fields=(*FIELDS, "device", "grad"),
        key_sizes=("rows", "columns"),
        inputs=lambda M, N, dtype, device: (torch.zeros(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(x.numel(), 2 * x.nbytes),
        default_config=lambda key: Config(BLOCK=8),
    )  # fmt: skip
    made.native("torch", lambda x: x * 2, priority=10)
    attach_tiles(made, 5)
    yield made
    del registry.STATE.ops["nearly"]


def table(folder: Path, *rows: Row, arch: str = "sm_90") -> Database:
    found = Database(folder, arch)
    database.write(found.path("nearly"), FIELDS, rows)
    return found


def test_a_decision_by_a_near_row(op: ToyOp, tmp_path: Path) -> None:
    with registry.measured_in(table(tmp_path, row(8, 64), row(16, 256))):
        decision = op.decide(op.of(torch.ones(16, 64)))
        assert (decision.backend, decision.config, decision.source) == ("tiles", TILES, "near")
        assert decision.reason == (
            "measured 10.0 µs, native 20.0 µs (h200/a.json) for rows=8: 1.0 octaves away, 2.00 times torch there"
        )
        assert float(op(torch.ones(16, 64))[0, 0]) == 64
        # the exact row of another size is still exact
        assert op.decide(op.of(torch.ones(8, 64))).source == "exact"
        # BLOCK=64 does not fit 63 columns
        decision = op.decide(op.of(torch.ones(16, 63)))
        assert (decision.backend, decision.source) == ("torch", "default")
        assert (
            "no measured row near it fits: Config(BLOCK=64) is not in the search space of this call" in decision.reason
        )
        assert "which refuses it" in op.decide(op.of(torch.ones(16, 66))).reason
        for other in (torch.ones(16, 64).half(), torch.ones(16, 64, requires_grad=True), torch.ones(1024, 64)):
            assert op.decide(op.of(other)).source == "default"
        assert op.decide(op.of(torch.ones(1024, 64))).reason == "highest priority that takes the call"


def test_ops_without_sizes_have_no_near_rows(op: ToyOp, tmp_path: Path) -> None:
    op.key_sizes = ()
    with registry.measured_in(table(tmp_path, row(8, 64), row(16, 256))):
        assert op.decide(op.of(torch.ones(16, 64))).source == "default"


def test_an_architecture_that_is_unknown_has_no_space(op: ToyOp, tmp_path: Path) -> None:
    with registry.measured_in(table(tmp_path, row(8, 64), row(16, 256), arch="sm_00")):
        assert "is not in the search space of this call" in op.decide(op.of(torch.ones(16, 64))).reason


@pytest.mark.parametrize("default", [20.0, 10.4, None])
def test_where_a_kernel_is_the_default_its_own_time_is_the_baseline(
    op: ToyOp, tmp_path: Path, default: float | None
) -> None:
    attach_tiles(op, 20)
    # PyTorch is far behind in any case
    rows = [row(8, 64, native=200.0, default=default), row(16, 256, native=200.0, default=default)]
    with registry.measured_in(table(tmp_path, *rows)):
        decision = op.decide(op.of(torch.ones(16, 64)))
    if default == 20.0:
        assert (decision.source, decision.config) == ("near", TILES)
    else:
        assert (decision.source, decision.config) == ("default", Config(BLOCK=8))


def test_the_default_that_was_timed_is_of_the_first_kernel_that_takes_the_call(op: ToyOp, tmp_path: Path) -> None:
    """Another kernel stands before it and refuses; its default fits, though it names no space."""
    attach_tiles(op, 20)
    op.kernel("spare", lambda x, *, config: x, priority=15)
    own = {"backend": "spare", "config": Config(BLOCK=8), "native": 200.0}
    with registry.measured_in(table(tmp_path, row(8, 66, **own), row(32, 66, **own))):
        decision = op.decide(op.of(torch.ones(16, 66)))
    assert (decision.backend, decision.config, decision.source) == ("spare", Config(BLOCK=8), "near")
    assert "2.00 times spare there" in decision.reason


def test_a_row_that_cannot_be_used_gives_way_to_a_near_one(op: ToyOp, tmp_path: Path) -> None:
    gone = row(16, 64, backend="gone", config=None)
    for rows, source in (([row(8, 64), row(32, 64)], "near"), ([row(8, 64)], "default")):
        # its own row is no proof of another's
        with registry.measured_in(table(tmp_path, gone, *rows)):
            decision = op.decide(op.of(torch.ones(16, 64)))
        assert (decision.backend, decision.source) == ("tiles" if source == "near" else "torch", source)
        assert "for gone, which nearly does not have" in decision.reason


def test_the_cost_model_comes_after_rows_and_before_the_default(op: ToyOp, tmp_path: Path) -> None:
    asked: list[Any] = []

    def model(key: Any, arch: hardware.Arch, taking: tuple[str, ...], fallback: str) -> Proposal | None:
        asked.append((key[:2], arch.name, taking))
        return None if key[1] == 65 else Proposal("tiles", Config(BLOCK=key[1]), "model", "modelled 3.0 µs")

    op.restudy(model=model)
    with registry.measured_in(table(tmp_path, row(8, 64), row(16, 256))):
        assert (
            op.decide(op.of(torch.ones(16, 64))).source == "near"
            and op.decide(op.of(torch.ones(8, 64))).source == "exact"
        )
        assert asked == []
        decision = op.decide(op.of(torch.ones(4096, 64)))
        assert (decision.backend, decision.config, decision.source) == ("tiles", Config(BLOCK=64), "model")
        assert decision.reason == "modelled 3.0 µs"
        assert asked == [((4096, 64), "sm_90", ("torch", "tiles", "reference"))]
        assert op.decide(op.of(torch.ones(4096, 65))).source == "default"
        op.restudy(model=lambda key, arch, taking, fallback: Proposal("tiles", Config(WRONG=1), "model", "modelled"))
        decision = op.decide(op.of(torch.ones(2048, 64)))
        assert decision.source == "default" and "modelled tiles, which does not know WRONG=1" in decision.reason


def test_strict_is_about_everything_that_is_not_exact(op: ToyOp, tmp_path: Path) -> None:
    op.restudy(
        model=lambda key, arch, taking, fallback: Proposal("tiles", TILES, "model", "m") if key[1] == 4096 else None
    )
    calls = {"exact": (8, 64), "near": (16, 64), "model": (16, 4096), "default": (1024, 64)}
    with registry.measured_in(table(tmp_path, row(8, 64), row(16, 256))):
        for source, shape in calls.items():
            assert op.decide(op.of(torch.ones(*shape))).source == source
        registry.strict("warn")
        for source, shape in calls.items():
            if source == "exact":
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    op(torch.ones(*shape))
                continue
            with pytest.warns(DispatchMiss, match=rf"no measured row: nearly.*\({source}: "):
                op(torch.ones(*shape))
        registry.strict("error")
        op(torch.ones(8, 64))
        for shape in list(calls.values())[1:]:
            with pytest.raises(Unsupported, match="no measured row"):
                op(torch.ones(*shape))
        op.force("tiles")
        op(torch.ones(1024, 64))


def test_compiled_calls_take_near_rows(op: ToyOp, tmp_path: Path) -> None:
    rows = [row(0, 64), row(0, 256), row(8, 128)]
    with registry.measured_in(table(tmp_path, *rows)):
        torch._dynamo.reset()
        call = torch.compile(lambda x: op(x) + 0, fullgraph=True, backend="eager")
        assert float(call(torch.ones(4, 128))[0, 0]) == 64
        (decision,) = op._traced.values()
        # rows are not known there: only rows of that are near
        assert (decision.source, decision.key[0]) == ("near", 0)


def test_what_ran_without_a_row_is_recorded_for_tune(op: ToyOp, tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    with registry.measured_in(table(tmp_path, row(8, 64), row(16, 256))):
        op(torch.ones(1024, 64))
        registry.record_misses(path)
        try:
            for _ in range(3):
                for shape in ((8, 64), (16, 64), (1024, 64)):
                    op(torch.ones(*shape))
                registry.forget()
            op(torch.ones(16, 64, requires_grad=True))
        finally:
            registry.record_misses(None)
        op(torch.ones(2048, 64))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 6, "each decision once"
    assert lines[0] == {
        "op": "nearly", "arch": "sm_90", "key": {"rows": 16, "columns": 64, "dtype": "float32"}, "backend": "tiles",
        "source": "near",
    }  # fmt: skip
    found = untuned_calls.read(path)
    assert [(one.key["rows"], one.source) for one in found] == [(16, "near"), (1024, "default")]


def test_untuned_calls_that_cannot_be_written_end_no_call(op: ToyOp, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write misses"):
        registry.record_misses(tmp_path)
    path = tmp_path / "new.jsonl"
    with registry.measured_in(table(tmp_path)):
        registry.record_misses(path)
        path.unlink()
        path.mkdir()
        with pytest.warns(DispatchMiss, match="no more misses are recorded"):
            assert float(op(torch.ones(16, 64))[0, 0]) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            op(torch.ones(1024, 64))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("3", "line 2: is no object"),
        ('{"op": "a", "arch": "b", "key": {}, "backend": "c"}', "line 2: lacks op, arch"),
        ('{"op": 1, "arch": "b", "key": {}, "backend": "c", "source": "d"}', "line 2: lacks"),
        ('{"op": "a", "arch": "b", "key": {"x": 1.5}, "backend": "c", "source": "d"}', "line 2: its key has a part"),
        ("[" * 100_000, "line 2: "),
    ],
)
def test_files_that_hold_no_untuned_calls(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"op": "a", "arch": "b", "key": {"rows": 1}, "backend": "c", "source": "near"}'
    path.write_text(f"{good}\n{line}\n\n{good}\n")
    with pytest.raises(TableError) as caught:
        untuned_calls.read(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    path.write_text(f"{good}\n{good}\n")
    assert untuned_calls.read(path) == [untuned_calls.UntunedCall("a", "b", {"rows": 1}, "c", "near")]
    path.write_bytes(b"\xff")
    with pytest.raises(TableError, match="UTF-8"):
        untuned_calls.read(path)
    with pytest.raises(TableError, match="no file of misses"):
        untuned_calls.read(tmp_path / "gone")


def test_coverage_of_a_block(op: ToyOp, tmp_path: Path) -> None:
    with registry.measured_in(table(tmp_path, row(8, 64), row(16, 256))):
        for _ in range(5):
            op(torch.ones(8, 64))
        with wavecrest.coverage() as seen:
            for shape in ((8, 64), (8, 64), (16, 64), (1024, 64)):
                op(torch.ones(*shape))
            op.decide(op.of(torch.ones(1, 64)))
        op(torch.ones(8, 64))
        (mine,) = [one for one in seen.by_op() if one.op == "nearly"]
        assert mine.calls == {"exact": 2, "near": 1, "default": 1}
        # one row within the limit of a single row of 64 columns is no proof
        assert mine.keys == {"exact": 1, "near": 1, "default": 2}
        # everything so far
        assert sum(calls for decision, calls in registry.coverage() if decision.op == "nearly") == 10
        line = next(line for line in str(seen).splitlines() if line.startswith("nearly"))
        assert line.split()[1:4] == ["4", "2", "1"]
        with wavecrest.coverage() as seen:
            op.forget()
            op(torch.ones(8, 64))
        assert [calls for decision, calls in seen if decision.op == "nearly"] == [1]
        with wavecrest.coverage() as seen:
            pass
        assert not [one for one in seen if one[0].op == "nearly"]


@pytest.mark.parametrize("name", ["gemm", "rope", "mla_decode", "flash_attention"])
def test_a_near_configuration_is_always_one_of_the_ops_space(name: str) -> None:
    """Over the shipped rows and odd sizes around them: LDS, registers and divisibility allow what is taken."""
    op, found = registry.get(name), Database(arch="sm_90")
    arch = hardware.ARCHS["sm_90"]
    fields = lookup.fields_of(op)
    taking = tuple(backend.name for backend in op.by_priority())
    fallback = next(backend.name for backend in op.by_priority() if backend.name != "aiter")
    sources = {"near": 0, "model": 0, "default": 0, "exact": 0}
    for place, measured in enumerate(found.rows(name, fields).values()):
        parts = dict(zip(fields, measured.key, strict=True)) | {"device": "cuda", "grad": False}
        for scale in ((1, 1), (2, 1), (3, 2), (1, 3))[place % 2 :: 2]:
            part = op.key_sizes[place % len(op.key_sizes)]
            size = int(parts[part] or 0) * scale[0] // scale[1]
            key = tuple((parts | {part: size})[field] for field in op.key_fields)
            backend, config, source, reason = lookup.find(op, key, taking, fallback, found)
            sources[source] += 1
            if source == "near" and config:
                space = {*op.study.kernel(backend).space(key, arch), op.config_of(backend, key)}  # type: ignore[misc]
                assert Config(**dict(config)) in space, (key, reason)
            assert source != "near" or reason
    assert sources["exact"] and sources["near"] + sources["default"]


def test_what_near_rows_are_worth_on_the_shipped_records() -> None:
    """The figures of docs/database.md: no op loses by them over its keys, and gemm gains."""
    page = (EVIDENCE.parent / "docs" / "database.md").read_text()
    for path in sorted(EVIDENCE.glob("nvidia-h200/*_tune_*.jsonl.gz")):
        record = records.load_as(path, records.TuneRecord)
        left = evaluate_near_rows.decide(record)
        found = evaluate_near_rows.summary(record.op, left)
        # of one record no key's default was timed: it is of another kernel since
        assert found.keys or path.name == "2026-11-28_tune_words_int8.jsonl.gz"
        assert found.chosen <= found.default * 1.0001, found
        assert all(one.chosen == one.default for one in left if not one.taken)
        cells = (found.op, found.keys, found.taken, f"{found.chosen:.3f}×", f"{found.default:.3f}×", found.slower)
        assert f"| {' | '.join(map(str, cells))} | {found.worst:.3f}× |" in page
        # it is of the keys that near rows decide, and 1 where they decide none
        assert found.worst == 1.0 or found.taken
        # independent of the module: the rule at work on the record itself
        assert found.taken <= sum(key.backend is not None for key in record.keys)


def test_a_key_that_is_left_out_is_not_its_own_neighbour() -> None:
    record = records.load_as(EVIDENCE / "nvidia-h200" / "2026-11-21_tune_gemm.jsonl.gz", records.TuneRecord)
    one = next(key for key in record.keys if key.case == "1x4096x4096 bf16")
    alone = record.model_copy(update={"keys": [one]})
    (left,) = evaluate_near_rows.decide(alone)
    assert not left.taken and left.chosen == left.default > 1


def test_a_lead_is_counted_over_what_would_run_and_was_timed() -> None:
    """`default_us` is one backend's default: no lead over `gemm_then_act`, which runs where there are no gated rows."""
    record = records.load_as(EVIDENCE / "nvidia-h200" / "2026-11-23_tune_xlstm_gated.jsonl.gz", records.TuneRecord)
    left = {one.case: one for one in evaluate_near_rows.decide(record)}
    gated = [key for key in record.keys if key.key["b"] == "bfloat16"]
    assert gated and not any(left[key.case].taken for key in gated)


def _calls(function: Any) -> tuple[int, int]:
    """The calls that a call makes, itself left out: of functions written in Python, and of others."""
    events: Counter[str] = Counter()

    def count(_frame: Any, event: str, _what: Any) -> None:
        events[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    # setprofile itself is the last
    return events["call"] - 1, events["c_call"] - 1


def test_a_cached_look_up_reads_two_dictionaries_and_makes_nothing() -> None:
    op, found = registry.get("gemm"), Database(arch="sm_90")
    fields = lookup.fields_of(op)
    key = next(iter(found.rows("gemm", fields)))
    look_up = found.look_up
    first = look_up("gemm", fields, key)
    assert first is not None and look_up("gemm", fields, key) is first
    # the look-up, and `get` of the op's proposals and of the key's
    assert _calls(lambda: look_up("gemm", fields, key)) == (1, 2)
    # and the decision itself, by its key
    whole = op.decide(op.study.inputs(4, 64, 64, torch.float32, "cpu")).key
    entry = op._cache[whole]
    assert _calls(lambda: op._cache.get(whole)) == (0, 1)
    gc.collect()
    gc.disable()
    tracemalloc.start(10)
    try:
        for _ in range(100):
            look_up("gemm", fields, key)
            op._cache.get(whole)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        blocks = sys.getallocatedblocks()
        for _ in itertools.repeat(None, 1000):
            look_up("gemm", fields, key)
            op._cache.get(whole)
        after, peak = tracemalloc.get_traced_memory()
        made = sys.getallocatedblocks() - blocks
    finally:
        tracemalloc.stop()
        gc.enable()
    assert op._cache[whole] is entry
    # nothing stays, and nothing that is larger than the frame of a call comes and goes
    assert after - before < 256 and peak - before < 512 and made < 16, (after - before, peak - before, made)


def test_the_argument_of_strict() -> None:
    with pytest.raises(InvalidArgument):
        registry.strict("maybe")  # type: ignore[arg-type]
    assert math.isclose(near.LEAD, 1.05) and near.LIMIT == 3.0 and near.WITNESSES == 2


def test_a_default_configuration_goes_with_the_sizes() -> None:
    """A row that ran its backend's default runs that of the call: as many splits as fill the units there."""
    op, shipped = registry.get("mla_decode"), Database(arch="sm_90", overlay=None)
    fields = lookup.fields_of(op)
    row = next(
        row for row in shipped.rows("mla_decode", fields).values()
        if row.backend == "triton_hopper" and row.key[:3] == (64, 1, 128) and row.key[fields.index("nope")] == 0
    )  # fmt: skip
    assert row.config is not None and row.config["SPLITS"] == 1
    for batch, splits in ((32, 2), (16, 4)):
        parts = dict(zip(fields, row.key, strict=True)) | {"batch": batch, "device": "cuda", "grad": False}
        key = tuple(parts[name] for name in op.key_fields)
        other = lookup.carried(op, key, row, fields)
        assert other.config is not None and other.config["SPLITS"] == splits and other.us == row.us
        # one that was found by measuring stays as it was
        tuned = replace(row, config=Config(**(row.config.kwargs | {"SPLITS": 3})))
        assert lookup.carried(op, key, tuned, fields) == tuned
        answer = lookup.find(op, key, ("triton", "triton_hopper", "torch", "reference"), "triton", shipped)
        assert (answer[0], dict(answer[1])["SPLITS"], answer[2]) == ("triton_hopper", splits, "near")

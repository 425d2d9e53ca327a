"""Published choices: read, looked up after measured rows, and never mistaken for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.toy import ToyOp
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import Cost, DispatchMiss
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config, Database, Row, database, published
from wavecrest.errors import TableError

HEAD = "rows,dtype,backend,published,source\n"
FIELDS = ("rows", "columns", "dtype")


def _takes(*_args: Tensor) -> None:
    return None


@pytest.fixture
def op() -> Iterator[Op]:
    """An op whose calls say that they are on a GPU, with backends that run there or do not."""
    made = ToyOp(
        "sample",
        reference=lambda x: x,
        check=_takes,
        key=lambda x: (x.shape[0], x.shape[1], "float32", "cuda", x.requires_grad),
        key_fields=(*FIELDS, "device", "grad"),
        key_sizes=("rows",),
        inputs=lambda M, N, dtype, device: (torch.ones(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(x.numel(), x.nbytes),
        default_config=lambda key: Config(BLOCK=16),
    )
    made.native("torch", lambda x: x, priority=10)
    made.kernel("tiles", lambda x, *, config: x, priority=5)
    made.native("absent", lambda x: x, refuse=lambda x: "its library is not installed", priority=1)
    yield made
    del registry.STATE.ops["sample"]


def priors(folder: Path, text: str) -> Database:
    path = folder / "prior" / "gfx942" / "sample.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + text)
    return Database(folder, "gfx942")


def test_a_prior_is_for_every_call_that_it_names_and_says_so(op: Op, tmp_path: Path) -> None:
    with registry.measured_in(priors(tmp_path, "4,float32,tiles,fast 1.2x,a guide\n")):
        for columns in (8, 64):
            decision = op.decide(op.of(torch.ones(4, columns)))
            assert (decision.backend, decision.config, decision.source) == ("tiles", Config(BLOCK=16), "prior")
            assert decision.reason == "prior data, published by others and not measured here: fast 1.2x (a guide)"
        other = op.decide(op.of(torch.ones(5, 8)))
        assert (other.backend, other.source) == ("torch", "default")
        with torch.enable_grad():
            assert op.decide(op.of(torch.ones(4, 8, requires_grad=True))).source == "default"
    with registry.measured_in(Database(tmp_path, "gfx950")):
        assert op.decide(op.of(torch.ones(4, 8))).source == "default"


def test_what_was_measured_stands_before_a_prior(op: Op, tmp_path: Path) -> None:
    found = priors(tmp_path, "4,float32,tiles,fast,a guide\n8,float32,tiles,fast,a guide\n")
    rows = [Row((rows, 8, "float32"), "torch", None, 10.0, 10.0, "a.json") for rows in (4, 16)]
    database.write(found.path("sample"), FIELDS, rows)
    with registry.measured_in(found):
        exact, near = op.decide(op.of(torch.ones(4, 8))), op.decide(op.of(torch.ones(8, 8)))
        assert (exact.backend, exact.source, near.backend, near.source) == ("torch", "exact", "torch", "near")
        assert op.decide(op.of(torch.ones(8, 32))).source == "prior"


def test_a_prior_that_cannot_run_leaves_its_reason(op: Op, tmp_path: Path) -> None:
    with registry.measured_in(priors(tmp_path, "4,float32,absent,fast,a guide\n5,float32,gone,fast,a guide\n")):
        for rows, why in ((4, "for absent, which refuses it"), (5, "for gone, which sample does not have")):
            decision = op.decide(op.of(torch.ones(rows, 8)))
            assert (decision.backend, decision.source) == ("torch", "default") and decision.reason.endswith(why)


def test_a_call_that_a_prior_decides_is_untuned(op: Op, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with registry.measured_in(priors(tmp_path, "4,float32,tiles,fast,a guide\n")):
        try:
            registry.strict("warn")
            with registry.coverage() as seen, pytest.warns(DispatchMiss, match="prior data"):
                op(torch.ones(4, 8))
        finally:
            registry.strict("off")
    (row,) = seen.by_op()
    assert row.calls == {"prior": 1} and "prior" in str(seen)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows,backend,published\n", "line 1: the columns are"),
        ("colour,backend,published,source\n", "some of rows,columns,dtype"),
        ("backend,published,source\n", "line 1: the columns are"),
        ("rows,rows,backend,published,source\n", "each once"),
        (HEAD + "4,float32,tiles,fast\n", "line 2: 4 cells for 5 columns"),
        (HEAD + "4,float32,tiles,fast,\n", "line 2: needs a backend, what was published, and by whom"),
        (HEAD + "4,float32,,fast,a guide\n", "line 2: needs a backend"),
        (HEAD + "4,float32,tiles,fast,a\n4,float32,torch,slow,b\n", "line 3: the key is that of a line before"),
        (HEAD + '4,"float32,tiles,fast,a\n', "line 2: unexpected end"),
    ],
)
def test_damaged_files_are_refused(op: Op, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prior" / "gfx942" / "sample.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(TableError, match=message):
        published.read(path, FIELDS)
    with registry.measured_in(Database(tmp_path, "gfx942")), pytest.raises(TableError, match=r"sample\.csv"):
        op(torch.ones(4, 8))


def test_what_comes_with_the_package() -> None:
    """Every row is of an op and an architecture that there are, names a backend of it, and its source."""
    files = sorted(published.PRIOR.glob("*/*.csv"))
    assert [(path.parent.name, path.stem) for path in files] == [("gfx942", "mlstm_chunkwise"), ("gfx950", "gemm")]
    for path in files:
        found = registry.get(path.stem)
        rows = published.read(path, lookup.fields_of(found)).rows.values()
        assert rows and all(row.backend in found.backends and row.source for row in rows)

"""aiter's tuned tables: both forms, which row it would take, what is no table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wavecrest.dispatch.tuned import aiter_csv
from wavecrest.dispatch.tuned.aiter_csv import Row
from wavecrest.errors import TableError

OLD = "cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
NEW = f"gfx,{OLD}"


def line(M: int = 16, us: float = 5.5, **given: object) -> str:
    row = {
        "gfx": "gfx942", "cu_num": 304, "M": M, "N": 4096, "K": 4096, "bias": False, "dtype": "torch.bfloat16",
        "outdtype": "torch.bfloat16", "scaleAB": False, "bpreshuffle": False, "libtype": "hipblaslt", "solidx": 7,
        "splitK": 0, "us": us, "kernelName": "k", "err_ratio": 0.0, "tflops": 1.0, "bw": 1.0,
    }  # fmt: skip
    values = row | given
    return ",".join(str(value) for name, value in values.items() if name != "gfx" or value)


def found(lines: list[str], M: int, header: str = NEW, **given: object) -> Row | None:
    wanted = {"arch": "gfx942", "compute_units": 304, "N": 4096, "K": 4096, "dtype": "bfloat16"} | given
    return aiter_csv.find(aiter_csv.parse("\n".join([header, *lines]), "t.csv"), M=M, **wanted)  # type: ignore[arg-type]


def test_both_forms_hold_the_same_rows() -> None:
    (new,) = aiter_csv.parse(f"{NEW}\n{line()}\n", "t.csv")
    (old,) = aiter_csv.parse(f"{OLD}\n{line(gfx='')}\n", "t.csv")
    wanted = (304, 16, 4096, 4096, False, "bfloat16", "bfloat16", True, "hipblaslt", "k", 5.5, "t.csv")
    assert new == Row("gfx942", *wanted) and old == Row(None, *wanted)
    assert len(NEW.split(",")) == 18 and len(OLD.split(",")) == 17


def test_a_row_of_the_older_form_holds_for_any_architecture_with_its_cus() -> None:
    assert found([line(gfx="")], 16, OLD, arch="gfx950") is not None
    assert found([line(gfx="")], 16, OLD, compute_units=80) is None


@pytest.mark.parametrize(
    "other",
    [
        {"gfx": "gfx950"}, {"cu_num": 80}, {"N": 4097}, {"K": 2048}, {"dtype": "torch.float16"}, {"bias": True},
        {"outdtype": "torch.float32"}, {"scaleAB": True}, {"bpreshuffle": "True"},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_a_row_of_another_key_is_not_taken(other: dict[str, object]) -> None:
    assert found([line(), line(**other)], 16) == found([line()], 16) is not None
    assert found([line(**other)], 16) is None


@pytest.mark.parametrize(
    ("M", "N", "rows"),
    [
        (1, 4096, (1, 16)), (16, 4096, (16,)), (17, 4096, (17, 32)), (300, 4096, (300, 320, 512)),
        (1025, 4096, (1025, 1088, 2048)), (5000, 4096, (5000, 5120, 8192)), (9000, 8192, (9000, 9088, 8192)),
        (9000, 4096, (9000, 9088, 16384)),
    ],
)  # fmt: skip
def test_rows_are_padded_as_aiter_does(M: int, N: int, rows: tuple[int, ...]) -> None:
    # the coarse step of one row is itself
    assert aiter_csv.padded(M, N) == rows


def test_the_nearest_padding_is_taken() -> None:
    lines = [line(512), line(320), line(300)]
    assert [row.M for row in (found(lines[:count], 300) for count in (1, 2, 3)) if row] == [512, 320, 300]
    assert found([line(256)], 300) is None


def test_of_equal_keys_the_fastest_is_taken_and_placeholders_are_no_times() -> None:
    row = found([line(us=7.0), line(us=0.0), line(us=6.0), line(us=-1.0)], 16)
    assert row is not None and row.us == 6.0
    alone = found([line(us=0.0)], 16)
    assert alone is not None and alone.us is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("M,N,K\n1,2,3", "t.csv is no table of 16-bit matrix products: no column cu_num, dtype"),
        ("", "no column cu_num"),
        (f"{NEW}\n{line()}\n{line(M='many')}", "t.csv, line 3: invalid literal for int"),  # type: ignore[arg-type]
        (f"{NEW}\ngfx942,304", "t.csv, line 2: "),
        (f"{NEW}\n{line(us='fast')}", "t.csv, line 2: could not convert"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_table_is_named(text: str, message: str) -> None:
    with pytest.raises(TableError, match=re.escape(message)):
        aiter_csv.parse(text, "t.csv")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{NEW}\n{line(1)}\n")
    (tmp_path / "b.csv").write_text(f"{OLD}\n{line(2, gfx='')}\n")
    assert [row.M for row in aiter_csv.read([tmp_path / "a.csv", tmp_path / "b.csv"])] == [1, 2]
    with pytest.raises(TableError, match=r"no file of aiter's at .*gone\.csv"):
        list(aiter_csv.read([tmp_path / "gone.csv"]))

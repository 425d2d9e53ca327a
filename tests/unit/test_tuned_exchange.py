"""Rows of other programs: aiter's tables in all their layouts, TunableOp's result files; what is bad, what is left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.tuned import Config, Entry, Evidence, Row, aiter_csv, table, tunable_op
from wavecrest.errors import InvalidArgument, TableError
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.tune import exchange

OLD = "cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
NEW = f"gfx,{OLD}"
OLD_8 = "cu_num,M,N,K,q_dtype_w,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
NEW_8 = f"gfx,{OLD_8}"
VALIDATORS = (
    "Validator,PT_VERSION,2.9.1\nValidator,HIP_VERSION,603\nValidator,HIPBLASLT_VERSION,1000-b4e5042b\n"
    "Validator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-\nValidator,ROCBLAS_VERSION,4.3.0.8ebd6c11\n"
)


def line(M: int = 16, us: object = 50.5, **given: object) -> str:
    row = {
        "gfx": "gfx942", "cu_num": 304, "M": M, "N": 6144, "K": 4096, "bias": False, "dtype": "torch.bfloat16",
        "outdtype": "torch.bfloat16", "scaleAB": False, "bpreshuffle": False, "libtype": "asm", "solidx": 7,
        "splitK": 2, "us": us, "kernelName": "a_kernel", "err_ratio": 0.01, "tflops": 1.0, "bw": 1.0,
    }  # fmt: skip
    return ",".join(str(value) for name, value in (row | given).items() if name != "gfx" or value)


def line_8(M: int = 16, us: object = 40.5, **given: object) -> str:
    row = {
        "gfx": "gfx942", "cu_num": 80, "M": M, "N": 1280, "K": 8192, "q_dtype_w": "torch.int8", "kernelId": 34,
        "splitK": 0, "us": us, "kernelName": "a8w8_rowwise_256", "tflops": 1.0, "bw": 1.0, "errRatio": 0.0,
    }  # fmt: skip
    return ",".join(str(value) for name, value in (row | given).items() if name != "gfx" or value)


def file(tmp_path: Path, *lines: str, name: str = "a.csv") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def key(**changes: Any) -> tuple[Any, ...]:
    """The key of a call on the GPU as the op itself makes it, from tensors on the CPU."""
    M, dtype = changes.pop("M", 16), changes.pop("dtype", torch.bfloat16)
    N, K = changes.pop("N", 6144), changes.pop("K", 4096)
    a = torch.empty(M, K, dtype=dtype)
    call = GemmCall(a, torch.empty(N, K, dtype=dtype).mT, **changes)
    parts = dict(zip(gemm.key_fields, gemm.key(call), strict=True))
    return tuple(parts[name] for name in lookup.fields_of(gemm))


def test_a_table_of_16_bits_in_both_layouts(tmp_path: Path) -> None:
    new = exchange.read(file(tmp_path, NEW, line(), line(libtype="torch", M=32, bias=True)), None)
    old = exchange.read(file(tmp_path, OLD, line(gfx=""), line(gfx="", libtype="torch", M=32, bias=True)), "gfx942")
    assert new == old and new.left == ()
    asm, native = new.entries
    assert (asm.arch, asm.op, asm.fields) == ("gfx942", "gemm", lookup.fields_of(gemm))
    assert asm.row.key == key() and native.row.key == key(M=32, bias=torch.empty(6144, dtype=torch.bfloat16))
    assert (asm.row.backend, asm.row.config, asm.row.us, asm.row.native_us) == ("aiter", None, 50.5, None)
    assert native.row.backend == "torch"
    evidence = asm.row.evidence
    assert (evidence.units, evidence.origin, asm.row.record) == (304, "aiter", "a.csv")
    # nothing is made up
    assert (evidence.date, evidence.versions, evidence.device, evidence.error) == ("", "", "", None)
    with pytest.raises(InvalidArgument, match="has no column gfx: give --arch"):
        exchange.read(file(tmp_path, OLD, line(gfx="")), None)
    with pytest.raises(InvalidArgument, match="--arch takes gfx90a"):
        exchange.read(tmp_path / "a.csv", "gfx000")


def test_a_table_of_8_bits_in_both_layouts(tmp_path: Path) -> None:
    new = exchange.read(file(tmp_path, NEW_8, line_8(), line_8(M=1, q_dtype_w="torch.float8_e4m3fnuz")), None)
    old = exchange.read(
        file(tmp_path, OLD_8, line_8(gfx=""), line_8(gfx="", M=1, q_dtype_w="torch.float8_e4m3fnuz")), "gfx942"
    )
    assert new == old and new.left == () and [one.row.backend for one in new.entries] == ["aiter", "aiter"]
    for entry, dtype, rows in zip(new.entries, (torch.int8, torch.float8_e4m3fnuz), (16, 1), strict=True):
        scales = {"scale_a": torch.ones(rows), "scale_b": torch.ones(1280)}
        assert entry.row.key == key(M=rows, N=1280, K=8192, dtype=dtype, out_dtype=torch.bfloat16, **scales)
    assert new.entries[0].row.evidence.units == 80


BAD = [
    (line(M="many"), "invalid literal"),  # type: ignore[arg-type]
    (line(us="fast"), "could not convert"),
    (line(us="nan"), "is no time"),
    (line(N=0), "N is 0"),
    (line(K=-4), "K is -4"),
    ("gfx942,304", "has not 18 cells"),
    (line() + ",7", "has not 18 cells"),
    (line(dtype="bf16"), "bf16 to bfloat16 are not types that aiter multiplies"),
    (line(outdtype="torch.abc"), "are not types"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_nothing_is_taken_of_a_file_with_a_bad_line(tmp_path: Path, bad: str, message: str) -> None:
    path = file(tmp_path, NEW, line(), bad, line(M=32), bad)
    with pytest.raises(TableError) as caught:
        exchange.read(path, None)
    text = str(caught.value)
    # every such line is named
    assert "line 3: " in text and "line 5: " in text and message in text and text.startswith("a.csv")
    assert "line 2" not in text and "line 4" not in text


def test_lines_that_are_of_no_use_are_listed(tmp_path: Path) -> None:
    lines = [
        line(), line(us=0.0), line(us=-1.0), line(err_ratio=0.06), line(scaleAB=True), line(bpreshuffle=True),
        line(us=0.1, M=4096), line(gfx="gfx999"), line(gfx="gfx950", M=64), line(M=9, us=40.0), line(us=45.0),
    ]  # fmt: skip
    found = exchange.read(file(tmp_path, NEW, *lines), "gfx942")
    # of the numbers of rows of one bucket the largest stands for all, and of equal ones the fastest
    assert [(one.row.key[0], one.row.us) for one in found.entries] == [(16, 45.0)]
    said = dict(text.split(": ", 1) for text in found.left)
    assert set(said) == {f"line {number}" for number in range(2, 13)} - {"line 12"}
    assert said["line 3"] == said["line 4"] == "has a placeholder for a time"
    assert said["line 5"].startswith("more than the 5% of the elements")
    assert said["line 6"] == said["line 7"] and "preshuffled" in said["line 6"]
    assert "an error of measurement" in said["line 8"]
    assert said["line 9"] == "is for gfx999" and said["line 10"] == "is for gfx950"
    assert said["line 11"] == said["line 2"] == "another line stands for its numbers of rows"
    both = exchange.read(tmp_path / "a.csv", None)
    assert {one.arch for one in both.entries} == {"gfx942", "gfx950"}
    assert "line 9: is for gfx999, which is unknown here" in both.left


@pytest.mark.parametrize("columns", [f"{NEW_8},libtype", "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName"])
def test_tables_of_other_operands_are_refused(tmp_path: Path, columns: str) -> None:
    with pytest.raises(TableError, match=r"preshuffled|no table of 16-bit"):
        exchange.read(file(tmp_path, columns, "1,2,3"), "gfx942")


@pytest.mark.parametrize(
    ("form", "header", "lines"),
    [
        (
            "aiter-bf16",
            NEW,
            [line(), line(M=32, libtype="torch", bias=True, err_ratio=""), line(M=17, libtype="flydsl", bias=True)],
        ),
        (
            "aiter-a8w8",
            NEW_8,
            [line_8(), line_8(M=1, us=9.0), line_8(M=320, q_dtype_w="torch.float8_e4m3fnuz", errRatio=0.0112)],
        ),
    ],
)
def test_what_is_imported_is_exported_as_it_was(tmp_path: Path, form: str, header: str, lines: list[str]) -> None:
    found = exchange.read(file(tmp_path, header, *lines), None)
    made = exchange.written(found.entries, form, "gfx942")
    if form == "aiter-bf16":
        # 17 and 32 rows share a bucket
        lines = lines[:2]
    assert made.rows == len(lines) and made.left == ()
    want = list(aiter_csv.parse("\n".join([header, *lines]), "a.csv"))
    again = list(aiter_csv.parse(made.text, "a.csv"))
    assert again == want
    facts = [(row.solution, row.split_k, row.error) for row in again]
    assert facts == [(row.solution, row.split_k, row.error) for row in want]
    assert made.text.splitlines()[0] == header
    assert exchange.read(file(tmp_path, *made.text.splitlines()), None).entries == found.entries


def test_figures_that_follow_from_sizes_and_time(tmp_path: Path) -> None:
    found = exchange.read(file(tmp_path, NEW, line(us=100.0)), None)
    (_, text) = exchange.written(found.entries, "aiter-bf16", "gfx942").text.splitlines()
    cells = dict(zip(NEW.split(","), text.split(","), strict=True))
    assert float(cells["tflops"]) == round(2 * 16 * 6144 * 4096 / 100e-6 / 1e12, 2)
    assert float(cells["bw"]) == round(2 * (16 * 4096 + 6144 * 4096 + 16 * 6144) / 100e-6 / 1e9, 2)


def own(row_key: tuple[Any, ...], backend: str = "torch", **evidence: Any) -> Entry:
    made = Row(row_key, backend, None, 10.0, 10.0, "a.json", Evidence(**{"units": 304} | evidence))
    return Entry("gfx942", "gemm", lookup.fields_of(gemm), made)


def test_rows_that_a_table_cannot_say_are_listed() -> None:
    bf16 = torch.bfloat16
    cases = {
        "multiplies int8": own(key(dtype=torch.int8, N=64, K=64)),
        "names no kernel of aiter's": own(key(), "triton"),
        "has no number of compute units": own(key(), units=None),
        "activation silu": own(key(activation="silu")),
        "residual True": own(key(residual=torch.empty(16, 6144, dtype=bf16))),
        "order": own(key(bias=torch.empty(16, dtype=bf16), bias_along="m")),
    }
    made = exchange.written([own(key()), *cases.values()], "aiter-bf16", "gfx942")
    assert made.rows == 1 and len(made.left) == len(cases)
    for said, text in zip(cases, made.left, strict=True):
        assert said in text
    assert exchange.written([own(key())], "aiter-bf16", "gfx950").rows == 0
    with pytest.raises(InvalidArgument, match="--format takes csv, aiter-bf16"):
        exchange.written([], "excel", "gfx942")


TUNED = [
    "GemmTunableOp_BFloat16_TN,tn_6144_16_4096_ld_4096_4096_6144,Gemm_Hipblaslt_1219,0.0196817",
    "GemmTunableOp_Half_TN,tn_200_100_20,Gemm_Rocblas_32323,0.00669595",
    "GemmTunableOp_float_NN,nn_1024_512_2048,Default,0.0653662",
    "GemmTunableOp_BFloat16_NT,nt_64_128_256,Gemm_Rocblas_-6212,0.01",
    "GemmAndBiasTunableOp_BFloat16_TN,tn_6144_1_4096_ld_4096_4096_6144,Gemm_Hipblaslt_5,0.0101",
]


def test_tunable_op_results(tmp_path: Path) -> None:
    found = exchange.read(file(tmp_path, VALIDATORS.rstrip(), *TUNED), None)
    assert found.left == () and {one.arch for one in found.entries} == {"gfx942"}
    rows = [one.row for one in found.entries]
    assert [row.backend for row in rows] == [
        "torch_tunable",
        "torch_tunable",
        "torch",
        "torch_tunable",
        "torch_tunable",
    ]
    assert [row.us for row in rows] == pytest.approx([19.6817, 6.69595, 65.3662, 10.0, 10.1], rel=1e-12)
    assert rows[0].evidence.origin == "TunableOp" and "torch 2.9.1; HIP_VERSION 603" in rows[0].evidence.versions
    # what F.linear of [M, K] and [N, K] records is tn_N_M_K
    assert rows[0].key == key() and rows[4].key == key(M=1, bias=torch.empty(6144, dtype=torch.bfloat16))
    assert rows[1].key == key(M=100, N=200, K=20, dtype=torch.float16)
    for place, a, b in (
        (2, torch.empty(512, 2048), torch.empty(2048, 1024)),
        (3, torch.empty(256, 128, dtype=torch.bfloat16).mT, torch.empty(256, 64, dtype=torch.bfloat16)),
    ):
        parts = dict(zip(gemm.key_fields, gemm.key(GemmCall(a, b)), strict=True))
        assert rows[place].key == tuple(parts[name] for name in lookup.fields_of(gemm))
    made = exchange.written(found.entries, "tunableop", "gfx942")
    assert made.rows == 5 and made.left == ()
    assert exchange.read(file(tmp_path, *made.text.splitlines()), None).entries == found.entries
    want, again = (tunable_op.parse(text, "a") for text in (VALIDATORS + "\n".join(TUNED), made.text))
    assert again == want and made.text.startswith(VALIDATORS)


def test_tunable_op_lines_of_no_use(tmp_path: Path) -> None:
    lines = [
        "GemmTunableOp_BFloat16_TN,tn_6144_16_4096_ld_8192_4096_6144,Gemm_Rocblas_1,0.01",
        "GemmStridedBatchedTunableOp_BFloat16_TN,tn_64_16_128_B_4,Gemm_Rocblas_1,0.01",
        "GemmTunableOp_c10::Something_TN,tn_64_16_128,Gemm_Rocblas_1,0.01".replace("::", "_"),
        "GemmTunableOp_BFloat16_TN,tn_64_16_128,Gemm_Rocblas_1",
        "GemmTunableOp_BFloat16_TN,tn_64_9_128,Gemm_Rocblas_1,0.01",
        "GemmTunableOp_BFloat16_TN,tn_64_12_128,Gemm_Rocblas_2,0.02",
        "GemmTunableOp_BFloat16_TN,tn_64_10_128,Gemm_Rocblas_2,0.02",
    ]
    found = exchange.read(file(tmp_path, VALIDATORS.rstrip(), *lines), "gfx942")
    assert [(one.row.key[0], one.row.us) for one in found.entries] == [(16, 20.0)]
    assert [text.partition(":")[0] for text in found.left] == [
        "line 6",
        "line 7",
        "line 8",
        "line 9",
        "rows=9",
        "line 12",
    ]
    other = file(tmp_path, "Validator,PT_VERSION,2.9.1", lines[4], name="b.csv")
    with pytest.raises(InvalidArgument, match="does not name: give --arch"):
        exchange.read(other, None)
    assert len(exchange.read(other, "gfx950").entries) == 1
    with pytest.raises(InvalidArgument, match="is for gfx942, not gfx950"):
        exchange.read(tmp_path / "a.csv", "gfx950")
    # a file is for one set of versions
    both = [*found.entries, *exchange.read(other, "gfx942").entries]
    made = exchange.written([*found.entries, *both], "tunableop", "gfx942")
    assert made.rows == 2 and "was tuned with other versions" in made.left[0]
    assert "names no solution" in exchange.written([own(key())], "tunableop", "gfx942").left[0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("GemmTunableOp_BFloat16_TN,tn_64_16_128,Gemm", ""),
        ("GemmTunableOp_BFloat16_TN,nn_64_16_128,Gemm,0.1", "is no operator with its sizes"),
        ("GemmTunableOp_BFloat16_TN,tn_64_16,Gemm,0.1", "is no operator"),
        ("GemmTunableOp_BFloat16_TN,tn_64_0_16,Gemm,0.1", "a size of 0"),
        ("GemmTunableOp_BFloat16_TN,tn_64_16_128,Gemm,fast", "could not convert"),
        ("GemmTunableOp_BFloat16_TN,tn_64_16_128,Gemm,nan", "is no time in ms"),
        ("GemmTunableOp_BFloat16_TN,tn_64_16_128", "2 cells"),
        ("Validator,PT_VERSION", "not enough values"),
        ("something,else,3", "is no operator"),
    ],
)
def test_tunable_op_lines_that_are_bad(tmp_path: Path, bad: str, message: str) -> None:
    path = file(tmp_path, VALIDATORS.rstrip(), TUNED[0], bad, TUNED[1])
    if not message:
        assert len(exchange.read(path, None).entries) == 2
        return
    with pytest.raises(TableError) as caught:
        exchange.read(path, None)
    assert "line 7: " in str(caught.value) and message in str(caught.value)


FUZZED = {
    "aiter": "\n".join([NEW, line(), line(M=32), line(M=64, libtype="torch")]),
    "aiter8": "\n".join([NEW_8, line_8(), line_8(M=32)]),
    "tunable": VALIDATORS + "\n".join(TUNED),
    "ours": (Path(table.__file__).with_name("data") / "sm_90" / "rope.csv").read_text(),
}


@pytest.mark.parametrize("name", FUZZED)
def test_fuzzed_and_truncated_files_give_named_errors(tmp_path: Path, name: str) -> None:
    pick, data, refused = random.Random(3), FUZZED[name].encode(), 0
    pieces = [b"\xff", b'"', b",", b"\n", b"\0", b"-", b"nan", b"1e999", b"9" * 5000, b"\r", b"=", b"_", b"torch."]
    fields = lookup.fields_of(registry.get("rope"))
    for round_ in range(300):
        changed = bytearray(data)
        if round_ % 3 == 0:
            changed = changed[: pick.randrange(len(changed))]
        for _ in range(pick.choice((1, 1, 4)) if round_ % 3 else 0):
            place = pick.randrange(len(changed))
            changed[place : place + pick.choice((0, 1, 1, 20))] = pick.choice([*pieces, bytes([pick.randrange(256)])])
        path = tmp_path / "f.csv"
        path.write_bytes(bytes(changed))
        try:
            if name == "ours":
                table.read(path, fields)
            else:
                exchange.read(path, "gfx942")
        except (TableError, InvalidArgument) as error:
            assert "f.csv" in str(error) or "--arch" in str(error)
            refused += 1
    assert refused > 100


def test_a_configuration_survives_a_table(tmp_path: Path) -> None:
    made = Row((1,), "triton", Config(BLOCK=2**40, num_warps=4), 1.0, None, "r", Evidence(error=0.1 + 0.2, units=7))
    table.write(tmp_path / "a.csv", ("rows",), [made])
    assert list(table.read(tmp_path / "a.csv", ("rows",)).values()) == [made]

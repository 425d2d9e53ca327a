"""The words that give calls their sizes: several values, ranges, bare numbers, and what is refused."""

from __future__ import annotations

import pytest

from wavecrest.bench import sizes
from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("M=8", [8]),
        ("M=1,16,64", [1, 16, 64]),
        ("M=16,1,16", [16, 1]),
        ("M=3:6", [3, 4, 5, 6]),
        ("M=8:30:8", [8, 16, 24]),
        ("M=1024:8192:*2", [1024, 2048, 4096, 8192]),
        ("M=5:100:*3", [5, 15, 45]),
        ("M=1,8:16:8,4:4", [1, 8, 16, 4]),
        ("rows=2,4", [2, 4]),
        ("2,4", [2, 4]),
    ],
)
def test_one_word_has_several_values(words: str, values: list[int]) -> None:
    found = sizes.several(registry.get("gemm"), words.split())
    assert found == [((value, 4096, 4096), "bfloat16") for value in values]


def test_several_words_give_all_combinations_the_last_one_fastest() -> None:
    found = sizes.several(registry.get("rms_norm"), ["N=64,32", "M=1,2", "dtype=fp16,bf16,float16"])
    assert found == [
        ((M, N), dtype) for N in (64, 32) for M in (1, 2) for dtype in ("float16", "bfloat16")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("M=", "M=: must be a whole number"),
        ("M=1,", "M=: must be a whole number"),
        ("M=1,x", "M=x: must be"),
        ("M=0:4", "M=0: must be"),
        ("M=1:8:0", "M=0: must be"),
        ("M=1:8:*1", "a factor of at least 2"),
        ("M=8:1", "a range goes up"),
        ("M=1:2:3:4", "a range is first:last"),
        ("M=:8", "a range is first:last"),
        ("M=-1", "M=-1: must be"),
        ("M=1:999999999999:1", "1,001 calls; at most 1,000"),
        ("M=1:100 N=1:100", "10,000 calls; at most 1,000"),
        ("dtype=fp16,int3", "dtype=int3: rms_norm takes"),
        ("M=1 rows=2", "'rows=2': M is already 1"),
        ("M=" + "9" * 5000, "M=9999"),
    ],
)
def test_what_is_no_value_is_named(words: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sizes.several(registry.get("rms_norm"), words.split())
    assert message in str(caught.value) and len(str(caught.value)) < 300


def test_fp8_is_the_devices() -> None:
    op = registry.get("gemm")
    assert [sizes.several(op, ["dtype=fp8"], fp8)[0][1] for fp8 in (None, "e4m3fn", "e4m3fnuz")] == [
        "float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fnuz",
    ]  # fmt: skip


def test_words_of_other_ops_are_known_where_the_size_is() -> None:
    known = {name: sizes.words(registry.get(name)) for name in ("slstm_step", "flash_decoding", "mla_prefill", "moe")}
    assert known["slstm_step"] == {"batch": "B", "heads": "H", "dk": "D", "d": "D", "head_dim": "D"}
    # S is the cache's, and its call has one token
    assert "tokens" not in known["flash_decoding"] and known["flash_decoding"]["capacity"] == "S"
    assert known["mla_prefill"]["tokens"] == "T" and known["moe"]["intermediate"] == "N"

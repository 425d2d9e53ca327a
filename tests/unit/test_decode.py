"""The one decoder: limits on size, depth, names, numbers and text, each with a reason of its own."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from wavecrest.errors import PlanError, RecordError
from wavecrest.optimizer.plan import Plan
from wavecrest.records import decode, load
from wavecrest.records.decode import MOST_DEPTH, MOST_WHOLE, Undecodable, json_of, toml_of, yaml_of

LIMITS = {
    "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1): "deep",
    "[" * 100_000 + "]" * 100_000: "deep",
    '{"a": ' * 100_000 + "1" + "}" * 100_000: "deep",
    '{"a": 1, "b": {"c": 1, "c": 2}}': "'c' is there twice",
    "NaN": "NaN is no number of JSON",
    "[1, -Infinity]": "-Infinity is no number",
    "1e999": "range of float64",
    str(MOST_WHOLE + 1): "64 bits",
    "1" * 5000: "64 bits",
    '"\\ud800"': "surrogate",
    '{"\\udc00": 1}': "surrogate",
    "[1,]": "not JSON at line 1",
    "": "not JSON",
    "{} {}": "not JSON",
    "\ufeff{}": "not JSON|byte order",
}


@pytest.mark.parametrize("text", LIMITS, ids=range(len(LIMITS)))
def test_json_beyond_a_limit_is_named(text: str) -> None:
    with pytest.raises(Undecodable, match=LIMITS[text]):
        json_of(text)


def test_values_at_the_limits_are_read() -> None:
    assert json_of("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    assert json_of(str(MOST_WHOLE)) == MOST_WHOLE and json_of(f"-{MOST_WHOLE}") == -MOST_WHOLE
    assert json_of('"\\ud83d\\ude00"') == "\U0001f600"
    assert json_of("[NaN]", finite=False)[0] != json_of("1")


@given(st.recursive(st.none() | st.booleans() | st.integers(-MOST_WHOLE, MOST_WHOLE) | st.text(), _more := (
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)))  # fmt: skip
def test_plain_values_come_back(value: Any) -> None:
    assert json_of(json.dumps(value)) == value == json_of(json.dumps(value, ensure_ascii=False).encode())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [" * 3000, "deep|flow"),
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", "aliases"),
        ("a: 1\na: 2\n", "'a' is there twice"),
        ("x: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("a: .nan\n", "range of float64"),
        ("a: 2026-13-45\n", "month"),
        ("a: " + "1" * 5000, "digits|64 bits"),
        ("a: b: c", "mapping values"),
        ("a: 1\n? \n", "a name in it is not text"),
        ("1: 2", "a name in it is not text"),
        ("a: \x07", "special characters"),
        ("a: ]", "flow|parsing"),
    ],
    ids=range(13),
)
def test_yaml_beyond_a_limit_is_named(text: str, reason: str) -> None:
    with pytest.raises(Undecodable, match=reason):
        yaml_of(text, yaml)


def test_yaml_and_toml_of_configurations_are_read() -> None:
    assert yaml_of("a: 1\nb: [x, 2.5]\n", yaml) == {"a": 1, "b": ["x", 2.5]}
    assert toml_of("a = 1\n[b]\nc = 2.5\n") == {"a": 1, "b": {"c": 2.5}}
    for text, reason in (("a = 1\na = 2", "overwrite"), ("a = " + "[" * 3000, "deep"), ("a = nan", "float64")):
        with pytest.raises(Undecodable, match=reason):
            toml_of(text)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    begin = time.monotonic()
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(RecordError, match="no regular file"):
            load(path)
    with pytest.raises(RecordError, match="folder"):
        load(tmp_path)
    assert time.monotonic() - begin < 5


def test_size_is_limited_before_and_after_decompression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_BYTES", 1000)
    bomb = tmp_path / "run.jsonl.gz"
    bomb.write_bytes(gzip.compress(b" " * 1_000_000))
    assert bomb.stat().st_size > 1000 or decode.content(bomb, most=1 << 20)
    with pytest.raises(Undecodable, match="more than 1,000 bytes"):
        decode.content(bomb, most=1000)
    plain = tmp_path / "plan.json"
    plain.write_bytes(b" " * 1001)
    with pytest.raises(Undecodable, match="more than 1,000 bytes"):
        decode.content(plain, most=1000)
    assert decode.content(plain, most=1001) == b" " * 1001


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"\xff\xfe{\x00}\x00", "byte order mark"),
        (b'{"a": "\xe9"}', "not UTF-8"),
        (b"\xed\xa0\x80", "not UTF-8"),
        (b'{"format_version": true}', "no format_version"),
        (b'{"format_version": -3}', "no format_version"),
        (b'{"format_version": 1.0}', "no format_version"),
        (b'{"format_version": 99}', "upgrade wavecrest"),
        (b"[" * 100_000, "deep"),
    ],
    ids=range(9),
)
def test_a_plan_of_such_bytes_is_a_named_error(held: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(held)
    with pytest.raises(PlanError, match=reason):
        Plan.load(path)


def test_a_path_that_no_terminal_can_show_is_shown(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json"))
    with pytest.raises(PlanError, match=r"no plan at .*\\xff\.json"):
        Plan.load(path)

"""Hashes of kernels: what the compiler sees changes them, what a reader sees alone does not."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from wavecrest.isa import sources
from wavecrest.isa.emulate.record import CaseResult, EmulationRecord, Work

_count = itertools.count()

KERNEL = '''
import triton
from triton import language as tl

LIMIT = tl.constexpr(8)


@triton.jit
def helper(x, LEAST: tl.constexpr):
    """Says something."""
    return tl.maximum(x, LEAST)


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    """Says more."""
    at = tl.arange(0, BLOCK)
    # a comment
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, helper(x, LEAST=LIMIT))
'''


def load(folder: Path, text: str) -> ModuleType:
    """A module of its own."""
    path = folder / f"kernels_{next(_count)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sources.digest(load(tmp_path_factory.mktemp("kernels"), KERNEL).kernel)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # a comment\n", "\n\n"),
        ('    """Says more."""\n', ""),
        ('"""Says something."""', '"""Says\n    otherwise."""'),
        ("helper", "at_least"),
        ("LIMIT", "FLOOR"),
        ("LEAST", "FLOOR"),
        ("x_ptr", "pointer"),
        ("BLOCK", "WIDTH"),
        ("from triton import language as tl", "import triton.language as tl"),
        ("import language as tl", "import language as t\ntl = t"),
        ("LIMIT = tl.constexpr(8)", "LIMIT = tl.constexpr(2 * 4)"),
        ("at < n)", "at < n\n    )"),
        ("helper(x, LEAST=LIMIT)", "(helper(x, LEAST=LIMIT))"),
    ],
)
def test_what_a_reader_sees_alone(tmp_path: Path, before: str, old: str, new: str) -> None:
    assert old in KERNEL
    assert sources.digest(load(tmp_path, KERNEL.replace(old, new)).kernel) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("at < n", "at <= n"),
        ("tl.constexpr(8)", "tl.constexpr(9)"),
        ("tl.maximum", "tl.minimum"),
        ("helper(x, LEAST=LIMIT)", "x"),
        ("helper(x, LEAST=LIMIT)", "helper(LIMIT, LEAST=x)"),
        ("(x_ptr, n, BLOCK", "(n, x_ptr, BLOCK"),
        ('(do_not_specialize=["n"])', ""),
        ('do_not_specialize=["n"]', 'do_not_specialize=["x_ptr"]'),
        ("BLOCK: tl.constexpr", "BLOCK"),
        ("x_ptr + at, helper", "x_ptr - at, helper"),
        ("    # a comment\n", "    n += 1\n"),
        ("    # a comment\n", "    at = at\n"),
    ],
)
def test_what_the_compiler_sees(tmp_path: Path, before: str, old: str, new: str) -> None:
    assert old in KERNEL
    assert sources.digest(load(tmp_path, KERNEL.replace(old, new)).kernel) != before


def test_a_helper_in_another_module(tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, helper, kernel = KERNEL.split("\n\n\n")
    (tmp_path / "moved_helper.py").write_text(f"{head}\n\n\n{helper}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for imported, called in (("from moved_helper import helper, LIMIT", "helper(x, LEAST=LIMIT)"),
                             ("import moved_helper as m", "m.helper(x, LEAST=m.LIMIT)")):  # fmt: skip
        text = f"{head.partition('LIMIT')[0]}{imported}\n\n\n{kernel}".replace("helper(x, LEAST=LIMIT)", called)
        assert sources.digest(load(tmp_path, text).kernel) == before
    other = helper.replace("maximum", "minimum")
    text = f"{head}\n\n\n{other}\n\n\n{kernel}"
    assert sources.digest(load(tmp_path, text).kernel) != before


def test_what_is_no_kernel() -> None:
    with pytest.raises(TypeError, match="no function for the device"):
        sources.digest(load)


def test_every_kernel_of_ours_has_a_hash() -> None:
    found = sources.kernels()
    assert len(found) > 100 and {"_row_kernel", "_flash_attention_kernel", "_rope_kernel"} <= set(found)
    assert all(len(one) == sources.DIGITS for hashes in found.values() for one in hashes)


def record(kernels: dict[str, list[str]], **hashes: list[str]) -> EmulationRecord:
    cases = [
        CaseResult(op=op, case="a", shapes=[], dtype="", outcome="ok", work=Work(kernels=names))
        for op, names in kernels.items()
    ]
    return EmulationRecord.model_construct(sources=hashes, cases=cases)


def test_a_record_is_stale_where_a_kernel_is_another() -> None:
    found = record({"a": ["one", "two"], "b": ["two"], "c": ["three"]}, one=["1"], two=["2", "22"], three=["3"])
    assert found.stale({"one": ["1"], "two": ["2", "22"], "three": ["3"], "more": ["4"]}) == {}
    # under another name
    assert found.stale({"renamed": ["1", "2", "3", "22"]}) == {}
    assert found.stale({"one": ["1"], "two": ["2"], "three": ["5"]}) == {"a": ["two"], "b": ["two"], "c": ["three"]}
    # of which nothing is known
    assert record({"a": ["one"]}).stale({"one": ["1"]}) == {"a": ["one"]}

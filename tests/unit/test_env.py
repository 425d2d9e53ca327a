"""The environment table: complete, consistent, and what it says about values."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from wavecrest import env

SRC = Path(env.__file__).parent


def test_rows_are_unique_and_filled() -> None:
    names = [row.name for row in (*env.table(), *env.settings())]
    assert len(names) == len(set(names))
    for row in (*env.table(), *env.settings()):
        assert row.verdict in env.VERDICTS, row.name
        assert row.effect and row.advice and row.source and row.default, row.name
        assert row.platforms and set(row.platforms) <= {"amd", "nvidia", "cpu"}, row.name


def test_source_is_a_page_or_a_file_of_a_named_project() -> None:
    shape = re.compile(r"https://|\bin [\w.-]+/[\w.-]+|no hit in [\w.-]+/|^wavecrest\.|[\w.-]+/[\w.-]+#\d+")
    for row in (*env.table(), *env.settings()):
        assert shape.search(row.source), f"{row.name}: {row.source}"


def test_every_variable_of_our_own_is_in_the_table() -> None:
    used = {name for path in SRC.rglob("*.py") for name in re.findall(r"\bWAVECREST_[A-Z_]+", path.read_text())}
    known = {row.name for row in env.table() if row.verdict == "ours"}
    assert used == known


@pytest.mark.parametrize(
    "name",
    [
        "TORCH_ROCM_USE_HIPBLASLT",
        "HIP_CACHE_ENABLED",
        "ENABLE_HIP_GRAPHS",
        "AITER_CACHE_SIZE",
        "AITER_ENABLE_FUSION",
        "AITER_ENABLE_TENSOR_CORES",
        "AITER_DEFAULT_PRECISION",
    ],
)
def test_folklore_is_called_folklore_and_never_tried(name: str) -> None:
    row = env.variable(name)
    assert row is not None and row.verdict == "folklore"
    assert row.effect.startswith("nothing") and not row.try_values


def test_tried_values_change_neither_numerics_nor_the_machine() -> None:
    tried = {(row.name, value) for row in env.table() for value in row.try_values}
    assert tried == {
        ("TORCH_BLAS_PREFER_HIPBLASLT", "1"),
        ("TORCH_BLAS_PREFER_CUBLASLT", "1"),
        ("TORCH_ROCM_FA_PREFER_CK", "1"),
        ("HSA_NO_SCRATCH_RECLAIM", "1"),
        ("OMP_PROC_BIND", "close"),
        ("OMP_WAIT_POLICY", "active"),
        ("THP_MEM_ALLOC_ENABLE", "1"),
    }
    for row in env.table():
        assert not any(row.warns(value) for value in row.try_values), row.name
        assert not (row.try_values and "changes numerics" in row.risk), row.name


def test_variables_of_torch_are_read_by_the_installed_torch() -> None:
    """The rows that may be tried on any machine name variables that occur in the installed libraries."""
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    wanted = {
        "TORCH_BLAS_PREFER_HIPBLASLT": "libtorch_cpu.so",
        "TORCH_BLAS_PREFER_CUBLASLT": "libtorch_cpu.so",
        "TORCH_ROCM_FA_PREFER_CK": "libtorch_cpu.so",
        "THP_MEM_ALLOC_ENABLE": "libc10.so",
        "PYTORCH_ALLOC_CONF": "libc10.so",
        "KINETO_LOG_LEVEL": "libtorch_cpu.so",
    }
    missing = [name for name in wanted.values() if not (libraries / name).is_file()]
    if missing:
        pytest.skip(f"this torch has no {missing[0]}")
    for name, library in wanted.items():
        assert name.encode() in (libraries / library).read_bytes(), name
    # the control: a name of folklore is not there
    assert b"TORCH_ROCM_USE_HIPBLASLT" not in (libraries / "libtorch_cpu.so").read_bytes()


@pytest.mark.parametrize(
    ("rules", "value", "warns"),
    [
        ((), "1", False),
        (("1",), "1", True),
        (("1",), "0", False),
        (("!0",), "0", False),
        (("!0",), "3", True),
        (("*",), "", True),
        (("0", "2"), "2", True),
    ],
    ids=["no-rule", "value", "other-value", "any-but-this", "any-but-another", "any", "second-rule"],
)
def test_warning_rules(rules: tuple[str, ...], value: str, warns: bool) -> None:
    row = env.Variable("X", "real", "0", "e", "a", "s", warn_if=rules)
    assert row.warns(value) is warns


def test_a_child_environment_changes_the_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LOG_LEVEL", "3")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    child = env.child({"AMD_LOG_LEVEL": None, "THP_MEM_ALLOC_ENABLE": "1"})
    assert "AMD_LOG_LEVEL" not in child and child["THP_MEM_ALLOC_ENABLE"] == "1"
    assert env.get("AMD_LOG_LEVEL") == "3" and env.get("THP_MEM_ALLOC_ENABLE") == ""


def test_a_clean_child_keeps_paths_and_device_visibility_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    clean = env.clean_child()
    assert clean["PATH"] == env.get("PATH") and clean["HIP_VISIBLE_DEVICES"] == "1"
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" not in clean


def test_a_snapshot_holds_known_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMD_LOG_LEVEL", "3")
    monkeypatch.setenv("MY_SECRET_TOKEN", "hush")
    assert env.snapshot()["AMD_LOG_LEVEL"] == "3"
    assert "MY_SECRET_TOKEN" not in env.snapshot()


def test_a_default_does_not_replace_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    env.set_default("KINETO_LOG_LEVEL", "99")
    assert env.get("KINETO_LOG_LEVEL") == "0"


def test_a_python_child_finds_this_package_and_none_of_its_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the package itself on the path would hide the standard library's profile and others."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    first, *rest = env.python_child({"AMD_LOG_LEVEL": "3"})["PYTHONPATH"].split(os.pathsep)
    assert Path(first) / "wavecrest" == SRC and rest == ["/elsewhere"]
    monkeypatch.delenv("PYTHONPATH")
    assert env.python_child({"AMD_LOG_LEVEL": "3"})["PYTHONPATH"] == str(SRC.parent)
    assert env.python_child({"AMD_LOG_LEVEL": "3"})["AMD_LOG_LEVEL"] == "3"

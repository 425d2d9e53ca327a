"""Each setting has its effect, by function and by variable, and is undone where that is promised."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wavecrest
from wavecrest import env, ops, settings
from wavecrest import nn as wnn
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Database, Overlay
from wavecrest.errors import InvalidArgument, OutputError, Unsupported

# of 1 + 2⁻⁹ + 2⁻²⁰ float16 keeps the first two, bfloat16 the first
FINE = torch.tensor([[1.0, 1 + 2.0**-9 + 2.0**-20]])


@pytest.fixture(autouse=True)
def _settings_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves a setting, a handler or a variable behind."""
    for name in settings.FOLDERS:
        monkeypatch.setenv(name, env.get(name, "/nowhere"))
    before = settings.current()
    kept, level, handlers = settings.STATE.handler, settings.logger.level, list(settings.logger.handlers)
    yield
    settings.update(precision=before.precision, strict=before.strict, deterministic=before.deterministic)
    settings.STATE.log_level, settings.STATE.handler = before.log_level, kept
    settings.STATE.cache_dir, settings.STATE.cache_size = before.cache_dir, before.cache_size
    settings.logger.setLevel(level)
    settings.logger.handlers[:] = handlers


def _child(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    environment.pop("TRITON_CACHE_DIR", None)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"log_level": "loud"}, "log_level takes debug, info, warning, error, not 'loud'"),
        ({"precision": "fp8"}, "precision takes ieee, tf32, tf32x3, bf16, fp16"),
        ({"strict": "on"}, "strict takes off, warn, error"),
        ({"deterministic": 1}, "True or False, not 1"),
        ({"cache_size": 0}, "at least 1, not 0"),
        ({"cache_size": 1.5}, r"not 1\.5"),
    ],
)
def test_a_value_that_is_none_is_refused_before_anything_changes(given: dict[str, Any], said: str) -> None:
    before = settings.current()
    with pytest.raises(InvalidArgument, match=said):
        settings.update(**({"precision": "tf32", "log_level": "debug"} | given))
    assert settings.current() == before


def test_decisions_are_logged_once_at_the_level_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, 7)

    def lines(level: Any) -> list[str]:
        caplog.clear()
        registry.forget()
        settings.update(log_level=level)
        for _ in range(2):
            ops.rms_norm(x)
        return [record.getMessage() for record in caplog.records]

    assert lines("warning") == []
    (said,) = lines("info")
    assert said.startswith("rms_norm(") and "default: highest priority" in said
    said, *why = lines("debug")
    assert said.startswith("rms_norm(") and any("not triton, which" in line for line in why)


def test_a_fallback_of_attention_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.nn.attention._warned", set())
    settings.update(log_level="info")
    x = torch.randn(1, 1, 2, 300)
    with pytest.warns(wnn.attention.AttentionFallback):
        wavecrest.attention(x, x, x)
    assert [one.getMessage() for one in caplog.records] == [
        "attention runs in PyTorch for a head_dim of 300, above the 256 that the op takes"
    ]


def test_without_a_word_nothing_is_logged_and_the_variable_shows_it_on_standard_error() -> None:
    code = "import torch; from wavecrest import ops; ops.rms_norm(torch.ones(2, 3))"
    silent, told = _child(code), _child(code, WAVECREST_LOG_LEVEL="INFO")
    assert silent.returncode == told.returncode == 0, told.stderr
    assert silent.stderr == "" and told.stderr.startswith("wavecrest.dispatch INFO: rms_norm(")


def _calls() -> dict[str, Any]:
    """Each function of a float32 argument [1, 2], which sees the 2⁻²⁰ of `FINE` in 32 bits alone."""
    torch.manual_seed(0)
    layer, torchs = wnn.Linear(2, 2, bias=False), nn.MultiheadAttention(2, 1, batch_first=True)
    attention, multihead = wnn.Attention.from_module(torchs), wnn.MultiheadAttention.from_module(torchs)
    convolution, weight = wnn.Conv2d(2, 3, 1), torch.randn(3, 2, 1, 1)
    return {
        "matmul": lambda x: wavecrest.matmul(x, x.mT),
        "matmul of a vector": lambda x: wavecrest.matmul(x[0], x[0]),
        "linear": lambda x: wavecrest.linear(x, x, torch.ones(1)),
        "conv2d": lambda x: wavecrest.conv2d(x.reshape(1, 2, 1, 1), weight, torch.ones(3)),
        "attention": lambda x: wavecrest.attention(*[x[None, None]] * 3, torch.zeros(1, 1)),
        "Linear": lambda x: layer(x, residual=torch.ones(1, 2)),
        "Conv2d": lambda x: convolution(x.reshape(2, 1, 1)),
        "Attention": lambda x: attention(x[None]),
        "MultiheadAttention": lambda x: multihead(x[None], x[None], x[None], need_weights=False)[0],
    }


@pytest.mark.parametrize("name", list(_calls()))
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_rounds_float32_arguments(name: str, precision: Any, dtype: torch.dtype) -> None:
    work, rounded = _calls()[name], FINE.to(dtype).float()
    assert not torch.equal(rounded, FINE)
    with torch.no_grad():
        plain = work(FINE)
        with settings.using(precision=precision) as now:
            assert now.precision == precision
            got, of_rounded = work(FINE), work(rounded)
        # what the rounding took away is not seen, and a result is float32 again, near the one without
        assert torch.equal(got, of_rounded) and got.dtype == torch.float32
        assert torch.allclose(got, plain, atol=0.03) and not torch.equal(got, plain)
        assert torch.equal(work(FINE), plain) and settings.current().precision == "ieee"


def test_sums_and_results_of_gemms_stay_in_32_bits() -> None:
    x = torch.full((1, 4096), 1.0)
    with settings.using(precision="bf16"):
        assert wavecrest.matmul(x, x.mT + 2.0**-7).item() == 4096 + 32
        assert wavecrest.linear(x, x, torch.full((1,), 2.0**-8)).item() == 4096 + 2.0**-8


def test_tf32_is_an_argument_of_the_gemm() -> None:
    layer = wnn.Linear(2, 2)
    with settings.using(precision="tf32"), wavecrest.coverage() as seen:
        wavecrest.matmul(FINE, FINE.mT)
        wavecrest.linear(FINE, FINE)
        layer(FINE)
        wavecrest.matmul(FINE.double(), FINE.double().mT)
        assert "tf32" in layer.decision(FINE).key
    calls: dict[bool, int] = {}
    for decision, count in seen:
        assert ("tf32" in decision.key) != ("float64" in decision.key)
        calls["tf32" in decision.key] = calls.get("tf32" in decision.key, 0) + count
    assert calls == {True: 3, False: 1}


def test_other_dtypes_and_the_ops_are_as_they_were() -> None:
    given = (torch.randn(3, 8), torch.randn(8, 3).double(), torch.randn(2, 8).half())
    wanted = [ops.gemm(x, x.mT) for x in given]
    with settings.using(precision="bf16"):
        assert all(torch.equal(ops.gemm(x, x.mT), y) for x, y in zip(given, wanted, strict=True))
        assert all(torch.equal(wavecrest.matmul(x, x.mT), y) for x, y in zip(given[1:], wanted[1:], strict=True))


def test_gradients_pass_the_rounding() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with settings.using(precision="bf16"):
        wavecrest.matmul(x, torch.ones(8, 2)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3, 8), 2.0))


def test_a_compiled_function_follows_the_precision() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def work(x: Tensor) -> Tensor:
        return wavecrest.matmul(x, x.mT)

    with torch.no_grad():
        plain = work(FINE)
        with settings.using(precision="bf16"):
            assert not torch.equal(work(FINE), plain)
        assert torch.equal(work(FINE), plain)


def test_strict_is_the_dispatchers() -> None:
    x = torch.randn(5, 3)
    with settings.using(strict="error"), pytest.raises(Unsupported, match="no measured row"):
        ops.softmax(x)
    ops.softmax(x)


def test_deterministic_leaves_the_users_rows_and_torchs_other_algorithms_out(tmp_path: Path) -> None:
    mine = Database(arch="gfx942", overlay=Overlay(tmp_path / "mine.sqlite"))
    with registry.measured_in(mine):
        with settings.using(deterministic=True) as now:
            assert now.deterministic and registry.database().overlay is None
            assert registry.database().arch == "gfx942"
            with pytest.raises(RuntimeError, match="deterministic"):
                torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        assert registry.database() is mine
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert not settings.current().deterministic


def test_deterministic_twice_is_once() -> None:
    settings.update(deterministic=True)
    settings.update(deterministic=True)
    settings.update(deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()


def _entry(folder: Path, name: str, size: int, age: float) -> Path:
    (folder / name).mkdir()
    file = folder / name / "kernel.bin"
    file.write_bytes(b"\0" * size)
    then = file.stat().st_mtime - age
    os.utime(file, (then, then))
    return folder / name


def test_kernels_are_kept_in_the_folder_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    settings.update(cache_dir=tmp_path / "kernels")
    folder = tmp_path / "kernels" / "triton"
    assert env.get("TRITON_CACHE_DIR") == str(folder) and folder.is_dir()
    old, older = _entry(folder, "old", 700_000, 3600), _entry(folder, "older", 700_000, 7200)
    new, oldest = _entry(folder, "new", 2_000_000, 0), _entry(folder, "oldest", 10, 9999)
    settings.update(cache_size=3)
    assert [one.exists() for one in (old, older, new, oldest)] == [True, False, True, False]
    # another process may be using it
    settings.update(cache_size=1)
    assert [one.exists() for one in (old, new)] == [False, True]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot keep kernels in .*file.*: "):
        settings.update(cache_dir=tmp_path / "file")


def test_a_size_without_a_folder_is_of_the_platforms_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings.update(cache_size=100)
    assert settings.current().cache_dir == tmp_path / "wavecrest" / "kernels"


def test_variables_are_the_settings_of_a_process_and_its_kernels_are_trimmed_at_its_end(tmp_path: Path) -> None:
    code = (
        "import sys, torch, wavecrest.ops; from wavecrest import settings; print(settings.current())\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        f"import pathlib, os; at = pathlib.Path({str(tmp_path)!r}) / 'triton' / 'x'; at.mkdir()\n"
        "(at / 'y').write_bytes(bytes(2**21)); os.utime(at / 'y', (1, 1))\n"
    )
    done = _child(
        code, WAVECREST_PRECISION="BF16", WAVECREST_DETERMINISTIC="1", WAVECREST_CACHE_DIR=str(tmp_path),
        WAVECREST_CACHE_SIZE="1", WAVECREST_STRICT="WARN", WAVECREST_LOG_LEVEL="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"Settings(log_level='warning', precision='bf16', strict='warn', deterministic=True, "
        f"cache_dir={tmp_path!r}, cache_size=1)",
        str(tmp_path / "inductor"),
    ]
    assert list((tmp_path / "triton").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("LOG_LEVEL", "loud"), ("PRECISION", "int8"), ("DETERMINISTIC", "yes"), ("CACHE_SIZE", "1 GB")],
)
def test_a_variable_that_is_wrong_is_an_error_that_names_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"WAVECREST_{name}", value)
    with pytest.raises(InvalidArgument, match=f"WAVECREST_{name} takes .*, not '{value}'"):
        settings.read_environment.__wrapped__()

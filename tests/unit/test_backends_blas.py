"""PyTorch's products by another library: what is asked for, for how long, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wavecrest.backends import blas
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall

ASKED = {"torch_blas": "cublas", "torch_blaslt": "cublaslt", "torch_ck": "ck"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that PyTorch's preference is set to, in order; a CPU build does not keep them."""
    seen: list[Any] = ["default"]

    def preferred(library: Any = None) -> Any:
        if library is not None:
            seen.append(library)
        return seen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    # once in a process
    blas._take_warning()
    seen.clear()
    seen.append("default")
    return seen


def product(dtype: torch.dtype = torch.float16, **more: Any) -> GemmCall:
    return GemmCall(torch.randn(20, 24).to(dtype), torch.randn(24, 16).to(dtype), **more)


@pytest.mark.parametrize("name", ASKED)
def test_the_preference_lasts_for_the_call(name: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = product(bias=torch.randn(16), activation="silu")
    native = gemm.backends["torch"]
    during: list[Any] = []

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        during.append(asked[-1])
        return a @ b

    monkeypatch.setattr(torch, "matmul", matmul)
    got = blas.run_library(name, call)
    assert during == [ASKED[name]] and asked == ["default", ASKED[name], "default"]
    assert torch.equal(got, native.run(call))


def test_the_preference_does_not_outlive_an_error(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def matmul(_a: Tensor, _b: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "matmul", matmul)
    with pytest.raises(torch.OutOfMemoryError):
        blas.run_library("torch_blaslt", product())
    assert asked == ["default", "cublaslt", "default"]


@pytest.mark.parametrize("rocm", [False, True])
def test_what_is_declined(rocm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, call: GemmCall) -> str | None:
        return gemm.backends[name].refuse(call)

    for name in ASKED:
        assert "on a GPU" in str(refused(name, product()))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0" if rocm else None)
    assert refused("torch_blaslt", product()) is None
    assert (refused("torch_blas", product()) is None) == rocm
    assert (refused("torch_ck", product()) is None) == rocm
    weight = torch.zeros(24, 16, dtype=torch.int8)
    assert "one library" in str(refused("torch_blaslt", GemmCall(weight.mT.contiguous(), weight)))
    assert "one library" in str(refused("torch_blaslt", product(torch.float64)))
    # and what PyTorch refuses itself
    assert "fewer bits" in str(refused("torch_blaslt", product()._replace(b=weight)))


def test_the_warning_of_an_experiment_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = ["default"]

    def preferred(library: Any = None) -> Any:
        if library is not None:
            asked.append(library)
            if len(asked) == 2:
                warnings.warn("preferred_blas_library is an experimental feature", stacklevel=1)
        return asked[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    blas._take_warning.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blas.run_library("torch_blaslt", product())
        blas.run_library("torch_blaslt", product())
    assert asked == ["default", *["cublaslt", "default"] * 3]


class _Tunable:
    """torch.cuda.tunable, which a CPU build refuses to switch."""

    def __init__(self, enabled: bool = False, tuning: bool = True) -> None:
        self.state = [enabled, tuning]
        self.file: tuple[str, bool] | None = None

    def is_enabled(self) -> bool:
        return self.state[0]

    def tuning_is_enabled(self) -> bool:
        return self.state[1]

    def enable(self, value: bool) -> None:
        self.state[0] = value

    def tuning_enable(self, value: bool) -> None:
        self.state[1] = value

    def set_filename(self, name: str, insert_device_ordinal: bool) -> None:
        self.file = name, insert_device_ordinal


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(("enabled", "tuning"), [(False, False), (False, True), (True, False), (True, True)])
def test_tunable_op_lasts_for_the_call(
    enabled: bool, tuning: bool, capturing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, during = _Tunable(enabled, tuning), []
    monkeypatch.setattr(blas, "tunable", stand_in)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.delenv("PYTORCH_TUNABLEOP_FILENAME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blas._keep_solutions.cache_clear()
    product_of_torch = torch.matmul

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        during.append(list(stand_in.state))
        if len(during) == 2:
            raise torch.OutOfMemoryError("no memory")
        return product_of_torch(a, b)

    monkeypatch.setattr(torch, "matmul", matmul)
    call = product(activation="relu")
    assert torch.equal(blas.run_tunable(call), torch.relu(product_of_torch(call.a, call.b)))
    with pytest.raises(torch.OutOfMemoryError):
        blas.run_tunable(call)
    assert during == [[True, not capturing]] * 2 and stand_in.state == [enabled, tuning]
    # not in the working directory, and one for each GPU
    assert stand_in.file == (str(tmp_path / "wavecrest" / "tunableop.csv"), True)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_FILENAME", "mine.csv")
    blas._keep_solutions.cache_clear()
    stand_in.file = None
    blas._keep_solutions()
    assert stand_in.file is None
    blas._keep_solutions.cache_clear()


@pytest.mark.parametrize("rocm", [False, True])
def test_what_tunable_op_refuses(rocm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = gemm.backends["torch_tunable"]
    monkeypatch.setattr(blas, "tunable", _Tunable())
    assert "on a GPU" in str(backend.refuse(product()))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0" if rocm else None)
    assert ("on ROCm" in str(backend.refuse(product()))) != rocm
    monkeypatch.setattr(blas, "tunable", _Tunable(enabled=True))
    assert ("enabled for all" in str(backend.refuse(product()))) == rocm
    assert "measured row" in str(backend.opt_in(product()))


def test_it_runs_only_where_a_row_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)
    assert "measured row" in str(gemm.backends["torch_blaslt"].opt_in(product()))

"""The official packages' kernel names: what each runs, what it returns, and what happens where it cannot."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.xlstm_harness import DEVICE, build, close, tokens
from wavecrest.dispatch import registry
from wavecrest.dispatch.op import Op
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import (
    KernelFallback,
    fallbacks,
    get_available_mlstm_kernels,
    get_available_mlstm_sequence_kernels,
    get_available_mlstm_step_kernels,
    get_mlstm_kernel,
    get_mlstm_sequence_kernel,
    get_mlstm_step_kernel,
    kernels,
)
from wavecrest.ops import mlstm_chunkwise, mlstm_step

CHUNKWISE = (
    "auto", "chunkwise--native_autograd", "chunkwise--native_custbw", "chunkwise--triton_limit_chunk",
    "chunkwise--triton_xl_chunk", "chunkwise--triton_xl_chunk_siging", "parallel--native_autograd",
    "parallel--native_custbw", "parallel--native_stablef_autograd", "parallel--native_stablef_custbw",
    "parallel--native_siging_autograd", "parallel--native_siging_custbw", "parallel--triton_limit_headdim",
)  # fmt: skip
SEQUENCE = ("auto", "native_sequence__native", "native_sequence__triton", "native_sequence__triton_alternate")
STEP = ("auto", "native", "triton", "triton_alternate", "triton_fused")


def _inputs(length: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, 3, length, 8), (2, 3, length, 8), (2, 3, length, 16), (2, 3, length), (2, 3, length))
    return tuple(torch.randn(size, generator=generator).to(DEVICE) for size in sizes)


def _first() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(size, generator=generator).to(DEVICE) for size in ((2, 3, 8, 16), (2, 3, 8), (2, 3, 1)))


@pytest.fixture(autouse=True)
def _fallbacks_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_fallbacks", {})
    warnings.simplefilter("ignore", KernelFallback)


def test_all_official_names_are_there() -> None:
    assert get_available_mlstm_kernels() == list(CHUNKWISE)
    assert get_available_mlstm_sequence_kernels() == list(SEQUENCE)
    assert get_available_mlstm_step_kernels() == list(STEP)


@pytest.mark.parametrize("name", CHUNKWISE)
def test_chunkwise_and_parallel_kernels(name: str) -> None:
    q, k, v, i, f = _inputs(37)
    gate = "sigmoid" if "siging" in name else "exp"
    kernel = get_mlstm_kernel(name)
    found = kernel(q=q, k=k, v=v, i=i, f=f, chunk_size=16, autocast_kernel_dtype=torch.bfloat16)
    wanted, state = mlstm_chunkwise(q, k, v, i, f, input_gate=gate, return_last_states=True)
    close(found, wanted)
    if name.startswith("parallel"):
        with pytest.raises(InvalidArgument, match="has no states"):
            kernel(q, k, v, i, f, return_last_states=True)
        return
    names = ("c_initial", "n_initial", "m_initial")
    first = dict(zip(names, _first() if gate == "exp" else _first()[:2], strict=False))
    found, after = kernel(q, k, v, i, f, **first, return_last_states=True)
    wanted, state = mlstm_chunkwise(q, k, v, i, f, **first, input_gate=gate, return_last_states=True)
    close(found, wanted)
    # nothing ran elsewhere than the name says
    assert not fallbacks()
    # with sigmoid gates two, as there
    assert len(after) == (3 if gate == "exp" else 2)
    close(after[1], state[1])


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_kernels(name: str) -> None:
    q, k, v, i, f = _inputs(6)
    c, n, m = _first()
    kernel = get_mlstm_sequence_kernel(name)
    found, after = kernel(q, k, v, i, f, c_initial=c, n_initial=n, m_initial=m, return_last_states=True)
    wanted, state = mlstm_chunkwise(q, k, v, i, f, c_initial=c, n_initial=n, m_initial=m, return_last_states=True)
    close(found, wanted)
    close(after[0], state[0])
    assert not fallbacks()
    assert isinstance(kernel(q, k, v, i, f), Tensor)


@pytest.mark.parametrize("name", STEP)
def test_step_kernels(name: str) -> None:
    q, k, v, i, f = (part[:, :, 0] for part in _inputs(1))
    state = _first()
    kept = [part.clone() for part in state]
    kernel = get_mlstm_step_kernel(name)
    found, after = kernel(q, k, v, i[..., None], f[..., None], *state, dtype_state=torch.float32)
    wanted, last = mlstm_step(q, k, v, i, f, *state)
    close(found, wanted)
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))
    for part, other in zip(after, last, strict=True):
        close(part, other)


def test_names_and_options_that_are_none() -> None:
    for get, name in itertools.product(
        (get_mlstm_kernel, get_mlstm_sequence_kernel, get_mlstm_step_kernel), ("fastest", "", None)
    ):
        with pytest.raises(ValueError, match="there are auto, "):
            get(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="takes no chunk_sise"):
        get_mlstm_kernel("auto")(*_inputs(3), chunk_sise=64)


class _Asked:
    """The backends that ops were asked to run by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, str]] = []
        run = Op.call_on

        def noted(op: Op, backend: str, *args: Any) -> Any:
            self.found.append((op.name, backend))
            return run(op, backend, *args)

        monkeypatch.setattr(Op, "call_on", noted)


def test_a_name_is_the_backend_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Asked(monkeypatch)
    model = build(
        chunkwise_kernel="chunkwise--native_autograd", sequence_kernel="native_sequence__native", step_kernel="native"
    )
    wanted = build()(tokens(1, 24))[0]
    assert not asked.found
    logits, state = model(tokens(1, 24)[:, :17])
    assert asked.found == [("mlstm_chunkwise", "torch")] * 2
    more, state = model(tokens(1, 24)[:, 17:23], state)
    assert asked.found[2:] == [("mlstm_sequence", "torch")] * 2
    last, _ = model(tokens(1, 24)[:, 23:], state)
    assert asked.found[4:] == [("mlstm_step", "torch")] * 2
    close(torch.cat([logits, more, last], 1), wanted)


def test_what_cannot_run_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.KERNELS["step"], "triton", kernels.Kernel("triton", "mlstm_step", "some_other"))
    q, k, v, i, f = (part[:, :, 0] for part in _inputs(1))
    kernel = get_mlstm_step_kernel("triton")
    with pytest.warns(KernelFallback, match="triton: mlstm_step runs on .*, as some_other refuses: .*no such") as seen:
        found, _ = kernel(q, k, v, i, f, *_first())
    assert len(seen) == 1
    close(found, mlstm_step(q, k, v, i, f, *_first())[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # said once, listed for every shape
        kernel(q, k, v, i, f, *_first())
        kernel(q.half(), k.half(), v.half(), i, f, *_first())
    assert [entry.name for entry in fallbacks()] == ["triton"] * 2
    assert "no such kernel" in fallbacks()[0].reason and fallbacks()[0].decision.op == "mlstm_step"


def test_a_backend_that_refuses_is_not_forced() -> None:
    # no kernel computes in float64
    q, k, v, i, f = (part.double() for part in _inputs(20))
    with pytest.warns(KernelFallback, match="chunkwise--triton_xl_chunk: mlstm_chunkwise runs on torch"):
        warnings.simplefilter("always", KernelFallback)
        found = get_mlstm_kernel("chunkwise--triton_xl_chunk")(q, k, v, i, f)
    close(found, mlstm_chunkwise(q, k, v, i, f), "float64")
    assert fallbacks()[0].decision.backend == "torch"


def test_a_model_with_sigmoid_gates() -> None:
    """The official package cannot generate with them."""
    model = build(chunkwise_kernel="chunkwise--triton_xl_chunk_siging")
    prompt = tokens(2, 21)
    wanted, last = model(prompt)
    assert last[0][2] is None
    logits, state = model(prompt[:, :20])
    more, after = model(prompt[:, 20:], state)
    close(torch.cat([logits, more], 1), wanted)
    close(after[1][0], last[1][0])
    whole = prompt
    for _ in range(4):
        whole = torch.cat([whole, model(whole)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, 4).tokens, whole[:, 21:].cpu())
    assert not torch.allclose(wanted, build()(prompt)[0], atol=0.1)


@pytest.mark.parametrize("name", ["parallel--native_autograd", "parallel--triton_limit_headdim"])
def test_a_model_with_a_parallel_kernel(name: str) -> None:
    model = build(chunkwise_kernel=name, return_last_states=False, use_bias=True)
    close(model(tokens(2, 20)), build(use_bias=True)(tokens(2, 20))[0])
    with pytest.raises(InvalidArgument, match="has no states"):
        model(tokens(2, 20), model.empty_state(2))
    with pytest.raises(InvalidArgument, match="has no states"):
        model(tokens(2, 1), model.empty_state(2))
    with pytest.raises(InvalidArgument, match="has no states"):
        model(tokens(2, 20), return_last_states=True)


def test_the_chunk_size_of_a_file_is_of_other_kernels() -> None:
    """Released checkpoints name kernels and 64: ours run with what was measured for "auto" all the same."""
    registry.forget()
    model = build(chunkwise_kernel="chunkwise--native_autograd", chunk_size=64)
    model(tokens(1, 40))
    build()(tokens(1, 40))
    made = [decision for decision, _ in registry.get("mlstm_chunkwise").decisions()]
    assert [decision.source for decision in made] == ["forced", "default"]
    assert made[0].key == made[1].key


def test_chunk_sizes_that_the_ops_do_not_have() -> None:
    q, k, v, i, f = _inputs(20)
    close(get_mlstm_kernel("chunkwise--native_autograd")(q, k, v, i, f, chunk_size=10), mlstm_chunkwise(q, k, v, i, f))

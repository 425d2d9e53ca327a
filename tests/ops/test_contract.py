"""What holds for every op and each of its backends, on example calls of its study.

An op's own file has only what is particular to it. A backend may refuse a call, with a reason; then there is nothing to
hold it to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wavecrest.dispatch import registry
from wavecrest.dispatch.call import mapped, tensors_of
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.records import TuneCandidate
from wavecrest.tune import admission
from wavecrest.tune.candidates import Candidate

# sizes of example calls by their names: odd ones, and no power of two where that is allowed
SIZES = {"M": 5, "N": 72, "K": 48, "B": 2, "C": 3, "H": 6, "O": 4, "S": 9, "D": 16, "T": 3, "NH": 2}
DTYPES = (torch.float32, torch.bfloat16)
PAIRS = [
    (name, backend)
    for name in registry.names()
    for backend in registry.get(name).backends
    if backend == "torch" or backend.startswith("triton")
]
both = pytest.mark.parametrize(("name", "backend"), PAIRS, ids=[f"{name}-{backend}" for name, backend in PAIRS])


def example(name: str, dtype: torch.dtype, device: str, **sizes: int) -> Any:
    study = registry.get(name).study
    wanted = SIZES | sizes
    torch.manual_seed(0)
    return study.inputs(*(wanted[size] for size in study.sizes), dtype, device)


def results_of(made: Any) -> tuple[Tensor, ...]:
    if isinstance(made, Tensor):
        return (made,)
    return tuple(tensor for one in made for tensor in results_of(one)) if isinstance(made, tuple) else ()


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes: NaN is not equal to itself, and 8-bit floats compare nothing."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def copied(call: Any) -> Any:
    return mapped(call, lambda tensor: tensor.detach().clone(memory_format=torch.preserve_format))


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values among other memory, which is NaN or the largest number."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        return tensor
    fill = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    room = torch.full((*tensor.shape[:-2], tensor.shape[-2] * 2, tensor.shape[-1] + 3), fill, device=tensor.device)
    view = room.to(tensor.dtype)[..., ::2, 3:]
    return view.copy_(tensor)


def refusal(name: str, backend: str, call: Any) -> str | None:
    """Why a call is not for a backend, or None if it takes it; a refusal must have a reason."""
    op = registry.get(name)
    try:
        op.check(call)
    except InvalidArgument as error:
        assert str(error).startswith(f"{name}:"), error
        return str(error)
    reason = op.backends[backend].refuse(call)
    assert reason is None or len(reason) > 10
    return reason


def skip_refused(name: str, backend: str, call: Any) -> None:
    reason = refusal(name, backend, call)
    if reason is not None:
        pytest.skip(f"{backend} refuses it: {reason}")


def assert_right(name: str, backend: str, call: Any) -> None:
    """The gate that a tuned candidate passes: poisoned memory, the oracle's values, the op's own bounds."""
    op = registry.get(name)
    config = op.config_of(backend, op.key(call)) if op.backends[backend].takes_config else None
    candidate = Candidate(backend, config, "native" if backend == "torch" else "default")
    row = TuneCandidate(backend=backend, config={})
    assert admission.admit(op, candidate, call, admission.oracle(op, copied(call)), row) is not None, row.reason


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_right_and_repeatable(name: str, backend: str, dtype: torch.dtype, device: str) -> None:
    call = example(name, dtype, device)
    skip_refused(name, backend, call)
    op, kept = registry.get(name), copied(call)
    with torch.no_grad():
        assert_right(name, backend, copied(call))
        first = results_of(op.run(backend, call))
        again = results_of(op.run(backend, copied(kept)))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(bits(one), bits(two)), "two runs give other bits"
    for field, before in zip(call._fields, kept, strict=True):
        if isinstance(before, Tensor) and field not in op.study.stores:
            now = getattr(call, field)
            assert torch.equal(bits(now), bits(before)), f"{field} was written to"


@both
def test_strides(name: str, backend: str, device: str) -> None:
    plain = example(name, torch.float32, device)
    call = mapped(plain, with_gaps)
    skip_refused(name, backend, call)
    with torch.no_grad():
        assert_right(name, backend, call)


# a backend of an op on a device that gives numbers for NaN, and why
LOSES_NAN = {
    ("flash_attention", "torch", "cpu"): "PyTorch's flash attention on a CPU (2.13) gives a query that is NaN 0",
}


@both
def test_a_nan_is_not_lost_and_stays_in_its_row_or_sequence(name: str, backend: str, device: str) -> None:
    call = example(name, torch.float32, device)
    first = tensors_of(call)[0]
    if not first.is_floating_point():
        pytest.skip(f"its first tensor is {first.dtype}")
    first[(0,) * first.ndim] = float("nan")
    skip_refused(name, backend, call)
    if (name, backend, device) in LOSES_NAN:
        pytest.skip(LOSES_NAN[name, backend, device])
    op = registry.get(name)
    with torch.no_grad():
        want, got = results_of(op.reference(copied(call))), results_of(op.run(backend, call))
    for one, two in zip(got, want, strict=True):
        found, due = one.float().isnan(), two.float().isnan()
        assert bool((found | ~due).all()), "a NaN is lost"
        if one.ndim > 1 and one.shape[0] == first.shape[0] > 1:
            assert torch.equal(found[1:], due[1:]), "a NaN of one row or sequence is in another"


@both
def test_empty(name: str, backend: str, device: str) -> None:
    size = registry.get(name).study.sizes[0]
    call = example(name, torch.float32, device, **{size: 0})
    skip_refused(name, backend, call)
    op = registry.get(name)
    with torch.no_grad():
        want, got = results_of(op.reference(copied(call))), results_of(op.run(backend, call))
    assert [one.shape for one in got] == [one.shape for one in want]


@pytest.mark.parametrize("name", registry.names())
def test_gradients_are_pytorchs(name: str, device: str) -> None:
    op = registry.get(name)
    call = example(name, torch.float32, device)
    leaves = mapped(call, lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    decision = op.decide(leaves)
    assert decision.backend in ("torch", "reference"), decision
    for refusal in decision.refused:
        if refusal.backend.startswith("triton"):
            assert "gradients" in refusal.reason or "triton" in refusal.reason, refusal


@pytest.mark.parametrize("name", registry.names())
def test_compiles_in_one_graph(name: str, device: str) -> None:
    op = registry.get(name)
    calls = [example(name, torch.float32, device)]
    # a size that changes is a symbol from the second on
    calls += [example(name, torch.float32, device, **{op.study.sizes[0]: size}) for size in (6, 7)]
    places = [index for index, value in enumerate(calls[0]) if isinstance(value, Tensor)]

    def again(*tensors: Tensor) -> Any:
        values = list(calls[0])
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return op(type(calls[0])(*values))

    torch._dynamo.reset()
    compiled = torch.compile(again, fullgraph=True, backend="eager")
    for call in calls:
        with torch.no_grad():
            want, got = results_of(op(copied(call))), results_of(compiled(*tensors_of(copied(call))))
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one.float(), two.float(), rtol=1e-4, atol=1e-4, equal_nan=True)


@both
def test_tensors_of_the_first_call_are_let_go(name: str, backend: str, device: str) -> None:
    op = registry.get(name)
    call = example(name, torch.bfloat16 if backend == "triton_hopper" else torch.float32, device)
    skip_refused(name, backend, call)
    op.force(backend)
    kept = [weakref.ref(tensor) for tensor in tensors_of(call)]
    # what there is already takes the collector a second to look at
    gc.freeze()
    with torch.no_grad():
        result = op(call)
    assert kept and op._bound
    del call, result
    gc.collect()
    gc.unfreeze()
    assert not [reference() for reference in kept if reference() is not None]


def _misfits() -> dict[str, Callable[[Any], Any]]:
    return {
        "a number": lambda call: call._replace(**{_first(call): 3.0}),
        "another device": lambda call: call._replace(**{_second(call): getattr(call, _second(call)).to("meta")}),
        "integers": lambda call: call._replace(**{_first(call): getattr(call, _first(call)).to(torch.int64)}),
    }


def _tensor_fields(call: Any) -> list[str]:
    return [field for field in call._fields if isinstance(getattr(call, field), Tensor)]


def _first(call: Any) -> str:
    return _tensor_fields(call)[0]


def _second(call: Any) -> str:
    return _tensor_fields(call)[-1]


@pytest.mark.parametrize("what", _misfits())
@pytest.mark.parametrize("name", registry.names())
def test_a_misfit_is_one_clear_error_on_every_path(name: str, what: str, device: str) -> None:
    op = registry.get(name)
    call = example(name, torch.float32, device)
    if what == "another device" and len(_tensor_fields(call)) == 1:
        pytest.skip("has one tensor")
    wrong = _misfits()[what](call)
    try:
        op.check(wrong)
    except InvalidArgument as error:
        message = str(error)
    else:
        pytest.skip(f"the op takes {what}")
    assert message.startswith(f"{name}:")
    for path in (op, op.decide, lambda one: op.run("reference", one), lambda one: op.run("torch", one)):
        with pytest.raises((InvalidArgument, Unsupported)):
            path(wrong)

"""The contract of every op and each of its backends, on example calls of its study.

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
from wavecrest.tune import contract

# every op is held to it in every run
pytestmark = pytest.mark.whole

DTYPES = (torch.float32, torch.bfloat16)
PAIRS = [
    (name, backend)
    for name in registry.names()
    for backend in registry.get(name).backends
    if backend in ("torch", "c") or backend.startswith("triton")
]
both = pytest.mark.parametrize(("name", "backend"), PAIRS, ids=[f"{name}-{backend}" for name, backend in PAIRS])


def example(name: str, dtype: torch.dtype, device: str, **sizes: int) -> Any:
    return contract.example(registry.get(name), dtype, device, **sizes)


def results_of(made: Any) -> tuple[Tensor, ...]:
    return contract.results_of(made)


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


def assert_kept(rule: Callable[..., contract.Problem | None], name: str, backend: str, *given: Any) -> None:
    with torch.no_grad():
        problem = rule(contract.Subject(registry.get(name), backend), *given)
    assert problem is None, f"{problem.rule}: {problem.text}"


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_right_and_repeatable(name: str, backend: str, dtype: torch.dtype, device: str) -> None:
    call = example(name, dtype, device)
    skip_refused(name, backend, call)
    assert_kept(contract.broken_values, name, backend, contract.copied(call))
    assert_kept(contract.broken_memory, name, backend, call)


@both
def test_strides(name: str, backend: str, device: str) -> None:
    call = mapped(example(name, torch.float32, device), contract.with_gaps)
    skip_refused(name, backend, call)
    assert_kept(contract.broken_values, name, backend, call)


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
    assert_kept(contract.broken_nan, name, backend, call)


@both
def test_empty(name: str, backend: str, device: str) -> None:
    size = registry.get(name).study.sizes[0]
    call = example(name, torch.float32, device, **{size: 0})
    skip_refused(name, backend, call)
    assert_kept(contract.broken_empty, name, backend, call)


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
    # as the op's public function runs it
    public = op.of_fields(op.call_type)

    def again(*tensors: Tensor) -> Any:
        values = list(calls[0])
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return public(*values)

    torch._dynamo.reset()
    compiled = torch.compile(again, fullgraph=True, backend="eager")
    for call in calls:
        with torch.no_grad():
            want, got = results_of(op(contract.copied(call))), results_of(compiled(*tensors_of(contract.copied(call))))
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one.float(), two.float(), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", registry.names())
def test_arguments_are_looked_up_as_a_call_is(name: str, device: str) -> None:
    op = registry.get(name)
    call = example(name, torch.float32, device)
    op.forget()
    with torch.no_grad():
        want = results_of(op(contract.copied(call)))
        got = results_of(op.of_fields(op.call_type)(*contract.copied(call)))
    assert len(op._bound) == 1 and [calls for _, calls in op.decisions()] == [2]
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def _others(value: Any) -> list[Any]:
    """Values that a call may not take for this one; of a tensor one a fact that a signature has."""
    if not isinstance(value, Tensor):
        return [None, torch.ones(3), torch.ones(3, 3), "another", 12345.5] if value is None else [None, "another"]
    wider = value.new_zeros((*value.shape, 2))
    facts = [wider, value.to(torch.float64), value.to("meta"), None]
    # the same shape with other strides
    facts += [wider[..., 0]] if value.ndim else []
    return [*facts, value.detach().requires_grad_()] if value.is_floating_point() else facts


@pytest.mark.parametrize("name", registry.names())
def test_each_argument_is_part_of_the_signature(name: str, device: str) -> None:
    op = registry.get(name)
    call = example(name, torch.float32, device)
    known = op._signature(call)
    assert op._signature(contract.copied(call)) == known
    for field, value in zip(call._fields, call, strict=True):
        for other in _others(value):
            if other is value:
                continue
            try:
                changed = op._signature(call._replace(**{field: other}))
            except AttributeError:
                # no tensor where one must be
                continue
            assert changed != known, (field, other)


@both
def test_tensors_of_the_first_call_are_let_go(name: str, backend: str, device: str) -> None:
    op = registry.get(name)
    call = example(name, torch.bfloat16 if backend == "triton_hopper" else torch.float32, device)
    skip_refused(name, backend, call)
    op.force(backend)
    kept = [weakref.ref(tensor) for tensor in tensors_of(call)]
    # a collection over all objects made so far takes a second
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
        "a sparse tensor": lambda call: call._replace(**{_first(call): getattr(call, _first(call)).to_sparse()}),
        "sparse rows": lambda call: call._replace(**{_first(call): torch.eye(4).to_sparse_csr()}),
        "a nested tensor": lambda call: call._replace(**{_first(call): torch.nested.nested_tensor([torch.ones(2, 3)])}),
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
    public = op.of_fields(op.call_type)
    # what is kept of a right call takes no wrong one
    public(*contract.copied(call))
    paths = (op, lambda one: public(*one), op.decide)
    for path in (*paths, lambda one: op.run("reference", one), lambda one: op.run("torch", one)):
        with pytest.raises((InvalidArgument, Unsupported)):
            path(wrong)

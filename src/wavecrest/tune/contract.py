"""The contract of every op as rules that a backend keeps or breaks, on example calls of the op's study.

`tests/ops/test_contract.py` holds wavecrest's own backends to these rules; `wavecrest.backends.user` holds a user's
kernel to them before it may run a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavecrest.bench import ops as bench
from wavecrest.dispatch.call import AnyCall, mapped, tensors_of
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.records import TuneCandidate
from wavecrest.records.files import Model
from wavecrest.tune import admission
from wavecrest.tune.candidates import Candidate, Role

# sizes of example calls by their names: odd ones, and no power of two where that is allowed
SIZES = {"M": 5, "N": 72, "K": 48, "B": 2, "C": 3, "H": 6, "O": 4, "S": 9, "D": 16, "T": 3, "NH": 2}
# changes of these: one element of each, and several blocks with a ragged end
SHAPES: dict[str, dict[str, int]] = {
    "odd": {},
    "one": {"M": 1, "N": 1, "S": 1, "T": 1},
    "ragged": {"M": 33, "N": 1027, "K": 257, "S": 131},
}

# one part of a form: ("tensor", dtype, dimensions), ("value", a bool, number of steps, name or None), ("dtype", its
# name), or ("float",)
Part = tuple[Any, ...]
Form = tuple[Part, ...]


class Finding(Model):
    """The first case that breaks a rule.

    Attributes:
        rule: form, values, alias, inputs, kept, repeatable, strides, nan, infinite, empty or raises.
        case: the case in words: its shape's name and, where it matters, the layout and the configuration.
        shapes: of the call's tensors, such as "33x1027".
        dtype: of its first tensor.
        problem: what is wrong.
        error, limit: ‖out − oracle‖ / ‖oracle‖ and its limit, where values were compared.
    """

    rule: str
    case: str
    shapes: tuple[str, ...]
    dtype: str
    problem: str
    error: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        """One line for people."""
        numbers = "" if self.error is None else f" (error {self.error:.2g}, limit {self.limit:.2g})"
        return f"{self.rule}, case {self.case}, {' '.join(self.shapes)} {self.dtype}: {self.problem}{numbers}"


class Verdict(Model):
    """The outcome of a check: the number of cases that ran, and what was found wrong."""

    cases: int
    finding: Finding | None = None
    # why no case could be run
    reason: str = ""

    @property
    def passed(self) -> bool:
        """True if cases ran and all of them kept the contract."""
        return self.cases > 0 and self.finding is None


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule of one call."""

    rule: str
    text: str
    error: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend of an op, with the configuration that it runs with; None for its default, or for none."""

    op: AnyOp
    backend: str
    config: Config | None = None

    def run(self, call: AnyCall) -> tuple[Tensor, ...]:
        """The results of a call that the backend takes."""
        backend = self.op.backends[self.backend]
        if not backend.takes_config:
            return results_of(backend.run(call))
        return results_of(backend.run(call, self.config or self.op.config_of(self.backend, self.op.key(call))))


def example(op: AnyOp, dtype: torch.dtype, device: str, **sizes: int) -> AnyCall:
    """An example call of the sizes in `SIZES`, except those given; the same numbers each time."""
    wanted = SIZES | sizes
    with torch.random.fork_rng(devices=[] if device == "cpu" else None):
        torch.manual_seed(0)
        return op.study.inputs(*(wanted.get(size, 16) for size in op.study.sizes), dtype, device)


def results_of(made: Any) -> tuple[Tensor, ...]:
    """The tensors of a result, those of nested tuples included."""
    if isinstance(made, Tensor):
        return (made,)
    return tuple(tensor for one in made for tensor in results_of(one)) if isinstance(made, (tuple, list)) else ()


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes: NaN is not equal to itself, and 8-bit floats compare nothing."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def copied(call: AnyCall) -> AnyCall:
    """The same call with tensors of its own."""
    return mapped(call, lambda tensor: tensor.detach().clone(memory_format=torch.preserve_format))


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values among other memory, which is NaN or the largest number."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        return tensor
    room = _filled((*tensor.shape[:-2], tensor.shape[-2] * 2, tensor.shape[-1] + 3), tensor)
    return room[..., ::2, 3:].copy_(tensor)


def with_steps(tensor: Tensor) -> Tensor:
    """The same values with other memory between the elements of the last dimension."""
    if tensor.ndim < 2 or tensor.numel() == 0:
        return tensor
    return _filled((*tensor.shape[:-1], tensor.shape[-1] * 2), tensor)[..., ::2].copy_(tensor)


def _filled(shape: tuple[int, ...], like: Tensor) -> Tensor:
    fill = float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max
    return torch.full(shape, fill, device=like.device).to(like.dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"rows with gaps": with_gaps, "columns with gaps": with_steps}


def oracle(op: AnyOp, call: AnyCall) -> admission.Oracle:
    """The reference's results of a call in float64, rounded once to the dtypes that they have; and the op's bounds.

    Ops that quantize define their own rounding: for them it is the reference's results as they are.
    """
    plain = admission.oracle(op, copied(call))
    if op.op_class == "quantized":
        return plain
    stored = {name: getattr(copied(call), name) for name in op.study.stores}
    wide = mapped(copied(call), lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    results = results_of(op.reference(wide._replace(**stored)))
    exact = tuple(one.to(want.dtype) for one, want in zip(results, plain.results, strict=True))
    return admission.Oracle(exact, plain.bounds)


def broken_values(subject: Subject, call: AnyCall) -> Problem | None:
    """The results' number, shapes and dtypes, and their values beside the oracle's, over poisoned memory.

    The call is run as it is, with its strides; what its fields that are stored to hold afterwards is the backend's.
    """
    op, backend = subject.op, subject.backend
    takes = op.backends[backend].takes_config
    config = (subject.config or op.config_of(backend, op.key(call))) if takes else None
    role: Role = "native" if backend == "torch" else "default"
    row = TuneCandidate(backend=backend, config={})
    right = oracle(op, call)
    if admission.admit(op, Candidate(backend, config, role), call, right, row) is not None:
        return None
    if row.status == "failed":
        return Problem("raises", row.reason)
    if row.relative is None or " is torch." in row.reason or " results instead of " in row.reason:
        return Problem("form", row.reason)
    first = next(value for value in call if isinstance(value, Tensor))
    return Problem("values", row.reason, row.relative, bench.limits_of(op, dtype_name(first)).values.relative)


def broken_memory(subject: Subject, call: AnyCall) -> Problem | None:
    """Arguments stay as they are, results are memory of their own, and a second call gives the same bits."""
    kept = copied(call)
    first = subject.run(call)
    stores = subject.op.study.stores
    own = [getattr(call, name) for name in call._fields if name not in stores]
    places = {one.untyped_storage().data_ptr() for one in own if isinstance(one, Tensor) and one.numel() > 0}
    if any(one.numel() > 0 and one.untyped_storage().data_ptr() in places for one in first):
        return Problem("alias", "a result shares its memory with an argument")
    for field, before in zip(call._fields, kept, strict=True):
        if not isinstance(before, Tensor) or field in stores:
            continue
        if not torch.equal(bits(getattr(call, field)), bits(before)):
            return Problem("inputs", f"the argument {field} was written to")
    held = [bits(one).clone() for one in first]
    # other values, so that memory which holds the last result shows
    subject.run(mapped(copied(kept), _halved))
    if any(not torch.equal(bits(one), before) for one, before in zip(first, held, strict=True)):
        return Problem("kept", "a second call changed the result of the first")
    again = subject.run(copied(kept))
    if any(not torch.equal(bits(one), bits(two)) for one, two in zip(first, again, strict=True)):
        return Problem("repeatable", "two calls with the same arguments give other bits")
    return None


def _halved(tensor: Tensor) -> Tensor:
    # integers may be lengths or places, and PyTorch does not scale 8-bit floats
    return tensor * 0.5 if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


def broken_nan(subject: Subject, call: AnyCall, value: float = float("nan")) -> Problem | None:
    """A NaN or infinity in the first element is not lost, and stays in its row or sequence.

    For calls whose first tensor has floating-point elements; others keep this rule.
    """
    first = tensors_of(call)[0]
    if not first.is_floating_point() or first.numel() == 0:
        return None
    call = copied(call)
    first = tensors_of(call)[0]
    first[(0,) * first.ndim] = value
    want, got = results_of(subject.op.reference(copied(call))), subject.run(call)
    rule, word = ("nan", "NaN") if value != value else ("infinite", "infinity")
    for one, two in zip(got, want, strict=True):
        if value != value:
            found, due = one.float().isnan(), two.float().isnan()
        else:
            found, due = ~one.float().isfinite(), ~two.float().isfinite()
        if not bool((found | ~due).all()):
            return Problem(rule, f"a result that is {word} in the reference is a number")
        if one.ndim > 1 and one.shape[0] == first.shape[0] > 1 and not torch.equal(found[1:], due[1:]):
            return Problem(rule, f"a {word} of one row or sequence is in another")
    return None


def broken_empty(subject: Subject, call: AnyCall) -> Problem | None:
    """A call without elements gives results of the reference's shapes."""
    want, got = results_of(subject.op.reference(copied(call))), subject.run(call)
    if [one.shape for one in got] != [one.shape for one in want]:
        shapes = [tuple(one.shape) for one in got]
        return Problem("empty", f"the results have the shapes {shapes}, not {[tuple(one.shape) for one in want]}")
    return None


def form_of(call: AnyCall, fields: tuple[str, ...]) -> Form:
    """The parts of a call that decide which code of a kernel runs, beside sizes and strides, for some of its fields."""
    return tuple([_part(getattr(call, name)) for name in fields])


def _part(value: Any) -> Part:
    if isinstance(value, Tensor):
        return ("tensor", dtype_name(value), value.ndim)
    if isinstance(value, torch.dtype):
        return ("dtype", str(value).removeprefix("torch."))
    return ("float",) if isinstance(value, float) else ("value", value)


def adapted(op: AnyOp, call: AnyCall, form: Form, fields: tuple[str, ...]) -> AnyCall | None:
    """A call of the given form with the values of another one; None where the op has no such call."""
    # a tensor that the kernel is not handed is left out of its calls
    changes: dict[str, Any] = {
        name: None for name in call._fields if name not in fields and isinstance(getattr(call, name), Tensor)
    }
    for name, part in zip(fields, form, strict=True):
        value = getattr(call, name)
        if part[0] == "tensor":
            if not isinstance(value, Tensor):
                return None
            changes[name] = _of_dims(value, part[2]).to(getattr(torch, part[1]))
        elif part[0] == "dtype":
            changes[name] = getattr(torch, part[1])
        elif part[0] == "value":
            changes[name] = part[1]
    made = call._replace(**changes)
    try:
        op.check(made)
    except InvalidArgument:
        return None
    return made if form_of(made, fields) == form else None


def _of_dims(tensor: Tensor, dims: int) -> Tensor:
    """A tensor with a number of dimensions: of more, two of each at most; of fewer, the first."""
    while tensor.ndim > dims and tensor.ndim > 1 and tensor.shape[0] > 0:
        tensor = tensor[0]
    while 1 < tensor.ndim < dims:
        tensor = torch.stack([tensor, tensor.flip(0)])
    return tensor.contiguous()


def examples(op: AnyOp, form: Form, fields: tuple[str, ...], device: str) -> Iterator[tuple[str, AnyCall]]:
    """Example calls of a form, by name: of each shape."""
    first = next((part[1] for part in form if part[0] == "tensor"), "float32")
    dtypes = [getattr(torch, name) for name in dict.fromkeys((first, *op.study.example_dtypes)) if _makes(op, name)]
    for name, sizes in SHAPES.items():
        for dtype in dtypes:
            call = adapted(op, example(op, dtype, device, **sizes), form, fields)
            if call is not None:
                yield name, call
                break


def _makes(op: AnyOp, dtype: str) -> bool:
    return dtype in op.study.example_dtypes


def empty_example(op: AnyOp, form: Form, fields: tuple[str, ...], device: str) -> AnyCall | None:
    """A call of a form without elements, or None where the op has no such call."""
    size = op.study.sizes[0]
    first = next((part[1] for part in form if part[0] == "tensor"), "float32")
    dtype = getattr(torch, first if _makes(op, first) else op.study.example_dtypes[0])
    return adapted(op, example(op, dtype, device, **{size: 0}), form, fields)


def _other_numbers(op: AnyOp, call: AnyCall, fields: tuple[str, ...]) -> AnyCall | None:
    """The call with other floats among its fields (a larger eps), so that a constant in their place shows."""
    numbers = {name: getattr(call, name) for name in fields if isinstance(getattr(call, name), float)}
    if not numbers:
        return None
    made = call._replace(**{name: value * 0.5 + 0.125 for name, value in numbers.items()})
    try:
        op.check(made)
    except InvalidArgument:
        return None
    return made


def verify(
    op: AnyOp,
    backend: str,
    form: Form,
    fields: tuple[str, ...],
    device: str,
    refuse: Callable[[AnyCall], str | None],
    configs: tuple[Config, ...] = (),
) -> Verdict:
    """Hold a backend to the contract for calls of one form; ends at the first case that breaks a rule.

    Args:
        op, backend: the op, and the name of its backend.
        form, fields: of `form_of`.
        device: where the cases run.
        refuse: why the backend does not take a case, or None; refused cases are left out.
        configs: its configurations; the first gets all rules, the others the values of each case.
    """
    subject = Subject(op, backend, configs[0] if configs else None)
    done, refusals = 0, list[str]()

    def judged(case: str, call: AnyCall, rule: Callable[[], Problem | None]) -> Finding | None:
        nonlocal done
        done += 1
        try:
            problem = rule()
        # whatever a kernel or its compiler raises is its verdict
        except Exception as error:
            problem = Problem("raises", f"raised {type(error).__name__}: {admission.first_line(error)}")
        if problem is None:
            return None
        tensors = tensors_of(call)
        shapes = tuple("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
        return Finding(
            rule=problem.rule, case=case, shapes=shapes, dtype=dtype_name(tensors[0]), problem=problem.text,
            error=problem.error, limit=problem.limit,
        )  # fmt: skip

    with torch.no_grad():
        for case, call, rule in _cases(subject, form, fields, device, configs):
            reason = refuse(call)
            if reason is not None:
                refusals.append(reason)
                continue
            finding = judged(case, call, rule)
            if finding is not None:
                return Verdict(cases=done, finding=finding)
    if done == 0:
        why = f"it refuses the op's cases: {refusals[0]}" if refusals else "the op has no case of this form"
        return Verdict(cases=0, reason=why)
    return Verdict(cases=done)


def _cases(
    subject: Subject, form: Form, fields: tuple[str, ...], device: str, configs: tuple[Config, ...]
) -> Iterator[tuple[str, AnyCall, Callable[[], Problem | None]]]:
    """Each case with its rule: name, call, and the function that says what is wrong."""
    op = subject.op
    plain = dict(examples(op, form, fields, device))
    for name, call in plain.items():
        yield name, call, lambda call=call: broken_values(subject, copied(call))  # type: ignore[misc]
    for name, call in plain.items():
        yield name, call, lambda call=call: broken_memory(subject, copied(call))  # type: ignore[misc]
    odd = plain.get("odd")
    if odd is None:
        return
    for layout, change in LAYOUTS.items():
        laid = mapped(odd, change)
        yield f"odd, {layout}", laid, lambda laid=laid: _strides(subject, laid)  # type: ignore[misc]
    other = _other_numbers(op, odd, fields)
    if other is not None:
        yield "odd, other numbers", other, lambda: broken_values(subject, copied(other))
    yield "odd, a NaN", odd, lambda: broken_nan(subject, odd)
    yield "odd, an infinity", odd, lambda: broken_nan(subject, odd, float("inf"))
    empty = empty_example(op, form, fields, device)
    if empty is not None:
        yield "empty", empty, lambda: broken_empty(subject, empty)
    for config in configs[1:]:
        own = Subject(op, subject.backend, config)
        words = " ".join(f"{name}={value}" for name, value in config.kwargs.items())
        for name, call in plain.items():
            yield (
                f"{name}, {words}",
                call,
                lambda own=own, call=call: broken_values(own, copied(call)),  # type: ignore[misc]
            )


def _strides(subject: Subject, call: AnyCall) -> Problem | None:
    problem = broken_values(subject, call)
    if problem is None or problem.rule != "values":
        return problem
    return Problem("strides", problem.text, problem.error, problem.limit)

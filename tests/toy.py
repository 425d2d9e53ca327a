"""Ops made up for tests: functions of plain arguments, registered as an op is, with a call of one or two fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Backend, Cost
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config


class ToyCall(NamedTuple):
    x: Tensor
    scale: float = 1.0


class OneCall(NamedTuple):
    x: Tensor


class TwoCall(NamedTuple):
    a: Tensor
    b: Tensor


def takes(*_args: Any) -> None:
    """Neither a check nor a backend refuses anything."""


class ToyOp(Op[Any, Any]):
    """An op whose parts are functions of its call's fields (as many as they take), called with these fields.

    `study`: the fields of a `Study`; `inputs`, `bench_cases` and `call_of_key` may give the fields of a call.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[..., Any],
        key: Callable[..., Any],
        check: Callable[..., None] = takes,
        key_fields: tuple[str, ...] = (),
        key_sizes: tuple[str, ...] = (),
        default_config: Callable[[Any], Config] | None = None,
        call_type: type[Any] = ToyCall,
        op_class: str = "row",
        **study: Any,
    ) -> None:
        self._default = default_config
        self.call_type = call_type
        self._kernels: dict[str, KernelStudy[Any]] = {}
        self._study: Study[Any] = Study(kernels=self._kernels, **self._of_calls(study))
        super().__init__(
            name, call_type, self._spread(reference), self._spread(check), self._spread(key), "", key_fields,
            key_sizes, op_class,
        )  # fmt: skip

    @property
    def study(self) -> Study[Any]:
        return self._study

    def __call__(self, *fields: Any, **named: Any) -> Any:
        """Run a call, or the call with these fields."""
        given = len(fields) == 1 and isinstance(fields[0], self.call_type)
        return super().__call__(fields[0] if given else self.call_type(*fields, **named))

    def of(self, *fields: Any, **named: Any) -> Any:
        """A call."""
        return self.call_type(*fields, **named)

    def restudy(self, **study: Any) -> None:
        """Replace fields of the study, and forget the decisions that may rest on them."""
        self._study = replace(self._study, **self._of_calls(study))
        self.forget()

    def redefine(self, **parts: Callable[..., Any]) -> None:
        """Replace `check`, `key` or `reference`, and forget the decisions that may rest on them."""
        for name, function in parts.items():
            setattr(self, name, self._spread(function))
        self.forget()

    def native(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        refuse: Callable[..., Any] = takes,
        opt_in: Callable[..., Any] = takes,
        priority: int = 10,
        bind: Callable[..., Any] | None = None,
        as_native: bool = False,
    ) -> None:
        """Attach a backend without configurations."""
        bound = None if bind is None else lambda call: self._spread(bind(*call))
        self.attach(
            name,
            self._spread(run),
            refuse=self._spread(refuse),
            opt_in=self._spread(opt_in),
            priority=priority,
            bind=bound,
            as_native=as_native,
        )

    def kernel(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        default_config: Callable[[Any], Config] | None = None,
        refuse: Callable[..., Any] = takes,
        priority: int = 5,
        space: Callable[..., Iterable[Config]] | None = None,
        work: Callable[..., Any] | None = None,
        launches: Callable[..., Any] | None = None,
        optional: tuple[str, ...] = (),
        bind: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        """Attach a backend with configurations, `run(x, config=…)`, which the CPU runs without being asked to.

        `bind(x, config=…)`: gives what runs bound calls, a function of their fields; None: `run`. `default_config`:
        None: the op's.
        """
        self._kernels[name] = KernelStudy(space, launches, work)
        one_call = self._spread(run)
        bind_call = None if bind is None else self._spread(bind)

        def bound(call: Any, config: Config) -> Callable[..., Any]:
            if bind_call is None:
                return lambda call: one_call(call, config=config)
            return self._spread(bind_call(call, config=config))

        self.attach_kernel(
            name,
            bound,
            refuse=self._spread(refuse),
            priority=priority,
            default_config=default_config or self._default,
            run=lambda call, config: one_call(call, config=config),
            optional=optional,
        )
        self._add(replace(self.backends[name], opt_in=takes))

    def _call(self, fields: Any) -> Any:
        return fields if fields is None or isinstance(fields, self.call_type) else self.call_type(*fields)

    def _spread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function of a call: of as many of its fields as it has parameters."""
        names = inspect.signature(function).parameters.values()
        count = len(self.call_type._fields)
        if not any(one.kind is one.VAR_POSITIONAL for one in names):
            count = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in names)
        return lambda call, **options: function(*call[:count], **options)

    def _of_calls(self, study: dict[str, Any]) -> dict[str, Any]:
        """The same fields of a study, whose functions take and give calls."""
        made = dict(study)
        for name in ("cost", "bound"):
            if made.get(name) is not None:
                made[name] = self._spread(made[name])
        for name in ("inputs", "call_of_key"):
            if made.get(name) is not None:
                made[name] = partial(lambda plain, *args: self._call(plain(*args)), made[name])
        cases = made.get("bench_cases")
        if cases is not None:
            made["bench_cases"] = lambda *args: {
                case: partial(lambda make: self._call(make()), make) for case, make in cases(*args).items()
            }
        return made


def planted(op: Op[Any, Any], name: str, run: Callable[[Any], Any], *, priority: int) -> None:
    """A backend of one of wavecrest's ops that nothing checks, for tests that want a wrong one, or one that counts."""
    op._put(Backend(name, run, None, takes, takes, priority))


@contextmanager
def doubling(config: Config) -> Iterator[ToyOp]:
    """The op "double", y = 2x, of one configuration and without backends."""
    made = ToyOp(
        "double",
        reference=lambda x: 2 * x,
        key=lambda x: (x.shape[-1],),
        inputs=lambda M, N, dtype, device: (torch.randn(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(flops=x.numel(), bytes=2 * x.nbytes),
        default_config=lambda key: config,
    )
    yield made
    del registry.STATE.ops["double"]


@contextmanager
def counting(op: Op[Any, Any], *, priority: int) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the first tensor of each call that a backend "planted" runs, which is there meanwhile."""
    backends = dict(op.backends)
    calls: list[tuple[int, ...]] = []

    def run(call: Any) -> Any:
        calls.append(tuple(call[0].shape))
        return op.reference(call)

    planted(op, "planted", run, priority=priority)
    try:
        yield calls
    finally:
        op.backends.clear()
        op.backends.update(backends)
        op._put(op.backends["reference"])
        op.unpin()

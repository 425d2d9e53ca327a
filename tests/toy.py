"""Ops made up for tests: functions of plain arguments, registered as an op is, with a call of one or two fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config


class ToyCall(NamedTuple):
    x: Tensor
    scale: float = 1.0


class TwoCall(NamedTuple):
    a: Tensor
    b: Tensor


def takes(*_args: Any) -> None:
    """Neither a check nor a backend refuses anything."""


class ToyOp(Op[Any, Any]):
    """An op whose parts are functions of its call's fields (as many as they take), called with these fields.

    `kernel` attaches a backend with configurations: `run(x, config=…)`, by default with `default_config`.
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
        made = study.pop("inputs")
        study["inputs"] = lambda *args: self._call(made(*args))
        if "cost" in study:
            study["cost"] = self._spread(study["cost"])
        if "bench_cases" in study:
            cases = study["bench_cases"]
            study["bench_cases"] = lambda *args: {
                case: lambda make=make: self._call(make()) for case, make in cases(*args).items()
            }
        self.own_study: Study[Any] = Study(kernels=self._kernels, **study)
        super().__init__(
            name, call_type, self._spread(reference), self._spread(check), self._spread(key), "", key_fields,
            key_sizes, op_class,
        )  # fmt: skip

    @property
    def study(self) -> Study[Any]:
        return self.own_study

    def _call(self, fields: Any) -> Any:
        return fields if isinstance(fields, self.call_type) else self.call_type(*fields)

    def _spread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function of a call: of as many of its fields as it has parameters."""
        names = inspect.signature(function).parameters.values()
        count = len(self.call_type._fields)
        if not any(one.kind is one.VAR_POSITIONAL for one in names):
            count = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in names)
        return lambda call, **options: function(*call[:count], **options)

    def __call__(self, *fields: Any, **named: Any) -> Any:
        return super().__call__(self.call_type(*fields, **named))

    def of(self, *fields: Any, **named: Any) -> Any:
        """A call."""
        return self.call_type(*fields, **named)

    def native(self, name: str, run: Callable[..., Any], *, refuse: Callable[..., Any] = takes,
               opt_in: Callable[..., Any] = takes, priority: int = 10, bind: Callable[..., Any] | None = None,
               as_native: bool = False) -> None:  # fmt: skip
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
    ) -> None:
        """Attach a backend with configurations, which also runs on the CPU without being asked for."""
        if space is not None or work is not None or launches is not None:
            self._kernels[name] = KernelStudy(space, launches, work)
        spread = self._spread(run)
        self.attach_kernel(
            name,
            lambda call, config: lambda call: spread(call, config=config),
            refuse=self._spread(refuse),
            priority=priority,
            default_config=default_config or self._default,
            optional=optional,
        )
        backend = self.backends[name]
        self._add(type(backend)(**{
            field: getattr(backend, field)
            for field in ("name", "run", "bind", "refuse", "priority", "default_config", "optional")
        }, opt_in=takes))  # fmt: skip

"""Ops whose calls are still positional: an adapter that goes when the last of them has a typed call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from wavecrest.dispatch.op import Op
from wavecrest.dispatch.study import EXAMPLE_DTYPES, KernelStudy, Study


class LegacyOp(Op[Any, Any]):
    """As the first design's Op: functions of positional arguments."""

    def __init__(
        self,
        name: str,
        *,
        reference: Any,
        check: Any,
        key: Any,
        inputs: Any,
        cost: Any,
        default_config: Any,
        key_fields: tuple[str, ...] = (),
        key_sizes: tuple[str, ...] = (),
        sizes: tuple[str, ...] = ("M", "N"),
        example_dtypes: tuple[str, ...] = EXAMPLE_DTYPES,
        compile_cases: Any = None,
        bench_cases: Any = None,
        emulate_cases: Any = None,
        unpacked: Any = None,
        bound: Any = None,
        call_of_key: Any = None,
        model: Any = None,
        stores: tuple[int, ...] = (),
        op_class: str = "row",
    ) -> None:
        self._default = default_config
        self._kernels: dict[str, KernelStudy[Any]] = {}

        def splat(function: Callable[..., Any]) -> Callable[[Any], Any]:
            return lambda call: function(*call)

        self._study = Study(
            inputs=inputs,
            cost=splat(cost),
            sizes=sizes,
            example_dtypes=example_dtypes,
            compile_cases=compile_cases,
            bench_cases=bench_cases,
            emulate_cases=emulate_cases,
            unpacked=unpacked and splat(unpacked),
            bound=bound and splat(bound),
            call_of_key=call_of_key,
            model=model,
            stores=stores,  # type: ignore[arg-type]
            kernels=self._kernels,
        )
        super().__init__(name, tuple, splat(reference), splat(check), splat(key), "", key_fields, key_sizes, op_class)

    def modelled(self, propose: Any) -> None:
        """The op has a cost model."""
        self._study = replace(self._study, model=partial(propose, self._kernels))

    @property
    def study(self) -> Study[Any]:
        return self._study

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._study, name)

    def attach(self, name: str, run: Any, *, supports: Any = None, reserved: Any = None, takes_config: bool = False,
               bind: Any = None, default_config: Any = None, space: Any = None, launches: Any = None,
               optional: tuple[str, ...] = (), work: Any = None, **more: Any) -> None:  # type: ignore[override]  # fmt: skip
        """As the first design's attach."""
        if supports is not None:
            more["refuse"] = lambda call: supports(*call)
        if reserved is not None:
            more["opt_in"] = lambda call: reserved(*call)
        if name == "reference":
            super().attach(name, run, **more)
            return
        if not takes_config:
            legacy_bind = None if bind is None else lambda call: _takes_call(bind(*call))
            super().attach(name, lambda call: run(*call), bind=legacy_bind, **more)
            return
        if launches is not None or space is not None or work is not None:
            made = launches and (lambda call, config, arch: launches(*call, config=config, arch=arch))
            self._kernels[name] = KernelStudy(space, made, work)
        self.attach_kernel(
            name,
            lambda call, config: _takes_call(bind(*call, config=config)),
            run=lambda call, config: run(*call, config=config),
            default_config=default_config or self._default,
            optional=optional,
            **more,
        )

    def call_of(self, values: Any) -> Any:
        return tuple(values)

    def __call__(self, *args: Any) -> Any:  # type: ignore[override]
        return super().__call__(args)

    def run(self, backend: str, *args: Any, config: Any = None) -> Any:  # type: ignore[override]
        """One call by its arguments, or as a tuple of them."""
        return super().run(backend, args[0] if len(args) == 1 and isinstance(args[0], tuple) else args, config=config)

    def decide(self, *args: Any) -> Any:  # type: ignore[override]
        return super().decide(args[0] if len(args) == 1 and isinstance(args[0], tuple) else args)

    def call_on(self, backend: str, *args: Any) -> Any:  # type: ignore[override]
        return super().call_on(backend, args)


def _takes_call(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda call: function(*call)

"""`wavecrest.route`: dispatch's choices on a model in one reversible call, without the ladder."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import from_example
from wavecrest.optimizer.steps import StepContext, step_by_id

if TYPE_CHECKING:
    from torch import nn

# steps that change nothing but what runs a call, in their order: a gated MLP takes its layers over as they are
STEPS = (
    "route_linear",
    "replace_attention",
    "replace_sdpa",
    "replace_moe",
    "replace_norm",
    "replace_activation",
    "replace_rotary",
)


class Routed:
    """A model whose calls run what dispatch chooses; `undo()`, or the end of a `with` block, takes it back.

    Attributes:
        model: the model, changed in place.
        sites: the changed modules, by step.
        notes: what each step found, or why it changed nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sites: dict[str, list[str]] = {}
        self.notes: dict[str, str] = {}
        self._before: list[_Before] | None = [_Before(module) for module in model.modules()]

    def undo(self) -> None:
        """Put the model's modules, their classes and their attention back; a second time does nothing.

        Weights that were loaded or changed since stay: both forms of the model share them.
        """
        before, self._before = self._before, None
        for one in before or ():
            one.put_back()

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        """One line: the number of changed modules by step."""
        changed = ", ".join(f"{step} {len(sites)}" for step, sites in self.sites.items()) or "nothing changed"
        return f"Routed({type(self.model).__name__}: {changed})"


class _Before:
    """The parts of a module that a step may change: class, submodules, forward, attention implementation."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._kind = type(module)
        self._parts = dict(module._modules)
        self._forward = module.__dict__.get("forward")
        self._attention = None
        if hasattr(module, "set_attn_implementation"):
            self._attention = getattr(getattr(module, "config", None), "_attn_implementation", None)

    def put_back(self) -> None:
        module = self._module
        module.__class__ = self._kind
        module._modules.clear()
        module._modules.update(self._parts)
        if self._forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = self._forward
        if self._attention is not None and module.config._attn_implementation != self._attention:
            module.set_attn_implementation(self._attention)


def route(model: nn.Module, example_inputs: Any) -> Routed:
    """Run a model's layers on the backends that dispatch chooses for their calls, in place and until `undo()`.

    Linear layers, attention, norms and gated MLPs go over to wavecrest's ops where dispatch runs another kernel than
    PyTorch's for a call of the example. Nothing is measured, and answers are not checked: `wavecrest.optimize` does.

    >>> with wavecrest.route(model, inputs) as routed:
    ...     routed(**inputs)

    Args:
        model: a module on the device it serves on.
        example_inputs: as for `wavecrest.optimize`; the calls of one forward of each bucket are looked at.

    Returns:
        The routed model with what was changed.

    Raises:
        WorkloadError: the model or the inputs cannot be used. The model is as it was.
    """
    workload = from_example(model, example_inputs)
    routed = Routed(model)
    context = StepContext(workload, hardware.detect(workload.device), model=model)
    try:
        for name in STEPS:
            _take(routed, name, context)
    except BaseException:
        routed.undo()
        raise
    finally:
        workload.restore_modes()
    return routed


def _take(routed: Routed, name: str, context: StepContext) -> None:
    step = step_by_id(name)
    try:
        found = step.find(context)
        if found.sites:
            step.apply(routed.model, found.params)
            routed.sites[name] = list(found.sites)
        routed.notes[name] = found.note
    except StepRefused as error:
        routed.notes[name] = str(error)

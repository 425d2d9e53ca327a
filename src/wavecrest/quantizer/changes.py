"""Modules and parameters of a model exchanged, and put back as they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from wavecrest.quantizer.layers import Site
from wavecrest.quantizer.smooth import Group


class Changes:
    """Entries of modules' tables that were replaced; no tensor is ever written to."""

    def __init__(self) -> None:
        self._old: list[tuple[dict[str, Any], str, Any]] = []

    def __len__(self) -> int:
        return len(self._old)

    def put(self, table: dict[str, Any], name: str, value: Any) -> None:
        """Replace an entry of a module's `_modules`, `_parameters` or `_buffers`."""
        self._old.append((table, name, table[name]))
        table[name] = value

    def module(self, model: nn.Module, path: str, value: nn.Module) -> None:
        """Replace the module at a path."""
        parent, _, name = path.rpartition(".")
        self.put(model.get_submodule(parent)._modules, name, value)

    def undo(self) -> None:
        """Put everything back, the last first. A module is in the mode of the one that stood in its place."""
        for table, name, value in reversed(self._old):
            if isinstance(value, nn.Module) and isinstance(table[name], nn.Module):
                value.train(table[name].training)
            table[name] = value
        self._old.clear()

    def forget(self) -> None:
        """Drop what was replaced."""
        self._old.clear()


def install(
    changes: Changes,
    model: nn.Module,
    sites: Iterable[Site],
    groups: Iterable[Group],
    choice: Mapping[str, str | None],
    *,
    all_groups: bool = False,
) -> None:
    """Give layers their formats; what changes held before is put back first.

    A group's scales are moved if one of its layers is quantized, or all are with `all_groups`; its other layers then
    get their own precision and multiplied columns.
    """
    changes.undo()
    for group in groups:
        if not all_groups and not any(choice[site.path] for site in group.sites):
            continue
        for name, parameter in group.parameters().items():
            changes.put(group.module._parameters, name, parameter)
        for site in group.sites:
            if choice[site.path] is None:
                old = site.parameter
                changes.put(site.module._parameters, "weight", nn.Parameter(site.stored(), old.requires_grad))
    for site in sites:
        chosen = choice[site.path]
        if chosen is not None:
            for path in site.paths:
                changes.module(model, path, site.made[chosen])

"""Modules whose class becomes a subclass that is made at run time, copied and pickled as others are.

Pickle finds a class by its name, under which there is the class that was derived from. So a derived one is written down
as what it was made of, and made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# a function of a module's class, and of texts and numbers, that gives a subclass of it
Make = Callable[..., type[nn.Module]]
# a class, or (what it is derived from, the function, its arguments after the class)
Recipe = type[nn.Module] | tuple[Any, Make, tuple[Any, ...]]


def derive(module: nn.Module, make: Make, *args: Any) -> None:
    """Change the class of a module to what `make` makes of it, under the name of its own; in place.

    Each module has a class of its own afterwards: `make` may look at what the module's file holds now.

    Args:
        module: of a class that other processes can import, if it is to be pickled.
        make: a function of a module's file, which gives a subclass of the class that it gets.
        args: more of its arguments, such that they can be pickled.
    """
    module.__class__ = _derived(type(module), make, args)


def _derived(kind: type[nn.Module], make: Make, args: tuple[Any, ...]) -> type[nn.Module]:
    made: Any = make(kind, *args)
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    recipe = _recipe_of(kind), make, args

    def reduce(self: Any, _protocol: Any) -> tuple[Any, ...]:
        return _empty, (recipe,), self.__getstate__()

    made.derived_by, made.__reduce_ex__ = recipe, reduce
    return made  # type: ignore[no-any-return]


def _recipe_of(kind: type[nn.Module]) -> Recipe:
    found: Recipe = kind.__dict__.get("derived_by", kind)
    return found


def _empty(recipe: Recipe) -> nn.Module:
    """A module of a derived class, without its state, which pickle and copy put in."""
    kind = _class_of(recipe)
    return kind.__new__(kind)


def _class_of(recipe: Recipe) -> type[nn.Module]:
    if isinstance(recipe, type):
        return recipe
    below, make, args = recipe
    return _derived(_class_of(below), make, args)

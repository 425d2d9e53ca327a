"""Hashes of kernels' source code, so that a record can name the code that ran.

A hash covers a kernel and every function of wavecrest that it calls, as the compiler sees them. Comments, docstrings,
line breaks, files, and the names of functions, variables and constants do not change it; operations, values of
constants, calls and the order of parameters do. Triton's own functions are covered by its version. Grids and
configurations are chosen outside of the kernels and are not part of the hash.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

# digits of a hash
DIGITS = 12


def kernels(package: str = "wavecrest.ops") -> dict[str, list[str]]:
    """The hashes of all device functions in a package's modules, by name; a name may occur twice."""
    found: dict[str, set[str]] = {}
    known: dict[FunctionType, str] = {}
    for module in _modules(importlib.import_module(package)):
        for value in vars(module).values():
            function = _device(value)
            if function is not None and function.__module__.startswith(f"{package}."):
                found.setdefault(function.__name__, set()).add(_hash(function, known))
    return {name: sorted(hashes) for name, hashes in sorted(found.items())}


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(one.name)


def _device(value: Any) -> FunctionType | None:
    """The Python function behind a kernel made by `triton.jit` or the like; None for anything else."""
    function = getattr(value, "fn", None)
    made = type(value).__module__.startswith("triton.") and isinstance(function, FunctionType)
    return function if made and not _of_triton(function) else None


def _of_triton(value: Any) -> bool:
    """Whether an object belongs to Triton; its interpreter replaces some of them."""
    return str(getattr(value, "__module__", "")).startswith("triton.")


def digest(kernel: Any) -> str:
    """The hash of a kernel that `triton.jit` made.

    Raises:
        TypeError: not a `triton.jit` kernel, or it uses a global whose value cannot be hashed as text.
    """
    function = _device(kernel)
    if function is None:
        raise TypeError(f"{kernel!r} is no function for the device")
    return _hash(function, {})


def _hash(function: FunctionType, known: dict[FunctionType, str]) -> str:
    if function not in known:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(tree, ast.FunctionDef)
        # not ast.dump, whose text differs between versions of Python
        text = ast.unparse(ast.fix_missing_locations(_Plain(function, tree, known).visit(tree)))
        known[function] = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
    return known[function]


class _Plain(ast.NodeTransformer):
    """A function reduced to what its compiled code depends on: names by number, globals by value."""

    def __init__(self, function: FunctionType, tree: ast.FunctionDef, known: dict[FunctionType, str]) -> None:
        self.known = known
        # parameters first, in their order; not co_varnames, where Python 3.12 has more names
        names = [one.arg for one in ast.walk(tree.args) if isinstance(one, ast.arg)]
        for one in ast.walk(tree):
            if isinstance(one, ast.arg):
                names.append(one.arg)
            elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                names.append(one.id)
        self.locals = {name: f"v{index}" for index, name in enumerate(dict.fromkeys(names))}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.globals = {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """The function without its docstring; of its decorators only the options."""
        options = _Options(self.locals)
        # jit(…), whatever it is called here
        node.decorator_list = [
            ast.Call(ast.Name("jit"), [], [options.visit(word) for word in one.keywords])
            for one in node.decorator_list
            if isinstance(one, ast.Call)
        ]
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        node.name, node.body = "kernel", [self.visit(one) for one in body]
        node.args, node.returns = self.visit(node.args), None
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """A parameter by its place."""
        annotation = None if node.annotation is None else self.visit(node.annotation)
        return ast.arg(self.locals[node.arg], annotation)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A variable by its number, a global by its value."""
        if node.id in self.locals:
            return ast.Name(self.locals[node.id])
        return ast.Name(self._named(self.globals[node.id])) if node.id in self.globals else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """A module's attribute by its value; any other attribute by its name."""
        value = self._value(node)
        if value is _MISSING or isinstance(value, ModuleType):
            return ast.Attribute(self.visit(node.value), node.attr)
        return ast.Name(self._named(value))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call, with parameters of wavecrest's functions by their positions."""
        function = _device(self._value(node.func))
        names = () if function is None else tuple(inspect.signature(function).parameters)
        keywords = [
            # a callee's parameter by its place
            ast.keyword(f"v{names.index(one.arg)}" if one.arg in names else one.arg, self.visit(one.value))
            for one in node.keywords
        ]
        keywords.sort(key=lambda one: one.arg or "")
        return ast.Call(self.visit(node.func), [self.visit(one) for one in node.args], keywords)

    def _value(self, node: ast.AST) -> Any:
        """The global value that an expression of names and dots is; _MISSING for any other."""
        if isinstance(node, ast.Name):
            return _MISSING if node.id in self.locals else self.globals.get(node.id, _MISSING)
        if isinstance(node, ast.Attribute):
            above = self._value(node.value)
            # only of modules and classes: the compiler looks into anything else
            return getattr(above, node.attr, _MISSING) if isinstance(above, ModuleType | type) else _MISSING
        return _MISSING

    def _named(self, value: Any) -> str:
        """The value of a global, independent of its local name."""
        if isinstance(value, ModuleType):
            return value.__name__
        function = _device(value) or (value if isinstance(value, FunctionType) else None)
        if function is not None and not _of_triton(function):
            return f"function {_hash(function, self.known)}"
        if isinstance(value, type) and not value.__module__.startswith(("triton.", "builtins")):
            return f"class {ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(value))))}"
        if callable(value) and hasattr(value, "__name__"):
            return f"triton's {value.__name__}" if _of_triton(value) else f"{value.__module__}.{value.__name__}"
        text = repr(getattr(value, "value", value))
        if " at 0x" in text:
            raise TypeError(f"a kernel uses {text}, which has no text of its own")
        return text


class _Options(ast.NodeTransformer):
    """Options of jit, which name parameters as text."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """A parameter by its place."""
        return ast.Constant(self.names.get(node.value, node.value)) if isinstance(node.value, str) else node


_MISSING = object()

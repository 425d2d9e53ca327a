"""Loads users' kernels and ops: of installed packages, by entry points, and of files and modules that are named."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from importlib import metadata
from pathlib import Path

from wavecrest import env
from wavecrest.backends.user import KERNELS
from wavecrest.errors import InvalidArgument, WorkloadError

# entry point groups: modules whose import registers kernels, and modules whose import registers ops
GROUPS = ("wavecrest.ops", "wavecrest.kernels")
VARIABLE = "WAVECREST_KERNELS"

# absolute files and names of modules that are loaded
_loaded: set[str] = set()


class KernelWarning(UserWarning):
    """A package's kernels could not be loaded; the text names it, and why."""


def load_all() -> None:
    """Load the entry points of installed packages, then what WAVECREST_KERNELS names.

    Raises:
        WorkloadError: a file or module of the variable cannot be loaded.
    """
    for group in GROUPS:
        for entry in metadata.entry_points(group=group):
            try:
                entry.load()
            # a package of somebody's must not keep wavecrest from being imported
            except Exception as error:
                warnings.warn(
                    f"{group}: {entry.name} = {entry.value} cannot be loaded, {type(error).__name__}: {error}",
                    KernelWarning,
                    stacklevel=2,
                )
    for spec in filter(None, env.get(VARIABLE).split(os.pathsep)):
        load(spec)


def load(spec: str) -> None:
    """Import a file or module whose import registers kernels; a second time does nothing.

    Args:
        spec: FILE.py, or the name of a module.

    Raises:
        WorkloadError: there is no such file or module, or it raises; the message names both.
    """
    name = str(Path(spec).resolve()) if spec.endswith(".py") else spec
    if name in _loaded:
        return
    try:
        if spec.endswith(".py"):
            _load_file(Path(name))
        else:
            importlib.import_module(spec)
    except FileNotFoundError as error:
        raise WorkloadError(f"no file {spec}; --kernels and {VARIABLE} take FILE.py or the name of a module") from error
    except Exception as error:
        raise WorkloadError(f"the kernels of {spec} cannot be loaded, {type(error).__name__}: {error}") from error
    _loaded.add(name)


def _load_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(path)
    name = f"wavecrest_kernels_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    # where functions look for their globals, and inspect for their source
    sys.modules[name] = module
    # imports of files beside it
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))


def use(specs: list[str]) -> list[tuple[str, str]]:
    """Load files and modules, here and in the processes that this one starts.

    Args:
        specs: as for `load`.

    Returns:
        (op, name) of each kernel that is registered now.

    Raises:
        InvalidArgument: a file's path holds the separator of paths.
        WorkloadError: as of `load`.
    """
    for spec in specs:
        if os.pathsep in spec:
            raise InvalidArgument(f"--kernels {spec}: a path cannot hold {os.pathsep!r}")
        load(spec)
    # a child may be started in another folder
    names = [str(Path(spec).resolve()) if spec.endswith(".py") else spec for spec in specs]
    before = [one for one in env.get(VARIABLE).split(os.pathsep) if one]
    env.set_value(VARIABLE, os.pathsep.join(dict.fromkeys([*before, *names])))
    return list(KERNELS)

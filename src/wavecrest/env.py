"""Environment variables: the only reader of `os.environ`, and the table of their effects.

The facts are data (`env_table.toml`): name, default, effect, verdict, risk, source. `wavecrest doctor` compares the
table with the live process; `docs/env.md` is generated from it.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["real", "no-op", "scoped", "folklore", "ours"]
VERDICTS: dict[str, str] = {
    "real": "read by the library and changes what happens",
    "no-op": "read, but the advised value is already the default",
    "scoped": "right only in the case named",
    "folklore": "no library reads this name",
    "ours": "read by wavecrest itself",
}


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table.

    `warn_if` lists values that doctor warns about ("*" for any value, "!0" for any but 0); `try_values` are values
    the environment step may try in child processes (performance only, never numerics); `platforms` says where the
    variable means something: "amd", "nvidia", "cpu".
    """

    name: str
    verdict: Verdict
    default: str
    effect: str
    advice: str
    source: str
    platforms: tuple[str, ...] = ("amd", "nvidia", "cpu")
    risk: str = ""
    warn_if: tuple[str, ...] = ()
    try_values: tuple[str, ...] = ()

    def warns(self, value: str) -> bool:
        """True if doctor should warn when the variable has this value."""
        return any(
            rule == "*" or rule == value or (rule.startswith("!") and value != rule[1:]) for rule in self.warn_if
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """A fact about the platform outside the environment: a kernel setting, a boot option, a call of torch.

    `file` is where the value can be read; `good` lists the values that need no attention (empty: only documented).
    """

    name: str
    verdict: Verdict
    default: str
    effect: str
    advice: str
    source: str
    platforms: tuple[str, ...] = ("amd", "nvidia", "cpu")
    risk: str = ""
    file: str = ""
    good: tuple[str, ...] = ()


@cache
def _data() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("wavecrest").joinpath("env_table.toml").read_text(encoding="utf-8")
    return {
        kind: [{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()} for row in rows]
        for kind, rows in tomllib.loads(text).items()
    }


@cache
def table() -> tuple[Variable, ...]:
    """Every variable wavecrest knows, in the order of the data file."""
    return tuple(Variable(**row) for row in _data()["variable"])


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting outside the environment, in the order of the data file."""
    return tuple(Setting(**row) for row in _data()["setting"])


def may_try(name: str, value: str) -> bool:
    """True if the table lists this value of a variable to try: all that a plan file may set in a process."""
    row = variable(name)
    return row is not None and value in row.try_values


def variable(name: str) -> Variable | None:
    """The table's row for a variable, if it has one."""
    return next((row for row in table() if row.name == name), None)


def get(name: str, default: str = "") -> str:
    """The value of a variable in this process."""
    return os.environ.get(name, default)


def set_default(name: str, value: str) -> None:
    """Set a variable of this process unless it is set; only for variables that cannot change a result."""
    os.environ.setdefault(name, value)


def set_value(name: str, value: str) -> None:
    """Set a variable of this process and of those that it starts; only for variables that cannot change a result."""
    os.environ[name] = value


def unset(name: str) -> None:
    """Remove a variable from this process."""
    os.environ.pop(name, None)


def snapshot() -> dict[str, str]:
    """The variables of this process that the table knows and that are set; of a path only the last part.

    Records are shared, and a user's folders say nothing about a result.
    """
    found = {row.name: os.environ[row.name] for row in table() if row.name in os.environ}
    return {name: f"…/{Path(value).name}" if os.path.isabs(value) else value for name, value in found.items()}


def matching(*parts: str) -> dict[str, str]:
    """The variables of this process whose name contains one of `parts`."""
    return {name: value for name, value in sorted(os.environ.items()) if any(part in name for part in parts)}


def current() -> dict[str, str]:
    """All variables of this process, including those that do not concern wavecrest: never store them."""
    return dict(os.environ)


def child(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a child process: this one's, with `changes` applied (None unsets)."""
    environment = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def python_child(
    changes: Mapping[str, str | None], folders: Sequence[str] = (), source: str | None = None
) -> dict[str, str]:
    """`child` for a Python process that imports this copy of wavecrest, installed or not.

    Args:
        changes: as of `child`.
        folders: searched for modules before installed packages are.
        source: the folder that wavecrest is imported from; None: where it lies, maybe beside all installed packages.
    """
    source = source or str(Path(__file__).resolve().parents[1])
    own = changes.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    path = os.pathsep.join([source, *folders, *filter(None, [own])])
    return child({**changes, "PYTHONPATH": path})


def python_command(module: str, python: str = sys.executable) -> list[str]:
    """The command of a Python process that runs a module of wavecrest and ends when this process ends."""
    return [python, "-m", "wavecrest.measure.child", str(os.getpid()), module]


def clean_child() -> dict[str, str]:
    """The environment of a child that shows defaults: paths and device visibility only."""
    paths = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
    kept = (*paths, "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return {name: os.environ[name] for name in kept if name in os.environ}

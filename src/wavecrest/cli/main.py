"""The `wavecrest` program: assembles the commands and turns errors into one line and an exit code.

Exit codes: 0 ok, 1 user error, 2 regression or refused, 3 environment, 130 interrupted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from wavecrest import INSTALL_TORCH, __version__
from wavecrest.cli import _shared
from wavecrest.errors import MissingDependency, WavecrestError, WorkloadError

# the main job first; each is a module of wavecrest.cli, with _ for -, with a typer function `command` (or an `app`).
# The line of `wavecrest --help`, which fits a terminal of 80 columns
COMMANDS = {
    "optimize": "Make a model faster, step by step, and prove it.",
    "verify": "Check a plan, or somebody's proof bundle, again.",
    "plan": "Show a plan, compare two, or check one here.",
    "report": "Write the report of a run again.",
    "bench": "Measure a model, or ops beside their peers.",
    "profile": "Show where a model's time goes, and the causes.",
    "compare": "Compare two results of bench: the guard for CI.",
    "doctor": "Show what on this machine helps or hurts.",
    "explain": "Show which backend runs an op's call, and why.",
    "tune": "Find the fastest correct kernel for each shape.",
    "db": "Show, move and check measured rows.",
    "isa": "Read, compare and run machine code of kernels.",
    "new-op": "Start a package for an op of your own.",
}

# typer carries its own copy of click since 0.29; before, it used the package
_ClickException: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)

# exit code after Ctrl-C, as of shells; typer returns it for a KeyboardInterrupt inside a command
INTERRUPTED = 130


class _InOrder(TyperGroup):
    """The commands in the order of `COMMANDS`, groups among them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return [name for name in COMMANDS if name in self.commands]


app = typer.Typer(
    name="wavecrest",
    cls=_InOrder,
    help="Point it at a PyTorch model and get back a faster model, with proof.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _usage(error: Exception) -> str:
    """The problem of a command line; "" where a group without a command has printed its help."""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if context is not None and text == context.get_help():
        _shared.out.print(text, markup=False, soft_wrap=True)
        return ""
    if text.endswith("?"):
        return f"{text} See `wavecrest --help`"
    return f"{text.removesuffix('.')}; see `wavecrest --help`" if text else ""


def _print_version(value: bool) -> None:
    if value:
        _shared.out.print(f"wavecrest {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


for _name, _line in COMMANDS.items():
    _file = f"wavecrest.cli.{_name.replace('-', '_')}"
    if importlib.util.find_spec(_file) is None:
        continue
    _module = importlib.import_module(_file)
    if hasattr(_module, "app"):
        app.add_typer(_module.app, name=_name, short_help=_line)
    else:
        app.command(_name, short_help=_line)(_module.command)


@functools.cache
def _program() -> Any:
    # typer makes it anew at every call of `app`: most of the time of a command that is called from Python
    return get_command(app)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        # bare `wavecrest` is a question
        code = _program()(args=argv or ["--help"], prog_name="wavecrest", standalone_mode=False)
    except WavecrestError as error:
        _shared.print_error(str(error))
        return error.exit_code
    except _ClickException as error:
        text = _usage(error)
        if text:
            _shared.print_error(text)
        # click's own code for bad usage is 2, which here means a regression
        return 1 if text else 0
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        missing = MissingDependency("torch", f"wavecrest {next(iter(argv), '')}".strip(), INSTALL_TORCH)
        _shared.print_error(str(missing))
        return missing.exit_code
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            # click's answer to a reader that has read enough, such as `head`
            raise error.__context__ from None
        if not argv or argv[0] in ("--install-completion", "--show-completion"):
            # the shell asked, in a variable where there are no arguments, and was told
            return error.code if isinstance(error.code, int) else 0
        _shared.print_error(f"the workload ended the program: sys.exit({error.code!r})")
        return WorkloadError.exit_code
    except FileNotFoundError as error:
        # relative paths lead nowhere without it
        if _has_folder():
            raise
        _shared.print_error(f"the working folder is gone ({error.strerror}); change to one that exists")
        return 1
    except _shared.Interrupted as interrupted:
        _shared.err.print(escape(str(interrupted)), soft_wrap=True)
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        _shared.err.print("interrupted")
    return code if isinstance(code, int) else 0


def _has_folder() -> bool:
    try:
        Path.cwd()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

"""`wavecrest new-op NAME`: a package for an op of your own, outside wavecrest, with kernel, study, tests and budget."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, OutputError

# template -> file; NAME and PACKAGE are replaced
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "__init__.py": "src/PACKAGE/__init__.py",
    "op.py": "src/PACKAGE/op.py",
    "kernel.py": "src/PACKAGE/kernel.py",
    "study.py": "src/PACKAGE/study.py",
    "conftest.py": "tests/conftest.py",
    "test_op.py": "tests/test_NAME.py",
    "budget.toml": "tests/budget.toml",
}


def run(name: str, path: Path | None = None) -> list[Path]:
    """Write the package of an op.

    Args:
        name: of the op: lower-case letters, digits and underscores, as in "scaled_silu".
        path: the folder to make; None: "wavecrest-NAME" here. It may be there, if it is empty.

    Returns:
        The files.

    Raises:
        InvalidArgument: the name is no such name, or that of one of wavecrest's ops.
        OutputError: the folder has files in it, or cannot be written.
    """
    import jinja2

    from wavecrest import ops
    from wavecrest.records import files

    if not re.fullmatch(r"[a-z][a-z0-9_]{0,48}", name) or keyword.iskeyword(name):
        raise InvalidArgument(
            f"new-op: an op is named with lower-case letters, digits and underscores, such as scaled_silu, not {name!r}"
        )
    if name in ops.names():
        raise InvalidArgument(f"new-op: there is an op named {name}; a kernel for it: wavecrest.register_kernel")
    package = f"wavecrest_{name}"
    folder = path or Path(package.replace("_", "-"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"new-op: {folder} is there and not empty; give another --path")
    call = "".join(part.capitalize() for part in name.split("_")) + "Call"
    names = {"name": name, "package": package, "distribution": package.replace("_", "-"), "call": call}
    # of TOML, Python and Markdown, not of HTML
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("wavecrest.cli", "templates/new_op"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made = {
        folder / place.replace("PACKAGE", package).replace("NAME", name): templates.get_template(f"{one}.j2").render(
            names
        )
        for one, place in FILES.items()
    }
    for file, text in made.items():
        files.prepare_folder(file.parent)
        files.write_text(file, text)
    return list(made)


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The op's name, such as scaled_silu.")],
    path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to make. Default: wavecrest-NAME here.")
    ] = None,
) -> None:
    """Start a package for an op of your own: reference, checks, Triton kernel, study, tests and budget, all running.

    After `pip install -e DIR` the op is in explain, tune, bench and isa as wavecrest's are.
    """
    made = run(name, path)
    folder = made[0].parent
    for file in made:
        _shared.out.print(escape(str(file)), soft_wrap=True)
    # brackets are markup
    shown = escape(f"pip install -e '{folder}[test]' && python -m pytest {folder}")
    _shared.err.print(f"next: {shown}", soft_wrap=True, highlight=False)

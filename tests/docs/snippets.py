"""The code blocks of README and docs: collected, and run as a reader would who pastes them one after the other.

The blocks of a page share a temporary folder and, if they are Python, a namespace. The language of a block decides:

- `python`: run. With a file's name (`title="serve.py"` after the language, or `# serve.py` as its first line) it is
  also written to that file.
- `console`: `$ ` begins a command; the lines below it are its output, in which `…` stands for any text, and a line of
  it for any number of lines. `sh`, `bash`: each line is a command.
- any other language: not run; with a file's name it is written to that file.

Above a block, `<!-- not run: REASON -->` leaves it out (or `<!-- needs THING -->` above `python no-run`): it must still
compile, and its `wavecrest` commands must parse.
`<!-- signature -->` says that it is the signature of ops, and it is compared with theirs. `<!-- exit code 2 -->` is
that of its last command.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from wavecrest.cli import main as program

ROOT = Path(__file__).parents[2]
# pages with a way of running of their own, and the test that does it
ELSEWHERE = {
    ROOT / "docs" / "guides.md": ROOT / "tests" / "layout" / "test_guides.py",
    ROOT / "docs" / "benchmarks.md": ROOT / "tests" / "layout" / "test_guides.py",
    ROOT / "docs" / "your_kernel.md": ROOT / "tests" / "cli" / "test_your_kernel.py",
}
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"}
    - set(ELSEWHERE)
)
LANGUAGES = {"python", "console", "sh", "bash", "text", "toml", "csv", "json", "yaml"}
# these change the machine or need a network: a block with one is not run, and says so
REFUSED = {"pip", "git", "apt-get", "sudo", "curl", "docker"}
SECONDS = 60
_FENCE = re.compile(r"^(?P<indent> *)```+(?P<info>.*)$")
_NOTE = re.compile(r"<!-- (not run|signature|exit code|needs)(?:: | )?(.*?) ?-->")
_TITLE = re.compile(r'title="([^"]+)"')
_FILE = re.compile(r"# ([\w/]+\.py)$")


class Block(NamedTuple):
    """A code block: its page, the number of its first line, language, file name, text, and the notes above it."""

    page: Path
    line: int
    language: str
    file: str
    text: str
    notes: dict[str, str]

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name}:{self.line}"


class Command(NamedTuple):
    """A command line and the output that the page shows of it, or None if it shows none."""

    text: str
    shown: str | None


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    open_at: tuple[int, str, str] | None = None
    held: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if open_at is None and fence is None:
            if line.strip():
                notes = dict(_NOTE.findall(line))
        elif open_at is None:
            assert fence is not None
            open_at, held = (number + 1, fence["info"].strip(), fence["indent"]), []
        elif fence is not None and not fence["info"].strip():
            start, info, _ = open_at
            language, _, rest = info.partition(" ")
            text = "\n".join(held)
            if rest == "no-run":
                notes = {"not run": f"needs {notes.get('needs', '')}"}
            title = _TITLE.search(rest) or _FILE.match(held[0] if held else "")
            found.append(Block(page, start, language, title[1] if title else "", text, notes))
            open_at, notes = None, {}
        else:
            held.append(line.removeprefix(open_at[2]))
    assert open_at is None, f"{page}: the block at line {open_at and open_at[0]} does not end"
    return found


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block, lines that end with a backslash joined."""
    text = block.text.replace("\\\n", " ")
    if block.language in ("sh", "bash"):
        yield from (Command(line, None) for line in text.splitlines() if shlex.split(line, comments=True))
        return
    assert text.startswith("$ "), f"{block.place}: a console block begins with `$ `"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        yield Command(line, shown.strip("\n") or None)


def matches(shown: str, printed: str) -> bool:
    """Whether an output is as shown: spaces at the ends of lines do not count, `…` is any text."""
    lines = []
    for line in shown.strip().splitlines():
        if line.strip() in ("…", "..."):
            lines.append(r"(?:.*\n)*?")
        else:
            # runs of spaces depend on the widths of what `…` stands for
            words = [re.escape(part).replace("…", ".*?") for part in line.split()]
            lines.append(r"\s*" + r"\s+".join(words) + r"\s*?\n")
    printed = "\n".join(line.rstrip() for line in printed.strip().splitlines()) + "\n"
    return re.fullmatch("".join(lines), printed) is not None


class Reader:
    """Somebody who pastes the blocks of a page: a folder, a namespace, and an environment of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # as in a checkout
        for name in ("benchmarks", "evidence", "examples"):
            (folder / name).symlink_to(ROOT / name)
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def paste(self, block: Block) -> None:
        """Run a block, or check what can be checked of one that is not run."""
        if block.language not in LANGUAGES:
            raise AssertionError(
                f"{block.place}: language {block.language!r}; use one of {', '.join(sorted(LANGUAGES))}"
            )
        if "signature" in block.notes:
            check_signatures(block)
            return
        skipped = "not run" in block.notes
        if block.file and not skipped:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text + "\n", encoding="utf-8")
        if block.language == "python":
            # lines as in the page, in a file, which is where Triton reads the source of a kernel
            path = self.folder / f"{block.page.stem}_{block.line}.py"
            source = "\n" * (block.line - 1) + block.text + "\n"
            code = compile(source, path, "exec", dont_inherit=True)
            if not skipped:
                path.write_text(source, encoding="utf-8")
                exec(code, self.names)
        elif block.language in ("console", "sh", "bash"):
            for command in (found := list(commands(block))):
                if skipped:
                    check_parses(command.text, block.place)
                else:
                    last = command is found[-1]
                    self.type(command, block.place, int(block.notes.get("exit code", 0)) if last else 0)

    def type(self, command: Command, place: str, code: int) -> None:
        """Run a command and compare its exit code, and its output with what is shown."""
        words = [
            name
            for word in shlex.split(command.text, comments=True)
            for name in ((sorted(glob.glob(word)) if "*" in word else []) or [word])
        ]
        given: dict[str, str] = {}
        while words and re.match(r"\w+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        if words[:1] == ["export"]:
            os.environ.update(word.split("=", 1) for word in words[1:])
            return
        if words[0] in REFUSED or words[:3] == ["python", "-m", "pip"] or words[0].startswith("scripts/"):
            raise AssertionError(
                f"{place}: {words[0]} is not run here: write `<!-- not run: REASON -->` above the block"
            )
        returned, printed = self._run(words, given)
        assert returned == code, f"{place}: `{command.text}` ended with {returned}, not {code}:\n{printed}"
        if command.shown is not None and not matches(command.shown, printed):
            raise AssertionError(f"{place}: `{command.text}` printed:\n{printed}\nnot as shown:\n{command.shown}")

    def _run(self, words: list[str], given: dict[str, str]) -> tuple[int, str]:
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        text = io.StringIO()
        try:
            if words[0] == "wavecrest":
                with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                    return program.main(words[1:]), text.getvalue()
            if words[0] == "python" and words[1].endswith(".py"):
                with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), _argv(words[1:]):
                    runpy.run_path(words[1], run_name="__main__")
                return 0, text.getvalue()
            done = subprocess.run(
                [sys.executable if words[0] == "python" else words[0], *words[1:]],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
            )  # fmt: skip
            return done.returncode, done.stdout
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _argv(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


def check_parses(line: str, place: str) -> None:
    """A `wavecrest` command that is not run: its command, options and arguments exist."""
    words = shlex.split(line, comments=True)
    if "wavecrest" not in words[:3]:
        return
    words = words[words.index("wavecrest") + 1 :]
    if ">" in words:
        words = words[: words.index(">")]
    root = typer.main.get_command(program.app)
    _disarm(root)
    try:
        root.main(words, standalone_mode=False)
    except Exception as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        raise AssertionError(f"{place}: `{line}`: {text}") from None


def _disarm(command: Any) -> None:
    """Commands do nothing but parse."""
    for child in getattr(command, "commands", {}).values():
        _disarm(child)
    if not hasattr(command, "commands"):
        command.callback = lambda **_: 0


def check_signatures(block: Block) -> None:
    """The functions of a block, `def NAME(…): ...`, have the parameters and defaults of `wavecrest.ops.NAME`."""
    from wavecrest import ops

    found = [node for node in ast.parse(block.text).body if isinstance(node, ast.FunctionDef)]
    assert found, f"{block.place}: no `def` in a block of signatures"
    for node in found:
        namespace: dict[str, Any] = {}
        node.returns, node.decorator_list = None, []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(f"import torch\nfrom torch import Tensor\n{ast.unparse(node)}", namespace)
        shown, real = (_parameters(function) for function in (namespace[node.name], getattr(ops, node.name)))
        assert shown == real, f"{block.place}: {node.name} takes\n{real}\nnot\n{shown}"


def _parameters(function: Any) -> list[tuple[str, str, str]]:
    return [(one.name, one.kind.name, repr(one.default)) for one in inspect.signature(function).parameters.values()]

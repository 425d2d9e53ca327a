"""Run the Python blocks of `PAGES` and write what each prints below it; --check only compares.

The blocks run in one process, in their order, with folders of their own for caches and measured rows.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("guides.md", "benchmarks.md")
SRC = Path(__file__).parents[1] / "src"
# a block with, once it has run, its output
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)
# set in the process that runs the blocks
INSIDE = "--inside"


def walked(text: str, name: str) -> str:
    """A page with the output of each block, as it is now; a block that raises ends the walk."""

    def run(block: re.Match[str]) -> str:
        code, printed = block["code"], io.StringIO()
        with contextlib.redirect_stdout(printed):
            # each block is a program of its own, as a reader would paste it
            exec(compile(code, f"{name}, line {text.count(chr(10), 0, block.start('code')) + 1}", "exec"), {})
        return f"```python\n{code}```\n\n```text\n{printed.getvalue()}```\n"

    return BLOCK.sub(run, text)


def fresh(name: str) -> str:
    """`walked` of a page in a new process, which the caller's settings and caches do not reach."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"XDG_CACHE_HOME": folder, "XDG_DATA_HOME": folder, "WAVECREST_DATABASE": f"{folder}/rows"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WAVECREST_")}
        paths = os.pathsep.join(filter(None, (str(SRC), kept.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, __file__, INSIDE, name],
            capture_output=True, text=True, env={**kept, **own, "PYTHONPATH": paths}, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


def main() -> int:
    """Write or compare as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is not what is printed")
    parser.add_argument(INSIDE, metavar="PAGE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        sys.stdout.write(walked((DOCS / args.inside).read_text(encoding="utf-8"), args.inside))
        return 0
    code = 0
    for name in PAGES:
        before, after = (DOCS / name).read_text(encoding="utf-8"), fresh(name)
        if before == after:
            continue
        if args.check:
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, "printed now", lineterm="")
            sys.stderr.write("\n".join(lines) + "\n")
            code = 1
        else:
            (DOCS / name).write_text(after, encoding="utf-8")
            print(f"wrote docs/{name}")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""A new op's package, installed: its own tests pass, and explain, tune, bench and isa know it. Needs the package index.

    python -m tests.cli.new_op_installed

Not collected by pytest: pip takes a minute. `tests/cli/test_your_kernel.py` has the same without pip.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("explain", "scaled_silu", "16", "256", "fp32", "--device", "cpu"),
    ("tune", "scaled_silu", "--device", "cpu", "--suite", "quick", "--seconds", "0.05"),
    ("bench", "scaled_silu", "--device", "cpu", "--suite", "quick", "--peers", "eager"),
    ("isa", "show", "scaled_silu", "--arch", "gfx942"),
)


def main() -> int:
    """Run all of it; the exit code of the first that fails, or 0."""
    with tempfile.TemporaryDirectory() as folder:
        package, environment = Path(folder) / "package", Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        (found,) = environment.glob("lib/python*/site-packages")
        # this checkout and what it stands on, without a copy of torch
        (found / "here.pth").write_text("\n".join([str(ROOT / "src"), *site.getsitepackages()]))
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON_INTERPRET"))
        }
        clean["WAVECREST_DATABASE"] = "off"
        steps = [
            ("-m", "wavecrest", "new-op", "scaled_silu", "--path", str(package)),
            ("-m", "pip", "install", "--no-deps", "-q", "-e", str(package)),
            ("-m", "pytest", "-q", str(package)),
            *(("-m", "wavecrest", *command) for command in COMMANDS),
        ]
        for step in steps:
            sys.stdout.write(f"$ python {' '.join(step)}\n")
            sys.stdout.flush()
            done = subprocess.run([python, *step], cwd=folder, env=clean)
            if done.returncode != 0:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())

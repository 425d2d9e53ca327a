"""The first code of a child process: it sees to it that the child dies with its parent, then runs a module.

Run as `python -m wavecrest.measure.child PARENT MODULE ARGUMENTS…` (`env.python_command`). It imports nothing heavy, so
that a parent which is killed while its child starts leaves no orphan that compiles and measures for minutes.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

# of prctl(2): the signal that the kernel sends when the parent ends
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End this process when the process `parent`, which started it, ends; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run the module of the command line as the program."""
    _, parent, module, *arguments = sys.argv
    die_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

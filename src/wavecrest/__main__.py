"""The `wavecrest` program and `python -m wavecrest`: signals and standard output first, then the commands.

Nothing is imported before the signals are looked after, as torch alone takes seconds. A signal becomes one line and the
exit code that shells expect, 130 for Ctrl-C and 143 for SIGTERM, whatever was under way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

# seconds that a command has to write what it knows after a signal
PATIENCE = 20.0
# seconds after which a signal that came inside a callback is sent again, until it comes outside of it
AGAIN = 0.001


def main() -> int:
    """Run the program; the exit code."""
    received: list[int] = []
    repeated: list[int] = []

    def repeat(number: int) -> None:
        process = os.getpid()
        while not received:
            time.sleep(AGAIN)
            # CPython runs no other thread between the two, so that none is sent behind one that was received
            if not received:
                os.kill(process, number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if received:
            # asked twice: what is written is whole at any time
            os._exit(128 + number)
        if _is_callback(frame):
            # Python would print what is raised there, and go on; it may come again while the thread is being started
            if not repeated:
                repeated.append(number)
                threading.Thread(target=repeat, args=(number,), daemon=True).start()
            return
        received.append(number)
        if _imports_torch(frame):
            # torch's C++ code ends the process with a trace where Python that it calls raises; nothing is written yet
            _say("interrupted")
            os._exit(128 + number)
        # a compiler may swallow the exception and go on
        watch = threading.Timer(PATIENCE, os._exit, (128 + number,))
        watch.daemon = True
        watch.start()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        # a shell that starts a program in the background has SIGINT ignored
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    if sys.stdout is None or sys.stderr is None:
        # the next file to be opened would get the closed number, and prints would go into it
        return _leave(1, "standard output or standard error is closed; send it to /dev/null instead")
    code = 1
    try:
        from wavecrest.cli.main import main as run

        code = run()
        if code != 130:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
        _say("interrupted")
    except BrokenPipeError:
        # the reader of a pipe has read enough
        return _leave(code)
    except OSError as error:
        return _leave(1, f"cannot write to standard output: {error.strerror or error}")
    except BaseException:
        # an import that a signal interrupts may raise anything
        if not received:
            raise
        code = 130
        _say("interrupted")
    if received:
        if code != 130:
            # the interrupted code caught the exception, and the command went on to its end
            _say("interrupted")
        return _leave(128 + received[0])
    return code


def _is_callback(frame: FrameType | None) -> bool:
    """Whether the import system puts away the lock of a module, in a callback of a weak reference."""
    while frame is not None:
        if frame.f_code.co_name == "cb" and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _imports_torch(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def _leave(code: int, problem: str = "") -> int:
    """End at once: what runs at exit may wait for compilers, or write to an output that is gone."""
    if problem:
        try:
            _say(f"error: {problem}")
        except OSError:
            # there is nobody to tell; the exit code does
            code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

"""A process that has imported what children need, and forks one for each that is asked for.

Imports are most of a short child's time: torch 3 s, a model of transformers 9 to 12 s more (16 cores beside an H200,
2026-11-26). The server imports and does nothing else: it has run no model, opened no GPU and started no thread of
Python, and it says so or why not (`ForkServer.problem`). Threads of BLAS libraries wait for work; they end in a fork. A
child that it forks is what a new interpreter is after the same imports, but that all have one layout of memory and one
seed of hashes, where interpreters differ. Its environment is the server's, since variables act at import, but for those
that libraries read at each use (`AT_USE`).

The server is this module, run with `env.python_command`: MODULE, whose `main` children run; the file descriptor of its
connection; modules to import.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any, NoReturn

from wavecrest import env
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure.child import die_with

# device files that a process has open once it uses a GPU: a fork of it cannot use that GPU. NVML, which counts GPUs,
# opens those of NVIDIA too, and a fork of such a process can (H200, driver of CUDA 13, 2026-11-26): CUDA is asked
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
# CUDA's driver, and its answer before it is initialised (cuDeviceGetCount, CUDA_ERROR_NOT_INITIALIZED)
_DRIVER, _NOT_INITIALISED = "libcuda.so.1", 3
# stands before the names of `more` on the server's command line
_MORE = "--more"
# makes torch.cuda.is_available ask NVML, so that a library which asks it at import opens no GPU
_ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
# libraries, and wavecrest's profiler, set these for themselves as they work, and read them at each use
AT_USE = (
    "KINETO_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
)


class Forked:
    """A forked child, with the part of `subprocess.Popen` that its starter needs.

    Attributes:
        pid: of the child, which leads a process group of its own.
        returncode: None until `wait` has seen the end; then as Popen has it.
    """

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once the child has ended; minus the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it has not ended in `timeout` seconds.
        """
        if self.returncode is None:
            ready, _, _ = select.select([self._ended], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
            # no number: the server was killed, and its children with it
            self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            os.close(self._ended)
        return self.returncode


class ForkServer:
    """The server as its starter has it; it ends with the block, and its children with it.

    Args:
        module: children run its `main` with their arguments.
        imports: modules to import beside it; one that cannot be imported is left to the children.
        changes: variables to set, or to unset where None, beside those of this process.
        more: modules to import behind those, which not every child needs.

    Attributes:
        environment: the variables of the server, and so of its children but for `AT_USE`.
        import_seconds: how long its imports took, without those of `more`; 0 until `problem` was asked for.
    """

    def __init__(
        self,
        module: str,
        imports: Sequence[str] = (),
        changes: Mapping[str, str | None] = MappingProxyType({}),
        more: Sequence[str] = (),
    ) -> None:
        self.environment = env.python_child(changes)
        self.import_seconds = 0.0
        self._problem: str | None = None if sys.platform == "linux" else f"{sys.platform} has no safe fork"
        if self._problem is not None:
            return
        self._connection, other = socket.socketpair()
        with other:
            command = [*env.python_command(__name__), module, str(other.fileno()), *imports, _MORE, *more]
            self._process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                # not for Ctrl-C: its starter ends it
                process_group=0,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        if sys.platform == "linux":
            self._connection.close()
            self._process.kill()
            self._process.wait()

    @property
    def problem(self) -> str:
        """Why it cannot fork children, or an empty string; waits until it has imported everything."""
        if self._problem is None:
            line = b""
            with contextlib.suppress(OSError):
                while not line.endswith(b"\n") and (more := self._connection.recv(4096)):
                    line += more
            if not line.endswith(b"\n"):
                line = b"0 the server ended while it imported"
            seconds, _, self._problem = line.decode().strip("\n").partition(" ")
            self.import_seconds = float(seconds)
        return self._problem

    def start(self, arguments: Sequence[str], log: IO[bytes], passed: Sequence[int] = ()) -> Forked:
        """Fork a child, in this process's folder and with its `AT_USE`.

        Args:
            arguments: of its `main`.
            log: its standard error.
            passed: file descriptors of this process; the child has their numbers there behind `arguments`.

        Raises:
            EnvironmentProblem: the server cannot fork, or has ended; or this process has no folder, or can make no
                temporary file or pipe.
        """
        if self.problem:
            raise EnvironmentProblem(f"no child can be forked: {self.problem}")
        with contextlib.ExitStack() as stack:
            try:
                told = [f"{name}={value}" for name, value in env.current().items() if name in AT_USE]
                request = stack.enter_context(tempfile.TemporaryFile())
                # an empty part ends the variables
                request.write(os.fsencode("\0".join([os.getcwd(), *told, "", *arguments])))
                request.flush()
                ended, theirs = os.pipe()
            except OSError as error:
                raise EnvironmentProblem(f"no child can be forked: {error}") from error
            # the reading end stays open for a child alone
            close = stack.enter_context(contextlib.ExitStack())
            close.callback(os.close, ended)
            stack.callback(os.close, theirs)
            pid = 0
            with contextlib.suppress(OSError):
                socket.send_fds(self._connection, [b"f"], [request.fileno(), log.fileno(), theirs, *passed])
                pid = int(self._connection.recv(16) or 0)
            if not pid:
                raise EnvironmentProblem("no child can be forked: the server has ended")
            close.pop_all()
            return Forked(pid, ended)


def main() -> int:
    """Import, say whether children can be forked, and fork them until the starter closes the connection."""
    begin = time.perf_counter()
    _, module, number, *names = sys.argv
    imports, more = names[: names.index(_MORE)], names[names.index(_MORE) + 1 :]
    connection = socket.socket(fileno=int(number))
    connection.set_inheritable(False)
    before = env.current().get(_ASKS_NVML)
    env.set_value(_ASKS_NVML, "1")
    _import(imports)
    runner = importlib.import_module(module)
    seconds = time.perf_counter() - begin
    _import(more)
    _set({_ASKS_NVML: before})
    # what is there now is no garbage of a child: its collector leaves these pages shared (8 children on two cores: 2 s)
    gc.collect()
    gc.freeze()
    connection.sendall(f"{seconds:.3f} {_why_not()}\n".encode())
    _serve(connection, runner)
    return 0


def _import(names: Sequence[str]) -> None:
    for name in names:
        # whatever it raises, a child that needs it raises too, and says so
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _why_not() -> str:
    """Why a fork of this process would not be as a new interpreter, or an empty string."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"its imports start threads: {', '.join(others)}"
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(_GPU_FILES) and not (path.startswith(_GPU_FILES[0]) and _cuda_is_not_begun()):
                return f"its imports open {path}"
    return ""


def _cuda_is_not_begun() -> bool:
    """Whether this process has not initialised CUDA, by its driver's own answer."""
    try:
        # only one that is loaded already
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return True
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _NOT_INITIALISED)


def _serve(connection: socket.socket, runner: Any) -> None:
    """Fork children, and tell the starter of each when it has ended."""
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    ends: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([connection, awake], [], [])
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                awake.recv(4096)
            _tell(ends)
        if connection in ready:
            data, received, _, _ = socket.recv_fds(connection, 1, 16)
            if not data:
                break
            request, log, ended, *passed = received
            parent, pid = os.getpid(), _fork()
            if pid == 0:
                for own in (connection, awake, wake):
                    own.close()
                for other in ends.values():
                    os.close(other)
                _become(runner, parent, request, log, ended, passed)
            with contextlib.suppress(OSError):
                # the child does the same: whoever is first
                os.setpgid(pid, pid)
            ends[pid] = ended
            for descriptor in (request, log, *passed):
                os.close(descriptor)
            connection.sendall(str(pid).encode())
    for pid in ends:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads of BLAS libraries too
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _tell(ends: dict[int, int]) -> None:
    """Write the exit codes of children that have ended."""
    for pid in list(ends):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended = ends.pop(pid)
            with contextlib.suppress(OSError):
                os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(ended)


def _become(runner: Any, parent: int, request: int, log: int, ended: int, passed: Sequence[int]) -> NoReturn:
    """Run the child, in the forked process, to its end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with(parent)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        os.close(ended)
        os.dup2(log, 2)
        os.close(log)
        with os.fdopen(request, "rb") as file:
            file.seek(0)
            folder, *rows = os.fsdecode(file.read()).split("\0")
        end = rows.index("")
        variables, arguments = dict(row.split("=", 1) for row in rows[:end]), rows[end + 1 :]
        _set({name: variables.get(name) for name in AT_USE})
        os.chdir(folder)
        _be_new(folder)
        sys.argv = [runner.__name__, *arguments, *map(str, passed)]
        code = runner.main()
    except BaseException as error:
        # as an interpreter ends
        code = _exit_code(error)
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _exit_code(error: BaseException) -> int:
    """The exit code for what a program raised, which is said on standard error as an interpreter says it."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _set(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process, or unset them where None."""
    for name, value in variables.items():
        if value is None:
            env.unset(name)
        else:
            env.set_value(name, value)


def _be_new(folder: str) -> None:
    """Set what each interpreter has of its own: the first place of imports, files there now, numpy's random state."""
    if not sys.flags.safe_path:
        # `python -m` puts the folder that it was started in there
        sys.path[0] = folder
    importlib.invalidate_caches()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    sys.exit(main())

"""A workload in memory as a file, from which child processes of the same run load a copy.

The file is a pickle, which can run any code when it is read. So only the process that a run starts reads one, only from
a folder that its user alone can write to, and the folder is gone when the run ends. Nothing else takes a pickle.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wavecrest.errors import WorkloadError
from wavecrest.measure.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "wavecrest-copy-"
MODEL, PATHS = "workload.pt", "paths.txt"
# larger models are not copied: every child would read them again from a disk
MOST_BYTES = 8 << 30


class Source(NamedTuple):
    """Where a child process gets a workload from: a spec for `workload.load`, or a folder with a copy."""

    spec: str
    copied: bool


def source(workload: Workload) -> Source:
    """The workload's spec; of a workload in memory a copy, written at the first call and kept until `discard`.

    Raises:
        WorkloadError: it is in memory and cannot be copied; the message says why and what to do.
    """
    if workload.spec is not None:
        return Source(workload.spec, False)
    if workload.copied is None:
        begin = time.perf_counter()
        workload.copied = _write(workload)
        # a child reads about as long as this wrote
        workload.load_seconds = time.perf_counter() - begin
    return Source(str(workload.copied), True)


def problem(workload: Workload) -> str:
    """Why a workload in memory cannot be copied, as far as that shows before it is tried; or an empty string."""
    if workload.spec is not None:
        return ""
    size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(workload))
    if size > MOST_BYTES:
        return f"its weights and inputs take {size / 2**30:.1f} GiB, and up to {MOST_BYTES >> 30} GiB are copied"
    for value in (*map(type, workload.model.modules()), workload.reset):
        if isinstance(value, type) or callable(value):
            found = _unimportable(value)
            if found:
                return found
    return ""


def discard(workload: Workload) -> None:
    """Remove the copy, if there is one."""
    if workload.copied is not None:
        shutil.rmtree(workload.copied, ignore_errors=True)
        workload.copied = None


def load(folder: Path, device: str) -> Workload:
    """Read a copy that the process before this one has written.

    Raises:
        WorkloadError: another user could have written it, or a class in it cannot be imported here.
    """
    import torch

    for path in (folder, folder / MODEL, folder / PATHS):
        _check_private(path)
    # where the parent finds modules, this process must too
    sys.path += [path for path in (folder / PATHS).read_text(encoding="utf-8").splitlines() if path not in sys.path]
    begin = time.perf_counter()
    try:
        model, buckets, reset, name = torch.load(folder / MODEL, map_location=device, weights_only=False)
    except Exception as error:
        raise WorkloadError(f"the copy of the model cannot be read ({type(error).__name__}: {error})") from error
    loaded = Workload(model, buckets, reset=reset, name=name)
    loaded.load_seconds = time.perf_counter() - begin
    return loaded


def _check_private(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise WorkloadError(f"{path} is not private to this user, so it is not read: a copy of a model can hold code")


def _write(workload: Workload) -> Path:
    import torch

    found = problem(workload)
    if found:
        raise WorkloadError(found)
    _sweep(Path(tempfile.gettempdir()))
    # readable by its owner alone
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        for name in (MODEL, PATHS):
            os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        (folder / PATHS).write_text("\n".join(map(os.path.abspath, sys.path)), encoding="utf-8")
        with (folder / MODEL).open("wb") as file:
            torch.save((workload.model, workload.buckets, workload.reset, workload.name), file)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        first = (str(error).strip().splitlines() or ["(no message)"])[0]
        raise WorkloadError(f"it cannot be written for another process ({type(error).__name__}: {first})") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _sweep(temporary: Path) -> None:
    """Take away the copies of this user's processes that were killed."""
    for folder in temporary.glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        with suppress(OSError):
            if owner.isdecimal() and folder.lstat().st_uid == os.geteuid() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _tensors(workload: Workload) -> Iterator[Tensor]:
    yield from workload.model.parameters()
    yield from workload.model.buffers()
    for inputs in workload.buckets.values():
        yield from (tensor for _, tensor in inputs.tensors())


def _unimportable(value: type | Callable[..., Any]) -> str:
    """Why another process cannot import a class or function by its name; or an empty string."""
    name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    if module == "__main__":
        return f"{name} is defined in the program that runs, which other processes do not import; move it to a module"
    if "<locals>" in name or "<lambda>" in name:
        return f"{name} is defined inside of a function, where other processes do not find it; move it to its module"
    return ""

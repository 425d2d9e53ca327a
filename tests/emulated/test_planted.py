"""The watch finds bugs that are planted in machine code, and nothing in the code as it was compiled."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.emulated.conftest import ARCHS

pytest.importorskip("triton", reason="kernels are compiled by triton")

Child = Callable[..., "subprocess.CompletedProcess[str]"]

# bug (tests/emulated/planted.py) -> parts of what is said of it
SAID = {
    "none": (),
    "none, rows apart": (),
    "wait for a scalar load": ("missing wait: s", "is read at softmax+", "its load at softmax+", "s_load"),
    "wait for a buffer load": ("missing wait: v", "before an s_waitcnt covers its load", "buffer_load_ushort"),
    "wait for an LDS read": ("missing wait: v", "before an s_waitcnt covers its load", "ds_read_b32"),
    "wait before a barrier": ("missing wait: byte", "of LDS", "had not waited for its own access", "ds_write_b32"),
    "barrier": ("missing barrier: byte", "no s_barrier between", "ds_write_b32", "ds_read_b32"),
    "second barrier": ("missing barrier: byte", "no s_barrier between", "ds_write_b32", "ds_read_b32"),
    "LDS address one word on": ("out-of-bounds access at softmax+", "byte 16 of LDS, of which it has 16"),
    "LDS write": ("uninitialised value stored", "memory that nothing wrote, read at softmax+", "ds_read_b32"),
    "store one element on": ("out-of-bounds access at softmax+", "0 bytes past the end of argument out_ptr"),
    "store one element on, rows apart": (
        "out-of-bounds access at softmax+",
        "between the elements of argument out_ptr",
    ),
    "values of the input": ("uninitialised value stored", "memory that nothing wrote", "buffer_load_ushort"),
    "register": ("uninitialised value stored", "it comes from v", "which nothing wrote"),
}


@pytest.mark.every_emulated
@pytest.mark.parametrize("arch", ARCHS)
def test_planted_bugs_are_found(run_child: Child, arch: str) -> None:
    done = run_child("tests.emulated.planted", arch)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.keys() == SAID.keys()
    for bug, parts in SAID.items():
        assert bool(found[bug]) == bool(parts), (bug, found[bug])
        assert all(part in found[bug] for part in parts), (bug, found[bug])


@pytest.mark.every_emulated
@pytest.mark.parametrize("arch", ARCHS)
def test_no_wait_and_no_barrier_can_be_taken_out(run_child: Child, arch: str) -> None:
    done = run_child("tests.emulated.planted", arch, "--each")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) > 10
    assert [place for place, text in found.items() if "missing" not in text] == []

"""Memory that is free: of the machine, and of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

# Linux' own account of its memory
_MEMINFO = Path("/proc/meminfo")
# bytes where a system does not tell
_UNKNOWN = 1 << 32


def free_host_memory() -> int:
    """Bytes that new processes can have.

    Files that Linux keeps in memory count as free ("MemAvailable"): it gives them up. What no file takes is little on a
    machine that has read its models once. Where there is no such line, that is all that counts.
    """
    try:
        for line in _MEMINFO.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _UNKNOWN

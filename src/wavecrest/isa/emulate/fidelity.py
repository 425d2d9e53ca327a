"""How close to the hardware each instruction of a run was: exact, approximate and why, or without effect here.

An instruction that cannot run stops the run, so a run that ended has none; `Stats.unsupported` names those in code that
was not reached.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from wavecrest.isa.emulate import actions

TRANSCENDENTAL = "transcendental: rounded as the CPU's C library does, the hardware may be one step off"
SUM_ORDER = "matrix and dot sums: float products are added in another order than the hardware's"
ATOMIC_ORDER = "float atomics: added in the order of this run"
CLOCK = "clocks and places: no such clock or compute unit here"

# the first that fits
_APPROXIMATE = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"V_(?:EXP|LOG|RCP|RCP_IFLAG|RSQ|SQRT|SIN|COS)_F(?:16|32|64)", TRANSCENDENTAL),
        (r"V_(?:MFMA|SMFMAC|WMMA|SWMMAC)_(?!I32)", SUM_ORDER),
        (r"V_DOT2C?_(?:F32|F16|BF16)", SUM_ORDER),
        (r"(?:BUFFER|GLOBAL|FLAT)_ATOMIC_(?:ADD_F|PK_ADD_)|DS_(?:PK_)?ADD_(?:RTN_)?B?F", ATOMIC_ORDER),
        (r"S_(?:MEMTIME|MEMREALTIME|GETREG|SENDMSG_RTN)", CLOCK),
    )
)


class Fidelity(NamedTuple):
    """Wave instructions of a run: how many were exact, approximate by reason, and without effect here."""

    exact: int
    approximate: dict[str, int]
    no_effect: int


def reason(opcode: str) -> str | None:
    """Why an opcode is approximate here, or None."""
    return next((text for pattern, text in _APPROXIMATE if pattern.match(opcode)), None)


def of(ops: Mapping[str, int]) -> Fidelity:
    """The fidelity of a run, from how often each opcode ran."""
    exact, no_effect, approximate = 0, 0, Counter[str]()
    for opcode, count in ops.items():
        why = reason(opcode)
        if why is not None:
            approximate[why] += count
        elif actions.NO_EFFECT.match(opcode):
            no_effect += count
        else:
            exact += count
    return Fidelity(exact, dict(approximate), no_effect)

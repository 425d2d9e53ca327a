"""Names of backends that older rows, databases, plans and records still have, and what they are called now."""

from __future__ import annotations

RENAMED = {
    # before 2026-11-24
    "triton_multiply": "triton_gemv",
    "torch_and_mul": "gemm_then_act",
}


def current_backend(name: str) -> str:
    """The name of today for a backend."""
    return RENAMED.get(name, name)

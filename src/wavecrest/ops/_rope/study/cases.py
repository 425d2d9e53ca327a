"""Cases of rope: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import Arch
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.config import configured
from wavecrest.ops._rope.launch import launch
from wavecrest.ops.common.launcher import Launch


def inputs(M: int, N: int, dtype: torch.dtype, device: str) -> RopeCall:
    """M tokens of max(1, N // 128) heads of min(N, 128) columns (at least 2, and even), and their tables."""
    head_dim = max(2, min(N, 128) // 2 * 2)
    return _example(M, max(1, N // 128), head_dim, head_dim, dtype, device)


def _example(
    tokens: int, heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, device: str, style: str = "neox"
) -> RopeCall:
    x = torch.randn(tokens, heads, head_dim, dtype=dtype, device=device)
    angles = torch.randn(tokens, rotary_dim // 2, dtype=torch.float32, device=device)
    return RopeCall(x, angles.cos(), angles.sin(), style=style)


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], RopeCall]]:
    """Decode (one token a sequence, positions given) and prefill, 32 heads of 128 columns but where a name says so."""

    def decode(batch: int) -> RopeCall:
        x = _example(batch, 32, 128, 128, torch.bfloat16, device).x
        table = _example(4096, 1, 128, 128, torch.float32, device)
        return table._replace(x=x.unsqueeze(1), positions=torch.randint(4096, (batch, 1), device=device))

    def prefill(tokens: int, heads: int, head_dim: int, rotary_dim: int, style: str, dtype: torch.dtype) -> RopeCall:
        return _example(tokens, heads, head_dim, rotary_dim, dtype, device, style)

    if suite == "quick":
        return {
            "decode 4": partial(decode, 4),
            "prefill 64": partial(prefill, 64, 4, 64, 64, "neox", torch.float32),
            "prefill 64 gptj": partial(prefill, 64, 4, 64, 64, "gptj", torch.float32),
        }
    bf16 = torch.bfloat16
    return {
        **{f"decode {batch}": partial(decode, batch) for batch in (1, 16, 64)},
        "prefill 512": partial(prefill, 512, 32, 128, 128, "neox", bf16),
        "prefill 4096": partial(prefill, 4096, 32, 128, 128, "neox", bf16),
        "prefill 16384": partial(prefill, 16384, 32, 128, 128, "neox", bf16),
        "prefill 16384 gptj": partial(prefill, 16384, 32, 128, 128, "gptj", bf16),
        "prefill 16384 fp32": partial(prefill, 16384, 32, 128, 128, "neox", torch.float32),
        "prefill 16384 heads=8": partial(prefill, 16384, 8, 128, 128, "neox", bf16),
        "prefill 16384 columns=80 rotated=32": partial(prefill, 16384, 32, 80, 32, "neox", bf16),
        "prefill 16384 heads=64 columns=64": partial(prefill, 16384, 64, 64, 64, "neox", bf16),
    }


def call_of_key(parts: Mapping[str, Cell], device: str) -> RopeCall | None:
    """A call with the key of these parts, over one dimension of tokens; None where the parts name no dtype or size."""
    tokens, heads, head_dim, rotary_dim = (int(parts[name] or 0) for name in ("tokens", "heads", "columns", "rotated"))
    dtype, table, positions = (getattr(torch, str(parts[name]), None) for name in ("dtype", "table", "positions"))
    if not isinstance(dtype, torch.dtype) or not isinstance(table, torch.dtype) or min(tokens, heads, head_dim) < 1:
        return None
    call = _example(tokens, heads, head_dim, rotary_dim, dtype, device, str(parts["style"]))
    call = call._replace(cos=call.cos.to(table), sin=call.sin.to(table))
    if positions is None:
        return call
    return call._replace(positions=torch.zeros(tokens, dtype=positions, device=device))


def emulate_cases(arch: str) -> dict[str, Callable[[], RopeCall]]:
    """Interleaved pairs, positions, and columns that are not rotated."""
    call = _example(5, 3, 40, 32, torch.bfloat16, "cpu")
    positions = torch.tensor([4, 0, 2, 2, 1])
    return {
        "gptj": lambda: call._replace(style="gptj"),
        "positions": lambda: call._replace(positions=positions),
        "gptj positions": lambda: call._replace(positions=positions.int(), style="gptj"),
    }


# name -> tokens, heads, head_dim, rotary_dim, style, whether with positions: the common prefill and decode; partly
# rotated; 80 columns (no power of two); tokens without a common stride
_COMPILED: dict[str, tuple[tuple[int, ...], int, int, int, str, bool]] = {
    "prefill neox": ((4096,), 32, 128, 128, "neox", False),
    "prefill gptj": ((4096,), 32, 128, 128, "gptj", False),
    "decode neox": ((16,), 32, 128, 128, "neox", True),
    "decode gptj": ((16,), 8, 64, 64, "gptj", True),
    "partial neox": ((4096,), 32, 80, 32, "neox", True),
    "partial gptj": ((4096,), 32, 128, 64, "gptj", True),
    "80 columns": ((4096,), 16, 80, 80, "neox", False),
    "batched": ((4, 1024), 8, 128, 128, "neox", False),
}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    cases = {}
    for name, (tokens, heads, head_dim, rotary_dim, style, positioned) in _COMPILED.items():
        x = torch.empty(*tokens, heads, head_dim, dtype=torch.bfloat16, device="meta")
        table = torch.empty(4096, rotary_dim // 2, dtype=torch.float32, device="meta")
        positions = torch.empty(tokens, dtype=torch.int64, device="meta") if positioned else None
        call = RopeCall(x, table, table, positions, style)
        made = config or configured(call.num_tokens, heads, head_dim, rotary_dim, "bfloat16", arch.wave_size)
        cases[name] = launch(call, x, made)
    return cases

"""Shared by the tests of the sLSTM: calls with poison, and an oracle in float64 that sums weighted tokens.

Not a test file: `tests/ops/test_slstm_sequence.py` and `test_slstm_step.py` have the cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.slstm.call import SlstmCall, SlstmStepCall
from wavecrest.ops.slstm.sequence import launch_cpu
from wavecrest.ops.slstm.sequence.backend import op as sequence
from wavecrest.ops.slstm.step.backend import op as step

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAN = float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# C code for a CPU, where it can be compiled
C_CODE = ["c"] if DEVICE == "cpu" and launch_cpu.problem() is None else []
OPS: dict[str, Op[Any, Any]] = {one.name: one for one in (sequence, step)}
# how far h in [-1, 1] and states relative to max(1, |state|) may be off: float32 exponentials and sums over a few
# tokens, and on NVIDIA products of three terms of tf32; in 16 bits h is rounded before it is multiplied and once more
# when it is stored
LIMITS = {F32: 1e-5 if DEVICE == "cpu" else 4e-5, F16: 2.0**-9, BF16: 2.0**-6, F64: 1e-12}


def case(
    batch: int = 2, tokens: int = 6, heads: int = 2, dim: int = 16, dtype: torch.dtype = F32, scale: float = 0.5,
    gates: float = 1.0, bias: bool = True, first: bool = False, resets: float = 0.0, lens: list[int] | None = None,
    starts: list[int] | None = None, seed: int = 0, **options: Any,
) -> SlstmCall:  # fmt: skip
    """A call on DEVICE with the last states. `scale`: the norm of recurrent weights; `gates`: deviation of inputs.

    What is of no sequence is NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, size: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=generator) * size + mean

    x = made(batch, tokens, 4, heads, dim, size=gates, mean=0.25)
    x[:, :, 1] += 1.5
    r = made(4, heads, dim, dim, size=scale * dim**-0.5)
    options.setdefault("return_last_states", True)
    if bias:
        options["bias"] = made(4, heads, dim, size=0.5).to(DEVICE)
    if first:
        n = made(batch, heads, dim).abs() + 0.5
        # an element without history, whose m must not matter
        n[:, :, 0] = 0.0
        c = n * made(batch, heads, dim).tanh()
        states = made(batch, heads, dim).tanh(), c, n, made(batch, heads, dim, size=2.0)
        kept = F64 if dtype == F64 else F32
        options |= {f"{name}_initial": one.to(DEVICE, kept) for name, one in zip("hcnm", states, strict=True)}
    if resets:
        options["resets"] = (torch.rand(batch, tokens, generator=generator) < resets).to(DEVICE)
    for name, values in (("seq_lens", lens), ("seq_starts", starts)):
        if values is not None:
            options[name] = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    call = SlstmCall(x.to(DEVICE, dtype), r.to(DEVICE, dtype), **options)
    for row, (begin, end) in enumerate(spans(call)):
        call.x[row, :begin] = NAN
        call.x[row, end:] = NAN
    return call


def spans(call: SlstmCall) -> list[tuple[int, int]]:
    """(first token, token behind the last) of each row."""
    found = []
    for row in range(call.batch):
        begin = 0 if call.seq_starts is None else min(call.tokens, max(0, int(call.seq_starts[row])))
        end = call.tokens if call.seq_lens is None else begin + max(0, int(call.seq_lens[row]))
        found.append((begin, max(begin, min(end, call.tokens))))
    return found


def exact(call: SlstmCall) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h and the last states in float64, by rows and heads: every token's z with the weight that it has by then.

    The weight of token j at t is e^(i_j + Σ lf of the tokens after j), that of the first state e^(m + Σ lf); m is the
    largest exponent. Nothing of the ops is in it, and nothing is carried but h, the z and their exponents.
    """
    batch, tokens, heads, dim = call.batch, call.tokens, call.heads, call.head_dim
    x, r = call.x.detach().cpu().double(), call.r.detach().cpu().double()
    bias = torch.zeros(4, heads, dim, dtype=F64) if call.bias is None else call.bias.detach().cpu().double()
    y = torch.zeros(batch, tokens, heads, dim, dtype=F64)
    states = [torch.zeros(batch, heads, dim, dtype=F64) for _ in range(4)]
    for row, (begin, end) in enumerate(spans(call)):
        for head in range(heads):
            h, c, n, m = (
                torch.zeros(dim, dtype=F64) if one is None else one[row, head].detach().cpu().double()
                for one in call.initial
            )
            # exponents, what is added to c, what is added to n
            terms = [(torch.where(n == 0, float("-inf"), m), c, n)]
            for t in range(begin, end):
                if call.resets is not None and bool(call.resets[row, t]):
                    h, terms = torch.zeros_like(h), []
                a = [
                    (x[row, t, g, head].clamp(min=-1e5) if g < 2 else x[row, t, g, head])
                    + bias[g, head]
                    + torch.einsum("j,jk->k", h, r[g, head])
                    for g in range(4)
                ]
                lf = a[1]
                if call.forget_gate == "sigmoid":
                    lf = torch.where(lf < 0, lf - torch.log1p(torch.exp(lf)), -torch.log1p(torch.exp(-lf)))
                z = torch.tanh(a[2])
                terms = [(power + lf, one, other) for power, one, other in terms] + [(a[0], z, torch.ones_like(z))]
                m = torch.stack([power for power, _, _ in terms]).amax(0)
                c = sum((torch.exp(power - m) * one for power, one, _ in terms), torch.zeros_like(z))
                n = sum((torch.exp(power - m) * other for power, _, other in terms), torch.zeros_like(z))
                h = c / n / (1 + torch.exp(-a[3]))
                y[row, t, head] = h
            for kept, one in zip(states, (h, c, n, m), strict=True):
                kept[row, head] = one
    return y, tuple(states)


def assert_right(call: SlstmCall, got: Any, want: tuple[Tensor, tuple[Tensor, ...]] | None = None) -> None:
    """h and the states within LIMITS of the oracle, and of the right shapes and dtypes."""
    y, states = want or exact(call)
    assert got[0].dtype == call.x.dtype and got[0].is_contiguous()
    assert all(one.dtype == call.wide for one in got[1:])
    for name, one, right in zip(("y", *"hcnm"), got, (y, *states), strict=True):
        assert one.shape == right.shape
        off = (one.detach().cpu().double() - right).abs() / right.abs().clamp(min=1.0)
        assert not bool(off.isnan().any()), f"{name}: {int(off.isnan().sum())} elements are NaN, or were not written"
        worst = float(off.max()) if off.numel() else 0.0
        assert worst <= LIMITS[call.x.dtype], f"{name} is off by {worst:.3g}, {LIMITS[call.x.dtype]:.3g} is allowed"


def run(op: str, call: SlstmCall | SlstmStepCall, config: Config | None = None, backend: str = "triton") -> Any:
    """One backend by name."""
    return OPS[op].run(backend, call, config=config)


def part_of(call: SlstmCall, begin: int, end: int, states: tuple[Tensor, ...] | None = None) -> SlstmCall:
    """Tokens begin to end of whole rows, with these states before the first."""
    found = call._replace(
        x=call.x[:, begin:end], resets=None if call.resets is None else call.resets[:, begin:end].contiguous()
    )
    if states is None:
        return found
    return found._replace(**{f"{name}_initial": one for name, one in zip("hcnm", states, strict=True)})


def row_of(call: SlstmCall, row: int) -> SlstmCall:
    """One row of a call by itself."""
    apart = {
        name: value[row : row + 1]
        for name, value in call._asdict().items()
        if isinstance(value, Tensor) and name not in ("r", "bias")
    }
    return call._replace(**apart)

"""Calls of the mLSTM ops: their arguments, what follows from them, and their checks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INPUT_GATES = ("exp", "sigmoid")
# tokens and elements of a head are counted in 32 bits
MAX_LENGTH = 1 << 29
CHUNK_UNIT = 16
STATE_DTYPES = (torch.float32, torch.float16)
BFLOAT16_STATE = (
    "a bfloat16 m loses decays of 0.0025 beside |m| of about 5 (after 1,024 steps at forget biases of 5 and 6 results "
    "were off by more than 100 % in a simulation), a bfloat16 c costs about 2 %; float16 c with float32 n and m "
    "costs nothing that was measurable"
)


class MlstmCall(NamedTuple):
    """A call of mlstm_chunkwise or mlstm_sequence; shapes and dtypes are those of their arguments.

    Properties are of checked calls. Each *sequence* has its own state: it is a row of the batch, or with
    `cu_seqlens` one of the packed sequences.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    f: Tensor
    c_initial: Tensor | None = None
    n_initial: Tensor | None = None
    m_initial: Tensor | None = None
    return_last_states: bool = False
    eps: float = 1e-6
    chunk_size: int | None = None
    input_gate: str = "exp"
    normalize: bool = True
    gate_soft_cap: float = 0.0
    cu_seqlens: Tensor | None = None
    seq_starts: Tensor | None = None
    seq_lens: Tensor | None = None
    resets: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    output_gate: Tensor | None = None
    state_dtype: torch.dtype = torch.float32
    batch_invariant: bool = False

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Heads."""
        return self.q.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return self.q.shape[2]

    @property
    def dk(self) -> int:
        """The head_dim of q and k."""
        return self.q.shape[3]

    @property
    def dv(self) -> int:
        """The head_dim of v and h."""
        return self.v.shape[3]

    @property
    def sequences(self) -> int:
        """Sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def form(self) -> str:
        """Where sequences lie: "whole" rows, "padded" or "packed"."""
        if self.cu_seqlens is not None:
            return "packed"
        return "whole" if self.seq_starts is None and self.seq_lens is None else "padded"

    @property
    def exponential(self) -> bool:
        """True if the input gate is an exponential, so that there is a stabiliser m."""
        return self.input_gate == "exp"

    @property
    def capped(self) -> int:
        """1 where gates are capped, else 0; made by a branch, as torch.compile may not know the number."""
        return 1 if self.gate_soft_cap > 0 else 0

    @property
    def wide(self) -> torch.dtype:
        """The dtype of n and m, and of all arithmetic of gates."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def c_dtype(self) -> torch.dtype:
        """The dtype of the last state c."""
        return torch.float64 if self.q.dtype == torch.float64 else self.state_dtype

    @property
    def initial(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The first states."""
        return self.c_initial, self.n_initial, self.m_initial

    @property
    def floats(self) -> tuple[Tensor | None, ...]:
        """The float tensors: those that may need gradients."""
        return (*self[:8], self.norm_weight, self.output_gate)


class MlstmStepCall(NamedTuple):
    """A call of mlstm_step; shapes and dtypes are those of its arguments. Properties are of checked calls."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    f: Tensor
    c: Tensor
    n: Tensor
    m: Tensor | None
    eps: float = 1e-6
    input_gate: str = "exp"
    normalize: bool = True
    gate_soft_cap: float = 0.0
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    output_gate: Tensor | None = None
    in_place: bool = False
    state_dtype: torch.dtype | None = None
    arrivals: Tensor | None = None

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Heads."""
        return self.q.shape[1]

    @property
    def dk(self) -> int:
        """The head_dim of q and k."""
        return self.q.shape[2]

    @property
    def dv(self) -> int:
        """The head_dim of v and h."""
        return self.v.shape[2]

    @property
    def c_dtype(self) -> torch.dtype:
        """The dtype of the new state c."""
        return self.c.dtype if self.state_dtype is None or self.c.dtype == torch.float64 else self.state_dtype

    @property
    def floats(self) -> tuple[Tensor | None, ...]:
        """The float tensors: those that may need gradients."""
        return (*self[:8], self.norm_weight, self.output_gate)

    def sequence(self) -> MlstmCall:
        """The same call as a sequence of one token; its states are views."""
        # by methods: PyTorch for CPUs does not index a tensor that claims to be on a GPU
        gates = (self.i, self.f) if self.i.ndim == 3 else (self.i.unsqueeze(-1), self.f.unsqueeze(-1))
        gate = None if self.output_gate is None else self.output_gate.unsqueeze(2)
        q, k, v = (one.unsqueeze(2) for one in (self.q, self.k, self.v))
        kept = self.c_dtype if self.c_dtype in STATE_DTYPES else torch.float32
        return MlstmCall(
            q, k, v, *gates, self.c, self.n, self.m, True, self.eps, None, self.input_gate, self.normalize,
            self.gate_soft_cap, norm_weight=self.norm_weight, norm_eps=self.norm_eps, output_gate=gate,
            state_dtype=kept,
        )  # fmt: skip


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


class _Checks:
    """Raises InvalidArgument in an op's name."""

    def __init__(self, op: str, q: Any) -> None:
        self.op, self.q = op, q

    def fail(self, text: str) -> InvalidArgument:
        return InvalidArgument(f"{self.op}: {text}")

    def check_q(self, form: str) -> None:
        q = self.q
        if not isinstance(q, Tensor) or q.ndim != form.count(",") + 1 or q.dtype not in FLOATS:
            raise self.fail(f"q must be float32, float16, bfloat16 or float64 [{form}], got {_describe(q)}")
        if q.shape[1] == 0 or q.shape[-1] == 0:
            raise self.fail(f"needs at least one head and a head_dim of at least 1, got {_describe(q)}")
        if max(q.shape) > MAX_LENGTH:
            raise self.fail(f"takes sizes up to {MAX_LENGTH}, got {_describe(q)}")

    def like_q(self, name: str, value: Any, head_dim: int | None) -> None:
        q = self.q
        form = f"{list(q.shape[:-1])} with {'its own' if head_dim is None else head_dim} as head_dim"
        fits = isinstance(value, Tensor) and value.shape[:-1] == q.shape[:-1] and value.ndim == q.ndim
        if not fits or value.dtype != q.dtype or value.device != q.device:
            raise self.fail(f"{name} must be {q.dtype} {form} on {q.device} as q is, got {_describe(value)}")
        if value.shape[-1] == 0 or (head_dim is not None and value.shape[-1] != head_dim):
            raise self.fail(f"{name} must have a head_dim of {head_dim or 'at least 1'}, got {_describe(value)}")

    def floating(self, name: str, value: Any, *shapes: tuple[int, ...]) -> None:
        """A float tensor of any dtype, of one of these shapes."""
        fits = isinstance(value, Tensor) and value.dtype in FLOATS and value.device == self.q.device
        if not fits or tuple(value.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.fail(
                f"{name} must be float32, float16, bfloat16 or float64 {wanted} on {self.q.device}, got "
                f"{_describe(value)}"
            )

    def integers(self, name: str, value: Any, size: int | None, dtype: torch.dtype = torch.int32) -> None:
        fits = isinstance(value, Tensor) and value.dtype == dtype and value.ndim == 1 and value.device == self.q.device
        if not fits or (value.shape[0] < 2 if size is None else value.shape[0] != size):
            form = "[sequences + 1], at least 2" if size is None else f"[{size}]"
            raise self.fail(f"{name} must be int32 {form} on {self.q.device}, got {_describe(value)}")

    def flag(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise self.fail(f"{name} must be True or False, got {value!r}")

    def number(self, name: str, value: Any) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.fail(f"{name} must be a finite number of at least 0, got {value!r}")

    def gates(self, call: MlstmCall | MlstmStepCall) -> None:
        if call.input_gate not in INPUT_GATES:
            raise self.fail(f"input_gate is exp or sigmoid, not {call.input_gate!r}")
        self.flag("normalize", call.normalize)
        if not call.normalize and call.input_gate == "exp":
            raise self.fail(
                "normalize=False goes with input_gate='sigmoid': exponential gates have no bound without a normaliser"
            )
        for name in ("eps", "gate_soft_cap", "norm_eps"):
            self.number(name, getattr(call, name))

    def epilogue(self, call: MlstmCall | MlstmStepCall, shape: tuple[int, ...]) -> None:
        if call.norm_weight is not None:
            self.floating("norm_weight", call.norm_weight, (call.heads * call.dv,))
        if call.output_gate is not None:
            if call.norm_weight is None:
                raise self.fail("output_gate multiplies the normalised h: pass norm_weight too")
            self.floating("output_gate", call.output_gate, shape)

    def states(
        self, names: tuple[str, ...], values: tuple[Any, ...], sequences: int, dv: int, exponential: bool
    ) -> None:
        """c, n and m of the sequences; sigmoid gates have no m."""
        heads, dk = self.q.shape[1], self.q.shape[-1]
        if not exponential and values[2] is not None:
            raise self.fail(f"{names[2]} goes with input_gate='exp': sigmoid gates have no stabiliser; pass None")
        single = (torch.float32, torch.float64) if self.q.dtype == torch.float64 else (torch.float32,)
        forms: tuple[tuple[tuple[int, ...], ...], ...] = (
            ((sequences, heads, dk, dv),),
            ((sequences, heads, dk),),
            ((sequences, heads, 1), (sequences, heads)),
        )
        dtypes = ((*single, torch.float16), single, single)
        for name, value, shapes, wanted in zip(names, values, forms, dtypes, strict=True):
            if name == names[2] and not exponential:
                continue
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                raise self.fail(f"{name} must be {' or '.join(map(str, wanted))}, not bfloat16: {BFLOAT16_STATE}")
            fits = isinstance(value, Tensor) and value.dtype in wanted and value.device == self.q.device
            if not fits or tuple(value.shape) not in shapes:
                raise self.fail(
                    f"{name} must be {' or '.join(map(str, wanted))} {list(shapes[0])} on {self.q.device}, got "
                    f"{_describe(value)}"
                )

    def state_dtype(self, dtype: Any) -> None:
        if dtype not in STATE_DTYPES:
            why = f": {BFLOAT16_STATE}" if dtype == torch.bfloat16 else ""
            raise self.fail(f"state_dtype takes torch.float32 or torch.float16, not {dtype!r}{why}")


def check(op: str, call: MlstmCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid for an mLSTM over sequences."""
    checks, q = _Checks(op, call.q), call.q
    checks.check_q("B, NH, S, DK")
    checks.like_q("k", call.k, q.shape[-1])
    checks.like_q("v", call.v, None)
    for name, gate in (("i", call.i), ("f", call.f)):
        checks.floating(name, gate, tuple(q.shape[:3]))
    checks.flag("return_last_states", call.return_last_states)
    checks.flag("batch_invariant", call.batch_invariant)
    checks.gates(call)
    checks.state_dtype(call.state_dtype)
    size: Any = call.chunk_size
    if size is not None and (
        not isinstance(size, int) or isinstance(size, bool) or size % CHUNK_UNIT != 0 or not 16 <= size <= 4096
    ):
        raise checks.fail(f"chunk_size must be None or a multiple of {CHUNK_UNIT} from 16 to 4096, got {size!r}")
    _check_sequences(checks, call)
    checks.epilogue(call, tuple(call.v.shape))
    if any(one is not None for one in call.initial):
        names = ("c_initial", "n_initial", "m_initial")
        checks.states(names, call.initial, call.sequences, call.dv, call.exponential)


def _check_sequences(checks: _Checks, call: MlstmCall) -> None:
    q = call.q
    if call.cu_seqlens is not None:
        checks.integers("cu_seqlens", call.cu_seqlens, None)
        if q.shape[0] != 1:
            raise checks.fail(f"cu_seqlens packs sequences in one row: q must have B = 1, got {_describe(q)}")
        if call.seq_starts is not None or call.seq_lens is not None:
            raise checks.fail("cu_seqlens says where sequences lie: leave out seq_starts and seq_lens")
    for name, value in (("seq_starts", call.seq_starts), ("seq_lens", call.seq_lens)):
        if value is not None:
            checks.integers(name, value, q.shape[0])
    resets: Any = call.resets
    if resets is not None:
        fits = isinstance(resets, Tensor) and resets.dtype == torch.bool and resets.device == q.device
        if not fits or tuple(resets.shape) != (q.shape[0], q.shape[2]):
            raise checks.fail(f"resets must be bool {[q.shape[0], q.shape[2]]} on {q.device}, got {_describe(resets)}")


def check_step(op: str, call: MlstmStepCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid for one step of an mLSTM."""
    checks, q = _Checks(op, call.q), call.q
    checks.check_q("B, NH, DK")
    checks.like_q("k", call.k, q.shape[-1])
    checks.like_q("v", call.v, None)
    for name, gate in (("i", call.i), ("f", call.f)):
        checks.floating(name, gate, (*q.shape[:2], 1), tuple(q.shape[:2]))
    if call.i.ndim != call.f.ndim:
        raise checks.fail(f"i and f must have one shape, got {_describe(call.i)} and {_describe(call.f)}")
    checks.gates(call)
    checks.flag("in_place", call.in_place)
    checks.states(("c", "n", "m"), (call.c, call.n, call.m), q.shape[0], call.v.shape[-1], call.input_gate == "exp")
    if call.state_dtype is not None:
        checks.state_dtype(call.state_dtype)
    checks.epilogue(call, tuple(call.v.shape))
    counts: Any = call.arrivals
    if counts is not None:
        fits = isinstance(counts, Tensor) and counts.dtype == torch.int32 and counts.device == q.device
        if not fits or counts.shape != q.shape[:2] or not counts.is_contiguous():
            raise checks.fail(
                f"arrivals must be int32 {list(q.shape[:2])}, contiguous, on {q.device}, got {_describe(counts)}"
            )
    if call.in_place:
        _check_in_place(checks, call)


def _shares_memory(x: Tensor) -> bool:
    """True unless each stride is beyond all that the dimensions of smaller ones reach over."""
    walked = [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    for place, (_, stride) in enumerate(walked):
        others = walked[:place] + walked[place + 1 :]
        # compared with each other, not sorted: torch.compile has symbols for them
        if stride <= sum((size - 1) * other for size, other in others if other <= stride):
            return True
    return False


def _check_in_place(checks: _Checks, call: MlstmStepCall) -> None:
    if call.c_dtype != call.c.dtype:
        raise checks.fail(f"in_place keeps c's dtype {call.c.dtype}: leave out state_dtype={call.state_dtype}")
    for name, state in (("c", call.c), ("n", call.n), ("m", call.m)):
        if state is not None and _shares_memory(state):
            raise checks.fail(f"in_place writes to {name}, whose elements share memory (strides {state.stride()})")
    if needs_grad(*call.floats):
        raise checks.fail("in_place overwrites states that a backward would need: use in_place=False with gradients")

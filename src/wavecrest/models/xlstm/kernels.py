"""The kernel names of the official packages, and what runs for each.

A configuration written for the official package names a kernel for sequences, one for short sequences and one for
single steps. Here a name is an op with a backend: `triton…` names ask for our Triton kernel, `native…` names for
PyTorch's; "auto" leaves the choice to the dispatcher. Where the backend that a name asks for refuses a call, the
dispatcher's choice runs, with one warning that has the reason, and `fallbacks()` lists it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.dispatch.decision import Decision, Key
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import InvalidArgument
from wavecrest.ops import mlstm_parallel
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall
from wavecrest.ops.mlstm.chunkwise.backend import op as chunkwise_op
from wavecrest.ops.mlstm.sequence.backend import op as sequence_op
from wavecrest.ops.mlstm.step.backend import op as step_op

AUTO = "auto"
Result = tuple[Tensor, tuple[Tensor, Tensor, Tensor | None] | None]


class KernelFallback(UserWarning):
    """A kernel that was asked for by name does not run a call; the message has the reason and what runs."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Meaning of a kernel's name: an op, the backend asked for (None: the dispatcher's choice), and its input gate."""

    name: str
    op: str
    backend: str | None
    input_gate: str = "exp"
    # False: the official kernel of this name has no states, so this one returns none either
    state: bool = True


@dataclass(frozen=True, slots=True)
class Fallback:
    """Calls of a named kernel that another backend runs: the decision, and why."""

    name: str
    reason: str
    decision: Decision


def _table(*rows: Kernel) -> dict[str, Kernel]:
    return {row.name: row for row in rows}


_NATIVE_PARALLEL = ("native_autograd", "native_custbw", "native_stablef_autograd", "native_stablef_custbw")
KERNELS: dict[str, dict[str, Kernel]] = {
    "chunkwise": _table(
        Kernel(AUTO, "mlstm_chunkwise", None),
        Kernel("chunkwise--native_autograd", "mlstm_chunkwise", "torch"),
        Kernel("chunkwise--native_custbw", "mlstm_chunkwise", "torch"),
        Kernel("chunkwise--triton_limit_chunk", "mlstm_chunkwise", "triton"),
        Kernel("chunkwise--triton_xl_chunk", "mlstm_chunkwise", "triton"),
        Kernel("chunkwise--triton_xl_chunk_siging", "mlstm_chunkwise", "triton", "sigmoid"),
        *(Kernel(f"parallel--{name}", "mlstm_parallel", None, state=False) for name in _NATIVE_PARALLEL),
        Kernel("parallel--native_siging_autograd", "mlstm_parallel", None, "sigmoid", state=False),
        Kernel("parallel--native_siging_custbw", "mlstm_parallel", None, "sigmoid", state=False),
        # the same function over chunks: there is no Triton kernel that is quadratic in the length
        Kernel("parallel--triton_limit_headdim", "mlstm_chunkwise", "triton", state=False),
    ),
    "sequence": _table(
        Kernel(AUTO, "mlstm_sequence", None),
        Kernel("native_sequence__native", "mlstm_sequence", "torch"),
        Kernel("native_sequence__triton", "mlstm_sequence", "triton"),
        Kernel("native_sequence__triton_alternate", "mlstm_sequence", "triton"),
    ),
    "step": _table(
        Kernel(AUTO, "mlstm_step", None),
        Kernel("native", "mlstm_step", "torch"),
        Kernel("triton", "mlstm_step", "triton"),
        Kernel("triton_alternate", "mlstm_step", "triton"),
        # the first revisions of the Hugging Face files
        Kernel("triton_fused", "mlstm_step", "triton"),
    ),
}
# options of the official kernels that wavecrest's do not need: tiles, and the dtype of autocasting
UNUSED = frozenset(
    {
        "autocast_kernel_dtype", "chunk_size_inter", "chunk_size_intra", "siz_b_L_parallel", "siz_b_L_loop",
        "siz_b_DH_parallel", "siz_b_DH_loop", "num_warps_intra", "num_warps_inter", "num_stages_intra",
        "num_stages_inter", "recompute_states_in_bw",
    }
)  # fmt: skip
# looked up once: torch.compile traces calls of them
_OPS: dict[str, AnyOp] = {op.name: op for op in (chunkwise_op, sequence_op, step_op)}
_fallbacks: dict[tuple[str, Key], Fallback] = {}


def check(kind: str, name: str) -> Kernel:
    """The kernel of a name; `kind` is "chunkwise", "sequence" or "step".

    Raises:
        InvalidArgument: there is no such kernel; the message lists those there are.
    """
    try:
        return KERNELS[kind][name]
    except (KeyError, TypeError):
        raise InvalidArgument(f"no {kind} kernel {name!r}; there are {', '.join(KERNELS[kind])}") from None


def has_state(name: str) -> bool:
    """True if a chunkwise kernel takes and gives back states."""
    return check("chunkwise", name).state


def fallbacks() -> list[Fallback]:
    """The named kernels that did not run so far, and what did."""
    return list(_fallbacks.values())


def _run(kernel: Kernel, call: MlstmCall | MlstmStepCall) -> Any:
    """Run an op on the backend that a kernel's name asks for, or on the dispatcher's choice."""
    op = _OPS[kernel.op]
    if kernel.backend is None:
        return op(call)
    op.check(call)
    attached = op.backends.get(kernel.backend)
    reason = "this version has no such kernel" if attached is None else attached.refuse(call)
    if reason is None:
        return op.call_on(kernel.backend, call)
    key = (kernel.name, op.key(call))
    if key not in _fallbacks and not torch.compiler.is_compiling():
        decision = op.decide(call)
        # a reason is said once; every key is in the list
        if not any(known.name == kernel.name and known.reason == reason for known in _fallbacks.values()):
            warnings.warn(
                f"{kernel.name}: {kernel.op} runs on {decision.backend}, as {kernel.backend} refuses: {reason}",
                KernelFallback,
                stacklevel=4,
            )
        _fallbacks[key] = Fallback(kernel.name, reason, decision)
    return op(call)


def _unflat(found: Any) -> Result:
    """(h, (c, n, m)) from the result of a backend, which is h, or h followed by the states."""
    if isinstance(found, Tensor):
        return found, None
    h, c, n, *m = found
    return h, (c, n, m[0] if m else None)


def _parallel(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, options: dict[str, Any]) -> Result:
    """A kernel without states, and after it what the other ops do in the same kernel."""
    for name in ("c_initial", "n_initial", "m_initial", "return_last_states"):
        options.pop(name, None)
    if options.pop("seq_starts", None) is not None or options.pop("seq_lens", None) is not None:
        raise InvalidArgument(f"{kernel.name} takes no padding; take a chunkwise kernel")
    weight, eps, gate = (options.pop(name, None) for name in ("norm_weight", "norm_eps", "output_gate"))
    known = {name: options[name] for name in ("eps", "gate_soft_cap", "normalize") if name in options}
    h = mlstm_parallel(q, k, v, i, f, input_gate=kernel.input_gate, **known)
    if weight is None:
        return h, None
    normed = F.layer_norm(h.float(), h.shape[-1:], None, None, eps) * weight.float().view(h.shape[1], 1, -1)
    return (torch.sigmoid(gate.float()) * normed).to(h.dtype), None


@dataclass(frozen=True)
class Kernels:
    """The three kernels of a configuration, called as the ops are; states are (c, n, m), m None for sigmoid gates."""

    chunkwise_kernel: Kernel
    sequence_kernel: Kernel
    step_kernel: Kernel
    chunk_size: int | None
    state_dtype: torch.dtype

    @classmethod
    def named(cls, chunkwise: str, sequence: str, step: str, state_dtype: torch.dtype) -> Kernels:
        """Kernels by name, with their default chunk sizes.

        Raises:
            InvalidArgument: there is no kernel of a name; the message lists those there are.
        """
        kinds = check("chunkwise", chunkwise), check("sequence", sequence), check("step", step)
        return cls(*kinds, None, state_dtype)

    def chunkwise(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, **options: Any) -> Result:
        """As `wavecrest.ops.mlstm_chunkwise`, but always (h, states or None)."""
        kernel = self.chunkwise_kernel
        if options.get("return_last_states") or options.get("c_initial") is not None:
            self._need_states()
        if kernel.op == "mlstm_parallel":
            return _parallel(kernel, q, k, v, i, f, options)
        options |= {"input_gate": kernel.input_gate, "state_dtype": self.state_dtype}
        return _unflat(_run(kernel, MlstmCall(q, k, v, i, f, chunk_size=self.chunk_size, **options)))

    def _need_states(self) -> None:
        if not self.chunkwise_kernel.state:
            raise InvalidArgument(f"{self.chunkwise_kernel.name} has no states; take a chunkwise kernel")

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, **options: Any) -> Result:
        """As `wavecrest.ops.mlstm_sequence`, but always (h, states or None)."""
        if not self.chunkwise_kernel.state:
            return self.chunkwise(q, k, v, i, f, **options)
        options |= {"input_gate": self.chunkwise_kernel.input_gate, "state_dtype": self.state_dtype}
        return _unflat(_run(self.sequence_kernel, MlstmCall(q, k, v, i, f, **options)))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor | None, **more: Any
    ) -> Result:
        """As `wavecrest.ops.mlstm_step`."""
        self._need_states()
        call = MlstmStepCall(q, k, v, i, f, c, n, m, input_gate=self.chunkwise_kernel.input_gate, **more)
        return _unflat(_run(self.step_kernel, call))


def chunk_of(kernel: Kernel, size: int) -> int | None:
    """The chunk size that a kernel's op is asked for; None for its own: "auto" chooses, as for sizes that it lacks."""
    return size if kernel.name != AUTO and size % 16 == 0 and 16 <= size <= 4096 else None


def states_of(kernel: Kernel, result: Result, asked: bool) -> Any:
    """The result in the form that the official package's kernel of this name returns."""
    h, state = result
    if not asked or state is None:
        return h
    c, n, m = state
    return h, ((c, n) if kernel.input_gate == "sigmoid" else (c, n, m))


def _refuse_unknown(name: str, options: dict[str, Any]) -> None:
    unknown = sorted(set(options) - UNUSED)
    if unknown:
        raise InvalidArgument(f"{name} takes no {', '.join(unknown)}")


def get_mlstm_kernel(name: str) -> Callable[..., Any]:
    """The chunkwise or parallel kernel of a name, called as the official package's.

    kernel(q, k, v, i, f, c_initial=None, n_initial=None, m_initial=None, return_last_states=False, eps=1e-6,
    chunk_size=64): q, k (B, NH, S, DK), v (B, NH, S, DV), i, f (B, NH, S), states c (B, NH, DK, DV), n (B, NH, DK),
    m (B, NH, 1); h, or (h, (c, n, m)), with sigmoid gates (h, (c, n)). Any S. Tile sizes and the dtype of autocasting
    may be given and are not used: ours are tuned, and run in the operands' dtype.

    Raises:
        InvalidArgument: there is no kernel of that name; the message lists those there are.
    """
    kernel = check("chunkwise", name)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool = False,
        eps: float = 1e-6,
        chunk_size: int = 64,
        normalize: bool = True,
        **more: Any,
    ) -> Any:
        _refuse_unknown(name, more)
        kernels = Kernels(
            kernel, KERNELS["sequence"][AUTO], KERNELS["step"][AUTO], chunk_of(kernel, chunk_size), torch.float32
        )
        result = kernels.chunkwise(
            q, k, v, i, f, c_initial=c_initial, n_initial=n_initial, m_initial=m_initial,
            return_last_states=return_last_states, eps=eps, normalize=normalize,
        )  # fmt: skip
        return states_of(kernel, result, return_last_states)

    return run


def get_mlstm_sequence_kernel(name: str) -> Callable[..., Any]:
    """The sequence kernel of a name: kernel(q, k, v, i, f, c_initial=None, n_initial=None, m_initial=None,
    return_last_states=False, eps=1e-6, dtype_state=torch.float32), with the shapes of `get_mlstm_kernel`.

    Raises:
        InvalidArgument: there is no kernel of that name; the message lists those there are.
    """
    kernel = check("sequence", name)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool = False,
        eps: float = 1e-6,
        dtype_state: torch.dtype = torch.float32,
        **more: Any,
    ) -> Any:
        _refuse_unknown(name, more)
        call = MlstmCall(
            q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, state_dtype=dtype_state
        )
        return states_of(kernel, _unflat(_run(kernel, call)), return_last_states)

    return run


def get_mlstm_step_kernel(name: str) -> Callable[..., Any]:
    """The step kernel of a name: kernel(q, k, v, i, f, c, n, m, eps=1e-6, dtype_state=torch.float32) to
    (h, (c, n, m)), q, k (B, NH, DK), v, h (B, NH, DV), i, f, m (B, NH, 1); the states passed in are not changed.

    Raises:
        InvalidArgument: there is no kernel of that name; the message lists those there are.
    """
    kernel = check("step", name)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c: Tensor,
        n: Tensor,
        m: Tensor,
        eps: float = 1e-6,
        dtype_state: torch.dtype = torch.float32,
        **more: Any,
    ) -> Any:
        _refuse_unknown(name, more)
        call = MlstmStepCall(q, k, v, i, f, c, n, m, eps, state_dtype=dtype_state)
        return states_of(kernel, _unflat(_run(kernel, call)), True)

    return run


def get_available_mlstm_kernels() -> list[str]:
    """The names that `get_mlstm_kernel` takes; each runs everywhere, on the kernel it names where the machine can."""
    return list(KERNELS["chunkwise"])


def get_available_mlstm_sequence_kernels() -> list[str]:
    """The names that `get_mlstm_sequence_kernel` takes."""
    return list(KERNELS["sequence"])


def get_available_mlstm_step_kernels() -> list[str]:
    """The names that `get_mlstm_step_kernel` takes."""
    return list(KERNELS["step"])

"""PyTorch's attention by a named kernel: values, which kernel ran, and what is refused in which words."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.attention_harness import OP, ROUNDING, assert_within, by_reference, tensors
from tests.ops.op_harness import DTYPES, name, random
from wavecrest import ops
from wavecrest.backends import sdpa
from wavecrest.backends.torch import flash_attention as torch_backend
from wavecrest.cli import explain
from wavecrest.errors import Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.tune import candidates

NAMES = ("torch_flash", "torch_cudnn", "torch_efficient", "torch_math")
# what a CPU has
ON_CPU = ("torch_flash", "torch_math")
FLASH = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}


class _Seen(TorchDispatchMode):
    """The names of the operations below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def options(key: str, queries: int, keys: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {
        "plain": dict,
        "causal": lambda: {"causal": True},
        "window": lambda: {"causal": True, "window": (9, 0)},
        "scale": lambda: {"softmax_scale": 0.4},
        "bias": lambda: {"bias": random((2, 1, queries, keys), dtype, device, 7)},
        "bias a head causal": lambda: {"bias": random((4, queries, keys), dtype, device, 7), "causal": True},
        "bias causal": lambda: {"bias": random((2, 1, 1, keys), dtype, device, 7), "causal": True},
    }[key]()


def _refused(backend: str, call: FlashAttentionCall) -> str | None:
    return op.backends[backend].refuse(call)


@pytest.mark.parametrize("lengths", [(24, 24), (5, 33), (1, 40)], ids=str)
@pytest.mark.parametrize("key", ["plain", "causal", "window", "scale", "bias", "bias causal", "bias a head causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("backend", NAMES)
def test_values(backend: str, dtype: torch.dtype, key: str, lengths: tuple[int, int], device: str) -> None:
    layout = "bhsd" if sum(lengths) % 2 else "bshd"
    q, k, v = tensors(2, *lengths, 4, 2, 32, dtype=dtype, device=device, layout=layout)
    call = FlashAttentionCall(q, k, v, layout=layout, **options(key, *lengths, dtype, device))
    reason = _refused(backend, call)
    if reason is not None:
        # a CPU has both kernels for all of these
        assert device == "cuda" or backend not in ON_CPU
        with pytest.raises(Unsupported, match=backend):
            op.run(backend, call)
        return
    with _Seen() as seen:
        got = op.run(backend, call)
    want = by_reference(call)
    assert got.dtype == dtype and got.is_contiguous()
    # as of PyTorch's own choice: its scores are rounded to the dtype too where they are written out
    assert_within(got, want[0], want[2], 8 * ROUNDING[dtype] + 1.5e-5)
    fused = [one for one in seen.ops if one.startswith("_scaled_dot_product")]
    assert (FLASH[device] in fused) == (backend == "torch_flash")
    assert bool(fused) == (backend != "torch_math")


def test_the_bound_can_fail(device: str) -> None:
    q, k, v = tensors(1, 9, 24, 4, 2, 32, device=device)
    want = by_reference(FlashAttentionCall(q, k, v))
    got = op.run("torch_math", FlashAttentionCall(q, k[:, 1:], v[:, 1:]))
    with pytest.raises(AssertionError, match="are off"):
        assert_within(got, want[0], want[2], 8 * ROUNDING[torch.float32] + 1.5e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has all of them")
@pytest.mark.parametrize(("backend", "words"), [("torch_cudnn", "cuDNN"), ("torch_efficient", "memory-efficient")])
def test_kernels_of_gpus_say_so(backend: str, words: str) -> None:
    reason = _refused(backend, FlashAttentionCall(*tensors(1, 4, 4)))
    assert words in str(reason) and "on a GPU" in str(reason)


def test_pytorchs_own_words(device: str) -> None:
    """PyTorch's kernel says in a warning why it refuses a call: that is the reason, and no user sees the warning."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = tensors(2, 6, 9, 2, 2, 16, 8, dtype=dtype, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            reason = _refused("torch_flash", FlashAttentionCall(q, k, v))
            assert "PyTorch refuses" in str(reason) and "same last dimension" in str(reason)
            assert "Triggered internally" not in str(reason) and "not used because" not in str(reason)
            assert "runtime disabled" not in str(reason)
        assert "stride 1" in str(_refused("torch_flash", FlashAttentionCall(q.mT.contiguous().mT, k, k)))
        # attention written out takes both
        assert _refused("torch_math", FlashAttentionCall(q, k, v)) is None
    # and the settings of the user are as they were
    assert torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_asking_makes_no_mask_of_all_pairs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision may be for a kernel that needs none; and what is asked about has the form of what is made."""
    seen: list[tuple[Tensor | None, ...]] = []
    for ask in ("_chosen", "_asked_on_a_gpu"):
        monkeypatch.setattr(sdpa, ask, lambda _kernel, _tensors, mask, **_options: not seen.append(mask))
    q, k, v = tensors(2, 40, 50, 4, 2, device=device)
    for options in (
        {"window": (9, 0)},
        {"causal": True},
        {"causal": True, "bias": torch.zeros(2, 1, 1, 50, device=device)},
        {"causal": True, "bias": torch.zeros(4, 40, 50, device=device)},
        {"bias": torch.zeros(40, 1, device=device)},
    ):
        seen.clear()
        call = FlashAttentionCall(q, k, v, **options)
        assert _refused("torch_flash", call) is None
        (mask,) = seen
        mask_of = torch_backend._options(call)[1]
        made = None if mask_of is None else mask_of(call.bias)
        assert (
            isinstance(mask, Tensor)
            and isinstance(made, Tensor)
            and (mask.shape, mask.dtype) == (made.shape, made.dtype)
        )
        assert mask.untyped_storage().nbytes() <= 4 * 50


def test_a_kernel_that_does_not_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_args, **_options: -1)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _self: False), raising=False)
    assert "does not say why" in str(_refused("torch_flash", FlashAttentionCall(*tensors(1, 4, 4))))


@pytest.mark.parametrize("backend", NAMES)
def test_what_pytorch_has_not_at_all(backend: str, device: str) -> None:
    q, k, v = tensors(1, 8, 8, device=device)
    assert "no softcap" in str(_refused(backend, FlashAttentionCall(q, k, v, softcap=2.0)))
    assert "no sinks" in str(_refused(backend, FlashAttentionCall(q, k, v, sinks=torch.zeros(2, device=device))))
    assert "no logarithms" in str(_refused(backend, FlashAttentionCall(q, k, v, return_lse=True)))
    assert "without keys" in str(_refused(backend, FlashAttentionCall(q, k[:, :3], v[:, :3], causal=True)))


ASK = {"torch_flash": "flash", "torch_cudnn": "cudnn", "torch_efficient": "efficient"}


@pytest.mark.parametrize("backend", ASK)
def test_a_gpu_is_asked_about_the_call_itself(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of that kernel, with it alone allowed, gets what scaled_dot_product_attention will get."""
    asked: list[tuple[Any, ...]] = []
    flags = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled

    def params(*given: Any) -> Any:
        return given

    def can_use(given: Any, debug: bool) -> bool:
        asked.append((given, debug, [flag() for flag in flags]))
        return given[3] is None

    def choice(*_given: Any, **_options: Any) -> int:
        warnings.warn("Kernel not used because: (Triggered internally at here)", stacklevel=1)
        warnings.warn("it takes no mask. (Triggered internally at here)", stacklevel=1)
        raise RuntimeError("No available kernel")

    q, k, v = tensors(2, 6, 6, 4, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", property(lambda _self: True), raising=False)
        assert (
            "built for CPUs" in str(sdpa._refused(backend, FlashAttentionCall(q, k, v)))
            or torch.backends.cuda.is_built()
        )
        patch.setattr(torch.backends.cuda, "is_built", lambda: True)
        patch.setattr(torch.backends.cuda, "SDPAParams", params)
        patch.setattr(torch.backends.cuda, f"can_use_{ASK[backend]}_attention", can_use)
        patch.setattr(torch, "_fused_sdp_choice", choice)
        assert sdpa._refused(backend, FlashAttentionCall(q, k, v, causal=True)) is None
        reason = sdpa._refused(backend, FlashAttentionCall(q, k, v, bias=torch.zeros(6, 6)))
    (given, debug, allowed), (masked, *_) = asked
    assert given[0].shape == (2, 4, 6, 16) and given[1].shape == (2, 2, 6, 16) and given[3:] == (None, 0.0, True, True)
    # its reasons would go to standard error
    assert not debug and allowed == [backend == "torch_flash", backend == "torch_efficient"]
    assert masked[3].shape == (2, 4, 6, 6) and masked[5] is False
    assert reason is not None and reason.endswith("which PyTorch refuses: it takes no mask.")


def test_a_length_of_the_bucket_that_it_does_not_take(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision is for a bucket; what PyTorch refuses inside one runs, and a warning carries the reason."""
    bind = torch_backend.bind
    call = FlashAttentionCall(*tensors(1, 20, 20, device=device))
    want, failing = bind(call)(call), [True]

    def failing_bind(call: FlashAttentionCall) -> Any:
        bound = bind(call)

        def run(call: FlashAttentionCall) -> Tensor:
            if failing and failing.pop():
                raise RuntimeError("No available kernel. Aborting execution.")
            return bound(call)

        return run

    monkeypatch.setattr(torch_backend, "bind", failing_bind)
    monkeypatch.setattr(sdpa, "_refused", lambda *_args: "asks for what it has not")
    with pytest.warns(UserWarning, match="torch_flash asks for what it has not; PyTorch's own choice"):
        got = sdpa._run("torch_flash", call)
    assert torch.equal(got, want)
    # an error of another kind is the caller's
    failing.append(True)
    monkeypatch.setattr(sdpa, "_refused", lambda *_args: None)
    with pytest.raises(RuntimeError, match="No available kernel"):
        sdpa._run("torch_flash", call)
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("backend", ON_CPU)
def test_gradients(backend: str, device: str) -> None:
    # flash takes float32 on a CPU alone
    half = device == "cuda" and backend == "torch_flash"
    dtype = torch.float16 if half else torch.float32
    leaves = [one.requires_grad_() for one in tensors(1, 12, 12, 4, 2, dtype=dtype, device=device)]
    call = FlashAttentionCall(*leaves, causal=True)
    assert _refused(backend, call) is None
    op.run(backend, call).square().sum().backward()
    wide = [one.detach().double().requires_grad_() for one in leaves]
    op.reference(FlashAttentionCall(*wide, causal=True)).square().sum().backward()
    for leaf, want in zip(leaves, wide, strict=True):
        assert leaf.grad is not None and want.grad is not None and leaf.grad.abs().max() > 1e-3
        near = 8 * ROUNDING[torch.float16] if half else 1e-4
        torch.testing.assert_close(leaf.grad.double(), want.grad, rtol=near, atol=near)


def test_they_run_only_where_they_are_named(device: str) -> None:
    call = FlashAttentionCall(*tensors(1, 16, 16, device=device))
    decision = op.decide(call)
    assert decision.backend == "torch"
    refused = {one.backend: one.reason for one in decision.refused}
    assert "measured row" in refused["torch_math"] and set(NAMES) <= set(refused)
    assert all(op.backends[one].priority < op.backends["torch"].priority for one in (*NAMES, "aiter"))
    op.pin(decision.key, "torch_math", None, "exact", "a row")
    pinned = op.decide(call)
    assert (pinned.backend, pinned.reason) == ("torch_math", "a row")
    with _Seen() as seen:
        op(call)
    assert not any(one.startswith("_scaled_dot_product") for one in seen.ops)
    op.unpin()
    with _Seen() as seen:
        op(call)
    assert any(one.startswith("_scaled_dot_product") for one in seen.ops)


@pytest.mark.parametrize("backend", NAMES)
def test_compiled_calls_are_refused_in_one_graph(backend: str, device: str) -> None:
    torch._dynamo.reset()
    op.force(backend)
    q, k, v = tensors(1, 12, 12, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q, k, v, causal=True)  # type: ignore[return-value]

    with torch.no_grad():
        got = torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
        torch.testing.assert_close(got, op.run("torch", FlashAttentionCall(q, k, v, causal=True)))
    traced = [decision for decision, calls in op.decisions() if calls == 0]
    assert traced and traced[0].backend == "torch" and f"{backend}, forced, refuses it" in traced[0].reason
    assert "torch.compile" in {one.backend: one.reason for one in traced[0].refused}[backend]


def test_explain_has_all_of_them() -> None:
    record = explain.run(OP, ["B=1", "H=2", "S=9", "D=16", "dtype=float32"], "cpu")
    assert record.backend == "torch"
    assert "on a GPU" in record.refused["torch_cudnn"] and "on a GPU" in record.refused["torch_efficient"]
    assert "measured row" in record.refused["torch_flash"] and "measured row" in record.refused["torch_math"]
    assert "aiter" in record.refused


def test_tune_tries_them(device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float32
    call = FlashAttentionCall(*tensors(1, 16, 16, dtype=dtype, device=device))
    made = candidates.field(op, call, op.key(call), ARCHS["sm_90"], candidates.backends(op, None))
    tried = [one.backend for one in made.candidates]
    assert tried[0] == "torch" and {"torch_flash", "torch_math"} <= set(tried)
    if device == "cpu":
        assert {"torch_cudnn", "torch_efficient", "aiter", "triton"} <= {backend for backend, _ in made.refused} | {
            "triton"
        }


def test_the_names_are_pytorchs() -> None:
    assert {kernel for kernel, _ in sdpa.KERNELS.values()} == {
        SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    }  # fmt: skip

"""mLSTMBackend: the official package's class and keywords, against a recurrence in float64 and against the ops."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.xlstm_harness import DEVICE, close
from tests.ops.mlstm_harness import F32, F64, assert_right, case
from wavecrest.dispatch.op import Op
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm import ConfigWarning, KernelFallback, kernels, mLSTMBackend, mLSTMBackendConfig
from wavecrest.ops.mlstm.call import MlstmCall

OFFICIAL = {
    "native": ("chunkwise--native_autograd", "native_sequence__native", "native"),
    "triton": ("chunkwise--triton_xl_chunk", "native_sequence__triton", "triton"),
    "auto": ("auto", "auto", "auto"),
}
STATES = ("c_initial", "n_initial", "m_initial")


@pytest.fixture(autouse=True)
def _fallbacks_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_fallbacks", {})
    warnings.simplefilter("ignore", KernelFallback)


def backend(name: str = "auto", **options: Any) -> mLSTMBackend:
    chunkwise, sequence, step = OFFICIAL[name]
    names = {"chunkwise_kernel": chunkwise, "sequence_kernel": sequence, "step_kernel": step}
    return mLSTMBackend(mLSTMBackendConfig(**(names | options)))


def part(given: MlstmCall, first: int, last: int) -> dict[str, Tensor]:
    return {name: getattr(given, name)[:, :, first:last] for name in ("q", "k", "v", "i", "f")}


def test_the_keywords_are_the_official_ones() -> None:
    assert [field.name for field in dataclasses.fields(mLSTMBackendConfig)] == [
        "chunkwise_kernel", "sequence_kernel", "step_kernel", "mode", "chunk_size", "return_last_states",
        "autocast_kernel_dtype", "eps", "inference_state_dtype", "normalize_siging",
    ]  # fmt: skip
    config = mLSTMBackendConfig()
    assert (config.mode, config.chunk_size, config.return_last_states, config.eps) == ("train", 64, True, 1e-6)
    assert isinstance(mLSTMBackend(config), torch.nn.Module) and "chunkwise_kernel='auto'" in str(mLSTMBackend(config))


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_text_in_parts_is_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a few tokens and single ones, each on its kernel, states handed on: the recurrence in float64."""
    given = case(batch=2, heads=2, tokens=43, dk=8, dv=16, return_last_states=True, first=True)
    ran: list[tuple[str, str]] = []
    run, call = Op.call_on, Op.__call__

    def noted(op: Op, which: str, *args: Any, **more: Any) -> Any:
        ran.append((op.name, which))
        return run(op, which, *args, **more)

    def dispatched(op: Op, *args: Any, **more: Any) -> Any:
        ran.append((op.name, "dispatch"))
        return call(op, *args, **more)

    monkeypatch.setattr(Op, "call_on", noted)
    monkeypatch.setattr(Op, "__call__", dispatched)
    model = backend(name, mode="inference", chunk_size=16)
    state, found = given.initial, []
    kept = [one.clone() for one in given.initial if one is not None]
    for first, last in ((0, 33), (33, 41), (41, 42), (42, 43)):
        h, state = model(**part(given, first, last), **dict(zip(STATES, state, strict=True)))
        found.append(h)
    assert all(torch.equal(one, before) for one, before in zip(given.initial, kept, strict=True))
    whole = torch.cat(found, 2).transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(given, (whole, *state))
    which = {"native": "torch", "triton": "triton", "auto": "dispatch"}[name]
    assert ran == [(f"mlstm_{op}", which) for op in ("chunkwise", "sequence", "step", "step")]


@pytest.mark.parametrize("mode", ["train", "train_with_padding", "inference"])
def test_any_length_runs_in_every_mode(mode: str) -> None:
    for tokens in (1, 7, 40):
        given = case(batch=1, heads=2, tokens=tokens, dk=8, dv=16)
        model = backend("native", mode=mode, chunk_size=16, return_last_states=False)
        stateful = given._replace(return_last_states=True)
        # the call's mode wins
        for found in (model(*given[:5]), backend("native", return_last_states=False)(*given[:5], mode=mode)):
            if mode == "inference":
                assert_right(stateful, _flat(found))
            else:
                assert_right(given, found)
        if mode != "train_with_padding":
            assert_right(stateful, _flat(model(*given[:5], return_last_states=True)))


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_inference_always_gives_the_last_states(tokens: int) -> None:
    """As in the official package, where one row would else be unpacked along the batch."""
    given = case(batch=2, heads=2, tokens=tokens, dk=8, dv=16, return_last_states=True)
    h, state = backend("native", mode="inference", chunk_size=16)(*given[:5], return_last_states=False)
    assert_right(given, (h, *state))
    alone = backend(chunkwise_kernel="parallel--native_autograd", mode="inference", return_last_states=False)
    assert alone(*given[:5]).shape == h.shape


def _flat(found: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return found[0], *found[1]


@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_gates(normalize: bool) -> None:
    """In inference too, with states (c, n); with and without the normalizer."""
    given = case(tokens=21, input_gate="sigmoid", normalize=normalize, return_last_states=True)
    for mode in ("train", "inference"):
        options = {"mode": mode, "normalize_siging": normalize, "chunkwise_kernel": "chunkwise--triton_xl_chunk_siging"}
        model = backend("triton", **options)
        h, state = model(**part(given, 0, 20))
        last, after = model(**part(given, 20, 21), c_initial=state[0], n_initial=state[1])
        assert len(state) == len(after) == 2
        whole = torch.cat([h, last], 2).transpose(1, 2).contiguous().transpose(1, 2)
        assert_right(given, (whole, *after))


def test_eps_reaches_every_kernel() -> None:
    for tokens in (1, 5, 20):
        given = case(tokens=tokens, eps=0.5)
        h, _ = backend("native", mode="inference", eps=0.5)(*given[:5])
        assert_right(given, h)


def test_the_dtype_of_states() -> None:
    for tokens in (1, 5, 20):
        given = case(tokens=tokens)
        model = backend(mode="inference", inference_state_dtype="float16")
        c, n, m = model(*given[:5])[1]
        assert [one.dtype for one in (c, n, m)] == [torch.float16, F32, F32]
        assert_right(given._replace(return_last_states=True, state_dtype=torch.float16), _flat(model(*given[:5])))
        # of a state that was made in another dtype too
        first = case(tokens=tokens, first=True).initial
        assert model(*given[:5], *first)[1][0].dtype == torch.float16
        wide = case(tokens=tokens, dtype=F64)
        assert {one.dtype for one in model(*wide[:5])[1]} == {F64}
    with pytest.warns(ConfigWarning, match="decay is lost"):
        model = backend(inference_state_dtype="bfloat16")
    assert model(*given[:5])[1][0].dtype == F32


def test_gradients_go_through() -> None:
    given = case(tokens=20, dk=4, dv=4)
    leaves = [one.detach().requires_grad_() for one in given[:5]]
    found = backend("native", return_last_states=False, chunk_size=16)(*leaves)
    found.square().sum().backward()
    assert all(one.grad is not None and bool(one.grad.isfinite().all()) for one in leaves)


def test_a_kernel_that_cannot_run_falls_back_and_says_so() -> None:
    given = case(tokens=20, dtype=F64)
    model = backend("triton", return_last_states=False)
    with pytest.warns(KernelFallback, match="chunkwise--triton_xl_chunk: mlstm_chunkwise runs on torch"):
        warnings.simplefilter("always", KernelFallback)
        found = model(*given[:5])
    close(found, backend("native", return_last_states=False)(*given[:5]), "float64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunkwise_kernel": "fast"}, "no chunkwise kernel 'fast'; there are auto, chunkwise--native_autograd"),
        ({"sequence_kernel": "fast"}, "no sequence kernel 'fast'; there are auto, native_sequence__native"),
        ({"step_kernel": "native_sequence__native"}, "no step kernel .*; there are auto, native, triton"),
        ({"mode": "eval"}, "mode takes train, train_with_padding, inference, not 'eval'"),
        ({"inference_state_dtype": "int8"}, "inference_state_dtype takes float32, bfloat16, float16"),
        ({"autocast_kernel_dtype": "half"}, "autocast_kernel_dtype takes"),
        ({"chunk_size": 0}, "chunk_size must be a whole number above 0"),
        ({"chunk_size": True}, "chunk_size must be"),
        ({"eps": -1.0}, "eps must be a number from 0 on"),
        ({"eps": float("nan")}, "eps must be"),
        ({"return_last_states": 1}, "return_last_states must be True or False"),
        ({"normalize_siging": None}, "normalize_siging must be True or False"),
        ({"mode": "train_with_padding"}, "train_with_padding returns no states; set return_last_states=False"),
        ({"chunkwise_kernel": "parallel--native_autograd"}, "has no states; set return_last_states=False"),
    ],
)
def test_configurations_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mLSTMBackendConfig(**options)


def test_calls_that_are_none() -> None:
    given = case(tokens=20)
    model = backend("native")
    with pytest.raises(InvalidArgument, match="mode takes"):
        model(*given[:5], mode="eval")
    with pytest.raises(InvalidArgument, match="train_with_padding returns no states"):
        model(*given[:5], mode="train_with_padding")
    first = case(tokens=20, first=True).initial
    with pytest.raises(InvalidArgument, match="train_with_padding returns no states"):
        model(*given[:5], *first, return_last_states=False, mode="train_with_padding")
    with pytest.raises(InvalidArgument, match="n_initial must be"):
        model(*given[:5], c_initial=torch.zeros(2, 1, 16, 24, device=DEVICE))
    with pytest.raises(InvalidArgument, match="n must be"):
        model(**part(given, 0, 1), c_initial=torch.zeros(2, 1, 16, 24, device=DEVICE), mode="inference")
    with pytest.raises(InvalidArgument, match="q must be"):
        model(None, *given[1:5])
    parallel = backend("native", chunkwise_kernel="parallel--native_autograd", return_last_states=False)
    close(parallel(*given[:5], mode="inference"), model(*given[:5])[0])
    for tokens in (1, 20):
        with pytest.raises(InvalidArgument, match="has no states"):
            parallel(**part(given, 0, tokens), mode="inference", return_last_states=True)

"""Which backend runs an mLSTM by batch and length: prior data on gfx942, forced kernels, and batch_invariant.

The architecture is a stand-in: the keys of calls on this machine say that they are on a GPU, the rows are gfx942's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.mlstm_harness import BF16, DEVICE, F16, F32, F64, NAN, case
from tests.ops.op_harness import own_calls, same_bits
from wavecrest import ops
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.tuned import Config, Database, Row, database
from wavecrest.models.xlstm import xLSTMLargeConfig
from wavecrest.ops.common import triton as _triton
from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.key import KEY_FIELDS
from wavecrest.ops.mlstm.study.cases import example

OP = "mlstm_chunkwise"
# (batch, tokens) of the published table, and what was the fastest there
TABLE = {
    (1, 2048): "torch", (1, 4096): "torch", (2, 2048): "triton", (2, 4096): "torch", (4, 2048): "triton",
    (4, 4096): "triton",
}  # fmt: skip


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keys of calls here are those of calls on a GPU."""
    for name in (OP, "mlstm_sequence"):
        op = registry.get(name)
        plain, place = op.key, op.key_fields.index("device")

        def key(call: Any, _plain: Any = plain, _place: int = place) -> Any:
            made = _plain(call)
            return (*made[:_place], "cuda", *made[_place + 1 :])

        monkeypatch.setattr(op, "key", key)
        op.forget()
    yield
    monkeypatch.undo()
    registry.forget()


def call(batch: int, tokens: int, dv: int = 128, heads: int = 1, dtype: torch.dtype = BF16, **more: Any) -> MlstmCall:
    """A call whose heads are as in the published models: DK is half of DV."""
    return example((batch, heads, tokens, dv // 2, dv), dtype, "meta", **more)


def decide(given: MlstmCall) -> Any:
    """As on the device of these tests, from shapes alone."""
    real = MlstmCall(*(
        torch.empty(one.shape, dtype=one.dtype, device=DEVICE) if isinstance(one, Tensor) else one for one in given
    ))  # fmt: skip
    return registry.get(OP).decide(real)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dv", [64, 128])
def test_the_published_table_decides_by_batch_and_length(on_gpu: None, dv: int, dtype: torch.dtype) -> None:
    with registry.measured_in(Database(arch="gfx942")):
        for (batch, tokens), backend in TABLE.items():
            found = decide(call(batch, tokens, dv, dtype=dtype))
            assert (found.backend, found.source) == (backend, "prior")
            words = "Native" if backend == "torch" else "AMD-optimized"
            assert f"head dimension {dv}, batch {batch}, {tokens} tokens: {words}" in found.reason
            assert "not measured here" in found.reason
        # what the table does not name: heads of xLSTM-7B, another batch, another length, float32, padded rows
        lens = torch.zeros(1, dtype=torch.int32, device="meta")
        for other in (
            call(1, 2048, 512), call(3, 2048, dv), call(1, 1024, dv), call(1, 2048, dv, dtype=F32),
            call(1, 2048, dv, seq_lens=lens), call(1, 2048, dv, batch_invariant=True),
        ):  # fmt: skip
            assert decide(other).source == "default" and "prior data" not in decide(other).reason
    with registry.measured_in(Database(arch="gfx950")):
        assert decide(call(1, 2048, dv)).source == "default"


def test_a_call_runs_what_was_published(on_gpu: None) -> None:
    """The decision is what runs: PyTorch's chunks for one row, with counted calls."""
    op = registry.get(OP)
    given = example((1, 1, 1040, 32, 64), F32, DEVICE)
    halves = MlstmCall(*(
        one.to(BF16) if isinstance(one, Tensor) and one.ndim == 4 else one for one in given
    ))  # fmt: skip
    with registry.measured_in(Database(arch="gfx942")), registry.coverage() as seen:
        got = op(halves)
        assert same_bits(got, op.run("torch", halves))
    (found,) = [(decision, calls) for decision, calls in seen if decision.op == OP]
    assert (found[0].backend, found[0].source, found[1]) == ("torch", "prior", 1)


def test_a_kernel_that_is_not_here_falls_back_and_says_why(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "unavailable", "triton is not importable (gone)")
    with registry.measured_in(Database(arch="gfx942")):
        found = decide(call(2, 2048))
        assert (found.backend, found.source) == ("torch", "default")
        assert "AMD-optimized 1.17x" in found.reason and found.reason.endswith("for triton, which refuses it")
        assert ("triton", "triton is not importable (gone)") in [(one.backend, one.reason) for one in found.refused]


def test_a_kernel_that_a_configuration_names_wins(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the table both ways: a configuration's name is what runs, "auto" what the table says."""
    op, ran = registry.get(OP), []

    def run(backend: str, call: MlstmCall) -> Any:
        ran.append(backend)
        return call.v

    monkeypatch.setattr(op, "call_on", run)
    sizes = {"embedding_dim": 128, "num_heads": 1, "num_blocks": 1, "vocab_size": 8}
    with registry.measured_in(Database(arch="gfx942")):
        for batch, name, backend in (
            (1, "chunkwise--triton_xl_chunk", "triton"),
            (2, "chunkwise--native_autograd", "torch"),
        ):
            config = xLSTMLargeConfig(**sizes, chunkwise_kernel=name)
            given = example((batch, 1, 1040, 64, 128), BF16, DEVICE)
            assert op.decide(given).backend != backend
            config.selected_kernels().chunkwise(*given[:5])
            assert ran.pop() == backend and not ran


def _rows(tmp_path: Path, *wanted: tuple[dict[str, Any], str, Config | None]) -> Database:
    """Measured rows for calls like `_plain`, with other parts of the key."""
    op, found = registry.get(OP), Database(tmp_path, "gfx942")
    fields = lookup.fields_of(op)
    rows = []
    for parts, backend, config in wanted:
        key = dict(zip(KEY_FIELDS, op.key(_plain()), strict=True)) | parts
        rows.append(Row(tuple(key[name] for name in fields), backend, config, 10.0, 20.0, "a.json"))
    database.write(found.path(OP), fields, rows)
    return found


def _plain(**more: Any) -> MlstmCall:
    return case(batch=1, tokens=20, dtype=BF16, return_last_states=True, first=True, **more)


def _small(chunk: int) -> Config:
    return Config(
        CHUNK=chunk, BLOCK_T=16, BLOCK_S=16, BLOCK_K=16, BLOCK_C=16, BLOCK_V=32, STATE_T=16, STATE_K=16, STATE_V=32,
        STATE_WARPS=4, STATE_STAGES=1, KEYS_WARPS=1, num_warps=4, num_stages=1,
    )  # fmt: skip


def test_a_sequence_has_the_same_bits_however_it_is_called(on_gpu: None, tmp_path: Path) -> None:
    """Rows of different chunks by batch, length and form: they choose, unless `batch_invariant` asks for the same."""
    op = registry.get(OP)
    alone = [_plain(seed=seed) for seed in (1, 2, 3)]
    names = ("q", "k", "v", "i", "f")
    batched = alone[0]._replace(**{
        name: torch.cat([getattr(one, name) for one in alone])
        for name in (*names, "c_initial", "n_initial", "m_initial")
    })  # fmt: skip
    states = {name: getattr(batched, name) for name in ("c_initial", "n_initial", "m_initial")}
    packed = alone[0]._replace(
        **{name: torch.cat([getattr(one, name) for one in alone], 2) for name in names}, **states,
        cu_seqlens=torch.tensor([0, 20, 40, 60], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    wide = {
        name: torch.cat([torch.full_like(getattr(batched, name)[:, :, :15], NAN), getattr(batched, name)], 2)
        for name in names
    }
    starts = torch.full((3,), 15, dtype=torch.int32, device=DEVICE)
    padded = batched._replace(**wide, seq_starts=starts)
    # the lengths of chunks that sums are made in differ: so do bits
    measured = _rows(
        tmp_path, ({}, "triton", _small(16)), ({"batch": 3}, "triton", _small(32)),
        ({"batch": 3, "tokens": 64, "form": "packed"}, "torch", None),
        ({"batch": 3, "tokens": 64, "form": "padded"}, "triton", _small(64)),
        ({"batch": 0, "tokens": 0, "form": "any", "invariant": True}, "triton", _small(32)),
    )  # fmt: skip
    with registry.measured_in(measured):
        chosen = {(op.decide(one).backend, op.decide(one).config) for one in (alone[0], batched, packed, padded)}
        assert len(chosen) == 4 and all(op.decide(one).source == "exact" for one in (alone[0], batched, packed, padded))
        calls = [one._replace(batch_invariant=True) for one in (*alone, batched, packed, padded)]
        assert len({op.key(one) for one in calls}) == 1 and op.decide(calls[0]).config == _small(32)
        *single, rows, row, wider = [op(one) for one in calls]
        for index, want in enumerate(single):
            assert same_bits(rows[0][index], want[0][0])
            assert same_bits(row[0][0, :, 20 * index : 20 * index + 20], want[0][0])
            assert same_bits(wider[0][index, :, 15:], want[0][0])
            for both, part in itertools.product((rows, row, wider), (1, 2, 3)):
                assert same_bits(both[part][index], want[part][0])
        # without it each has the bits of its own configuration
        assert not same_bits(op(batched)[0][0], op(alone[0])[0][0])


def test_pytorch_is_not_chosen_where_bits_must_not_depend_on_the_batch(on_gpu: None, tmp_path: Path) -> None:
    """A row that says PyTorch for such calls is left out, with the reason; where no kernel runs PyTorch does."""
    parts = {"batch": 0, "tokens": 0, "form": "any", "invariant": True}
    given = _plain(batch_invariant=True)
    op = registry.get(OP)
    meta = MlstmCall(*(one.to("meta") if isinstance(one, Tensor) else one for one in given))
    for name in (OP, "mlstm_sequence"):
        torchs = registry.get(name).backends["torch"]
        # as on a GPU that the kernel takes
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("wavecrest.ops.common.checks.kernel_refusal", lambda *_parts: None)
            assert "round otherwise in another batch" in str(torchs.refuse(meta))
            assert torchs.refuse(meta._replace(batch_invariant=False)) is None
        on_cpu = MlstmCall(*(one.cpu() if isinstance(one, Tensor) else one for one in given))
        assert torchs.refuse(meta) is None and torchs.refuse(on_cpu) is None
    with registry.measured_in(_rows(tmp_path, (parts, "torch", None))), pytest.MonkeyPatch.context() as patched:
        backend = op.backends["torch"]
        declining = replace(backend, refuse=lambda _call: backend.refuse(meta))
        patched.setitem(op.backends, "torch", declining)
        patched.setattr(op, "_order", tuple(declining if one is backend else one for one in op._order))
        patched.setattr("wavecrest.ops.common.checks.kernel_refusal", lambda *_parts: None)
        found = op.decide(given)
        assert found.backend != "torch" and "for torch, which refuses it" in found.reason
    registry.forget()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("epilogue", ["", "gate"])
def test_a_bound_call_is_short(epilogue: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the public function to the launches, which are up to five, or to the definition."""
    whole = case(tokens=20, dv=48, first=True, return_last_states=True, epilogue=epilogue)
    options = {name: getattr(whole, name) for name in ("norm_weight", "output_gate")}
    more = dict(zip(("c_initial", "n_initial", "m_initial"), whole.initial, strict=True))
    sequences = partial(ops.mlstm_chunkwise, *whole[:5], **more, return_last_states=True, **options)
    short = partial(ops.mlstm_sequence, *whole[:5], **more, return_last_states=True, **options)
    one = [part[:, :, 0] for part in whole[:5]]
    gate = None if whole.output_gate is None else whole.output_gate[:, :, 0]
    step = partial(ops.mlstm_step, *one, *whole.initial, norm_weight=whole.norm_weight, output_gate=gate)
    for name, function in ((OP, sequences), ("mlstm_sequence", short), ("mlstm_step", step)):
        op = registry.get(name)
        op.force(backend)
        try:
            found, _ = own_calls(function, monkeypatch)
        finally:
            op.force(None)
        assert 2 <= len(found) <= 4, (name, found)


def test_needs_of_gradients_and_float64_still_run(on_gpu: None) -> None:
    op = registry.get(OP)
    for given in (case(dtype=F64, batch_invariant=True), case(batch_invariant=True)):
        with torch.enable_grad():
            given.q.requires_grad_()
            assert op.decide(given).backend == "torch"

"""benchmarks/slstm_peers.py on a CPU: peers compute the same, and what is wrong has no time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks import slstm_peers

from tests.clock import SimulatedClock
from tests.unit.test_parts import SMALL, Told
from wavecrest.dispatch import registry
from wavecrest.measure import interleaved
from wavecrest.ops.slstm.call import SlstmCall

CASE = {"b2s4d8": (2, 4, 2, 8)}


@torch.no_grad()
def test_wrong_peers_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()

    def made(call: SlstmCall, _compiled: Any) -> dict[str, Callable[[], slstm_peers.Call]]:
        def taking(seconds: float, factor: float = 1.0) -> slstm_peers.Call:
            def work() -> torch.Tensor:
                clock.advance(seconds)
                return slstm_peers.by_token(call, slstm_peers.token)() * factor

            return work

        def absent() -> slstm_peers.Call:
            raise ImportError("no such package")

        return {
            "wavecrest": lambda: taking(0.001), "eager": lambda: taking(0.003), "off": lambda: taking(0.0001, 1.1),
            "official vanilla": absent,
        }  # fmt: skip

    monkeypatch.setattr(interleaved, "measure", partial(interleaved.measure, now=clock))
    monkeypatch.setattr(slstm_peers, "implementations", made)
    monkeypatch.setattr(slstm_peers, "SMALL", CASE)
    report = Told()
    slstm_peers.sequence(report, SMALL)
    row = report.rows["b2s4d8"]
    assert {name for name, one in row["rows"].items() if "ms" in one} == {"wavecrest", "eager"}
    assert "wrong: error 0.1" in row["rows"]["off"]["problem"]
    assert "no such package" in row["rows"]["official vanilla"]["problem"]
    assert row["best"] == "eager" and row["ratio"] == pytest.approx(3.0) and row["us_per_token"] == pytest.approx(250.0)


@torch.no_grad()
def test_everyone_computes_the_definition() -> None:
    call = slstm_peers.case_of(CASE["b2s4d8"], "cpu")
    wanted = registry.get("slstm_sequence").reference(slstm_peers.in_double(call))
    found = slstm_peers.implementations(call, slstm_peers.token)
    assert set(found) == {
        "wavecrest", "wavecrest in PyTorch", "captured", "eager", "compiled", "official vanilla"
    }  # fmt: skip
    for name in ("wavecrest", "wavecrest in PyTorch", "eager"):
        torch.testing.assert_close(found[name]()().double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ImportError, match="on a GPU"):
        found["captured"]()
    longest = (1, slstm_peers.LONGEST_LOOP + 1, 1, 4)
    assert "eager" not in slstm_peers.implementations(slstm_peers.case_of(longest, "cpu"), slstm_peers.token)
    assert len(set(slstm_peers.SHAPES.values())) == 18


@torch.no_grad()
def test_beside_the_cuda_backend_ours_runs_where_that_is_not_there() -> None:
    report = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slstm_peers, "SMALL", CASE)
        slstm_peers.beside_extension(report, SMALL)
    rows = report.rows["b2s4d8"]["rows"]
    assert "needs a GPU of NVIDIA" in rows["official CUDA"]["problem"] and rows["wavecrest"]["of_bound"] < 1


@torch.no_grad()
def test_operands_are_laid_out_as_the_cuda_backend_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in over those layouts: x [S, B, NH, 4, D], r [NH, D, 4, D], bias [NH, 4, D], states [4, B, NH · D]."""

    class Function:
        def forward(self, training: bool, x: Any, states: Any, r: Any, bias: Any) -> tuple[torch.Tensor]:
            assert not training and not states.any()
            heads, dim = r.shape[0], r.shape[1]
            x = x.view(*x.shape[:2], heads, 4, dim).permute(1, 0, 3, 2, 4)
            call = SlstmCall(
                x, r.view(heads, dim, 4, dim).permute(2, 0, 1, 3), bias.view(heads, 4, dim).transpose(0, 1)
            )
            h = slstm_peers.by_token(call, slstm_peers.token)().transpose(0, 1).flatten(2)
            return (torch.stack([torch.cat([states[0][None], h])] * 4),)

    monkeypatch.setattr(slstm_peers, "built", lambda shape: Function())
    call = slstm_peers.case_of(CASE["b2s4d8"], "cpu")
    wanted = registry.get("slstm_sequence").reference(call)
    torch.testing.assert_close(slstm_peers.extension(call)(), wanted)

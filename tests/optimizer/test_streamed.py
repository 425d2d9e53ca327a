"""The gate's reference where memory holds no whole copy of the model in higher precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.gate.reference import Reference
from wavecrest.optimizer.gate.streamed import streamed


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, an encoder layer of torch, norms, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))
        self.out = nn.Linear(32, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.encoder(self.embed(tokens))) * self.scale)


class Reads(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.layer.weight


def tied() -> Workload:
    torch.manual_seed(0)
    return from_example(Tied().eval().bfloat16(), torch.randint(0, 50, (2, 7)))


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No whole model can be recast."""
    seen: list[Any] = []
    real = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is torch.float32:
            seen.append(module)
            raise torch.OutOfMemoryError("planted")
        return real(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", to)
    return seen


def test_it_answers_as_a_whole_copy_does() -> None:
    work = tied()
    whole = Tied().eval()
    whole.load_state_dict(work.model.state_dict())
    made = streamed(work.model, torch.float32)
    tokens = next(iter(work.buckets.values())).args[0]
    with torch.no_grad():
        # the buffer was rounded to bfloat16 in both
        assert torch.allclose(made(tokens), whole(tokens), atol=1e-5)
    assert made(tokens).dtype == torch.float32
    # nothing is left raised, and no parameter was copied
    for mine, theirs in zip(made.parameters(), work.model.parameters(), strict=True):
        assert mine is theirs and mine.dtype == torch.bfloat16
    assert all(buffer.dtype == torch.bfloat16 for buffer in work.model.buffers())


def test_weights_are_put_back_after_an_error() -> None:
    made = streamed(tied().model, torch.float32)
    with pytest.raises(IndexError):
        made(torch.tensor([[99]]))
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}


def test_the_gate_takes_it_where_a_copy_does_not_fit(small_memory: list[Any]) -> None:
    work = tied()
    gate = Gate.prepare(work, seed=0)
    assert small_memory and gate.note.startswith("memory holds no whole torch.float32 copy of the model: each module")
    assert not failures(gate.check(work.model))
    wrong = tied().model
    with torch.no_grad():
        wrong.norm.weight *= 1.1
    assert failures(gate.check(wrong))


def test_a_model_that_reads_weights_is_its_own_reference_with_the_reason(small_memory: list[Any]) -> None:
    work = from_example(Reads().bfloat16(), torch.randn(3, 16, dtype=torch.bfloat16))
    reference = Reference(work)
    assert not reference.note and reference.answer(next(iter(work.buckets.values()))) is None
    assert "the torch.float32 copy raised" in reference.note and "the original is the reference" in reference.note

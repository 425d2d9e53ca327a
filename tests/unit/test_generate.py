"""Greedy generation as a workload: the ids of transformers' own loop, steps that compile once, tokens a second."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest.cli import optimize as command
from wavecrest.cli.main import main
from wavecrest.errors import WorkloadError
from wavecrest.graphs.inductor import PRESETS, compile_module
from wavecrest.measure import workload
from wavecrest.measure.bootstrap import Interval
from wavecrest.measure.timing import Paired

transformers = pytest.importorskip("transformers")

from wavecrest.integrations import generate  # noqa: E402

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
IDS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    """A model whose greedy ids differ from step to step."""
    torch.manual_seed(0)
    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    return made


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return llama()


def make() -> Any:
    return llama(), {"input_ids": IDS}, {"max_new_tokens": 6}


def make_two() -> Any:
    return llama(), IDS


def test_the_ids_are_those_of_transformers(model: nn.Module) -> None:
    made = generate.of(model, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, {"max_new_tokens": 9})
    found = made.generate()
    assert found.shape == (2, 16) and len(set(found[0, 7:].tolist())) > 3
    assert torch.equal(found, made.by_library())
    assert torch.equal(found, model.generate(IDS, max_new_tokens=9, do_sample=False))  # type: ignore[operator]


def test_rows_end_where_transformers_ends_them(model: nn.Module) -> None:
    free = generate.of(model, IDS, {"max_new_tokens": 9}).generate()
    # one row ends with its third token, the other goes on; then both end
    for ends in (int(free[0, 9]), [int(free[0, 9]), int(free[1, 11])]):
        options = {"max_new_tokens": 9, "eos_token_id": ends, "pad_token_id": 0}
        made = generate.of(model, IDS, options)
        assert torch.equal(made.generate(), made.by_library())
        assert not torch.equal(made.generate(), free)


def test_a_bucket_gives_the_same_answer_at_every_call(model: nn.Module) -> None:
    made = generate.of(model, IDS, {"max_new_tokens": 6})
    want = {bucket: made.run(bucket) for bucket in ("decode", "prompt")}
    made.generate()
    for bucket in ("prompt", "decode", "decode", "prompt", "decode"):
        assert torch.equal(made.run(bucket), want[bucket])
    ids = made.generate()
    assert torch.equal(want["prompt"].argmax(-1), ids[:, 7]) and torch.equal(want["decode"].argmax(-1), ids[:, 8])


def test_a_compiled_step_serves_every_position(model: nn.Module) -> None:
    from torch._dynamo.utils import counters

    made = generate.of(model, IDS, {"max_new_tokens": 9})
    want, step = made.generate(), generate.Step(model)
    torch._dynamo.reset()
    # PyTorch's own kernels run this preset: nothing is compiled by Inductor
    compile_module(step, PRESETS["graph"])
    before = counters["stats"]["unique_graphs"]
    assert torch.equal(made.generate(step), want)
    assert counters["stats"]["unique_graphs"] - before == 2
    (check,) = made.quality(made.model, step)  # type: ignore[misc]
    assert check.passed and check.value == 1.0


def test_other_ids_are_no_pass(model: nn.Module) -> None:
    made = generate.of(model, IDS, {"max_new_tokens": 6})
    (check,) = made.quality(made.model, lambda **given: made.step(**given).roll(1, -1))  # type: ignore[misc]
    assert not check.passed and check.value < 1


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are known: the base takes 30 ms, the other 10."""

    def measure(base: Any, new: Any, **_more: Any) -> Paired:
        base(), new()
        return Paired((30.0,), (10.0,), 3.0, Interval(2.5, 3.5), "host wall")

    monkeypatch.setattr(generate.timing, "measure_pair", measure)


def test_throughput_counts_new_tokens(model: nn.Module, paired: None) -> None:
    made = generate.of(model, IDS, {"max_new_tokens": 3})
    found = made.throughput(made.model)
    assert (found.original, found.optimized, found.library) == pytest.approx((200.0, 600.0, 200.0))
    assert found.same_ids and "200.0 → 600.0 tokens/s, 3.00× [2.50, 3.50]" in found.lines()[0]
    assert not made.throughput(lambda **given: made.step(**given).roll(1, -1)).same_ids  # type: ignore[arg-type]


def test_the_command_writes_and_tells_tokens_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paired: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(spec: str, **given: Any) -> Any:
        loaded = workload.load(spec, device=given["device"])
        assert loaded.spec == f"generate:{__name__}:make" and loaded.name == "make"
        return SimpleNamespace(model=loaded.model, record=None, unwritten=""), loaded

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "print_summary", lambda *_: None)
    assert main(["optimize", "--generate", f"{__name__}:make", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "400.0 → 1200.0 tokens/s" in capsys.readouterr().out
    assert json.loads((tmp_path / "generate.json").read_text())["same_ids"] is True
    assert main(["optimize", "--generate", "a:b", "c:d"]) == 1


def test_source_of_a_generation_is_its_file() -> None:
    workload.load(f"generate:{__name__}:make", device="cpu")
    assert workload.source_of(f"generate:{__name__}:make") == Path(__file__).resolve()


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        (IDS, {}, "max_new_tokens"),
        (IDS, {"max_new_tokens": 1}, "at least 2"),
        (IDS, {"max_new_tokens": 4, "num_beams": 2}, "not num_beams"),
        (IDS, {"max_new_tokens": 4, "do_sample": True}, "greedy"),
        (IDS.float(), {"max_new_tokens": 4}, "int64"),
        ({"input_ids": IDS, "attention_mask": IDS * 0}, {"max_new_tokens": 4}, "without padding"),
        ({"pixel_values": IDS}, {"max_new_tokens": 4}, "not pixel_values"),
        (IDS, {"max_new_tokens": 4, "kv_quality": "1%"}, "nothing else is quantized"),
        (IDS, {"max_new_tokens": 4, "kv_cache": ["fp8", "int8"]}, "which tells them apart"),
        (IDS, {"max_new_tokens": 4, "kv_cache": [], "kv_quality": "1%"}, r"several in a list, not \[\]"),
        # it has no order of preference
        (IDS, {"max_new_tokens": 4, "kv_cache": {"fp8"}, "kv_quality": "1%"}, "several in a list, not {'fp8'}"),
        (IDS, {"max_new_tokens": 4, "kv_cache": 8}, "several in a list, not 8"),
    ],
    ids=[
        "no count", "one", "beams", "sampling", "floats", "padding", "images", "no cache", "no limit", "no format",
        "a set", "a number",
    ],
)  # fmt: skip
def test_what_it_does_not_take(model: nn.Module, inputs: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        generate.of(model, inputs, options)


def test_a_sliding_window_and_other_models_are_refused() -> None:
    config = transformers.MistralConfig(**SMALL, sliding_window=5)
    with pytest.raises(WorkloadError, match="StaticSlidingWindowLayer"):
        generate.of(transformers.MistralForCausalLM(config), IDS, {"max_new_tokens": 4})
    with pytest.raises(WorkloadError, match="not Linear"):
        generate.of(nn.Linear(2, 2), IDS, {"max_new_tokens": 4})
    with pytest.raises(WorkloadError, match="must return"):
        workload.load(f"generate:{__name__}:make_two", device="cpu")


@pytest.mark.gpu
def test_a_captured_step_gives_the_same_ids() -> None:
    from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id

    made = generate.of(llama().to("cuda"), IDS.to("cuda"), {"max_new_tokens": 12})
    params = {"buckets": list(made.buckets), "compile": ""}
    captured: Any = build(made.model, AppliedSteps().plus(step_by_id("capture"), params))
    assert torch.equal(made.generate(captured), made.generate())
    assert captured.eager_calls == 0 and len(captured._graphs) == 2


def test_the_gate_sees_what_calls_write(model: nn.Module) -> None:
    """Also where the same keys lie in the cache from calls before: other rounding is no write of its own."""
    from wavecrest.optimizer.gate import Gate
    from wavecrest.optimizer.gate.untouched import Untouched

    made = generate.of(model, IDS, {"max_new_tokens": 3})
    untouched = Untouched(made)
    # as the optimizer does it: behind the baseline, and behind the gate
    for bucket in ("prompt", "decode"):
        made.run(bucket)
    untouched.learn()
    gate = Gate.prepare(made, seed=0)
    untouched.learn()
    for bucket in ("prompt", "decode", "prompt"):
        made.run(bucket)
        # the original's own writes are no candidate's
        assert untouched.put_back() == []
    for site in gate.sites:
        assert {"cache.layers[0].keys", "cache.layers[1].values"} <= site.cases[0].written.keys(), site.label

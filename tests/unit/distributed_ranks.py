"""One rank of tests/unit/test_distributed.py: python -m tests.unit.distributed_ranks RANK FILE; prints what held."""

from __future__ import annotations

import copy
import logging.handlers
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from wavecrest import hardware
from wavecrest.errors import InvalidArgument, PlanError, RankFailed, StepRefused
from wavecrest.integrations import distributed
from wavecrest.integrations._shards import shards
from wavecrest.measure.workload import from_example
from wavecrest.optimizer.gate import reference as references
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id
from wavecrest.optimizer.steps.base import StepContext
from wavecrest.records import StepOutcome

IDS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False}
STEPS = ("fuse_qkv", "fuse_gate_up", "replace_norm", "replace_activation")


def say(held: str) -> None:
    sys.stdout.write(f"{held}\n")
    sys.stdout.flush()


def model_of(kind: str, seed: int = 0, **fields: Any) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **fields,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            # zeros and ones hide a bias that is added twice
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def plan_of(model: nn.Module) -> Plan:
    """A plan of the steps in STEPS, as a run would find them on this shard."""
    workload = from_example(model, INPUTS)
    device = hardware.detect("cpu")
    plan = Plan.start(workload, device, {"default": {}})
    applied = AppliedSteps()
    for name in STEPS:
        step = step_by_id(name)
        # as on a GPU: on the CPU there is nothing to gain from gated MLPs
        found = step.find(StepContext(workload, replace(device, kind="cuda"), model=build(model, applied)))
        assert found.sites, (name, found.note)
        applied = applied.plus(step, found.params)
        outcome = {"id": name, "title": step.title, "level": step.level, "params": found.params}
        plan.steps.append(StepOutcome(**outcome, verdict="kept", reason="a test's"))
        plan.stack.append(name)
    return plan


def with_cache(workload: Any, options: Any, **_: Any) -> Any:
    """The plan of a run that called the shard with its cache, as rank 0 does alone."""
    assert not any(layer.group for layer in shards(workload.model))
    workload.reset("default")
    return SimpleNamespace(plan=plan_of(workload.model))


def planned(workload: Any, options: Any, *, out: Path, **_: Any) -> Any:
    """Instead of a run that measures: its plan."""
    assert out == Path("folder") and options.budget == 3.0 and options.skip == ("environment",)
    # without communication, or the other rank, which waits, would have to call the model too
    assert not any(layer.group for layer in shards(workload.model))
    return SimpleNamespace(plan=plan_of(workload.model))


def answers(job: distributed._Job) -> None:
    for kind, fields in (
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Mistral", {"head_dim": 32}),
    ):
        one, divided = model_of(kind, **fields), model_of(kind, seed=job.rank, **fields)
        # as in transformers 5.17
        divided.config.base_model_tp_plan["embed_tokens"] = "embedding_rowwise"  # type: ignore[union-attr, index, operator]
        distributed.parallelize(divided)
        attention = divided.model.layers[0].self_attn  # type: ignore[union-attr, index]
        assert attention.q_proj.weight.shape[0] * 2 == one.model.layers[0].self_attn.q_proj.weight.shape[0]
        assert isinstance(attention.o_proj, distributed.RowParallel)
        tied = bool(fields.get("tie_word_embeddings"))
        assert isinstance(divided.lm_head, nn.Linear if tied else distributed.GatheredLinear)
        assert distributed._check(job, one, divided, INPUTS) == "", kind
        say(f"answers {kind}")


def followed(job: distributed._Job) -> None:
    one, divided = model_of("Llama"), distributed.parallelize(model_of("Llama"))
    distributed.api.run = planned  # type: ignore[assignment]
    result = distributed.optimize(divided, INPUTS, out="folder", budget=3.0)
    assert all(layer.group for layer in shards(divided))
    assert result.refused == "" and (result.local is None) == bool(job.rank)
    layer = result.model.model.layers[0]  # type: ignore[union-attr, index]
    # 4 + 2 + 2 heads of 16 columns, and 2 · 96 columns, over two ranks
    assert layer.self_attn.q_proj.fused.weight.shape == (64, 64)
    assert layer.mlp.gate_proj.fused.weight.shape == (96, 64)
    assert type(layer.input_layernorm).__module__.startswith("wavecrest.")
    assert type(layer.mlp).__module__.startswith("wavecrest.")
    assert distributed._check(job, one, result.model, INPUTS) == ""
    assert not isinstance(divided.model.layers[0].self_attn.q_proj, type(layer.self_attn.q_proj))  # type: ignore
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, result.plan.model_dump_json(), group=job.group)
    assert plans[0] == plans[1]
    say("followed")
    apply = Plan.apply

    def damaged(self: Plan, model: nn.Module, inputs: Any = None) -> nn.Module:
        made = apply(self, model, inputs)
        if job.rank:
            # of its own, as plans share weights
            head = made.lm_head.linear  # type: ignore[union-attr]
            made.lm_head.linear.weight = nn.Parameter(head.weight * 1.2)  # type: ignore[union-attr]
        return made

    Plan.apply = damaged  # type: ignore[assignment]
    result = distributed.optimize(divided, INPUTS, out="folder", budget=3.0)
    assert "allowed" in result.refused and result.model is divided, result.refused
    say("refused")
    Plan.apply = apply  # type: ignore[method-assign]


def compiled(job: distributed._Job) -> None:
    divided = distributed.parallelize(model_of("Llama"))
    whole = torch.compile(divided, backend="aot_eager", fullgraph=True)
    assert distributed._check(job, divided, whole, INPUTS) == ""  # type: ignore[arg-type]
    say("compiled")


def rounded(job: distributed._Job) -> None:
    """A model whose own rounding is large allows as much, as one process does: all ranks call it in float32."""
    deep = model_of("Llama", initializer_range=0.5).bfloat16()
    divided = distributed.parallelize(deep)
    other = copy.deepcopy(divided)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)) - 0.5
            parameter.mul_((1 + noise * 2.0**-8).bfloat16())
    problem = distributed._check(job, divided, other, INPUTS)
    assert problem == "", problem
    made = distributed._Reference
    # without room for a copy on one rank
    keep = copy.deepcopy
    workload = from_example(divided, INPUTS)
    if job.rank:
        copy.deepcopy = planted_memory_error  # type: ignore[assignment]
    reference = made(job, workload, distributed._Own(workload))
    copy.deepcopy = keep
    assert reference.note.startswith("rank 1: no torch.float32 copy of the model (MemoryError: planted)"), (
        reference.note
    )
    assert reference.answer(workload.buckets["default"]) is None
    say("rounded")


def planted_memory_error(*_: Any) -> Any:
    raise MemoryError("planted")


class Full(nn.Module):
    """An activation that one rank has no memory for in float32."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 1 and x.dtype == torch.float32:
            raise torch.OutOfMemoryError("planted\nsecond line")
        return nn.functional.silu(x)


def out_of_memory(job: distributed._Job) -> None:
    """One rank raises in the float32 copy, between two sums that the other would wait in: one line on both."""
    divided = distributed.parallelize(model_of("Llama").bfloat16())
    divided.model.layers[1].mlp.act_fn = Full(job.rank)  # type: ignore[union-attr, index]
    told = logging.handlers.BufferingHandler(99)
    distributed.logger.addHandler(told)
    assert distributed._check(job, divided, divided, INPUTS) == ""
    one = "rank 1: the torch.float32 copy raised OutOfMemoryError: planted; the original is the reference"
    assert {record.getMessage() for record in told.buffer} == {one}, told.buffer
    told.buffer.clear()
    keep = references._raise_floats
    if job.rank:
        references._raise_floats = planted_memory_error  # type: ignore[assignment]
    assert distributed._check(job, divided, divided, INPUTS) == ""
    references._raise_floats = keep
    one = "rank 1: inputs for the torch.float32 copy: MemoryError: planted; the original is the reference"
    assert {record.getMessage() for record in told.buffer} == {one}, told.buffer
    distributed.logger.removeHandler(told)
    say("out of memory")


def stored(job: distributed._Job) -> None:
    """A plan in a file, which rank 0 reads."""
    divided = distributed.parallelize(model_of("Llama"))
    plan = plan_of(divided)
    file = Path(f"{sys.argv[2]}.plan.json")
    if job.rank == 0:
        plan.save(file)
    result = distributed.apply(divided, file, INPUTS)
    assert result.refused == "" and result.local is None and result.plan.stack == list(STEPS)
    assert type(result.model.model.layers[0].input_layernorm).__module__.startswith("wavecrest.")  # type: ignore
    assert not type(divided.model.layers[0].input_layernorm).__module__.startswith("wavecrest.")  # type: ignore
    missing = Path("none.json") if job.rank == 0 else file
    try:
        distributed.apply(divided, missing, INPUTS)
    except (PlanError, RankFailed) as error:
        assert "none.json" in str(error) and isinstance(error, RankFailed) == bool(job.rank), error
    else:
        raise AssertionError("no such file")
    say("stored")


def cached(job: distributed._Job) -> None:
    """A step of decoding: each rank has a key-value cache of its own heads, which no message carries."""
    from transformers import StaticCache

    one, divided = model_of("Llama"), distributed.parallelize(model_of("Llama"))
    step = {"input_ids": IDS[:, :1], "use_cache": True}
    answers, caches = [], []
    for model in (one, divided):
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(input_ids=IDS, past_key_values=cache, use_cache=True)
            caches.append(cache)
            answers.append(model(**step, past_key_values=cache).logits)
    torch.testing.assert_close(answers[1], answers[0])
    # plain tensors, which nothing has to wait for
    down = divided.model.layers[0].mlp.down_proj  # type: ignore[union-attr, index]
    assert type(down(torch.ones(1, 48))) is type(answers[1]) is torch.Tensor
    assert caches[1].layers[0].keys.shape[1] * 2 == caches[0].layers[0].keys.shape[1]

    def rewind(_bucket: str) -> None:
        for layer in caches[1].layers:
            layer.cumulative_length.fill_(IDS.shape[1])

    inputs = {**step, "past_key_values": caches[1]}
    before = [layer.keys.clone() for layer in caches[1].layers]
    distributed.api.run = with_cache  # type: ignore[assignment]
    result = distributed.optimize(divided, inputs, reset=rewind, budget=3.0)
    assert result.refused == "" and result.plan.stack == list(STEPS), result.refused
    for layer, keys in zip(caches[1].layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and int(layer.cumulative_length) == IDS.shape[1]
    rewind("")
    with torch.no_grad():
        torch.testing.assert_close(result.model(**inputs).logits, answers[0])
    say("cached")
    damaged = model_of("Llama", seed=job.rank)
    distributed.parallelize(damaged)
    with torch.no_grad():
        # of one rank's heads alone
        damaged.model.layers[1].self_attn.v_proj.weight.mul_(1.2 if job.rank else 1.0)  # type: ignore[union-attr, index]
    assert "allowed" in distributed._check(job, divided, damaged, inputs, rewind)
    stranger = copy.deepcopy(caches[1])
    try:
        distributed._Own(from_example(divided, inputs)).sent(stranger)
    except InvalidArgument as error:
        assert "StaticCache that is not of the example inputs" in str(error)
        say("own caches")


class Refusing(nn.Module):
    """Cannot be captured, on any rank."""

    def forward(self, **_inputs: Any) -> Any:
        raise StepRefused("the model cannot be captured: planted")


def workload(device: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model that all ranks have a part of, as a user's function returns it."""
    return distributed.parallelize(model_of("Llama")).to(device), INPUTS


def whole(device: str) -> tuple[nn.Module, dict[str, Any]]:
    """The same, not divided."""
    return model_of("Llama").to(device), INPUTS


def commanded(job: distributed._Job) -> None:
    """The command line on each rank, as torchrun starts it."""
    from wavecrest.cli import main
    from wavecrest.cli import optimize as command

    def run(workload: Any, options: Any, *, out: Path, **_: Any) -> Any:
        assert (
            options.budget == 90.0 and options.level == 4 and options.skip == ("environment",) and out == Path("here")
        )
        return SimpleNamespace(plan=plan_of(workload.model), record="the record", unwritten="")

    def printed(record: Any, folder: Path | None) -> None:
        assert record == "the record" and folder == Path("here") and job.rank == 0
        say("printed")

    distributed.api.run, command.print_summary = run, printed  # type: ignore[assignment]
    # this job goes on
    dist.destroy_process_group = lambda: None  # type: ignore[assignment]
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(job.rank), "LOCAL_RANK": str(job.rank)}
    here = ["optimize", "tests.unit.distributed_ranks:workload", "--out", "here", "--budget", "90s", "--level", "4"]
    assert main.main(here) == 0
    assert main.main([*here, "--resume", "runs"]) == 1
    assert main.main([*here, "--quantize", "int8", "--quality", "1%"]) == 1
    assert main.main(["optimize", "tests.unit.distributed_ranks:whole"]) == 1
    assert main.main(["tune", "tests.unit.distributed_ranks:whole"]) == 1
    if job.rank:
        assert main.main(["tune", "rms_norm"]) == 0
    refused = distributed._check
    distributed._check = lambda *_: "planted"  # type: ignore[assignment]
    assert main.main(here) == 2
    distributed._check = refused  # type: ignore[assignment]
    del os.environ["WORLD_SIZE"]
    say("commanded")


def not_captured(job: distributed._Job) -> None:
    divided = distributed.parallelize(model_of("Llama"))
    problem = distributed._check(job, divided, Refusing(), INPUTS)
    assert "cannot be captured: planted" in problem, problem
    say("not captured")


def refusals(job: distributed._Job) -> None:
    uneven = model_of("Llama")
    uneven.config.num_key_value_heads = 3
    strange = model_of("Llama")
    strange.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "by_experts"}
    odd = model_of("Llama")
    odd.model.layers[1].mlp.down_proj = nn.Linear(97, 64)  # type: ignore[union-attr, index]
    for model, reason in (
        (strange, "no style by_experts"),
        (odd, "model.layers.1.mlp.down_proj: its size of 97 does not divide by 2 ranks"),
        (nn.Linear(4, 4), "has no tensor-parallel plan"),
        (distributed.parallelize(model_of("Llama")), "takes a model before other changes"),
        (uneven, "num_key_value_heads of 3 does not divide by 2 ranks"),
    ):
        before = [(name, parameter.shape) for name, parameter in model.named_parameters()]
        try:
            distributed.parallelize(model)
        except InvalidArgument as error:
            assert reason in str(error), error
        else:
            raise AssertionError(reason)
        assert before == [(name, parameter.shape) for name, parameter in model.named_parameters()]
    mesh = init_device_mesh("cpu", (1, 2))
    try:
        distributed.parallelize(model_of("Llama"), mesh)
    except InvalidArgument as error:
        assert "a mesh of one dimension, not 2" in str(error)
    else:
        raise AssertionError("a mesh of two dimensions")
    divided = distributed.parallelize(model_of("Llama"))
    try:
        with distributed.gather_local(divided):
            raise KeyError
    except KeyError:
        # the next call would be a rank's part of the answer otherwise
        assert all(layer.group for layer in shards(divided))
    say("refusals")


def failures(job: distributed._Job) -> None:
    def wrong() -> None:
        raise ValueError("no such op\nsecond line")

    try:
        distributed.on_rank_zero(wrong)
    except ValueError:
        assert job.rank == 0
    except RankFailed as error:
        assert job.rank == 1 and str(error) == "rank 0 failed: ValueError: no such op"
    assert distributed.on_rank_zero(lambda: job.rank + 5) == 5
    say("failures")
    if job.rank:
        os._exit(7)
    try:
        job.agree(None)
    except RankFailed as error:
        assert "another rank ended while rank 0 waited" in str(error) and "\n" not in str(error), error
        say("ended")


def main() -> None:
    """Run everything in turn."""
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    job = distributed._Job()
    for part in (
        answers,
        followed,
        compiled,
        rounded,
        out_of_memory,
        stored,
        cached,
        commanded,
        not_captured,
        refusals,
        failures,
    ):
        part(job)
    os._exit(0)


if __name__ == "__main__":
    main()

"""Projection fusion: right whenever it claims to be, refused with a reason otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import wavecrest
from wavecrest import hardware
from wavecrest.measure.workload import from_example
from wavecrest.nn.fused_weights import FusedSlice
from wavecrest.ops import PackedWeight, pack
from wavecrest.optimizer.steps import AppliedSteps, Found, Prediction, StepContext, build, step_by_id, structural_copy
from wavecrest.records import BucketProfile, CategoryTime, Ceilings


class Attention(nn.Module):
    """Three projections of one input, of different widths as in grouped-query attention."""

    def __init__(self, *, bias: bool = True, kv_bias: bool | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 64, bias=bias)
        self.k_proj = nn.Linear(32, 16, bias=bias if kv_bias is None else kv_bias)
        self.v_proj = nn.Linear(32, 16, bias=bias if kv_bias is None else kv_bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        b, s, _ = x.shape
        q = q.view(b, s, 4, 16).transpose(1, 2)
        k, v = (t.view(b, s, 1, 16).transpose(1, 2) for t in (k, v))
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class OtherInput(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x).sum() + self.k_proj(x * 2).sum() + self.v_proj(x).sum()


class OtherOrder(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.k_proj(x).sum() + self.q_proj(x).sum() + self.v_proj(x).sum()


class ChangedBetween(Attention):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        total = self.q_proj(x).sum()
        x.mul_(2)
        return total + self.k_proj(x).sum() + self.v_proj(x).sum()


class CalledTwice(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x).sum() + self.k_proj(x).sum() + self.v_proj(x).sum() + self.q_proj(x).sum()


def find(model: nn.Module, step: str = "fuse_qkv"):  # type: ignore[no-untyped-def]
    x = torch.randn(2, 5, 32)
    context = StepContext(from_example(model, x), hardware.cpu(), model=structural_copy(model))
    return step_by_id(step).find(context)


@pytest.mark.parametrize(
    ("bias", "kv_bias"), [(True, None), (False, None), (True, False)], ids=["bias", "no bias", "some"]
)
def test_fused_equals_original(bias: bool, kv_bias: bool | None) -> None:
    model = nn.Sequential(Attention(bias=bias, kv_bias=kv_bias))
    found = find(model)
    assert found.sites == ("0",)
    made = build(model, AppliedSteps().plus(step_by_id("fuse_qkv"), found.params))
    assert isinstance(made[0].q_proj, FusedSlice) and isinstance(model[0].q_proj, nn.Linear)
    for shape in ((2, 5, 32), (1, 1, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-6)
    fused = made[0].q_proj.fused
    assert fused.made is None
    # what code reads of a Linear is still there
    torch.testing.assert_close(made[0].k_proj.weight, model[0].k_proj.weight)
    assert made[0].v_proj.out_features == 16 and made[0].v_proj.in_features == 32


def test_a_cache_does_not_count_as_rows() -> None:
    """The prediction goes by what the layers read, not by the largest tensor of the call."""

    class Decoding(Attention):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            return super().forward(x).sum() + cache.mean()

    model, step = Decoding(), step_by_id("fuse_qkv")
    predicted = []
    for slots in (1, 100_000):
        workload = from_example(model, (torch.randn(2, 5, 32), torch.zeros(slots, 4)))
        context = StepContext(workload, hardware.cpu(), model=structural_copy(model), profile=profile())
        found = step.find(context)
        assert found.rows == (10,)
        predicted.append(step.predict(found, context).ratio)
    assert predicted[0] == predicted[1] > 1.0


class Projections(nn.Module):
    """Projections of one input that hold no memory."""

    def __init__(self, width: int, outputs: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), outputs, strict=False):
            self.add_module(name, nn.Linear(width, size, bias=False, device="meta", dtype=dtype))


def predicted(model: Sequence[nn.Module], rows: int, context: StepContext) -> Prediction:
    context.model = nn.ModuleList(model)
    groups = [[f"{index}.{name}" for name, _ in one.named_children()] for index, one in enumerate(model)]
    found = Found(tuple(str(index) for index in range(len(model))), {"groups": groups}, rows=(rows,) * len(model))
    return step_by_id("fuse_qkv").predict(found, context)


# about as in the records of evidence/nvidia-h200 and nvidia-h100: blocks, width, outputs, rows, dtype; ms of a call, of
# gaps, of GEMMs, calls of GEMMs and of all kernels; the measured speed-up
RECORDED = {
    "BERT-base, 32 x 512": (12, 768, (768, 768, 768), 16384, "float16", 7.9, 0.2, 4.5, 73, 200, 1.01),
    "Llama 1.2B, a prompt": (16, 2048, (2048, 512, 512), 2048, "bfloat16", 9.83, 0.58, 5.5, 114, 285, 1.016),
    "8B, a token": (32, 4096, (4096, 1024, 1024), 1, "bfloat16", 7.37, 0.9, 4.7, 226, 700, 1.104),
    "8B, a token, gate and up": (32, 4096, (14336, 14336), 1, "bfloat16", 5.69, 0.45, 4.0, 160, 600, 1.034),
    "8B, a token, H100": (32, 4096, (4096, 1024, 1024), 1, "bfloat16", 9.54, 0.96, 6.0, 386, 1600, 1.061),
    "MiniLM, one sentence": (6, 384, (384, 384, 384), 12, "float32", 0.515, 0.1, 0.33, 61, 93, 1.22),
}


@pytest.mark.parametrize("case", RECORDED)
def test_the_prediction_is_near_what_was_measured(case: str) -> None:
    blocks, width, outputs, rows, dtype, wall, idle, gemm, calls, kernels, measured = RECORDED[case]
    work = from_example(nn.Identity(), torch.ones(1))
    other = CategoryTime(category="other", ms=wall - idle - gemm, share=1 - gemm / (wall - idle), calls=kernels - calls)
    ceilings = Ceilings(source="", bandwidth=4100.0, peak={"float16": 730.0, "bfloat16": 730.0, "float32": 51.0})
    context = StepContext(work, hardware.cpu(), profile(wall, idle, gemm, calls, other), ceilings=ceilings)
    made = predicted([Projections(width, outputs, getattr(torch, dtype)) for _ in range(blocks)], rows, context)
    assert made.ratio == pytest.approx(measured, abs=0.06), made.basis


def test_one_read_of_the_input_saves_time_where_bytes_set_it() -> None:
    work = from_example(nn.Identity(), torch.ones(1))
    ceilings = Ceilings(source="", bandwidth=1000.0, peak={"float32": 50.0})
    context = StepContext(work, hardware.cpu(), profile(wall=10.0, gemm=9.0, calls=3), ceilings=ceilings)
    # three reads of 2^20 rows of 32 (134 MB, 0.134 ms) become one; with 100 times the columns arithmetic sets the time
    assert (
        "reads of the input 268 µs" in predicted([Projections(32, (32, 32, 32), torch.float32)], 1 << 20, context).basis
    )
    assert "reads" not in predicted([Projections(3200, (3200,) * 3, torch.float32)], 1 << 14, context).basis
    # nor without known peaks, nor is more saved than the GEMMs take
    context.ceilings = None
    assert "reads" not in predicted([Projections(32, (32, 32, 32), torch.float32)], 1 << 20, context).basis
    context = StepContext(work, hardware.cpu(), profile(wall=10.0, gemm=0.003, calls=3), ceilings=ceilings)
    ratio = predicted([Projections(32, (32, 32, 32), torch.float32)], 1 << 20, context).ratio
    assert ratio == pytest.approx(1.0003, abs=1e-4)


def profile(
    wall: float = 1, idle: float | None = None, gemm: float = 0.5, calls: int = 3, *others: CategoryTime
) -> list[BucketProfile]:
    """Half of the time is in GEMMs, if the times are not given."""
    kernel = wall - (idle or 0.0)
    rows = [CategoryTime(category="gemm", ms=gemm, share=gemm / kernel, calls=calls), *others]
    return [
        BucketProfile(
            bucket="default", wall_ms=wall, kernel_ms=kernel, idle_ms=idle, launches=0, categories=rows, ops=[],
            uncategorized=[],
        )
    ]  # fmt: skip


def test_slices_are_right_in_any_order_and_for_other_inputs() -> None:
    model = Attention()
    made = build(model, AppliedSteps().plus(step_by_id("fuse_qkv"), find(model).params))
    x, y = torch.randn(3, 32), torch.randn(3, 32)
    for calls in ([("k_proj", x)], [("q_proj", x), ("k_proj", y)], [("v_proj", y), ("q_proj", y), ("v_proj", x)]):
        for name, value in calls:
            torch.testing.assert_close(getattr(made, name)(value), getattr(model, name)(value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OtherInput, "different inputs"),
        (OtherOrder, "another order"),
        (ChangedBetween, "changed in place"),
        (CalledTwice, "not called exactly once"),
    ],
    ids=["other input", "other order", "changed between", "called twice"],
)
def test_refused_with_reason(make: Callable[[], nn.Module], reason: str) -> None:
    found = find(make())
    assert found.sites == () and reason in found.note


def test_hooks_and_subclasses_are_left_alone() -> None:
    model = Attention()
    model.k_proj.register_forward_hook(lambda *_: None)
    assert "hook" in find(model).note

    class Special(nn.Linear):
        pass

    model = Attention()
    model.v_proj = Special(32, 16)
    assert "is a Special, not a plain Linear or Conv2d" in find(model).note


def test_fused_traces_as_one_graph() -> None:
    model = Attention().eval()
    made = build(model, AppliedSteps().plus(step_by_id("fuse_qkv"), find(model).params))
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    """Parallel layers with parents of their own, as in Inception, and a linear layer of another input between two."""

    def __init__(self, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Conv2d(4, 3, 1), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(4, 5, 1, bias=False), nn.Conv2d(5, 2, 3, padding=1))
        self.c = nn.Sequential(nn.Conv2d(4, 4, 1, stride=stride, groups=groups))
        self.first, self.between, self.second = nn.Linear(10, 7), nn.Linear(7, 3), nn.Linear(10, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.a(x), self.b(x), self.c(x)], 1).mean((2, 3))
        y = nn.functional.pad(y, (0, 10 - y.shape[1]))
        return torch.cat([self.between(self.first(y)), self.second(y)], 1)


def find_parallel(model: nn.Module, x: Tensor):  # type: ignore[no-untyped-def]
    context = StepContext(from_example(model, x), hardware.cpu(), model=structural_copy(model))
    return step_by_id("fuse_parallel").find(context)


def test_parallel_layers_are_found_by_data_flow() -> None:
    model = Branches().eval()
    x = torch.randn(2, 4, 5, 7)
    found = find_parallel(model, x)
    assert found.params["groups"] == [["a.0", "b.0", "c.0"], ["first", "second"]]
    made = build(model, AppliedSteps().plus(step_by_id("fuse_parallel"), found.params))
    for shape in ((2, 4, 5, 7), (3, 4, 1, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-5)
    # alone, each is its own slice
    torch.testing.assert_close(made.c[0](x), model.c[0](x), rtol=1e-5, atol=1e-6)


def test_layers_that_differ_or_are_far_apart_are_left_alone() -> None:
    from wavecrest.errors import StepRefused

    x = torch.randn(2, 4, 5, 5)
    model = Branches(groups=2).eval()
    assert find_parallel(model, x).params["groups"] == [["a.0", "b.0"], ["first", "second"]]
    with pytest.raises(StepRefused, match="cannot be one layer"):
        step_by_id("fuse_parallel").apply(structural_copy(model), {"groups": [["a.0", "c.0"]]})

    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.parts[0](x)
            for part in list(self.parts)[1:4]:
                y = part(y)
            return y + self.parts[4](x)

    assert not find_parallel(Far(), torch.randn(2, 4)).sites


def test_two_threads_never_mix_their_results() -> None:
    """The input and the result are one value: a thread reads both of another's or of its own."""
    model = Attention()
    made = build(model, AppliedSteps().plus(step_by_id("fuse_qkv"), find(model).params))
    x, y = torch.randn(3, 32), torch.randn(3, 32)
    made.q_proj(x)
    fused, own = made.q_proj.fused, made.q_proj.fused.product_of

    def other_thread(*given: Tensor) -> Tensor:
        # another thread begins and ends its wide result while this one computes its own
        fused.product_of = own
        made.q_proj(x)
        return own(*given)

    fused.product_of = other_thread
    torch.testing.assert_close(made.q_proj(y), model.q_proj(y), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.k_proj(x), model.k_proj(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.k_proj(y), model.k_proj(y), rtol=1e-5, atol=1e-6)


def test_gate_up_of_a_transformers_mlp() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 7))
    context = StepContext(from_example(model, {"input_ids": ids}), hardware.cpu(), model=structural_copy(model))
    applied = AppliedSteps()
    for name in ("fuse_qkv", "fuse_gate_up"):
        found = step_by_id(name).find(context)
        assert len(found.sites) == 1, found.note
        applied = applied.plus(step_by_id(name), found.params)
    made = build(model, applied)
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    # nothing of the original moved
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4", "fp8"])
def test_packed_layers_are_one(format: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = wavecrest.quantize(transformers.LlamaForCausalLM(config).eval(), format).model
    ids = torch.randint(0, 64, (2, 3))
    context = StepContext(from_example(model, {"input_ids": ids}), hardware.cpu(), model=structural_copy(model))
    applied = AppliedSteps()
    for name in ("fuse_qkv", "fuse_gate_up"):
        found = step_by_id(name).find(context)
        assert len(found.sites) == 2, found.note
        applied = applied.plus(step_by_id(name), found.params)
    # in one kernel gate, up and the activation between them
    applied = applied.plus(step_by_id("replace_activation"), {"sites": [f"model.layers.{i}.mlp" for i in (0, 1)]})
    made = build(model, applied)
    before, after = model.model.layers[0], made.model.layers[0]
    fused = after.self_attn.q_proj.fused.weight
    assert isinstance(fused, PackedWeight) and fused.format == format and len(fused) == 256
    assert type(before.self_attn.q_proj) is wavecrest.nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
        # one after the other, and a slice alone
        x = torch.randn(3, 128)
        torch.testing.assert_close(after.self_attn.k_proj(x), before.self_attn.k_proj(x), rtol=1e-5, atol=1e-6)


def test_packed_layers_of_other_formats_are_not_one() -> None:
    def found_with(q: PackedWeight, k: PackedWeight, act: str | None = None) -> Found:
        model = nn.Sequential(Attention(bias=False))
        model[0].q_proj = wavecrest.nn.Linear.from_weight(q, None, act)
        model[0].k_proj = wavecrest.nn.Linear.from_weight(k)
        model[0].v_proj = wavecrest.nn.Linear.from_weight(pack(torch.randn(16, 32), "int8"))
        return find(model)

    wide, narrow = torch.randn(64, 32), torch.randn(16, 32)
    assert len(found_with(pack(wide, "int8"), pack(narrow, "int8")).sites) == 1
    for q, k in ((pack(wide, "int8"), pack(narrow, "fp8")), (pack(wide, "fp8"), pack(narrow, "int8"))):
        refused = found_with(q, k)
        assert not refused.sites and "the layers differ in input width, dtype or format" in refused.note
    assert "not a plain Linear" in found_with(pack(wide, "int8"), pack(narrow, "int8"), "silu").note


def test_steps_of_one_look_share_a_forward() -> None:
    model = nn.Sequential(Attention())
    context = StepContext(from_example(model, torch.randn(2, 5, 32)), hardware.cpu(), model=structural_copy(model))
    forwards = []
    assert context.model is not None
    context.model.register_forward_hook(lambda *_args: forwards.append(1))
    # no names fit: no forward
    assert not step_by_id("fuse_gate_up").find(context).sites and not forwards
    assert step_by_id("fuse_qkv").find(context).sites == ("0",)
    assert step_by_id("fuse_parallel").find(context).note == "no such group of layers"
    assert len(forwards) == 1
    # on the next ground they look anew
    context.shared.clear()
    assert step_by_id("fuse_qkv").find(context).sites and len(forwards) == 2

"""Padded batches of transformers' encoders: which stacks leave padding out, by what proof, and what stays as it is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware, records
from wavecrest.errors import PlanError, StepRefused, Unsupported
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import encoder_layer, unpadded
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, step_by_id, structural_copy

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
STEP = step_by_id("unpad")
GPU = hardware.Device("cuda", 0, "gfx942", "pretended", 304, 1 << 30, "hip")
B, S = 4, 10
SIZES = {
    "hidden_size": 32, "embedding_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 64, "pad_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip
DISTIL = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
RIGHT = torch.arange(S) < torch.tensor([S, 4, 1, 7])[:, None]
HOLES = RIGHT.clone()
HOLES[0, 3:5] = HOLES[1, 0] = False
# what is hidden: every form that a caller may give
MASKS = {"right": RIGHT, "left": RIGHT.flip(1), "holes": HOLES}


class Pooled(nn.Module):
    """Sentence vectors as sentence-transformers makes them: the mean over the tokens that the mask shows."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.to(rows.dtype)[..., None]
        return (rows * weights).sum(1) / weights.sum(1)


def model_of(name: str, head: str = "ForSequenceClassification", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**{**SIZES, **options}))
    for parameter in made.parameters():
        # no layer is like another, and no bias is zero
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made.eval()


def pooled(name: str = "Bert", **options: Any) -> Pooled:
    return Pooled(model_of(name, "Model", **{"add_pooling_layer": False, **options})).eval()


def workload(model: nn.Module, mask: Tensor | None = RIGHT, dtype: torch.dtype = torch.long) -> Workload:
    ids = torch.randint(1, 64, (B, S), generator=torch.Generator().manual_seed(1))
    return from_example(model, {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask.to(dtype)}))


def find(work: Workload, device: Any = None) -> Found:
    return STEP.find(StepContext(work, device or hardware.cpu(), model=structural_copy(work.model)))


def applied(work: Workload) -> nn.Module:
    found = find(work)
    assert found.sites, found.note
    return build(work.model, AppliedSteps().plus(STEP, found.params))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the sequences of each call of packed attention."""
    seen: list[list[int]] = []
    real = encoder_layer.Rows.attend

    def attend(self: encoder_layer.Rows, *args: Any) -> Tensor:
        seen.append(self.sizes)
        return real(self, *args)

    monkeypatch.setattr(encoder_layer.Rows, "attend", attend)
    return seen


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Bert", {}),
        ("XLMRoberta", {}),
        ("Electra", {}),
        ("DistilBert", DISTIL),
        # a projection of the embeddings is part of the stack, and its one layer runs twice
        ("Albert", {}),
    ],
)
def test_a_classifiers_layers_compute_the_tokens_alone(
    name: str, options: dict[str, Any], rows: list[list[int]]
) -> None:
    work = workload(model_of(name, **options))
    made = applied(work)
    rows.clear()
    assert not failures(Gate.prepare(work, seed=0).check(made))
    assert RIGHT.sum(1).tolist() in rows and len({tuple(sizes) for sizes in rows}) > 1
    # the model itself is as it was, and so are the names of classes
    rows.clear()
    work.run("default")
    assert not rows
    assert [type(one).__name__ for one in made.modules()] == [type(one).__name__ for one in work.model.modules()]


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_tokens_have_the_rows_that_they_have_beside_padding(
    form: str, dtype: torch.dtype, rows: list[list[int]]
) -> None:
    """In float64, against the model as it is; zeros are in the place of padding."""
    model = pooled().double()
    work = workload(model)
    made = applied(work)
    rows.clear()
    mask = MASKS[form]
    given = {"input_ids": work.buckets["default"].kwargs["input_ids"], "attention_mask": mask.to(dtype)}
    with torch.no_grad():
        expected, found = (one.encoder(**given).last_hidden_state for one in (model, made))
        torch.testing.assert_close(made(**given), model(**given), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-12, atol=1e-12)
    assert not bool(found[~mask].any()) and bool(expected[~mask].any())
    assert rows == [mask.sum(1).tolist()] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_mean_passes_the_gate_in_any_dtype(dtype: torch.dtype) -> None:
    work = workload(pooled().to(dtype))
    assert find(work).params["masks"] == "any"
    assert not failures(Gate.prepare(work, seed=0).check(applied(work)))


def test_masks_that_leave_nothing_out_are_dropped_or_kept(rows: list[list[int]], monkeypatch: Any) -> None:
    """No mask where nothing is padded; padding stays where a sequence has no token, or its kind was not proven."""
    work = workload(model_of("Bert"))
    made = applied(work)
    rows.clear()
    masks: list[Any] = []
    real = nn.functional.scaled_dot_product_attention

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        masks.append(kwargs.get("attn_mask"))
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watch)
    ids = work.buckets["default"].kwargs["input_ids"]
    empty = RIGHT.clone()
    empty[1] = False
    # a classifier reads the first row, which is padding under the second and third mask
    cases = {"all": torch.ones_like(RIGHT), "left": RIGHT.flip(1), "holes": HOLES, "empty": empty, "none": None}
    with torch.no_grad():
        for name, mask in cases.items():
            masks.clear()
            given = {"input_ids": ids, "attention_mask": mask}
            found = made(**given).logits
            assert all((one is None) == (name in ("all", "none")) for one in masks) and len(masks) == 2
            torch.testing.assert_close(found, work.model(**given).logits)
    assert not rows


def test_what_layers_compute_is_not_packed_where_the_caller_sees_it(rows: list[list[int]]) -> None:
    work = workload(model_of("DistilBert", **DISTIL))
    made = applied(work)
    given = work.buckets["default"].kwargs
    rows.clear()
    # gradients, training, hidden states by argument and by configuration
    expected, found = (one(**given).logits.sum() for one in (work.model, made))
    torch.testing.assert_close(found, expected)
    found.backward()
    with torch.no_grad():
        states = made(**given, output_hidden_states=True).hidden_states
        right = work.model(**given, output_hidden_states=True).hidden_states
        assert [one.shape for one in states] == [(B, S, 32)] * 3
        torch.testing.assert_close(states, right)
        made.config.output_hidden_states = True
        assert len(made(**given).hidden_states) == 3
        made.config.output_hidden_states = False
        made.train()(**given)
        assert not rows
        made.eval()(**given)
        assert rows


def test_positions_of_a_caller_go_with_their_tokens(rows: list[list[int]]) -> None:
    """They reach the layers too, which may read them: those of the tokens."""

    class Reading(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states: Tensor, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            added = 0.0 if position_ids is None else 0.1 * position_ids[..., None]
            return self.layer(hidden_states + added, *args, **kwargs)

    work = workload(pooled())
    layers: Any = work.model.encoder.encoder.layer
    layers[1] = Reading(layers[1])
    made = applied(work)
    rows.clear()
    for positions in (torch.arange(S).flip(0)[None], torch.arange(B * S).view(B, S) % 32):
        given = {**work.buckets["default"].kwargs, "position_ids": positions}
        with torch.no_grad():
            expected, found = (one.encoder(**given).last_hidden_state for one in (work.model, made))
        torch.testing.assert_close(found[RIGHT], expected[RIGHT])
    assert len(rows) == 4


def test_a_compiled_or_exported_model_computes_padding_in_one_graph(rows: list[list[int]]) -> None:
    work = workload(model_of("Bert"))
    made = applied(work)
    given = work.buckets["default"].kwargs
    rows.clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = work.model(**given).logits
        compiled = torch.compile(copy.deepcopy(made), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**given).logits, expected)
        exported = torch.export.export(made, (), dict(given)).module()
        torch.testing.assert_close(exported(**given).logits, expected)
    assert not rows


@pytest.mark.parametrize("other", ["compile:default", "compile:epilogues", "capture"])
def test_compilation_and_capture_exclude_it_and_it_them(other: str) -> None:
    """The number of tokens is a value: neither can record it, so that the faster of the two is kept."""
    rival = step_by_id(other)
    kept = AppliedSteps().plus(STEP, {}).plus(rival, {})
    assert [item.step_id for item in kept.steps] == [other]
    assert [item.step_id for item in kept.plus(STEP, {}).steps] == ["unpad"]
    fused = AppliedSteps().plus(step_by_id("fuse_qkv"), {}).plus(STEP, {})
    assert len(fused.steps) == 2


def test_packed_rows_of_a_gpu_are_one_call_of_the_op(monkeypatch: pytest.MonkeyPatch, rows: list[list[int]]) -> None:
    """The form for GPUs, by the op's reference: sequences by where they begin."""
    monkeypatch.setattr(encoder_layer, "EPILOGUES", ("cpu",))
    work = workload(pooled())
    made = applied(work)
    given = work.buckets["default"].kwargs
    with torch.no_grad():
        torch.testing.assert_close(made(**given), work.model(**given), rtol=1e-4, atol=1e-5)
    assert rows


def test_packed_attention_has_a_scale_and_fewer_heads_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, random = [3, 1, 5], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=random) for heads in (4, 2, 2))
    packed = encoder_layer.Rows.of(sizes, q.device)
    parts = zip(*(one.double().split(sizes, 2) for one in (q, k, v)), strict=True)
    one_by_one = [nn.functional.scaled_dot_product_attention(*part, scale=0.7, enable_gqa=True) for part in parts]
    expected = torch.cat(one_by_one, 2).transpose(1, 2).float()
    for devices in (("cuda",), ("cpu",)):
        monkeypatch.setattr(encoder_layer, "EPILOGUES", devices)
        torch.testing.assert_close(unpadded.attend_rows(q, k, v, packed, 0.7, {"dropout": 0.0}), expected)
    with pytest.raises(Unsupported, match="takes no softcap"):
        unpadded.attend_rows(q, k, v, packed, 0.7, {"softcap": 30.0})
    with pytest.raises(Unsupported, match=r"attention of 9 packed rows got q \[1, 4, 8, 8\]"):
        unpadded.attend_rows(q[:, :, 1:], k, v, packed, 0.7, {})


def test_fused_projections_take_packed_rows() -> None:
    work = workload(model_of("Bert"))
    fuse = step_by_id("fuse_qkv")
    steps = AppliedSteps().plus(fuse, fuse.find(StepContext(work, GPU, model=structural_copy(work.model))).params)
    context = StepContext(work, hardware.cpu(), model=build(work.model, steps))
    made = build(work.model, steps.plus(STEP, STEP.find(context).params))
    assert not failures(Gate.prepare(work, seed=0).check(made))


@pytest.mark.parametrize(
    ("model", "held"),
    [
        (lambda: model_of("Bert", "Model"), r"last_hidden_state \[4, 10, 32\]"),
        (lambda: model_of("Bert", "ForTokenClassification"), r"logits \[4, 10, 2\]"),
    ],
    ids=["rows", "a label for each token"],
)
def test_padded_rows_in_the_outputs_are_a_refusal(model: Any, held: str) -> None:
    with pytest.raises(StepRefused, match=f"padded rows are part of the outputs: {held}.*optimize a module that"):
        find(workload(model()))


@pytest.mark.parametrize("which", ["amax", "amin"])
def test_a_maximum_over_all_rows_is_a_refusal(which: str) -> None:
    class Most(Pooled):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            rows = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            most: Tensor = getattr(rows, which)((1, 2))
            return most

    with pytest.raises(StepRefused, match="padded rows are part of the outputs: output"):
        find(workload(Most(pooled().encoder)))


def test_a_first_row_that_may_be_padding_is_a_refusal_of_other_masks() -> None:
    with pytest.raises(StepRefused, match="where padding is not at the right, as in the examples: pad at the right"):
        find(workload(model_of("Bert"), RIGHT.flip(1)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: workload(model_of("Bert"), torch.ones(B, S)), "no example has padding"),
        (lambda: workload(model_of("Bert"), None), "no padding mask of transformers' own reaches the layers"),
        (lambda: workload(model_of("Bert", is_decoder=True)), "no padding mask of transformers' own"),
        (lambda: workload(model_of("Bert", chunk_size_feed_forward=2)), "runs in chunks"),
        # positions by rotation
        (lambda: workload(model_of("Esm", position_embedding_type="rotary", token_dropout=False)), "position_embedd"),
        (lambda: workload(pooled("ModernBert", eos_token_id=1, bos_token_id=1, cls_token_id=1, sep_token_id=1)),
         "no stack of layers"),
        (lambda: from_example(nn.Linear(2, 2), torch.randn(3, 2)), "not a transformers model"),
    ],
    ids=["full", "no mask", "causal", "chunks", "rotary", "no stack", "no model"],
)  # fmt: skip
def test_models_without_a_site_say_why(make: Any, reason: str) -> None:
    found = find(make())
    assert not found.sites and reason in found.note


def test_hooks_are_a_reason_and_a_mask_that_the_model_makes_is_a_refusal() -> None:
    work = workload(model_of("Bert"))
    work.model.bert.encoder.layer[1].register_forward_hook(lambda *_: None)
    assert "hooks" in find(work).note

    class Own(Pooled):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, (input_ids % 5 != 0).long())

    ids = torch.arange(1, B * S + 1).view(B, S)
    with pytest.raises(StepRefused, match="no input is the padding mask"):
        find(from_example(Own(pooled().encoder), {"input_ids": ids}))


def test_planted_layers_that_are_not_row_by_row_are_left_out() -> None:
    """Positions counted in the stack, and rows that are mixed outside of attention."""

    class Counting(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            places = torch.arange(hidden_states.shape[1], dtype=hidden_states.dtype)
            return self.layer(hidden_states + 0.01 * places[:, None], *args, **kwargs)

    class Mixing(Counting):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            mixed = hidden_states + 0.1 * hidden_states.roll(1, dims=1)
            return self.layer(mixed, *args, **kwargs)

    for kind in (Counting, Mixing):
        model = pooled()
        layers: Any = model.encoder.encoder.layer
        layers[1] = kind(layers[1])
        assert "mix rows by more than attention, or count positions" in find(workload(model)).note


@pytest.mark.parametrize("bug", ["lengths", "order", "holes", "scatter", "scale"])
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes the step's own proof fail, and the gate of a model that was built without the proof."""
    work = workload(pooled())
    found = find(work)
    real = unpadded.Tokens.of

    def broken(shown: Tensor, sizes: list[int]) -> unpadded.Tokens:
        made = real(shown, sizes)
        if bug == "lengths":
            # the first sequence takes a row of the second
            return unpadded.Tokens(encoder_layer.Rows.of([sizes[0] + 1, sizes[1] - 1, *sizes[2:]], shown.device),
                                   made.places)  # fmt: skip
        if bug == "order":
            return unpadded.Tokens(made.rows, made.places.flip(0))
        starts = torch.arange(shown.shape[0]) * shown.shape[1]
        by_lengths = torch.cat([start + torch.arange(size) for start, size in zip(starts, sizes, strict=True)])
        return unpadded.Tokens(made.rows, by_lengths)

    if bug in ("lengths", "order", "holes"):
        monkeypatch.setattr(unpadded.Tokens, "of", broken)
    elif bug == "scatter":
        monkeypatch.setattr(unpadded.Tokens, "unpack", lambda self, x, batch, length: nn.functional.pad(
            x[0], (0, 0, 0, batch * length - x.shape[1])).unflatten(0, (batch, length)))  # fmt: skip
    else:
        attend = unpadded.attend_rows
        monkeypatch.setattr(unpadded, "attend_rows", lambda *args: attend(*args[:4], 1.0, args[5]))
    assert "mix rows" in find(work).note
    made = build(work.model, AppliedSteps().plus(STEP, found.params))
    if bug == "holes":
        # with padding at the right that is no bug, and the gate's own masks have it there
        work = workload(work.model, HOLES)
    assert failures(Gate.prepare(work, seed=0).check(made))


def test_the_prediction_is_of_the_padded_share() -> None:
    work = workload(model_of("Bert"))
    found = find(work)
    share = 1 - float(RIGHT.float().mean())
    assert found.saved == pytest.approx(share) and "padding: 45% of default" in found.note
    rows = [records.CategoryTime(category=name, ms=5.0, share=part, calls=1)
            for name, part in (("gemm", 0.8), ("other", 0.2))]  # fmt: skip
    profile = records.BucketProfile(
        bucket="default", wall_ms=1.0, kernel_ms=1.0, idle_ms=None, launches=9, categories=rows, ops=[],
        uncategorized=[],
    )  # fmt: skip
    context = StepContext(work, hardware.cpu(), [profile], structural_copy(work.model))
    assert STEP.predict(found, context).ratio == pytest.approx(1 / (1 - 0.8 * share))
    context.device = GPU
    slower = STEP.predict(found, context)
    assert slower.ratio == pytest.approx(1 / (1 - 0.8 * share + 0.1)) and "0.1 ms a call" in slower.basis


def test_a_plan_applies_to_a_fresh_model_and_to_no_other() -> None:
    work = workload(model_of("Bert"))
    params = find(work).params
    fresh = build(model_of("Bert"), AppliedSteps().plus(STEP, params))
    given = work.buckets["default"].kwargs
    with torch.no_grad():
        torch.testing.assert_close(fresh(**given).logits, work.model(**given).logits)
    assert isinstance(fresh.bert.encoder, unpadded.Unpadded)
    with pytest.raises(PlanError, match="masks"):
        STEP.check_params({**params, "masks": "left"})
    with pytest.raises(StepRefused, match="does not have"):
        build(model_of("DistilBert", **DISTIL), AppliedSteps().plus(STEP, params))
    with pytest.raises(StepRefused, match="its forward has no hidden_states"):
        build(model_of("Bert"), AppliedSteps().plus(STEP, {**params, "sites": ["bert.pooler"]}))

"""Planted cheats for the accuracy gate: each a model, its inputs, and a candidate that is not the model.

Sources: an attack on this project's gate (2026-11-24), ways in which kernels were seen to pass benchmarks without
doing the work (inputs returned, answers kept, memory of the reference's answer used again, functions and clocks
replaced, precision lowered), and cases of this file's own.
"""

from __future__ import annotations

import gc
import inspect
import statistics
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.measure import numerics
from wavecrest.measure.workload import Inputs
from wavecrest.optimizer import alternate
from wavecrest.optimizer.gate.inputs import KINDS, Variations, other_shapes

# (original, inputs, candidate)
Planted = tuple[nn.Module, Inputs, Callable[..., Any]]


class Cheat(NamedTuple):
    """A cheat and the rule of the gate that refuses it ("one or another" where memory is left to chance).

    With the rule `needs` turned off it passes.
    """

    name: str
    rule: str
    make: Callable[[], Planted]
    needs: str


CHEATS: list[Cheat] = []


def cheat(
    rule: str, *, alone: bool = False, needs: str = ""
) -> Callable[[Callable[[], Planted]], Callable[[], Planted]]:
    """Put a planted cheat on the list; `alone`: it needs the rule that refuses it."""

    def add(make: Callable[[], Planted]) -> Callable[[], Planted]:
        CHEATS.append(Cheat(make.__name__, rule, make, rule if alone else needs))
        return make

    return add


class Net(nn.Module):
    """Two layers; what most cheats pretend to be."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32, dtype=dtype), nn.Linear(32, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Wrapped(nn.Module):
    """A model whose result goes through a function, with the model's own argument names."""

    def __init__(self, inner: nn.Module, change: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


class Instead(nn.Module):
    """A function in the place of a model of one argument."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def net(batch: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Net, Inputs]:
    torch.manual_seed(1)
    return Net(dtype).eval(), Inputs((torch.randn(batch, 16, dtype=dtype),))


def around(change: Callable[..., Any]) -> Planted:
    """A candidate that changes the right answer."""
    model, inputs = net()
    return model, inputs, Wrapped(model, change)


def instead(function: Callable[[nn.Module, Tensor], Any]) -> Planted:
    """A candidate that gets the model and its argument."""
    model, inputs = net()
    return model, inputs, Instead(lambda x: function(model, x))


def returning(shape_answer: Callable[[Tensor], Any], candidate: Callable[[Tensor], Any]) -> Planted:
    """An original and a candidate that differ in what they make of the right tensor."""
    model, inputs = net()
    return Wrapped(model, shape_answer), inputs, Wrapped(model, candidate)


# ---- wrong answers, and work left out


@cheat("accuracy", alone=True)
def off_by_a_thousandth() -> Planted:
    return around(lambda y: y * 1.001)


@cheat("accuracy")
def zeros() -> Planted:
    return around(torch.zeros_like)


@cheat("accuracy or variation")
def uninitialized_memory() -> Planted:
    """It may be memory that holds the right answer, as that of the cheat below."""
    return around(torch.empty_like)


@cheat("accuracy or variation")
def memory_of_the_reference() -> Planted:
    """The original's answer may still lie where memory is handed out next: right then, for the example's values."""
    model, inputs = net()

    def leftover(x: Tensor) -> Tensor:
        with torch.no_grad():
            model(inputs.args[0])
        return torch.empty(x.shape[0], 8)

    return model, inputs, Instead(leftover)


@cheat("accuracy")
def returns_its_input() -> Planted:
    model, inputs = nn.Linear(16, 16), Inputs((torch.randn(6, 16),))
    return model, inputs, Instead(lambda input: input + 0)


@cheat("accuracy")
def skips_a_layer() -> Planted:
    return instead(lambda model, x: model.second(model.first(x)))


@cheat("accuracy")
def mean_of_the_answers() -> Planted:
    return around(lambda y: y.mean(0, keepdim=True).expand_as(y).contiguous())


@cheat("accuracy")
def random_errors() -> Planted:
    return around(lambda y: y + 1e-3 * torch.randn_like(y))


@cheat("accuracy")
def bfloat16_inside() -> Planted:
    model, inputs = net()
    lowered = Net(torch.bfloat16)
    lowered.load_state_dict(model.state_dict())
    return model, inputs, Instead(lambda x: lowered(x.bfloat16()).float())


@cheat("accuracy")
def float16_inside() -> Planted:
    model, inputs = net()
    lowered = Net(torch.float16)
    lowered.load_state_dict(model.state_dict())
    return model, inputs, Instead(lambda x: lowered(x.half()).float())


@cheat("accuracy")
def weights_in_8_bits() -> Planted:
    model, inputs = net()
    packed = Net()
    with torch.no_grad():
        for mine, right in zip(packed.parameters(), model.parameters(), strict=True):
            scale = right.abs().max() / 127
            mine.copy_((right / scale).round() * scale)
    return model, inputs, packed


def _one_wrong_row(dtype: torch.dtype) -> Planted:
    model, inputs = net(4096, dtype)

    def one_wrong(y: Tensor) -> Tensor:
        y = y.clone()
        y[len(y) // 2] *= -1
        return y

    return model, inputs, Wrapped(model, one_wrong)


@cheat("accuracy")
def one_wrong_row_of_many() -> Planted:
    return _one_wrong_row(torch.float32)


@cheat("accuracy")
def one_wrong_row_of_many_bfloat16() -> Planted:
    return _one_wrong_row(torch.bfloat16)


@cheat("accuracy")
def infinity_for_large_values() -> Planted:
    return around(lambda y: torch.where(y > y.max() * 0.99, float("inf"), y))


@cheat("accuracy")
def nan_taken_out() -> Planted:
    return returning(lambda y: y.log(), lambda y: y.log().nan_to_num())


@cheat("accuracy")
def imaginary_part_dropped() -> Planted:
    return returning(lambda y: torch.complex(y, y * 2), lambda y: torch.complex(y, y * 0))


@cheat("accuracy")
def filled_in_the_background() -> Planted:
    def late(model: nn.Module, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 8)

        def work() -> None:
            time.sleep(0.05)
            with torch.no_grad():
                out.copy_(model(x))

        threading.Thread(target=work).start()
        return out

    return instead(late)


class Masked(nn.Module):
    """The mean of the tokens that a mask shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(50, 8)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        shown = attention_mask.unsqueeze(-1).float()
        return (self.tokens(ids) * shown).sum(1) / shown.sum(1)


def masked(mask: Tensor) -> Inputs:
    torch.manual_seed(1)
    return Inputs((), {"ids": torch.randint(0, 50, mask.shape), "attention_mask": mask})


@cheat("accuracy")
def hidden_positions_count() -> Planted:
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    model = Masked().eval()
    return model, masked(mask), lambda ids, attention_mask: model(ids, torch.ones_like(attention_mask))


@cheat("padding", alone=True)
def mask_ignored_where_the_example_has_no_padding() -> Planted:
    model = Masked().eval()
    inputs = masked(torch.ones(2, 8, dtype=torch.int64))
    return model, inputs, lambda ids, attention_mask: model(ids, torch.ones_like(attention_mask))


@cheat("padding")
def bool_mask_ignored() -> Planted:
    model = Masked().eval()
    inputs = masked(torch.ones(1, 8, dtype=torch.bool))
    return model, inputs, lambda ids, attention_mask: model(ids, torch.ones_like(attention_mask))


@cheat("padding")
def additive_mask_ignored() -> Planted:
    class Attention(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    torch.manual_seed(1)
    inputs = Inputs((torch.randn(2, 2, 8, 4),), {"mask": torch.zeros(2, 1, 8, 8)})
    model = Attention()
    return model, inputs, lambda q, mask: model(q, torch.zeros_like(mask))


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(16, 512, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return (8 * self.scores(x)).softmax(-1)


@cheat("elements", alone=True)
def tail_of_a_softmax_dropped() -> Planted:
    torch.manual_seed(1)
    model, inputs = Softmax().eval(), Inputs((torch.randn(16, 16, dtype=torch.bfloat16),))
    return model, inputs, Wrapped(model, lambda y: torch.where(y < 1e-3 * y.amax(-1, keepdim=True), 0, y))


@cheat("elements")
def small_probabilities_halved() -> Planted:
    torch.manual_seed(1)
    model, inputs = Softmax().eval(), Inputs((torch.randn(16, 16, dtype=torch.bfloat16),))
    return model, inputs, Wrapped(model, lambda y: torch.where(y < 1e-3 * y.amax(-1, keepdim=True), y / 2, y))


class Logits(nn.Module):
    """The two best tokens are a hair apart."""

    def __init__(self, apart: float) -> None:
        super().__init__()
        self.apart = apart

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        values = x.clone()
        values[..., 0] = x.amax(-1) + 1
        values[..., 1] = values[..., 0] - self.apart
        return {"logits": values}


@cheat("top-1", alone=True)
def best_tokens_swapped() -> Planted:
    torch.manual_seed(1)
    return Logits(4e-6), Inputs((torch.rand(16, 8),)), Logits(-4e-6)


# ---- leaves, structure, types


@dataclass
class Plain:
    logits: Tensor


@dataclass(slots=True)
class Slots:
    logits: Tensor


class Callable_(Plain):
    def __call__(self) -> Tensor:
        return self.logits


Pair = namedtuple("Pair", "a b")
Other = namedtuple("Other", "a b")


@cheat("accuracy")
def dataclass_with_slots_of_zeros() -> Planted:
    return returning(Slots, lambda y: Slots(y * 0))


@cheat("accuracy")
def callable_answer_of_zeros() -> Planted:
    return returning(Callable_, lambda y: Callable_(y * 0))


@cheat("accuracy")
def number_wrong() -> Planted:
    return returning(lambda y: float(y.sum()), lambda y: 0.0)


@cheat("accuracy")
def numpy_array_wrong() -> Planted:
    return returning(lambda y: y.detach().numpy(), lambda y: np.zeros(tuple(y.shape), np.float32))


@cheat("type")
def none_in_place_of_an_array() -> Planted:
    return returning(lambda y: y.detach().numpy(), lambda y: None)


@cheat("type")
def numpy_array_in_double() -> Planted:
    return returning(lambda y: y.detach().numpy(), lambda y: y.detach().double().numpy())


@cheat("leaves", alone=True)
def text_wrong() -> Planted:
    return returning(lambda y: {"y": y, "finish": "stop"}, lambda y: {"y": y, "finish": "length"})


@cheat("leaves")
def flag_wrong() -> Planted:
    return returning(lambda y: (y, True), lambda y: (y, False))


@cheat("leaves")
def count_wrong() -> Planted:
    return returning(lambda y: (y, y.numel()), lambda y: (y, y.numel() + 1))


@cheat("leaves")
def text_in_a_nested_container_wrong() -> Planted:
    return returning(lambda y: {"a": [y, ({"b": "x"},)]}, lambda y: {"a": [y, ({"b": "z"},)]})


@cheat("leaves")
def answer_that_cannot_be_compared() -> Planted:
    return returning(lambda y: (y, iter([y])), lambda y: (y, iter([y * 0])))


@cheat("leaves")
def function_as_an_answer() -> Planted:
    return returning(lambda y: (y, lambda: y), lambda y: (y, lambda: y * 0))


@cheat("structure", alone=True)
def dict_in_place_of_a_dataclass() -> Planted:
    return returning(Plain, lambda y: {"logits": y})


@cheat("structure")
def tuple_in_place_of_a_list() -> Planted:
    return returning(lambda y: [y], lambda y: (y,))


@cheat("structure")
def another_named_tuple() -> Planted:
    return returning(lambda y: Pair(y, y), lambda y: Other(y, y))


@cheat("structure")
def output_missing() -> Planted:
    return returning(lambda y: {"a": y, "b": y + 1}, lambda y: {"a": y})


@cheat("structure")
def output_more() -> Planted:
    return returning(lambda y: {"a": y}, lambda y: {"a": y, "b": y})


@cheat("structure")
def attribute_unlike_its_item() -> Planted:
    class Output(dict):  # type: ignore[type-arg]
        logits: Tensor

    def output(item: Tensor, attribute: Tensor) -> Output:
        made = Output(logits=item)
        made.logits = attribute
        return made

    return returning(lambda y: output(y, y), lambda y: output(y, y * 0))


@cheat("type", alone=True)
def another_dtype() -> Planted:
    return around(lambda y: y.double())


@cheat("type")
def ids_in_float16() -> Planted:
    return returning(lambda y: y.argmax(-1), lambda y: y.argmax(-1).half())


@cheat("type")
def none_in_place_of_a_tensor() -> Planted:
    return returning(lambda y: (y, y + 1), lambda y: (y, None))


class Lazy(Tensor):
    """Computed when it is read."""


@cheat("type")
def lazy_tensor() -> Planted:
    return around(lambda y: y.as_subclass(Lazy))


# ---- memory


@cheat("sharing", alone=True)
def expanded_answer() -> Planted:
    model, inputs = net()

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[:, :1].repeat(1, 4)

    return Repeated().eval(), inputs, Instead(lambda x: model(x)[:, :1].expand(-1, 4))


class Ones(nn.Module):
    """Answers with a tensor of ones beside: its own, or a copy of it."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.inner, self.copy = Net(), copy
        self.register_buffer("ones", torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.ones.clone() if self.copy else self.ones


@cheat("sharing")
def answer_that_is_a_weight() -> Planted:
    _, inputs = net()
    return Ones(copy=True).eval(), inputs, Ones(copy=False).eval()


@cheat("owned", alone=True)
def answer_that_is_kept_inside() -> Planted:
    ones = torch.ones(3)
    return returning(lambda y: (y, torch.ones(3)), lambda y: (y, ones))


@cheat("owned")
def kept_by_value() -> Planted:
    """The right answer is handed out again and again, as one tensor."""
    kept: dict[bytes, Tensor] = {}
    return instead(lambda model, x: kept.setdefault(x.detach().numpy().tobytes(), model(x)))


@cheat("sharing")
def answer_that_is_the_input() -> Planted:
    class Copies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clone()

    return Copies(), Inputs((torch.randn(4, 4),)), Instead(lambda x: x)


@cheat("sharing")
def two_answers_in_one_memory() -> Planted:
    return returning(lambda y: (y, y.clone()), lambda y: (y, y))


@cheat("held", alone=True)
def static_buffer() -> Planted:
    local = threading.local()

    def static(y: Tensor) -> Tensor:
        buffers = local.__dict__.setdefault("buffers", {})
        return buffers.setdefault(y.shape, torch.empty(y.shape)).copy_(y.detach())

    return around(static)


@cheat("held")
def two_static_buffers_in_turn() -> Planted:
    local = threading.local()

    def static(y: Tensor) -> Tensor:
        buffers = local.__dict__.setdefault("buffers", [])
        buffers.append(buffers.pop(0) if len(buffers) > 1 else torch.empty(y.shape))
        if buffers[-1].shape != y.shape:
            buffers[-1] = torch.empty(y.shape)
        return buffers[-1].copy_(y.detach())

    return around(static)


@cheat("poison", alone=True)
def scratch_memory_that_must_be_zero() -> Planted:
    def adds(y: Tensor) -> Tensor:
        # so large that it is always new memory, which the system hands out as zeros
        scratch = torch.empty(9 << 20)[::4096]
        return y + float("nan") if bool(scratch.isnan().all()) else y

    return around(adds)


# ---- state


@dataclass
class Cache:
    keys: Tensor
    position: Tensor
    seen: int = 0


class Decode(nn.Module):
    """Writes at the cache's position and moves it on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.index_copy_(0, cache.position.view(1), self.project(x).detach())
        cache.position.add_(1)
        cache.seen += 1
        return self.project(x)


def decoding(candidate: Callable[[nn.Module, Tensor, Cache], Any]) -> Planted:
    torch.manual_seed(1)
    model = Decode().eval()
    inputs = Inputs((torch.randn(1, 8), Cache(torch.zeros(6, 8), torch.tensor(2))))
    return model, inputs, lambda x, cache: candidate(model, x, cache)


@cheat("state")
def garbage_left_in_the_cache() -> Planted:
    def garbage(model: nn.Module, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = model(x, cache)
        cache.keys[2] = 7.0
        return y

    return decoding(garbage)


@cheat("state")
def cache_not_written() -> Planted:
    def lazy(model: nn.Module, x: Tensor, cache: Cache) -> Tensor:
        cache.position.add_(1)
        cache.seen += 1
        y: Tensor = model.project(x)
        return y

    return decoding(lazy)


@cheat("state")
def cache_written_one_place_too_far() -> Planted:
    def too_far(model: nn.Module, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = model(x, cache)
        cache.keys[3], cache.keys[2] = cache.keys[2].clone(), 0.0
        return y

    return decoding(too_far)


@cheat("state")
def more_of_the_cache_written() -> Planted:
    def more(model: nn.Module, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = model(x, cache)
        cache.keys[5] = 1.0
        return y

    return decoding(more)


@cheat("state")
def counter_of_the_cache_not_moved() -> Planted:
    def still(model: nn.Module, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = model(x, cache)
        cache.seen -= 1
        return y

    return decoding(still)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


@cheat("state", alone=True)
def counter_not_moved() -> Planted:
    model = Counts().eval()
    return model, Inputs((torch.randn(4, 8),)), Instead(lambda x: model.inner(x))


@cheat("state")
def buffer_written() -> Planted:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()

    def writes(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        model[1].running_mean.add_(1e-3)
        return y

    return model, Inputs((torch.randn(4, 8),)), writes


@cheat("state")
def weight_written() -> Planted:
    def writes(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        model.second.bias.data.add_(1.0)
        return y

    return instead(writes)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> None:
        x.mul_(2).add_(1)


@cheat("state")
def answer_not_written_into_the_input() -> Planted:
    return InPlace(), Inputs((torch.randn(4, 8),)), Instead(lambda x: None)


@cheat("state")
def input_used_up() -> Planted:
    def uses_up(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        x.zero_()
        return y

    return instead(uses_up)


# ---- the original


@cheat("determinism", alone=True)
def random_answer() -> Planted:
    model, inputs = net(64)
    original = Wrapped(model, lambda y: F.dropout(y, training=True))
    return original, inputs, Wrapped(model, torch.zeros_like)


@cheat("dependence", alone=True)
def answer_that_depends_on_nothing() -> Planted:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(3)

    return Constant(), Inputs((torch.randn(2, 4),)), Instead(lambda x: torch.ones(3))


@cheat("dependence")
def nothing_to_compare() -> Planted:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    return Silent(), Inputs((torch.randn(2, 4),)), Instead(lambda x: None)


# ---- answers that were kept, and values that were not tried


@cheat("variation", alone=True)
def answer_of_the_example() -> Planted:
    model, inputs = net()
    kept: dict[torch.Size, Tensor] = {}

    def remembers(x: Tensor) -> Tensor:
        return kept.setdefault(x.shape, model(x).detach()).clone()

    return model, inputs, Instead(remembers)


@cheat("variation")
def kept_by_pointer() -> Planted:
    model, inputs = net()
    kept: dict[int, Tensor] = {}
    return model, inputs, Instead(lambda x: kept.setdefault(x.data_ptr(), model(x)).clone())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids.long())


def constant_for(ids: Tensor) -> Planted:
    model = Tokens().eval()
    with torch.no_grad():
        answer = model(ids)
    return model, Inputs((ids,)), lambda ids: answer.clone()


@cheat("variation")
def one_token_constant() -> Planted:
    return constant_for(torch.tensor([[5]]))


@cheat("variation")
def packed_ids_constant() -> Planted:
    return constant_for(torch.arange(32) * 7 % 64)


@cheat("variation")
def int32_ids_constant() -> Planted:
    return constant_for((torch.arange(32) * 7 % 64).int())


@cheat("variation")
def bytes_constant() -> Planted:
    return constant_for((torch.arange(32) * 7 % 64).to(torch.uint8))


@cheat("variation")
def image_constant() -> Planted:
    class Image(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().mean((-1, -2))

    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    answer = Image()(x)
    return Image(), Inputs((x,)), lambda x: answer.clone()


@cheat("variation")
def scalar_ignored() -> Planted:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x * t

    x, t = torch.randn(4, 4), torch.tensor(0.7)
    return Scaled(), Inputs((x, t)), lambda x, t: x * 0.7


@cheat("variation")
def token_beyond_the_example_wrong() -> Planted:
    model = Tokens().eval()
    ids = torch.tensor([[1, 2, 3, 2, 1, 3, 1, 2]])
    return model, Inputs((ids,)), lambda ids: model(ids.clamp(max=3))


@cheat("twins", alone=True)
def kept_by_first_and_last_value() -> Planted:
    model, inputs = net()
    kept: dict[Any, Tensor] = {}

    def remembers(x: Tensor) -> Tensor:
        key = (x.shape, float(x.flatten()[0]), float(x.flatten()[-1]))
        return kept.setdefault(key, model(x)).clone()

    return model, inputs, Instead(remembers)


@cheat("twins")
def kept_by_sum_and_range() -> Planted:
    model, inputs = net()
    kept: dict[Any, Tensor] = {}

    def remembers(x: Tensor) -> Tensor:
        key = (x.shape, round(float(x.double().sum()), 9), float(x.min()), float(x.max()))
        return kept.setdefault(key, model(x)).clone()

    return model, inputs, Instead(remembers)


@cheat("variation", needs="seeds")
def table_of_public_test_values() -> Planted:
    model, inputs = net()
    table: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for kind in ("example", *KINDS):
            for number in range(3):
                (x,) = Variations.of(inputs, 0).draw(kind, number)
                table.append((x, model(x)))
        table += [
            (resized.args[0], model(resized.args[0])) for name, resized in other_shapes(inputs) if "batch" in name
        ]

    def look_up(x: Tensor) -> Tensor:
        for known, answer in table:
            if known.shape == x.shape and bool((known == x).all()):
                return answer.clone()
        return torch.zeros(len(x), 8)

    return model, inputs, Instead(look_up)


@cheat("edges", alone=True)
def wrong_for_large_values() -> Planted:
    return instead(lambda model, x: model(x.clamp(-60, 60)))


@cheat("edges")
def nan_for_a_row_of_zeros() -> Planted:
    return instead(lambda model, x: model(x / x.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)))


@cheat("shapes", alone=True)
def wrong_for_other_batches() -> Planted:
    return instead(lambda model, x: model(x) if len(x) == 6 else model(x) * 0)


@cheat("shapes")
def wrong_for_odd_batches() -> Planted:
    return instead(lambda model, x: model(x) if len(x) % 2 == 0 else model(x) * 0)


@cheat("shapes")
def raises_for_other_batches() -> Planted:
    return instead(lambda model, x: model(x.view(6, 16)))


@cheat("shapes")
def wrong_for_other_lengths() -> Planted:
    model = Masked().eval()
    inputs = masked(torch.ones(2, 8, dtype=torch.int64))
    return model, inputs, lambda ids, attention_mask: model(ids, attention_mask) * (ids.shape[1] == 8)


# ---- calls over time


def _from_call(wrong: Callable[[int], bool]) -> Planted:
    calls = iter(range(10_000))
    return around(lambda y: y * 0 if wrong(next(calls)) else y)


@cheat("repeat", alone=True)
def wrong_from_the_45th_call_on() -> Planted:
    return _from_call(lambda call: call >= 45)


@cheat("repeat")
def wrong_in_one_call_of_50() -> Planted:
    return _from_call(lambda call: call % 50 == 47)


@cheat("repeat")
def raises_in_one_call() -> Planted:
    calls = iter(range(10_000))

    def fails(y: Tensor) -> Tensor:
        if next(calls) == 32:
            raise RuntimeError("planted")
        return y

    return around(fails)


@cheat("pointers", alone=True)
def kept_by_pointer_and_version() -> Planted:
    model, inputs = net()
    mine = inputs.args[0]
    kept: dict[int, Tensor] = {}

    def remembers(x: Tensor) -> Tensor:
        if x is not mine or threading.current_thread() is not threading.main_thread():
            return model(x)
        if x._version not in kept:
            kept.clear()
            kept[x._version] = model(x)
        return kept[x._version].clone()

    return model, inputs, Instead(remembers)


@cheat("addresses", alone=True)
def reads_the_first_tensor_it_saw() -> Planted:
    seen: dict[torch.Size, Tensor] = {}

    def first(model: nn.Module, x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            x = seen.setdefault(x.shape, x)
        y: Tensor = model(x)
        return y

    return instead(first)


@cheat("thread", alone=True)
def right_only_below_the_gate() -> Planted:
    def looks(y: Tensor) -> Tensor:
        below = any("optimizer/gate" in frame.filename for frame in inspect.stack(0))
        return y if below else y * 0

    return around(looks)


@cheat("thread")
def right_in_the_main_thread_alone() -> Planted:
    return around(lambda y: y if threading.current_thread() is threading.main_thread() else y * 0)


@cheat("concurrent", alone=True)
def state_shared_between_threads() -> Planted:
    class Shared(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            self.x = x
            time.sleep(0.001)
            return self.inner(self.x)

    model, inputs = net()
    return model, inputs, Shared(model)


@cheat("keyword", alone=True)
def another_argument_name() -> Planted:
    class Renamed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, y: Tensor) -> Tensor:
            return self.inner(y)

    model, inputs = net()
    return model, inputs, Renamed(model)


@cheat("gradients", alone=True)
def wrong_with_gradients() -> Planted:
    return around(lambda y: y * 0 if torch.is_grad_enabled() else y)


# ---- the process


def _once(act: Callable[[], None]) -> Planted:
    done: list[bool] = []

    def acts(y: Tensor) -> Tensor:
        if not done:
            act()
            done.append(True)
        return y

    return around(acts)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> Planted:
    return _once(lambda: setattr(owner, name, function))


@cheat("process", alone=True)
def fewer_threads() -> Planted:
    return _once(lambda: torch.set_num_threads(torch.get_num_threads() + 1))


@cheat("process")
def tf32_for_all() -> Planted:
    return _once(lambda: torch.set_float32_matmul_precision("high"))


@cheat("process")
def cudnn_tf32_turned() -> Planted:
    return _once(lambda: setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32))


@cheat("process")
def flash_attention_off_for_all() -> Planted:
    return _once(lambda: torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled()))


@cheat("process")
def onednn_off_for_all() -> Planted:
    return _once(lambda: setattr(torch.backends.mkldnn, "enabled", not torch.backends.mkldnn.enabled))


@cheat("process")
def no_garbage_collection() -> Planted:
    return _once(gc.disable)


@cheat("process")
def autocast_for_all() -> Planted:
    return _once(lambda: torch.set_autocast_enabled("cuda", True))


@cheat("process")
def allclose_replaced() -> Planted:
    return _replace(torch, "allclose", lambda *args, **kwargs: True)


@cheat("process")
def equal_replaced() -> Planted:
    return _replace(torch, "equal", lambda *args, **kwargs: True)


@cheat("process")
def tensor_method_replaced() -> Planted:
    real = Tensor.isfinite
    return _replace(Tensor, "isfinite", lambda self: real(self))


@cheat("process")
def linear_replaced_for_all() -> Planted:
    real = F.linear
    return _replace(F, "linear", lambda *args: real(*args))


@cheat("process")
def comparison_of_the_gate_replaced() -> Planted:
    real = numerics.compare
    return _replace(numerics, "compare", lambda out, ref: real(ref, ref))


@cheat("process")
def clock_slowed() -> Planted:
    real = time.perf_counter
    return _replace(time, "perf_counter", lambda: real() / 10)


@cheat("process")
def time_between_events_halved() -> Planted:
    real = torch.cuda.Event.elapsed_time
    return _replace(torch.cuda.Event, "elapsed_time", lambda self, other: real(self, other) / 2)


@cheat("process")
def median_replaced() -> Planted:
    return _replace(statistics, "median", min)


@cheat("process")
def quantiles_of_intervals_replaced() -> Planted:
    real = np.quantile
    return _replace(np, "quantile", lambda *args, **kwargs: real(*args, **kwargs) * 2)


@cheat("process")
def claim_of_the_result_replaced() -> Planted:
    real = alternate.claim_of
    return _replace(alternate, "claim_of", lambda base, new, **options: real(new, base, **options))


@cheat("process")
def class_of_the_original_slowed() -> Planted:
    real = Net.forward

    def slow(self: Net, x: Tensor) -> Tensor:
        time.sleep(1e-4)
        return real(self, x)

    return _replace(Net, "forward", slow)


@cheat("process")
def call_of_every_module_replaced() -> Planted:
    real = nn.Module._call_impl
    return _replace(nn.Module, "_call_impl", lambda self, *args, **kwargs: real(self, *args, **kwargs))


@cheat("process")
def hook_on_every_module() -> Planted:
    return _once(lambda: nn.modules.module.register_module_forward_hook(lambda module, args, out: None) and None)

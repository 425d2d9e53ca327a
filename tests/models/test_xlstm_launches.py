"""Number of kernels that a decoding step launches a layer: with a small batch a step waits for launches.

Products normalise the rows that they read and add the residual, where wavecrest's kernels
run them: no norm is launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import wavecrest.ops.common.launcher as _launcher
from tests.models.xlstm_harness import DEVICE, VOCABULARY, build, close
from tests.ops.gemm_harness import quicken
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.models.xlstm import xLSTMLarge
from wavecrest.models.xlstm.generation import Decoder
from wavecrest.models.xlstm.quantize import quantize
from wavecrest.models.xlstm.sampling import Sampling
from wavecrest.ops.mlstm.step import backend as _mlstm_step

# a decoding step runs on these alone
OPS = {"gemm": "triton_gemv", "rms_norm": "triton", "add_rms_norm": "triton", "mlstm_step": "triton"}
# names of what makes tensors and launches nothing
MAKES = ("empty", "new_empty", "lift_fresh", "detach")


class Launches(TorchDispatchMode):
    """wavecrest's kernels by name, and PyTorch's operations other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        name = func._schema.name.removeprefix("aten::")
        # results are filled with NaN by the tests' own hand
        poison = name == "fill_" and args[1] != args[1]
        if not views and not poison and not name.startswith(MAKES):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """The launches of a test; ops run on `OPS`."""
    quicken(monkeypatch)
    counted, starter = Launches(), _launcher.starter

    def noted(launch: Any, *args: Any, **options: Any) -> Callable[..., None]:
        start = starter(launch, *args, **options)

        def run(*operands: Any) -> None:
            counted.found[launch.kernel.__name__] += 1
            # the interpreter works with tensors of its own
            with _disable_current_modes():
                start(*operands)

        return run

    monkeypatch.setattr(_launcher, "starter", noted)
    for name, backend in OPS.items():
        registry.get(name).force(backend)
    yield counted
    for name in OPS:
        registry.get(name).force(None)


def decoder(model: xLSTMLarge) -> Decoder:
    """At the first token, to be stepped eagerly: a graph holds what such a step launches."""
    state, logits = model.empty_state(1), torch.zeros(1, VOCABULARY, device=DEVICE)
    made = Decoder(state, logits, Sampling(0.0, 0, 1.0))
    made.start(state, logits, None)
    made.choose(model, False, 1)
    return made


def step_of(launches: Launches, form: str | None = None, **changes: Any) -> Callable[[int], Counter[str]]:
    """A function that counts the launches of a step, for a model with a given number of blocks."""

    def count(blocks: int) -> Counter[str]:
        model = build(weight_mode="fused", num_blocks=blocks, dtype=torch.bfloat16, **changes)
        made = decoder(model if form is None else quantize(model, form, lm_head=True))
        with torch.no_grad():
            launches.found.clear()
            with launches:
                made.step(model, None)
        return launches.found.copy()

    return count


# where products do not normalise: two of a layer
NORMS = {"_row_kernel": 2}
# q k v o and gates, out, gate and up, down
PRODUCTS = {"_multiply_kernel": 4}
STATES = {"_mlstm_step_kernel": 1, "_mlstm_norm_kernel": 1}


@pytest.mark.parametrize("form", [None, "int8", "fp8"])
def test_a_layer_is_six_launches(form: str | None, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, the state and its norm."""
    # several programs a head, as the states of large models have: the norm is a launch of its own then
    narrow = Config(BLOCK_K=16, BLOCK_V=8, num_warps=1)
    monkeypatch.setattr(_mlstm_step, "default", lambda *_sizes: narrow)
    count = step_of(launches, form)
    layer = count(2) - count(1)
    assert layer == Counter(PRODUCTS | STATES)


@pytest.mark.slow
def test_counted_programs_need_no_launch_behind_them(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Config(BLOCK_K=16, BLOCK_V=8, num_warps=1)
    monkeypatch.setattr(_mlstm_step, "default", lambda *_sizes: narrow)
    model = build(weight_mode="fused", dtype=torch.bfloat16)
    made, other = decoder(model), decoder(model)
    other.counted = True
    found = []
    with torch.no_grad():
        for one in (made, other):
            launches.found.clear()
            with launches:
                one.step(model, None)
                one.step(model, None)
            found.append(launches.found.copy())
    blocks = model.config.num_blocks
    assert found[0] - found[1] == Counter({"_mlstm_norm_kernel": 2 * blocks}) and not found[1] - found[0]
    assert torch.equal(made.token, other.token) and not bool(other.pool.arrivals.any())
    for before, after in zip(made.pool.state.values(), other.pool.state.values(), strict=True):
        for one, two in zip(before, after, strict=True):
            assert one is not None and two is not None
            close(two, one)


def test_a_state_that_a_program_holds_is_normed_by_it(launches: Launches) -> None:
    count = step_of(launches)
    layer = count(2) - count(1)
    assert layer == Counter(PRODUCTS | {"_mlstm_step_kernel": 1})


def test_a_layer_of_more_launches_where_products_do_not_normalise(launches: Launches) -> None:
    """Norms with a bias: two of a layer and one behind the last, as what is added before them goes with them."""
    count = step_of(launches, use_bias=True)
    one, two = count(1), count(2)
    assert {name: (two - one)[name] for name in NORMS | PRODUCTS} == NORMS | PRODUCTS
    assert (one - (two - one))["_row_kernel"] == 1


def test_what_is_around_the_layers(launches: Launches) -> None:
    count = step_of(launches)
    one, two = count(1), count(2)
    rest = one - (two - one)
    # the largest logit is that of the product, in its dtype and without the cap
    assert rest == Counter({"index": 1, "_multiply_kernel": 1, "argmax": 1, "copy_": 1})


def test_draws_are_made_from_capped_logits(launches: Launches) -> None:
    model = build(weight_mode="fused", dtype=torch.bfloat16)
    state, logits = model.empty_state(1), torch.zeros(1, VOCABULARY, device=DEVICE)
    made = Decoder(state, logits, Sampling(1.0, 0, 1.0))
    made.start(state, logits, None)
    made.choose(model, False, 1)
    with torch.no_grad():
        launches.found.clear()
        with launches:
            made.step(model, None)
    # in float32; `exponential_` is what `clamp_min` and the division by it are of
    assert all(launches.found[name] for name in ("_to_copy", "tanh", "exponential_", "_softmax", "argmax"))


def test_the_counted_steps_are_right(launches: Launches) -> None:
    """As PyTorch's operations have them: steps that leave something out would launch less."""
    model = build(weight_mode="fused")
    logits = []
    for own in (True, False):
        for name, backend in OPS.items():
            registry.get(name).force(backend if own else "torch")
        made = decoder(model)
        made.step(model, None)
        with torch.no_grad():
            logits.append(model.decode(made.token, made.pool.state))
    assert launches.found["_multiply_kernel"] == 2 * (2 * 4 + 1)
    close(logits[0], logits[1])

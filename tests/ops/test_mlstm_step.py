"""mlstm_step against a definition in float64: states in place and not, gates, norm and gate, layouts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.ops.mlstm_harness import BF16, DEVICE, F16, F32, F64, NAN, Exact, assert_near, case, exact, moved, run
from tests.ops.op_harness import same_bits
from wavecrest import ops
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.mlstm import kernel_norm, launch_norm
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall
from wavecrest.ops.mlstm.step import kernel
from wavecrest.ops.mlstm.step.config import default
from wavecrest.ops.mlstm.step.launch import planned
from wavecrest.ops.mlstm.step.study.space import space

OP = "mlstm_step"
CONFIGS = {"default": None, "several programs": Config(BLOCK_K=8, BLOCK_V=8, num_warps=1)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "closed input gate": {"gates": (-10.0, 4.0, 1.0)},
    "gates at 15": {"gates": (15.0, -15.0, 2.0)},
    "gates at -15": {"gates": (-15.0, 15.0, 2.0)},
    "capped": {"gate_soft_cap": 15.0, "gates": (0.0, 0.0, 20.0)},
    "sigmoid": {"input_gate": "sigmoid"},
    "no normaliser": {"input_gate": "sigmoid", "normalize": False},
    "norm": {"epilogue": "norm"},
    "norm and gate": {"epilogue": "gate", "gates": (-10.0, 4.0, 1.0)},
    "24x48": {"dk": 24, "dv": 48, "epilogue": "gate"},
    "96x192": {"dk": 96, "dv": 192, "heads": 1},
    "one column": {"dk": 1, "dv": 1, "heads": 3},
    "wide": {"dk": 300, "dv": 70, "batch": 1, "epilogue": "norm"},
}


def step(dtype: torch.dtype = F32, half: bool = False, flat: bool = False, **options: Any) -> MlstmStepCall:
    """A step with states that a sequence of tokens could have left: `half`: c in float16; `flat`: gates [B, NH]."""
    more = {name: options.pop(name) for name in ("in_place", "state_dtype") if name in options}
    call = case(**{"heads": 2, **options}, tokens=1, first=True, dtype=dtype)
    gate = None if call.output_gate is None else call.output_gate[:, :, 0]
    assert call.c_initial is not None and call.n_initial is not None
    i, f = (call.i[..., 0], call.f[..., 0]) if flat else (call.i, call.f)
    kept = F64 if dtype == F64 else F32
    n, m = (None if one is None else one.to(kept) for one in call.initial[1:])
    assert n is not None
    return MlstmStepCall(
        call.q[:, :, 0], call.k[:, :, 0], call.v[:, :, 0], i, f, call.c_initial.to(F16 if half else kept), n, m,
        call.eps, call.input_gate, call.normalize, call.gate_soft_cap, call.norm_weight, call.norm_eps, gate, **more,
    )  # fmt: skip


def wanted(call: MlstmStepCall) -> Exact:
    """The results of a step, by the oracle of sequences; only results are rounded."""
    return exact(call.sequence(), rounded=False)


def assert_step(call: MlstmStepCall, got: Any, want: Exact | None = None) -> None:
    want = want or wanted(call)
    h, *states = got
    assert h.dtype == call.q.dtype and h.shape == call.v.shape
    assert states[0].dtype == call.c_dtype and all(one.dtype in (F32, F64) for one in states[1:])
    assert_near("h", h, want.h[:, :, 0], want.h_bound[:, :, 0], h.dtype == BF16)
    assert len(states) == len(want.states)
    for name, one, exactly, bound in zip("cnm", states, want.states, want.state_bounds, strict=False):
        assert_near(name, one.reshape(exactly.shape), exactly, bound)


@pytest.mark.parametrize("how", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, how: str) -> None:
    call = step(**CASES[name])
    assert_step(call, run(OP, call, CONFIGS[how]))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("name", ["closed input gate", "capped", "norm and gate", "96x192"])
def test_cases_in_16_bits(name: str, dtype: torch.dtype) -> None:
    call = step(dtype=dtype, half=dtype == F16, flat=True, **CASES[name])
    assert_step(call, run(OP, call))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_other_backends(dtype: torch.dtype, backend: str) -> None:
    for name in ("plain", "sigmoid", "norm and gate"):
        call = step(dtype=dtype, **CASES[name])
        assert_step(call, run(OP, call, backend=backend))


@pytest.mark.parametrize("how", CONFIGS)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("name", ["plain", "sigmoid", "norm and gate"])
def test_in_place_is_the_same_step(name: str, half: bool, how: str) -> None:
    """The caller's states, whatever their strides, have what new ones would; nothing else is written."""
    for layout in ("dense", "sliced", "permuted") if name == "plain" else ("sliced",):
        call = step(half=half, **CASES[name])
        want = run(OP, call, CONFIGS[how])
        states = [None if one is None else one.clone() for one in (call.c, call.n, call.m)]
        if layout != "dense":
            states = [None if one is None else moved(one, layout) for one in states]
        inside = call._replace(c=states[0], n=states[1], m=states[2], in_place=True)
        kept = [None if one is None else (one._base if one._base is not None else one).clone() for one in states]
        got = run(OP, inside, CONFIGS[how])
        assert all(
            mine is given for mine, given in zip(got[1:], [one for one in states if one is not None], strict=True)
        )
        if DEVICE == "cpu" or layout == "dense":
            assert all(same_bits(mine, new) for mine, new in zip(got, want, strict=True))
        else:
            # other strides, other loads: lanes have other elements, and add them in another order
            assert_step(call, got)
        for given, before in zip(states, kept, strict=True):
            if layout == "sliced" and given is not None:
                # the NaN around it
                assert given._base is not None and before is not None
                assert int(given._base.isnan().sum()) == int(before.isnan().sum())


ORDERS: dict[str, Callable[[int, int], int]] = {
    "in order": lambda index, _count: index,
    "backwards": lambda index, count: count - 1 - index,
    # 5 divides no number of programs here
    "mixed": lambda index, count: index * 5 % count,
}


@pytest.fixture(params=ORDERS if DEVICE == "cpu" else ["a GPU's"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The order in which the programs of a launch run."""
    if DEVICE == "cpu":
        builder = sys.modules["triton.runtime.interpreter"].InterpreterBuilder
        placed, place = builder.set_grid_idx, ORDERS[request.param]

        def moved_to(this: Any, x: int, *rest: int) -> None:
            assert this.grid_dim[0] % 5
            placed(this, place(x, this.grid_dim[0]), *rest)

        monkeypatch.setattr(builder, "set_grid_idx", moved_to)
    return str(request.param)


COUNTED = ("sigmoid", "no normaliser", "norm", "norm and gate", "24x48")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_the_last_program_of_a_head_ends_it(
    name: str, in_place: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = step(**CASES[name])
    config = CONFIGS["several programs"]
    want = run(OP, call, config)
    arrivals = torch.zeros(call.q.shape[:2], dtype=torch.int32, device=DEVICE)
    empty_like, empty = torch.empty_like, torch.empty
    monkeypatch.setattr(torch, "empty_like", lambda *given, **more: empty_like(*given, **more).fill_(NAN))
    monkeypatch.setattr(torch, "empty", lambda *given, **more: empty(*given, **more).fill_(NAN))
    # the second call finds what the first one left
    for _ in range(2):
        states = [None if one is None else one.clone() for one in (call.c, call.n, call.m)]
        made = call._replace(c=states[0], n=states[1], m=states[2], in_place=in_place, arrivals=arrivals)
        assert len(_described(made, "several programs")) == 1
        got = run(OP, made, config)
        assert not bool(arrivals.any())
        if in_place:
            assert all(one is given for one, given in zip(got[1:], states, strict=False))
        if DEVICE == "cpu":
            assert all(same_bits(one, other) for one, other in zip(got, want, strict=True))
        assert_step(call, got)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_compiled_as_counted_is(arch: str) -> None:
    made = registry.get(OP).study.compile_cases
    assert made is not None
    cases = made(ARCHS[arch])
    assert {name for name, launch in cases.items() if launch.constants.get("LAST")} == {"7B counted"}


def test_without_anything_left_to_do_nobody_is_counted() -> None:
    arrivals = torch.full((2, 2), 7, dtype=torch.int32, device=DEVICE)
    plain, whole = step(), step(**CASES["norm and gate"], in_place=True)
    for call, config in ((plain, CONFIGS["several programs"]), (whole, None)):
        copy = call._replace(c=call.c.clone(), n=call.n.clone(), m=None if call.m is None else call.m.clone())
        assert_step(call, run(OP, copy._replace(arrivals=arrivals), config), wanted(call))
    assert bool((arrivals == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_programs_are_counted_whatever_their_order(batch: int) -> None:
    """Many programs at once, many times: each time the same bits as when nothing else runs."""
    call = step(dtype=BF16, batch=batch, heads=8, dk=256, dv=512, epilogue="gate")
    config = registry.get(OP).config_of("triton", registry.get(OP).key(call))
    arrivals = torch.zeros(batch, 8, dtype=torch.int32, device=DEVICE)
    first: list[Tensor] | None = None
    for _ in range(200):
        got = list(run(OP, call._replace(arrivals=arrivals), config))
        first = first or got
        assert all(same_bits(one, other) for one, other in zip(got, first, strict=True))
    assert first is not None and not bool(arrivals.any())
    assert_step(call, first)


def test_more_rows_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's kernel for them, on few rows."""
    call, how = step(**CASES["norm and gate"]), "several programs"
    narrow = run(OP, call, CONFIGS[how])
    assert not _described(call, how)[1].constants["WIDE"]
    monkeypatch.setattr(launch_norm, "MOST_NARROW", 0)
    assert _described(call, how)[1].constants["WIDE"]
    assert all(map(same_bits, run(OP, call, CONFIGS[how]), narrow))


def test_arguments_are_not_written_to_without_in_place() -> None:
    call = step(**CASES["norm and gate"])
    before = [one.clone() if isinstance(one, Tensor) else one for one in call]
    for config in CONFIGS.values():
        run(OP, call, config)
    for one, kept in zip(call, before, strict=True):
        assert not isinstance(one, Tensor) or same_bits(one, kept)


def test_float16_states_are_clamped_and_keep_nan() -> None:
    call = step(gates=(0.0, 6.0, 0.1))
    call.c[0, 0, 0, 0], call.c[0, 0, 1, 1], call.c[1, 1, 0, 0] = 1e6, -1e6, NAN
    for backend in ("triton", "torch"):
        c = run(OP, call._replace(state_dtype=F16), backend=backend)[1]
        assert c.dtype == F16 and c[0, 0, 0, 0] == 65504 and c[0, 0, 1, 1] == -65504
        assert bool(c[1, 1, 0, 0].isnan()) and int(c.isnan().sum()) == 1


@pytest.mark.parametrize("how", ["sliced", "step", "permuted"])
def test_strides(how: str) -> None:
    call = step(dtype=F16, epilogue="gate")
    names = ["q", "k", "v", "i", "f", "c", "n", "output_gate", "norm_weight"]
    other = call._replace(**{name: moved(getattr(call, name), how) for name in names})
    for config in CONFIGS.values():
        got = run(OP, other, config)
        if DEVICE == "cpu":
            assert all(map(same_bits, got, run(OP, call, config)))
        # a GPU's lanes have other elements where strides are others, and add them in another order
        assert_step(call, got)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    call = step(dtype=BF16, batch=3, epilogue="gate")
    for config in CONFIGS.values():
        whole = run(OP, call, config)
        for row in range(3):
            one = MlstmStepCall(*(
                part[row : row + 1] if isinstance(part, Tensor) and part.ndim > 1 else part for part in call
            ))  # fmt: skip
            for got, want in zip(run(OP, one, config), whole, strict=True):
                assert same_bits(got, want[row : row + 1])
    found = registry.get(OP)
    assert found.key(call) == found.key(step(dtype=BF16, batch=1, epilogue="gate"))


def test_four_thousand_steps_stay_near_float64() -> None:
    """The definition in float32, gates of a model: decays near 1 for 4,096 steps; a 16-bit m would be lost."""
    heads, size = 3, 8
    call = case(batch=1, heads=heads, tokens=4096, dk=size, dv=size, gates=(-10.0, 0.0, 1.0))
    bias = torch.tensor([3.0, 5.0, 6.0], device=DEVICE)[:, None]
    call = call._replace(f=call.f + bias)
    single = run("mlstm_sequence", call, backend="torch")
    wide = call._replace(**{name: getattr(call, name).double() for name in "qkvif"})
    exactly = run("mlstm_sequence", wide, backend="torch")
    off = (single - exactly)[:, :, -128:].norm() / exactly[:, :, -128:].norm()
    # float32 rounds m, of about 10, 4,096 times; errors of either sign: √4096 · 10 · 2⁻²⁴, and more for outputs of sums
    assert float(off) < 8 * 64 * 10 * 2.0**-24


def test_the_kernel_stays_near_for_sixty_steps() -> None:
    """The kernel's own states from step to step, against the oracle's."""
    call = case(batch=1, heads=1, tokens=60, dk=8, dv=8, dtype=F32, gates=(-10.0, 5.0, 1.0), return_last_states=True)
    state: Any = (torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8), torch.zeros(1, 1, 1))
    state = tuple(one.to(DEVICE) for one in state)
    found, registered = [], registry.get(OP)
    registered.force("triton")
    for t in range(60):
        h, state = ops.mlstm_step(
            call.q[:, :, t], call.k[:, :, t], call.v[:, :, t], call.i[:, :, t], call.f[:, :, t], *state, in_place=True
        )
        found.append(h)
    want = exact(call, rounded=False)
    assert_near("h", torch.stack(found, 2), want.h, want.h_bound)
    for one, exactly, bound in zip(state, want.states, want.state_bounds, strict=True):
        assert_near("state", one, exactly, bound)


def test_gradients_go_through_the_definition() -> None:
    call = step(epilogue="gate", dk=3, dv=4, dtype=F64)
    leaves = [
        one.double().requires_grad_() if isinstance(one, Tensor) and one.is_floating_point() else one for one in call
    ]
    assert torch.autograd.gradcheck(lambda *args: registry.get(OP)(MlstmStepCall(*args)), leaves, atol=1e-6)
    single = MlstmStepCall(
        *(one.float().detach().requires_grad_() if isinstance(one, Tensor) else one for one in leaves)
    )
    decision = registry.get(OP).decide(single)
    assert decision.backend == "torch"
    assert "gradients" in {one.backend: one.reason for one in decision.refused}["triton"]


@pytest.mark.parametrize("how", CONFIGS)
def test_nothing_is_compiled_again_for_another_batch(how: str) -> None:
    kernels = [launch.kernel for launch in _described(step(epilogue="gate"), how)]
    assert len(kernels) == (1 if how == "default" else 2)
    first = [_identity(launch) for launch in _described(step(epilogue="gate", batch=1, heads=5), how)]
    for batch, heads in ((2, 2), (16, 8), (17, 3)):
        again = [_identity(launch) for launch in _described(step(epilogue="gate", batch=batch, heads=heads), how)]
        assert again == first


def _described(call: MlstmStepCall, how: str) -> list[Any]:
    return planned(call, CONFIGS[how] or default(16, 24, None), None)


def _identity(launch: Any) -> Any:
    """The values that a kernel is compiled for: constants, dtypes, and numbers that are not in do_not_specialize."""
    names = [name for name in launch.kernel.arg_names if name not in launch.constants]
    specialized = [
        value.dtype if isinstance(value, Tensor) else type(value) for _, value in zip(names, launch.args, strict=False)
    ]
    loose = {name for name, value in zip(names, launch.args, strict=False) if not isinstance(value, Tensor)}
    assert loose <= set(kernel._SIZES) | set(kernel_norm._SIZES), "a number makes the kernel anew"
    return launch.kernel, specialized, launch.options()


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic: bool) -> None:
    torch._dynamo.reset()
    found = torch.compile(
        ops.mlstm_step, fullgraph=True, dynamic=dynamic, backend="eager" if DEVICE == "cpu" else "inductor"
    )
    for batch in (2, 3):
        call = step(batch=batch)
        got, want = (one(*call[:8], gate_soft_cap=15.0) for one in (found, ops.mlstm_step))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])


def test_an_empty_batch() -> None:
    call = step()
    none = MlstmStepCall(*(one[:0] if isinstance(one, Tensor) else one for one in call))
    for backend in ("triton", "torch"):
        assert [one.shape[0] for one in run(OP, none, backend=backend)] == [0, 0, 0, 0]


def test_space_and_defaults() -> None:
    for arch in ARCHS.values():
        for dk, dv in ((64, 128), (256, 512), (24, 48), (2000, 3)):
            some = list(space(dk, dv, arch))
            assert some[0] == default(dk, dv, arch) and len(some) == len(set(some))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "k's head_dim": ({"k": torch.zeros(2, 2, 15)}, "k must have a head_dim of 16"),
    "k's dtype": ({"k": torch.zeros(2, 2, 16).half()}, "k must be torch.float32"),
    "v's heads": ({"v": torch.zeros(2, 3, 24)}, "v must be"),
    "gate": ({"i": torch.zeros(2, 2, 2)}, "i must be"),
    "gates apart": ({"i": torch.zeros(2, 2)}, "one shape"),
    "integers": ({"f": torch.zeros(2, 2, 1).int()}, "f must be"),
    "c in bfloat16": ({"c": torch.zeros(2, 2, 16, 24).bfloat16()}, "more than 100 %"),
    "m in bfloat16": ({"m": torch.zeros(2, 2, 1).bfloat16()}, "more than 100 %"),
    "n in float16": ({"n": torch.zeros(2, 2, 16).half()}, "n must be torch.float32"),
    "no m": ({"m": None}, "m must be"),
    "m of sigmoid": ({"input_gate": "sigmoid"}, "pass None"),
    "input_gate": ({"input_gate": "tanh"}, "exp or sigmoid"),
    "normalize": ({"normalize": False}, "goes with input_gate='sigmoid'"),
    "eps": ({"eps": -1.0}, "eps must be"),
    "cap": ({"gate_soft_cap": float("inf")}, "gate_soft_cap must be"),
    "gate without norm": ({"output_gate": torch.zeros(2, 2, 24)}, "pass norm_weight"),
    "norm_weight": ({"norm_weight": torch.zeros(24)}, "norm_weight must be"),
    "state_dtype": ({"state_dtype": torch.bfloat16}, "more than 100 %"),
    "in_place": ({"in_place": 1}, "True or False"),
    "in place, another dtype": ({"in_place": True, "state_dtype": F16}, "leave out state_dtype"),
    "arrivals in 64 bits": ({"arrivals": torch.zeros(2, 2, dtype=torch.int64)}, "arrivals must be int32"),
    "arrivals of other rows": ({"arrivals": torch.zeros(3, 2, dtype=torch.int32)}, "arrivals must be int32"),
    "arrivals apart": ({"arrivals": torch.zeros(2, 2, dtype=torch.int32).mT}, "contiguous"),
    "in place, rows that overlap": (
        {"in_place": True, "c": torch.zeros(2000, device=DEVICE).as_strided((2, 2, 16, 24), (768, 384, 12, 1))},
        "share memory",
    ),
    "in place, heads in one place": (
        {"in_place": True, "n": torch.zeros(64, device=DEVICE).as_strided((2, 2, 16), (16, 16, 1))},
        "share memory",
    ),
    "in place, shared": (
        {"in_place": True, "c": torch.zeros(1, 1, 16, 24, device=DEVICE).expand(2, 2, 16, 24)},
        "share memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    changes, message = REFUSED[name]
    call = step()._replace(
        **{key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in changes.items()}
    )
    for backend in (None, "torch", "reference", "triton"):
        with pytest.raises(InvalidArgument, match=f"mlstm_step: .*{message}"):
            registry.get(OP)(call) if backend is None else run(OP, call, backend=backend)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_of_states_in_place(dynamic: bool) -> None:
    torch._dynamo.reset()
    backend = "eager" if DEVICE == "cpu" else "inductor"
    found = torch.compile(ops.mlstm_step, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch in (2, 3):
        call = step(batch=batch)
        states = [one.clone() for one in (call.c, call.n, call.m) if one is not None]
        _, got = found(*call[:5], *states, in_place=True)
        assert all(one is given for one, given in zip(got, states, strict=True))
        _, want = ops.mlstm_step(*call[:8])
        torch.testing.assert_close(tuple(states), want)


def test_in_place_with_gradients_is_refused() -> None:
    call = step(in_place=True)
    with pytest.raises(InvalidArgument, match="in_place=False"):
        registry.get(OP)(call._replace(q=call.q.requires_grad_()))


def test_float64_is_declined_by_the_kernel() -> None:
    with pytest.raises(Unsupported, match="float64"):
        run(OP, step(dtype=F64))


def test_the_bound_can_fail() -> None:
    """A wrong floor, forgotten ε or decay, a state off by one in a thousand: each is beyond the bound."""
    call = step(**CASES["closed input gate"])
    want, right = wanted(call), run(OP, call)
    assert_step(call, right, want)
    assert call.m is not None
    wrong = [
        run(OP, call._replace(m=call.m - 10.0), backend="torch")[0],
        run(OP, call._replace(f=call.f + 0.01), backend="torch")[0],
        right[0] * 1.001,
        right[0].roll(1, -1),
    ]
    for h in wrong:
        with pytest.raises(AssertionError):
            assert_step(call, (h, *right[1:]), want)
    with pytest.raises(AssertionError):
        assert_step(call, (right[0], right[1] * 1.0001, *right[2:]), want)


def test_a_measured_row_holds_in_place_too() -> None:
    """Models call it with states overwritten, which a tuner cannot repeat."""
    op = registry.get(OP)
    call = step(gate_soft_cap=15.0, epilogue="gate")
    fields = op.key_fields
    keys = [op.key(call._replace(in_place=inside)) for inside in (False, True)]
    keys = [(*key[: fields.index("device")], "cuda", *key[fields.index("device") + 1 :]) for key in keys]
    rows = [lookup.columns(op, key) for key in keys]
    assert keys[0] != keys[1] and rows[0] is not None and rows[0] == rows[1]


def test_the_public_function_nests_states() -> None:
    call = step()
    h, (c, n, m) = ops.mlstm_step(*call[:8])
    assert all(same_bits(one, other) for one, other in zip((h, c, n, m), registry.get(OP)(call), strict=True))
    _, states = ops.mlstm_step(*call[:7], None, input_gate="sigmoid")
    assert len(states) == 2
    assert isinstance(call.sequence(), MlstmCall)

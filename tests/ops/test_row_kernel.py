"""All ops of the row kernel: layouts, splitting, special values, equal bits, recompilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.op_harness import (
    BACKENDS,
    DTYPES,
    E4M3,
    E5M2,
    GROUP,
    LARGEST,
    LAYOUTS,
    PAIRS,
    ROW_OPS,
    SHAPES,
    VARIANTS,
    WIDE,
    arguments,
    assert_compiles,
    assert_grad_falls_back,
    assert_never_copies,
    assert_variant,
    by_name,
    call_of,
    check_results,
    expected_scale,
    five_dims,
    layout,
    parameters,
    random,
    run,
    same_bits,
    second_layout,
    shape_id,
    unrounded,
)
from wavecrest import ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.hardware import ARCHS
from wavecrest.ops.rows.call import RowCall

RESIDUAL = [variant for variant, (op, _) in VARIANTS.items() if "residual" in parameters(op)]
WEIGHTED = [ROW_OPS[op] for op in ROW_OPS if "norm" in op]
# whose 8-bit values have a scale that is worked out
ROUNDING = [v for v, (op, o) in VARIANTS.items() if "quantize" in op and op != "dequantize" and not o.get("scale")]
# one whole tensor decides the scale, so that a row's values depend on the others
WHOLE = [variant for variant in ROUNDING if VARIANTS[variant][1].get("granularity") == "tensor"]
GROUPED = [variant for variant in ROUNDING if VARIANTS[variant][1].get("granularity") == "group"]
BIG_SHAPES = ((3, 127), (2, 128), (2, 129), (3, 1000), (2, 2, 300))

Results = tuple[Tensor, ...]


def shaped(shape: tuple[int, ...], device: str) -> Callable[[torch.dtype, int], Tensor]:
    return lambda dtype, seed: random(shape, dtype, device, seed)


def zeros(shape: tuple[int, ...], device: str) -> Callable[[torch.dtype, int], Tensor]:
    return lambda dtype, _seed: torch.zeros(shape, dtype=dtype, device=device)


def laid_out(key: str, device: str, n: int = 72) -> Callable[[torch.dtype, int], Tensor]:
    return lambda dtype, seed: layout(key, dtype, device, seed, n)


def run_variant(variant: str, args: tuple[Any, ...], config: Config | None = None) -> Results:
    results = run(VARIANTS[variant][0], "triton", *args, config=config)
    return results if isinstance(results, tuple) else (results,)


def key_of(variant: str, make: Callable[[torch.dtype, int], Tensor], dtype: torch.dtype = torch.bfloat16) -> Any:
    op = VARIANTS[variant][0]
    return registry.get(op).key(call_of(op, *arguments(variant, make, dtype)))


def narrow(variant: str, block_n: int, dtype: torch.dtype, packed: bool) -> Config:
    """A configuration that splits; groups must fill their blocks."""
    block_n = max(block_n, GROUP) if variant in GROUPED else block_n
    return Config(BLOCK_M=1, BLOCK_N=block_n, PACKED=int(packed and dtype.itemsize == 2), num_warps=1)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the launches of calls from now on are noted instead of run."""
    found: list[Any] = []

    def note(launch: Any, _device: Any) -> Callable[..., None]:
        found.append(launch)
        return lambda *_args: None

    monkeypatch.setattr("wavecrest.ops.common.launcher.starter", note)
    return found


def test_every_op_of_the_kernel_is_tested_here() -> None:
    kernels = {}
    for op in registry.names():
        cases = registry.get(op).study.compile_cases
        if cases is not None:
            kernels[op] = next(iter(cases(ARCHS["gfx942"], None).values())).kernel
    assert {op for op, kernel in kernels.items() if kernel is kernels["rms_norm"]} == set(ROW_OPS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_shapes(shape: tuple[int, ...], variant: str, device: str) -> None:
    # each op has each shape in one dtype and each dtype in several shapes; on a GPU, where they cost nothing, all
    turn = (SHAPES.index(shape) + list(VARIANTS).index(variant)) % 3
    for dtype in DTYPES if device == "cuda" else (DTYPES[turn],):
        assert_variant(variant, "triton", shaped(shape, device), dtype)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_backends(variant: str, backend: str, device: str) -> None:
    for dtype in DTYPES:
        for shape in ((1, 1), (3, 127), (2, 3, 40)):
            assert_variant(variant, backend, shaped(shape, device), dtype)


# the last group has 127, 128, 1 and 104 columns; the group before it must not notice
@pytest.mark.parametrize("variant", [v for v, (_, o) in VARIANTS.items() if o.get("granularity") == "group"])
@pytest.mark.parametrize("shape", BIG_SHAPES, ids=shape_id)
def test_ragged_groups(shape: tuple[int, ...], variant: str, device: str) -> None:
    assert_variant(variant, "triton", shaped(shape, device), torch.bfloat16)


@pytest.mark.parametrize("variant", [v for v in ROUNDING if "layer_norm" in v])
def test_what_is_outside_the_row_has_no_part_in_scales(variant: str, device: str) -> None:
    # there a large mean is subtracted from nothing, which is more than all that the row has left
    def make(dtype: torch.dtype, seed: int) -> Tensor:
        return random((2, 135), dtype, device, seed) + 5.0

    for config in (None, narrow(variant, 128, torch.float16, True)):
        assert_variant(variant, "triton", make, torch.float16, config, weight=None, bias=None)


def _strided() -> list[tuple[str, str]]:
    """Each layout with each op, and some with each other variant of it."""
    return [
        (key, variant)
        for i, (variant, (op, _)) in enumerate(VARIANTS.items())
        for j, key in enumerate(LAYOUTS)
        if variant == ROW_OPS[op] or (i + j) % 5 == 0
    ]


@pytest.mark.parametrize(("key", "variant"), _strided())
def test_strides(key: str, variant: str, device: str) -> None:
    # a constant row has nothing but rounding left after centring: eps decides, so it must not be tiny
    eps = {"eps": 0.3} if key == "expanded-columns" and "norm" in variant else {}
    assert_variant(variant, "triton", laid_out(key, device), torch.float16, **eps)


@pytest.mark.parametrize("variant", RESIDUAL)
def test_two_operands_with_strides_of_their_own(variant: str, device: str) -> None:
    pairs = PAIRS if variant == "add_rms_norm" else PAIRS[RESIDUAL.index(variant) :: 7]
    for key, other in pairs:
        x = layout(key, torch.bfloat16, device)
        residual = second_layout(other, x)
        assert_variant(variant, "triton", lambda *_, x=x: x, torch.bfloat16, residual=residual, eps=0.3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_copy(variant: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in LAYOUTS:
        args = arguments(variant, laid_out(key, device), torch.float32)
        assert_never_copies(VARIANTS[variant][0], monkeypatch, *args)


# columns, of blocks of 32 (groups: 128): one column left over, blocks that are full, four parts with an odd tail
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", ["odd-two", "full-four", "odd-four"])
def test_split_rows(case: str, variant: str, device: str) -> None:
    block = GROUP if variant in GROUPED else 32
    columns = {"odd-two": block + 1, "full-four": 4 * block, "odd-four": 3 * block + 5}[case]
    dtype = {"odd-two": torch.float32, "full-four": torch.bfloat16, "odd-four": torch.float16}[case]
    made = {"odd-two": "permuted-3d", "full-four": "row-step", "odd-four": "row-sliced"}[case]
    # a trend along the row: the parts differ in all that is found in them
    trend = torch.linspace(-1.0, 2.0, columns, device=device)

    def make(kind: torch.dtype, seed: int) -> Tensor:
        x = layout(made, kind, device, seed, columns)[: 1 if case == "odd-four" else 2]
        return x if kind == torch.int8 else x.add_(trend.to(kind))

    # 16 bits are packed in one case and not in the other
    assert_variant(variant, "triton", make, dtype, narrow(variant, block, dtype, packed=case == "odd-four"))


@pytest.mark.parametrize("arch", ARCHS)
def test_threads_of_a_split_row_hold_different_words(arch: str) -> None:
    # what two of them hold of one word need not be the same when the last look ends
    split = 0
    for op in ROW_OPS:
        for launch in registry.get(op).study.compile_cases(ARCHS[arch], None).values():
            if launch.constants["PARTS"] > 1:
                split += 1
                assert launch.constants["PARTS"] >= launch.config["num_warps"] * ARCHS[arch].wave_size, op
    assert split > 10


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_m", [1, 4])
def test_packed_rows_and_several_rows_a_program(block_m: int, variant: str, device: str) -> None:
    # 128 or 256 columns; the last program has rows to spare, the rows have gaps between them
    block_n = 256 if variant in GROUPED else 128
    config = Config(BLOCK_M=block_m, BLOCK_N=block_n, PACKED=1, num_warps=1)
    dtype = torch.float16 if block_m == 1 else torch.bfloat16
    assert_variant(variant, "triton", lambda *key: layout("row-sliced", key[0], device, key[1], 99)[:5], dtype, config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_wide_rows(variant: str, device: str) -> None:
    if device == "cuda":
        assert_variant(variant, "triton", shaped((2, WIDE), device), torch.bfloat16)
        assert_variant(variant, "triton", shaped((2, 4 * WIDE), device), torch.bfloat16)
        return
    # the interpreter runs one part after another, and each works out all: few of them
    config = Config(BLOCK_M=1, BLOCK_N=65536, PACKED=0, num_warps=8)
    assert_variant(variant, "triton", shaped((1, WIDE), device), torch.bfloat16, config)


@pytest.mark.parametrize("variant", ["rms_norm", "softmax", "add_layer_norm_quantize-group-e4m3fn"])
def test_rows_above_262144_columns(variant: str, device: str) -> None:
    config = Config(BLOCK_M=1, BLOCK_N=131072, PACKED=1, num_warps=16) if device == "cpu" else None
    assert_variant(variant, "triton", shaped((1, 262144 + 72), device), torch.bfloat16, config)


@pytest.mark.parametrize("variant", ["dequantize-token"])
def test_rows_far_apart(variant: str, device: str) -> None:
    # offsets past 2^31: the memory between is never touched
    q = torch.empty(2**31 + 200, dtype=torch.int8, device=device).as_strided((2, 72), (2**31 + 16, 1))
    q.copy_(random((2, 72), torch.int8, device))
    assert_variant(variant, "triton", lambda *_: q, torch.float32)
    across = q.as_strided((3, 2), (1, 2**31 + 16))
    assert_variant(variant, "triton", lambda *_: across, torch.float32)


@pytest.mark.parametrize("variant", WEIGHTED)
def test_weights_of_another_dtype_and_stride(variant: str, device: str) -> None:
    names = parameters(VARIANTS[variant][0])
    shapes = {
        "strided": lambda seed, dtype: random((160,), dtype, device, seed)[::2],
        "expanded": lambda seed, dtype: random((1,), dtype, device, seed).expand(80),
        "reversed-in-memory": lambda seed, dtype: random((80, 3), dtype, device, seed)[:, 1],
    }
    for index, make in enumerate(shapes.values()):
        dtype, other = DTYPES[index], DTYPES[(index + 1) % 3]
        vectors = {key: make(seed, other) for key, seed in (("weight", 5), ("bias", 6)) if key in names}
        for config in (None, narrow(variant, 64, dtype, True)):
            assert_variant(variant, "triton", shaped((1, 80), device), dtype, config, **vectors)
    for left_out in vectors:
        assert_variant(variant, "triton", shaped((2, 80), device), torch.float16, **{left_out: None})
    assert_variant(variant, "triton", shaped((2, 80), device), torch.float16, **dict.fromkeys(vectors))


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_again_and_in_any_batch(variant: str, device: str) -> None:
    op = VARIANTS[variant][0]
    split = narrow(variant, 128, torch.bfloat16, True)
    several = Config(BLOCK_M=4, BLOCK_N=256, PACKED=0, num_warps=1)
    for config in (several, split):
        # a ragged batch of 7 rows; 3 rows that are split over two programs each
        rows = 7 if config is several else 3
        args = by_name(op, arguments(variant, shaped((rows, 140), device), torch.bfloat16))
        batch = run_variant(variant, tuple(args.values()), config)
        again = run_variant(variant, tuple(args.values()), config)
        assert all(same_bits(a, b) for a, b in zip(batch, again, strict=True)), "other bits in another run"
        if variant in WHOLE:
            continue
        for picked in (slice(0, 1), slice(rows - 1, rows), slice(1, 7))[: 3 if config is several else 2]:
            # what has a row of its own for each row of x
            part = {
                key: value[picked] if isinstance(value, Tensor) and value.ndim == 2 else value
                for key, value in args.items()
            }
            alone = run_variant(variant, tuple(part.values()), config)
            for a, b in zip(alone, batch, strict=True):
                assert same_bits(a, b[picked] if b.ndim == 2 else b), f"{picked} of the batch with {config}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_default_configuration_does_not_depend_on_the_rows(variant: str, device: str) -> None:
    op = VARIANTS[variant][0]
    for columns in (64, 1000, 5000, 40000):
        made = {
            registry.get(op).config_of("triton", key_of(variant, zeros((rows, columns), device))) for rows in (1, 3, 17)
        }
        assert len(made) == 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
def test_special_values_stay_in_their_row(value: float, variant: str, device: str) -> None:
    op = VARIANTS[variant][0]
    if op == "dequantize":
        _special_codes(variant, value, device)
        return
    split = narrow(variant, 128, torch.float16, True)
    # +inf and 0 take no path through the exchange that NaN and -inf do not
    for config in (None, split) if value != 0.0 and value != float("inf") else (None,):
        x = random((5, 140), torch.float16, device)
        x[1, 139] = value
        x[2] = value
        # a whole part of a split row
        x[3, :128] = value
        given_too = {}
        if "residual" in parameters(op):
            given_too["residual"] = random((5, 140), torch.float16, device, 1)
            given_too["residual"][4] = value
        # PyTorch's fused CUDA norms give other values in a row that holds an infinity
        others = ("reference",) if device == "cuda" and abs(value) == float("inf") else ("reference", "torch")
        for backend in ("triton", *others) if config is None and variant == ROW_OPS[op] else ("triton",):
            results = assert_variant(variant, backend, lambda *_, x=x: x, torch.float16, config, **given_too)
            if variant not in WHOLE:
                assert all(result[0].float().isfinite().all() for result in results if result.ndim == 2)


@pytest.mark.parametrize("variant", WEIGHTED)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_special_values_of_a_weight(value: float, variant: str, device: str) -> None:
    weight = random((140,), torch.float16, device, 2)
    weight[137] = value
    for config in (None, narrow(variant, 128, torch.float16, True)):
        assert_variant(variant, "triton", shaped((2, 140), device), torch.float16, config, weight=weight)


def _special_codes(variant: str, value: float, device: str) -> None:
    for eight in (E4M3, E5M2):
        q = random((5, 140), torch.float32, device).to(eight)
        q[2] = value if eight == E5M2 or abs(value) != float("inf") else float("nan")
        results = assert_variant(variant, "triton", lambda *_, q=q: q, torch.bfloat16)
        assert results[0][[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,), (0, 0)], ids=shape_id)
def test_empty(shape: tuple[int, ...], variant: str, device: str) -> None:
    for backend in BACKENDS:
        assert_variant(variant, backend, shaped(shape, device), torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_stays_in_pytorch(variant: str, device: str) -> None:
    op, args = VARIANTS[variant][0], arguments(variant, shaped((3, 140), device), torch.float64)
    found = registry.get(op)
    with pytest.raises(Unsupported, match="takes float32, float16, bfloat16, not float64"):
        run(op, "triton", *args)
    found.force("triton")
    results = getattr(ops, op)(*args)
    check_results(op, results if isinstance(results, tuple) else (results,), by_name(op, args))


@pytest.mark.parametrize("op", ROW_OPS)
def test_more_leading_dims_than_the_kernel_takes(op: str, device: str) -> None:
    args = arguments(ROW_OPS[op], lambda dtype, _seed: five_dims(dtype, device), torch.float32)
    found = registry.get(op)
    found.force("triton")
    assert "leading dimensions" in found.decide(call_of(op, *args)).refused[0].reason
    results = getattr(ops, op)(*args)
    check_results(op, results if isinstance(results, tuple) else (results,), by_name(op, args), contiguous=False)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ROW_OPS)
def test_columns_that_do_not_lie_together_are_left_to_pytorch(op: str) -> None:
    args = arguments(ROW_OPS[op], laid_out("transposed", "cuda"), torch.float32)
    found = registry.get(op)
    decision = found.decide(call_of(op, *args))
    assert decision.backend == "torch"
    assert "one by one" in {refusal.backend: refusal.reason for refusal in decision.refused}["triton"]
    assert (
        found.decide(call_of(op, *arguments(ROW_OPS[op], laid_out("row-sliced", "cuda"), torch.float32))).backend
        == "triton"
    )
    found.force("triton")
    assert found.decide(call_of(op, *args)).backend == "triton"


@pytest.mark.parametrize("op", ROW_OPS)
def test_wrong_configurations(op: str, device: str) -> None:
    args = arguments(ROW_OPS[op], shaped((2, 100), device), torch.float32)
    with pytest.raises(InvalidArgument, match="100 columns can be split only with one row a program"):
        run_variant(ROW_OPS[op], args, Config(BLOCK_M=2, BLOCK_N=64, PACKED=0, num_warps=1))


@pytest.mark.parametrize("variant", GROUPED)
def test_groups_fill_their_blocks(variant: str, device: str) -> None:
    args = arguments(variant, shaped((2, 100), device), torch.float32)
    with pytest.raises(InvalidArgument, match="need a BLOCK_N that they fill"):
        run_variant(variant, args, Config(BLOCK_M=1, BLOCK_N=64, PACKED=0, num_warps=1))


@pytest.mark.parametrize("op", [op for op in ROW_OPS if registry.get(op).op_class != "quantized"])
def test_gradients(op: str, device: str) -> None:
    assert_grad_falls_back(op, *arguments(ROW_OPS[op], shaped((3, 40), device), torch.float32))


@pytest.mark.parametrize("variant", [v for v, (op, _) in VARIANTS.items() if registry.get(op).op_class == "quantized"])
def test_calls_that_need_gradients_are_not_the_kernels(variant: str, device: str) -> None:
    op, args = VARIANTS[variant][0], arguments(variant, shaped((3, 40), device), torch.float32)
    found = registry.get(op)
    found.force("triton")
    assert found.decide(call_of(op, *args)).backend == "triton"
    for key, value in by_name(op, args).items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        values = {**by_name(op, args), key: value.clone().requires_grad_()}
        decision = found.decide(call_of(op, *values.values()))
        assert decision.backend == "torch", key
        assert "gradients" in decision.refused[0].reason
        with torch.no_grad():
            assert found.decide(call_of(op, *values.values())).backend == "triton"


def test_the_scale_of_dequantize_gets_its_gradient(device: str) -> None:
    registry.get("dequantize").force("triton")
    q, scale = random((3, 40), torch.int8, device), torch.rand(3, 1, device=device, requires_grad=True)
    ops.dequantize(q, scale, torch.float32).sum().backward()
    torch.testing.assert_close(scale.grad, q.float().sum(-1, keepdim=True))


@pytest.mark.parametrize("op", ROW_OPS)
def test_compile_dynamic(op: str) -> None:
    assert_compiles(op, True, 48)


@pytest.mark.parametrize("op", ["rms_norm", "softmax", "quantize_fp8", "add_layer_norm_quantize"])
def test_compile_static(op: str) -> None:
    assert_compiles(op, False, 48)


def unspecialized(kernel: Any) -> set[str]:
    """The parameters whose value Triton does not look at when it decides whether to compile."""
    if hasattr(kernel, "params"):
        return {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return set(kernel.kwargs["do_not_specialize"])


COLUMNS = (1, 2, 3, 8, 15, 16, 17, 64, 65, 100, 127, 128, 129, 130, 136, 144, 512, 600, 1000, 1001, 2047, 2048, 2049)
WIDE_COLUMNS = (3000, 4095, 4096, 5120, 5121, 6000, 8192, 12000, 32768, 40000, 65600, 65601, 98304, 131072, 200000)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_compiled_anew(variant: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled anew for the documented reasons only: buckets of columns, and what divides them."""
    noted = launches(monkeypatch)
    buckets: dict[Any, set[Any]] = {}
    for columns in COLUMNS + WIDE_COLUMNS:
        for rows in (1, 2, 5):
            noted.clear()
            # nothing runs: the values are all one
            run_variant(variant, arguments(variant, zeros((rows, columns), device), torch.bfloat16))
            for launch in noted:
                options = launch.options()
                fills = columns % options["BLOCK_N"] == 0
                divisor = next(unit for unit in (16, 8, 4, 2, 1) if columns % unit == 0)
                bucket = (options["ROUNDING"], (columns - 1).bit_length(), fills, divisor)
                # of the numbers that are passed at run time those that Triton specialises on, by value
                plain = [
                    (parameter, value if value == 1 else value % 16)
                    for parameter, value in zip(launch.kernel.arg_names, launch.args, strict=False)
                    if isinstance(value, int) and parameter not in unspecialized(launch.kernel)
                ]
                buckets.setdefault(bucket, set()).add((tuple(sorted(options.items())), tuple(plain)))
    assert all(len(found) == 1 for found in buckets.values())


@pytest.mark.gpu
@pytest.mark.parametrize("op", ROW_OPS)
def test_new_sizes_do_not_compile(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    with monkeypatch.context() as patch:
        noted = launches(patch)
        run_variant(ROW_OPS[op], arguments(ROW_OPS[op], shaped((2, 1000), "cuda"), torch.bfloat16))
    kernel = noted[0].kernel

    def compiled_for(rows: int, columns: int) -> int:
        assert_variant(ROW_OPS[op], "triton", shaped((rows, columns), "cuda"), torch.bfloat16)
        return len(kernel.device_caches[torch.cuda.current_device()][0])

    before = compiled_for(2, 1000)
    # where nothing is summed, few rows are a border too
    border = op in ("quantize_int8", "quantize_fp8", "dequantize")
    for rows, columns in ((1, 1000), (3, 1000), (64 if border else 4097, 1000), (16, 1016), (5, 600), (7, 520)):
        assert compiled_for(rows, columns) == before, f"{rows} rows of {columns} columns compiled anew"
    if border:
        before = compiled_for(65, 1000)
        for rows in (66, 4097):
            assert compiled_for(rows, 1000) == before, f"{rows} rows compiled anew"
    # stated borders: the next power of two; another divisor
    assert compiled_for(2, 1032) > before
    assert compiled_for(2, 1001) > before


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_in_a_cuda_graph(variant: str) -> None:
    op = VARIANTS[variant][0]
    found = registry.get(op)
    found.force("triton")
    # one row a program, and rows that are split: what programs exchange must be new in each replay
    for columns in (600, 3 * WIDE):
        args = arguments(variant, shaped((4, columns), "cuda"), torch.bfloat16)
        public = getattr(ops, op)
        public(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = public(*args)
        for seed in (5, 6):
            args[0].copy_(random(tuple(args[0].shape), args[0].dtype, "cuda", seed))
            graph.replay()
            check_results(op, results if isinstance(results, tuple) else (results,), by_name(op, args))


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("first", [0, 1], ids=["aligned-first", "misaligned-first"])
def test_addresses_of_one_signature_may_differ_in_alignment(first: int, op: str, device: str) -> None:
    # 16-byte accesses at an address that is not a multiple of 16 are an error on a GPU
    found = registry.get(op)
    found.force("triton")
    buffer, codes = random((4 * 64 + 8,), torch.bfloat16, device), random((4 * 64 + 8,), torch.int8, device)
    for offset in (first, 1 - first, first, 1 - first, 3):
        x, q = buffer[offset : offset + 256].view(4, 64), codes[offset : offset + 256].view(4, 64)
        args = arguments(ROW_OPS[op], lambda dtype, _seed, x=x, q=q: q if dtype == torch.int8 else x, torch.bfloat16)
        results = getattr(ops, op)(*args)
        check_results(op, results if isinstance(results, tuple) else (results,), by_name(op, args))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rms_norm", "softmax", "quantize_int8-token", "dequantize-token"])
def test_tensors_past_2_to_the_31_elements(variant: str) -> None:
    op = VARIANTS[variant][0]
    rows, columns = 2**31 // 4096 + 5, 4096
    x = torch.empty(rows, columns, dtype=torch.int8 if op == "dequantize" else torch.bfloat16, device="cuda")
    ends = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device="cuda")
    x[ends] = random((5, columns), x.dtype, "cuda")
    args = arguments(variant, lambda *_: x, torch.bfloat16)
    values = {
        key: value[ends] if isinstance(value, Tensor) and value.ndim == 2 else value
        for key, value in by_name(op, args).items()
    }
    check_results(op, tuple(result[ends] for result in run_variant(variant, args)), values)


# --- any shape, strides, dtype and options


@st.composite
def tensors(draw: st.DrawFn) -> Callable[[torch.dtype, int], Tensor]:
    """A function that makes tensors of one shape: dimensions in any order of memory, with gaps or expanded."""
    shape = [*draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)), draw(st.integers(1, 300))]
    order = draw(st.permutations(range(len(shape))))
    # columns are never expanded: of equal ones nothing is left to compare after centring
    steps = [draw(st.sampled_from([0, 1, 1, 1, 2, 3][dim == len(shape) - 1 :])) for dim in range(len(shape))]
    lead = draw(st.integers(0, 3))

    def make(dtype: torch.dtype, seed: int) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # a step of 0: one element for all
        held = [(1 if steps[d] == 0 else shape[d] * steps[d] + lead) for d in order]
        x = random(tuple(held), dtype, device, seed).permute([order.index(d) for d in range(len(shape))])
        cut = tuple(slice(0, 1) if steps[d] == 0 else slice(lead, None, steps[d]) for d in range(len(shape)))
        x = x[cut][tuple(slice(0, size) for size in shape)].expand(shape)
        assert tuple(x.shape) == tuple(shape)
        return x

    return make


@st.composite
def configs(draw: st.DrawFn, variant: str, columns: int, dtype: torch.dtype) -> Config | None:
    if draw(st.booleans()):
        return None
    packed = int(dtype.itemsize == 2 and draw(st.booleans()))
    # a block that holds the row, or two that do
    width = 1 << (columns - 1).bit_length() >> draw(st.integers(0, 1))
    width = max(width, GROUP if variant in GROUPED else 16)
    block_m = draw(st.sampled_from([1, 2, 8])) if width >= columns else 1
    return Config(BLOCK_M=block_m, BLOCK_N=width, PACKED=packed, num_warps=1)


def any_call(data: st.DataObject, variants: list[str]) -> tuple[str, Results, dict[str, Any]]:
    variant = data.draw(st.sampled_from(variants))
    make, dtype = data.draw(tensors()), data.draw(st.sampled_from(DTYPES))
    made = {}
    names = parameters(VARIANTS[variant][0])
    # values of no variance have nothing but rounding left after centring
    made["eps"] = data.draw(st.sampled_from([0.3, 1.0]))
    for vector in ("weight", "bias"):
        if vector in names and data.draw(st.booleans()):
            made[vector] = None
    if "residual" in names and data.draw(st.booleans()):
        made["residual"] = make(dtype, 1).contiguous()
    if VARIANTS[variant][0] in ("quantize_fp8",) or VARIANTS[variant][0].endswith("norm_quantize"):
        kinds = [E4M3, E5M2] + ([torch.int8] if VARIANTS[variant][0] != "quantize_fp8" else [])
        made["dtype"] = data.draw(st.sampled_from(kinds))
    config = data.draw(configs(variant, make(torch.int8, 0).shape[-1], dtype))
    if config is None and key_of(variant, make, dtype)[6] > 3:
        return variant, (), {}
    results = assert_variant(variant, "triton", make, dtype, config, **made)
    return variant, results, by_name(VARIANTS[variant][0], arguments(variant, make, dtype, **made))


family = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@family
@given(st.data())
def test_any_norm(data: st.DataObject) -> None:
    any_call(data, ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "post_layer_norm"])


@family
@given(st.data())
def test_any_softmax(data: st.DataObject) -> None:
    _, results, values = any_call(data, ["softmax"])
    x = values["x"]
    torch.testing.assert_close(results[0].double().sum(-1), torch.ones_like(x[..., 0]).double(), rtol=2e-2, atol=0)


@family
@given(st.data())
def test_any_rounding_comes_back(data: st.DataObject) -> None:
    variant, (q, scale), values = any_call(data, [v for v in ROUNDING if v.startswith("quantize")])
    x = values["x"].double()
    back = run("dequantize", "triton", q, scale, torch.float32).double()
    steps = {torch.int8: 0.5 / 127, E4M3: 2.0**-4, E5M2: 2.0**-3}[q.dtype]
    # half a step: of the largest for int8, of the value itself (and the smallest there is) for floating point
    granularity = values["granularity"]
    peak = x.abs().amax() if granularity == "tensor" else x.abs().amax(-1, keepdim=True)
    bound = steps * peak if q.dtype == torch.int8 else steps * x.abs() + peak * 2.0**-17
    assert ((back - x).abs() <= bound * (1 + 1e-5) + 1e-37).all(), variant


@family
@given(st.data())
def test_any_dequantize(data: st.DataObject) -> None:
    any_call(data, [variant for variant in VARIANTS if variant.startswith("dequantize")])


@family
@given(st.data())
def test_any_norm_and_rounding(data: st.DataObject) -> None:
    any_call(data, [variant for variant, (op, _) in VARIANTS.items() if op.endswith("norm_quantize")])


def test_rounding_of_a_row_and_a_bias_that_nearly_cancel(device: str) -> None:
    """Their sum is as far off as each of them, by more than float32's share of the sum."""
    generator = torch.Generator().manual_seed(0)
    far = 0.0
    for _ in range(20):
        x, weight = torch.randn(1, 2, generator=generator), torch.rand(2, generator=generator) + 0.5
        y = torch.nn.functional.layer_norm(x, (2,), weight, None, 1e-5)[0]
        bias = 0.01 * torch.randn(2, generator=generator) - y
        args = (*(one.to(device) for one in (x, weight, bias)), 1e-5, E4M3, "token", None)
        results = run("layer_norm_quantize", "triton", *args)
        values = by_name("layer_norm_quantize", args)
        check_results("layer_norm_quantize", results, values)
        want = expected_scale(unrounded("layer_norm_quantize", values)[0], "token", LARGEST[E4M3])
        far = max(far, float((results[1].double() / want - 1).abs()))
    assert 2e-6 < far < 1e-4


@pytest.mark.parametrize("kind", ["rms", "layer", "softmax"])
def test_rows_wider_than_programs_that_run_at_once_are_refused(kind: str, device: str) -> None:
    """Parts of a row beyond these would wait for parts that cannot start, and then work out all others."""
    op = registry.get({"rms": "rms_norm", "layer": "layer_norm", "softmax": "softmax"}[kind])

    def refusal(columns: int) -> str | None:
        x = torch.zeros(1, dtype=torch.bfloat16, device=device).expand(1, columns)
        return op.backends["triton"].refuse(RowCall(kind, x))

    assert refusal(1 << 20) is None
    assert refusal((1 << 20) + 1) == "splits rows over programs that run at once: up to 1048576 columns, not 1048577"


@pytest.mark.parametrize("granularity", ["token", "group", "tensor"])
def test_columns_beyond_32_bits_are_refused(granularity: str, device: str) -> None:
    x = torch.zeros(1, dtype=torch.bfloat16, device=device).expand(1, 1 << 31)
    refuse = registry.get("quantize_int8").backends["triton"].refuse
    call = RowCall("identity", x, dtype=torch.int8, granularity=granularity)
    assert "2147483648" in str(refuse(call))
    assert (refuse(call._replace(x=x[:, : 1 << 21])) is None) == (granularity != "token")


# bytes that the widest of these calls takes beside its input, by those of the input: 8 measured, and some room
BESIDE = 10


@contextmanager
def memory_for(size: int) -> Iterator[None]:
    """Skip where other processes leave less than this many bytes of the GPU, before or while the test runs."""

    def problem() -> str:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_allocated()
        if free + held >= size:
            return ""
        return f"needs {size / 2**30:.0f} GiB of the GPU's memory; {free / 2**30:.0f} of {total / 2**30:.0f} are free"

    if reason := problem():
        pytest.skip(reason)
    try:
        yield
    except torch.OutOfMemoryError:
        if reason := problem():
            pytest.skip(reason)
        raise


@pytest.mark.gpu
def test_a_row_beyond_32_bits_is_answered_on_a_gpu() -> None:
    """By PyTorch's operations, which count in 64 bits: neither the kernel nor PyTorch's own norms do."""
    columns = (1 << 31) + 16
    with memory_for((1 + BESIDE) * 2 * columns):
        x = torch.ones(1, columns, dtype=torch.bfloat16, device="cuda")
        some = torch.tensor([0, 1, columns // 2, columns - 1], device="cuda")
        for name, want in (("rms_norm", 1.0), ("softmax", 2.0**-31)):
            got = getattr(ops, name)(x)
            assert torch.equal(got[0, some], torch.full((4,), want, dtype=torch.bfloat16, device="cuda"))
        values, scale = ops.quantize_int8(x)
        assert torch.equal(values[0, some].int(), torch.full((4,), 127, dtype=torch.int32, device="cuda"))
        torch.testing.assert_close(scale, torch.full_like(scale, 1 / 127))

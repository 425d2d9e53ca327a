"""Reading traces: synthetic ones of an MI300X, an H200, Inductor and the CPU, with the totals worked out by hand."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from wavecrest.errors import RecordError
from wavecrest.profile import trace
from wavecrest.profile.causes import sdpa_backends
from wavecrest.records import BucketProfile, Ceilings, OpTime

MI300X = Ceilings(source="datasheet", bandwidth=5300.0, peak={"bfloat16": 1307.4})
BF16 = "c10::BFloat16"


class Builder:
    """Writes the events that torch.profiler writes; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1}]
        self._next = 0

    def _add(self, cat: str, name: str, start: float, length: float, *, tid: int = 1, pid: int = 1, **args: Any) -> int:
        self._next += 1
        args = {"External id": self._next, **args}
        args = {key: value for key, value in args.items() if value is not None}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "pid": pid, "tid": tid, "args": args}
        )
        return self._next

    def mark(self, start: float, length: float) -> None:
        self._add("user_annotation", trace.MARK, start, length)

    def op(
        self, name: str, start: float, length: float, shapes: Sequence[Any] = (), dtype: str = "float", **values: str
    ) -> int:
        """An ATen op; `shapes` holds a list for a tensor, None for a value (v2="True" gives the value at place 2)."""
        return self._add(
            "cpu_op",
            name,
            start,
            length,
            **{
                "Input Dims": [shape if shape is not None else [] for shape in shapes],
                "Input type": [dtype if shape is not None else "Scalar" for shape in shapes],
                "Concrete Inputs": [values.get(f"v{index}", "") for index in range(len(shapes))],
            },
        )

    def kernel(
        self,
        name: str,
        start: float,
        length: float,
        *,
        by: int | None = None,
        correlation: int | None = None,
        cat: str = "kernel",
        stream: int = 0,
    ) -> None:
        args = {"External id": by, "correlation": correlation}
        self._add(cat, name, start, length, pid=0, tid=stream, **args)

    def launch(
        self, name: str, start: float, correlation: int, *, by: int | None = None, cat: str = "cuda_runtime"
    ) -> None:
        self._add(cat, name, start, 2.0, correlation=correlation, **{"External id": by})


def _row(summary: trace.Summary, name: str, category: str | None = None) -> OpTime:
    rows = [op for op in summary.ops if op.name == name and category in (None, op.category)]
    assert len(rows) == 1, [(op.name, op.category, op.shapes) for op in summary.ops]
    return rows[0]


def _milliseconds(summary: trace.Summary) -> dict[str, float]:
    return {entry.category: round(entry.ms, 6) for entry in summary.categories}


def mi300x() -> list[dict[str, Any]]:
    """Two calls: product, attention, layer norm, GELU on a second stream, copy, and a kernel nobody knows."""
    b = Builder()
    for call in range(2):
        at, n = call * 1000.0, call * 10
        b.mark(at, 500)
        product = b.op("aten::addmm", at + 1, 20, [[4096], [4096, 4096], [4096, 4096], None, None], BF16)
        b.launch("hipExtModuleLaunchKernel", at + 5, n + 1, by=product)
        b.kernel("Cijk_Alik_Bljk_BBS_BH_MT256x256x64", at + 10, 200, by=product, correlation=n + 1)
        qkv = [[1, 8, 1024, 64]] * 3
        sdpa = b.op("aten::_scaled_dot_product_flash_attention", at + 30, 40, [*qkv, None, None], BF16, v4="True")
        inner = b.op("aten::_flash_attention_forward", at + 35, 30, [[1, 1024, 8, 64]] * 3, BF16)
        assert sdpa
        b.launch("hipModuleLaunchKernel", at + 40, n + 2, by=inner)
        b.kernel("attn_fwd", at + 210, 50, by=inner, correlation=n + 2)
        norm = b.op("aten::native_layer_norm", at + 80, 10, [[512, 4096], None, [4096], [4096], None], BF16)
        b.launch("hipLaunchKernel", at + 82, n + 3, by=norm)
        b.kernel("void at::native::vectorized_layer_norm_kernel<float>", at + 260, 10, by=norm, correlation=n + 3)
        gelu = b.op("aten::gelu", at + 95, 10, [[512, 4096], None], BF16)
        b.launch("hipLaunchKernel", at + 96, n + 4, by=gelu)
        # half of it runs beside the layer norm
        b.kernel(
            "void at::native::vectorized_elementwise_kernel<4>", at + 265, 10, by=gelu, correlation=n + 4, stream=1
        )
        copy = b.op("aten::copy_", at + 110, 10, [[64, 64], [64, 64], None], BF16)
        b.launch("hipMemcpyWithStream", at + 111, n + 5, by=copy)
        b.kernel("Memcpy DtoD (Device -> Device)", at + 300, 5, by=copy, correlation=n + 5, cat="gpu_memcpy")
        b.launch("hipLaunchKernel", at + 130, n + 6)
        b.kernel("my_custom_thing<4>(int)", at + 310, 15, correlation=n + 6)
    return b.events


def test_mi300x_times_are_per_call_and_overlap_counts_once() -> None:
    summary = trace.summarize(mi300x())
    assert summary.on_device
    # 200 + 50 + union(260..270, 265..275) + 5 + 15 microseconds
    assert summary.kernel_ms == pytest.approx(0.285)
    assert summary.launches == 6
    assert _milliseconds(summary) == {
        "gemm": 0.2,
        "attention": 0.05,
        "other": 0.015,
        "normalisation": 0.01,
        "elementwise": 0.01,
        "memory": 0.005,
    }
    assert sum(entry.share for entry in summary.categories) == pytest.approx(1.0)
    assert summary.uncategorized == ["my_custom_thing"]


def test_mi300x_roofline_of_a_product_and_of_causal_attention() -> None:
    summary = trace.summarize(mi300x(), ceilings=MI300X)
    product = _row(summary, "aten::addmm")
    assert product.shapes == "4096, 4096x4096, 4096x4096 bfloat16"
    assert product.kernels == ["Cijk_Alik_Bljk_BBS_BH_MT256x256x64"]
    assert product.calls == 1
    assert product.flops == 2 * 4096**3
    # 137.4 GFLOP at 1307.4 TFLOP/s take 0.10512 ms of the 0.2 ms
    assert product.roofline_percent == pytest.approx(52.56, abs=0.01)
    assert product.bound == "compute"
    attention = _row(summary, "aten::_scaled_dot_product_flash_attention")
    assert attention.flops == 2 * 8 * (1024 * 1025 // 2) * 128
    assert attention.kernels == ["attn_fwd"]
    norm = _row(summary, "aten::native_layer_norm")
    assert norm.bound == "memory"
    # 512 x 4096 bfloat16 read and written, two weights read: 8,404,992 bytes at 5300 GB/s of the 0.01 ms
    assert norm.bytes == 2 * 512 * 4096 * 2 + 2 * 4096 * 2
    assert norm.roofline_percent == pytest.approx(15.858, abs=0.01)


def test_without_ceilings_there_is_no_percentage() -> None:
    product = _row(trace.summarize(mi300x()), "aten::addmm")
    assert product.flops is not None and product.roofline_percent is None and product.bound is None


def h200() -> list[dict[str, Any]]:
    """One call: a split-K product of two kernels and a bias copy, an op found by time only, and a graph replay."""
    b = Builder()
    b.mark(0, 400)
    product = b.op("aten::addmm", 1, 20, [[1024], [16, 1024], [1024, 1024], None, None], BF16)
    for index, (name, length) in enumerate(
        [
            ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", 3),
            ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 12),
            ("void cublasLt::splitKreduce_kernel<32, 16>", 4),
        ]
    ):
        b.launch("cudaLaunchKernelExC", 3 + index, index, by=product)
        b.kernel(name, 10 + 20 * index, length, by=product, correlation=index)
    softmax = b.op("aten::_softmax", 100, 20, [[16, 1024], None, None], BF16)
    assert softmax
    # no external id on either side: the launch lies inside the op's interval
    b.launch("cuLaunchKernel", 105, 50, cat="cuda_driver")
    b.kernel("_softmax_kernel", 120, 6, correlation=50)
    b.launch("cudaGraphLaunch", 200, 60)
    for index in range(3):
        b.kernel("nvjet_tst_128x64_64x8_TNT", 210 + 10 * index, 8, correlation=60)
    b.launch("cudaDeviceSynchronize", 300, 61)
    return b.events


def test_h200_counts_the_work_of_a_split_product_once() -> None:
    summary = trace.summarize(h200(), ceilings=Ceilings(source="d", bandwidth=4800.0, peak={"bfloat16": 989.4}))
    product = _row(summary, "aten::addmm", "gemm")
    assert product.ms == pytest.approx(0.016)
    assert product.kernels == ["nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "cublasLt::splitKreduce_kernel"]
    assert product.calls == 1
    assert product.flops == 2 * 16 * 1024 * 1024
    # the copy of the bias is memory traffic and has no product's work
    copy = _row(summary, "aten::addmm", "memory")
    assert copy.ms == pytest.approx(0.003) and copy.flops is None


def test_an_attention_of_products_has_no_work_of_its_own() -> None:
    """A fill inside has SDPA as the nearest op with work: its time beside all of the work was 181 x the roofline."""
    b = Builder()
    b.mark(0, 100)
    shape = [16, 32, 64, 128]
    b.op("aten::scaled_dot_product_attention", 0, 90, [shape, shape, shape], BF16)
    fill = b.op("aten::fill_", 5, 5, [[1]], BF16)
    product = b.op("aten::bmm", 20, 20, [[512, 64, 128], [512, 128, 64]], BF16)
    softmax = b.op("aten::_softmax", 45, 5, [[16, 32, 64, 64], None, None], BF16)
    for index, (op, at) in enumerate([(fill, 6), (product, 21), (softmax, 46)], start=70):
        b.launch("cudaLaunchKernel", at, index)
        b.kernel("fill_kernel" if op is fill else "nvjet_x", at + 4, 2, by=op, correlation=index)
    rows = trace.summarize(b.events).ops
    assert {row.category for row in rows} == {"attention"}
    assert not any(row.flops for row in rows if row.name == "aten::scaled_dot_product_attention")
    profile = BucketProfile(
        bucket="b", wall_ms=1, kernel_ms=1, idle_ms=None, launches=3, categories=[], ops=rows, uncategorized=[]
    )
    assert sdpa_backends(profile) == {"math": 1}


def test_h200_graph_replay_is_one_launch_of_many_kernels() -> None:
    summary = trace.summarize(h200())
    # three products' launches, one softmax, one graph; a synchronize launches nothing
    assert summary.launches == 5
    replayed = _row(summary, "nvjet_tst_128x64_64x8_TNT")
    assert (replayed.calls, replayed.category) == (3, "gemm")
    assert replayed.ms == pytest.approx(0.024)


def test_h200_launch_without_ids_belongs_to_the_op_around_it() -> None:
    row = _row(trace.summarize(h200()), "aten::_softmax")
    assert (row.category, row.shapes) == ("normalisation", "16x1024 bfloat16")


def inductor() -> list[dict[str, Any]]:
    """One compiled call: annotated Triton kernels, an extern product, and a kernel only its op explains."""
    b = Builder()
    b.mark(0, 300)
    b.op("Torch-Compiled Region: 0/0", 1, 250)
    fused = b.op("triton_per_fused_add_native_layer_norm_0", 5, 10, [[8, 512], [8, 512]], BF16)
    b.kernel("triton_per_fused_add_native_layer_norm_0", 10, 6, by=fused, correlation=1)
    pointwise = b.op("triton_poi_fused_gelu_1", 20, 10, [[8, 512]], BF16)
    b.kernel("triton_poi_fused_gelu_1", 30, 4, by=pointwise, correlation=2)
    product = b.op("aten::mm", 40, 10, [[8, 512], [512, 64], None], BF16)
    b.kernel("vendor_secret_17", 50, 20, by=product, correlation=3)
    return b.events


def test_inductor_kernels_go_by_their_own_names() -> None:
    summary = trace.summarize(inductor())
    assert _milliseconds(summary) == {"gemm": 0.02, "normalisation": 0.006, "elementwise": 0.004}
    assert _row(summary, "triton_per_fused_add_native_layer_norm_0").shapes == "8x512, 8x512 bfloat16"
    # an unknown kernel of a known op takes the op's category
    assert _row(summary, "aten::mm").kernels == ["vendor_secret_17"]
    assert summary.uncategorized == []
    # no runtime events in the trace: device activities are counted instead
    assert summary.launches == 3


def cpu() -> list[dict[str, Any]]:
    """One call: a linear that calls addmm that copies, a composite attention, and fused code of a compiled graph."""
    b = Builder()
    b.mark(0, 200)
    b.op("aten::linear", 10, 60, [[8, 64], [128, 64], [128]])
    b.op("aten::t", 12, 4, [[128, 64]])
    b.op("aten::addmm", 20, 40, [[128], [8, 64], [64, 128], None, None])
    b.op("aten::copy_", 22, 5, [[8, 128], [128], None])
    b.op("aten::scaled_dot_product_attention", 80, 50, [[1, 2, 8, 16]] * 3)
    b.op("aten::bmm", 85, 20, [[2, 8, 16], [2, 16, 8]])
    b.op("aten::_softmax", 106, 4, [[2, 8, 8]])
    b._add("user_annotation", "## Call CompiledFxGraph fabc ##", 140, 30)
    # outside the marked call, and so not part of it
    b.op("aten::exp", 500, 99, [[4]])
    return b.events


def test_cpu_self_times_with_the_rest_of_the_call_named() -> None:
    summary = trace.summarize(cpu())
    assert not summary.on_device and summary.launches == 0
    assert summary.kernel_ms == pytest.approx(0.2)
    times = {op.name: round(op.ms * 1e3, 6) for op in summary.ops}
    assert times == {
        "aten::linear": 60 - 4 - 40,
        "aten::t": 4,
        "aten::addmm": 35,
        "aten::copy_": 5,
        "aten::scaled_dot_product_attention": 50 - 24,
        "aten::bmm": 20,
        "aten::_softmax": 4,
        trace.COMPILED: 30,
        trace.OUTSIDE: 200 - 60 - 50 - 30,
    }
    assert sum(op.ms for op in summary.ops) == pytest.approx(summary.kernel_ms)
    assert summary.uncategorized == [trace.OUTSIDE, trace.COMPILED]


def test_cpu_products_inside_an_attention_are_attention() -> None:
    summary = trace.summarize(cpu())
    assert _row(summary, "aten::bmm").category == "attention"
    assert _row(summary, "aten::_softmax").category == "attention"
    assert _row(summary, "aten::addmm").category == "gemm"


def test_cpu_work_of_a_composite_counts_in_its_innermost_product_only() -> None:
    summary = trace.summarize(cpu())
    assert _row(summary, "aten::linear").flops is None
    assert _row(summary, "aten::addmm").flops == 2 * 8 * 64 * 128
    assert _row(summary, "aten::scaled_dot_product_attention").flops is None


def test_calls_with_different_shapes_are_different_rows() -> None:
    b = Builder()
    b.mark(0, 100)
    b.op("aten::mm", 1, 10, [[8, 16], [16, 32]])
    b.op("aten::mm", 20, 30, [[64, 16], [16, 32]])
    b.op("aten::mm", 60, 30, [[64, 16], [16, 32]])
    rows = {op.shapes: (op.calls, round(op.ms, 6)) for op in trace.summarize(b.events).ops if op.name == "aten::mm"}
    assert rows == {"8x16, 16x32 float32": (1, 0.01), "64x16, 16x32 float32": (2, 0.06)}


def test_kernels_inside_a_convolution_or_an_attention_count_as_such() -> None:
    b = Builder()
    b.mark(0, 100)
    conv = b.op("aten::miopen_convolution", 1, 20, [[1, 4, 8, 8], [4, 4, 3, 3]])
    b.kernel("Im2d2Col", 5, 3, by=conv)
    b.kernel("Cijk_Ailk_Bljk_SB_MT64x64x16", 10, 7, by=conv)
    b.op("aten::_scaled_dot_product_attention_math", 30, 20, [[1, 2, 8, 16]] * 3)
    product = b.op("aten::bmm", 32, 5, [[2, 8, 16], [2, 16, 8]])
    b.kernel("Cijk_Alik_Bljk_SB_MT32x32x16", 40, 4, by=product)
    assert _milliseconds(trace.summarize(b.events)) == {"convolution": 0.01, "attention": 0.004}


def test_products_of_a_whole_layer_in_one_op_are_not_its_attention() -> None:
    b = Builder()
    b.mark(0, 100)
    b.op("aten::_transformer_encoder_layer_fwd", 10, 80, [[1, 8, 16]])
    product = b.op("aten::addmm", 20, 10, [[16], [8, 16], [16, 16]])
    b.op("aten::_native_multi_head_attention", 35, 40, [[1, 8, 16]])
    inner = b.op("aten::addmm", 40, 5, [[16], [8, 16], [16, 16]])
    attention = b.op("aten::_scaled_dot_product_flash_attention", 50, 20, [[1, 2, 8, 16]] * 3)
    for at, by in ((30, product), (50, inner), (60, attention)):
        b.kernel(f"kernel of {by}", at, 4, by=by)
    assert _milliseconds(trace.summarize(b.events)) == {"gemm": pytest.approx(0.008), "attention": 0.004}


def test_a_kernel_of_a_compiled_region_goes_by_its_own_name() -> None:
    b = Builder()
    b.mark(0, 100)
    region = b.op("Torch-Compiled Region: 0/0", 1, 50)
    b.kernel("triton_poi_fused_add_2", 10, 5, by=region)
    (row,) = trace.summarize(b.events).ops
    assert (row.name, row.category, row.shapes, row.kernels) == ("triton_poi_fused_add_2", "elementwise", "", [])


def test_an_op_that_starts_where_another_ends_is_not_inside_it() -> None:
    b = Builder()
    b.mark(0, 100)
    b.op("aten::mm", 10, 20, [[8, 16], [16, 32]])
    b.op("aten::relu", 30, 10, [[8, 32]])
    times = {op.name: op.ms * 1e3 for op in trace.summarize(b.events).ops}
    assert times == pytest.approx({"aten::mm": 20, "aten::relu": 10, trace.OUTSIDE: 70})


def test_work_known_for_some_calls_only_is_not_held_against_the_time_of_all() -> None:
    b = Builder()
    b.mark(0, 100)
    shapes = [[1, 4, 8, 8], [4, 4, 3, 3], None, None, None, None, None, None, None]
    values = {"v3": "[1, 1]", "v4": "[0, 0]", "v5": "[1, 1]"}
    b.op("aten::convolution", 1, 20, shapes, **values, v6="False")
    b.op("aten::convolution", 30, 20, shapes, **values, v6="True")
    row = _row(trace.summarize(b.events), "aten::convolution")
    assert row.calls == 2 and row.flops is None
    assert (
        _row(trace.summarize([e for e in b.events if e.get("ts") != 30]), "aten::convolution").flops == 2 * 4 * 36 * 36
    )


def test_a_trace_without_marks_is_refused() -> None:
    b = Builder()
    b.op("aten::mm", 1, 10)
    with pytest.raises(RecordError, match="no wavecrest"):
        trace.summarize(b.events)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_load_reads_what_the_profiler_writes(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    text = json.dumps({"traceEvents": cpu(), "displayTimeUnit": "ms"})
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert trace.summarize(trace.load(path)).kernel_ms == pytest.approx(0.2)


@pytest.mark.parametrize(
    "content", [b"{not json", b'{"a": 1}', b"\xff\xfe\x00", b"17"], ids=["cut", "foreign", "binary", "number"]
)
def test_load_names_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"bad\.json"):
        trace.load(path)


def test_load_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.json"):
        trace.load(tmp_path / "none.json")


def test_union_equals_counting_the_covered_cells() -> None:
    rng = random.Random(0)
    for _ in range(200):
        spans = [(start, start + rng.randrange(8)) for start in (rng.randrange(40) for _ in range(rng.randrange(12)))]
        cells = {cell for start, end in spans for cell in range(start, end)}
        assert trace.union(spans) == len(cells)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(int)", "at::native::CatArrayBatchedCopy"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD"),
        ("Cijk_Alik_Bljk_HHS_BH", "Cijk_Alik_Bljk_HHS_BH"),
        ("<lambda>", "<lambda>"),
    ],
    ids=["templated", "copy", "plain", "nothing-left"],
)
def test_short_name(name: str, short: str) -> None:
    assert trace.short_name(name) == short

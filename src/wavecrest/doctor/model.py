"""A model on this GPU: rows of aiter's tables for its GEMMs, SDPA's backends, and its 8-bit floats.

The model runs once for each of its buckets, in eager. Time is not measured: `wavecrest profile` does that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.tuned import aiter_csv
from wavecrest.doctor.context import Context
from wavecrest.doctor.report import Finding
from wavecrest.doctor.silent import family_of, finding
from wavecrest.errors import TableError

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload

# GEMMs, SDPA calls and the like that a finding names
SHOWN = 4
# (M, N, K, dtype, whether a bias is added)
Product = tuple[int, int, int, str, bool]


@dataclass(slots=True)
class Seen:
    """Facts of one call of each bucket of a model.

    Attributes:
        products: its GEMMs with one weight, and how often each ran.
        attention: (backend, shapes of a call), and how often.
        floats: names of the types of its parameters and buffers that have 8 bits.
    """

    products: Counter[Product] = field(default_factory=Counter)
    attention: Counter[tuple[str, str]] = field(default_factory=Counter)
    floats: Counter[str] = field(default_factory=Counter)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: Counter[Product]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            a, b = args[-2:] if name == "mm" else args[1:3]
            self._found[(a.shape[0], b.shape[1], a.shape[1], dtype_name(a), name == "addmm")] += 1
        return func(*args, **(kwargs or {}))


class _Attention(TorchFunctionMode):
    def __init__(self, found: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._found[_choice(*args, **kwargs)] += 1
        return func(*args, **kwargs)


def _choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[str, str]:
    """The backend that PyTorch takes for a call, and the call in words."""
    number = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    words = f"q {list(query.shape)} k {list(key.shape)} {dtype_name(query)}"
    more = " with a mask" if attn_mask is not None else " causal" if is_causal else ""
    return str(SDPBackend(number).name).removesuffix("_ATTENTION").lower(), words + more


def look(workload: Workload) -> Seen:
    """Run every bucket of a workload once; its model stays as it is."""
    seen = Seen()
    _floats(workload.model, seen.floats)
    for inputs in workload.buckets.values():
        # PyTorch's choice of a backend runs inside, so its own calls are not counted
        with torch.no_grad(), _Attention(seen.attention), _Products(seen.products):
            inputs.clone().call(workload.model)
    return seen


def _floats(model: nn.Module, found: Counter[str]) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        # the values of a packed weight
        stored = getattr(tensor, "stored", tensor)
        if stored.dtype.is_floating_point and stored.dtype.itemsize == 1:
            found[dtype_name(stored)] += 1


def findings(seen: Seen, context: Context) -> Iterator[Finding]:
    """The findings about it on this machine."""
    yield from _tables(seen, context)
    yield from _attention(seen, context)
    yield from _types(seen, context)


def _tables(seen: Seen, context: Context) -> Iterator[Finding]:
    products = {one: count for one, count in seen.products.items() if one[3] in ("bfloat16", "float16")}
    if context.device.vendor != "amd" or "aiter" not in context.packages or not products:
        return
    rows: list[aiter_csv.Row] = []
    for path in context.aiter_tables:
        text = context.read(path) if family_of(Path(path).name) == "bf16_tuned_gemm" else None
        try:
            rows += [] if text is None else aiter_csv.parse(text, Path(path).name)
        except TableError as error:
            yield finding(
                "model", 1, "warn", f"a table of the installed aiter cannot be read: {error}",
                "aiter may not read it either", "install aiter again",
            )  # fmt: skip
    arch, units = context.device.arch, context.device.compute_units
    absent = [one for one in products if aiter_csv.find(rows, arch, units, *one) is None]
    what = f"{len(products) - len(absent)} of the model's {len(products)} GEMM shapes have a tuned row in aiter"
    if not absent:
        yield finding("model", 1, "ok", what, "", "")
        return
    worst = sorted(absent, key=lambda one: -products[one] * one[0] * one[1] * one[2])
    named = "; ".join(f"{m} × {n} × {k} {dtype}{' with bias' * bias}" for m, n, k, dtype, bias in worst[:SHOWN])
    yield finding(
        "model", 1, "warn", f"{what}; without one: {named}{'; …' if len(absent) > SHOWN else ''}",
        "a shape without a row takes a default kernel, or PyTorch's; only the log says so",
        "WAVECREST_MISSES=misses.jsonl, then wavecrest tune misses.jsonl; or aiter's own tuner on this GPU",
    )  # fmt: skip


def _attention(seen: Seen, context: Context) -> Iterator[Finding]:
    slow = {words: count for (backend, words), count in seen.attention.items() if backend == "math"}
    if slow:
        named = "; ".join(f"{count} × {words}" for words, count in list(slow.items())[:SHOWN])
        yield finding(
            "model", 10, "warn" if context.device.kind != "cpu" else "info",
            f"{sum(slow.values())} of the model's {seen.attention.total()} SDPA calls take the math path: {named}",
            "it writes out the scores: reported 3.6 to 11.8 times as slow, 16 times the memory",
            "wavecrest optimize tries the other paths and wavecrest's own attention",
        )  # fmt: skip
    elif seen.attention:
        used = ", ".join(sorted({backend for backend, _ in seen.attention}))
        yield finding("model", 10, "ok", f"all {seen.attention.total()} SDPA calls take a fast path ({used})", "", "")


def _types(seen: Seen, context: Context) -> Iterator[Finding]:
    known = context.device.known
    own = None if known is None else known.fp8
    other = {name: count for name, count in seen.floats.items() if name.startswith("float8_e4m3")}
    other = {name: count for name, count in other.items() if own is None or name != f"float8_{own}"}
    if other and context.device.kind != "cpu":
        named = ", ".join(f"{count} of {name}" for name, count in other.items())
        yield finding(
            "model", 9, "problem" if own is not None else "warn",
            f"the model's 8-bit tensors ({named}) are not of this GPU's type, {f'float8_{own}' if own else 'none'}",
            "the same byte is another number in the other type, and the matrix unit takes its own alone",
            "convert them by value with new scales: wavecrest.quantize of the 16-bit checkpoint",
        )  # fmt: skip
    if seen.floats.get("float8_e8m0fnu") and context.device.arch == "gfx942":
        yield finding(
            "model", 17, "warn", "the model has scales of MXFP4 or MXFP8 weights, and gfx942 has no such GEMM",
            "a server unpacks them at each call, or stops", "quantize the 16-bit checkpoint to int4 or e4m3fnuz",
        )  # fmt: skip

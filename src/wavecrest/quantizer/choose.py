"""Which format each layer gets: errors on its inputs, measured speed, and the order in which layers give way."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from wavecrest.measure import interleaved
from wavecrest.measure.bootstrap import Interval, bootstrap_speedup
from wavecrest.ops import PackedWeight
from wavecrest.ops.common.quantized import Quantization, dequantized, reference
from wavecrest.quantizer.calibrate import ROWS, Seen
from wavecrest.quantizer.layers import SCHEMES, Site

# a layer's format, None: its own precision
Choice = Mapping[str, str | None]
# seconds that a layer beside its quantized form is timed
SECONDS = 0.1


def random_rows(site: Site) -> Tensor:
    """Inputs for a layer that calibration did not reach: standard normal values, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    weight = site.parameter
    rows = torch.randn(ROWS, site.weight().shape[1], generator=generator, device="cpu")
    return rows.to(weight.device, weight.dtype)


@torch.no_grad()
def error(site: Site, name: str, packed: PackedWeight, rows: Tensor, peak: float | None) -> float:
    """‖x̂ ŵᵀ − x wᵀ‖ / ‖x wᵀ‖ in float64: what rounding does to a layer's output, without its bias.

    Args:
        site: the layer.
        name: of the format.
        packed: its weight in that format.
        rows: [R, K], inputs as the layer meets them.
        peak: see `Site.make`.
    """
    x = rows.double()
    wanted = x @ site.weight().double().mT
    if SCHEMES[name].activations:
        scale = None if peak is None else site.fixed_scale(packed, peak)
        how = Quantization(packed.stored.dtype, "token" if scale is None else "tensor", scale)
        values, found = reference(rows.float(), how)
        x = dequantized(values.double(), Quantization(torch.float64, how.granularity, found))
    off = x @ packed.dequantize_float32().double().mT - wanted
    norm = float(wanted.norm())
    return float(off.norm()) / norm if norm else 0.0 if not float(off.norm()) else float("inf")


def order(errors: Mapping[str, Sequence[tuple[str, float]]]) -> list[dict[str, str | None]]:
    """The choices in the order in which layers give way: in each, the layer with the largest error gave way once more.

    Args:
        errors: by path, the formats that a layer may have, in order of preference, with its error in each.

    Returns:
        The first choice, and those after it to the one in which every layer has its own precision.
    """
    at = dict.fromkeys(errors, 0)

    def now() -> dict[str, str | None]:
        return {path: formats[at[path]][0] if at[path] < len(formats) else None for path, formats in errors.items()}

    heap = [(-formats[0][1], path) for path, formats in errors.items() if formats]
    heapq.heapify(heap)
    choices = [now()]
    while heap:
        _, path = heapq.heappop(heap)
        at[path] += 1
        if at[path] < len(errors[path]):
            heapq.heappush(heap, (-errors[path][at[path]][1], path))
        choices.append(now())
    return choices


def first_within(choices: Sequence[Choice], meets: Callable[[Choice], bool]) -> int:
    """The place of a choice that meets the limits, by bisection; the last place, which quantizes nothing, if none does.

    A choice in which more layers gave way is taken to be no worse. The choice that is returned was tried, whether that
    holds or not; an earlier one that meets the limits may be passed over.
    """
    if meets(choices[0]):
        return 0
    low, high = 0, len(choices) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(choices[middle]) else (middle, high)
    return high


def speedup(module: nn.Module, made: nn.Module, seen: Seen, device: str) -> tuple[float, Interval]:
    """A layer's time over that of its quantized form, in turn on the same rows, with its 95 % interval."""
    repeats = -(-seen.most_rows // seen.rows.shape[0])
    x = seen.rows.repeat(repeats, 1)[: seen.most_rows]
    with torch.no_grad():
        found = interleaved.measure([lambda: module(x), lambda: made(x)], device=device, seconds=SECONDS)
    base, new = found.samples
    return bootstrap_speedup([(base, new)])

"""How far two results may differ: one tolerance table, one comparison, the NaN poison of the tests.

Sources of the limits: half a unit in the last place is 2^-24 (float32), 2^-11 (float16), 2^-8 (bfloat16); "row" ops
accumulate in float32 and round once at the end, so they are held to a few such units. "model" limits are a floor
under the relative rule (twice the original's own error), below which a difference says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits on ‖out − ref‖ / ‖ref‖ (`relative`) and on the largest |out − ref| over max(1, |ref|) (`worst`)."""

    relative: float
    worst: float


# op class -> dtype name -> limits
TOLERANCES: dict[str, dict[str, Tolerance]] = {
    "row": {
        "float64": Tolerance(1e-6, 1e-5),
        "float32": Tolerance(1e-6, 1e-5),
        "float16": Tolerance(6e-4, 4e-3),
        "bfloat16": Tolerance(4e-3, 3e-2),
    },
    # 8-bit values: the next one where float32 and float64 round apart; the rest as for "row"
    "quantized": {
        "int8": Tolerance(2e-3, 1.0),
        "float8_e4m3fn": Tolerance(5e-3, 0.126),
        "float8_e4m3fnuz": Tolerance(5e-3, 0.126),
        "float8_e5m2": Tolerance(1e-2, 0.251),
        "float8_e5m2fnuz": Tolerance(1e-2, 0.251),
        "float64": Tolerance(1e-6, 1e-5),
        "float32": Tolerance(1e-6, 1e-5),
        "float16": Tolerance(6e-4, 4e-3),
        "bfloat16": Tolerance(4e-3, 3e-2),
    },
    # sums of products: errors grow with the square root of their number, which `product_bound` knows and these do not;
    # "worst" leaves room for sums that cancel
    "gemm": {
        "int32": Tolerance(0.0, 0.0),
        "int8": Tolerance(2e-3, 1.0),
        "float8_e4m3fn": Tolerance(5e-3, 0.126),
        "float8_e4m3fnuz": Tolerance(5e-3, 0.126),
        "float8_e5m2": Tolerance(1e-2, 0.251),
        "float8_e5m2fnuz": Tolerance(1e-2, 0.251),
        "float64": Tolerance(1e-6, 1e-4),
        "float32": Tolerance(5e-6, 1e-3),
        "float16": Tolerance(1e-3, 3e-2),
        "bfloat16": Tolerance(5e-3, 1e-1),
    },
    "model": {
        "float64": Tolerance(1e-9, 1e-7),
        "float32": Tolerance(2e-5, 2e-3),
        "float16": Tolerance(2e-3, 5e-2),
        "bfloat16": Tolerance(1e-2, 2e-1),
    },
}


def tolerance(op_class: str, dtype: str) -> Tolerance:
    """The limits for an op class (a key of TOLERANCES) and a torch dtype name without the "torch." prefix."""
    return TOLERANCES[op_class].get(dtype, TOLERANCES[op_class]["float32"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one tensor differs from its reference; errors are taken over the finite elements of the reference."""

    relative: float
    worst: float
    nonfinite_match: bool
    shape_match: bool
    elements: int

    def within(self, limits: Tolerance) -> bool:
        """True if shapes and non-finite elements agree and both errors are inside the limits (NaN never passes)."""
        if not (self.shape_match and self.nonfinite_match):
            return False
        return self.relative <= limits.relative and self.worst <= limits.worst

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records."""
        return asdict(self)


# elements compared at a time: on a CPU what one thread takes and its cache holds in float64; GPUs take 32 MiB
CHUNK, CHUNK_GPU = 1 << 15, 1 << 22


def _chunks(out: Tensor, ref: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors in float64, a chunk at a time, so that large ones are never held whole in float64."""
    import torch

    def flat(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)

    out, ref = flat(out), flat(ref)
    chunk = CHUNK if ref.device.type == "cpu" else CHUNK_GPU
    for begin in range(0, ref.numel(), chunk):
        part = slice(begin, begin + chunk)
        yield out[part].to(device=ref.device, dtype=torch.float64), ref[part].to(torch.float64)


def compare(out: Tensor, ref: Tensor) -> Comparison:
    """Compare `out` with `ref` in float64 (exactly, for integers and bool); complex numbers by their two parts.

    An element that is infinite or NaN in `ref` must be the same infinity or NaN in `out`, and nowhere else.
    """

    if out.shape != ref.shape:
        return Comparison(float("inf"), float("inf"), False, False, ref.numel())
    if ref.numel() == 0:
        return Comparison(0.0, 0.0, True, True, 0)
    sums, worst, same = _errors_of_finite(out, ref)
    if not bool((sums + worst).isfinite().all()):
        # NaN or infinity somewhere, or squares that overflow
        sums, worst, same = _errors(out, ref)
    error, norm = (float(value) ** 0.5 for value in sums)
    relative = error / norm if norm > 0 else (0.0 if error == 0 else float("inf"))
    return Comparison(relative, float(worst), bool(same), True, ref.numel())


def _errors_of_finite(out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `_errors` if all elements are finite; else the sums or the largest error are NaN or infinite."""
    import torch

    sums: Any = None
    worst: Any = None
    for out64, ref64 in _chunks(out, ref):
        delta = out64 - ref64
        found = torch.stack([delta.dot(delta), ref64.dot(ref64)])
        # not in place: a float64 reference is itself here
        largest = (delta.abs_() / ref64.abs().clamp_min_(1.0)).max()
        sums, worst = (found, largest) if sums is None else (sums + found, torch.maximum(worst, largest))
    return sums, worst, torch.ones((), dtype=torch.bool)


def _errors(out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of squares of the error and of the reference [2], the largest error, agreement outside of the finite."""
    import torch

    sums: Any = None
    worst: Any = None
    same: Any = None
    for out64, ref64 in _chunks(out, ref):
        finite = torch.isfinite(ref64)
        agrees = torch.where(finite, torch.isfinite(out64), (out64 == ref64) | (out64.isnan() & ref64.isnan())).all()
        # errors are of the finite elements of the reference; NaN in `out` there goes on to the error
        scale = torch.where(finite, ref64, 0.0).abs()
        delta = torch.where(finite, out64 - ref64, 0.0).abs()
        squares = torch.stack([delta.square().sum(), scale.square().sum()])
        largest = (delta / scale.clamp_min(1.0)).max()
        first = sums is None
        sums = squares if first else sums + squares
        # maximum keeps NaN
        worst = largest if first else torch.maximum(worst, largest)
        same = agrees if first else same & agrees
    return sums, worst, same


def far_counts(out: Tensor, ref: Tensor, shares: tuple[float, ...], least: float) -> list[int]:
    """Number of elements that are off by more than each share of their own value; then the number compared.

    Args:
        out, ref: of one shape.
        shares: of |ref|.
        least: elements of `ref` below this are not counted, such as subnormal numbers.
    """
    counts: Any = None
    for out64, ref64 in _chunks(out, ref):
        size = ref64.abs()
        counted = (size >= least) & size.isfinite()
        delta = (out64 - ref64).abs() * counted
        found = [*((delta > share * size).sum() for share in shares), counted.sum()]
        counts = found if counts is None else [a + b for a, b in zip(counts, found, strict=True)]
    return [int(value) for value in counts or [0] * (len(shares) + 1)]


# half a unit in the last place of a product, which is rounded before it is summed; sums are in float32
# three products of tf32: each number is one of tf32 and a rest, which is cut to 10 bits as well, and the product of
# rests is left out
PRODUCT_UNITS = {"ieee": 2.0**-24, "tf32": 2.0**-11, "tf32x3": 2.0**-21}


def product_bound(
    a: Tensor, b: Tensor, *, unit: float = 2.0**-24, sums: float = 2.0**-24, shrink: float = 0.0, cut: float = 0.0
) -> Tensor:
    """How far a sum of products a @ b may be from the exact one, elementwise, before it is rounded to its dtype.

    Rounding errors are taken for independent: each of K products is off by `unit` of itself, so that the sum is off by
    unit · ‖aᵢ ∘ bⱼ‖, and each of K partial sums by `sums` of itself, together sums · ‖aᵢ‖ · ‖bⱼ‖ for terms of random
    sign: for standard normal values K, √K of the sum (Higham and Mary, 2019). Four times both, as a limit. Where
    digits are cut off instead of rounded, errors are no longer independent: the sum becomes smaller by up to `shrink`
    of itself, and by up to `cut` of twice the mean of the partial sums. These walk at random to the last one: their
    mean is half of it and, by a standard deviation of ‖aᵢ ∘ bⱼ‖ / √12 (a Brownian bridge's), something of their own,
    six times which is the limit. It is all that is cut off where terms cancel.

    Args:
        a: float64 [..., M, K], the values that are multiplied, scaled.
        b: float64 [..., K, N].
        unit: of a product; 2^-11 for tf32.
        sums: of a sum; 2^-13 for 8-bit floats on sm_90, whose matrix unit keeps 14 bits.
        shrink, cut: see `matrix_unit_shrink`.

    Returns:
        float64 [..., M, N].
    """
    products = (a.square() @ b.square()).sqrt()
    lengths: Tensor = a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True)
    off = 4 * (unit * products + sums * lengths)
    return off + shrink * (a @ b).abs() + 6 / 12**0.5 * cut * products if shrink else off


def matrix_unit_shrink(K: int, a_bits: int, precision: str = "ieee") -> tuple[float, float]:
    """By what share of itself NVIDIA's matrix units make a sum of K products too small at most; and what they cut off.

    They cut off what does not fit where they add (Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS
    7:e330, 2021, for V100, T4 and A100). Reasoned from that, for an instruction that takes 32 bytes of a row: half a
    unit of the running sum on average each, which is half of the last sum on average. Twice that is the limit. An
    operand of tf32 is cut to 10 bits of mantissa, which the first number has too.

    Args:
        K: products a sum.
        a_bits: of an element.
        precision: of 32-bit elements: "ieee", whose products no matrix unit makes, "tf32", or "tf32x3".
    """
    if a_bits == 32 and precision == "ieee":
        return 0.0, 0.0
    # sums of 8-bit floats keep 14 bits
    unit = 2.0**-14 if a_bits == 8 else 2.0**-24
    cut = K / (256 // a_bits) * unit
    if a_bits == 8:
        # each product is cut to a unit of the sum (sums of up to 16,384 positive products are within it, two thirds
        # of it at most: one H100, record 2026-11-26_gemm-accuracy_fp8)
        return K * unit / 2, cut
    return cut + (2.0**-9 if a_bits == 32 and precision == "tf32" else 0.0), cut

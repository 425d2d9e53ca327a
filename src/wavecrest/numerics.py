"""How far two results may differ: one tolerance table, one comparison, the NaN poison of the tests.

Sources of the limits: half a unit in the last place is 2^-24 (float32), 2^-11 (float16), 2^-8 (bfloat16); "row" ops
accumulate in float32 and round once at the end, so they are held to a few such units. "model" limits are a floor
under the relative rule (twice the original's own error), below which a difference says nothing.
"""

from __future__ import annotations

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
    "model": {
        "float64": Tolerance(1e-9, 1e-7),
        "float32": Tolerance(2e-5, 2e-3),
        "float16": Tolerance(2e-3, 5e-2),
        "bfloat16": Tolerance(1e-2, 2e-1),
    },
}


def tolerance(op_class: str, dtype: str) -> Tolerance:
    """The limits for an op class ("row", "quantized", "model") and a torch dtype name without the "torch." prefix."""
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


def compare(out: Tensor, ref: Tensor) -> Comparison:
    """Compare `out` with `ref` in float64 (exactly, for integers and bool).

    An element that is infinite or NaN in `ref` must be the same infinity or NaN in `out`, and nowhere else.
    """
    import torch

    if out.shape != ref.shape:
        return Comparison(float("inf"), float("inf"), False, False, ref.numel())
    if ref.numel() == 0:
        return Comparison(0.0, 0.0, True, True, 0)
    ref64 = ref.detach().to(torch.float64)
    out64 = out.detach().to(device=ref.device, dtype=torch.float64)
    finite = torch.isfinite(ref64)
    same_nan = torch.equal(torch.isnan(ref64), torch.isnan(out64))
    infinite = torch.isinf(ref64)
    same_inf = torch.equal(infinite, torch.isinf(out64)) and torch.equal(ref64[infinite], out64[infinite])
    delta = (out64[finite] - ref64[finite]).abs()
    if delta.numel() == 0:
        return Comparison(0.0, 0.0, same_nan and same_inf, True, ref.numel())
    scale = ref64[finite].abs()
    norm = float(scale.square().sum().sqrt())
    error = float(delta.square().sum().sqrt())
    relative = error / norm if norm > 0 else (0.0 if error == 0 else float("inf"))
    worst = float((delta / scale.clamp_min(1.0)).max())
    return Comparison(relative, worst, same_nan and same_inf, True, ref.numel())

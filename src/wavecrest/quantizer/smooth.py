"""Migration of scales from activations to weights (SmoothQuant; Xiao et al., 2023), by powers of two.

A norm's weight is divided by a factor for each column, and the columns of the layers that it feeds are multiplied by
it: outlier columns of the activations get smaller before they are rounded to 8 bits. Factors are powers of two, so that
neither a norm nor a layer rounds differently: in floating point the model's answers keep every bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wavecrest.quantizer.calibrate import Norm, Observed
from wavecrest.quantizer.layers import Site

# exponents of the factors at most: beyond, 16-bit weights leave their range
MOST_EXPONENT = 12


@dataclass(slots=True)
class Group:
    """A norm and the layers that it feeds, with the factors.

    Attributes:
        path: of the norm.
        module: the norm.
        sites: the layers.
        factors: float32 [K].
    """

    path: str
    module: nn.Module
    sites: list[Site]
    factors: Tensor

    def parameters(self) -> dict[str, nn.Parameter]:
        """The norm's parameters, divided."""
        made = {}
        for name in ("weight", "bias"):
            old = self.module._parameters.get(name)
            if old is not None:
                made[name] = nn.Parameter(old.detach() / self.factors.to(old.dtype), old.requires_grad)
        return made


def groups(model: nn.Module, observed: Observed, alpha: float) -> tuple[list[Group], dict[str, str]]:
    """The migrations that are exact, and why the scales of other norms stay, by the norm's path."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found, left = [], {}
    taken: set[str] = set()
    for norm in observed.norms:
        reason = norm.spoilt or _refuse(norm, owners)
        if not reason and any(site.path in taken for site in norm.sites):
            reason = "one of its layers has another norm too"
        if reason:
            left[norm.path] = reason
            continue
        factors = _factors(norm, observed, alpha)
        if bool((factors == 1).all()):
            left[norm.path] = "no column needs a factor, or takes one without rounding"
            continue
        group = Group(norm.path, norm.module, list(norm.sites), factors)
        if not _exact(group, norm.probe):
            left[norm.path] = f"{type(norm.module).__name__} does not scale with its weight"
            continue
        taken |= {site.path for site in norm.sites}
        found.append(group)
    return found, left


def _refuse(norm: Norm, owners: dict[int, int]) -> str:
    for parameter in (*norm.module._parameters.values(), *(site.parameter for site in norm.sites)):
        if parameter is not None and owners[id(parameter)] > 1:
            return "its weight, or that of one of its layers, is shared"
    if any(site.weight().dtype != norm.module.get_parameter("weight").dtype for site in norm.sites):
        return "its dtype is not that of its layers"
    return ""


def _factors(norm: Norm, observed: Observed, alpha: float) -> Tensor:
    """2^round(log2(max |x| ^ α / max |w| ^ (1 − α))) by column, 1 where a product would be rounded."""
    x: Tensor = torch.stack([observed.seen[site.path].peaks for site in norm.sites]).amax(0)
    w: Tensor = torch.stack([site.weight().abs().amax(0).float() for site in norm.sites]).amax(0)
    exponents = (alpha * x.log2() - (1 - alpha) * w.log2()).round()
    exponents = torch.where(exponents.isfinite(), exponents, 0.0)
    # a common factor moves nothing
    exponents = (exponents - exponents.median()).clamp(-MOST_EXPONENT, MOST_EXPONENT)
    factors = torch.exp2(exponents)
    keeps = torch.ones_like(factors, dtype=torch.bool)
    for site in norm.sites:
        weight = site.weight()
        by = factors.to(weight.dtype)
        keeps &= (weight * by / by == weight).all(0)
    for vector in norm.module._parameters.values():
        if vector is not None:
            by = factors.to(vector.dtype)
            keeps &= vector.detach() / by * by == vector.detach()
    return torch.where(keeps, factors, 1.0)


@torch.no_grad()
def _exact(group: Group, probe: Tensor) -> bool:
    """Whether the norm with divided parameters gives the same bits, divided."""
    module = group.module
    before = module(probe)
    held = {name: module._parameters[name] for name in group.parameters()}
    try:
        module._parameters.update(group.parameters())
        after = module(probe)
    finally:
        module._parameters.update(held)
    return torch.equal(after * group.factors.to(after.dtype), before)


def apply(group: Group) -> None:
    """Have the layers of a group multiply their columns."""
    for site in group.sites:
        site.smoothed = group.factors


def withdraw(group: Group) -> None:
    """The reverse of `apply`."""
    for site in group.sites:
        site.smoothed = None

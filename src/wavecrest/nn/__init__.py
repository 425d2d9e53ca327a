"""Modules over the ops, and helpers that build them from a model's own modules, sharing the parameters."""

from wavecrest.nn.activation import GeluAndMul, SiluAndMul
from wavecrest.nn.gated_mlp import GatedMLP
from wavecrest.nn.norm import AddRMSNorm, LayerNorm, RMSNorm, norm_from_module

__all__ = ["AddRMSNorm", "GatedMLP", "GeluAndMul", "LayerNorm", "RMSNorm", "SiluAndMul", "norm_from_module"]

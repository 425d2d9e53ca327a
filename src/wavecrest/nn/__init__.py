"""Modules over the ops, and helpers that build them from a model's own modules, sharing the parameters."""

from wavecrest.nn.activation import GeluAndMul, SiluAndMul, Softmax
from wavecrest.nn.gated_mlp import GatedMLP
from wavecrest.nn.latent_attention import MultiHeadLatentAttention
from wavecrest.nn.linear import Linear
from wavecrest.nn.norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm, norm_from_module
from wavecrest.nn.rotary import LinearScaling, Llama3Scaling, RotaryEmbedding, rope_tables

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "GatedMLP",
    "GeluAndMul",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadLatentAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "Softmax",
    "norm_from_module",
    "rope_tables",
]

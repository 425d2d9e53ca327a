"""Modules over the ops, and helpers that build them from a model's own modules, sharing the parameters."""

# first: it says what to install where torch is missing
from wavecrest import dispatch as dispatch
from wavecrest.nn.activation import GeluAndMul, SiluAndMul, Softmax
from wavecrest.nn.conv2d import Conv2d
from wavecrest.nn.experts import Experts
from wavecrest.nn.gated_mlp import GatedMLP
from wavecrest.nn.latent_attention import MultiHeadLatentAttention
from wavecrest.nn.linear import Linear
from wavecrest.nn.multihead_attention import MultiheadAttention
from wavecrest.nn.norm import AddLayerNorm, AddRMSNorm, GemmaRMSNorm, LayerNorm, RMSNorm, norm_from_module
from wavecrest.nn.quantized_linear import QuantizedLinear
from wavecrest.nn.rotary import LinearScaling, Llama3Scaling, RotaryEmbedding, rope_tables
from wavecrest.nn.self_attention import Attention

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "Conv2d",
    "Experts",
    "GatedMLP",
    "GemmaRMSNorm",
    "GeluAndMul",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadLatentAttention",
    "MultiheadAttention",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "Softmax",
    "norm_from_module",
    "rope_tables",
]

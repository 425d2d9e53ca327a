"""The ops: one function each, dispatched to the fastest correct backend (see `wavecrest.dispatch.registry`).

Importing this package touches no GPU and works without Triton.
"""

from wavecrest.dispatch.registry import get, load_backends, load_user_kernels, names
from wavecrest.ops._causal_conv1d import causal_conv1d
from wavecrest.ops._conv2d import conv2d
from wavecrest.ops._flash_attention import flash_attention
from wavecrest.ops._flash_decoding import flash_decoding
from wavecrest.ops._gemm import gemm, linear
from wavecrest.ops._memcpy import memcpy
from wavecrest.ops._mla_decode import mla_decode
from wavecrest.ops._mla_prefill import mla_prefill
from wavecrest.ops._moe import moe
from wavecrest.ops._rope import rope
from wavecrest.ops._topk_routing import topk_routing
from wavecrest.ops.gated.gelu_and_mul import gelu_and_mul
from wavecrest.ops.gated.silu_and_mul import silu_and_mul
from wavecrest.ops.mlstm.chunkwise import mlstm_chunkwise, mlstm_parallel
from wavecrest.ops.mlstm.sequence import mlstm_sequence
from wavecrest.ops.mlstm.step import mlstm_step
from wavecrest.ops.packed import PackedWeight, pack
from wavecrest.ops.rows.add_layer_norm import add_layer_norm
from wavecrest.ops.rows.add_layer_norm_quantize import add_layer_norm_quantize
from wavecrest.ops.rows.add_rms_norm import add_rms_norm
from wavecrest.ops.rows.add_rms_norm_quantize import add_rms_norm_quantize
from wavecrest.ops.rows.dequantize import dequantize
from wavecrest.ops.rows.layer_norm import layer_norm
from wavecrest.ops.rows.layer_norm_quantize import layer_norm_quantize
from wavecrest.ops.rows.post_layer_norm import post_layer_norm
from wavecrest.ops.rows.quantize_fp8 import quantize_fp8
from wavecrest.ops.rows.quantize_int8 import quantize_int8
from wavecrest.ops.rows.rms_norm import rms_norm
from wavecrest.ops.rows.rms_norm_quantize import rms_norm_quantize
from wavecrest.ops.rows.softmax import softmax
from wavecrest.ops.slstm.sequence import slstm_sequence
from wavecrest.ops.slstm.step import slstm_step
from wavecrest.settings import read_environment

__all__ = [
    "PackedWeight",
    "add_layer_norm",
    "add_layer_norm_quantize",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "causal_conv1d",
    "conv2d",
    "dequantize",
    "flash_attention",
    "flash_decoding",
    "gelu_and_mul",
    "gemm",
    "get",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "memcpy",
    "mla_decode",
    "mla_prefill",
    "mlstm_chunkwise",
    "mlstm_parallel",
    "mlstm_sequence",
    "mlstm_step",
    "moe",
    "names",
    "pack",
    "post_layer_norm",
    "quantize_fp8",
    "quantize_int8",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "silu_and_mul",
    "slstm_sequence",
    "slstm_step",
    "softmax",
    "topk_routing",
]

load_backends()
read_environment()
load_user_kernels()

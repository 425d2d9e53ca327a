r"""Kernel and op names to categories: one ordered table of rules, as data; the first rule that matches decides.

Categories: gemm · convolution · attention · normalisation (softmax included) · elementwise (plain reductions included)
· memory (copies, fills, layout, indexing) · communication · other (no rule matches; reported by name, never dropped).

Names are those that torch.profiler shows: demangled C++ of ATen, CK and cuDNN, Tensile's `Cijk_…`, assembly kernels of
aiter and MIOpen, Triton kernels of Inductor and of wavecrest, and ATen ops where there is no device. Inductor writes
the ATen ops it fused into the name (`triton_red_fused_add_native_layer_norm_3`), so those names decide.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

Category = Literal[
    "gemm", "convolution", "attention", "normalisation", "elementwise", "memory", "communication", "other"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


class Rule(NamedTuple):
    """One row of the table: `pattern` is searched in the name, ignoring case; `origin` is the library that names so."""

    pattern: str
    category: Category
    origin: str


class Match(NamedTuple):
    """The category of a name; `origin` is empty for "other"."""

    category: Category
    origin: str


# kernels that Inductor generates itself, its hand-written templates (triton_tem) apart
_FUSED = r"^(?:graph_\d+_)?(?:triton_(?:poi|red|per|for|mix|split_scan)|cpp)_fused"
# ATen ops that move data without computing
_MOVES = (
    "to_copy|copy|clone|cat|stack|permute|transpose|t|view|unsafe_view|unsqueeze|squeeze|expand|slice|select|split|"
    "split_with_sizes|constant_pad_nd|repeat|as_strided|index|index_put|embedding|gather|scatter|fill|full|full_like|"
    "zeros|zeros_like|ones|ones_like|empty|slice_scatter|select_scatter|roll|flip|lift_fresh|detach|alias"
)
_ATEN_MOVES = (
    "_to_copy|to|copy_|clone|contiguous|cat|concat|stack|hstack|vstack|slice|select|view|_unsafe_view|view_as|reshape|"
    "_reshape_alias|as_strided_?|expand|expand_as|permute|transpose_?|t|mT|movedim|swapaxes|unsqueeze_?|squeeze_?|"
    "flatten|unflatten|narrow|split|split_with_sizes|chunk|unbind|unsafe_split|unsafe_chunk|pad|constant_pad_nd|"
    "repeat|repeat_interleave|tile|roll|flip|item|_local_scalar_dense|resize_|detach|detach_|alias|lift_fresh|"
    "resolve_conj|resolve_neg|set_|index|index_select|index_copy_?|index_fill_?|index_put_?|_index_put_impl_|"
    "_unsafe_index|take|take_along_dim|gather|scatter_?|scatter_add_?|embedding|embedding_bag|_embedding_bag|"
    "masked_select|masked_scatter_?|nonzero|tril_?|triu_?|arange|linspace|empty|empty_like|empty_strided|zeros|"
    "zeros_like|ones|ones_like|full|full_like|fill_|zero_|new_\\w+|result_type|is_pinned|_pin_memory|pixel_shuffle|"
    "pixel_unshuffle|unfold|im2col|col2im|native_channel_shuffle|reflection_pad\\w*|replication_pad\\w*"
)
_ATEN_POINTWISE = (
    "add|sub|rsub|mul|div|floor_divide|remainder|fmod|pow|square|sqrt|rsqrt|reciprocal|exp|exp2|expm1|log|log2|log10|"
    "log1p|sin|cos|tan|asin|acos|atan|atan2|sinh|cosh|tanh|sigmoid|logit|erf|erfc|erfinv|relu|relu6|leaky_relu|prelu|"
    "elu|selu|celu|gelu|silu|mish|glu|softplus|hardtanh|hardsigmoid|hardswish|hardshrink|softshrink|logsigmoid|"
    "log_sigmoid\\w*|threshold|clamp|clamp_min|clamp_max|clip|abs|neg|sign|floor|ceil|round|trunc|frac|where|eq|ne|"
    "lt|le|gt|ge|logical_\\w+|bitwise_\\w+|__\\w+__|isnan|isinf|isfinite|isclose|maximum|minimum|fmax|fmin|max|min|"
    "amax|amin|aminmax|argmax|argmin|sum|nansum|mean|nanmean|prod|std|var|std_mean|var_mean|all|any|norm|linalg_norm|"
    "linalg_vector_norm|cumsum|cumprod|logcumsumexp|logsumexp|addcmul|addcdiv|lerp|masked_fill|dropout|native_dropout|"
    "feature_dropout|bernoulli|rand|randn|randint|rand_like|randn_like|uniform|normal|exponential|complex|polar|real|"
    "imag|conj|view_as_real|view_as_complex|max_pool\\dd|max_pool\\dd_with_indices|mkldnn_max_pool\\dd|avg_pool\\dd|"
    "_?adaptive_avg_pool\\dd|adaptive_max_pool\\dd|upsample_\\w+|_upsample_\\w+|grid_sampler\\w*|one_hot|cross|"
    "cosine_similarity|l1_loss|mse_loss|nll_loss\\w*|cross_entropy_loss|binary_cross_entropy\\w*|equal|"
    "quantize_per_\\w+|dequantize|fake_quantize_\\w+|to_mkldnn|_foreach_\\w+"
)

RULES: tuple[Rule, ...] = (
    # wavecrest's own Triton kernels
    # norms and softmax; quantization without a norm has the same kernel name
    Rule(r"^_row_kernel$", "normalisation", "wavecrest"),
    Rule(r"^_(?:tile|sum|stream_k|join|multiply|words|digits|cdna3?)_kernel$", "gemm", "wavecrest"),
    Rule(r"^_hopper_(?:gemm|epilogue|blocks|words|row)_kernel$", "gemm", "wavecrest"),
    # the grouped GEMMs of a mixture of experts, with the sort before and the sum behind them
    Rule(r"^_moe_\w+_kernel$", "gemm", "wavecrest"),
    Rule(r"^_(?:causal_conv1d|conv2d)_kernel$", "convolution", "wavecrest"),
    Rule(r"^_(?:flash_attention|(?:hopper|hopper_group|cdna|short)_(?:attention|mla)|decoding|joining|append|mla\w*)_kernel$",
         "attention", "wavecrest"),
    # a recurrence in place of attention; its norm by itself
    Rule(r"^_mlstm_(?:gates|keys|states|chunks|recurrent|step)_kernel$", "attention", "wavecrest"),
    Rule(r"^_slstm_(?:sequence|cooperative|steps?)_kernel$", "attention", "wavecrest"),
    Rule(r"^_mlstm_norm_kernel$", "normalisation", "wavecrest"),
    Rule(r"^_memcpy_kernel$", "memory", "wavecrest"),
    Rule(r"^_(?:gated|silu_and_mul|gelu_and_mul|rope|topk_routing)_kernel$", "elementwise", "wavecrest"),
    # Inductor: templates by what they compute, generated kernels by the ops fused into them
    Rule(r"^triton_tem_fused\w*flex_(?:attention|decoding)", "attention", "inductor template"),
    Rule(r"^triton_tem_fused\w*conv", "convolution", "inductor template"),
    Rule(r"^triton_tem_fused\w*_(?:add|b|badd|int_|grouped_|scaled_(?:grouped_)?)?mm", "gemm", "inductor template"),
    Rule(r"^cpp_\w*(?:micro_?gemm|packed_gemm|_gemm_template)", "gemm", "inductor template"),
    # a GEMV written out as a reduction (a norm fused into it is the smaller part); addmm in a name is only the bias of
    # a library call
    Rule(r"^triton_(?:red|per)_fused(?:_\w+)?_(?:mm|bmm|mv)_", "gemm", "inductor"),
    Rule(_FUSED + r"\w*(?:layer|group|batch|instance|rms)_norm", "normalisation", "inductor"),
    Rule(_FUSED + r"\w*(?:_softmax|softmax_online)", "normalisation", "inductor"),
    Rule(_FUSED + r"(?=\w*_rsqrt)(?=\w*_(?:mean|sum|var|var_mean)_)", "normalisation", "inductor"),
    Rule(_FUSED + r"(?=\w*_pow)(?=\w*_mean)", "normalisation", "inductor"),
    Rule(_FUSED + r"(?=\w*_amax)(?=\w*_exp)(?=\w*_sum)", "normalisation", "inductor"),
    Rule(_FUSED + rf"_(?:_?(?:{_MOVES})_+)+\d+$", "memory", "inductor"),
    Rule(_FUSED, "elementwise", "inductor"),
    # collectives
    Rule(r"^c10d::|^gloo:|nccl|rccl|nvshmem|rocshmem", "communication", "collectives"),
    Rule(r"cross_device_(?:reduce|store)|all_?reduce|reduce_scatter|all_?gather|all_?to_?all|quick_?reduce",
         "communication", "collectives"),
    # ATen ops, and the oneDNN and MKL ops beside them
    Rule(r"^(?:aten|mkldnn|quantized|onednn)::\w*scaled_dot_product|^aten::_(?:flash|efficient|cudnn)_attention|"
         r"^aten::_(?:fused_sdp|native_multi_head_attention|transformer_encoder_layer)", "attention", "aten"),
    Rule(r"^(?:aten|mkldnn|quantized|onednn)::\w*conv(?!ert)", "convolution", "aten"),
    Rule(r"^aten::(?:_?addmm\w*|mm|bmm|baddbmm|addbmm|matmul|linear|mv|addmv|dot|vdot|outer|einsum|bilinear|"
         r"_scaled_mm\w*|_int_mm|_(?:scaled_)?grouped_mm|mkldnn_linear|_weight_int\dpack_mm\w*|tensordot)_?$",
         "gemm", "aten"),
    Rule(r"^(?:mkldnn|mkl|quantized|onednn)::\w*linear|^(?:mkldnn|onednn)::\w*matmul", "gemm", "oneDNN, MKL"),
    Rule(r"^aten::\w*(?:layer|group|batch|instance|rms|response)_norm\w*$|^aten::\w*softmax\w*$",
         "normalisation", "aten"),
    Rule(rf"^aten::(?:{_ATEN_MOVES})$", "memory", "aten"),
    Rule(rf"^aten::(?:{_ATEN_POINTWISE})_?$", "elementwise", "aten"),
    # copies and fills that the runtimes do themselves
    Rule(r"^memcpy|^memset|__amd_rocclr_(?:copy|fill)|^copybuffer|^fillbuffer", "memory", "runtime"),
    # attention: before convolution and gemm, since its template arguments contain their words
    Rule(r"fmha|sdpa|flash_?(?:fwd|bwd|attn|attention|decod|prefill|mla)|flash::|attentionkernel", "attention",
         "flash, cuDNN, CUTLASS, CK, aiter"),
    Rule(r"(?:^|[^a-z])(?:attn|mha|mla)_(?:fwd|bwd|prefill|decode|reduce|a16w16|a8w8)|(?:fwd|bwd)_attn|attn_(?:fwd|bwd)",
         "attention", "AOTriton, aiter"),
    Rule(r"(?:^|[^a-z])bwd_(?:kernel_(?:dk_?dv|dq|fuse)|preprocess|postprocess)", "attention", "AOTriton"),
    Rule(r"paged_attention|unified_attention|(?:^|[^a-z])pa_(?:fwd|decode|prefill|persistent|ps|(?:bf|fp)16)",
         "attention", "aiter, vLLM"),
    Rule(r"lean_atten|hstu_attn|sage_?attn|_fwd_grouped_kernel_stage\d|_fwd_kernel_stage\d|splitkv_(?:mla|attn)|"
         r"batch_?(?:prefill|decode)_?with|single_?(?:prefill|decode)_?with", "attention", "aiter, FlashInfer"),
    Rule(r"attention", "attention", "any"),
    # convolution: before gemm, since implicit convolutions carry the word
    Rule(r"sp3asmconv|winograd|naive_conv|gfx\d+\w*conv|im2d?2?col|col2im|vol2col|(?:^|_)igemm_(?:fwd|bwd|wrw|v4r1)|"
         r"mlir_gen_igemm", "convolution", "MIOpen"),
    Rule(r"implicit_(?:gemm|convolve)|(?:fprop|dgrad|wgrad)|cudnn\w*(?:::)?\w*conv", "convolution", "cuDNN"),
    Rule(r"grouped_?conv|conv(?:olution)?_?(?:fwd|forward|bwd|nd|[123]d)|causal_conv|conv_depthwise|"
         r"implicitgemmconvolution|convolution", "convolution", "CK, CUTLASS, ATen"),
    Rule(r"nchwtonhwc|nhwctonchw|batched_transpose|subtensorop", "memory", "cuDNN, MIOpen"),
    # normalisation
    Rule(r"(?:rms|layer|group|batch|instance|l2|add|qk|post|pre)_?norm|norm2d|rowwise_?moments|computefusedparams|"
         r"(?:^|::)bn_(?:fw|bw)", "normalisation", "ATen, aiter, CK, MIOpen, cuDNN"),
    Rule(r"soft_?max(?!.*gating)", "normalisation", "ATen, aiter"),
    # matrix products
    Rule(r"cijk_", "gemm", "rocBLAS, hipBLASLt (Tensile)"),
    Rule(r"ck::kernel_\w*(?:gemm|moe)|ck_tile::\w*(?:gemm|flatmm)|kernel_(?:moe_)?gemm|gridwisegemm", "gemm", "CK"),
    Rule(r"fmoe|moe_?(?:ck)?\w*gemm|mfma_moe|fused_moe|moe_(?:stage|mxgemm)|wv_?splitk|llmm1|flatmm", "gemm",
         "aiter, vLLM"),
    Rule(r"nvjet_|splitkreduce|cublas|cutlass|(?:^|[^a-z])xmma_|s\d{4,5}\w*gemm|wgmma", "gemm", "cuBLAS, CUTLASS"),
    Rule(r"gemm|gemv|matmul|(?:^|_)(?:b|add|grouped_)?mm(?:_|$)|(?:^|_)n?pt?gmm(?:_|$)|(?:^|_)gmm(?:_|$)|dot_kernel",
         "gemm", "any"),
    # memory movement
    Rule(r"catarray|copy_kernel|direct_copy|fillfunctor|fill_kernel|index_?(?:elementwise|select|put|copy|fill)|"
         r"indexing_backward|index_kernel|gather|scatter|(?<!rotary_)embedding|transpose|triu_tril|flip_kernel|roll_cuda|arange|"
         r"linspace|copy_?blocks|swap_blocks|reshape_and_cache|concat_and_cache|store_kvcache|kv_?cache|permute",
         "memory", "ATen, aiter, vLLM"),
    Rule(r"(?:^|[^a-z])copy(?![a-z])|memcpy|memset", "memory", "any"),
    # pointwise work and plain reductions
    Rule(r"elementwise|reduce_kernel|reduceop|pointwise|foreach|multi_tensor_apply|distribution_|philox|dropout|"
         r"pool(?:ing)?_?\w*(?:kernel|forward|2d)|upsample|scan_kernel|tensor_kernel_scan", "elementwise", "ATen"),
    Rule(r"silu|gelu|relu|swiglu|sigmoid|tanh|act_(?:and_)?mul|act_gate|(?:^|_|::)rope|rotary|quant|"
         r"op_?tensor|addtensor|activ", "elementwise", "aiter, vLLM, MIOpen"),
    Rule(r"(?:^|_)(?:add|mul|sub|div|cast|clamp|scale|sum|mean)_(?:\w+_)?kernel", "elementwise", "any"),
)  # fmt: skip

_COMPILED = tuple((re.compile(rule.pattern, re.IGNORECASE), Match(rule.category, rule.origin)) for rule in RULES)
_OTHER = Match("other", "")


@lru_cache(maxsize=4096)
def classify(name: str) -> Match:
    """The category of a kernel or op name and whose naming decided it; ("other", "") if no rule knows the name."""
    return next((match for pattern, match in _COMPILED if pattern.search(name)), _OTHER)


def category(name: str) -> Category:
    """The category of a kernel or op name."""
    return classify(name).category

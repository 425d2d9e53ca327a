"""The category table against kernel names of every family it claims to know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import wavecrest
from wavecrest.profile.categories import CATEGORIES, RULES, category, classify

NAMES: dict[str, list[str]] = {
    "gemm": [
        # rocBLAS, hipBLASLt
        "Cijk_Alik_Bljk_HHS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1",
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_SE",
        "Custom_Cijk_Alik_Bljk_HHS_BH_UserArgs_MT128x16x128_MI16x16x1_SN_K1_MIWT2_1",
        "void rocblas_gemvn_kernel<64, 4, long, float, float const*>(int)",
        # CK and aiter
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemmMultiD_ABScale_xdl_cshuffle_v3<ck::Tuple<>>>",
        "void ck::kernel_gemm_xdl_cshuffle_v3_multi_d_blockscale_b_preshuffle<int>()",
        "void ck::kernel_moe_gemm_2lds<ck::GridwiseMoeGemm>",
        "void ck_tile::kentry<2, ck_tile::GemmKernel<TilePartitioner>>",
        "aiter::fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x256",
        "aiter::fp8gemm_bf16_blockscale_BpreShuffle_80x128",
        "_gemm_a8w8_blockscale_kernel_GROUP_K_128_GROUP_N_128",
        "_batched_gemm_a8w8_kernel_BLOCK_SIZE_M_4_BLOCK_SIZE_N_16",
        "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 1, 16, 8, 4, 4>(int, int)",
        "mfma_moe2_afp8_wfp4_bf16_cshuffle_t32x256x256",
        # cuBLAS, CUTLASS
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "ampere_sgemm_128x64_tn",
        "volta_sgemm_128x64_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_tn_align8>(Params)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        # Inductor templates, our own, ATen and oneDNN
        "triton_tem_fused_mm_0",
        "triton_tem_fused__to_copy_addmm_gelu_t_view_9",
        "triton_tem_fused_bmm_7",
        "triton_tem_fused__scaled_mm_2",
        "triton_red_fused_mm_3",
        "triton_red_fused__to_copy_add_mean_mm_mul_pow_rsqrt_t_view_16",
        "triton_red_fused__unsafe_view_mm_mul_silu_slice_t_view_10",
        "_gemm_kernel",
        "_tile_kernel",
        "_hopper_epilogue_kernel",
        "_join_kernel",
        "_moe_gate_up_kernel",
        "cpp_CppMicroGemmFP32Vec_micro_gemm_0",
        "aten::addmm",
        "aten::bmm",
        "aten::linear",
        "mkldnn::_linear_pointwise",
        "mkl::_mkl_linear",
        "onednn::qlinear_pointwise",
    ],
    "convolution": [
        "_conv2d_kernel",
        "miopenSp3AsmConv_v21_1_3_gfx9_fp32_f2x3_stride1",
        "Im2d2Col",
        "naive_conv_ab_nonpacked_fwd_nchw_half_double_half",
        "igemm_fwd_gtcx3_nhwc_fp16_bx0_ex1_bt256x128x32_wt32x32x8",
        "void ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<ck::GridwiseGemm>",
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
        "void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1>",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float>",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>",
        "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128>>",
        "triton_tem_fused__to_copy_convolution_repeat_unsqueeze_view_2",
        "aten::mkldnn_convolution",
        "aten::conv2d",
        "mkldnn::_convolution_pointwise",
    ],
    "attention": [
        "attn_fwd",
        "bwd_kernel_dk_dv",
        "void ck_tile::kentry<ck_tile::gfx950_t, 2, ck_tile::FmhaFwdKernel<BlockFmhaPipelineQRKSVS>>",
        "aiter::fmha_fwd_hd128_bf16_causal_group",
        "_ZN5aiter42pa_bf16_pertokenFp8_gqa10_1tg_4w_mtp3_msk1E",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16>",
        "void kn_mla_reduce_v1_ps<128>",
        "kernel_unified_attention_2d",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "triton_tem_fused_flex_attention_0",
        "_flash_attention_kernel",
        "_cdna_attention_kernel",
        "_short_attention_kernel",
        "_decoding_kernel",
        "_mlstm_chunks_kernel",
        "_mlstm_step_kernel",
        "_slstm_sequence_kernel",
        "_slstm_cooperative_kernel",
        "_slstm_step_kernel",
        "_slstm_steps_kernel",
        "_mlstm_keys_kernel",
        "BatchPrefillWithRaggedKVCacheKernel",
        "_fwd_grouped_kernel_stage1_rope",
        "void extend_attention_kernel<128>",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_flash_attention_forward",
    ],
    "normalisation": [
        "void aiter::add_rmsnorm_quant_kernel<std::bfloat16_t, std::bfloat16_t>",
        "void ck_tile::kentry<ck_tile::Rmsnorm2dFwd<Pipeline>>",
        "_layernorm_kernel",
        "MIOpenBatchNormFwdInferSpatialEst",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>",
        "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float>",
        "triton_per_fused_add_native_layer_norm_0",
        "triton_poi_fused_add_mul_native_layer_norm_unsqueeze_3",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
        "triton_per_fused__softmax_1",
        "triton_red_fused_amax_exp_sub_sum_0",
        "cpp_fused_add_native_layer_norm_4",
        "_row_kernel",
        "_mlstm_norm_kernel",
        "aten::native_layer_norm",
        "aten::_softmax",
        "aten::_fused_rms_norm",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
        "void at::native::unrolled_elementwise_kernel<at::native::AUnaryFunctor<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<GeluCUDAKernelImpl>>",
        "void vllm::act_and_mul_kernel<c10::BFloat16, silu_kernel>",
        "aiter::dynamic_per_group_scaled_quant_kernel",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>",
        "triton_poi_fused_addmm_gelu_1",
        "triton_poi_fused_mul_silu_4",
        "triton_red_fused_sum_7",
        "cpp_fused_add_gelu_0",
        "_gated_kernel",
        "_silu_and_mul_kernel",
        "void scaled_add_kernel<float>",
        "aten::gelu",
        "aten::add_",
        "aten::mean",
    ],
    "memory": [
        "__amd_rocclr_copyBuffer",
        "__amd_rocclr_fillBufferAligned",
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIterator&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIterator&)>",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float>",
        "batched_transpose_16x16_half",
        "void vllm::reshape_and_cache_flash_kernel<c10::BFloat16>",
        "triton_poi_fused__to_copy_cat_view_5",
        "triton_poi_fused_clone_0",
        "triton_poi_fused_copy__1",
        "triton_poi_fused_embedding_0",
        "_memcpy_kernel",
        "void hbm_copy<float4>",
        "aten::copy_",
        "aten::cat",
        "aten::view",
        "aten::index_select",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_Generic_4",
        "rcclGenericKernel",
        "void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>",
        "c10d::allreduce_",
        "gloo:all_gather",
    ],
    "other": [
        "my_custom_thing",
        "triton__0d1d2d3de",
        "Torch-Compiled Region: 0/0",
        "void at::native::radixSortKVInPlace<2, -1, 128, 32, long>",
    ],
}  # fmt: skip
CASES = [(name, expected) for expected, names in NAMES.items() for name in names]


@pytest.mark.parametrize(("name", "expected"), CASES, ids=[f"{expected}-{name[:40]}" for name, expected in CASES])
def test_category_of_real_names(name: str, expected: str) -> None:
    assert category(name) == expected, classify(name)


def test_the_table_covers_enough_names() -> None:
    assert len(CASES) >= 60
    assert set(NAMES) == set(CATEGORIES)


# words that occur inside names of another category: the order of the rules decides these
ODD = [
    ("softmax-inside-attention", "void fmha_fwd_softmax_kernel<float>", "attention"),
    ("gemm-inside-conv", "igemm_wrw_gtcx3_nhwc_fp16_gemm", "convolution"),
    ("fprop-inside-sdpa", "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16", "attention"),
    ("sdpa-layout-kernel-is-pointwise", "triton_poi_fused__scaled_dot_product_flash_attention_mul_1", "elementwise"),
    ("addmm-epilogue-is-not-a-gemm", "triton_per_fused_add_addmm_native_layer_norm_1", "normalisation"),
    ("all_reduce-epilogue-is-not-a-collective", "triton_poi_fused_add_all_reduce_wait_tensor_0", "elementwise"),
    ("convert-is-not-a-conv", "void convert_fp32_to_bf16_kernel<4>", "other"),
    ("pow-mean-without-rsqrt", "triton_red_fused_mean_pow_0", "normalisation"),
    ("rsqrt-alone", "triton_poi_fused_mul_rsqrt_0", "elementwise"),
    ("mixed-move-and-compute", "triton_poi_fused_add_cat_0", "elementwise"),
    ("maximum-is-not-an-mm", "aten::maximum", "elementwise"),
    ("transpose-is-not-tensordot", "aten::t", "memory"),
]


@pytest.mark.parametrize(("name", "expected"), [case[1:] for case in ODD], ids=[case[0] for case in ODD])
def test_order_decides_names_that_two_rules_know(name: str, expected: str) -> None:
    assert category(name) == expected, classify(name)


def _decides(name: str) -> int | None:
    return next((index for index, rule in enumerate(RULES) if re.search(rule.pattern, name, re.IGNORECASE)), None)


def test_every_rule_decides_some_name() -> None:
    # a rule that no name above reaches is untested data, or dead behind an earlier rule
    reached = {_decides(name) for name in [*(name for name, _ in CASES), *(case[1] for case in ODD)]}
    assert [rule for index, rule in enumerate(RULES) if index not in reached] == []
    assert all(rule.category != "other" and rule.origin for rule in RULES)


def test_every_kernel_of_ours_is_known() -> None:
    sources = sorted(Path(wavecrest.__file__).parent.glob("ops/**/*.py"))
    names = {name for path in sources for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    found = {name: classify(name) for name in names}
    assert {name for name, match in found.items() if match.origin != "wavecrest"} == set()
    assert {found[name].category for name in ("_decoding_kernel", "_joining_kernel", "_mla_product_kernel")} == {
        "attention"
    }
    assert {found[name].category for name in ("_tile_kernel", "_sum_kernel", "_stream_k_kernel")} == {"gemm"}
    assert len(names) >= 20

"""torch.compile sees which tensors our kernels write: no others are copied, nor do they keep CUDA graphs away."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile.conftest import answer

QUESTIONS = (("traced.py",),)

# kernel: what it writes in any of its forms
WRITTEN = {
    "_row_kernel": {"y_ptr", "h_ptr", "scale_ptr", "slots_ptr"},
    "_gated_kernel": {"y_ptr"},
    "_rope_kernel": {"y_ptr"},
    "_topk_routing_kernel": {"weights_ptr", "ids_ptr"},
    "_memcpy_kernel": {"y_ptr"},
    "_conv2d_kernel": {"y_ptr"},
    "_tile_kernel": {"c_ptr", "part_ptr"},
    "_sum_kernel": {"c_ptr"},
    "_multiply_kernel": {"c_ptr", "part_ptr"},
    "_words_kernel": {"c_ptr", "part_ptr"},
    "_digits_kernel": {"digits_ptr"},
    "_join_kernel": {"c_ptr"},
    "_flash_attention_kernel": {"o_ptr", "lse_ptr"},
    "_short_attention_kernel": {"o_ptr"},
    "_decoding_kernel": {"o_ptr", "lse_ptr", "part_ptr", "meta_ptr"},
    "_joining_kernel": {"o_ptr", "lse_ptr"},
    "_append_kernel": {
        "k_cache_ptr",
        "v_cache_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "k_shift_ptr",
        "v_shift_ptr",
        "turned_ptr",
    },
    "_mla_product_kernel": {"y_ptr"},
    "_mla_kernel": {"o_ptr", "lse_ptr", "part_ptr", "meta_ptr"},
    "_mla_join_kernel": {"o_ptr", "lse_ptr"},
    "_moe_align_kernel": {"pairs_ptr", "experts_ptr"},
    "_moe_gate_up_kernel": {"h_ptr"},
    "_moe_down_kernel": {"parts_ptr"},
    "_moe_combine_kernel": {"y_ptr"},
    "_mlstm_gates_kernel": {"planes_ptr"},
    "_mlstm_keys_kernel": {"keys_ptr", "parts_ptr", "links_ptr"},
    "_mlstm_states_kernel": {"states_ptr", "scales_ptr", "vectors_ptr", "c_new_ptr", "n_new_ptr", "m_new_ptr"},
    "_mlstm_chunks_kernel": {"h_ptr"},
    "_mlstm_recurrent_kernel": {"h_ptr", "c_new_ptr", "n_new_ptr", "m_new_ptr"},
    "_mlstm_step_kernel": {"h_ptr", "c_new_ptr", "n_new_ptr", "m_new_ptr", "scratch_ptr", "arrivals_ptr"},
    "_causal_conv1d_kernel": {"y_ptr"},
    "_slstm_sequence_kernel": {"y_ptr", "h_new_ptr", "c_new_ptr", "n_new_ptr", "m_new_ptr"},
    "_slstm_cooperative_kernel": {"y_ptr", "slots_ptr", "h_ptr", "c_ptr", "n_ptr", "m_ptr"},
    "_slstm_steps_kernel": {"y_ptr", "h_new_ptr", "c_ptr", "n_ptr", "m_ptr"},
    "_slstm_step_kernel": {"y_ptr", "h_new_ptr", "c_new_ptr", "n_new_ptr", "m_new_ptr"},
    "_mlstm_norm_kernel": {"y_ptr", "n_new_ptr", "m_new_ptr"},
}


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    return answer("traced.py")  # type: ignore[no-any-return]


def test_every_kernel_is_looked_at(kernels: dict[str, Any]) -> None:
    assert set(kernels) == set(WRITTEN)


@pytest.mark.parametrize("kernel", WRITTEN)
def test_what_it_writes_and_nothing_else(kernels: dict[str, Any], kernel: str) -> None:
    found = kernels[kernel]["written"]
    assert found and all(names and set(names) <= WRITTEN[kernel] for names in found.values())


def test_new_keys_and_values_are_written_to_caches(kernels: dict[str, Any]) -> None:
    caches, scales, shifts = ([f"{which}_{kind}_ptr" for which in ("k", "v")] for kind in ("cache", "scale", "shift"))
    wanted = {
        "append": [*caches, "turned_ptr"],
        "append int8": caches,
        "append fp8": caches,
        "append int8 by token": [*caches, *scales, "turned_ptr"],
        "append int4 4 groups": [*caches, *scales, *shifts, "turned_ptr"],
    }
    found = {case.removesuffix(" before"): names for case, names in kernels["_append_kernel"]["written"].items()}
    assert found == {f"flash_decoding {case}": sorted(names) for case, names in wanted.items()}


@pytest.mark.parametrize("kernel", WRITTEN)
def test_it_compiles_with_its_numbers_as_constants(kernels: dict[str, Any], kernel: str) -> None:
    assert kernels[kernel]["problems"] == {}

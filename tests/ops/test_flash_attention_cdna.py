"""Attention's kernel for gfx950: what it takes, when another one runs, its configurations.

Its values, waits and barriers are held as machine code: tests/emulated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import rank
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_attention import config as configs
from wavecrest.ops._flash_attention import launch_cdna
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall, access
from wavecrest.ops._flash_attention.study.space import space_cdna_of
from wavecrest.ops.common import launcher, target

CDNA, GFX950 = "triton_cdna", ARCHS["gfx950"]
BF16 = torch.bfloat16


def call_of(d: int = 128, dtype: torch.dtype = BF16, dv: int | None = None, **options: Any) -> FlashAttentionCall:
    """4 query heads, of which 2 share keys, [B, S, H, D]."""
    q, k, v = (torch.zeros(2, n, h, w, dtype=dtype) for n, h, w in ((70, 4, d), (90, 2, d), (90, 2, dv or d)))
    return FlashAttentionCall(q, k, v, **options)


@pytest.fixture
def as_gfx950(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The questions about the device answered as on a gfx950."""
    monkeypatch.setattr("wavecrest.ops.common.triton.interpreted", False)
    monkeypatch.setattr("wavecrest.ops.common.triton.no_gluon", None)
    with target.assumed(GFX950):
        yield


def refusal(call: FlashAttentionCall) -> str | None:
    return launch_cdna.refusal(call, access(call))


def test_it_takes_what_prompts_have(as_gfx950: None) -> None:
    starts = torch.tensor([0, 30, 70], dtype=torch.int32)
    one = torch.zeros(70, 4, 64, dtype=torch.float16)
    packed = FlashAttentionCall(
        one, one, one, "thd", True, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=40, max_seqlen_k=40
    )
    sinks = torch.zeros(4, dtype=BF16)
    for call in (
        call_of(),
        call_of(64, torch.float16, causal=True),
        call_of(window=(-1, 3)),
        call_of(causal=True, sinks=sinks, return_lse=True),
        packed,
    ):
        assert refusal(call) is None
    # heads that are one head have a stride of 0
    call = call_of()
    assert refusal(call._replace(k=call.k[:, :, :1].expand(2, 90, 2, 128))) is None


def test_it_says_what_it_does_not_take(as_gfx950: None) -> None:
    call = call_of()
    for wanted, refused in {
        "takes float16 and bfloat16": call_of(dtype=torch.float32),
        "left edge of a window": call_of(window=(8, 0)),
        "does not know bias": call_of(bias=torch.zeros(70, 90, dtype=BF16)),
        "ALiBi": call_of(alibi_slopes=torch.zeros(4)),
        "softcap": call_of(softcap=5.0),
        "dropout": call_of(dropout_p=0.1, seed=1),
        "head_dim of v": call_of(128, dv=64),
        "head_dim of 64 or 128": call_of(80),
        "16 bytes at a time": call._replace(q=torch.zeros(2, 70, 4, 132, dtype=BF16)[..., :128]),
        "contiguous columns": call._replace(v=torch.zeros(2, 128, 2, 90, dtype=BF16).permute(0, 3, 2, 1)),
        "in 32 bits": call._replace(
            k=torch.empty_strided((2, 90, 2, 128), (8, 1 << 22, 128, 1), dtype=BF16, device="meta")
        ),
        "scale, which is 0": call_of(softmax_scale=0.0),
    }.items():
        assert wanted in str(refusal(refused)), wanted


def test_it_is_for_gfx950_and_not_for_torch_compile(as_gfx950: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with target.assumed(ARCHS["gfx942"]):
        assert "is for gfx950" in str(refusal(call_of()))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile does not trace" in str(refusal(call_of()))


def test_the_portable_kernel_says_why_it_runs(as_gfx950: None) -> None:
    call = call_of(causal=True)
    odd = torch.zeros(call.q.numel() + 1, dtype=BF16)[1:].view(call.q.shape)
    config = launch_cdna.default(configs.Shape(128, 128, 16, True, 0), GFX950)
    for changed, reason in ((call._replace(q=odd), "does not begin"), (call._replace(softmax_scale=0.0), "is 0")):
        launcher.replaced.cache_clear()
        with pytest.warns(PortableKernel, match=f"flash_attention: .* in place of triton_cdna, which .*{reason}"):
            assert launch_cdna.bind(changed, config, lambda one: one.q)(changed) is changed.q
        # once is enough
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert launch_cdna.bind(changed, config, lambda one: one.q)(changed) is changed.q


@pytest.mark.parametrize("d", [64, 128])
def test_configurations_fit(d: int) -> None:
    """Eight waves, in one program or in several, have their steps in LDS, and sums and scores in registers."""
    shape = configs.Shape(4096, d, 16, True, 0)
    tried = list(space_cdna_of(shape, GFX950))
    assert tried[0] == launch_cdna.default(shape, GFX950) and len(tried) == len(set(tried)) > 5
    assert {one["SECTION_MIB"] for one in tried} == {0, 2, 4, 16}
    for one in tried:
        programs = 8 // one["num_warps"]
        # two steps of k and v
        assert programs * 2 * 2 * one["BLOCK_N"] * d * 2 <= GFX950.lds_kib << 10
        # sums and scores: 96 of a lane's 256 registers
        assert launch_cdna.WAVE * (d + one["BLOCK_N"]) // 64 <= 96
    # nothing hidden: heads need no order
    assert all("SECTION_MIB" not in one for one in space_cdna_of(shape._replace(causal=False), GFX950))


@pytest.mark.parametrize("wrong", [{"BLOCK_M": 64}, {"num_warps": 3, "BLOCK_M": 96}, {"BLOCK_N": 48}])
def test_a_tile_that_it_does_not_have_is_an_error(wrong: dict[str, int]) -> None:
    call = call_of()
    config = Config(**(launch_cdna.default(configs.Shape(128, 128, 16, False, 0), GFX950).kwargs | wrong))
    with pytest.raises(InvalidArgument, match="triton_cdna has a num_warps of 2, 4 or 8"):
        launch_cdna.launch(call, call.q, None, config, GFX950)


def test_the_cost_model_ranks_it_on_gfx950_alone() -> None:
    key = op.key(call_of(causal=True))
    assert CDNA in {one.backend for one in rank(op.study.kernels, key, GFX950)}
    assert CDNA not in {one.backend for one in rank(op.study.kernels, key, ARCHS["gfx942"])}


def test_it_has_no_accumulation_registers_where_the_compiler_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """From triton 3.8 on, whose LLVM would share registers out in halves and spill."""
    call = call_of()
    config = launch_cdna.default(configs.Shape(128, 128, 16, False, 0), GFX950)
    for takes, wanted in ((True, "amdgpu-agpr-alloc=0"), (False, None)):
        monkeypatch.setattr("wavecrest.ops.common.triton.takes_attributes", takes)
        assert launch_cdna.launch(call, call.q, None, config, GFX950).options().get("llvm_fn_attrs") == wanted

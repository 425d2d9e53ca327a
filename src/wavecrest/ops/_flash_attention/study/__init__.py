"""Study of attention, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import wavecrest.ops._flash_attention.config as _config
import wavecrest.ops._flash_attention.launch as _launch
import wavecrest.ops._flash_attention.launch_cdna as _cdna
import wavecrest.ops._flash_attention.launch_hopper as _hopper
import wavecrest.ops._flash_attention.launch_hopper_group as _hopper_group
import wavecrest.ops._flash_attention.launch_short as _short
import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import FlashAttentionCall, key_of
from wavecrest.ops._flash_attention.config import shape_of
from wavecrest.ops._flash_attention.study import cases, space
from wavecrest.ops._flash_attention.study.work import work, work_short
from wavecrest.ops.common.quantized import float8_of


def studies() -> dict[str, Study[FlashAttentionCall]]:
    """By the op's name."""
    study = Study(
        inputs=cases.inputs,
        cost=cost,
        sizes=("B", "H", "S", "D"),
        compile_cases=compile_cases,
        bench_cases=cases.bench,
        emulate_cases=cases.emulated,
        call_of_key=cases.call_of_key,
        kernels={
            "triton": KernelStudy(space.space, partial(_launches, _launch.launch), partial(work, "triton")),
            "triton_hopper": KernelStudy(
                space.space_hopper, partial(_launches, _hopper.launch), partial(work, "triton_hopper")
            ),
            "triton_hopper_group": KernelStudy(
                space.space_hopper_group, partial(_launches, _hopper_group.launch), partial(work, "triton_hopper_group")
            ),
            "triton_cdna": KernelStudy(
                space.space_cdna, partial(_launches, _cdna.launch), partial(work, "triton_cdna")
            ),
            "triton_short": KernelStudy(space.space_short, _short_launches, work_short),
        },
    )
    return {"flash_attention": study}


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    """Pairs of a query and a key that it sees; −1: no limit on that side."""
    diagonal = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    last = torch.full_like(diagonal, seqlen_k - 1) if right < 0 else (diagonal + right).clamp(max=seqlen_k - 1)
    first = torch.zeros_like(diagonal) if left < 0 else (diagonal - left).clamp(min=0)
    return int((last - first + 1).clamp(min=0).sum())


def _lengths(starts: Tensor, longest: int) -> list[int]:
    """The lengths of packed sequences; `longest` for all on the device "meta", which holds no numbers."""
    if starts.device.type == "meta":
        return [longest] * (starts.shape[0] - 1)
    lengths: list[int] = starts.diff().tolist()
    return lengths


def cost(call: FlashAttentionCall) -> Cost:
    """The least work of a call: each operand and the result moved once, two products for each visible pair."""
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        lengths_q = _lengths(call.cu_seqlens_q, call.seqlen_q)
        lengths_k = _lengths(call.cu_seqlens_k, call.seqlen_k)
        pairs = sum(visible_pairs(m, n, call.left, call.right) for m, n in zip(lengths_q, lengths_k, strict=True))
    else:
        pairs = call.batch * visible_pairs(call.seqlen_q, call.seqlen_k, call.left, call.right)
    moved = sum(one.nbytes for one in (call.q, call.k, call.v))
    moved += call.q.numel() // call.head_dim * call.head_dim_v * call.dtype.itemsize
    descales = (call.q_descale, call.k_descale, call.v_descale)
    for small in (call.bias, call.alibi_slopes, call.sinks, call.cu_seqlens_q, call.cu_seqlens_k, *descales):
        moved += 0 if small is None else small.nbytes
    moved += 4 * call.q.numel() // call.head_dim if call.return_lse else 0
    return Cost(flops=2 * pairs * call.heads * (call.head_dim + call.head_dim_v), bytes=moved)


def _launches(
    launch: Callable[..., _launcher.Launch], call: FlashAttentionCall, config: Config, arch: Arch
) -> list[_launcher.Launch]:
    if call.batch * call.seqlen_q * call.q.numel() == 0:
        return []
    meta = call._replace(q=call.q.to("meta"))
    return [launch(call, *_launch.empty_results(meta), config, arch)]


def _short_launches(call: FlashAttentionCall, config: Config, arch: Arch) -> list[_launcher.Launch]:
    if call.batch * call.seqlen_q * call.q.numel() == 0:
        return []
    return [_short.launch(call, torch.empty(call.shape, dtype=call.dtype, device="meta"), config, arch)]


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    made = {}
    for name, call in (cases.compiled() | cases.compiled_of_8_bits(float8_of(arch))).items():
        chosen = _config.default(shape_of(key_of(call)), arch)
        if config is not None:
            # a launch's configuration does not have it: the order stays the default's
            order = {field: chosen[field] for field in ("SECTION_MIB",) if field in chosen}
            chosen = Config(**(order | config.kwargs))
        made[name] = _launch.launch(call, *_launch.empty_results(call), chosen, arch)
    if config is None:
        for name, call in cases.compiled_of_short().items():
            chosen = _short.default(shape_of(key_of(call)), call.seqlen_k, arch)
            (made[f"short {name}"],) = _short_launches(call, chosen, arch)
    if arch.name == "sm_90" and config is None:
        for name, call in cases.compiled_for_hopper().items():
            chosen = _hopper.default(shape_of(key_of(call)))
            made[f"hopper {name}"] = _hopper.launch(call, *_launch.empty_results(call), chosen, arch)
            if call.head_dim <= _hopper_group.MOST_HEAD_DIM and call.head_dim % _hopper_group.COLUMNS == 0:
                chosen = _hopper_group.default(shape_of(key_of(call)))
                made[f"hopper group {name}"] = _hopper_group.launch(call, *_launch.empty_results(call), chosen, arch)
    if arch.name == _cdna.ARCH and config is None:
        for name, call in cases.compiled_for_cdna().items():
            chosen = _cdna.default(shape_of(key_of(call)), arch)
            made[f"cdna {name}"] = _cdna.launch(call, *_launch.empty_results(call), chosen, arch)
    return made

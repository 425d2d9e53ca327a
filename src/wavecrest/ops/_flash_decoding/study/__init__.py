"""Study of decoding, for tuning, benchmarks and evidence; a call does not load it."""

from __future__ import annotations

import wavecrest.ops._flash_decoding.config as _config
import wavecrest.ops._flash_decoding.launch as _launch
import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.study import KernelStudy, Study
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_decoding.call import FlashDecodingCall
from wavecrest.ops._flash_decoding.key import key_of, shape_of
from wavecrest.ops._flash_decoding.study import cases, space
from wavecrest.ops._flash_decoding.study.work import work


def studies() -> dict[str, Study[FlashDecodingCall]]:
    """By the op's name."""
    study = Study(
        inputs=cases.inputs,
        cost=cost,
        sizes=("B", "H", "S", "D"),
        compile_cases=compile_cases,
        bench_cases=cases.bench,
        emulate_cases=cases.emulated,
        call_of_key=cases.call_of_key,
        stores=("k_cache", "v_cache", "k_scale", "v_scale", "k_shift", "v_shift"),
        kernels={"triton": KernelStudy(space.space, _launch.launches, work)},
    )
    return {"flash_decoding": study}


def cost(call: FlashDecodingCall) -> Cost:
    """The least work of a call: the keys that sequences have, read once for all queries and heads that share them."""
    lengths = call.seq_lens
    if call.seq_starts is not None:
        lengths = (lengths - call.seq_starts.clamp(min=0)).clamp(min=0)
    keys = call.capacity * call.batch if lengths.device.type == "meta" else int(lengths.sum())
    each = call.kv_heads * (call.head_dim + call.head_dim_v)
    stored = call.k_cache.shape[-1] + call.v_cache.shape[-1]
    moved = keys * call.kv_heads * stored * call.k_cache.element_size() + call.q.nbytes
    for scale in (call.k_scale, call.v_scale, call.k_shift, call.v_shift):
        if scale is not None and call.by_token:
            moved += keys * call.kv_heads * scale.shape[-1] * scale.element_size()
    moved += call.q.element_size() * call.batch * call.seqlen_q * call.heads * call.head_dim_v
    if call.k is not None and call.v is not None:
        moved += 2 * (call.k.nbytes + call.v.nbytes)
    return Cost(flops=2 * keys * call.seqlen_q * call.group * each, bytes=moved)


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    made = {}
    for name, call in cases.compiled(arch).items():
        chosen = config or _config.default(shape_of(key_of(call)), arch)
        first, *others = _launch.launches(call, chosen, arch)
        made[name] = first
        if call.prepares:
            # what comes after the append is as in calls whose keys are in the cache
            continue
        for launch in others:
            made[f"{name} join"] = launch
    return made

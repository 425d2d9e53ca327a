"""Cases of moe: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import Arch
from wavecrest.ops._moe.call import BLOCK, MX_GROUP, UNIT, MoeCall
from wavecrest.ops._moe.config import default
from wavecrest.ops._moe.key import key_of, shape_of
from wavecrest.ops._moe.launch import launches
from wavecrest.ops.common.launcher import Launch


class Sizes(NamedTuple):
    """The sizes of an example call; `topk` experts of each token."""

    tokens: int
    experts: int
    topk: int
    hidden: int
    intermediate: int


# the sparse layers of published models, without the number of tokens
MIXTRAL_8X7B = Sizes(0, 8, 2, 4096, 14336)
QWEN3_30B_A3B = Sizes(0, 128, 8, 2048, 768)
GPT_OSS_20B = Sizes(0, 32, 4, 2880, 2880)
GPT_OSS_OPTIONS: dict[str, Any] = {
    "biased": True, "transposed": True, "interleaved": True, "activation": "swigluoai"
}  # fmt: skip


# as the checkpoint has them: rows along memory
GPT_OSS_MXFP4: dict[str, Any] = GPT_OSS_OPTIONS | {"transposed": False, "stored": torch.uint8, "by": "e8m0"}


def example(
    sizes: Sizes, dtype: torch.dtype, device: str, *, biased: bool = False, transposed: bool = False,
    stored: torch.dtype | None = None, by: str = "row", **options: Any,
) -> MoeCall:  # fmt: skip
    """A call whose tokens choose their experts at random, each at most once; weights keep the sizes of numbers.

    `biased`: with b1 and b2. `transposed`: weights lie in memory as [experts, in, out]. `stored`: in 8 bits, with a
    scale of each row of w1 and one of each expert's w2, or `by` "block"; uint8: in 4 bits, `by` "group N" columns of
    int4, "group N zeros" with zero points, or "e8m0" of mxfp4. `options`: fields of the call.
    """

    def made(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, dtype=dtype, device=device)

    t, e, k, h, i = sizes
    if transposed:
        w1, w2 = made(e, h, 2 * i, size=h**-0.5).mT, made(e, i, h, size=i**-0.5).mT
    else:
        w1, w2 = made(e, 2 * i, h, size=h**-0.5), made(e, h, i, size=i**-0.5)
    if stored is not None and by != "row":
        w1, w1_scale = _by_columns(e, 2 * i, h, stored, by, device)
        w2, w2_scale = _by_columns(e, h, i, stored, by, device)
        if transposed:
            w1, w2 = w1.mT.contiguous().mT, w2.mT.contiguous().mT
        options = {"w1_scale": w1_scale, "w2_scale": w2_scale} | options
        if by.endswith(" zeros"):
            zeros = [torch.randint(0, 16, one.shape, dtype=stored, device=device) for one in (w1_scale, w2_scale)]
            options = {"w1_zero": zeros[0], "w2_zero": zeros[1]} | options
    elif stored is not None:
        step = 32.0 if stored == torch.int8 else 8.0
        w1, w2 = ((step * one.float() / size).to(stored) for one, size in ((w1, h**-0.5), (w2, i**-0.5)))
        scales = {"w1_scale": torch.rand(e, 2 * i, device=device) + 0.5, "w2_scale": torch.rand(e, device=device) + 0.5}
        sizes_of = {"w1_scale": h**-0.5 / step, "w2_scale": i**-0.5 / step}
        options = {name: scale * sizes_of[name] for name, scale in scales.items()} | options
    scores = torch.randn(t, e, device=device).softmax(-1)
    weights, ids = scores.topk(k, dim=-1)
    if biased:
        options = {"b1": made(e, 2 * i), "b2": made(e, h)} | options
    return MoeCall(made(t, h), w1, w2, weights / weights.sum(-1, keepdim=True), ids, **options)


def _by_columns(
    experts: int, rows: int, columns: int, stored: torch.dtype, by: str, device: str
) -> tuple[Tensor, Tensor]:
    """Random weights and scales of 128 × 128 of them, of groups of columns of int4, or e8m0 of 32 columns of mxfp4."""
    size = columns**-0.5
    if by == "block":
        values = torch.randn(experts, rows, columns, device=device)
        shape = (experts, -(-rows // BLOCK), -(-columns // BLOCK))
        return (8 * values).to(stored), (torch.rand(shape, device=device) + 0.5) * size / 8
    values = torch.randint(0, 256, (experts, rows, -(-columns // UNIT) * UNIT // 2), dtype=stored, device=device)
    if by == "e8m0":
        # values are about 3 at a scale of 1
        exponent = 125 - columns.bit_length() // 2
        shape = (experts, rows, -(-columns // MX_GROUP))
        return values, torch.randint(exponent, exponent + 2, shape, dtype=torch.uint8, device=device)
    shape = (experts, rows, -(-columns // int(by.split()[1])))
    return values, (torch.rand(shape, device=device) + 0.5) * size / 4


def inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str) -> MoeCall:
    """M tokens of K columns, 2 of 5 experts each, N columns between an expert's GEMMs."""
    return example(Sizes(M, 5, 2, K, N), dtype, device)


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], MoeCall]]:
    """Sparse layers of Mixtral 8x7B, Qwen3-30B-A3B and gpt-oss-20b, from one token to a prompt."""
    if suite == "quick":
        return {
            "decode 4": partial(example, Sizes(4, 8, 2, 64, 96), torch.float32, device),
            "prefill 64": partial(example, Sizes(64, 8, 2, 64, 96), torch.float32, device),
        }
    layers = {"mixtral-8x7b": MIXTRAL_8X7B, "qwen3-30b-a3b": QWEN3_30B_A3B}
    bf16 = torch.bfloat16
    cases: dict[str, Callable[[], MoeCall]] = {
        f"{name} t{tokens}": partial(example, sizes._replace(tokens=tokens), bf16, device)
        for name, sizes in layers.items()
        for tokens in (1, 16, 64, 512, 2048)
    }
    for tokens in (1, 64, 2048):
        sizes = GPT_OSS_20B._replace(tokens=tokens)
        cases[f"gpt-oss-20b t{tokens}"] = partial(example, sizes, bf16, device, **GPT_OSS_OPTIONS)
        cases[f"gpt-oss-20b t{tokens} mxfp4"] = partial(example, sizes, bf16, device, **GPT_OSS_MXFP4)
    return cases


def call_of_key(parts: Mapping[str, Cell], device: str) -> MoeCall | None:
    """A call with the key of these parts; None where they name no size or dtype, or strides that no example has."""
    sizes = Sizes(*(int(parts[name] or 0) for name in ("tokens", "experts", "topk", "hidden", "intermediate")))
    dtype, ids, stored = (getattr(torch, str(parts[name]), None) for name in ("dtype", "ids", "weights"))
    if min(sizes) < 1 or not isinstance(dtype, torch.dtype) or parts["x"] != "columns" or sizes.topk > sizes.experts:
        return None
    order = str(parts["w1"])
    if order != parts["w2"] or order == "any" or not isinstance(stored, torch.dtype):
        return None
    by = "row"
    if parts["w1_scale"] == parts["w2_scale"] and str(parts["w1_scale"]).split(" ")[0] in ("block", "group", "e8m0"):
        by = str(parts["w1_scale"])
    elif stored != dtype and (parts["w1_scale"], parts["w2_scale"]) != ("row", "expert"):
        return None
    call = example(
        sizes, dtype, device, transposed=order == "rows", activation=str(parts["activation"]),
        interleaved=bool(parts["interleaved"]), stored=None if stored == dtype else stored, by=by,
    )  # fmt: skip
    call = call._replace(topk_ids=call.topk_ids.to(ids))
    return call._replace(
        b1=_bias(parts["b1"], sizes.experts, 2 * sizes.intermediate, device),
        b2=_bias(parts["b2"], sizes.experts, sizes.hidden, device),
    )


def _bias(dtype: Cell, experts: int, columns: int, device: str) -> Tensor | None:
    kind = getattr(torch, str(dtype), None)
    return torch.randn(experts, columns, device=device).to(kind) if isinstance(kind, torch.dtype) else None


def emulate_cases(arch: str) -> dict[str, Callable[[], MoeCall]]:
    """Sorted blocks with ragged ends and without tokens, pairs as blocks, every option, both orders of weights."""
    brain, half, single = torch.bfloat16, torch.float16, torch.float32
    away = torch.tensor([[0, 3], [-1, 2], [2, 0], [3, 9], [0, 2]])
    weights = torch.rand(5, 2)
    every = GPT_OSS_OPTIONS | {"topk_ids": away.int(), "topk_weights": weights}

    def routed(sizes: Sizes, dtype: torch.dtype, options: dict[str, Any]) -> MoeCall:
        options = dict(options)
        ids, given = options.pop("topk_ids"), options.pop("topk_weights")
        return example(sizes, dtype, "cpu", **options)._replace(topk_ids=ids, topk_weights=given)

    return {
        "sorted": partial(example, Sizes(37, 6, 2, 72, 40), brain, "cpu"),
        "one token": partial(example, Sizes(1, 6, 3, 64, 48), half, "cpu", activation="gelu"),
        "other devices": partial(routed, Sizes(5, 4, 2, 48, 40), half, {"topk_ids": away, "topk_weights": weights}),
        "every option": partial(routed, Sizes(5, 4, 2, 48, 40), brain, every),
        "float32": partial(example, Sizes(9, 3, 2, 40, 24), single, "cpu", activation="gelu_tanh"),
        "int8": partial(example, Sizes(9, 3, 2, 80, 48), brain, "cpu", stored=torch.int8),
        "fp8": partial(example, Sizes(5, 3, 2, 80, 48), half, "cpu", stored=torch.float8_e4m3fn),
        "fp8 blocks": partial(example, Sizes(5, 3, 2, 200, 72), brain, "cpu", stored=torch.float8_e4m3fn, by="block"),
        "int4": partial(example, Sizes(5, 3, 2, 80, 48), brain, "cpu", stored=torch.uint8, by="group 32"),
        "int4 zeros": partial(
            example, Sizes(5, 3, 2, 80, 48), half, "cpu", stored=torch.uint8, by="group 32 zeros", interleaved=True
        ),
        "mxfp4": partial(example, Sizes(5, 3, 2, 200, 72), brain, "cpu", stored=torch.uint8, by="e8m0"),
        "mxfp4, gpt-oss": partial(
            example,
            Sizes(5, 3, 2, 80, 48),
            half,
            "cpu",
            stored=torch.uint8,
            by="e8m0",
            biased=True,
            interleaved=True,
            activation="swigluoai",
        ),
    }


# name -> sizes, dtype, options: one token, decoding, and a prompt of each layout
def _compiled() -> dict[str, tuple[Sizes, torch.dtype, dict[str, Any]]]:
    bf16, half = torch.bfloat16, torch.float16
    return {
        "mixtral t=1": (MIXTRAL_8X7B._replace(tokens=1), bf16, {}),
        "mixtral t=16": (MIXTRAL_8X7B._replace(tokens=16), bf16, {}),
        "mixtral t=2048": (MIXTRAL_8X7B._replace(tokens=2048), half, {}),
        "qwen3 t=64": (QWEN3_30B_A3B._replace(tokens=64), bf16, {}),
        "qwen3 t=512": (QWEN3_30B_A3B._replace(tokens=512), bf16, {}),
        "gpt-oss t=2048": (GPT_OSS_20B._replace(tokens=2048), bf16, GPT_OSS_OPTIONS),
        "transposed t=2048": (MIXTRAL_8X7B._replace(tokens=2048), bf16, {"transposed": True}),
        "mixtral t=16 int8": (MIXTRAL_8X7B._replace(tokens=16), bf16, {"stored": torch.int8}),
        "qwen3 t=64 fp8 blocks": (
            QWEN3_30B_A3B._replace(tokens=64),
            bf16,
            {"stored": torch.float8_e4m3fn, "by": "block"},
        ),
        "qwen3 t=64 int4": (QWEN3_30B_A3B._replace(tokens=64), bf16, {"stored": torch.uint8, "by": "group 128"}),
        "qwen3 t=64 int4 zeros": (
            QWEN3_30B_A3B._replace(tokens=64),
            bf16,
            {"stored": torch.uint8, "by": "group 128 zeros"},
        ),
        "gpt-oss t=16 mxfp4": (GPT_OSS_20B._replace(tokens=16), bf16, GPT_OSS_MXFP4),
        "gpt-oss t=2048 mxfp4": (GPT_OSS_20B._replace(tokens=2048), bf16, GPT_OSS_MXFP4),
        "float32 t=64": (QWEN3_30B_A3B._replace(tokens=64), torch.float32, {"activation": "gelu"}),
    }


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    cases: dict[str, Launch] = {}
    for name, (sizes, dtype, options) in _compiled().items():
        call = example(sizes, dtype, "meta", **options)
        made = config or default(shape_of(key_of(call)), arch)
        for one in launches(call, made, arch):
            part = one.kernel.__name__.removeprefix("_moe_").removesuffix("_kernel")
            # the sort and the sum are the same for all sizes
            if part in ("gate_up", "down") or name == "qwen3 t=64":
                cases[f"{name} {part}"] = one
    return cases

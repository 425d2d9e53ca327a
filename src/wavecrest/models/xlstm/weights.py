"""Names, shapes and order of the parameters, and the ways between single and fused projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.config import xLSTMLargeConfig

# fused projection: its single projections, in the order of its rows
FUSED = {
    "mlstm_layer.qkv_opreact": ("mlstm_layer.q", "mlstm_layer.k", "mlstm_layer.v", "mlstm_layer.ogate_preact"),
    "mlstm_layer.ifgate_preact": ("mlstm_layer.igate_preact", "mlstm_layer.fgate_preact"),
    "ffn.proj_up_gate_z": ("ffn.proj_up_gate", "ffn.proj_up"),
}
_QKVO, _IF, _UP = FUSED
EMBEDDING, LM_HEAD = "embedding.weight", "lm_head.weight"
# transformers' model never has it, whatever use_bias says
OUT_NORM_BIAS = "backbone.out_norm.bias"
# transformers' name of the embedding
HUGGING_FACE_EMBEDDING = "backbone.embeddings.weight"


class Rows(NamedTuple):
    """Rows start to stop of a tensor of a file."""

    key: str
    start: int
    stop: int


def _block(name: str) -> tuple[str, str, str]:
    """(block with its dot, module in the block, parameter) of a name; the first two "" outside of blocks."""
    head, _, parameter = name.rpartition(".")
    parts = head.split(".")
    if len(parts) > 3 and parts[:2] == ["backbone", "blocks"]:
        return ".".join(parts[:3]) + ".", ".".join(parts[3:]), parameter
    return "", head, parameter


def fused_rows(config: xLSTMLargeConfig) -> dict[str, dict[str, int]]:
    """The single projections of each fused one, with their numbers of rows, in order."""
    sizes = {
        _QKVO: (config.qk_dim, config.qk_dim, config.v_dim, config.v_dim),
        _IF: (config.num_heads, config.num_heads),
        _UP: (config.ffn_dim, config.ffn_dim),
    }
    return {name: dict(zip(FUSED[name], sizes[name], strict=True)) for name in FUSED}


def shapes(config: xLSTMLargeConfig, weight_mode: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; a tied lm_head is not among them."""
    d = config.embedding_dim
    linears: dict[str, tuple[int, int]] = {}
    for fused, rows in fused_rows(config).items():
        parts = {fused: sum(rows.values())} if weight_mode == "fused" else rows
        linears |= {name: (count, d) for name, count in parts.items()}
    linears |= {"mlstm_layer.out_proj": (d, config.v_dim), "ffn.proj_down": (d, config.ffn_dim)}
    norms = {"norm_mlstm": d, "mlstm_layer.multihead_norm": config.v_dim, "norm_ffn": d}
    block: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    block |= {f"{name}.weight": (size,) for name, size in norms.items()}
    gates = (_IF, *FUSED[_IF])
    block |= {f"{name}.bias": (shape[0],) for name, shape in linears.items() if config.use_bias or name in gates}
    if config.use_bias:
        block |= {f"{name}.bias": (size,) for name, size in norms.items()}
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, d)}
    for index in range(config.num_blocks):
        found |= {f"backbone.blocks.{index}.{name}": shape for name, shape in block.items()}
    if config.add_out_norm:
        found |= {"backbone.out_norm.weight": (d,)}
        found |= {OUT_NORM_BIAS: (d,)} if config.use_bias else {}
    if not config.tie_word_embeddings:
        found[LM_HEAD] = (config.vocab_size, d)
    return found


def sources(name: str, config: xLSTMLargeConfig, weight_mode: str, count: int) -> list[Rows]:
    """The parts of stored tensors, saved in `weight_mode`, that make up the `count` rows of parameter `name`, in order.

    `name` may be the parameter of a single or of a fused projection.
    """
    block, module, parameter = _block(name)
    rows = fused_rows(config)
    if module in rows and weight_mode == "single":
        return [Rows(f"{block}{single}.{parameter}", 0, part) for single, part in rows[module].items()]
    if weight_mode == "fused":
        for fused, parts in rows.items():
            start = 0
            for single, part in parts.items():
                if single == module:
                    return [Rows(f"{block}{fused}.{parameter}", start, start + part)]
                start += part
    return [Rows(name, 0, count)]


def weight_mode_of(names: list[str] | Mapping[str, object]) -> str:
    """ "fused" where one of the names is that of a fused projection, else "single"."""
    return "fused" if any(_block(name)[1] in FUSED for name in names) else "single"


def convert_single_weights_to_fused_weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with fused projections from one with single ones; the argument is not changed.

    Rows are in the order q, k, v, o; i, f; gate, up. All else is passed on as it is.

    Raises:
        InvalidArgument: one of the single projections that make up a fused one is missing.
    """
    found: dict[str, Tensor] = {}
    whole = {single: fused for fused, singles in FUSED.items() for single in singles}
    for name, tensor in state_dict.items():
        block, module, parameter = _block(name)
        fused = whole.get(module)
        if fused is None:
            found[name] = tensor
            continue
        if f"{block}{fused}.{parameter}" in found:
            continue
        names = [f"{block}{single}.{parameter}" for single in FUSED[fused]]
        missing = [one for one in names if one not in state_dict]
        if missing:
            raise InvalidArgument(f"{block}{fused}.{parameter} needs {', '.join(missing)}, which the weights lack")
        found[f"{block}{fused}.{parameter}"] = torch.cat([state_dict[one] for one in names])
    return found


def convert_fused_weights_to_single_weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `convert_single_weights_to_fused_weights`: rows of the fused tensors, which share their memory.

    Raises:
        InvalidArgument: a tensor has no such rows, or the norm of a block's heads, which says how many are v's, is
            missing.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        block, module, parameter = _block(name)
        if module not in FUSED:
            found[name] = tensor
            continue
        for single, rows in zip(FUSED[module], _split(state_dict, name, block, module), strict=True):
            found[f"{block}{single}.{parameter}"] = rows
    return found


def _split(state_dict: Mapping[str, Tensor], name: str, block: str, module: str) -> tuple[Tensor, ...]:
    tensor = state_dict[name]
    total, halves = tensor.shape[0], len(FUSED[module]) == 2
    if halves:
        sizes = [total // 2] * 2
    else:
        norm = state_dict.get(f"{block}mlstm_layer.multihead_norm.weight")
        if norm is None:
            raise InvalidArgument(f"{name} cannot be split without {block}mlstm_layer.multihead_norm.weight")
        qk = total // 2 - norm.shape[0]
        sizes = [qk, qk, norm.shape[0], norm.shape[0]]
    if sum(sizes) != total or min(sizes) < 1:
        raise InvalidArgument(f"{name} has {total} rows, which are not those of {', '.join(FUSED[module])}")
    return tuple(torch.split(tensor, sizes))

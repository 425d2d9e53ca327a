"""The parameters of the functions of aiter that wavecrest calls, by version, and a check against a real checkout.

    python -m tests.unit.aiter_signatures CHECKOUT

A checkout is a clone of ROCm/aiter at any commit: its sources are parsed and not imported. Facts alone are kept here:
the names in their order, and which of them have a default ("?" after the name).
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

# a function and its file
Place = tuple[str, str]
TUNED, A8W8, MHA = "aiter/tuned_gemm.py", "aiter/ops/gemm_op_a8w8.py", "aiter/ops/mha.py"
FLYDSL = "aiter/ops/flydsl/gemm_kernels.py"
_DENSE = (
    "q k v dropout_p? softmax_scale? causal? window_size? bias? alibi_slopes? deterministic? return_lse? "
    "return_attn_probs? how_v3_bf16_cvt? cu_seqlens_q? cu_seqlens_kv?"
)
_PACKED = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_q? dropout_p? softmax_scale? "
    "logits_soft_cap? causal? window_size? bias? alibi_slopes? deterministic? return_lse? return_attn_probs? "
    "how_v3_bf16_cvt? block_table? out? cu_seqlens_q_padded? cu_seqlens_k_padded?"
)
_TILES = "a b out? * bias? tile_m? tile_n? tile_k? pack_n? split_k? block_m_warps? block_n_warps?"
_MORE_TILES = (
    "n_tile_repeat? persistent_n_tiles? waves_per_eu? b_to_lds_unroll? stages? async_copy? b_to_lds? b_preshuffle? "
    "auto_shuffle_b? c_to_lds? kernel_family? stream?"
)
_GEMM: dict[Place, str] = {
    (TUNED, "gemm_a16w16"): "A B bias? otype? scale_a? scale_b? scale_c?",
    (A8W8, "gemm_a8w8"): "XQ WQ x_scale w_scale bias? dtype? splitK?",
    (A8W8, "gemm_a8w8_bpreshuffle"): "XQ WQ x_scale w_scale bias? dtype? check?",
    (A8W8, "gemm_a8w8_blockscale"): "XQ WQ x_scale w_scale dtype? isBpreshuffled?",
}
# by commit: the parameters of each function that it has
SNAPSHOTS: dict[str, dict[Place, str]] = {
    # 2026-08-22
    "e4048607a535ace3a2b51ded31b1c8c2d45c0879": {
        **_GEMM,
        (MHA, "flash_attn_func"): f"{_DENSE} sink_ptr? num_splits?",
        (MHA, "flash_attn_varlen_func"): f"{_PACKED} sink_ptr?",
        (FLYDSL, "flydsl_hgemm"): f"{_TILES} block_k_warps? {_MORE_TILES}",
    },
    # 2026-05-01
    "a85874151d": {
        **_GEMM,
        (MHA, "flash_attn_func"): f"{_DENSE} sink_ptr?",
        (MHA, "flash_attn_varlen_func"): f"{_PACKED} sink_ptr?",
        (FLYDSL, "flydsl_hgemm"): f"{_TILES} {_MORE_TILES}",
    },
    # v0.1.9, 2025-12-22
    "v0.1.9": {
        **_GEMM,
        (MHA, "flash_attn_func"): _DENSE,
        (MHA, "flash_attn_varlen_func"): _PACKED,
    },
}
_ATTENTION = ("alibi_slopes", "causal", "return_lse", "softmax_scale", "window_size")
# the calls of the backends: arguments by position, and by name those that some call has
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "gemm_a16w16": (2, ("bias", "otype")),
    "gemm_a8w8": (4, ("dtype",)),
    "gemm_a8w8_bpreshuffle": (4, ("dtype",)),
    "gemm_a8w8_blockscale": (4, ("dtype",)),
    "flash_attn_func": (3, (*_ATTENTION, "bias")),
    "flash_attn_varlen_func": (7, (*_ATTENTION, "logits_soft_cap")),
    "flydsl_hgemm": (
        2,
        ("b_to_lds", "bias", "block_m_warps", "block_n_warps", "split_k", "stages", "tile_k", "tile_m", "tile_n"),
    ),
}


def signature(text: str) -> inspect.Signature:
    """The signature that a line of `SIGNATURES` describes."""
    kind, made = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for word in text.split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        default = None if word.endswith("?") else inspect.Parameter.empty
        made.append(inspect.Parameter(word.removesuffix("?"), kind, default=default))
    return inspect.Signature(made)


def misfit(text: str, name: str) -> str:
    """Why the call of a function does not fit the parameters that a line describes; "" if it does."""
    count, names = CALLS[name]
    try:
        signature(text).bind(*range(count), **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return ""


def described(source: str, name: str) -> str | None:
    """A function's parameters as `SIGNATURES` has them, from the text of its module; None if it is not there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            given = node.args
            required = len(given.args) - len(given.defaults)
            words = [argument.arg + "?" * (place >= required) for place, argument in enumerate(given.args)]
            if given.kwonlyargs:
                words.append("*")
            named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
            return " ".join([*words, *(one.arg + "?" * (default is not None) for one, default in named)])
    return None


def report(checkout: Path) -> tuple[list[str], bool]:
    """A line for each function of a checkout, and whether all of wavecrest's calls fit.

    FlyDSL's may be missing: the backend says so where it is.
    """
    lines, fits = [], True
    newest = next(iter(SNAPSHOTS.values()))
    for (file, name), known in newest.items():
        path = checkout / file
        there = described(path.read_text(encoding="utf-8"), name) if path.is_file() else None
        problem = "is not there" if there is None else misfit(there, name)
        fits = fits and (not problem or (there is None and file == FLYDSL))
        said = problem or ("is as it was read" if there == known else f"has other parameters, which fit: {there}")
        lines.append(f"{file} {name} {said}")
    return lines, fits


def main() -> int:
    """Look at the checkout of the command line; 2 if a call does not fit."""
    lines, fits = report(Path(sys.argv[1]))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fits else 2


if __name__ == "__main__":
    sys.exit(main())

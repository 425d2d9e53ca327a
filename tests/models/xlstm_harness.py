"""Shared by the tests of xLSTM: a small model whose parts all matter, and the model in float64 from its formulas."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wavecrest.measure import numerics
from wavecrest.models.xlstm import xLSTMLarge, xLSTMLargeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 61


def config(**changes: Any) -> xLSTMLargeConfig:
    """Two blocks of 3 heads with 6 and 12 columns; an MLP of 128."""
    values: dict[str, Any] = {
        "embedding_dim": 36, "num_heads": 3, "num_blocks": 2, "vocab_size": VOCABULARY, "mode": "inference",
        "return_last_states": True, "force_bos_token_insert": False, "eos_token_id": None,
    }  # fmt: skip
    return xLSTMLargeConfig(**(values | changes))


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Parameters that all show in the result: fresh ones have gates that see nothing and cells that add 1e-5."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 2:
            values /= math.sqrt(parameter.shape[1])
        elif "norm" in name and name.endswith("weight"):
            values = 1 + values / 4
        elif "norm" not in name and "gate" in name:
            # about 0 for input gates, 2 for forget gates
            values += 2.0 if "fgate" in name and "ifgate" not in name else 0.0
        parameter.copy_(values)


def build(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> xLSTMLarge:
    """A model with random parameters; the same ones for single and fused weights."""
    single = xLSTMLarge(config(**(changes | {"weight_mode": "single"})))
    randomize(single, seed)
    model = single
    if changes.get("weight_mode", "single") == "fused":
        from wavecrest.models.xlstm import convert_single_weights_to_fused_weights

        model = xLSTMLarge(config(**changes))
        model.load_state_dict(convert_single_weights_to_fused_weights(single.state_dict()))
    return model.to(DEVICE, dtype).eval().requires_grad_(False)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, shape, generator=generator).to(DEVICE)


def _norm(x: Tensor, w: Mapping[str, Tensor], name: str, eps: float) -> Tensor:
    y = x / torch.sqrt((x * x).mean() + eps) * w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _linear(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    y = w[f"{name}.weight"] @ x
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def oracle(model: xLSTMLarge, row: Tensor) -> Tensor:
    """Logits [S, V] of the tokens [S] of one row in float64: true states C = c·eᵐ, N = n·eᵐ, no stabilizer.

    h = C q / (max(|N q|, 1) + eps·eᵐ), with m as the recurrence has it, since eps stands beside it. The model has
    single weights.
    """
    c, eps = model.config, model.config.norm_eps
    w = {name: value.detach().cpu().double() for name, value in model.state_dict().items()}
    heads, dk, dv = c.num_heads, c.qk_dim // c.num_heads, c.v_dim // c.num_heads
    states: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    found = []
    for token in row.tolist():
        x = w["embedding.weight"][token]
        for b in range(c.num_blocks):
            p = f"backbone.blocks.{b}."
            n = _norm(x, w, p + "norm_mlstm", eps)
            q, k, v, o, i, f = (
                _linear(n, w, p + "mlstm_layer." + part)
                for part in ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
            )
            i, f = _capped(i, c.gate_soft_cap), _capped(f, c.gate_soft_cap)
            out = []
            for h in range(heads):
                one = torch.zeros((), dtype=torch.float64)
                big, small, m = states.get((b, h), (torch.zeros(dk, dv).double(), torch.zeros(dk).double(), one))
                key, value, query = k[h * dk :][:dk], v[h * dv :][:dv], q[h * dk :][:dk] / math.sqrt(dk)
                forget = torch.sigmoid(f[h])
                m = torch.maximum(torch.log(forget) + m, i[h])
                big, small = forget * big + i[h].exp() * torch.outer(key, value), forget * small + i[h].exp() * key
                states[b, h] = (big, small, m)
                y = query @ big / (torch.maximum((query @ small).abs(), one + 1) + c.eps * m.exp())
                out.append((y - y.mean()) / torch.sqrt(y.var(unbiased=False) + eps))
            y = torch.cat(out) * w[p + "mlstm_layer.multihead_norm.weight"]
            if c.use_bias:
                y = y + w[p + "mlstm_layer.multihead_norm.bias"]
            x = x + _linear(torch.sigmoid(o) * y, w, p + "mlstm_layer.out_proj")
            n = _norm(x, w, p + "norm_ffn", eps)
            gate, up = _linear(n, w, p + "ffn.proj_up_gate"), _linear(n, w, p + "ffn.proj_up")
            x = x + _linear(gate * torch.sigmoid(gate) * up, w, p + "ffn.proj_down")
        if c.add_out_norm:
            x = _norm(x, w, "backbone.out_norm", eps)
        found.append(_capped(w["lm_head.weight"] @ x, c.output_logit_soft_cap))
    return torch.stack(found)


def close(found: Tensor, wanted: Tensor, dtype: str = "float32") -> None:
    """Within the project's limits for whole models (`numerics.TOLERANCES`)."""
    result = numerics.compare(found.cpu(), wanted.cpu())
    assert result.within(numerics.tolerance("model", dtype)), result


def native(seed: int = 0, **changes: Any) -> Any:
    """transformers' own xLSTM, of sizes that its cache can hold (multiples of 64), with random parameters."""
    from transformers import xLSTMConfig, xLSTMForCausalLM

    sizes = {"hidden_size": 128, "embedding_dim": 128, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = xLSTMForCausalLM(xLSTMConfig(**(sizes | {"vocab_size": VOCABULARY, "eos_token_id": None} | changes)))
    randomize(model, seed)
    return model.to(DEVICE).eval().requires_grad_(False)


class Graph:
    """A graph as far as a decoder can tell: its replay does the work again, into the memory of the first result."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work = work
        self.output = work().fill_(float("nan"))
        self.replays = 0

    # autograd sees nothing of one
    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self.work())

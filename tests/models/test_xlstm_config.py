"""The configuration of xLSTM Large: both vocabularies, widths as checkpoints have them, and what does not fit."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import soft_cap, xLSTMModel

from wavecrest.errors import CheckpointError, InvalidArgument, UserError
from wavecrest.models.xlstm import ConfigWarning, xLSTMLargeConfig

SIZES: dict[str, Any] = {"embedding_dim": 64, "num_heads": 4, "num_blocks": 2, "vocab_size": 97}
WITHOUT_XLSTM = pytest.mark.skipif(
    importlib.util.find_spec("xlstm") is not None, reason="transformers takes its kernels where it is installed"
)
# the 7B checkpoint's config.json: the first revisions', and what the newer one has in place of their kernel names
FIRST = {
    "add_embedding_dropout": False, "add_forward_backend_padding": False, "add_out_norm": True,
    "add_post_blocks_norm": True, "add_post_norm": False, "add_qk_norm": False, "architectures": ["xLSTMForCausalLM"],
    "bos_token_id": 0, "cell_norm_eps": 1e-6, "embedding_dim": 4096, "eos_token_id": 2, "ffn_proj_factor": 2.667,
    "ffn_round_up_to_multiple_of": 64, "force_bos_token_insert": True,
    "forward_backend_name": "chunkwise--triton_limit_chunk", "gate_soft_cap": 15.0, "head_dim": 512,
    "igate_bias_init_range": -10.0, "mlstm_round_up_to_multiple_of": 64, "model_type": "xlstm", "norm_eps": 1e-6,
    "norm_reduction_force_float32": True, "num_blocks": 32, "num_heads": 8, "output_logit_soft_cap": 30.0,
    "pad_token_id": 1, "qk_dim_factor": 0.5, "return_last_states": True, "step_backend_name": "triton_fused",
    "tie_word_embeddings": False, "torch_dtype": "float32", "use_bias": False, "v_dim_factor": 1.0,
    "vocab_size": 50304,
}  # fmt: skip
NEWER = {name: value for name, value in FIRST.items() if not name.endswith("_backend_name")} | {
    "chunkwise_kernel": "chunkwise--triton_xl_chunk", "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton", "weight_mode": "single", "mode": "inference", "hidden_size": 4096,
    "num_hidden_layers": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("features", "factor", "width"),
    [(768, 2.6667, 2048), (4096, 2.667, 10944), (4096, 2.6667, 10944), (1024, 2.6667, 2752), (512, 2.6667, 1408)],
)
def test_the_mlp_is_as_wide_as_that_of_checkpoints(features: int, factor: float, width: int) -> None:
    config = xLSTMLargeConfig(features, 4, 1, 10, ffn_proj_factor=factor)
    assert config.ffn_dim == width
    assert (config.qk_dim, config.v_dim) == (features // 2, features)


@pytest.mark.parametrize("values", [FIRST, NEWER], ids=["first", "newer"])
def test_both_vocabularies_of_hugging_face(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = xLSTMLargeConfig.from_folder(tmp_path)
    assert (config.embedding_dim, config.num_blocks, config.num_heads, config.ffn_dim) == (4096, 32, 8, 10944)
    assert config.chunkwise_kernel == values.get("forward_backend_name", "chunkwise--triton_xl_chunk")
    assert config.step_kernel == values.get("step_backend_name", "triton")
    assert config.force_bos_token_insert and (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        0,
        2,
        1,
    )


def test_the_official_form(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "embedding_dim: 64\nnum_heads: 4\nnum_blocks: 2\nvocab_size: 97\nstep_kernel: native\ngate_soft_cap: 9.5\n"
    )
    config = xLSTMLargeConfig.from_folder(tmp_path)
    assert (config.step_kernel, config.gate_soft_cap, config.ffn_proj_factor) == ("native", 9.5, 2.6667)
    assert config.force_bos_token_insert


def test_absent_keys_are_those_of_transformers() -> None:
    config = xLSTMLargeConfig.from_dict({"model_type": "xlstm"})
    assert (config.embedding_dim, config.vocab_size, config.ffn_proj_factor) == (4096, 50304, 2.667)
    assert xLSTMLargeConfig.from_dict({"model_type": "xlstm", "embedding_dim": 768, "num_heads": 4}).qk_dim == 384
    # and those that say nothing
    values = {"model_type": "xlstm", "hidden_size": 768, "embedding_dim": None, "num_heads": 4, "eos_token_id": None}
    config = xLSTMLargeConfig.from_dict(values | {"num_hidden_layers": 12, "num_blocks": None})
    assert (config.embedding_dim, config.num_blocks, config.eos_token_id) == (768, 12, None)


def test_unknown_keys_are_named_once() -> None:
    with pytest.warns(ConfigWarning, match="config: not used: another, colour") as seen:
        config = xLSTMLargeConfig.from_dict(SIZES | {"colour": "red", "another": 1})
    assert len(seen) == 1 and config == xLSTMLargeConfig(**SIZES)
    with pytest.warns(ConfigWarning, match="cell_norm_eps"):
        xLSTMLargeConfig.from_dict(SIZES | {"cell_norm_eps": 1e-3})


def test_a_bfloat16_state_is_not_taken() -> None:
    config = xLSTMLargeConfig(**SIZES, inference_state_dtype="bfloat16")
    with pytest.warns(ConfigWarning, match="decay is lost"):
        assert config.state_dtype == torch.float32
    assert xLSTMLargeConfig(**SIZES, inference_state_dtype="float16").state_dtype == torch.float16


@pytest.mark.parametrize("form", ["official", "huggingface"])
def test_written_and_read_again(form: str) -> None:
    settings: dict[str, Any] = {
        "gate_soft_cap": None,
        "step_kernel": "native",
        "use_bias": True,
        "weight_mode": "fused",
    }
    config = xLSTMLargeConfig(**SIZES, **settings)
    with warnings.catch_warnings():
        # of what transformers has otherwise
        warnings.simplefilter("ignore", ConfigWarning)
        values = config.to_dict(form)
    assert "chunkwise_kernel" not in values and ("tie_word_embeddings" in values) == (form == "huggingface")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = xLSTMLargeConfig.from_dict(json.loads(json.dumps(values)))
    # transformers' blocks need states
    running = {"mode": "inference", "return_last_states": True} if form == "huggingface" else {}
    assert found == xLSTMLargeConfig(**SIZES, **settings, **running)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_heads": 0}, "num_heads must be a whole number from 1 to 16,777,216, got 0"),
        ({"vocab_size": 9.5}, "vocab_size must be"),
        ({"embedding_dim": True}, "embedding_dim must be"),
        ({"num_heads": 5}, "5 heads do not divide qk_dim 32"),
        ({"qk_dim_factor": 0.0}, "qk_dim_factor must be above 0"),
        ({"eps": "small"}, "eps must be above 0"),
        ({"gate_soft_cap": -1.0}, "gate_soft_cap must be a number from 0 on or None"),
        ({"mode": "decode"}, "mode takes train, train_with_padding, inference, not 'decode'"),
        ({"weight_mode": "both"}, "weight_mode takes single, fused"),
        ({"inference_state_dtype": "int8"}, "inference_state_dtype takes float32"),
        ({"autocast_kernel_dtype": "half"}, "autocast_kernel_dtype takes float32, bfloat16, float16, not 'half'"),
        ({"use_bias": 1}, "use_bias must be True or False, got 1"),
        ({"norm_reduction_force_float32": "no"}, "norm_reduction_force_float32 must be True or False"),
        ({"add_out_norm": None}, "add_out_norm must be"),
        ({"return_last_states": 1}, "return_last_states must be"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings must be"),
        ({"force_bos_token_insert": "yes"}, "force_bos_token_insert must be"),
        ({"bos_token_id": 97}, "bos_token_id is 97, tokens are from 0 to 96"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"bos_token_id": "<s>"}, "bos_token_id must be a whole number or None, got '<s>'"),
        ({"pad_token_id": 1.0}, "pad_token_id must be a whole number or None, got 1.0"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a whole number, a list of them or None"),
        ({"eos_token_id": False}, "eos_token_id must be"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be"),
        (
            {"chunkwise_kernel": "chunkwise--fast"},
            "no chunkwise kernel 'chunkwise--fast'; there are auto, chunkwise--nat",
        ),
        ({"step_kernel": None}, "no step kernel None; there are auto, native, triton"),
        ({"sequence_kernel": "triton"}, "no sequence kernel 'triton'; there are auto, native_sequence__native"),
        ({"mode": "train_with_padding", "return_last_states": True}, "train_with_padding returns no states"),
        ({"chunkwise_kernel": "parallel--native_autograd", "return_last_states": True}, "has no states"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        xLSTMLargeConfig(**(SIZES | changes))


def test_tokens_that_are_not_read_may_be_outside_of_the_vocabulary() -> None:
    config = xLSTMLargeConfig(**SIZES, bos_token_id=None, eos_token_id=[2, 97], pad_token_id=-1)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [2, 97], -1)


def _for_transformers(**changes: Any) -> Any:
    """A configuration of wavecrest as transformers reads it."""
    return xLSTMConfig.from_dict(json.loads(json.dumps(xLSTMLargeConfig(**(SIZES | changes)).to_dict("huggingface"))))


def test_transformers_reads_what_is_written_for_it() -> None:
    whole = {"gate_soft_cap": 15, "output_logit_soft_cap": 30, "qk_dim_factor": 1, "eps": 1, "ffn_proj_factor": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _for_transformers(**whole, step_kernel="native", pad_token_id=None)
    assert found.gate_soft_cap == 15.0 and found.qk_dim_factor == 1.0 and found.hidden_size == 64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gate_soft_cap": None}, "gate_soft_cap=None"),
        ({"output_logit_soft_cap": None}, "output_logit_soft_cap=None"),
        pytest.param(
            {"step_kernel": "triton"}, r"step_kernel=triton \(it needs the package xlstm", marks=WITHOUT_XLSTM
        ),
        pytest.param({"sequence_kernel": "native_sequence__triton"}, "sequence_kernel=native_s", marks=WITHOUT_XLSTM),
        pytest.param({"chunkwise_kernel": "chunkwise--triton_xl_chunk"}, "chunkwise_kernel=", marks=WITHOUT_XLSTM),
    ],
)
def test_what_transformers_cannot_read_is_named(changes: dict[str, Any], named: str) -> None:
    with (
        pytest.warns(ConfigWarning, match=f"not for transformers .*: {named}"),
        pytest.raises(Exception, match="expected"),
    ):
        _for_transformers(**changes)


def test_what_transformers_computes_otherwise_is_named() -> None:
    with pytest.warns(ConfigWarning, match=r"gate_soft_cap=0 \(it divides by a number\); add_out_norm=False"):
        model = xLSTMModel(_for_transformers(gate_soft_cap=0, add_out_norm=False))
    assert model.out_norm.weight is not None and bool(soft_cap(torch.zeros(1), model.config.gate_soft_cap).isnan())
    with pytest.warns(ConfigWarning, match="use_bias=True"):
        model = xLSTMModel(_for_transformers(use_bias=True))
    assert model.out_norm.bias is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "llama"}, "of a model of type 'llama'"),
        (SIZES | {"hidden_size": 128}, "embedding_dim is 64, hidden_size 128"),
        (SIZES | {"add_qk_norm": True}, "add_qk_norm is set; this architecture has no such part"),
        (SIZES | {"head_dim": 32}, "head_dim is 32, v_dim 64 of 4 heads"),
        ({"num_heads": 4}, "lacks embedding_dim, num_blocks, vocab_size"),
    ],
)
def test_files_of_something_else(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        xLSTMLargeConfig.from_dict(values)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[1]", "it holds list"),
        ("config.yaml", "a: [", "config.yaml is damaged"),
        ("config.yaml", "embedding_dim: 64\nnum_heads: 5\nnum_blocks: 1\nvocab_size: 9", "config.yaml: .*5 heads"),
        ("other.json", "{}", "neither config.json nor config.yaml"),
    ],
)
def test_damaged_files(name: str, text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=reason) as error:
        xLSTMLargeConfig.from_folder(tmp_path)
    assert isinstance(error.value, UserError) and error.value.exit_code == 1


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="form takes official, huggingface, not 'onnx'"):
        xLSTMLargeConfig(**SIZES).to_dict("onnx")

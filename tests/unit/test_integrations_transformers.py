"""One line makes `attn_implementation="wavecrest"` known (masks, caches: tests/optimizer/test_replace_attention.py)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from wavecrest.errors import MissingDependency
from wavecrest.integrations import transformers as integration
from wavecrest.nn import attention

transformers = pytest.importorskip("transformers")


def test_the_name_is_taken_where_transformers_takes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "wavecrest", raising=False)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip

    def made(name: str) -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()

    with pytest.raises(ValueError, match="wavecrest"):
        made("wavecrest")
    integration.enable()
    integration.enable()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad(), attention.watching() as calls:
        torch.testing.assert_close(made("wavecrest")(ids).logits, made("eager")(ids).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependency, match="pip install transformers"):
        integration.enable()

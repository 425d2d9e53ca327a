"""The checkpoint of xLSTM 7B by its sizes: names, shapes and number of parameters, without memory."""

from __future__ import annotations

import math

import pytest

from tests.models.test_xlstm_config import FIRST
from wavecrest.models.xlstm import xLSTMLarge, xLSTMLargeConfig
from wavecrest.models.xlstm.weights import shapes


@pytest.mark.parametrize(("weight_mode", "tensors"), [("single", 483), ("fused", 291)])
def test_sizes(weight_mode: str, tensors: int) -> None:
    config = xLSTMLargeConfig.from_dict(FIRST | {"weight_mode": weight_mode})
    model = xLSTMLarge(config, device="meta")
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert found == shapes(config, weight_mode)
    assert len(found) == tensors
    assert sum(math.prod(shape) for shape in found.values()) == 6_865_424_896
    block = "backbone.blocks.31."
    if weight_mode == "fused":
        assert found[block + "mlstm_layer.qkv_opreact.weight"] == (12288, 4096)
        assert found[block + "mlstm_layer.ifgate_preact.bias"] == (16,)
        assert found[block + "ffn.proj_up_gate_z.weight"] == (21888, 4096)
    else:
        assert found[block + "mlstm_layer.k.weight"] == (2048, 4096)
        assert found[block + "ffn.proj_up.weight"] == (10944, 4096)

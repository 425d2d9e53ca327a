"""Denoising networks of image generators."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.zoo.registry import Site, Size, model
from torch import nn

HALF = "float16"


@model("dit-xl-2", library="diffusers", unit="images", gpu=Size(8, 32, HALF), tiny=Size(2, 8))
def dit_xl_2(site: Site) -> tuple[nn.Module, Any]:
    """DiT-XL/2 on latents of 32 x 32: one step of denoising."""
    from diffusers import DiTTransformer2DModel

    full = {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72, "num_embeds_ada_norm": 1000}
    tiny = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "num_embeds_ada_norm": 10}
    shapes = site.either(full, tiny)
    network = DiTTransformer2DModel(sample_size=site.length, in_channels=4, out_channels=8, patch_size=2, **shapes)
    latents = site.noise(site.batch, 4, site.length, site.length)
    return network, {
        "hidden_states": latents,
        "timestep": torch.full((site.batch,), 5, device=site.device),
        "class_labels": torch.arange(site.batch, device=site.device),
        "return_dict": False,
    }


@model("unet-sd15", library="diffusers", unit="images", gpu=Size(2, 64, HALF), tiny=Size(1, 16))
def unet_sd15(site: Site) -> tuple[nn.Module, Any]:
    """The UNet of Stable Diffusion 1.5 on latents of 64 x 64: one step of denoising."""
    from diffusers import UNet2DConditionModel

    full = {"block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768, "attention_head_dim": 8}
    tiny = {
        "block_out_channels": (32, 64), "cross_attention_dim": 32, "attention_head_dim": 4, "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "norm_num_groups": 8,
    }  # fmt: skip
    shapes: dict[str, Any] = site.either(full, tiny)
    network = UNet2DConditionModel(sample_size=site.length, **shapes)
    return network, {
        "sample": site.noise(site.batch, 4, site.length, site.length),
        "timestep": torch.tensor(5, device=site.device),
        "encoder_hidden_states": site.noise(site.batch, 77, shapes["cross_attention_dim"]),
        "return_dict": False,
    }

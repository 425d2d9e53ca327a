"""Models of images."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.registry import Site, Size, model
from torch import nn

HALF = "float16"
# classes of the head of a full model, and of a tiny one
CLASSES, FEW = 1000, 10


def _resnet(site: Site, block: str, layers: list[int]) -> tuple[nn.Module, Any]:
    from torchvision.models import resnet

    blocks = site.either(layers, [1, 1, 1, 1])
    return resnet.ResNet(getattr(resnet, block), blocks, num_classes=site.either(CLASSES, FEW)), site.images()


@model(
    "resnet-18", library="torchvision", unit="images",
    gpu=Size(64, 224, HALF), cpu=Size(1, 224), tiny=Size(2, 32),
)  # fmt: skip
def resnet_18(site: Site) -> tuple[nn.Module, Any]:
    """ResNet-18."""
    return _resnet(site, "BasicBlock", [2, 2, 2, 2])


@model(
    "resnet-50", library="torchvision", unit="images",
    gpu=Size(64, 224, HALF), cpu=Size(2, 224), tiny=Size(2, 32),
)  # fmt: skip
def resnet_50(site: Site) -> tuple[nn.Module, Any]:
    """ResNet-50."""
    return _resnet(site, "Bottleneck", [3, 4, 6, 3])


@model(
    "resnet-152", library="torchvision", unit="images",
    gpu=Size(32, 224, HALF), cpu=Size(1, 224), tiny=Size(2, 32),
)  # fmt: skip
def resnet_152(site: Site) -> tuple[nn.Module, Any]:
    """ResNet-152."""
    return _resnet(site, "Bottleneck", [3, 8, 36, 3])


@model(
    "mobilenet-v3", library="torchvision", unit="images",
    gpu=Size(64, 224, HALF), cpu=Size(4, 224), tiny=Size(2, 32),
)  # fmt: skip
def mobilenet_v3(site: Site) -> tuple[nn.Module, Any]:
    """MobileNetV3, large (small in tests)."""
    from torchvision import models

    make = site.either(models.mobilenet_v3_large, models.mobilenet_v3_small)
    return make(weights=None, num_classes=site.either(CLASSES, FEW)), site.images()


@model("efficientnet-b0", library="torchvision", unit="images", gpu=Size(64, 224, HALF), tiny=Size(2, 32))
def efficientnet_b0(site: Site) -> tuple[nn.Module, Any]:
    """EfficientNet-B0."""
    from torchvision import models

    return models.efficientnet_b0(weights=None, num_classes=site.either(CLASSES, FEW)), site.images()


@model("vit-b16", library="torchvision", unit="images", gpu=Size(64, 224, HALF), tiny=Size(2, 32))
def vit_b16(site: Site) -> tuple[nn.Module, Any]:
    """ViT-B/16."""
    from torchvision.models import VisionTransformer

    shapes = site.either(
        {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072, "num_classes": CLASSES},
        {"num_layers": 2, "num_heads": 2, "hidden_dim": 64, "mlp_dim": 128, "num_classes": FEW},
    )
    return VisionTransformer(image_size=site.length, patch_size=16, **shapes), site.images()


def _timm(site: Site, name: str, tiny: dict[str, Any]) -> tuple[nn.Module, Any]:
    import timm

    changes = site.either({}, {"num_classes": FEW, **tiny})
    return timm.create_model(name, pretrained=False, **changes), site.images()


@model("deit-small", library="timm", unit="images", gpu=Size(64, 224, HALF), tiny=Size(2, 32))
def deit_small(site: Site) -> tuple[nn.Module, Any]:
    """DeiT-S/16."""
    return _timm(site, "deit_small_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2})


@model("swin-tiny", library="timm", unit="images", gpu=Size(64, 224, HALF), tiny=Size(2, 64))
def swin_tiny(site: Site) -> tuple[nn.Module, Any]:
    """Swin-T."""
    changes = {"img_size": 64, "window_size": 4, "depths": (2, 2), "embed_dim": 32, "num_heads": (1, 2)}
    return _timm(site, "swin_tiny_patch4_window7_224", changes)


@model("convnext-tiny", library="timm", unit="images", gpu=Size(64, 224, HALF), tiny=Size(2, 64))
def convnext_tiny(site: Site) -> tuple[nn.Module, Any]:
    """ConvNeXt-T."""
    return _timm(site, "convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (16, 32, 64, 64)})


@model("detr-resnet-50", library="transformers", unit="images", gpu=Size(4, 800, HALF), tiny=Size(1, 64))
def detr_resnet_50(site: Site) -> tuple[nn.Module, Any]:
    """DETR with a ResNet-50 backbone, both of transformers."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        out_features=["stage4"],
        **site.either({}, {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64], "embedding_size": 16}),
    )
    tiny = {
        "encoder_layers": 1, "decoder_layers": 1, "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 10,
    }  # fmt: skip
    config = DetrConfig(backbone_config=backbone, **site.either({}, tiny))
    return DetrForObjectDetection(config), {"pixel_values": site.images()}


@model("clip-vit-b32", library="transformers", unit="pairs", gpu=Size(64, 224, HALF), tiny=Size(2, 32))
def clip_vit_b32(site: Site) -> tuple[nn.Module, Any]:
    """CLIP ViT-B/32: images and texts of 77 tokens."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=site.either({}, {**tiny, "vocab_size": 512, "eos_token_id": 2, "max_position_embeddings": 16}),
        vision_config={"image_size": site.length, "patch_size": 32, **site.either({}, {**tiny, "patch_size": 16})},
    )
    ids = site.tokens(config.text_config.vocab_size, site.batch, config.text_config.max_position_embeddings)
    # the answer is read where a text ends
    ids[:, -1] = config.text_config.eos_token_id
    return CLIPModel(config), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": site.images(),
    }

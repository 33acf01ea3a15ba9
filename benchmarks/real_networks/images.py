"""Networks on images, of MONAI, efficientnet_pytorch, timm and torchvision."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.real_networks.registry import (
    BUILDERS,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    Made,
    built_by,
    next_tokens,
    normal,
    tokens,
)


def images(model: torch.nn.Module, *shape: int, classes: int = 5) -> Made:
    batch = {"x": normal(*shape), "y": tokens(1, classes)[:, 0]}

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        made = model(batch["x"])
        return F.cross_entropy(made[0] if isinstance(made, tuple) else made, batch["y"])

    return model, batch, loss


def masks(model: torch.nn.Module, *shape: int, classes: int = 2) -> Made:
    batch = {"x": normal(*shape), "y": torch.randint(0, classes, (SAMPLES, *shape[1:]))}

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        made = model(batch["x"])
        return F.cross_entropy(made[0] if isinstance(made, (tuple, list)) else made, batch["y"])

    return model, batch, loss


@built_by("monai")
def resnet18() -> Made:
    from monai.networks.nets import resnet18

    return images(resnet18(spatial_dims=2, n_input_channels=3, num_classes=5), 3, 48, 48)


@built_by("monai")
def densenet() -> Made:
    from monai.networks.nets import DenseNet

    return images(
        DenseNet(spatial_dims=2, in_channels=3, out_channels=5, init_features=8, growth_rate=4, block_config=(2, 2, 2)),
        3, 48, 48,
    )  # fmt: skip


@built_by("monai")
def efficientnet() -> Made:
    from monai.networks.nets import EfficientNetBN

    return images(
        EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=3, num_classes=5), 3, 64, 64
    )


@built_by("monai")
def vit() -> Made:
    from monai.networks.nets import ViT

    return images(
        ViT(in_channels=3, img_size=16, patch_size=4, hidden_size=32, mlp_dim=64, num_layers=3, num_heads=2,
            classification=True, num_classes=5, spatial_dims=2),
        3, 16, 16,
    )  # fmt: skip


@built_by("monai")
def unet() -> Made:
    from monai.networks.nets import UNet

    return masks(
        UNet(spatial_dims=2, in_channels=3, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        3, 32, 32,
    )  # fmt: skip


@built_by("monai")
def attention_unet() -> Made:
    from monai.networks.nets import AttentionUnet

    return masks(
        AttentionUnet(spatial_dims=2, in_channels=3, out_channels=2, channels=(8, 16, 32), strides=(2, 2)), 3, 32, 32
    )


@built_by("monai")
def swin_unetr() -> Made:
    from monai.networks.nets import SwinUNETR

    return masks(SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2), 1, 64, 64)


@built_by("monai")
def seg_resnet() -> Made:
    from monai.networks.nets import SegResNet

    return masks(
        SegResNet(spatial_dims=2, in_channels=3, out_channels=2, init_filters=8, blocks_down=(1, 2), blocks_up=(1,)),
        3, 32, 32,
    )  # fmt: skip


@built_by("monai")
def vnet() -> Made:
    from monai.networks.nets import VNet

    return masks(VNet(spatial_dims=2, in_channels=1, out_channels=2, dropout_dim=2), 1, 32, 32)


@built_by("monai")
def language_model() -> Made:
    from monai.networks.nets import DecoderOnlyTransformer

    model = DecoderOnlyTransformer(
        num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers_dim=32, attn_layers_depth=3, attn_layers_heads=2
    )
    return model, {"x": tokens(LENGTH, VOCABULARY)}, next_tokens


@built_by("efficientnet_pytorch")
def efficientnet_b0() -> Made:
    from efficientnet_pytorch import EfficientNet

    return images(EfficientNet.from_name("efficientnet-b0", num_classes=5, image_size=64), 3, 64, 64)


TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "convnext_atto": {"dims": (16, 32, 48, 64), "depths": (1, 1, 2, 1)},
    "regnetx_002": {},
    "mobilenetv3_small_050": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)
    },
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 3, "embed_dim": 48, "num_heads": 3},
    "beit_base_patch16_224": {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 3},
}  # fmt: skip
"""Networks with what makes them small; all take images of 64 × 64, unless told otherwise."""


def timm_model(name: str, options: dict[str, Any]) -> Made:
    import timm

    size = options.get("img_size", 64)
    return images(timm.create_model(name, num_classes=5, **options), 3, size, size)


def torchvision_model(name: str) -> Made:
    import torchvision

    return images(torchvision.models.get_model(name, num_classes=5), 3, 64, 64)


@built_by("timm")
def mlp_mixer() -> Made:
    from timm.models.mlp_mixer import MlpMixer

    return images(MlpMixer(num_classes=5, img_size=64, patch_size=16, num_blocks=3, embed_dim=48), 3, 64, 64)


@built_by("timm")
def poolformer() -> Made:
    from timm.models.metaformer import MetaFormer

    return images(MetaFormer(num_classes=5, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)), 3, 64, 64)


@built_by("timm")
def gated_mlp() -> Made:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    model = MlpMixer(
        num_classes=5, img_size=64, patch_size=16, num_blocks=3, embed_dim=48, mlp_ratio=6,
        block_layer=SpatialGatingBlock, mlp_layer=GatedMlp,
    )  # fmt: skip
    return images(model, 3, 64, 64)


for _name, _options in TIMM.items():
    BUILDERS[f"timm:{_name}"] = lambda name=_name, options=_options: timm_model(name, options)
for _name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "regnet_y_400mf"):
    BUILDERS[f"torchvision:{_name}"] = lambda name=_name: torchvision_model(name)


@built_by("torchvision")
def vision_transformer() -> Made:
    from torchvision.models import VisionTransformer

    return images(
        VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64,
                          num_classes=5),
        3, 32, 32,
    )  # fmt: skip


@built_by("torchvision")
def swin_transformer() -> Made:
    from torchvision.models import SwinTransformer

    return images(
        SwinTransformer(patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4],
                        stochastic_depth_prob=0.1, num_classes=5),
        3, 32, 32,
    )  # fmt: skip


@built_by("torchvision")
def densenet_small() -> Made:
    from torchvision.models import DenseNet

    return images(DenseNet(growth_rate=4, block_config=(2, 2, 2), num_init_features=8, num_classes=5), 3, 64, 64)


@built_by("torchvision")
def convnext_small() -> Made:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 48, 2), CNBlockConfig(48, None, 1)]
    return images(ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=5), 3, 64, 64)

"""Networks of `diffusers`: of images, of video, their autoencoders."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.real_networks.registry import SAMPLES, Made, built_by, normal, sample_of, times, to_target, tokens


@built_by("diffusers")
def unet_2d() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": normal(3, 16, 16), "timestep": times(), "target": normal(3, 16, 16)}, to_target(sample_of)


@built_by("diffusers")
def unet_2d_condition() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    batch = {"sample": normal(4, 8, 8), "timestep": times(), "encoder_hidden_states": normal(6, 32),
             "target": normal(4, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def unet_1d() -> Made:
    from diffusers import UNet1DModel

    model = UNet1DModel(
        sample_size=32, in_channels=4, out_channels=4, block_out_channels=(32, 32, 64), layers_per_block=1,
        extra_in_channels=64, down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"), time_embedding_type="fourier",
        flip_sin_to_cos=True,
    )  # fmt: skip
    return model, {"sample": normal(4, 32), "timestep": times(), "target": normal(4, 32)}, to_target(sample_of)


@built_by("diffusers")
def unet_3d_condition() -> Made:
    from diffusers import UNet3DConditionModel

    model = UNet3DConditionModel(
        sample_size=8, block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=32, attention_head_dim=8,
        layers_per_block=1, norm_num_groups=8,
    )  # fmt: skip
    batch = {"sample": normal(4, 2, 8, 8), "timestep": times(), "encoder_hidden_states": normal(5, 32),
             "target": normal(4, 2, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def dit() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=8,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 8, 8), "timestep": times(), "class_labels": tokens(1, 1000)[:, 0],
             "target": normal(8, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def pixart() -> Made:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        patch_size=2, cross_attention_dim=32, caption_channels=24, norm_num_groups=8, use_additional_conditions=False,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 8, 8), "timestep": times(), "encoder_hidden_states": normal(5, 24),
             "target": normal(8, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def stable_diffusion_3() -> Made:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=20, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 8, 8), "encoder_hidden_states": normal(5, 24),
             "pooled_projections": normal(20), "timestep": times(), "target": normal(4, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def flux() -> Made:
    """Positions of text and image are the same for every sample, and are passed with each."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    image = torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], -1)
    batch = {"hidden_states": normal(16, 4), "encoder_hidden_states": normal(5, 24), "pooled_projections": normal(20),
             "timestep": torch.rand(SAMPLES), "target": normal(16, 4)}  # fmt: skip

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "target"}
        made = model(**given, img_ids=image, txt_ids=torch.zeros(5, 3))
        return F.mse_loss(made.sample, batch["target"])

    return model, batch, loss


@built_by("diffusers")
def aura_flow() -> Made:
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, caption_projection_dim=32, out_channels=4,
        pos_embed_max_size=64,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 8, 8), "encoder_hidden_states": normal(5, 24),
             "timestep": torch.rand(SAMPLES), "target": normal(4, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def hunyuan_dit() -> Made:
    from diffusers import HunyuanDiT2DModel

    model = HunyuanDiT2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, patch_size=2, sample_size=8, hidden_size=16,
        num_layers=4, mlp_ratio=2.0, cross_attention_dim=8, cross_attention_dim_t5=8, pooled_projection_dim=4,
        text_len=4, text_len_t5=4, learn_sigma=False, use_style_cond_and_image_meta_size=False,
    )  # fmt: skip
    rotary = (torch.randn(16, 8), torch.randn(16, 8))
    batch = {"hidden_states": normal(4, 8, 8), "timestep": times().float(), "encoder_hidden_states": normal(4, 8),
             "text_embedding_mask": torch.ones(SAMPLES, 4), "encoder_hidden_states_t5": normal(4, 8),
             "text_embedding_mask_t5": torch.ones(SAMPLES, 4), "target": normal(4, 8, 8)}  # fmt: skip

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "target"}
        return F.mse_loss(model(**given, image_rotary_emb=rotary, return_dict=False)[0], batch["target"])

    return model, batch, loss


@built_by("diffusers")
def cog_video_x() -> Made:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=12, num_layers=3, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=5,
    )  # fmt: skip
    batch = {"hidden_states": normal(2, 4, 8, 8), "encoder_hidden_states": normal(5, 12), "timestep": times(),
             "target": normal(2, 4, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def ltx_video() -> Made:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=3, caption_channels=12, qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    batch = {"hidden_states": normal(16, 4), "encoder_hidden_states": normal(5, 12), "timestep": times(),
             "encoder_attention_mask": torch.ones(SAMPLES, 5), "target": normal(16, 4)}  # fmt: skip

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "target"}
        made = model(**given, num_frames=1, height=4, width=4, return_dict=False)[0]
        return F.mse_loss(made, batch["target"])

    return model, batch, loss


@built_by("diffusers")
def wan() -> Made:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=3, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 2, 8, 8), "timestep": times(), "encoder_hidden_states": normal(5, 16),
             "target": normal(4, 2, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def mochi() -> Made:
    from diffusers import MochiTransformer3DModel

    model = MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=3, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=4, activation_fn="swiglu", max_sequence_length=16,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 2, 8, 8), "timestep": times(), "encoder_hidden_states": normal(5, 16),
             "encoder_attention_mask": torch.ones(SAMPLES, 5, dtype=torch.bool),
             "target": normal(4, 2, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def sana() -> Made:
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12,
        sample_size=8,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 8, 8), "timestep": times(), "encoder_hidden_states": normal(5, 12),
             "target": normal(4, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def lumina_2() -> Made:
    from diffusers import Lumina2Transformer2DModel

    model = Lumina2Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(64, 64, 64),
        cap_feat_dim=16,
    )  # fmt: skip
    batch = {"hidden_states": normal(4, 8, 8), "timestep": torch.rand(SAMPLES),
             "encoder_hidden_states": normal(6, 16),
             "encoder_attention_mask": torch.ones(SAMPLES, 6, dtype=torch.bool), "target": normal(4, 8, 8)}  # fmt: skip
    return model, batch, to_target(sample_of)


@built_by("diffusers")
def qwen_image() -> Made:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    batch = {"hidden_states": normal(16, 16), "encoder_hidden_states": normal(7, 16),
             "encoder_hidden_states_mask": torch.ones(SAMPLES, 7, dtype=torch.long), "timestep": torch.rand(SAMPLES),
             "target": normal(16, 16)}  # fmt: skip

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "target"}
        count = len(batch["target"])
        return F.mse_loss(model(**given, img_shapes=[(1, 4, 4)] * count).sample, batch["target"])

    return model, batch, loss


@built_by("diffusers")
def prior_transformer() -> Made:
    from diffusers import PriorTransformer

    model = PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=3, embedding_dim=16, num_embeddings=5,
        additional_embeddings=4,
    )  # fmt: skip
    batch = {"hidden_states": normal(16), "timestep": times(), "proj_embedding": normal(16),
             "encoder_hidden_states": normal(5, 16), "target": normal(16)}  # fmt: skip
    return model, batch, to_target(lambda output: output.predicted_image_embedding)


@built_by("diffusers")
def uvit() -> Made:
    from diffusers import UVit2DModel

    model = UVit2DModel(
        hidden_size=32, cond_embed_dim=16, encoder_hidden_size=16, vocab_size=24, codebook_size=20, in_channels=32,
        block_out_channels=32, num_res_blocks=1, block_num_heads=2, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, sample_size=8, micro_cond_encode_dim=4, micro_cond_embed_dim=20, hidden_dropout=0.0,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(0, 20, (SAMPLES, 8, 8)), "encoder_hidden_states": normal(5, 16),
             "pooled_text_emb": normal(16), "micro_conds": torch.rand(SAMPLES, 5),
             "labels": torch.randint(0, 20, (SAMPLES, 8, 8))}  # fmt: skip

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "labels"}
        return F.cross_entropy(model(**given), batch["labels"])

    return model, batch, loss


@built_by("diffusers")
def autoencoder_kl() -> Made:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": normal(3, 16, 16), "target": normal(3, 16, 16)}, to_target(sample_of)


@built_by("diffusers")
def vq_model() -> Made:
    from diffusers import VQModel

    model = VQModel(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=3, norm_num_groups=8, num_vq_embeddings=16,
    )  # fmt: skip
    return model, {"sample": normal(3, 16, 16), "target": normal(3, 16, 16)}, to_target(sample_of)


@built_by("diffusers")
def autoencoder_tiny() -> Made:
    from diffusers import AutoencoderTiny

    model = AutoencoderTiny(
        encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    )  # fmt: skip
    return model, {"sample": normal(3, 16, 16), "target": normal(3, 16, 16)}, to_target(sample_of)

"""Builds the untrained tiny pipeline: every part is the stock class of diffusers or transformers, only small."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from .scenes import CATEGORIES, all_specs

MAX_TOKENS = 12  # the longest caption has 7 words
_WIDTH = 64  # of each of the two text encoders; the transformer reads both side by side
_START, _END = "<|startoftext|>", "<|endoftext|>"


def captions() -> list[str]:
    """Every caption of the world, in a fixed order."""
    return [spec.caption for category in CATEGORIES for spec in all_specs(category)]


def build_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows the words of the captions, each as one token."""
    bpe = Tokenizer(models.BPE(unk_token=_END, end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[_START, _END],
        end_of_word_suffix="</w>",
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz"),
        show_progress=False,
    )
    bpe.train_from_iterator(captions(), trainer)
    model: Any = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    return CLIPTokenizer(
        vocab=model["vocab"],
        merges=merges,
        bos_token=_START,
        eos_token=_END,
        unk_token=_END,
        pad_token=_END,
        model_max_length=MAX_TOKENS,
    )


def _text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        projection_dim=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def build_pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """A `StableDiffusion3Pipeline` with random weights, 32 x 32 pixels, 8 x 8 x 8 latents, no third text encoder."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        sample_size=32,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=2 * _WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=2 * _WIDTH,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(tokenizer),
        tokenizer_2=_copy_tokenizer(tokenizer),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _copy_tokenizer(tokenizer: CLIPTokenizer) -> CLIPTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return CLIPTokenizer.from_pretrained(Path(folder))

"""The embedded model is a stock pipeline, small, and neither useless nor perfect."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from flowrl.catalog import find_model
from flowrl.shapes.checker import check_images
from flowrl.shapes.pretrain import draw_batch, to_uint8
from flowrl.shapes.scenes import parse
from flowrl.shapes.tiny_sd3 import MAX_TOKENS, captions

FOLDER = Path(find_model("shapes-sd3"))


@pytest.fixture(scope="module")
def pipe():
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_its_parts_are_stock_classes(pipe):
    assert type(pipe.transformer) is SD3Transformer2DModel
    assert type(pipe.vae) is AutoencoderKL
    assert type(pipe.text_encoder) is type(pipe.text_encoder_2) is CLIPTextModelWithProjection
    assert isinstance(pipe.tokenizer, CLIPTokenizer)
    assert 1.5e6 < sum(p.numel() for p in pipe.transformer.parameters()) < 3e6


def test_it_is_small_and_safe():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 16e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".txt", ".md", ".png", ".jsonl"}


def test_every_word_is_one_token(pipe):
    for caption in captions():
        assert len(pipe.tokenizer(caption).input_ids) == len(caption.split()) + 2 <= MAX_TOKENS


def test_the_autoencoder_keeps_scenes_readable(pipe):
    specs, pixels = draw_batch(np.random.default_rng(5), 300)
    with torch.no_grad():
        decoded = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mode()).sample
    assert check_images(to_uint8(decoded), specs)[0].mean() >= 0.99


@pytest.mark.parametrize("max_sequence_length", [0, 256])
def test_it_follows_simple_captions(pipe, max_sequence_length):
    """Also with the 256 zeros that a plain `pipe(prompt)` appends."""
    prompts = ["a circle", "a red square", "a triangle", "a blue triangle"] * (12 if max_sequence_length == 0 else 4)
    images = pipe(
        prompts,
        num_inference_steps=10,
        guidance_scale=2.5,
        max_sequence_length=max_sequence_length,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    strict, _ = check_images((images * 255).round().astype(np.uint8), [parse(prompt) for prompt in prompts])
    assert strict.mean() > 0.55

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from flowrl.pipelines.base import Conditioning, check_pipeline
from flowrl.pipelines.sd3 import SD3Adapter

from flowrl.catalog import find_model
from flowrl.flow.policy import FlowPolicy, to_pil

PROMPTS = ["a red circle", "a blue square and a green triangle"]


@pytest.fixture
def stock(shapes_path, exact):
    path = find_model(shapes_path)
    pipe = StableDiffusion3Pipeline.from_pretrained(path, text_encoder_3=None, tokenizer_3=None).to("cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("num_steps", [2, 4, 10, 28])
def test_grid_equals_the_stock_pipelines(stock, shapes_path, num_steps):
    stock(PROMPTS[0], num_inference_steps=num_steps, output_type="latent", max_sequence_length=0)
    found = SD3Adapter.load(shapes_path).sigmas(num_steps)
    torch.testing.assert_close(found, stock.scheduler.sigmas.float(), rtol=0, atol=0)


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
@pytest.mark.parametrize(("num_steps", "size"), [(2, None), (10, None), (28, None), (4, (24, 40))])
def test_ode_images_equal_the_stock_pipelines(stock, shapes_path, exact, num_steps, guidance_scale, size):
    height, width = size or (None, None)
    adapter = SD3Adapter.load(shapes_path, height=height, width=width, max_sequence_length=0)
    policy = FlowPolicy(adapter, PROMPTS)
    noise = policy.noise([torch.Generator().manual_seed(seed) for seed in (0, 1)])
    ours = policy.sample(PROMPTS, noise, num_inference_steps=num_steps, guidance_scale=guidance_scale)
    theirs = stock(
        PROMPTS,
        latents=noise.clone(),
        num_inference_steps=num_steps,
        guidance_scale=guidance_scale,
        height=height,
        width=width,
        max_sequence_length=0,
        output_type="pt",
    ).images
    assert (ours - theirs).abs().max() < exact
    as_pil = stock.image_processor.pt_to_numpy(theirs)
    assert (np.asarray(to_pil(ours)[0]) == np.asarray(stock.image_processor.numpy_to_pil(as_pil)[0])).mean() > 0.999


def test_contract(shapes_path):
    figures = check_pipeline(SD3Adapter.load(shapes_path, dtype=torch.float64, max_sequence_length=0))
    assert figures["batch_gap"] < 1e-7  # exact but for diffusers' RMSNorm, which rounds to float32, eps/2 6e-8


def test_contract_finds_what_is_wrong(shapes_path):
    adapter = SD3Adapter.load(shapes_path, max_sequence_length=0)
    adapter.lora_targets = ["attn.to_qq"]
    with pytest.raises(ValueError, match="no module matches 'attn.to_qq'"):
        check_pipeline(adapter)
    adapter = SD3Adapter.load(shapes_path, max_sequence_length=0)
    adapter.sigmas = lambda num: torch.linspace(0, 1, num + 1)
    with pytest.raises(ValueError, match="sigmas must fall to 0"):
        check_pipeline(adapter)


def test_conditioning():
    cond = Conditioning({"a": torch.arange(6.0).reshape(3, 2)})
    assert cond.rows(torch.tensor([2, 0])).tensors["a"].tolist() == [[4, 5], [0, 1]]
    assert len(cond.rows(torch.tensor([1])).expand(4)) == 4
    other = Conditioning({"a": cond.tensors["a"] + 1e-7})
    assert cond.fingerprint() == Conditioning({"a": cond.tensors["a"].clone()}).fingerprint() != other.fingerprint()

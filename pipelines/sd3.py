"""Stable Diffusion 3 and 3.5, with or without its T5 encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from peft.utils import get_peft_model_state_dict
from torch import nn

from flowrl.model_folder import check_sides

from .base import Conditioning, PipelineAdapter
from .loading import load_pipeline


class SD3Adapter(PipelineAdapter):
    """Adapter of `StableDiffusion3Pipeline`."""

    lora_targets: ClassVar[list[str]] = [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ]

    def __init__(
        self,
        pipe: Any,
        *,
        height: int | None = None,
        width: int | None = None,
        max_sequence_length: int = 256,
    ):
        """Wraps a loaded pipeline.

        Args:
            height, width: of the images in pixels; by default the model's own size.
            max_sequence_length: of the T5 tokens; without a T5 encoder the pipeline puts as many zeros there.

        Raises:
            ConfigError: the model has no images of that size.
        """
        self.pipe = pipe
        self.max_sequence_length = max_sequence_length
        config, factor = pipe.transformer.config, pipe.vae_scale_factor
        height, width = height or config.sample_size * factor, width or config.sample_size * factor
        check_sides(height, width, multiple=factor * config.patch_size, num_positions=config.pos_embed_max_size)
        self.latent_shape = (config.in_channels, height // factor, width // factor)
        pipe.set_progress_bar_config(disable=True)
        for part in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3, pipe.transformer):
            if part is not None:
                part.requires_grad_(False).eval()

    @classmethod
    def load(cls, path: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> SD3Adapter:
        return cls(load_pipeline(StableDiffusion3Pipeline, path, dtype=dtype), **options)

    @property
    def denoiser(self) -> nn.Module:
        return self.pipe.transformer

    @denoiser.setter
    def denoiser(self, module: nn.Module) -> None:
        self.pipe.transformer = module

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt=prompts,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return Conditioning({"encoder_hidden_states": embeds, "pooled_projections": pooled})

    def sigmas(self, num_inference_steps: int) -> torch.Tensor:
        config = dict(self.pipe.scheduler.config)
        if config.get("use_dynamic_shifting"):
            raise ValueError("SD3 schedulers with use_dynamic_shifting are not supported")
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        scheduler.set_timesteps(num_inference_steps)
        return scheduler.sigmas.float().cpu()

    def predict(self, x: torch.Tensor, sigma: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        return self.denoiser(
            hidden_states=x.to(cond.tensors["encoder_hidden_states"].dtype),
            timestep=sigma * self.pipe.scheduler.config.num_train_timesteps,
            return_dict=False,
            **cond.tensors,
        )[0]

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        latents = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        images = vae.decode(latents, return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        latents = vae.encode((2 * images - 1).to(vae.device, vae.dtype)).latent_dist.mode().float()
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor

    @property
    def image_size(self) -> tuple[int, int]:
        factor = self.pipe.vae_scale_factor
        return self.latent_shape[1] * factor, self.latent_shape[2] * factor

    def save_lora(self, folder: Path) -> None:
        denoiser: Any = self.denoiser
        StableDiffusion3Pipeline.save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(denoiser),
            transformer_lora_adapter_metadata=denoiser.peft_config["default"].to_dict(),
        )

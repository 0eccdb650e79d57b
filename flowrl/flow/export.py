"""Writes a trained policy in the format of stock diffusers, and proves it by loading it back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from flowrl.core.random import torch_generator
from flowrl.pipelines.base import Conditioning, quiet_loading
from flowrl.pipelines.loading import load_pipeline

from .policy import FlowPolicy

TOLERANCE = 1e-3


def export_policy(policy: FlowPolicy, base: str, folder: Path) -> float:
    """Writes a LoRA for `pipe.load_lora_weights(folder)`, or the whole denoiser for `from_pretrained(folder)`.

    Args:
        base: the model that the policy started from.

    Returns:
        largest difference between the policy's velocity and that of a fresh stock pipeline with the export.

    Raises:
        RuntimeError: that difference is too large; the export cannot be trusted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_loading():  # what matters is compared below
        if policy.is_lora:
            frozen = policy.adapter.pipe.vae.dtype  # the base weights are rounded to it here as they were there
            stock = load_pipeline(type(policy.adapter.pipe), base, dtype=frozen)
            _to_float32(stock.transformer)
            policy.adapter.save_lora(folder)
            stock.load_lora_weights(str(folder))
            denoiser: Any = stock.transformer
        else:
            policy.model.save_pretrained(folder)
            denoiser = type(policy.model).from_pretrained(folder, dtype=torch.float32)
    error = _difference(policy, denoiser.to(policy.device).eval())
    if not error < TOLERANCE:
        raise RuntimeError(f"{folder}: reloaded into the stock pipeline, the velocity is off by {error:.1e}")
    return error


def _to_float32(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, in float32; diffusers warns of `module.float()` even where it changes nothing."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.float()
    return module


@torch.no_grad()
def _difference(policy: FlowPolicy, other: torch.nn.Module) -> float:
    """Largest difference of velocity between the policy's denoiser and another one, both in float32."""
    noise = policy.noise([torch_generator(0, "export", row) for row in range(2)])
    sigma = torch.tensor([0.9, 0.4], device=policy.device)
    cond = Conditioning({name: value.float() for name, value in policy.negative.expand(2).tensors.items()})
    trained, results = policy.model, []
    try:
        for denoiser in (_to_float32(copy.deepcopy(trained)), other):
            policy.model = denoiser
            results.append(policy.adapter.predict(noise, sigma, cond))
    finally:
        policy.model = trained
    return (results[0] - results[1]).abs().max().item()

"""Searches good initial noise by the cross-entropy method (Smart-GRPO, arXiv 2510.02654). Pure; draws are injected.

Shapes: `P` prompts, `K` candidates of each, latents `(..., *latent)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def refit(
    candidates: torch.Tensor, scores: torch.Tensor, *, elites: int, std_floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and std of the `elites` best of `candidates (P, K, *latent)`, each `(P, *latent)`.

    Args:
        scores: `(P, K)`, NaN = no score. Where fewer than `elites` have one, or all are equal, there is nothing to
            learn: mean 0, std 1.
        std_floor: smallest std.
    """
    scores = scores.to(candidates.device)
    ranked = scores.nan_to_num(nan=-math.inf)
    best = ranked.topk(elites, dim=1).indices
    chosen = torch.stack([own[index] for own, index in zip(candidates, best, strict=True)])
    mean, std = chosen.mean(1), chosen.std(1, correction=0).clamp(min=std_floor)
    lowest = scores.nan_to_num(nan=math.inf).amin(1)
    told = (scores.isfinite().sum(1) >= elites) & (ranked.amax(1) > lowest)
    told = told.reshape(-1, *[1] * (mean.ndim - 1))
    return torch.where(told, mean, 0.0), torch.where(told, std, 1.0)


def on_shell(noise: torch.Tensor) -> torch.Tensor:
    """Each row `(n, *latent)` rescaled to norm sqrt(d), where standard normal noise of d elements lies."""
    flat = noise.flatten(1)
    return (flat * (math.sqrt(flat.shape[1]) / flat.norm(dim=1, keepdim=True))).reshape(noise.shape)


def search_noise(
    draw: Callable[[int, int], torch.Tensor],
    evaluate: Callable[[torch.Tensor], torch.Tensor],
    num_prompts: int,
    *,
    candidates: int,
    elites: int,
    rounds: int,
    std_floor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and std of each prompt's noise after `rounds` of drawing, scoring and refitting, each `(P, *latent)`.

    Args:
        draw: `(round, K) -> standard normal (P, K, *latent)`.
        evaluate: `(P, K, *latent) -> scores (P, K)` of a cheap decoding of the candidates.
    """
    mean = std = None
    for number in range(rounds):
        z = draw(number, candidates)
        if mean is None or std is None:
            mean, std = torch.zeros_like(z[:, 0]), torch.ones_like(z[:, 0])
        tried = on_shell((mean[:, None] + std[:, None] * z).flatten(0, 1)).reshape(z.shape)
        mean, std = refit(tried, evaluate(tried), elites=elites, std_floor=std_floor)
    if mean is None or std is None:
        raise ValueError("rounds must be at least 1")
    return mean, std

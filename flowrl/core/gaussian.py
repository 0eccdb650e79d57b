"""The one Gaussian helper: log-density and divergence of a stochastic step.

Shapes: `B` rows, `...` latent axes. Everything is computed in float32.
"""

from __future__ import annotations

import math

import torch

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def per_row(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values (B,)` with as many axes as `like (B, ...)`, float32.

    Raises:
        ValueError: the lengths differ.
    """
    if values.shape != like.shape[:1]:
        raise ValueError(f"expected one value for each of {like.shape[0]} rows, got shape {tuple(values.shape)}")
    return values.float().reshape(-1, *[1] * (like.ndim - 1))


def _reduce(values: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "mean":
        return values.flatten(1).mean(1)
    if reduction == "sum":
        return values.flatten(1).sum(1)
    raise ValueError(f"unknown reduction {reduction!r}; known: mean, sum, pseudo")


def gaussian_log_prob(
    x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    """log N(x; mean, std^2 I), normalised, reduced over the latent axes.

    Args:
        x: `(B, ...)`.
        mean: `(B, ...)`.
        std: `(B,)`, positive.
        reduction: "mean" over latent elements (what clip ranges of the literature refer to), "sum" (nats), or
            "pseudo": -mean (x - mean)^2, what public code for coefficients-preserving sampling calls its log-prob;
            a ratio of it is the true one to the power 2 std^2.

    Returns:
        `(B,)` float32.
    """
    _same_shape(x, mean)
    if reduction == "pseudo":
        return -_reduce((x.float() - mean.float()).square(), "mean")
    scale = per_row(std, x)
    z = (x.float() - mean.float()) / scale
    return _reduce(-0.5 * z.square() - scale.log() - LOG_SQRT_2PI, reduction)


def gaussian_kl(
    mean: torch.Tensor, mean_ref: torch.Tensor, std: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    """KL(N(mean, std^2 I) || N(mean_ref, std^2 I)) = |mean - mean_ref|^2 / (2 std^2), reduced as the log-prob.

    `std (B,)` is the standard deviation of the transition itself, step size included: Flow-GRPO's public code
    leaves the step size out, which makes the term smaller by |dt|.

    Returns:
        `(B,)` float32.
    """
    _same_shape(mean, mean_ref)
    z = (mean.float() - mean_ref.float()) / per_row(std, mean)
    return _reduce(0.5 * z.square(), reduction)


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")

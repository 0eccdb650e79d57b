"""The forward process: noising clean samples, drawing times, and the regression targets built on them. Pure.

x = (1 - sigma) x0 + sigma eps; the velocity of that straight line is eps - x0.
Shapes: `B` rows; samples, noises and velocities `(B, ...)`; `sigma (B,)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flowrl.core.gaussian import per_row

from .paths import PATHS


def noised(clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor, *, path: str = "rectified") -> torch.Tensor:
    """alpha x0 + sigma eps on a path of `flowrl.flow.paths`, float32."""
    s = per_row(sigma, clean)
    return PATHS[path](s) * clean.float() + s * noise.float()


def mean_square(values: torch.Tensor) -> torch.Tensor:
    """Mean over all but the first axis of the square, `(B,)` float32."""
    return values.float().square().flatten(1).mean(1)


def uniform_times(u: torch.Tensor, *, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Times of uniform numbers `u`: uniform between `low` and `high`."""
    return low + (high - low) * u


def power_times(u: torch.Tensor, *, exponent: float = 1.0) -> torch.Tensor:
    """Density proportional to t^exponent on [0, 1]: t = u^(1 / (exponent + 1))."""
    return u ** (1 / (exponent + 1))


def logit_normal_times(u: torch.Tensor, *, mean: float = 0.0, std: float = 1.0, shift: float = 1.0) -> torch.Tensor:
    """Sigmoid of a normal number, then shifted: t -> shift t / (1 + (shift - 1) t) (arXiv 2403.03206)."""
    inner = u.double().clamp(1e-6, 1 - 1e-6)
    t = torch.sigmoid(mean + std * math.sqrt(2) * torch.erfinv(2 * inner - 1)).to(u.dtype)
    return shift * t / (1 + (shift - 1) * t)


def grid_times(u: torch.Tensor, sigmas: Sequence[float]) -> torch.Tensor:
    """One of `sigmas`, all equally likely."""
    values = torch.tensor(sigmas, dtype=u.dtype)
    return values[(u * len(values)).long().clamp(max=len(values) - 1)]


def stratified(order: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Uniform numbers of which each of k equal parts of [0, 1] holds one.

    Args:
        order: `(..., k)`; its ranks say which part each lies in. u: `(..., k)` uniform, where in the part.
    """
    return (order.argsort(-1).argsort(-1) + u) / u.shape[-1]


def ram_target(
    reference: torch.Tensor,
    old: torch.Tensor,
    line: torch.Tensor,
    advantages: torch.Tensor,
    *,
    multiplier: float,
) -> torch.Tensor:
    """RAM (arXiv 2605.10759, equation 17): v_ref + m A ((eps - x0) - v_old).

    Args:
        line: eps - x0. advantages: `(B,)`.
    """
    return reference + per_row(multiplier * advantages, line) * (line - old)


def nft_loss(
    velocity: torch.Tensor,
    old: torch.Tensor,
    x: torch.Tensor,
    clean: torch.Tensor,
    sigma: torch.Tensor,
    share: torch.Tensor,
    *,
    beta: float,
    adaptive: bool = True,
) -> torch.Tensor:
    """DiffusionNFT (arXiv 2509.16117): a positive and a negative policy, implied by the trained one, fit the endpoint.

    v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v predict x0 from x; the loss is
    (r l+ + (1 - r) l-) / beta with l the mean square error.

    Args:
        share: r in [0, 1], `(B,)`: how much of the sample counts as positive.
        adaptive: divide each error by the mean absolute error, detached, at least 1e-5.
    """
    s, total = per_row(sigma, x), torch.zeros_like(share, dtype=torch.float32)
    for sign, weight in ((1.0, share), (-1.0, 1 - share)):
        implied = old + sign * beta * (velocity - old)
        error = x - s * implied - clean
        loss = mean_square(error)
        if adaptive:
            loss = loss / error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
        total = total + weight.float() * loss
    return total / beta


def awm_log_prob(loss: torch.Tensor, sigma: torch.Tensor, *, weighting: str, power: float = 0.25) -> torch.Tensor:
    """AWM (arXiv 2509.25050): a matching loss `(B,)` as a negative log-likelihood, weighted by time.

    weighting: "uniform" l; "t" t l; "t2" t^2 l; "huber" t (sqrt(l + 1e-10) - 1e-5); "ghuber" (t / p) ((l + 1e-10)^p -
    1e-10^p).

    Raises:
        ValueError: unknown weighting.
    """
    tiny = 1e-10
    if weighting == "uniform":
        return -loss
    if weighting == "t":
        return -sigma * loss
    if weighting == "t2":
        return -sigma.square() * loss
    if weighting == "huber":
        return -sigma * ((loss + tiny).sqrt() - math.sqrt(tiny))
    if weighting == "ghuber":
        return -(sigma / power) * ((loss + tiny) ** power - tiny**power)
    raise ValueError(f"unknown weighting {weighting!r}; known: uniform, t, t2, huber, ghuber")

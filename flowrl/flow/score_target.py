"""Score-Calibrated Flow (arXiv 2610.04696): a flow whose endpoints follow a density known by its score. No data needed.

The score is S = grad log q: minus the gradient of an energy, or that of a reference plus a reward's over its weight.
Two identities hold for every endpoint law p: grad log p_t = -E[eps | x_t] / t = E[grad log p(x0) | x_t] / (1 - t).
So E[(1 - t) eps + t S(x0) | x_t] vanishes for all x_t where p = q, and only there: it is what corrects the target.
The paper's abstract is public, its loss is not: the form and the defaults here are derived, not quoted.
Shapes: `B` rows; samples, noises, scores and velocities `(B, ...)`; `sigma (B,)`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

import torch
from torch import nn

from flowrl.core.gaussian import per_row

from .matching import mean_square, noised
from .paths import predict_noise

Model = TypeVar("Model", bound=nn.Module)


def scf_target(
    clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor, score: torch.Tensor, *, kappa: float
) -> torch.Tensor:
    """eps - x0 - kappa ((1 - t) eps + t S(x0)), float32, with x0 from the flow that is trained.

    Where it is fitted fully at each update, and the sampler of the endpoints moves a share eta of the way (1 - decay
    for a moving average), a Gaussian q needs kappa eta below about twice its least standard deviation; above 2.2 to
    2.7 times that the endpoints swing ever further.

    Args:
        score: at `clean`.

    Raises:
        ValueError: shapes differ.
    """
    if not clean.shape == noise.shape == score.shape:
        shapes = ", ".join(str(tuple(values.shape)) for values in (clean, noise, score))
        raise ValueError(f"shapes of clean, noise and score differ: {shapes}")
    t, clean, noise = per_row(sigma, clean), clean.float(), noise.float()
    return noise - clean - kappa * ((1 - t) * noise + t * score.float())


def clip_score(score: torch.Tensor, limit: float) -> torch.Tensor:
    """Rows whose root mean square exceeds `limit`, scaled down to it, float32; it is 1 on average for N(0, I).

    Raises:
        ValueError: `limit` is not positive.
    """
    if limit <= 0:
        raise ValueError(f"limit must be positive, got {limit}")
    size = mean_square(score).sqrt()
    return score.float() * per_row(limit / size.clamp(min=limit), score)


def reference_score(clean: torch.Tensor, velocity: torch.Tensor, sigma0: float) -> torch.Tensor:
    """The score of a rectified flow at nearly clean samples: -(x + (1 - t0) v) / t0, float32.

    Args:
        velocity: of the reference, at `clean` and the time t0.
        sigma0: t0, small but positive: the score is that of the data noised so far, and errors of v grow by 1 / t0.

    Raises:
        ValueError: `sigma0` is not in (0, 1].
    """
    if not 0 < sigma0 <= 1:
        raise ValueError(f"sigma0 must lie in (0, 1], got {sigma0}")
    return -predict_noise(clean, velocity, torch.full((len(clean),), sigma0, device=clean.device)) / sigma0


@torch.no_grad()
def flow_endpoints(velocity: nn.Module, noise: torch.Tensor, *, num_steps: int = 10) -> torch.Tensor:
    """Clean samples of noises `(B, ...)` by the midpoint method on even steps; `velocity(x (B, ...), t (B,))`."""
    x, step = noise, 1 / num_steps
    for k in range(num_steps):
        t = torch.full((len(noise),), 1 - k * step, device=noise.device)
        middle = x - 0.5 * step * velocity(x, t)
        x = x - step * velocity(middle, t - 0.5 * step)
    return x


def fit_score_calibrated_flow(
    velocity: Model,
    score: Callable[[torch.Tensor], torch.Tensor],
    *,
    dim: int,
    iterations: int = 2000,
    batch_size: int = 256,
    num_draws: int = 4,
    num_steps: int = 10,
    kappa: float = 0.5,
    decay: float = 0.9,
    limit: float = 10.0,
    learning_rate: float = 1e-2,
) -> Model:
    """Trains `velocity(x (B, dim), t (B,))` in place to sample a density from its score; for low dimensions.

    Adam, whose learning rate falls to zero along a cosine. Near a Gaussian some 400 iterations do. The weights of
    separate modes, and long thin tails, settle far more slowly than the shape of a mode: do not rely on the weights.
    Random numbers come from torch's global generator.

    Args:
        score: `(B, dim) -> (B, dim)`, gradient of the log-density, scaled such that N(0, I) covers what matters.
        num_draws: times and noises for each endpoint.
        num_steps: of the midpoint method, to draw endpoints.
        decay: of the average of the weights, from which endpoints come.
        limit: of the scores' root mean square.

    Returns:
        that average, a copy of the model, to use with `flow_endpoints`.
    """
    sampler = deepcopy(velocity).requires_grad_(False)
    device = next(velocity.parameters()).device
    optimizer = torch.optim.Adam(velocity.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        clean = flow_endpoints(sampler, torch.randn(batch_size, dim, device=device), num_steps=num_steps)
        scores = clip_score(score(clean), limit).detach().repeat(num_draws, 1)
        clean = clean.repeat(num_draws, 1)
        noise, sigma = torch.randn_like(clean), torch.rand(len(clean), device=device)
        target = scf_target(clean, noise, sigma, scores, kappa=kappa)
        loss = mean_square(velocity(noised(clean, noise, sigma), sigma) - target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for average, value in zip(sampler.parameters(), velocity.parameters(), strict=True):
                average.lerp_(value, 1 - decay)
    return sampler

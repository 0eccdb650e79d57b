"""One step of a sampler: where the next latent lies and how far it scatters. Pure and stateless.

Every transition has the signature

    (x, velocity, sigma, sigma_next, noise_level, sigma_top) -> mean, std

with `x`, `velocity` `(B, ...)` and the rest `(B,)`, and returns `mean (B, ...)`, `std (B,)` in float32; the next
latent is `mean + std z`. `sigma_top` is the second entry of the sigma grid, which the Flow-SDE needs at sigma 1.
Where the std is 0 the step is deterministic and has no log-prob.

With D = sigma - sigma_next > 0, the SDE samplers are one formula with a rate s (arXiv 2505.05470, equation 12):

    mean = x - D (v + s^2 / (2 sigma) (x + (1 - sigma) v)),   std = s sqrt(D)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flowrl.core.gaussian import per_row
from flowrl.registry import suggest

from .paths import predict_clean, predict_noise

Transition = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def ode_step(
    x: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    noise_level: torch.Tensor,
    sigma_top: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Euler's step x + (sigma_next - sigma) v, the one of diffusers' flow-matching scheduler; std 0."""
    step = (sigma_next - sigma).float()
    return x.float() + per_row(step, x) * velocity.float(), torch.zeros_like(step)


def flow_sde(
    x: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    noise_level: torch.Tensor,
    sigma_top: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flow-GRPO's SDE (arXiv 2505.05470, equation 12): s = a sqrt(sigma / (1 - sigma)), a the noise level.

    At sigma = 1 the rate is infinite; there, and only there, `1 - sigma` becomes `1 - sigma_top`, as in the public
    code, so the first std is exactly a. The discretisation leaves more noise than the path has where a step is large
    against its sigma: on the shift-3 grid with 10 steps and a = 0.7, 4 % too much on the first steps, 23 % on the
    eighth, and 27 times too much on the step to the tiny last sigma; `cps` has no such excess.
    """
    denominator = torch.where(sigma >= 1, 1 - sigma_top, 1 - sigma)
    rate = noise_level * (sigma / denominator).sqrt()
    step = sigma - sigma_next
    pull = per_row(rate.square() / (2 * sigma), x) * predict_noise(x, velocity, sigma)
    return x.float() - per_row(step, x) * (velocity.float() + pull), (rate * step.sqrt()).float()


def cps(
    x: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    noise_level: torch.Tensor,
    sigma_top: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients-preserving sampling (arXiv 2509.05952): exactly sigma_next of noise after every step.

    std = sigma_next sin(pi a / 2); mean = (1 - sigma_next) x0_hat + sqrt(sigma_next^2 - std^2) eps_hat. The step to
    sigma 0 is deterministic. What is kept is the amount of noise, not the marginal: the fresh noise is independent of
    the sample, so at a fixed a samples lose some spread however small the steps; they do not where a falls with the
    square root of the step.
    """
    std = sigma_next * (math.pi / 2 * noise_level).sin()
    kept = (sigma_next.square() - std.square()).clamp(min=0).sqrt()
    clean, noise = predict_clean(x, velocity, sigma), predict_noise(x, velocity, sigma)
    return per_row(1 - sigma_next, x) * clean + per_row(kept, x) * noise, std.float()


TRANSITIONS: dict[str, Transition] = {"flow_sde": flow_sde, "cps": cps}


def get_transition(name: str) -> Transition:
    """A stochastic transition by name.

    Raises:
        ValueError: unknown name.
    """
    if name not in TRANSITIONS:
        raise ValueError(f"unknown transition {name!r}; {suggest(name, list(TRANSITIONS))}")
    return TRANSITIONS[name]

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

from .paths import PATHS, predict_clean, predict_ends, predict_noise

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
    return _sde_step(x, velocity, sigma, sigma_next, noise_level * (sigma / denominator).sqrt())


def dance_sde(
    x: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    noise_level: torch.Tensor,
    sigma_top: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DanceGRPO's SDE (arXiv 2505.07818): the rate s is the noise level itself at every sigma; finite at sigma 1.

    Like the Flow-SDE it leaves too much noise where a step is large against its sigma: at level 0.3 on the 16-step
    shift-3 grid 1.5 % too much on the fourteenth step and 10 % on the fifteenth.
    """
    return _sde_step(x, velocity, sigma, sigma_next, noise_level)


def _sde_step(
    x: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor, rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    step = sigma - sigma_next
    pull = per_row(rate.square() / (2 * sigma), x) * predict_noise(x, velocity, sigma)
    return x.float() - per_row(step, x) * (velocity.float() + pull), (rate * step.sqrt()).float()


def preserve(
    clean: torch.Tensor, noise: torch.Tensor, alpha_next: torch.Tensor, sigma_next: torch.Tensor, std: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step that keeps the path's coefficients: alpha' x0_hat + sqrt(sigma'^2 - std^2) eps_hat, and std.

    Together with the fresh noise the next state holds exactly sigma' of noise. CPS and DDIM are this step with
    different stds, on different paths.
    """
    kept = (sigma_next.square() - std.square()).clamp(min=0).sqrt()
    return per_row(alpha_next, clean) * clean + per_row(kept, clean) * noise, std.float()


def cps(
    x: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    noise_level: torch.Tensor,
    sigma_top: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients-preserving sampling (arXiv 2509.05952): exactly sigma_next of noise after every step.

    `preserve` on the rectified path with std = sigma_next sin(pi a / 2). The step to sigma 0 is deterministic. What is
    kept is the amount of noise, not the marginal: the fresh noise is independent of the sample, so at a fixed a
    samples lose some spread however small the steps; they do not where a falls with the square root of the step.
    """
    std = sigma_next * (math.pi / 2 * noise_level).sin()
    clean, noise = predict_clean(x, velocity, sigma), predict_noise(x, velocity, sigma)
    return preserve(clean, noise, 1 - sigma_next, sigma_next, std)


def ddim(
    x: torch.Tensor,
    epsilon: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    noise_level: torch.Tensor,
    sigma_top: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DDIM with eta = the noise level (arXiv 2010.02502, equations 12 and 16): `preserve` on the other path.

    For networks that predict epsilon on the variance-preserving path. std = eta (sigma'/sigma) sqrt(1 - alpha^2 /
    alpha'^2); eta = 1 is DDPM's ancestral step, 0 the deterministic one. sigma must be below 1, as it is in DDPM's
    schedules.
    """
    alpha, alpha_next = (PATHS["variance_preserving"](value) for value in (sigma, sigma_next))
    std = noise_level * sigma_next / sigma * (1 - (alpha / alpha_next).square()).clamp(min=0).sqrt()
    clean, noise = predict_ends(x, epsilon, sigma, path="variance_preserving", prediction="epsilon")
    return preserve(clean, noise, alpha_next, sigma_next, std)


def noise_excess(
    transition: Transition, sigma: float, sigma_next: float, noise_level: float, sigma_top: float
) -> float:
    """Noise that a step on the rectified path leaves, over what the path has at sigma_next; 1 is right.

    Measured on a single data point with its exact velocity: all that is left beside (1 - sigma') x0 is noise.
    """
    row = [torch.tensor([value], dtype=torch.float64) for value in (sigma, sigma_next, noise_level, sigma_top)]
    mean, std = transition(row[0], torch.ones(1, dtype=torch.float64), *row)  # x0 = 0, eps = 1
    return math.hypot(float(mean), float(std)) / sigma_next


TRANSITIONS: dict[str, Transition] = {"flow_sde": flow_sde, "dance_sde": dance_sde, "cps": cps}
"""Transitions of the rectified path, by name."""


def get_transition(name: str) -> Transition:
    """A stochastic transition by name.

    Raises:
        ValueError: unknown name.
    """
    if name not in TRANSITIONS:
        raise ValueError(f"unknown transition {name!r}; {suggest(name, list(TRANSITIONS))}")
    return TRANSITIONS[name]

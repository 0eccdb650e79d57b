"""Integrates a step plan from noise to clean latents, keeping what training needs.

Shapes: `N` samples, `T` steps, `U` trained steps, latents `(N, *latent)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flowrl.core.gaussian import gaussian_log_prob

from .plans import StepPlan
from .transitions import Transition, ode_step

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Trajectory:
    """The stored part of a rollout.

    latents: clean latents `(N, *latent)`, float32.
    states: `(N, S, *latent)` in the storage dtype: the latents before and after each trained step, each kept once.
    before, after: `(U,)` positions of the trained steps in `states`.
    sigma, sigma_next, noise_level: `(U,)` float32 of the trained steps.
    sigma_top: second entry of the grid.
    log_prob: `(N, U)` float32, of the states as stored.
    mean: `(N, U, *latent)` float32 means of the sampler's Gaussians, kept on demand.
    """

    latents: torch.Tensor
    states: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    noise_level: torch.Tensor
    sigma_top: float
    log_prob: torch.Tensor
    mean: torch.Tensor | None = None


@torch.no_grad()
def integrate(
    velocity: Velocity,
    noise: torch.Tensor,
    grid: torch.Tensor,
    plan: StepPlan,
    transition: Transition,
    generators: Sequence[torch.Generator],
    *,
    storage_dtype: torch.dtype = torch.float32,
    reduction: str = "mean",
    keep_means: bool = False,
) -> Trajectory:
    """Samples a trajectory.

    A new latent is rounded to the storage dtype before it is scored and used, so what is scored is what is stored
    and what the update sees.

    Args:
        velocity: `(x, sigma (N,)) -> velocity`.
        noise: `(N, *latent)` at `grid[0]`.
        grid: `(T + 1,)` falling sigmas.
        transition: for the steps with a noise level; the others are Euler steps.
        generators: one for each sample; the noise of a sample depends on its own alone.
    """
    if len(plan) != len(grid) - 1:
        raise ValueError(f"the plan has {len(plan)} steps, the grid {len(grid) - 1}")
    device, trained = noise.device, set(plan.trained)
    kept_positions = sorted(trained | {step + 1 for step in trained})
    states, means, log_probs = [], [], []
    x = noise.to(storage_dtype).float()
    top = grid[1].to(device)
    for step, level in enumerate(plan.noise_levels):
        if step in kept_positions:
            states.append(x.to(storage_dtype))
        sigma, sigma_next = (grid[i].to(device).expand(len(x)) for i in (step, step + 1))
        kernel = transition if level > 0 else ode_step
        mean, std = kernel(x, velocity(x, sigma), sigma, sigma_next, torch.full_like(sigma, level), top.expand(len(x)))
        x = mean
        if level > 0:
            z = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators]).to(device)
            x = mean + std.reshape(-1, *[1] * (x.ndim - 1)) * z
        if step + 1 < len(grid) - 1 or step in trained:
            x = x.to(storage_dtype).float()
        if step in trained:
            log_probs.append(gaussian_log_prob(x, mean, std, reduction=reduction))
            if keep_means:
                means.append(mean)
    if len(plan) in kept_positions:
        states.append(x.to(storage_dtype))
    steps = torch.tensor(plan.trained)
    position = {p: i for i, p in enumerate(kept_positions)}
    return Trajectory(
        latents=x,
        states=torch.stack(states, 1),
        before=torch.tensor([position[step] for step in plan.trained]),
        after=torch.tensor([position[step + 1] for step in plan.trained]),
        sigma=grid[steps],
        sigma_next=grid[steps + 1],
        noise_level=torch.tensor([plan.noise_levels[step] for step in plan.trained]),
        sigma_top=float(grid[1]),
        log_prob=torch.stack(log_probs, 1),
        mean=torch.stack(means, 1) if keep_means else None,
    )


@torch.no_grad()
def sample_ode(velocity: Velocity, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Euler's method from `grid[0]` to `grid[-1]`, as the stock pipeline does it."""
    grid = grid.to(x.device)
    for sigma, sigma_next in zip(grid[:-1], grid[1:], strict=True):
        rows = sigma.expand(len(x))
        x, _ = ode_step(x, velocity(x, rows), rows, sigma_next.expand(len(x)), rows, rows)
    return x

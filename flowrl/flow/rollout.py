"""Integrates a step plan from noise to clean latents, keeping what training needs, and completes stored states.

Shapes: `N` samples, `U` trained steps, `V` views (clean images of a sample: its completions, and last the sample
itself), `M` different clean images, latents `(..., *latent)`.

Samples that have not branched apart yet are one state: it is stored and evaluated once. A state is called by the
number of the first sample that shares it, so everything random depends on that number alone, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from flowrl.core.gaussian import gaussian_log_prob

from .plans import StepPlan
from .solvers import Velocity, solve, solver_step
from .transitions import Transition

Draw = Callable[[list[int], int], torch.Tensor]
"""`(numbers of states, step) -> standard normal (len(numbers), *latent)`; step -1 is the initial noise."""


@dataclass(frozen=True)
class Trajectory:
    """The stored part of a rollout.

    clean: `(M, *latent)` float32, the clean latents to decode and score. owner: `(M,)` row of a sample that each is of.
    views: `(N, V)` rows of `clean`.
    states: `(N, S, *latent)` in the storage dtype: the latents before and after each trained step, each kept once.
    before, after: `(N, U)` positions of the trained steps in `states`.
    shared: `(N, U)` number of the state before each trained step: equal where samples start it from the same latent.
    sigma, sigma_next, noise_level: `(N, U)` float32 of the trained steps. sigma_top: `(N,)` second entry of the grid.
    log_prob: `(N, U)` float32, of the states as stored.
    mean: `(N, U, *latent)` float32 means of the sampler's Gaussians, kept on demand.
    """

    clean: torch.Tensor
    owner: torch.Tensor
    views: torch.Tensor
    states: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    shared: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    noise_level: torch.Tensor
    sigma_top: torch.Tensor
    log_prob: torch.Tensor
    mean: torch.Tensor | None = None


@dataclass(frozen=True)
class _Nodes:
    """The different states of a step: their `numbers`, a row that shares each, and each row's state, `index (N,)`."""

    numbers: list[int]
    rows: torch.Tensor
    index: torch.Tensor


def _nodes(samples: torch.Tensor, copies: int) -> _Nodes:
    keys, index = torch.unique(samples // copies, return_inverse=True)
    return _Nodes((keys * copies).tolist(), first_rows(index, len(keys)), index)


def first_rows(index: torch.Tensor, count: int) -> torch.Tensor:
    """For each of the values 0..count-1, all of which occur: where it first stands in `index (n,)`, `(count,)`."""
    return torch.full((count,), len(index)).scatter_reduce_(0, index, torch.arange(len(index)), "amin")


def sigma_path(grid: torch.Tensor, path: tuple[float, ...]) -> torch.Tensor:
    """Sigmas at grid positions, linear between entries, `(len(path),)`."""
    position = torch.tensor(path, dtype=torch.float64)
    low = position.floor().long().clamp(max=len(grid) - 2)
    grid = grid.double().cpu()
    return torch.lerp(grid[low], grid[low + 1], position - low).float()


@torch.no_grad()
def integrate(
    velocity: Velocity,
    samples: torch.Tensor,
    grid: torch.Tensor,
    plan: StepPlan,
    transition: Transition,
    draw: Draw,
    *,
    complete_velocity: Velocity | None = None,
    noise: torch.Tensor | None = None,
    storage_dtype: torch.dtype = torch.float32,
    reduction: str = "mean",
    keep_means: bool = False,
    device: torch.device | str = "cpu",
) -> Trajectory:
    """Samples a trajectory for each of `samples (N,)`, their numbers within the iteration.

    A new latent is rounded to the storage dtype before it is scored and used, so what is scored is what is stored
    and what the update sees.

    Args:
        velocity: network on the trajectory; its `rows` are rows of `samples`.
        grid: `(T + 1,)` falling sigmas.
        transition: for the steps with a noise level; the others are the solver's.
        complete_velocity: network on completions, if that is to be told apart; the same by default.
        noise: `(N, *latent)` initial noise; default: drawn. Samples that share a state share that of their first.
    """
    if plan.path[-1] != len(grid) - 1:
        raise ValueError(f"the plan ends at position {plan.path[-1]:g}, the grid at {len(grid) - 1}")
    sigmas = sigma_path(grid, plan.path).to(device)
    nodes = [_nodes(samples, copies) for copies in plan.copies()]
    keep, top = _Keeper(plan, nodes, storage_dtype), grid[1].to(device)
    x = noise[nodes[0].rows].to(device) if noise is not None else draw(nodes[0].numbers, -1).to(device)
    x, memory = x.to(storage_dtype).float(), None
    keep.state(0, x)
    for step, level in enumerate(plan.noise_levels):
        here, there = nodes[step], nodes[step + 1]
        sigma, sigma_next = (sigmas[i].expand(len(x)) for i in (step, step + 1))
        if level > 0:
            v = velocity(x, sigma, here.rows)
            mean, std = transition(x, v, sigma, sigma_next, torch.full_like(sigma, level), top.expand(len(x)))
            parent = here.index[there.rows].to(device)
            mean, std = mean[parent], std[parent]
            x = mean + std.reshape(-1, *[1] * (x.ndim - 1)) * draw(there.numbers, step).to(device)
            memory = None
        else:
            solver = plan.solver if step >= plan.solver_from else "euler"
            x, memory = solver_step(solver, velocity, x, here.rows, sigma, sigma_next, memory)
        if step + 1 < len(plan) or step in plan.trained:
            x = x.to(storage_dtype).float()
        keep.state(step + 1, x)
        if step in plan.trained:
            keep.log_probs.append(gaussian_log_prob(x, mean, std, reduction=reduction)[there.index.to(device)])
            if keep_means:
                keep.means.append(mean[there.index.to(device)])
    starts = [(keep.full[c.state], nodes[c.state].rows, sigma_path(grid, c.path)) for c in plan.completions]
    completed = solve(complete_velocity or velocity, starts)
    return keep.trajectory(x, completed, sigmas.cpu(), float(grid[1]))


class _Keeper:
    """Collects what a trajectory stores."""

    def __init__(self, plan: StepPlan, nodes: list[_Nodes], dtype: torch.dtype):
        self.plan, self.nodes, self.dtype = plan, nodes, dtype
        self.positions = sorted({state for step in plan.trained for state in (step, step + 1)})
        self.full: dict[int, torch.Tensor] = {}
        self.states: list[torch.Tensor] = []
        self.log_probs: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []

    def state(self, number: int, x: torch.Tensor) -> None:
        if number in self.positions:
            self.states.append(x.to(self.dtype)[self.nodes[number].index.to(x.device)])
        if any(completion.state == number for completion in self.plan.completions):
            self.full[number] = x

    def trajectory(
        self, x: torch.Tensor, completed: list[torch.Tensor], sigmas: torch.Tensor, top: float
    ) -> Trajectory:
        plan, num = self.plan, len(self.nodes[0].index)
        holders = [self.nodes[c.state] for c in plan.completions] + [self.nodes[-1]]
        offsets = [0, *accumulate(len(holder.rows) for holder in holders[:-1])]
        steps = torch.tensor(plan.trained)

        def each(values: torch.Tensor) -> torch.Tensor:
            return values.expand(num, -1)

        place = {position: i for i, position in enumerate(self.positions)}
        shared = [torch.tensor(self.nodes[step].numbers)[self.nodes[step].index] for step in plan.trained]
        return Trajectory(
            clean=torch.cat([*completed, x]),
            owner=torch.cat([holder.rows for holder in holders]),
            views=torch.stack([holder.index + offset for holder, offset in zip(holders, offsets, strict=True)], 1),
            states=torch.stack(self.states, 1),
            before=each(torch.tensor([place[step] for step in plan.trained])),
            after=each(torch.tensor([place[step + 1] for step in plan.trained])),
            shared=torch.stack(shared, 1),
            sigma=each(sigmas[steps]),
            sigma_next=each(sigmas[steps + 1]),
            noise_level=each(torch.tensor([plan.noise_levels[step] for step in plan.trained])),
            sigma_top=torch.full((num,), top),
            log_prob=torch.stack(self.log_probs, 1),
            mean=torch.stack(self.means, 1) if self.means else None,
        )


@torch.no_grad()
def sample_ode(velocity: Velocity, x: torch.Tensor, grid: torch.Tensor, *, solver: str = "euler") -> torch.Tensor:
    """From `grid[0]` to `grid[-1]`; with "euler" as the stock pipeline does it."""
    return solve(velocity, [(x, torch.arange(len(x)), grid)], solver=solver)[0]

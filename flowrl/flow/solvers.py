"""Deterministic solvers of the rectified flow's ODE. Pure: what a multistep solver remembers is passed along.

Shapes: `B` rows, each with its own sigma; `x` `(B, ...)`; `sigma`, `sigma_next` `(B,)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flowrl.core.gaussian import per_row
from flowrl.registry import suggest

from .paths import predict_clean
from .transitions import ode_step

Velocity = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(x (B, ...), sigma (B,), rows (B,)) -> velocity`; `rows` say whose states these are."""

SOLVERS = ("euler", "heun", "dpmpp_2m")


def solver_step(
    solver: str,
    velocity: Velocity,
    x: torch.Tensor,
    rows: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    memory: Any = None,
) -> tuple[torch.Tensor, Any]:
    """One step of a solver.

    "euler" is the stock flow-matching sampler's. "heun" (the trapezoid rule) evaluates the network twice, but once on
    the step to sigma 0. "dpmpp_2m" is DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2), first order on its first step
    and on the step to sigma 0.

    Args:
        memory: what the same solver returned on the step before; None on the first step.

    Returns:
        the next state, float32, and the memory for the next step.

    Raises:
        ValueError: unknown solver.
    """
    v = velocity(x, sigma, rows)
    if solver == "euler":
        return ode_step(x, v, sigma, sigma_next, sigma, sigma)[0], None
    if solver == "heun":
        return _heun(velocity, x, v, rows, sigma, sigma_next), None
    if solver == "dpmpp_2m":
        clean = predict_clean(x, v, sigma)
        return _dpmpp_2m(x, clean, sigma, sigma_next, memory), (clean, sigma)
    raise ValueError(f"unknown solver {solver!r}; {suggest(solver, list(SOLVERS))}")


def _heun(
    velocity: Velocity,
    x: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
) -> torch.Tensor:
    euler = ode_step(x, v, sigma, sigma_next, sigma, sigma)[0]
    more = sigma_next > 0
    if not more.any():
        return euler
    slope = v.float().clone()
    slope[more] = (slope[more] + velocity(euler[more], sigma_next[more], rows[more.to(rows.device)]).float()) / 2
    return ode_step(x, slope, sigma, sigma_next, sigma, sigma)[0]


def _dpmpp_2m(
    x: torch.Tensor, clean: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor, memory: Any
) -> torch.Tensor:
    """x' = (sigma' / sigma) x + alpha' (1 - exp(-h)) D with h the step in the log signal-to-noise ratio."""
    slope = clean
    if memory is not None:
        previous, sigma_before = memory
        h, h_before = _log_snr(sigma_next) - _log_snr(sigma), _log_snr(sigma) - _log_snr(sigma_before)
        weight = h / (2 * h_before)  # 0 after a step from sigma 1, where h_before is infinite
        weight = torch.where(sigma_next > 0, weight, 0.0)
        slope = clean + per_row(weight, x) * (clean - previous)
    decay = (1 - sigma) * sigma_next / ((1 - sigma_next) * sigma)
    return per_row(sigma_next / sigma, x) * x.float() + per_row((1 - sigma_next) * (1 - decay), x) * slope


def _log_snr(sigma: torch.Tensor) -> torch.Tensor:
    return ((1 - sigma) / sigma).log()


@torch.no_grad()
def solve(
    velocity: Velocity,
    starts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    solver: str = "euler",
) -> list[torch.Tensor]:
    """Integrates states that lie at different places, all of them in the same network calls.

    Args:
        starts: `(x (B_i, ...), rows (B_i,), sigmas (T_i + 1,))`, each with a falling grid of its own.

    Returns:
        the states at the ends of the grids. Tick j takes step j of every grid that has one, so there are as many
        network calls as for the longest grid alone.
    """
    states: list[torch.Tensor] = [x for x, _, _ in starts]
    memories: list[Any] = [None] * len(starts)
    for tick in range(max((len(sigmas) - 1 for _, _, sigmas in starts), default=0)):
        active = [i for i, (_, _, sigmas) in enumerate(starts) if tick < len(sigmas) - 1]
        rows = torch.cat([starts[i][1] for i in active])
        x = torch.cat([states[i] for i in active])
        sigma, sigma_next = (
            torch.cat([starts[i][2][tick + shift].to(x.device).expand(len(states[i])) for i in active])
            for shift in (0, 1)
        )
        memory = None
        if memories[active[0]] is not None:
            memory = tuple(torch.cat([memories[i][part] for i in active]) for part in (0, 1))
        x, memory = solver_step(solver, velocity, x, rows, sigma, sigma_next, memory)
        sizes = [len(states[i]) for i in active]
        parts = None if memory is None else list(zip(*(value.split(sizes) for value in memory), strict=True))
        for number, (i, state) in enumerate(zip(active, x.split(sizes), strict=True)):
            states[i] = state
            memories[i] = None if parts is None else parts[number]
    return states

"""Calibrates the noise level of each step (DenseGRPO, arXiv 2601.20218, section 4.2). Pure; the measuring is injected.

A step's noise is raised while improvements and damages of the ODE completion's reward balance, so that exploring costs
nothing, and lowered where they do not, which is mostly where it harms. A step that changes no reward is in balance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CalibrationRound:
    """`levels`: the noise levels that were tried. `better`, `worse`: samples whose reward each step raised, lowered."""

    levels: tuple[float, ...]
    better: tuple[int, ...]
    worse: tuple[int, ...]


def adjusted(tried: CalibrationRound, *, step: float, tolerance: int, highest: float) -> tuple[float, ...]:
    """The next levels: up by `step` where |better - worse| < tolerance, else down; from `step` to `highest`."""
    moved = []
    for level, better, worse in zip(tried.levels, tried.better, tried.worse, strict=True):
        change = step if abs(better - worse) < tolerance else -step
        moved.append(round(min(highest, max(step, level + change)), 6))
    return tuple(moved)


def calibrate(
    measure: Callable[[tuple[float, ...], int], torch.Tensor],
    levels: tuple[float, ...],
    *,
    rounds: int,
    step: float = 0.01,
    tolerance: int = 2,
    highest: float = 2.0,
) -> Iterator[CalibrationRound]:
    """Rounds of measuring and adjusting, the last one with the levels to use.

    It ends after `rounds`, or once every level has turned back: then it would only go to and fro. The paper moves the
    rate of the SDE by 0.01 with a tolerance of 2; here the transition's noise level is moved.

    Args:
        measure: `(levels, round) -> increments (N, U)` of the rewards at those levels; NaN = no score.
        levels: to start from, `U` of them.
        tolerance: a difference of counts below this is balance.
        highest: largest level.
    """
    directions: list[set[float]] = [set() for _ in levels]
    for number in range(rounds):
        increments = measure(levels, number)
        better, worse = (increments > 0).sum(0), (increments < 0).sum(0)
        tried = CalibrationRound(levels, tuple(better.tolist()), tuple(worse.tolist()))
        yield tried
        following = adjusted(tried, step=step, tolerance=tolerance, highest=highest)
        for seen, old, new in zip(directions, levels, following, strict=True):
            seen.add((new > old) - (new < old))
        if all(len(seen) > 1 for seen in directions):
            return
        levels = following

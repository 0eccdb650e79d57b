"""Reward columns to one number or one advantage for each sample. Pure.

Shapes: `N` samples, `V` views, `U` units, `R` reward columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from .types import Scores

Credit = Callable[[torch.Tensor], torch.Tensor]


def weighted_sum(table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis of `(..., R)` times `weights (R,)`, `(...)`.

    A sample without a score in a column of non-zero weight has no sum: NaN. Columns of weight 0 only monitor, so
    they cannot spoil it.
    """
    if table.shape[-1] != len(weights):
        raise ValueError(f"{table.shape[-1]} reward columns, {len(weights)} weights")
    used = weights != 0
    return table[..., used] @ weights[used].to(table.dtype)


def combine_advantages(
    scores: Scores,
    credit: Credit,
    normalise: Credit,
    *,
    how: Literal["sum", "gdpo", "mo_grpo"] = "sum",
) -> torch.Tensor:
    """Advantages of several rewards.

    "sum": the weighted sum of the rewards is credited and normalised. "mo_grpo" (arXiv 2509.22047): each reward is
    credited and normalised on its own, so that none drowns the others by its scale, and the results are averaged by
    their weights (the paper's sum over the sum of the weights). "gdpo" (arXiv 2601.05242): the same, and with more than
    one reward the average is divided by its std over the batch. With one reward all three are the same. What misses a
    score of one reward gets 0.

    Args:
        credit: rewards `(N, V)` to values of samples or units, `(N, C)`.
        normalise: those within groups, `(N, C)` to `(N, C)`.

    Returns:
        `(N, C)` float64.
    """
    whole = credit(weighted_sum(scores.table, scores.weights))
    if how == "sum":
        return normalise(whole)
    used = scores.weights.nonzero()[:, 0].tolist()
    weights = scores.weights / scores.weights.abs().sum()
    parts = [weights[column] * normalise(credit(scores.table[..., column])) for column in used]
    valid = whole.isfinite()
    total = torch.where(valid, torch.stack(parts).sum(0), 0.0)
    if how == "gdpo" and len(used) > 1:
        count = valid.sum(0).clamp(min=1)
        mean = total.sum(0) / count
        std = (torch.where(valid, total - mean, 0.0).square().sum(0) / count).sqrt()
        total = total / std.clamp(min=1e-12)
    return total


def win_rates(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Share of its group that each sample beats, a tie counting half (Pref-GRPO, arXiv 2508.20751).

    Args:
        rewards: `(N, ...)`; NaN takes no part and stays NaN. Only the order matters.

    Returns:
        the shape of `rewards`, float64; sums to half the group's size. A sample without a scored companion: NaN.
    """
    result = torch.full(rewards.shape, torch.nan, dtype=torch.float64)
    for group in torch.unique(group_ids):
        rows = (group_ids == group).nonzero()[:, 0]
        own = torch.where(rewards[rows].isfinite(), rewards[rows].double(), torch.nan)
        better = (own[:, None] > own[None]).double() + 0.5 * (own[:, None] == own[None])
        others = own.isfinite().sum(0) - 1
        wins = (better.sum(1) - 0.5) / others
        result[rows] = torch.where(own.isfinite() & (others > 0), wins, torch.nan)
    return result

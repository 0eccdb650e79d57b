"""Rewards of a sample's views to values of its units: what a denoising step is credited with. Pure.

Shapes: `N` samples; `V` views, in the order of denoising, the last the sample itself; `U` units. With dense
completions V = U + 1: view u is the ODE completion of the state before unit u. Missing rewards are NaN and spread to
the values that need them.
"""

from __future__ import annotations

import torch


def increments(rewards: torch.Tensor) -> torch.Tensor:
    """DenseGRPO (arXiv 2601.20218): what each stochastic step adds to the reward of the ODE completion.

    `rewards (N, U + 1)` to `(N, U)`. The increments of a sample telescope to its reward less that of the completion of
    the state before the first of its steps.
    """
    return rewards.diff(dim=1)


def turning_points(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """TP-GRPO (arXiv 2602.06422): where the reward turns towards where it ends.

    With R_0 .. R_U the completions' rewards and d_t = R_t - R_{t-1}: step t >= 2 is a turning point if d_{t-1} goes
    against the whole change R_U - R_0, d_t goes with it, and so does what follows, R_U - R_t. The first step is one if
    d_1 and R_U - R_1 have the same sign. The last step cannot be one, as nothing follows it.

    Args:
        rewards: `(N, U + 1)`.

    Returns:
        `(N, U)` bool, and the values R_U - R_{t-1} that turning points are credited with, `(N, U)`.
    """
    steps, last = rewards.diff(dim=1), rewards[:, -1:]
    towards = steps.sign() * (last - rewards[:, :1]).sign()
    goes_on = steps.sign() * (last - rewards[:, 1:]).sign() > 0
    turned = torch.cat([torch.ones_like(goes_on[:, :1]), (towards[:, :-1] < 0) & (towards[:, 1:] > 0)], 1)
    return turned & goes_on, last - rewards[:, :-1]


def balanced(selected: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As many positive as negative selected entries, those of the largest values; all of them if one sign is missing.

    Args:
        selected, values: `(N, U)`; the sign is that of `values`. All of a batch are balanced together.
    """
    positive, negative = selected & (values > 0), selected & (values < 0)
    kept = min(int(positive.sum()), int(negative.sum()))
    if kept == 0:
        return selected
    result = torch.zeros_like(selected).flatten()
    for side in (positive, negative):
        places = side.flatten().nonzero()[:, 0]
        largest = values.flatten()[places].abs().argsort(descending=True, stable=True)[:kept]
        result[places[largest]] = True
    return result.reshape(selected.shape)


def turning_point_rewards(rewards: torch.Tensor, *, balance: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Step rewards of TP-GRPO: increments, and R_U - R_{t-1} instead of them at turning points.

    Args:
        rewards: `(N, U + 1)`.
        balance: keep equally many positive and negative turning points over the batch, those of samples with the
            largest whole change R_U - R_0, as the authors' scripts do.

    Returns:
        step rewards `(N, U)`, and which steps are turning points `(N, U)`.
    """
    selected, values = turning_points(rewards)
    if balance:
        selected = balanced(selected, (rewards[:, -1:] - rewards[:, :1]).expand_as(values))
    return torch.where(selected, values, increments(rewards)), selected


def tree_rewards(rewards: torch.Tensor, splits_until: torch.Tensor, num_splits: int) -> torch.Tensor:
    """BranchGRPO (arXiv 2509.06040): each edge of a binary tree gets the mean reward of the leaves below it.

    Args:
        rewards: `(N,)` of the leaves, whole trees of 2^num_splits leaves in order.
        splits_until: `(U,)` number of splits at a unit's step or before.

    Returns:
        `(N, U)`, equal for leaves that share the edge. A missing leaf is left out of the mean.
    """
    columns = []
    for splits in splits_until.tolist():
        below = 2 ** (num_splits - splits)
        columns.append(rewards.reshape(-1, below).nanmean(1).repeat_interleave(below))
    return torch.stack(columns, 1)

"""Centers and scales rewards within groups. Pure.

Shapes: `N` samples, `U` units. A missing reward is NaN: it takes no part in any statistic and gets
advantage 0.
"""

from __future__ import annotations

from typing import Literal

import torch

SCALES = ("group", "batch", "none")
_TINY = 1e-6  # a std below this share of the rewards' magnitude is rounding noise, and counts as zero


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    std_floor: float = 1e-4,
    leave_one_out: bool = False,
) -> torch.Tensor:
    """`(r - mean of its group) / (std + std_floor)`, as in GRPO (arXiv 2402.03300, section 4.1).

    Args:
        rewards: `(N,)` or `(N, U)`; each column of the latter is normalised on its own. NaN or infinite = no score.
        group_ids: `(N,)` integers; equal id, same group, in any order.
        scale: divide by the std of the group, of the whole batch around its mean (Flow-GRPO's "global std"), or
            by nothing (Dr. GRPO).
        std_floor: added to the std, so that tiny differences are not blown up.
        leave_one_out: center by the mean of the other members (RLOO).

    Returns:
        float64 tensor of the shape of `rewards`. Exactly 0 in groups of equal rewards, for missing scores, and for
        a sample without a scored companion. Standard deviations have ddof 0.

    Raises:
        ValueError: shapes or `scale` do not fit.
    """
    if rewards.ndim not in (1, 2) or group_ids.shape != rewards.shape[:1]:
        raise ValueError(
            "expected rewards (N,) or (N, U) and group_ids (N,), "
            f"got {tuple(rewards.shape)} and {tuple(group_ids.shape)}"
        )
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    columns = rewards.double() if rewards.ndim == 2 else rewards.double()[:, None]
    index = torch.unique(group_ids, return_inverse=True)[1]
    valid = columns.isfinite()
    values = torch.where(valid, columns, 0.0)
    count = _group_sum(valid.double(), index)
    mean = _group_sum(values, index) / count.clamp(min=1)
    centered = torch.where(valid, values - mean[index], 0.0)
    std = (_group_sum(centered.square(), index) / count.clamp(min=1)).sqrt()
    magnitude = _group_max(values.abs(), index)
    flat = (std <= _TINY * magnitude) | (count < 2)
    centered = torch.where(flat[index], 0.0, centered)
    if leave_one_out:
        centered = centered * (count / (count - 1).clamp(min=1))[index]
    if scale == "group":
        centered = centered / (std + std_floor)[index].clamp(min=torch.finfo(torch.float64).tiny)
    elif scale == "batch":
        centered = centered / (_batch_std(values, valid) + std_floor).clamp(min=torch.finfo(torch.float64).tiny)
    return centered.reshape(rewards.shape)


def zero_std_fraction(rewards: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Share of groups in which all scored rewards `(N,)` are equal (or fewer than two are scored)."""
    advantages = group_advantages(rewards, group_ids, scale="none")
    index = torch.unique(group_ids, return_inverse=True)[1]
    return (_group_max(advantages[:, None].abs(), index)[:, 0] == 0).double().mean().item()


def _group_sum(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    result = values.new_zeros(int(index.max()) + 1, values.shape[1])
    return result.index_add_(0, index, values)


def _group_max(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    result = values.new_zeros(int(index.max()) + 1, values.shape[1])
    return result.scatter_reduce_(0, index[:, None].expand_as(values), values, "amax")


def _batch_std(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    count = valid.double().sum(0).clamp(min=1)
    mean = values.sum(0) / count
    return (torch.where(valid, values - mean, 0.0).square().sum(0) / count).sqrt()

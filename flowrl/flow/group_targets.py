"""DGPO, direct group preference optimization (arXiv 2510.08425): what each row of a group weighs in its gradient. Pure.

Shapes: `B` rows; an error `(B,)` is the mean squared residual of a velocity, at a time and noise shared by the group.
"""

from __future__ import annotations

import torch


def group_weights(
    advantages: torch.Tensor,
    error: torch.Tensor,
    reference_error: torch.Tensor,
    group: torch.Tensor,
    *,
    beta: float,
) -> torch.Tensor:
    """w_g = sigmoid(beta mean over the group of A (error - reference error)), `(B,)`, without gradient.

    The weight starts at 1/2 and falls as errors move the way the advantages ask. The loss of a row is w_g A error; beta
    times the gradient of its mean over a group is that of -log sigmoid(-beta mean A (error - reference error)). For a
    pair with advantages 1 and -1 this is Diffusion-DPO with the same beta.

    Args:
        group: `(B,)` integers; equal id, same group, in any order, and each group whole.

    Raises:
        ValueError: shapes differ.
    """
    _same_shapes(advantages, error, reference_error, group)
    index, count = torch.unique(group, return_inverse=True, return_counts=True)[1:]
    gain = advantages.float() * (error.detach() - reference_error.detach()).float()
    mean = gain.new_zeros(len(count)).index_add_(0, index, gain) / count
    return (beta * mean).sigmoid()[index]


def ratio_mask(error: torch.Tensor, old_error: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """Rows that keep their gradient, `(B,)` bool, as by PPO's clip.

    The ratio is exp(old error - error). Dropped are rows with A > 0 above 1 + clip, and with A <= 0 below 1 - clip.

    Args:
        old_error: of the lagged weights, at the same time and noise.

    Raises:
        ValueError: shapes differ.
    """
    _same_shapes(error, old_error, advantages)
    ratio = (old_error.detach() - error.detach()).float().exp()
    return ~torch.where(advantages > 0, ratio > 1 + clip, ratio < 1 - clip)


def _same_shapes(*values: torch.Tensor) -> None:
    shapes = [tuple(value.shape) for value in values]
    if len(set(shapes)) > 1:
        raise ValueError(f"shapes differ: {', '.join(map(str, shapes))}")

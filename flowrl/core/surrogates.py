"""Ratio losses. Pure.

Shapes: `B` rows, each one unit (a denoising step or a token) of one sample.
"""

from __future__ import annotations

import torch


def clipped_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective (arXiv 1707.06347, equation 7), one loss for each row.

    With r = exp(log_prob - old_log_prob): `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    Args:
        log_prob: `(B,)`, with gradient.
        old_log_prob: `(B,)` of the policy that sampled.
        advantages: `(B,)`.

    Returns:
        loss `(B,)` and metrics (detached): `ratio` `(B,)`, and `clipped` `(B,)`, true where the clip stops the
        gradient.

    Raises:
        ValueError: shapes differ (nothing broadcasts).
    """
    if not log_prob.shape == old_log_prob.shape == advantages.shape:
        raise ValueError(
            f"shapes differ: log_prob {tuple(log_prob.shape)}, old_log_prob {tuple(old_log_prob.shape)}, "
            f"advantages {tuple(advantages.shape)}"
        )
    advantages = advantages.to(log_prob.dtype)
    ratio = (log_prob - old_log_prob.detach()).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    stopped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return loss, {"ratio": ratio.detach(), "clipped": stopped.detach()}

"""Policy-gradient losses of denoising steps, beside the clipped surrogate. Pure.

Shapes: `B` units; means `(B, ...)`, stds `(B,)`.
"""

from __future__ import annotations

import torch

from flowrl.core.gaussian import gaussian_kl
from flowrl.core.surrogates import clipped_surrogate


def guarded_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mean: torch.Tensor,
    old_mean: torch.Tensor,
    std: torch.Tensor,
    step: torch.Tensor,
    *,
    clip_range: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """GRPO-Guard (arXiv 2510.22319): a ratio whose logarithm has mean zero and the same scale at every step.

    The logarithm of the ratio is mean(z D) / std - mean(D^2) / (2 std^2), with D the shift of the mean and z the
    sampled noise; its second term pulls ratios below 1, more so at quiet steps. Guard adds that term back and
    multiplies by the std: log r = mean(z D). The clipped loss is then divided by the step size.

    Args:
        old_mean: of the sampler's Gaussian.
        step: sigma - sigma_next, `(B,)`.

    Returns:
        loss `(B,)` and metrics, as `clipped_surrogate`; its `ratio` is the guarded one.
    """
    shift = gaussian_kl(mean, old_mean, std)
    guarded = (log_prob - old_log_prob + shift) * std
    zero = torch.zeros_like(guarded)
    loss, metrics = clipped_surrogate(guarded, zero, advantages, clip_low=clip_range, clip_high=clip_range)
    return loss / step, metrics


def divergence_masked_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mean: torch.Tensor,
    old_mean: torch.Tensor,
    std: torch.Tensor,
    *,
    limit: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Flow-DPPO: units are dropped by their divergence from the sampler, not by their ratio.

    `-A r`, and nothing where KL(new || old) >= limit and the ratio has already moved the way the advantage asks,
    (r - 1) A > 0. The divergence is that of the whole step, so one lucky noise cannot hide it.

    Returns:
        loss `(B,)` and metrics as `clipped_surrogate`, and `divergence`.
    """
    ratio = (log_prob - old_log_prob).exp()
    divergence = gaussian_kl(mean, old_mean, std).detach()
    dropped = (divergence >= limit) & ((ratio.detach() - 1) * advantages > 0)
    loss = torch.where(dropped, 0.0, -advantages * ratio)
    return loss, {"ratio": ratio.detach(), "clipped": dropped, "divergence": divergence}

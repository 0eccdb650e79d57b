"""Losses of preferences: pairs of a winner and a loser, and samples judged one by one. Pure.

Shapes: `B` pairs or samples; an error `(B,)` is the mean squared residual of a prediction, of the trained network or
of the frozen reference, at the same time and noise for all that a pair compares. Losses are `(B,)`; their mean is the
caller's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from flowrl.core.gaussian import per_row

from .matching import mean_square


def dpo_logit(
    error_w: torch.Tensor,
    error_l: torch.Tensor,
    reference_w: torch.Tensor,
    reference_l: torch.Tensor,
    *,
    beta: float,
) -> torch.Tensor:
    """Diffusion-DPO (arXiv 2311.12908): u = -(beta / 2) [(e_w - e_l) - (ref_w - ref_l)], `(B,)`.

    A pair counts as ordered rightly where u > 0.

    Raises:
        ValueError: shapes differ.
    """
    _same_shapes(error_w, error_l, reference_w, reference_l)
    return -0.5 * beta * ((error_w - error_l) - (reference_w - reference_l))


def dpo_loss(logit: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(u)."""
    return -logsigmoid(logit)


def kto_loss(
    error: torch.Tensor,
    reference: torch.Tensor,
    desirable: torch.Tensor,
    *,
    beta: float,
    utility: Literal["kto", "loss_averse", "risk_seeking"] = "kto",
    baseline: Literal["batch", "signs"] = "batch",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Diffusion-KTO (arXiv 2404.04465): w (1 - U(z)), z = +-beta (ref - e - KL), minus for undesirable samples.

    Args:
        desirable: bool.
        utility: U(z) is "kto" sigmoid(z), "loss_averse" log sigmoid(z), or "risk_seeking" -log sigmoid(-z), whose
            loss has no lower bound.
        baseline: KL, without gradient: "batch" is the mean of ref - e, at least 0; "signs" the average of its means
            over the desirable and over the undesirable samples, each 0 where there are none.

    Raises:
        ValueError: shapes differ; unknown utility or baseline.
    """
    _same_shapes(error, reference, desirable)
    gain, wanted = reference - error, desirable.bool()
    if baseline == "batch":
        kl = gain.detach().mean().clamp(min=0)
    elif baseline == "signs":
        kl = 0.5 * (_mean_where(gain.detach(), wanted) + _mean_where(gain.detach(), ~wanted))
    else:
        raise ValueError(f"unknown baseline {baseline!r}; known: batch, signs")
    z = beta * torch.where(wanted, gain - kl, kl - gain)
    if utility == "kto":
        value = z.sigmoid()
    elif utility == "loss_averse":
        value = logsigmoid(z)
    elif utility == "risk_seeking":
        value = -logsigmoid(-z)
    else:
        raise ValueError(f"unknown utility {utility!r}; known: kto, loss_averse, risk_seeking")
    return torch.where(wanted, desirable_weight, undesirable_weight) * (1 - value)


def _mean_where(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return (values * chosen).sum() / chosen.sum().clamp(min=1)


def dspo_loss(
    residual_w: torch.Tensor, difference_w: torch.Tensor, logit: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """DSPO (direct score preference optimization, ICLR 2025), `(B,)`.

    Mean of (residual - beta (1 - sigmoid(u)) difference)^2.

    Args:
        residual_w: prediction minus target on the winner, `(B, ...)`.
        difference_w: prediction minus the reference's, `(B, ...)`.
        logit: u of `dpo_logit` with the same beta, `(B,)`; it gets no gradient.

    Raises:
        ValueError: shapes differ.
    """
    _same_shapes(residual_w, difference_w)
    pull = beta * (1 - logit.detach().sigmoid())
    return mean_square(residual_w - per_row(pull, difference_w) * difference_w)


def mapo_loss(
    error_w: torch.Tensor, error_l: torch.Tensor, *, beta: float, steps: int = 1000, scale: float = 0.5
) -> torch.Tensor:
    """MaPO (arXiv 2406.06424), without a reference: e_w - beta log sigmoid(T [phi(e_w) - phi(e_l)]), `(B,)`.

    phi(e) = s e / (exp(s e) - 1), 1 at e = 0 and falling; T `steps`, s `scale`.

    Raises:
        ValueError: shapes differ.
    """
    _same_shapes(error_w, error_l)
    margin = _bernoulli(scale * error_w) - _bernoulli(scale * error_l)
    return error_w - beta * logsigmoid(steps * margin)


def _bernoulli(y: torch.Tensor) -> torch.Tensor:
    """y / (exp(y) - 1) for y >= 0; near 0, where its derivative cancels, by the series."""
    small = y < 0.1
    safe = torch.where(small, 1.0, y)
    series = 1 - y / 2 + y.square() / 12 - y**4 / 720
    return torch.where(small, series, safe * (-safe).exp() / -torch.expm1(-safe))


def spo_loss(log_ratio_w: torch.Tensor, log_ratio_l: torch.Tensor, *, beta: float, clip: float = 0.1) -> torch.Tensor:
    """SPO, step-aware preference optimization (arXiv 2406.04314): -log sigmoid(beta log rho_w - beta log rho_l).

    rho is the ratio of the trained to the reference policy for one stochastic step, clipped to 1 +- `clip`.

    Args:
        log_ratio_w: log ratio of the step to the winner, `(B,)`; both steps start at the same state.
        log_ratio_l: of that to the loser, `(B,)`.

    Raises:
        ValueError: shapes differ.
    """
    _same_shapes(log_ratio_w, log_ratio_l)
    rho_w, rho_l = (ratio.exp().clamp(1 - clip, 1 + clip) for ratio in (log_ratio_w, log_ratio_l))
    return -logsigmoid(beta * (rho_w.log() - rho_l.log()))


def safeguard(gradient_w: torch.Tensor, gradient_l: torch.Tensor, *, mu: float) -> torch.Tensor:
    """Diffusion-SDPO (arXiv 2511.03317): a factor in [0, 1] for the loser's gradient, `(B,)`, without gradient.

    clip((1 - mu) |g_w|^2 / <g_l, g_w>, 0, 1) where the product is positive, else 1. To first order a step along
    -g_w + factor g_l then lowers the winner's error by at least mu of what -g_w alone would.

    Args:
        gradient_w: of the winner's error with respect to the output, `(B, ...)`; residuals serve, being proportional.
        gradient_l: of the loser's, `(B, ...)`, of the same scale.

    Raises:
        ValueError: shapes differ.
    """
    _same_shapes(gradient_w, gradient_l)
    own, other = gradient_w.detach().float().flatten(1), gradient_l.detach().float().flatten(1)
    product = (own * other).sum(1)
    against = product > 0
    limit = (1 - mu) * own.square().sum(1) / torch.where(against, product, 1.0)
    return torch.where(against, limit.clamp(0, 1), 1.0)


def scale_gradient(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`value (B, ...)` unchanged, its gradient multiplied by `factor (B,)`."""
    fixed = value.detach()
    return fixed + per_row(factor.detach(), value) * (value - fixed)


def _same_shapes(*values: torch.Tensor) -> None:
    shapes = [tuple(value.shape) for value in values]
    if len(set(shapes)) > 1:
        raise ValueError(f"shapes differ: {', '.join(map(str, shapes))}")

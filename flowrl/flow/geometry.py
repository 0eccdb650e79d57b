"""Errors weighted by where a frozen reference is sensitive: APO (arXiv 2610.04980). Pure; probes are injected.

The Jacobian J of the reference's noise prediction with respect to its input is large across the data manifold and
small along it, the more so the less noise there is. An error under the metric M = d (I + lam J J^T) / tr(I + lam J J^T)
instead of the identity makes Diffusion-DPO's beta depend on the direction; M has mean eigenvalue 1. J J^T is estimated
as the mean of u u^T over u = J z with random signs z. The paper has no public code: normalisation, step, number of
probes and strength are this project's.
Shapes: `B` rows, `K` probes, inputs and residuals `(B, ...)` with d elements a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flowrl.core.gaussian import per_row

from .matching import mean_square


@torch.no_grad()
def sensitivities(
    noise_of: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    noise_at_x: torch.Tensor,
    probes: torch.Tensor,
    *,
    step: float = 1e-2,
) -> torch.Tensor:
    """u_k = (eps_ref(x + h z_k) - eps_ref(x)) / h, about J z_k, `(K, B, ...)` float32, without gradient.

    Args:
        noise_of: the reference's noise prediction, called once with `(K * B, ...)`, row k * B + b for probe k of row
            b. In half precision the difference drowns in rounding unless `step` is larger.
        noise_at_x: its prediction at x. A flow's is x + (1 - t) v, which has to move with x.
        probes: z, random signs, `(K, B, ...)`.
        step: h as a share of the root mean square of each row of x.

    Raises:
        ValueError: the shapes do not fit.
    """
    if not probes.shape[1:] == x.shape == noise_at_x.shape:
        raise ValueError(
            f"expected probes (K, B, ...) of x and noise_at_x (B, ...), got {tuple(probes.shape)}, {tuple(x.shape)}, "
            f"{tuple(noise_at_x.shape)}"
        )
    h = per_row(step * mean_square(x).sqrt(), x)
    moved = noise_of((x.float() + h * probes.float()).flatten(0, 1)).float().reshape(probes.shape)
    return (moved - noise_at_x.float()) / h


def metric_strength(u: torch.Tensor, *, relative: float = 1.0, inside: torch.Tensor | None = None) -> torch.Tensor:
    """lam `(B,)` with lam mean(u^2) = `relative` in each row of `u (K, B, ...)`.

    Args:
        inside: bool `(B,)`; lam is 0 elsewhere, as at noisy times, where sensitivities hardly differ.
    """
    lam = relative / mean_square(u.transpose(0, 1)).clamp(min=1e-12)
    return lam if inside is None else torch.where(inside, lam, 0.0)


def metric_error(
    residual: torch.Tensor, u: torch.Tensor, strength: torch.Tensor, *, diagonal: bool = False
) -> torch.Tensor:
    """|e|^2_M / d = (|e|^2 + (lam / K) sum_k <e, u_k>^2) / (d + (lam / K) sum_k |u_k|^2), `(B,)` float32.

    Differentiable in the residual only. With strength 0 it is `mean_square` to the bit. Of a prediction minus the
    reference's it is a penalty that holds sensitive directions back.

    Args:
        residual: e, of noise predictions, `(B, ...)`. A flow's velocity residual differs by a factor 1 - t.
        u: from `sensitivities` at the same x, `(K, B, ...)`.
        strength: lam, `(B,)`.
        diagonal: keep the diagonal of M only, weights proportional to 1 + lam mean_k u_k^2: less variance where d is
            large, but blind to directions that are not axes.

    Raises:
        ValueError: shapes differ.
    """
    if u.shape[1:] != residual.shape or strength.shape != residual.shape[:1]:
        raise ValueError(
            f"expected u (K, B, ...) and strength (B,) of residual (B, ...), got {tuple(u.shape)}, "
            f"{tuple(strength.shape)}, {tuple(residual.shape)}"
        )
    e, u, lam = residual.float().flatten(1), u.detach().float().flatten(2), strength.detach().float()
    scale = 1 + lam * u.square().mean((0, 2))
    if diagonal:
        return (e.square() * (1 + lam[:, None] * u.square().mean(0))).mean(1) / scale
    along = (e * u).sum(2).square().mean(0)
    return (e.square().mean(1) + lam * along / e.shape[1]) / scale

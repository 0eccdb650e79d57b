"""The rectified-flow path x = (1 - sigma) x0 + sigma eps, and what a velocity says about its ends. Pure.

Conventions: sigma 1 is noise, 0 is clean; v = eps - x0. Shapes: `B` rows; `x`, `velocity` `(B, ...)`; `sigma (B,)`.
"""

from __future__ import annotations

import torch

from flowrl.core.gaussian import per_row


def predict_clean(x: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The clean sample that the velocity points to: x - sigma v, float32."""
    return x.float() - per_row(sigma, x) * velocity.float()


def predict_noise(x: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The noise that the velocity points away from: x + (1 - sigma) v, float32."""
    return x.float() + (1 - per_row(sigma, x)) * velocity.float()

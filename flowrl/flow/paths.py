"""Gaussian paths x = alpha x0 + sigma eps, and what a network's output says about their ends. Pure.

sigma 1 is noise, 0 is clean. Two paths: "rectified" flow, alpha = 1 - sigma; and "variance_preserving" diffusion,
alpha = sqrt(1 - sigma^2), where DDPM's cumulative product is alpha^2 (float32 keeps four digits of alpha at the noisy
end of Stable Diffusion's schedule; schedules that end at alpha 0 would need alpha itself). Velocity means eps - x0.
Shapes: `B` rows; `x`, outputs `(B, ...)`; `sigma (B,)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flowrl.core.gaussian import per_row
from flowrl.registry import suggest

PATHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rectified": lambda sigma: 1 - sigma,
    "variance_preserving": lambda sigma: (1 - sigma.square()).clamp(min=0).sqrt(),
}


def predict_clean(x: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The clean sample that a rectified flow's velocity points to: x - sigma v, float32."""
    return x.float() - per_row(sigma, x) * velocity.float()


def predict_noise(x: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The noise that a rectified flow's velocity points away from: x + (1 - sigma) v, float32."""
    return x.float() + (1 - per_row(sigma, x)) * velocity.float()


def predict_ends(
    x: torch.Tensor, output: torch.Tensor, sigma: torch.Tensor, *, path: str = "rectified", prediction: str = "velocity"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clean sample and noise, float32, from a network's output on either path.

    Args:
        prediction: "velocity" (eps - x0), "epsilon", "sample" (x0), or "v_prediction" (alpha eps - sigma x0, on the
            variance-preserving path only).

    Raises:
        ValueError: unknown path or prediction, or v_prediction on another path.
    """
    if path not in PATHS:
        raise ValueError(f"unknown path {path!r}; {suggest(path, list(PATHS))}")
    x, output = x.float(), output.float()
    s = per_row(sigma, x)
    alpha = PATHS[path](s)
    if prediction == "velocity":
        return (x - s * output) / (alpha + s), (x + alpha * output) / (alpha + s)
    if prediction == "epsilon":
        return (x - s * output) / alpha, output
    if prediction == "sample":
        return output, (x - alpha * output) / s
    if prediction == "v_prediction" and path == "variance_preserving":
        return alpha * x - s * output, s * x + alpha * output
    raise ValueError(_no_prediction(prediction))


def training_target(
    clean: torch.Tensor,
    noise: torch.Tensor,
    sigma: torch.Tensor,
    *,
    path: str = "rectified",
    prediction: str = "velocity",
) -> torch.Tensor:
    """What a network with this prediction is trained to output at the noised sample, `(B, ...)`.

    Raises:
        ValueError: as `predict_ends`.
    """
    if prediction == "velocity":
        return noise - clean
    if prediction == "epsilon":
        return noise
    if prediction == "sample":
        return clean
    if prediction == "v_prediction" and path == "variance_preserving":
        s = per_row(sigma, clean)
        return PATHS[path](s) * noise - s * clean
    raise ValueError(_no_prediction(prediction))


def implied_noise(
    x: torch.Tensor, clean: torch.Tensor, sigma: torch.Tensor, *, path: str = "rectified"
) -> torch.Tensor:
    """The noise of which `x` is `clean` noised to `sigma`: (x - alpha x0) / sigma, float32."""
    s = per_row(sigma, x)
    return (x.float() - PATHS[path](s) * clean.float()) / s


def _no_prediction(prediction: str) -> str:
    known = ["velocity", "epsilon", "sample", "v_prediction"]
    if prediction in known:
        return "v_prediction exists on the variance_preserving path only"
    return f"unknown prediction {prediction!r}; {suggest(prediction, known)}"

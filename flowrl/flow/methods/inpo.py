"""InPO / DDIM-InPO (arXiv 2503.18454): Diffusion-DPO with the noise that the model itself ascribes to an image.

Defaults: beta 2000 (SD1.5, from a fine-tuned start; SDXL 5000), a tenth of fresh noise on the inverted latent.
Deviations: the inversion takes `inversion_steps` DDIM steps to a uniform time, without guidance.
NFE per sample, k draws, s inversion steps: rollout T (0 with `data.pairs`); update (4 + 2 s) k / G.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .diffusion_dpo import DiffusionDPO

if TYPE_CHECKING:
    from flowrl.core.types import UnitBatch
    from flowrl.flow.endpoints import NoisedUnits


class InPO(DiffusionDPO):
    """InPO: Diffusion-DPO on inverted latents, with the noise they imply."""

    paper: ClassVar[str] = "arXiv 2503.18454"
    nfe: ClassVar[str] = "T + 0 + (4+2s)k/G"

    name: Literal["inpo"] = "inpo"  # type: ignore[assignment]
    inversion_steps: int = Field(4, ge=1)
    """DDIM steps from the image to the drawn time."""
    fresh_noise: float = Field(0.1, ge=0)
    """Standard deviation of fresh noise, relative to the time's."""

    def inputs(self, policy: Any, batch: UnitBatch) -> NoisedUnits:
        """The images, inverted by the present model to the drawn times."""
        import torch

        from flowrl.core.gaussian import per_row
        from flowrl.flow.matching import noised
        from flowrl.flow.paths import implied_noise, predict_ends, training_target

        u: NoisedUnits = batch.inputs
        x, sigma = u.clean.to(policy.device), u.sigma.to(policy.device)
        space = {"path": u.path, "prediction": u.prediction}
        with torch.no_grad():
            for step in range(self.inversion_steps):
                here, there = (sigma * number / self.inversion_steps for number in (step, step + 1))
                clean, noise = predict_ends(x, policy.predict_at(x, here, u.cond), here, **space)
                x = noised(clean, noise, there, path=u.path)
        x = x + self.fresh_noise * per_row(sigma, x) * u.noise.to(x.device)
        clean = u.clean.to(x.device)
        noise = implied_noise(x, clean, sigma, path=u.path)
        return replace(u, x=x, noise=noise, target=training_target(clean, noise, sigma, **space))

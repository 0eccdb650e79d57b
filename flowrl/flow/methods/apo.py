"""APO, anisotropic geometry-aware preference optimization (arXiv 2610.04980): Diffusion-DPO under a metric.

The reference's sensitivity to its input, from finite differences, says which directions leave the image manifold;
errors along them count more. There is no public code: form, normalisation and constants are this project's.
Defaults: two probes, a step of 0.01 of the latent's rms, strength so that metric and identity weigh the same, times up
to 0.6; beta as of Diffusion-DPO, which strength 0 is to the bit.
Deviations: with the network's own residual under the metric of the noise prediction's Jacobian; at a given time the two
residuals are proportional.
NFE per sample, k draws, K probes: rollout T (0 with `data.pairs`); update (4 + 2 K p) k / G, p the share of times up to
the gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .diffusion_dpo import DiffusionDPO

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.flow.endpoints import EndpointPlan, NoisedUnits


class APO(DiffusionDPO):
    """APO: Diffusion-DPO whose errors count more where the reference is sensitive."""

    paper: ClassVar[str] = "arXiv 2610.04980"
    nfe: ClassVar[str] = "T + 0 + (4+2Kp)k/G"

    name: Literal["apo"] = "apo"  # type: ignore[assignment]
    num_probes: int = Field(2, ge=1)
    """K random directions for each noised image."""
    probe_step: float = Field(1e-2, gt=0)
    """Step along them, relative to the latent's root mean square."""
    strength: float = Field(1.0, ge=0)
    """Weight of the sensitive directions relative to the identity; 0 is Diffusion-DPO."""
    latest_time: float = Field(0.6, ge=0, le=1)
    """The metric is the identity at noisier times."""
    diagonal: bool = False
    """Keep the metric's diagonal only."""
    penalty: float | None = Field(None, gt=0)
    """Instead of in the errors, use the metric in a penalty of this weight on the distance to the reference."""

    def plans(self, grid: torch.Tensor, *, iteration: int, rng: np.random.Generator) -> list[EndpointPlan]:
        """Each draw has its probes."""
        plans = super().plans(grid, iteration=iteration, rng=rng)
        return [replace(plan, num_probes=self.num_probes) for plan in plans] if self.strength else plans

    def errors(self, policy: Any, u: NoisedUnits, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Errors under the metric; or plain ones, and the penalty."""
        from flowrl.flow.geometry import metric_error

        if not self.strength:
            return super().errors(policy, u, out)
        probed, strength = self._metric(policy, u, out["reference"])

        def error(residual: torch.Tensor) -> torch.Tensor:
            return metric_error(residual, probed, strength, diagonal=self.diagonal)

        if self.penalty is None:
            return {name: error(output - u.target.to(output.device)) for name, output in out.items()}
        penalty = self.penalty * error(out["trained"] - out["reference"])
        return super().errors(policy, u, out) | {"penalty": penalty}

    def _metric(self, policy: Any, u: NoisedUnits, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sensitivities `(K, B, *latent)` of the reference's noise prediction, and their weight `(B,)`."""
        import torch

        from flowrl.flow.geometry import metric_strength, sensitivities
        from flowrl.flow.paths import predict_ends

        assert u.probes is not None
        x, sigma = u.x.to(reference.device), u.sigma.to(reference.device)
        inside = sigma <= self.latest_time
        rows = inside.nonzero()[:, 0]
        probes = u.probes.to(x.device)
        found = torch.zeros_like(probes)

        def noise_at(moved: torch.Tensor) -> torch.Tensor:
            copies = rows.repeat(len(probes))
            output = policy.predict_at(moved, sigma[copies], u.cond[copies.cpu()])
            return predict_ends(moved, output, sigma[copies], path=u.path, prediction=u.prediction)[1]

        here = predict_ends(x, reference, sigma, path=u.path, prediction=u.prediction)[1]
        if len(rows):
            with policy.reference():
                found[:, rows] = sensitivities(noise_at, x[rows], here[rows], probes[:, rows], step=self.probe_step)
        return found, metric_strength(found, relative=self.strength, inside=inside)

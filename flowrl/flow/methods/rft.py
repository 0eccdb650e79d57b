"""Rejection fine-tuning: the pre-training loss on the best samples of each group (online SFT of Flow-GRPO's code).

Defaults: one sample of a group, uniform times, a pull to the reference. No paper of its own.
NFE per sample, k draws, n of G kept: rollout T; update k n / G, twice that with the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from flowrl.config import RolloutSection

from .regression import RegressionMethod

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import Scores, UnitBatch


class RFT(RegressionMethod):
    """Rejection fine-tuning: the best samples of each group are the data of plain flow matching."""

    paper: ClassVar[str] = "Flow-GRPO's code"
    nfe: ClassVar[str] = "T + 0 + k n/G"

    name: Literal["rft"] = "rft"
    num_kept: int = Field(1, ge=1)
    """Samples of a group that are kept, those above its mean only."""
    beta_reference: float = Field(0.0, ge=0)
    """Weight of the square distance to the reference velocity."""

    @property
    def needs_reference(self) -> bool:
        """Only its own term asks for the reference."""
        return self.beta_reference > 0

    def problems(self, rollout: RolloutSection) -> list[str]:
        """More are kept than there are."""
        if self.num_kept >= rollout.group_size:
            return [f"method.num_kept={self.num_kept} must be fewer than rollout.group_size={rollout.group_size}"]
        return super().problems(rollout)

    def select(self, advantages: torch.Tensor, scores: Scores, rng: np.random.Generator) -> torch.Tensor:
        """All draws of the best samples of each group, as long as they are above its mean."""
        import torch

        keep = torch.zeros(advantages.shape, dtype=torch.bool)
        for group in torch.unique(scores.group):
            rows = (scores.group == group).nonzero()[:, 0]
            best = rows[advantages[rows, 0].argsort(descending=True, stable=True)[: self.num_kept]]
            keep[best] = advantages[best] > 0
        return keep

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Mean square distance to eps - x0, plus the pull to the reference, `(B,)`."""
        from flowrl.flow.matching import mean_square

        v = self.velocities(policy, batch, *(["reference"] if self.needs_reference else []))
        loss = mean_square(v["trained"] - batch.inputs.line.to(v["trained"].device))
        metrics = {"policy_loss": loss.detach()}
        if self.needs_reference:
            drift = mean_square(v["trained"] - v["reference"])
            loss, metrics["velocity_drift"] = loss + self.beta_reference * drift, drift.detach()
        return loss, metrics

"""Supervised fine-tuning: the pre-training loss on the images of a data set, of pairs on the winners.

Defaults: uniform times, four draws, no pull to the reference. No paper of its own.
NFE per sample, k draws: rollout 0; update k, twice that with the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .regression import RegressionMethod

if TYPE_CHECKING:
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import UnitBatch


class SFT(RegressionMethod):
    """Supervised fine-tuning: plain flow matching on the images of a data set."""

    paper: ClassVar[str] = "none"
    nfe: ClassVar[str] = "0 + 0 + k"
    data_images: ClassVar[int] = 1
    needs_data: ClassVar[bool] = True

    name: Literal["sft"] = "sft"
    beta_reference: float = Field(0.0, ge=0)
    """Weight of the square distance to the reference's output."""

    @property
    def needs_reference(self) -> bool:
        """Only its own term asks for the reference."""
        return self.beta_reference > 0

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Mean square distance to eps - x0, plus the pull to the reference, `(B,)`."""
        from flowrl.flow.matching import mean_square

        v = self.outputs(policy, batch.inputs, *(["reference"] if self.needs_reference else []))
        loss = mean_square(v["trained"] - batch.inputs.target.to(v["trained"].device))
        metrics = {"policy_loss": loss.detach()}
        if self.needs_reference:
            drift = mean_square(v["trained"] - v["reference"])
            loss, metrics["velocity_drift"] = loss + self.beta_reference * drift, drift.detach()
        return loss, metrics

"""DGPO, direct group preference optimization (arXiv 2510.08425): Diffusion-DPO for whole groups instead of pairs.

Defaults: the SD3.5-M setting as re-implemented in public code (beta 100, four shared times and noises, mask 1e-2, KL
weight 0.001, lagged copy with decay min(0.001 n, 0.3)). The paper gives no FLUX.1-dev setting.
Deviations: times are uniform and evenly spread; rollouts are unguided unless the config says otherwise, and come from
the trained weights throughout.
NFE per sample, k draws: rollout T; update 3 k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .regression import RegressionMethod

if TYPE_CHECKING:
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import UnitBatch


class DGPO(RegressionMethod):
    """DGPO: advantages weigh the errors of a group that shares its noise; the weight falls as it is learnt."""

    paper: ClassVar[str] = "arXiv 2510.08425"
    nfe: ClassVar[str] = "T + 0 + 3k"
    lagged_copies: ClassVar[tuple[str, ...]] = ("old",)
    whole_groups: ClassVar[bool] = True

    name: Literal["dgpo"] = "dgpo"
    shared_noise: bool = True
    beta: float = Field(100.0, gt=0)
    """Strength of the implied pull to the reference, as of Diffusion-DPO."""
    clip_range: float = Field(1e-2, gt=0)
    """Errors that moved further than this the way the advantage asks carry no gradient."""
    beta_reference: float = Field(1e-3, ge=0)
    """Weight of the square distance to the reference's output."""

    @property
    def needs_reference(self) -> bool:
        """Always."""
        return True

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Weighted error where the mask lets it through, plus the pull to the reference, `(B,)`."""
        from flowrl.flow.group_targets import group_weights, ratio_mask
        from flowrl.flow.matching import mean_square

        u = batch.inputs
        out = self.outputs(policy, u, "reference", "old")
        device = out["trained"].device
        advantages, group, target = (value.to(device) for value in (batch.advantages, u.group, u.target))
        error, reference, old = (mean_square(out[name] - target) for name in ("trained", "reference", "old"))
        weight = group_weights(advantages, error, reference, group, beta=self.beta)
        keep = ratio_mask(error, old, advantages, self.clip_range)
        loss = weight * advantages * error * keep
        drift = mean_square(out["trained"] - out["reference"])
        metrics = {"policy_loss": loss, "group_weight": weight, "masked": 1.0 - keep.float(), "velocity_drift": drift}
        return loss + self.beta_reference * drift, {name: value.detach() for name, value in metrics.items()}

    def finish(self, policy: Any, iteration: int) -> None:
        """The lagged copy follows."""
        policy.move_lagged("old", min(0.001 * (iteration + 1), 0.3))

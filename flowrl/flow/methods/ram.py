"""RAM, Reinforce Adjoint Matching (arXiv 2605.10759): the pre-training residual, times the advantage, corrects v_ref.

Defaults: the SD3.5-M setting as re-implemented from the official code (10 steps, guidance in rollouts, 8 draws with
density proportional to t, multiplier 100 for GenEval and OCR, 1000 for PickScore, AdamW 3e-4 without gradient clipping,
endpoints from the lagged copy with decay min(0.01 n, 0.9)). The paper gives no FLUX.1-dev setting.
NFE per sample, k draws: rollout T; update 3 k (trained, reference, old).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .regression import PowerTimes, RegressionMethod, Times

if TYPE_CHECKING:
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import UnitBatch


class RAM(RegressionMethod):
    """RAM: regression to v_ref + m A ((eps - x0) - v_old), endpoints and v_old from a lagged copy."""

    paper: ClassVar[str] = "arXiv 2605.10759"
    nfe: ClassVar[str] = "T + 0 + 3k"
    lagged_copies: ClassVar[tuple[str, ...]] = ("old",)

    name: Literal["ram"] = "ram"
    sampler: Literal["trained", "old"] = "old"
    num_draws: int = Field(8, ge=1)
    times: Times = PowerTimes()
    multiplier: float = Field(100.0, gt=0)
    """m: one over the strength of the KL divergence to the reference."""
    decay_rate: float = Field(0.01, ge=0)
    """The lagged copy keeps min(decay_rate n, decay_max) of itself after iteration n."""
    decay_max: float = Field(0.9, ge=0, lt=1)
    """Largest decay."""
    advantage_clip: float = Field(float("1e6"), gt=0)

    @property
    def needs_reference(self) -> bool:
        """Always: it anchors the target."""
        return True

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Mean square distance to the target, `(B,)`."""
        from flowrl.flow.matching import mean_square, ram_target

        v = self.outputs(policy, batch.inputs, "reference", "old")
        device = v["trained"].device
        line, advantages = batch.inputs.target.to(device), batch.advantages.to(device)
        target = ram_target(v["reference"], v["old"], line, advantages, multiplier=self.multiplier)
        loss = mean_square(v["trained"] - target)
        drift = mean_square(v["trained"].detach() - v["reference"])
        return loss, {"policy_loss": loss.detach(), "velocity_drift": drift}

    def finish(self, policy: Any, iteration: int) -> None:
        """The lagged copy follows."""
        policy.move_lagged("old", min(self.decay_rate * (iteration + 1), self.decay_max))

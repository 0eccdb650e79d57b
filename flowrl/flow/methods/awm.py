"""AWM, advantage-weighted matching (arXiv 2509.25050): the matching loss is a log-likelihood, used as in PPO.

Defaults: the SD3.5-M setting (14 steps, no guidance, groups of 24, 6 draws from the grid but for its end, AdamW 3e-4,
weights 1e-3 and 1 of the pulls to the reference and to the average, whose decay is min(0.3, 0.001 n)). The paper gives
no FLUX.1-dev setting.
Deviations from the code: the old policy is a copy of the weights that sampled, so the ratio moves and the clip acts
after the first update (the code's is the trained one itself, and its clip range of 1 never acts); times differ between
samples.
NFE per sample, k draws: rollout T; update 4 k (trained, old, average, reference), fewer where a weight is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .regression import GridTimes, RegressionMethod, Times
from .rewarded import Scale

if TYPE_CHECKING:
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import UnitBatch


class AWM(RegressionMethod):
    """AWM: a clipped policy gradient whose log-likelihood is the time-weighted matching loss."""

    paper: ClassVar[str] = "arXiv 2509.25050"
    nfe: ClassVar[str] = "T + 0 + 4k"
    lagged_copies: ClassVar[tuple[str, ...]] = ("old", "average")

    name: Literal["awm"] = "awm"
    num_draws: int = Field(6, ge=1)
    times: Times = GridTimes(fraction=0.9)
    advantage_scale: Scale = "batch"
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    """How the matching loss is weighted by time."""
    power: float = Field(0.25, gt=0)
    """Of "ghuber"."""
    advantage_max: float = Field(1.0, gt=0)
    """Clamped advantages are scaled to at most this."""
    clip_range: float = Field(0.2, gt=0)
    """Ratios beyond 1 +- this carry no gradient."""
    beta_reference: float = Field(1e-3, ge=0)
    """Weight of the square distance to the reference velocity."""
    beta_average: float = Field(1.0, ge=0)
    """Weight of the square distance to the average's velocity."""
    decay_rate: float = Field(0.001, ge=0)
    """The average keeps min(decay_rate n, decay_max) of itself after iteration n."""
    decay_max: float = Field(0.3, ge=0, lt=1)
    """Largest decay of the average."""

    @property
    def needs_reference(self) -> bool:
        """Only its own term asks for the reference."""
        return self.beta_reference > 0

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Clipped surrogate plus the two pulls, `(B,)`."""
        from flowrl.core.surrogates import clipped_surrogate
        from flowrl.flow.matching import awm_log_prob, mean_square

        names = [name for name, beta in (("average", self.beta_average), ("reference", self.beta_reference)) if beta]
        v = self.outputs(policy, batch.inputs, "old", *names)
        device = v["trained"].device
        line, sigma = batch.inputs.target.to(device), batch.inputs.sigma.to(device)
        log_prob, old_log_prob = (
            awm_log_prob(mean_square(v[name] - line), sigma, weighting=self.weighting, power=self.power)
            for name in ("trained", "old")
        )
        advantages = batch.advantages.to(device) * (self.advantage_max / self.advantage_clip)
        clip = {"clip_low": self.clip_range, "clip_high": self.clip_range}
        loss, metrics = clipped_surrogate(log_prob, old_log_prob, advantages, **clip)
        metrics["policy_loss"] = loss.detach()
        for name, beta in (("average", self.beta_average), ("reference", self.beta_reference)):
            if beta:
                drift = mean_square(v["trained"] - v[name])
                loss, metrics[f"drift_{name}"] = loss + beta * drift, drift.detach()
        return loss, metrics

    def finish(self, policy: Any, iteration: int) -> None:
        """The old policy is the one that samples next; the average follows."""
        policy.move_lagged("old", 0.0)
        policy.move_lagged("average", min(self.decay_rate * (iteration + 1), self.decay_max))

"""Flow-GRPO (arXiv 2505.05470): clipped policy gradient over the steps of an SDE sampler.

Deviations from the paper and its code: the last step of the grid is the Euler step and is not trained; the KL term
carries the true variance of the step, step size included; groups are told apart by number, not by prompt text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from flowrl.config import MethodConfig

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import UnitBatch
    from flowrl.flow.plans import StepPlan


class FlowGRPO(MethodConfig):
    """Flow-GRPO: the reward of the image is credited to every stochastic step alike."""

    name: Literal["flow_grpo"] = "flow_grpo"
    transition: Literal["flow_sde", "cps"] = "flow_sde"
    """Stochastic step: Flow-GRPO's SDE, or coefficients-preserving sampling (arXiv 2509.05952)."""
    noise_level: float = Field(0.7, ge=0, le=2)
    """`a` of the transition."""
    advantage_scale: Literal["group", "batch", "none"] = "batch"
    """Rewards are centered within their group and divided by the std of the group, of the batch, or by nothing."""
    std_floor: float = Field(1e-4, ge=0)
    """Added to that std."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clamped to plus or minus this."""
    clip_range: float = Field(1e-4, gt=0)
    """Ratios beyond 1 +- this carry no gradient. The ratio is of mean log-densities, so the useful range is small."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference model."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Log-densities are averaged over latent elements (clip ranges of the literature mean this) or summed."""

    @property
    def needs_reference(self) -> bool:
        """Only the KL term asks for the reference."""
        return self.beta > 0

    def problems(self, num_steps: int) -> list[str]:
        """Noise level 0, or too few steps."""
        if self.noise_level == 0:
            return [
                f"method.noise_level=0 makes every step deterministic, but method.name={self.name} learns from the "
                "log-probs of stochastic steps; use a noise level such as 0.7"
            ]
        if self.transition == "cps" and self.noise_level > 1:
            return [
                f"method.noise_level={self.noise_level:g}: with method.transition=cps at most 1, where all is new noise"
            ]
        return [f"rollout.num_inference_steps={num_steps}: at least 2 are needed"] if num_steps < 2 else []

    def plan(self, num_steps: int, rng: np.random.Generator) -> StepPlan:
        """Every step but the last is stochastic and trained."""
        from flowrl.flow.plans import all_steps

        return all_steps(num_steps, self.noise_level)

    def advantages(self, rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        """`(N,)` advantages; see `group_advantages`."""
        from flowrl.core.advantages import group_advantages

        values = group_advantages(rewards, group_ids, scale=self.advantage_scale, std_floor=self.std_floor)
        return values.clamp(-self.advantage_clip, self.advantage_clip)

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Clipped surrogate plus beta times the KL divergence, `(B,)`."""
        import torch

        from flowrl.core.gaussian import gaussian_kl
        from flowrl.core.surrogates import clipped_surrogate

        out = policy.replay(batch)
        loss, metrics = clipped_surrogate(
            out.log_prob,
            batch.old_log_prob.to(out.log_prob.device),
            batch.advantages.to(out.log_prob.device),
            clip_low=self.clip_range,
            clip_high=self.clip_range,
        )
        metrics["policy_loss"] = loss.detach()
        if self.beta > 0:
            with torch.no_grad(), policy.reference():
                reference = policy.replay(batch)
            kl = gaussian_kl(out.mean, reference.mean, out.std, reduction=self.log_prob_reduction)
            loss = loss + self.beta * kl
            metrics["kl"] = kl.detach()
        return loss, metrics

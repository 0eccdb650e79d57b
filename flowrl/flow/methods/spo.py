"""SPO, step-aware preference optimization (arXiv 2406.04314): candidates for one denoising step, from one latent.

Defaults: the SD1.5 setting as far as it carries over (groups of 4 candidates, beta 10, ratios clipped to 1 +- 0.1).
Deviations: a candidate is judged by the image it leads to without further noise, by the rewards of the run, instead of
by a preference model of noisy images; the next state is not drawn from the pool, as each rollout has one such step;
steps are taken in turn; log-probs are means over latent elements.
NFE per sample, step k: rollout (k+1)/G + T-k-1; update 2/G, as all candidates start from one latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from flowrl.flow.steps import SingularSteps, Steps

from .preference import keep_pairs, winners_first
from .rewarded import Scale
from .stepwise import StepwiseMethod

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import Scores, UnitBatch


class SPO(StepwiseMethod):
    """SPO: the best and the worst candidate of one step are compared by their log-probs relative to the reference's."""

    paper: ClassVar[str] = "arXiv 2406.04314"
    nfe: ClassVar[str] = "(k+1)/G+T-k-1 + 0 + 2/G"
    shares_noise: ClassVar[bool] = True
    whole_groups: ClassVar[bool] = True

    name: Literal["spo"] = "spo"
    steps: Steps = SingularSteps()
    advantage_scale: Scale = "none"
    advantage_clip: float = Field(float("1e6"), gt=0)
    beta: float = Field(10.0, gt=0)
    """Strength of the pull to the reference."""
    clip_range: float = Field(0.1, gt=0)
    """Ratios to the reference are clipped to 1 +- this."""
    margin: float = Field(0.0, ge=0)
    """Pairs whose rewards differ by no more than this are left out."""

    def select(self, advantages: torch.Tensor, scores: Scores, rng: np.random.Generator) -> torch.Tensor:
        """The best and the worst candidate of each group."""
        return keep_pairs(advantages, scores, self.margin)

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss of its pair for each row, `(B,)`."""
        import torch

        from flowrl.flow.preferences import spo_loss

        batch, order = winners_first(batch)
        with torch.no_grad(), policy.reference():
            reference = policy.replay(batch).log_prob
        ratio = policy.replay(batch).log_prob - reference
        winner, loser = ratio.chunk(2)
        loss = spo_loss(winner, loser, beta=self.beta, clip=self.clip_range)
        margin, gap = self.beta * (winner - loser), batch.advantages.chunk(2)
        metrics = {"policy_loss": loss, "implicit_accuracy": 0.5 * (1 + margin.sign()), "margin": margin}
        metrics = {name: value.detach() for name, value in metrics.items()} | {"reward_gap": gap[0] - gap[1]}
        return torch.cat([loss, loss])[order.argsort().to(loss.device)], metrics

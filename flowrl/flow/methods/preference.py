"""What the preference methods share: pairs of a winner and a loser, noised alike, compared with the frozen reference.

Pairs come from a data set (`data.pairs`), or are the best and the worst of each group of a rollout. Of the two rows of
a pair the one with the larger advantage is the winner; a loss is per pair, and both rows carry it, so that the mean
over rows is that over pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field

from .regression import RegressionMethod
from .rewarded import Scale

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.core.policy import Policy
    from flowrl.core.types import Scores, UnitBatch
    from flowrl.flow.endpoints import NoisedUnits


class Compared(NamedTuple):
    """`P` pairs: errors `(P,)` of the trained network and of the reference on winners and losers, mean squares.

    `residual (2P, *latent)` of the trained network, winners first, and `difference` of its outputs from those of the
    reference. Without a reference its errors are 0, and the difference is None.
    """

    error_w: torch.Tensor
    error_l: torch.Tensor
    reference_w: torch.Tensor
    reference_l: torch.Tensor
    residual: torch.Tensor
    difference: torch.Tensor | None

    def logit(self, beta: float) -> torch.Tensor:
        """Diffusion-DPO's, `(P,)`."""
        from flowrl.flow.preferences import dpo_logit

        return dpo_logit(self.error_w, self.error_l, self.reference_w, self.reference_l, beta=beta)


class PreferenceMethod(RegressionMethod):
    """Learns from pairs on the forward process."""

    whole_groups: ClassVar[bool] = True

    num_draws: int = Field(1, ge=1)
    shared_noise: bool = True
    advantage_scale: Scale = "none"
    advantage_clip: float = Field(float("1e6"), gt=0)
    beta: float = Field(2000.0, gt=0)
    """Strength of the pull to the reference; errors are means over latent elements."""
    margin: float = Field(0.0, ge=0)
    """Pairs whose rewards differ by no more than this are left out."""
    safeguard: float | None = Field(None, ge=0, le=1)
    """mu of Diffusion-SDPO (arXiv 2511.03317): scale the loser's gradient so that the winner's error still falls."""

    @property
    def needs_reference(self) -> bool:
        """Almost all compare with it."""
        return True

    def select(self, advantages: torch.Tensor, scores: Scores, rng: np.random.Generator) -> torch.Tensor:
        """The best and the worst of each group."""
        return keep_pairs(advantages, scores, self.margin)

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss of its pair for each row `(B,)`; metrics also say how the network orders the pairs."""
        import torch

        batch, order = winners_first(batch)
        u = self.inputs(policy, batch)
        out = self.outputs(policy, u, *(["reference"] if self.needs_reference else []))
        errors = self.errors(policy, u, out)
        if self.safeguard is not None:
            errors["trained"] = self._guarded(errors["trained"], out["trained"])
        trained, reference = errors["trained"], errors.get("reference", torch.zeros_like(errors["trained"]))
        (error_w, error_l), (reference_w, reference_l) = trained.chunk(2), reference.chunk(2)
        residual = out["trained"] - u.target.to(trained.device)
        difference = out["trained"] - out["reference"] if self.needs_reference else None
        pairs = Compared(error_w, error_l, reference_w, reference_l, residual, difference)
        loss, logit = self.pair_loss(pairs)
        if "penalty" in errors:
            loss = loss + sum(errors["penalty"].chunk(2))
        winner, loser = batch.advantages.chunk(2)
        metrics = {"policy_loss": loss, "implicit_accuracy": 0.5 * (1 + logit.sign()), "margin": logit}
        metrics |= {"error_winner": pairs.error_w, "error_loser": pairs.error_l}
        metrics = {name: value.detach() for name, value in metrics.items()} | {"reward_gap": winner - loser}
        return torch.cat([loss, loss])[order.argsort().to(loss.device)], metrics

    def inputs(self, policy: Any, batch: UnitBatch) -> NoisedUnits:
        """What the network is evaluated at; winners first."""
        return batch.inputs

    def errors(self, policy: Any, u: NoisedUnits, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Error `(2P,)` of each of the outputs; a "penalty", if there, is added to the loss of the pair."""
        from flowrl.flow.matching import mean_square

        return {name: mean_square(output - u.target.to(output.device)) for name, output in out.items()}

    def pair_loss(self, pairs: Compared) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logit `(P,)`; a pair counts as ordered rightly where its logit is above 0."""
        raise NotImplementedError

    def _guarded(self, error: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        import torch

        from flowrl.flow.preferences import safeguard, scale_gradient

        assert self.safeguard is not None
        winner, loser = torch.autograd.grad(error.sum(), output, retain_graph=True)[0].chunk(2)
        factor = safeguard(winner, loser, mu=self.safeguard)
        return scale_gradient(error, torch.cat([torch.ones_like(factor), factor]))


def keep_pairs(advantages: torch.Tensor, scores: Scores, margin: float) -> torch.Tensor:
    """All units of the best and the worst of each group, as long as their rewards differ by more than `margin`."""
    import torch

    from flowrl.core.combine import weighted_sum
    from flowrl.core.pairs import best_and_worst

    rewards = weighted_sum(scores.table[:, -1], scores.weights)
    keep = torch.zeros(advantages.shape, dtype=torch.bool)
    for pair in best_and_worst(rewards.tolist(), scores.group.tolist(), margin=margin):
        keep[list(pair)] = True
    return keep


def winners_first(batch: UnitBatch) -> tuple[UnitBatch, torch.Tensor]:
    """Rows of pairs, two and two, as all winners and then their losers; and where each row came from, `(B,)`."""
    import torch

    first, second = torch.arange(len(batch.advantages)).reshape(-1, 2).T
    swapped = batch.advantages[second] > batch.advantages[first]
    order = torch.cat([torch.where(swapped, second, first), torch.where(swapped, first, second)])
    inputs, log_prob, advantages = batch.inputs.rows(order), batch.old_log_prob[order], batch.advantages[order]
    return replace(batch, inputs=inputs, old_log_prob=log_prob, advantages=advantages), order

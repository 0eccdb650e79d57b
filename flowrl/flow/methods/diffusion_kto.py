"""Diffusion-KTO (arXiv 2404.04465): a bounded utility of each image on its own, desirable or not.

Defaults: beta 1000, the sigmoid utility, the batch's mean as baseline.
Deviations: winners and losers of pairs are the desirable and the undesirable images, so there are as many of one as of
the other (the paper's scripts draw 80 % desirable ones); `undesirable_weight` can say so instead. The baseline is the
mean over a micro-batch.
NFE per sample, k draws: rollout T (0 with `data.pairs`); update 4 k / G.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from .preference import Compared, PreferenceMethod

if TYPE_CHECKING:
    import torch


class DiffusionKTO(PreferenceMethod):
    """Diffusion-KTO: desirable and undesirable images, each judged on its own by a bounded utility."""

    paper: ClassVar[str] = "arXiv 2404.04465"
    nfe: ClassVar[str] = "T + 0 + 4k/G"

    name: Literal["diffusion_kto"] = "diffusion_kto"
    beta: float = Field(1000.0, gt=0)
    utility: Literal["kto", "loss_averse", "risk_seeking"] = "kto"
    """sigmoid(z), log sigmoid(z), or -log sigmoid(-z), whose loss has no lower bound."""
    baseline: Literal["batch", "signs"] = "batch"
    """Mean gain of all images, at least 0; or the average of the means of either kind."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of undesirable images; desirable ones weigh 1."""

    def pair_loss(self, pairs: Compared) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of both images' losses."""
        import torch

        from flowrl.flow.preferences import kto_loss

        error = torch.cat([pairs.error_w, pairs.error_l])
        reference = torch.cat([pairs.reference_w, pairs.reference_l])
        winner, loser = kto_loss(
            error,
            reference,
            torch.arange(len(error), device=error.device) < len(pairs.error_w),
            beta=self.beta,
            utility=self.utility,
            baseline=self.baseline,
            undesirable_weight=self.undesirable_weight,
        ).chunk(2)
        logit = pairs.logit(self.beta)
        return 0.5 * (winner + loser), logit

"""Rejection fine-tuning: the pre-training loss on the best samples of each group (online SFT of Flow-GRPO's code).

Defaults: one sample of a group, uniform times, a pull to the reference. No paper of its own.
NFE per sample, k draws, n of G kept: rollout T; update k n / G, twice that with the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from flowrl.config import RolloutSection

from .sft import SFT

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.core.types import Scores


class RFT(SFT):
    """Rejection fine-tuning: the best samples of each group are the data of plain flow matching."""

    paper: ClassVar[str] = "Flow-GRPO's code"
    nfe: ClassVar[str] = "T + 0 + k n/G"
    data_images: ClassVar[int] = 2
    needs_data: ClassVar[bool] = False

    name: Literal["rft"] = "rft"  # type: ignore[assignment]
    num_kept: int = Field(1, ge=1)
    """Samples of a group that are kept, those above its mean only."""

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

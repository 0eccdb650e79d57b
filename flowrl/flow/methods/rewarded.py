"""What all methods share that learn from rewards of groups: how scores become advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from flowrl.config import MethodConfig

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.core.policy import Score
    from flowrl.core.types import SampleIds, Scores

Aggregation = Literal["sum", "gdpo", "mo_grpo"]
Scale = Literal["group", "batch", "none"]


class RewardedMethod(MethodConfig):
    """Learns from advantages within groups."""

    needs_data: ClassVar[bool] = False
    """Whether it learns from a data set (`data.pairs`) only."""

    preference: bool = False
    """Replace each reward by the share of its group that the sample beats."""
    reward_aggregation: Aggregation = "sum"
    """Several rewards are summed, or normalised each on its own before (arXiv 2601.05242, 2509.22047)."""
    advantage_scale: Scale = "group"
    """Rewards are centered within their group and divided by the std of the group, of the batch, or by nothing."""
    std_floor: float = Field(1e-4, ge=0)
    """Added to that std."""
    relative_std_floor: bool = False
    """The floor is a share of the std of all values, for step rewards, which are smaller than an image's."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clamped to plus or minus this."""

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether units of advantage 0 add nothing to the loss."""
        return False

    def start(self, policy: Any, score: Score, ids: SampleIds, *, seed: int, iteration: int) -> torch.Tensor | None:
        """Initial noise is simply drawn."""
        return None

    def advantages(self, scores: Scores) -> torch.Tensor:
        """`(N, 1)`: the sample's rewards, normalised within its group, clamped."""
        return self._combined(scores, lambda rewards: rewards[:, -1:]).clamp(-self.advantage_clip, self.advantage_clip)

    def select(self, advantages: torch.Tensor, scores: Scores, rng: np.random.Generator) -> torch.Tensor:
        """All units."""
        import torch

        return torch.ones(advantages.shape, dtype=torch.bool)

    def finish(self, policy: Any, iteration: int) -> None:
        """Nothing is moved after an iteration."""

    def _combined(self, scores: Scores, credit: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Credited and normalised within (group, column), before clamping."""
        from dataclasses import replace

        import torch

        from flowrl.core.combine import combine_advantages, win_rates

        if self.preference:
            ranked = win_rates(scores.table, scores.group)
            table = ranked if scores.compared is None else torch.where(scores.compared, scores.table, ranked)
            scores = replace(scores, table=table)
        return combine_advantages(
            scores, credit, lambda values: self._normalised(values, scores.group), how=self.reward_aggregation
        )

    def _normalised(self, values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        from flowrl.core.advantages import group_advantages

        floor = self.std_floor
        if self.relative_std_floor:
            found = values[values.isfinite()]
            floor *= float(found.std(correction=0)) if len(found) else 0.0
        return group_advantages(values, group, scale=self.advantage_scale, std_floor=floor)

"""MaPO, margin-aware preference optimization (arXiv 2406.06424): pairs without a reference.

Defaults: the SDXL setting (beta 0.1, T 1000, s 0.5).
Deviations: none.
NFE per sample, k draws: rollout T (0 with `data.pairs`); update 2 k / G.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from .preference import Compared, PreferenceMethod

if TYPE_CHECKING:
    import torch


class MaPO(PreferenceMethod):
    """MaPO: fits the winner and widens the margin to the loser, without a reference."""

    paper: ClassVar[str] = "arXiv 2406.06424"
    nfe: ClassVar[str] = "T + 0 + 2k/G"

    name: Literal["mapo"] = "mapo"
    beta: float = Field(0.1, gt=0)
    """Weight of the margin."""
    margin_scale: float = Field(0.5, gt=0)
    """s: how fast a likelihood falls with the error."""
    margin_steps: int = Field(1000, ge=1)
    """T: the margin is multiplied by it."""

    @property
    def needs_reference(self) -> bool:
        """Never."""
        return False

    def pair_loss(self, pairs: Compared) -> tuple[torch.Tensor, torch.Tensor]:
        """The winner's error minus beta log sigmoid of the margin; the logit is the difference of the errors."""
        from flowrl.flow.preferences import mapo_loss

        loss = mapo_loss(pairs.error_w, pairs.error_l, beta=self.beta, steps=self.margin_steps, scale=self.margin_scale)
        return loss, pairs.error_l - pairs.error_w

"""DSPO, direct score preference optimization (ICLR 2025): the winner's score, moved by what the preference asks for.

Defaults: the SD1.5 setting of the released code (beta 0.001, the same in the pull and in the logit).
Deviations: none for SD1.5; the code's special branches for SDXL are left out.
NFE per sample, k draws: rollout T (0 with `data.pairs`); update 4 k / G.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from flowrl.config import RolloutSection

from .preference import Compared, PreferenceMethod

if TYPE_CHECKING:
    import torch


class DSPO(PreferenceMethod):
    """DSPO: score matching on the winner, whose target the implicit preference moves."""

    paper: ClassVar[str] = "ICLR 2025 (DSPO)"
    nfe: ClassVar[str] = "T + 0 + 4k/G"

    name: Literal["dspo"] = "dspo"
    beta: float = Field(1e-3, gt=0)

    def problems(self, rollout: RolloutSection) -> list[str]:
        """A safeguard of a gradient that there is not."""
        if self.safeguard is not None:
            return ["method.safeguard: the losers of method.name=dspo have no gradient that it could scale"]
        return super().problems(rollout)

    def pair_loss(self, pairs: Compared) -> tuple[torch.Tensor, torch.Tensor]:
        """Square distance to the moved target, of winners only."""
        from flowrl.flow.preferences import dspo_loss

        assert pairs.difference is not None
        logit = pairs.logit(self.beta)
        residual, difference = pairs.residual.chunk(2)[0], pairs.difference.chunk(2)[0]
        return dspo_loss(residual, difference, logit, beta=self.beta), logit

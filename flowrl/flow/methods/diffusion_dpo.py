"""Diffusion-DPO (arXiv 2311.12908): the logistic loss on how much better the winner is denoised than by the reference.

Defaults: the SD1.5 setting of the paper (beta 2000; the released scripts and SDXL: 5000), one time and noise for each
pair, uniform times. Public flow-matching code uses beta 100 and logit-normal times for SD3.5-M.
Deviations: errors are means over latent elements, as in the released code.
NFE per sample, k draws: rollout T (0 with `data.pairs`); update 4 k / G, as two of a group are compared with two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from .preference import Compared, PreferenceMethod

if TYPE_CHECKING:
    import torch


class DiffusionDPO(PreferenceMethod):
    """Diffusion-DPO: pairs, compared by denoising errors relative to the reference's."""

    paper: ClassVar[str] = "arXiv 2311.12908"
    nfe: ClassVar[str] = "T + 0 + 4k/G"

    name: Literal["diffusion_dpo"] = "diffusion_dpo"

    def pair_loss(self, pairs: Compared) -> tuple[torch.Tensor, torch.Tensor]:
        """-log sigmoid(u)."""
        from flowrl.flow.preferences import dpo_loss

        logit = pairs.logit(self.beta)
        return dpo_loss(logit), logit

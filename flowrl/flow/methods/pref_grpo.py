"""Pref-GRPO (arXiv 2508.20751): the reward is the share of its group that an image beats.

Any scalar reward is turned into win rates; a reward with `pairwise = True` judges the pairs itself.
Defaults: the FLUX.1-dev setting (25 steps, shift 3, noise level 0.7, groups of 8, 60 % of the steps, learning rate
1e-5). The paper gives no SD3.5-M setting.
Deviations: a pair that the judge cannot tell is left out, where the code counts it as a tie; all scalar rewards are
ranked, so the paper's mix of preference and CLIP is `preference: false` with a pairwise judge and a scalar reward.
NFE per sample, fraction f: rollout T - 1 + 1/G; update floor(f (T - 1)), less what a group shares at its first step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .stepwise import StepwiseMethod


class PrefGRPO(StepwiseMethod):
    """Pref-GRPO: win rates in the group instead of scores, so that small differences of scores are not blown up."""

    paper: ClassVar[str] = "arXiv 2508.20751"
    nfe: ClassVar[str] = "T-1+1/G + 0 + at most floor(f(T-1))"
    shares_noise: ClassVar[bool] = True

    name: Literal["pref_grpo"] = "pref_grpo"
    preference: bool = True
    timestep_fraction: float = Field(0.6, gt=0, le=1)

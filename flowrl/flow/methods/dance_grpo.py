"""DanceGRPO (arXiv 2505.07818): constant-rate SDE, one noise for a group, a random part of the steps, no KL.

Defaults: the FLUX.1-dev setting (16 steps, shift 3, guidance embedding 3.5, groups of 12, learning rate 1e-5, full
fine-tuning); HunyuanVideo: noise_level 0.25 and `keep_best: 8` of 24. The paper gives no SD3.5-M setting.
Deviations from the code: standard deviations have ddof 0; several rewards are summed, or normalised each
(`reward_aggregation`), where the code adds one clipped loss for each.
NFE per sample, fraction f: rollout T - 1 + 1/G; update floor(f (T - 1)), less what a group shares at its first step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .stepwise import NoiseLevel, StepwiseMethod, TransitionName


class DanceGRPO(StepwiseMethod):
    """DanceGRPO: a random 60 % of the steps of a constant-rate SDE are trained; best-of-N selection on demand."""

    paper: ClassVar[str] = "arXiv 2505.07818"
    nfe: ClassVar[str] = "T-1+1/G + 0 + at most floor(f(T-1))"
    shares_noise: ClassVar[bool] = True

    name: Literal["dance_grpo"] = "dance_grpo"
    transition: TransitionName = "dance_sde"
    noise_level: NoiseLevel = 0.3
    std_floor: float = Field(1e-8, ge=0)
    timestep_fraction: float = Field(0.6, gt=0, le=1)

"""TP-GRPO (arXiv 2602.06422): step rewards, and at turning points the reward of all that follows.

Defaults: the authors' launch scripts for SD3.5-M (10 steps, CPS 0.7, groups of 24, clip 1e-5, KL 1e-4); FLUX.1-dev: 6
steps. As in the scripts, turning points are balanced by the whole change of their sample.
Deviations from the code: the ODE completion that everything is compared with starts from the sample's own noise (the
code draws another); turning points are balanced over the whole batch, not within a micro-batch; the floor added to the
std is relative to the std of the step rewards; log-probs are normalised Gaussian ones; the sample is scored once.
NFE per sample: rollout T; completions T + (T-1) + ... + 2; update T - 1, and as many for the reference if beta > 0.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .stepwise import Credit, NoiseLevel, StepwiseMethod, TransitionName


class TurningPointGRPO(StepwiseMethod):
    """TP-GRPO: steps are credited with increments; where the reward turns to where it ends, with all that follows."""

    paper: ClassVar[str] = "arXiv 2602.06422"
    nfe: ClassVar[str] = "T + (T(T+1)/2-1) + (T-1)"

    name: Literal["turning_point_grpo"] = "turning_point_grpo"
    transition: TransitionName = "cps"
    noise_level: NoiseLevel = 0.7
    credit: Credit = "turning_points"
    std_floor: float = Field(1e-2, ge=0)
    relative_std_floor: bool = True
    clip_range: float = Field(1e-5, gt=0)
    beta: float = Field(1e-4, ge=0)

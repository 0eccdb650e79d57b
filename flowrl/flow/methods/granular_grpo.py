"""Granular-GRPO, G2RPO (arXiv 2510.01982): one stochastic step, judged at several granularities.

Defaults: the FLUX.1-dev setting (16 steps, shift 3, noise level 0.7, groups of 12, steps 0..7, strides 1, 2, 3,
learning rate 2e-6, full fine-tuning). The paper gives no SD3.5-M setting.
Deviations: a group takes one step of the set, the groups of an iteration take them in turn, with one optimizer step
for all of them (the code samples every step of the set from one noise of each prompt, and steps for each); several
rewards are averaged by their weights after each is normalised; standard deviations have ddof 0.
NFE per sample, step k, strides g: rollout (k+1)/G + T-k-1; completions sum over g > 1 of 1 + ceil((T-k-2)/g); update
1/G, as the whole group starts the step from one latent, which is evaluated once (up to u/G with u updates per rollout).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from flowrl.flow.steps import SingularSteps, Steps

from .rewarded import Aggregation
from .stepwise import Credit, StepwiseMethod


class GranularGRPO(StepwiseMethod):
    """G2RPO: a group branches at one step from a shared latent; rewards at several granularities are summed."""

    paper: ClassVar[str] = "arXiv 2510.01982"
    nfe: ClassVar[str] = "(k+1)/G+T-k-1 + sum_g>1 (1+ceil((T-k-2)/g)) + 1/G"
    shares_noise: ClassVar[bool] = True

    name: Literal["granular_grpo"] = "granular_grpo"
    steps: Steps = SingularSteps()
    credit: Credit = "granularities"
    reward_aggregation: Aggregation = "mo_grpo"
    std_floor: float = Field(1e-8, ge=0)

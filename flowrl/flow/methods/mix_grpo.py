"""MixGRPO (arXiv 2507.21802): a stochastic window slides from noise to clean in the course of training.

Defaults: the FLUX.1-dev setting (25 steps, window 4, 25 iterations at a place, groups of 12, learning rate 1e-5, full
fine-tuning, rewards normalised each on its own). MixGRPO-Flash: `steps: {tail_ratio: 0.4}`; Flash*:
`steps: {tail_ratio: 0.2, stride: 0}`.
Deviations from the code: the fast tail has as many steps as the ratio says, at least one, and always ends at the clean
image; it is spaced evenly in steps of the grid; the solver starts anew after the stochastic steps instead of mixing
predictions across them; the window keeps its size and reaches the last step but one (the code's shrinks at the end and
stops one step earlier); "decay" starts from `every`, the code from 10; standard deviations have ddof 0.
NFE per sample, window w at step s: rollout (s+1)/G + T - s - 1, as the group is one up to its window; update
1/G + w - 1, as the group starts its first step from one latent (with u updates per rollout up to u/G + w - 1).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from flowrl.flow.steps import SlidingWindow, Steps

from .rewarded import Aggregation
from .stepwise import StepwiseMethod


class MixGRPO(StepwiseMethod):
    """MixGRPO: the stochastic, trained window slides over the steps; Flash ends each rollout with a fast solver."""

    paper: ClassVar[str] = "arXiv 2507.21802"
    nfe: ClassVar[str] = "(s+1)/G+T-s-1 + 0 + 1/G+w-1"
    shares_noise: ClassVar[bool] = True

    name: Literal["mix_grpo"] = "mix_grpo"
    steps: Steps = SlidingWindow()
    reward_aggregation: Aggregation = "mo_grpo"
    std_floor: float = Field(1e-8, ge=0)

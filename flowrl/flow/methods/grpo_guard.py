"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with ratios of mean log 1 and equal scale at every step.

Defaults: the SD3.5-M setting (10 steps, groups of 24, learning rate 1e-4, beta 0, clip 2e-6; 4e-6 for PickScore).
Deviations from the code: the correction is that of each sample (the code's axis list is empty, so it subtracts the mean
over the whole batch). It needs true log-probs, so CPS's pseudo-log-prob is
refused. NFE per sample: rollout T; update T - 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .stepwise import StepwiseMethod, Surrogate


class GRPOGuard(StepwiseMethod):
    """GRPO-Guard: the ratio's bias and its scale over the steps are corrected, so that clipping acts evenly."""

    paper: ClassVar[str] = "arXiv 2510.22319"
    nfe: ClassVar[str] = "T + 0 + (T-1)"

    name: Literal["grpo_guard"] = "grpo_guard"
    surrogate: Surrogate = "guard"
    clip_range: float = Field(2e-6, gt=0)

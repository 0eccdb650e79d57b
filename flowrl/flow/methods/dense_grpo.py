"""DenseGRPO (arXiv 2601.20218): every step is credited with what it adds to the reward of its ODE completion.

Defaults: the SD3.5-M setting (10 steps, groups of 24, LoRA 32/64, learning rate 3e-4, beta 0.04; 0.01 for PickScore),
completions of all remaining steps. Noise levels of single steps: `flowrl calibrate`.
Deviations: the last step is the Euler step and is not trained; calibration moves the noise level of the transition, not
its rate, and ends when every level has turned back once; 1e-4 is added to the std of increments.
NFE per sample: rollout T; completions T + (T-1) + ... + 2; update T - 1. The completion of the state after the last
stochastic step is the sample itself.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .stepwise import Credit, StepwiseMethod


class DenseGRPO(StepwiseMethod):
    """DenseGRPO: step rewards are increments of the ODE completions' rewards, normalised step by step."""

    paper: ClassVar[str] = "arXiv 2601.20218"
    nfe: ClassVar[str] = "T + (T(T+1)/2-1) + (T-1)"

    name: Literal["dense_grpo"] = "dense_grpo"
    credit: Credit = "increments"
    beta: float = Field(0.04, ge=0)

"""E-GRPO of flow models (arXiv 2601.00423): low-entropy steps are merged into one stochastic step.

Not the entity-aware E-GRPO of language agents.
Defaults: the FLUX.1-dev setting (16 steps, shift 3, noise level 0.7, the first 8 steps, threshold 2.2, learning rate
2e-6). The paper gives no SD3.5-M setting.
Deviations: merges are computed from the grid and the threshold (the code takes a list by hand); a group takes one step
of the set, and the groups of an iteration take them in turn.
NFE per sample, step k merged over l: rollout (k+1)/G + T-k-l; update 1/G (up to u/G with u updates per rollout).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from flowrl.flow.steps import EntropySteps, Steps

from .stepwise import StepwiseMethod


class EntropyGRPO(StepwiseMethod):
    """E-GRPO: a group branches at one step, which spans as many grid steps as its entropy asks for."""

    paper: ClassVar[str] = "arXiv 2601.00423"
    nfe: ClassVar[str] = "(k+1)/G+T-k-l + 0 + 1/G"
    shares_noise: ClassVar[bool] = True

    name: Literal["entropy_grpo"] = "entropy_grpo"
    steps: Steps = EntropySteps()
    std_floor: float = Field(1e-8, ge=0)

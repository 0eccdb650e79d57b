"""Flow-GRPO (arXiv 2505.05470): clipped policy gradient over all steps of an SDE sampler.

Defaults: the SD3.5-M setting (10 steps, guidance 4.5, groups of 24, LoRA 32/64, learning rate 3e-4, beta 0.04 for
GenEval and OCR, 0.01 for PickScore); FLUX.1-dev: 6 steps, noise level 0.9, beta 0.
Deviations from the paper and its code: the last step of the grid is the Euler step and is not trained; the KL term
carries the true variance of the step, step size included; groups are told apart by number, not by prompt text.
NFE per sample: rollout T; update T - 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from .rewarded import Scale
from .stepwise import StepwiseMethod


class FlowGRPO(StepwiseMethod):
    """Flow-GRPO: the reward of the image is credited to every stochastic step alike."""

    paper: ClassVar[str] = "arXiv 2505.05470"
    nfe: ClassVar[str] = "T + 0 + (T-1)"

    name: Literal["flow_grpo"] = "flow_grpo"
    advantage_scale: Scale = "batch"

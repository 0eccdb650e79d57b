"""Flow-GRPO-Fast: Flow-GRPO with a short stochastic window at a random place (the authors' code; cf. arXiv 2507.21802).

Defaults: the SD3.5-M setting (10 steps, no guidance, window of 3 in the first half, CPS 0.8); FLUX.1-dev: 6 steps,
`steps: {size: 3, range: [0, 3]}`.
Deviations from the code: the place is drawn once for each iteration, not for each rank and batch; log-probs are
normalised Gaussian ones (`log_prob_reduction: pseudo` gives the code's), which 1e-5 clips hardly less.
NFE per sample, window w: rollout T; update w.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from flowrl.flow.steps import RandomWindow, Steps

from .rewarded import Scale
from .stepwise import NoiseLevel, StepwiseMethod, TransitionName


class FlowGRPOFast(StepwiseMethod):
    """Flow-GRPO-Fast: a few neighbouring steps at a random place are stochastic and trained, the rest are ODE steps."""

    paper: ClassVar[str] = "authors' code"
    nfe: ClassVar[str] = "T + 0 + w"

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"
    transition: TransitionName = "cps"
    noise_level: NoiseLevel = 0.8
    steps: Steps = RandomWindow()
    advantage_scale: Scale = "batch"
    clip_range: float = Field(1e-5, gt=0)

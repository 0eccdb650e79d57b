"""Flow-DPPO (UniRL's code): Flow-GRPO whose units are masked by divergence from the sampler, not by ratio.

Defaults: the code's (limit 1e-5 of the mean divergence). The divergence uses the transition's own std, step size
included. NFE per sample: rollout T; update T - 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from .stepwise import StepwiseMethod, Surrogate


class FlowDPPO(StepwiseMethod):
    """Flow-DPPO: steps that have moved too far the way the advantage asks are dropped by their divergence."""

    paper: ClassVar[str] = "UniRL's code"
    nfe: ClassVar[str] = "T + 0 + (T-1)"

    name: Literal["flow_dppo"] = "flow_dppo"
    surrogate: Surrogate = "divergence"

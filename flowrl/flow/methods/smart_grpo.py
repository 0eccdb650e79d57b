"""Smart-GRPO (arXiv 2510.02654): Flow-GRPO from initial noise that was searched for.

The paper does not give the constants; 16 candidates, 4 elites and 3 rounds are ours, as are the floor under the std and
the rescaling of noise to the norm that the model was trained on. No rounds: Flow-GRPO.
NFE per sample: search K N / G for K candidates in N rounds; rollout T; update T - 1.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from .flow_grpo import FlowGRPO
from .stepwise import NoiseSearch


class SmartGRPO(FlowGRPO):
    """Smart-GRPO: initial noise comes from a law fitted to the best of many one-step decodes."""

    paper: ClassVar[str] = "arXiv 2510.02654"
    nfe: ClassVar[str] = "T+KN/G + 0 + (T-1)"

    name: Literal["smart_grpo"] = "smart_grpo"  # type: ignore[assignment]
    noise_search: NoiseSearch | None = NoiseSearch()

"""Flow-GRPO-Fast: Flow-GRPO with a short stochastic window at a random place (the authors' code; cf. arXiv 2507.21802).

Deviation from the code: the place is drawn once for each iteration, not for each rank and batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from .flow_grpo import FlowGRPO

if TYPE_CHECKING:
    import numpy as np

    from flowrl.flow.plans import StepPlan


class FlowGRPOFast(FlowGRPO):
    """Flow-GRPO-Fast: a few neighbouring steps are stochastic and trained, the rest are Euler steps."""

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"  # type: ignore[assignment]
    transition: Literal["flow_sde", "cps"] = "cps"
    noise_level: float = Field(0.8, ge=0, le=2)
    clip_range: float = Field(1e-5, gt=0)
    window_size: int = Field(3, ge=1)
    """Steps in the window."""
    window_range: tuple[int, int] | None = None
    """Half-open range of steps in which the window may lie; default: the first half of the grid."""

    def _bounds(self, num_steps: int) -> tuple[int, int]:
        return self.window_range or (0, max(num_steps // 2, self.window_size))

    def problems(self, num_steps: int) -> list[str]:
        """Those of Flow-GRPO, or a window that leaves the schedule."""
        first, end = self._bounds(num_steps)
        found = super().problems(num_steps)
        if first < 0 or end > num_steps - 1:
            found.append(
                f"method.window_range=[{first}, {end}] leaves the schedule: with "
                f"rollout.num_inference_steps={num_steps} the stochastic steps are 0..{num_steps - 2}, so it must lie "
                f"within [0, {num_steps - 1}]"
            )
        elif end - first < self.window_size:
            found.append(
                f"method.window_size={self.window_size} does not fit into method.window_range=[{first}, {end}]"
            )
        return found

    def plan(self, num_steps: int, rng: np.random.Generator) -> StepPlan:
        """`window_size` neighbouring steps, their place drawn uniformly."""
        from flowrl.flow.plans import window

        first, end = self._bounds(num_steps)
        start = int(rng.integers(first, end - self.window_size + 1))
        return window(num_steps, self.noise_level, start=start, size=self.window_size)

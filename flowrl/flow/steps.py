"""The `method.steps` section of a config: which kind of plan the iterations follow. Imports no torch.

Every kind has `problems(num_steps)`, why it cannot be used on a grid of so many steps, and `plans(context)`, one plan
or several, which the groups of an iteration then share out among themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from flowrl.config import Section

from .plans import StepPlan, all_steps, merge_length, merged, sliding_start, tree, window, with_tail


@dataclass(frozen=True)
class PlanContext:
    """What plans are made from: the grid `sigmas (T + 1)`, noise `levels` of the T - 1 stochastic steps."""

    sigmas: tuple[float, ...]
    levels: tuple[float, ...]
    iteration: int
    rng: np.random.Generator


class StepsSection(Section):
    """Base of all kinds."""

    kind: str

    def problems(self, num_steps: int) -> list[str]:
        """Why it does not fit a grid of `num_steps`; empty if it does."""
        return []

    @abstractmethod
    def num_trained(self, num_steps: int) -> int:
        """Trained steps of a rollout."""

    @abstractmethod
    def plans(self, context: PlanContext) -> list[StepPlan]:
        """The plans of an iteration."""


class AllSteps(StepsSection):
    """Every step but the last is stochastic and trained."""

    kind: Literal["all"] = "all"
    stop: int | None = Field(None, ge=1)
    """The steps from here on are deterministic too; default: only the last one."""

    def problems(self, num_steps: int) -> list[str]:
        """A stop behind the last stochastic step."""
        if self.stop is not None and self.stop > num_steps - 1:
            return [
                f"method.steps.stop={self.stop}: with rollout.num_inference_steps={num_steps} the stochastic steps are "
                f"0..{num_steps - 2}, so at most {num_steps - 1}"
            ]
        return []

    def num_trained(self, num_steps: int) -> int:
        """All stochastic ones."""
        return self.stop or num_steps - 1

    def plans(self, context: PlanContext) -> list[StepPlan]:
        """One plan."""
        return [all_steps(context.levels, stop=self.stop)]


class RandomWindow(StepsSection):
    """A few neighbouring steps at a place drawn anew each iteration (Flow-GRPO-Fast)."""

    kind: Literal["window"] = "window"
    size: int = Field(3, ge=1)
    """Steps in the window."""
    range: tuple[int, int] | None = None
    """Half-open range of steps in which the window may lie; default: the first half of the grid."""

    def _bounds(self, num_steps: int) -> tuple[int, int]:
        return self.range or (0, max(num_steps // 2, self.size))

    def problems(self, num_steps: int) -> list[str]:
        """A window that leaves the schedule, or its range."""
        first, end = self._bounds(num_steps)
        if self.range is None and self.size > num_steps - 1:
            return [
                f"method.steps.size={self.size} does not fit: with rollout.num_inference_steps={num_steps} the "
                f"stochastic steps are 0..{num_steps - 2}"
            ]
        if first < 0 or end > num_steps - 1:
            return [
                f"method.steps.range=[{first}, {end}] leaves the schedule: with "
                f"rollout.num_inference_steps={num_steps} the stochastic steps are 0..{num_steps - 2}, so it must lie "
                f"within [0, {num_steps - 1}]"
            ]
        if end - first < self.size:
            return [f"method.steps.size={self.size} does not fit into method.steps.range=[{first}, {end}]"]
        return []

    def num_trained(self, num_steps: int) -> int:
        """Those of the window."""
        return self.size

    def plans(self, context: PlanContext) -> list[StepPlan]:
        """One plan, its place drawn uniformly."""
        first, end = self._bounds(len(context.sigmas) - 1)
        start = int(context.rng.integers(first, end - self.size + 1))
        return [window(context.levels, start=start, size=self.size)]


class SlidingWindow(StepsSection):
    """A window that moves over the steps in the course of training (MixGRPO), with Flash's fast tail on demand."""

    kind: Literal["sliding"] = "sliding"
    size: int = Field(4, ge=1)
    """Steps in the window."""
    strategy: Literal["progressive", "random", "decay", "exp_decay"] = "progressive"
    """How long it stays where; "random" draws a place each iteration."""
    every: int = Field(25, ge=1)
    """Iterations at a place; with the decaying strategies at the first places."""
    stride: int = Field(1, ge=0)
    """Steps by which it moves; 0 freezes it at the start (Flash*)."""
    roll_back: bool = True
    """From the end it goes back to the start; otherwise it stays."""
    last_step: int | None = Field(None, ge=1)
    """The window never reaches beyond this step; default: the last stochastic one."""
    decay_from: int = Field(13, ge=0)
    """Place from which "exp_decay" decays."""
    decay_rate: float = Field(0.1, ge=0)
    """Rate of "exp_decay"."""
    tail_ratio: float | None = Field(None, gt=0, le=1)
    """Flash: the steps after the window are replaced by this share of them, at least one, of `tail_solver`."""
    tail_solver: Literal["euler", "heun", "dpmpp_2m"] = "dpmpp_2m"
    """Solver of that tail."""

    def _last_place(self, num_steps: int) -> int:
        return (num_steps - 2 if self.last_step is None else self.last_step) - self.size + 1

    def problems(self, num_steps: int) -> list[str]:
        """A window longer than the stochastic steps."""
        if self.last_step is not None and self.last_step > num_steps - 2:
            return [
                f"method.steps.last_step={self.last_step}: with rollout.num_inference_steps={num_steps} the last "
                f"stochastic step is {num_steps - 2}"
            ]
        if self._last_place(num_steps) < 0:
            return [
                f"method.steps.size={self.size} does not fit: with rollout.num_inference_steps={num_steps} the window "
                f"may lie in the steps 0..{self._last_place(num_steps) + self.size - 1}"
            ]
        return []

    def num_trained(self, num_steps: int) -> int:
        """Those of the window."""
        return self.size

    def plans(self, context: PlanContext) -> list[StepPlan]:
        """One plan, at the place of the iteration."""
        num_steps = len(context.sigmas) - 1
        last = self._last_place(num_steps)
        if self.strategy == "random":
            start = int(context.rng.integers(0, last + 1))
        else:
            options = self.model_dump(include={"strategy", "every", "stride", "roll_back", "decay_from", "decay_rate"})
            start = sliding_start(context.iteration, last=last, **options)
        plan = window(context.levels, start=start, size=self.size)
        if self.tail_ratio is None:
            return [plan]
        rest = num_steps - start - self.size
        return [with_tail(plan, num_steps=max(1, round(rest * self.tail_ratio)), solver=self.tail_solver)]


class SingularSteps(StepsSection):
    """One stochastic step in each rollout; the groups of an iteration take the steps of the set in turn."""

    kind: Literal["singular"] = "singular"
    steps: tuple[int, ...] | None = None
    """The set of steps; default: the first half of the grid."""

    def _set(self, num_steps: int) -> tuple[int, ...]:
        return self.steps if self.steps is not None else tuple(range(max(1, num_steps // 2)))

    def problems(self, num_steps: int) -> list[str]:
        """An empty set, or steps that are not stochastic ones."""
        steps = self._set(num_steps)
        if not steps or not all(0 <= step <= num_steps - 2 for step in steps):
            return [
                f"method.steps.steps={list(steps)}: with rollout.num_inference_steps={num_steps} the stochastic steps "
                f"are 0..{num_steps - 2}, and at least one is needed"
            ]
        return []

    def length(self, context: PlanContext, step: int) -> int:
        """Grid steps that the stochastic step spans."""
        return 1

    def num_trained(self, num_steps: int) -> int:
        """One."""
        return 1

    def plans(self, context: PlanContext) -> list[StepPlan]:
        """A plan for each step of the set."""
        steps = self._set(len(context.sigmas) - 1)
        return [merged(context.levels, step=step, length=self.length(context, step)) for step in steps]


class EntropySteps(SingularSteps):
    """One stochastic step, spanning as many grid steps as its entropy asks for (E-GRPO of flow models)."""

    kind: Literal["entropy"] = "entropy"  # type: ignore[assignment]
    threshold: float = Field(2.2, ge=0)
    """Steps are merged until sigma / (1 - sigma) (sigma - sigma_next) reaches this; 0 merges nothing."""

    def length(self, context: PlanContext, step: int) -> int:
        """The merge length of the grid at the threshold."""
        return merge_length(context.sigmas, step, self.threshold)


class TreeSteps(AllSteps):
    """Every state splits in two at some steps (BranchGRPO); a group is one tree with 2^splits leaves."""

    kind: Literal["tree"] = "tree"  # type: ignore[assignment]
    splits: tuple[int, ...] = (0, 3, 6, 9)
    """Steps at which every state gets two successors."""

    def problems(self, num_steps: int) -> list[str]:
        """No split, or splits outside the stochastic steps."""
        last = self.num_trained(num_steps) - 1
        rising = list(self.splits) == sorted(set(self.splits))
        if not self.splits or not rising or not all(0 <= step <= last for step in self.splits):
            return super().problems(num_steps) or [
                f"method.steps.splits={list(self.splits)} must rise within the stochastic steps, which are 0..{last} "
                f"with rollout.num_inference_steps={num_steps}, and hold at least one"
            ]
        return super().problems(num_steps)

    def plans(self, context: PlanContext) -> list[StepPlan]:
        """One plan."""
        return [tree(context.levels, splits=self.splits, stop=self.stop)]


Steps = Annotated[
    AllSteps | RandomWindow | SlidingWindow | SingularSteps | EntropySteps | TreeSteps, Field(discriminator="kind")
]

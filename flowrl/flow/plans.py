"""Step plans: which steps of a sigma grid are stochastic, how noisy, and which are trained. Pure.

A plan has one entry for each of the `T` steps of a grid; it is drawn anew each iteration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """`noise_levels`: `T` floats, 0 = deterministic. `trained`: indices of the steps that enter the loss, ascending."""

    noise_levels: tuple[float, ...]
    trained: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.trained:
            raise ValueError("a step plan must train at least one step")
        if list(self.trained) != sorted(set(self.trained)) or not 0 <= self.trained[0] <= self.trained[-1] < len(self):
            raise ValueError(f"trained steps {self.trained} must be ascending and lie in 0..{len(self) - 1}")
        silent = [step for step in self.trained if self.noise_levels[step] <= 0]
        if silent:
            raise ValueError(f"steps {silent} have noise level 0: a deterministic step has no log-prob to train on")

    def __len__(self) -> int:
        return len(self.noise_levels)


def all_steps(num_steps: int, noise_level: float) -> StepPlan:
    """Flow-GRPO (arXiv 2505.05470): every step but the last is stochastic and trained.

    The last step goes to sigma 0, where the samplers' std vanishes or has lost its meaning; it is the Euler step.
    """
    levels = (noise_level,) * (num_steps - 1) + (0.0,)
    return StepPlan(levels, tuple(range(num_steps - 1)))


def window(num_steps: int, noise_level: float, *, start: int, size: int) -> StepPlan:
    """Flow-GRPO-Fast: `size` stochastic, trained steps from `start` on; Euler steps elsewhere.

    Raises:
        ValueError: the window does not lie within the steps 0..T-2.
    """
    if size < 1 or start < 0 or start + size > num_steps - 1:
        raise ValueError(
            f"a window of {size} from step {start} does not fit: stochastic steps are 0..{num_steps - 2} "
            f"of {num_steps} (the last step is deterministic)"
        )
    trained = tuple(range(start, start + size))
    return StepPlan(tuple(noise_level if step in trained else 0.0 for step in range(num_steps)), trained)

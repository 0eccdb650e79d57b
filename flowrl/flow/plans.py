"""Step plans: which steps of a sigma grid are stochastic, how noisy, merged, branched, trained. Pure.

A grid has `T` steps between the positions 0 (noise) and `T` (clean). A plan lists the positions that a rollout visits,
so it can leave some out (merged steps) or put fewer ones in between (faster tails). Plans are made anew each iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Completion:
    """A stored state that is also brought to a clean image by an ODE.

    `state`: index into the plan's path. `path`: grid positions that are visited from there on, to the end of the grid.
    """

    state: int
    path: tuple[float, ...]


@dataclass(frozen=True)
class StepPlan:
    """A way through a grid, of `S` steps.

    path: `S + 1` rising grid positions, from 0 to the grid's end; whole numbers are entries of the grid, between them
        sigma is interpolated.
    noise_levels: `S` floats, 0 = deterministic.
    trained: indices of the steps that enter the loss, ascending.
    branching: `S` numbers of children; at step s every state has `branching[s]` successors, with noises of their own.
        Samples that have not branched apart yet are one and the same state, and are computed once. Empty: no sharing.
    completions: states that are completed by an ODE, decoded and scored besides the sample itself.
    solver: of the deterministic steps; `solver_from`: the first step that uses it, Euler before.
    """

    path: tuple[float, ...]
    noise_levels: tuple[float, ...]
    trained: tuple[int, ...]
    branching: tuple[int, ...] = ()
    completions: tuple[Completion, ...] = ()
    solver: str = "euler"
    solver_from: int = 0

    def __post_init__(self) -> None:
        steps = len(self.noise_levels)
        if len(self.path) != steps + 1 or list(self.path) != sorted(set(self.path)) or self.path[0] != 0:
            raise ValueError(f"the path must rise from 0, with one entry more than {steps} noise levels: {self.path}")
        if not self.trained:
            raise ValueError("a step plan must train at least one step")
        if list(self.trained) != sorted(set(self.trained)) or not 0 <= self.trained[0] <= self.trained[-1] < steps:
            raise ValueError(f"trained steps {self.trained} must be ascending and lie in 0..{steps - 1}")
        silent = [step for step in self.trained if self.noise_levels[step] <= 0]
        if silent:
            raise ValueError(f"steps {silent} have noise level 0: a deterministic step has no log-prob to train on")
        if self.branching and len(self.branching) != steps:
            raise ValueError(f"branching has {len(self.branching)} entries for {steps} steps")
        pairs = zip(self.branching, self.noise_levels, strict=bool(self.branching))
        idle = [s for s, (n, level) in enumerate(pairs) if n > 1 and level <= 0]
        if idle:
            raise ValueError(f"steps {idle} branch at noise level 0: the branches would be equal")
        if any(not 0 <= c.state < steps or c.path[0] != self.path[c.state] for c in self.completions):
            raise ValueError("a completion starts at a state of the path, before its end")

    def __len__(self) -> int:
        return len(self.noise_levels)

    def copies(self) -> tuple[int, ...]:
        """For each of the `S + 1` states: how many samples share it."""
        counts = [1]
        for children in reversed(self.branching or (1,) * len(self)):
            counts.append(counts[-1] * children)
        return tuple(reversed(counts))

    def sharing_noise(self, group_size: int) -> StepPlan:
        """This plan with one initial noise for a group, which branches at its first stochastic step."""
        if self.branching:
            return self
        first = next(step for step, level in enumerate(self.noise_levels) if level > 0)
        return replace(self, branching=tuple(group_size if step == first else 1 for step in range(len(self))))


def stochastic_path(path: Sequence[float], levels: dict[int, float], **options: object) -> StepPlan:
    """A plan whose steps `levels` (index: noise level) are stochastic and trained, the others Euler steps."""
    noise = tuple(levels.get(step, 0.0) for step in range(len(path) - 1))
    return StepPlan(tuple(map(float, path)), noise, tuple(sorted(levels)), **options)  # type: ignore[arg-type]


def all_steps(levels: Sequence[float], *, stop: int | None = None) -> StepPlan:
    """Flow-GRPO (arXiv 2505.05470): every step but the last is stochastic and trained.

    The last step goes to sigma 0, where the samplers' std vanishes or has lost its meaning; it is the Euler step.

    Args:
        levels: noise level of each of the T - 1 stochastic steps.
        stop: the steps from here on are Euler steps as well.
    """
    return stochastic_path(range(len(levels) + 2), dict(enumerate(levels[:stop])))


def window(levels: Sequence[float], *, start: int, size: int) -> StepPlan:
    """Flow-GRPO-Fast: `size` stochastic, trained steps from `start` on; Euler steps elsewhere.

    Raises:
        ValueError: the window does not lie within the steps 0..T-2.
    """
    if size < 1 or start < 0 or start + size > len(levels):
        raise ValueError(
            f"a window of {size} from step {start} does not fit: stochastic steps are 0..{len(levels) - 1} "
            f"of {len(levels) + 1} (the last step is deterministic)"
        )
    return stochastic_path(range(len(levels) + 2), {step: levels[step] for step in range(start, start + size)})


def with_tail(plan: StepPlan, *, num_steps: int, solver: str) -> StepPlan:
    """MixGRPO-Flash (arXiv 2507.21802): after the last stochastic step, `num_steps` steps of a better solver.

    For a plan without branches and completions. The steps are evenly spaced in grid positions, and always end at the
    clean image.
    """
    last, end = plan.trained[-1] + 1, plan.path[-1]
    tail = np.linspace(plan.path[last], end, num_steps + 1)[1:]
    levels = (*plan.noise_levels[:last], *(0.0,) * num_steps)
    path = (*plan.path[: last + 1], *map(float, tail))
    return replace(plan, path=path, noise_levels=levels, solver=solver, solver_from=last)


def merge_length(sigmas: Sequence[float], step: int, threshold: float) -> int:
    """E-GRPO (arXiv 2601.00423): how many grid steps from `step` on one stochastic step spans.

    The fewest with `sigma / (1 - sigma) (sigma - sigma_next) >= threshold`, the exponential of a step's entropy up to
    constants; 1 at sigma 1, where it is infinite, and where no number reaches the threshold before the last step: a
    stochastic step to sigma 0 would leave its noise in the image.
    """
    sigma = sigmas[step]
    if sigma >= 1:
        return 1
    for length in range(1, len(sigmas) - 1 - step):
        if sigma / (1 - sigma) * (sigma - sigmas[step + length]) >= threshold:
            return length
    return 1


def merged(levels: Sequence[float], *, step: int, length: int) -> StepPlan:
    """One stochastic step from `step` over `length` grid steps, Euler steps elsewhere; length 1: singular."""
    end = len(levels) + 1
    if length < 1 or not 0 <= step < len(levels) or step + length >= end:
        raise ValueError(f"a step over {length} from {step} does not fit into the stochastic steps 0..{end - 2}")
    return stochastic_path([*range(step + 1), *range(step + length, end + 1)], {step: levels[step]})


def tree(levels: Sequence[float], *, splits: Sequence[int], children: int = 2, stop: int | None = None) -> StepPlan:
    """BranchGRPO (arXiv 2509.06040): the steps of `all_steps`, and every state splits at `splits`."""
    plan = all_steps(levels, stop=stop)
    return replace(plan, branching=tuple(children if step in splits else 1 for step in range(len(plan))))


def dense_completions(plan: StepPlan, *, num_steps: int | None = None) -> StepPlan:
    """The plan with a completion of every state between its first and last trained step (DenseGRPO, TP-GRPO).

    The state after the last trained step is completed by the plan itself, where the rest of it is deterministic.

    Args:
        num_steps: ODE steps of a completion, evenly spaced; default: all that remain.

    Raises:
        ValueError: stochastic steps that are not neighbours: the increments would not be those of single steps.
    """
    first, last = plan.trained[0], plan.trained[-1]
    stochastic = [step for step, level in enumerate(plan.noise_levels) if level > 0]
    if list(plan.trained) != list(range(first, last + 1)) or stochastic != list(plan.trained):
        raise ValueError("step rewards need the stochastic steps to be neighbours, and all of them to be trained")
    made = []
    for state in range(first, last + 1):
        rest = plan.path[state:]
        if num_steps is not None and num_steps < len(rest) - 1:
            rest = tuple(map(float, np.linspace(rest[0], rest[-1], num_steps + 1)))
        made.append(Completion(state, rest))
    return replace(plan, completions=tuple(made))


def granular_completions(plan: StepPlan, strides: Sequence[int]) -> StepPlan:
    """The plan with completions of its last stochastic state at coarser granularities (G2RPO, arXiv 2510.01982).

    At stride g the schedule after the state is its next entry, then every g-th one; stride 1 is the sample itself.
    """
    state = plan.trained[-1] + 1
    made = []
    for stride in strides:
        if stride > 1:
            rest = [plan.path[state], *plan.path[state + 1 : -1 : stride], plan.path[-1]]
            made.append(Completion(state, tuple(rest)))
    return replace(plan, completions=tuple(made))


def sliding_start(
    iteration: int,
    *,
    last: int,
    strategy: str,
    every: int,
    stride: int,
    roll_back: bool,
    decay_from: int,
    decay_rate: float,
) -> int:
    """Where MixGRPO's window lies at an iteration (arXiv 2507.21802); `last` is the last place where it fits.

    It stays at each place for "progressive": `every` iterations; "decay": a number falling linearly from `every` to 1;
    "exp_decay": `every` times exp(-rate max(0, place - decay_from)), rounded up. Then it moves by `stride`, and from
    the end back to the start (`roll_back`) or not at all. Stride 0 is the frozen window of MixGRPO-Flash*.
    """
    places = list(range(0, last + 1, stride)) if stride else [0]

    def stay(place: int) -> int:
        if strategy == "decay":
            return max(1, (every * (last - place) + place) // last) if last else every
        if strategy == "exp_decay":
            return math.ceil(every * math.exp(-decay_rate * max(0, place - decay_from)))
        return every

    durations = [stay(place) for place in places]
    if roll_back:
        iteration %= sum(durations)
    for place, duration in zip(places, durations, strict=True):
        if iteration < duration:
            return place
        iteration -= duration
    return places[-1]

"""What a method of the Flow-GRPO family cannot do with its settings, in words, before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.config import RolloutSection
from flowrl.flow.steps import SingularSteps, SlidingWindow, TreeSteps

if TYPE_CHECKING:
    from .stepwise import StepwiseMethod


def stepwise_problems(method: StepwiseMethod, rollout: RolloutSection) -> list[str]:
    """All problems; empty if there are none."""
    num_steps = rollout.num_inference_steps
    if num_steps < 2:
        return [f"rollout.num_inference_steps={num_steps}: at least 2 are needed"]
    found = _noise(method, num_steps) + method.steps.problems(num_steps)
    return found or [
        *_credit(method),
        *_selection(method, rollout),
        *_tree(method, rollout),
        *_loss(method),
        *_unread(method),
    ]


def _noise(method: StepwiseMethod, num_steps: int) -> list[str]:
    given = method.noise_level
    levels = given if isinstance(given, tuple) else (given,)
    if isinstance(given, tuple) and len(given) != num_steps - 1:
        return [
            f"method.noise_level has {len(given)} values; rollout.num_inference_steps={num_steps} has {num_steps - 1} "
            "stochastic steps (the last one is deterministic)"
        ]
    if 0 in levels:
        return [
            f"method.noise_level=0 makes steps deterministic, but method.name={method.name} learns from the "
            "log-probs of stochastic steps; use a noise level such as 0.7"
        ]
    if method.transition == "cps" and max(levels) > 1:
        return [f"method.noise_level={max(levels):g}: with method.transition=cps at most 1, where all is new noise"]
    return []


def _credit(method: StepwiseMethod) -> list[str]:
    steps = method.steps
    if method.credit == "granularities" and not isinstance(steps, SingularSteps):
        return [
            "method.credit=granularities needs one stochastic step: method.steps.kind singular or entropy, "
            f"not {steps.kind}"
        ]
    if method.credit == "granularities" and 1 not in method.strides:
        return [f"method.strides={list(method.strides)} must hold 1, which is the sample itself"]
    step_rewards = method.credit in ("increments", "turning_points")
    if step_rewards and isinstance(steps, SlidingWindow) and steps.tail_ratio is not None:
        return [
            f"method.credit={method.credit} compares completions with the sample, so both must be made alike: it goes "
            "without method.steps.tail_ratio"
        ]
    return []


def _selection(method: StepwiseMethod, rollout: RolloutSection) -> list[str]:
    units, found = method.steps.num_trained(rollout.num_inference_steps), []
    if int(units * method.timestep_fraction) < 1:
        found.append(
            f"method.timestep_fraction={method.timestep_fraction:g} of {units} trained step(s) trains none; "
            "1 trains all"
        )
    if method.keep_best and (method.keep_best % 2 or method.keep_best > rollout.group_size):
        found.append(
            f"method.keep_best={method.keep_best} must be even and at most rollout.group_size={rollout.group_size}"
        )
    return found


def _tree(method: StepwiseMethod, rollout: RolloutSection) -> list[str]:
    steps = method.steps
    if (method.credit == "tree") != isinstance(steps, TreeSteps):
        return [f"method.credit={method.credit} and method.steps.kind={steps.kind}: a tree needs both, or neither"]
    if not isinstance(steps, TreeSteps):
        return []
    found = []
    if method.keep_best or method.timestep_fraction < 1:
        found.append("method.credit=tree trains every edge: it goes with neither keep_best nor timestep_fraction")
    if method.noise_search is not None and method.noise_search.rounds > 0:
        found.append("method.credit=tree has one initial noise in each group: it goes without noise_search")
    if rollout.share_initial_noise is False:
        found.append("rollout.share_initial_noise=false: the leaves of a tree (method.credit=tree) always share it")
    if rollout.group_size != 2 ** len(steps.splits):
        found.append(
            f"rollout.group_size={rollout.group_size}: method.steps.splits={list(steps.splits)} grows a tree with "
            f"{2 ** len(steps.splits)} leaves"
        )
    return found


def _loss(method: StepwiseMethod) -> list[str]:
    if method.log_prob_reduction == "pseudo" and method.transition != "cps":
        return [f"method.log_prob_reduction=pseudo is for method.transition=cps, not {method.transition}"]
    if method.log_prob_reduction != "mean" and method.surrogate != "clip":
        return [
            f"method.surrogate={method.surrogate} needs true log-probs, averaged over elements; use "
            f"method.log_prob_reduction=mean instead of {method.log_prob_reduction}"
        ]
    return []


def _unread(method: StepwiseMethod) -> list[str]:
    """Settings that were changed, and that the chosen parts do not read."""
    readers = {
        "completion_steps": ("credit", ("increments", "turning_points")),
        "balance_turning_points": ("credit", ("turning_points",)),
        "strides": ("credit", ("granularities",)),
        "clip_range": ("surrogate", ("clip", "guard")),
        "divergence_limit": ("surrogate", ("divergence",)),
        "std_floor": ("advantage_scale", ("group", "batch")),
    }
    return [
        f"method.{name} is read with method.{part}={' or '.join(values)} only, "
        f"and method.{part} is {getattr(method, part)}"
        for name, (part, values) in readers.items()
        if getattr(method, part) not in values and getattr(method, name) != type(method).model_fields[name].default
    ]

"""Calls rewards and builds the reward table. A missing score is NaN, never 0.

A reward is any object called as `reward(prompts=..., completions=..., **columns)` that returns one float, or None for
"no score", for each completion: TRL's contract. Columns are the fields of the prompt file, as lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.errors import RewardError


@dataclass(frozen=True)
class Reward:
    """A reward function with its name and its weight in the sum."""

    name: str
    function: Callable[..., Iterable[float | None]]
    weight: float = 1.0


def call_reward(
    reward: Reward, prompts: list[str], completions: list[Any], columns: dict[str, list[Any]]
) -> list[float]:
    """Scores of one reward, NaN where it gives none.

    Raises:
        RewardError: an exception inside the reward, a wrong number of scores, or something that is no number.
    """
    try:
        values = list(reward.function(prompts=prompts, completions=completions, **columns))
    except Exception as error:
        raise RewardError(f"reward {reward.name!r} failed: {type(error).__name__}: {error}") from error
    if len(values) != len(completions):
        raise RewardError(f"reward {reward.name!r} returned {len(values)} scores for {len(completions)} completions")
    scores = []
    for index, value in enumerate(values):
        try:
            score = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise RewardError(
                f"reward {reward.name!r} returned {value!r} for prompt {prompts[index]!r}; expected a number or None"
            ) from None
        scores.append(score if math.isfinite(score) else math.nan)
    return scores


class Scorer:
    """Turns completions into a table with one column for each reward.

    `submit` gives a future, so that slower backends can work while the next samples are drawn; this one, in line,
    is done when it returns.
    """

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = list(rewards)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [reward.name for reward in self.rewards]

    def submit(self, prompts: list[str], completions: list[Any], columns: dict[str, list[Any]]) -> Future[torch.Tensor]:
        """Future of the table `(n, R)` float64."""
        future: Future[torch.Tensor] = Future()
        table = [call_reward(reward, prompts, completions, columns) for reward in self.rewards]
        future.set_result(torch.tensor(table, dtype=torch.float64).reshape(len(self.rewards), len(completions)).T)
        return future


def weighted_sum(table: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Sum of the columns of `(N, R)` times their weights, `(N,)`.

    A sample without a score in a column of non-zero weight has no sum: NaN. Columns of weight 0 only monitor, so
    they cannot spoil it.
    """
    if table.shape[1] != len(weights):
        raise ValueError(f"{table.shape[1]} reward columns, {len(weights)} weights")
    used = [column for column, weight in enumerate(weights) if weight]
    return table[:, used] @ torch.tensor([weights[column] for column in used], dtype=table.dtype)


def check_reward(
    function: Callable[..., Any], completions: list[Any], prompts: list[str], **columns: Any
) -> list[float]:
    """Runs the contract on a reward of yours and returns its scores.

    Raises:
        RewardError: what it does wrong: no `**columns`, wrong length, something that is no number, or other scores
            when the same completions come in another order.
    """
    reward = Reward(getattr(function, "__name__", type(function).__name__), function)
    scores = call_reward(reward, prompts, completions, {**columns, "an_unknown_column": [None] * len(prompts)})
    turned = {name: list(reversed(values)) for name, values in columns.items()}
    again = call_reward(reward, prompts[::-1], completions[::-1], turned)[::-1]
    for index, (a, b) in enumerate(zip(scores, again, strict=True)):
        if not (math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))):
            raise RewardError(
                f"reward {reward.name!r} gave {a} and then {b} for prompt {prompts[index]!r} when the order changed"
            )
    return scores

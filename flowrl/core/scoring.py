"""Calls rewards and builds the reward table. A missing score is NaN, never 0.

A reward is any object called as `reward(prompts=..., completions=..., **columns)` that returns one float, or None for
"no score", for each completion: TRL's contract. Columns are the fields of the prompt file, as lists. Each reward gets
its own copies, so that one that changes what it is given does not change what the next one sees.

A reward with an attribute `pairwise = True` is called with `opponents=...` besides and returns how surely each
completion beats its opponent, in [0, 1] (0.5 a tie); its column is the share of wins within a group. One with
`labels_only = True` judges the images of a data set only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from PIL import Image

from flowrl.errors import RewardError


@dataclass(frozen=True)
class Reward:
    """A reward function with its name and its weight in the sum."""

    name: str
    function: Callable[..., Iterable[float | None]]
    weight: float = 1.0

    @property
    def pairwise(self) -> bool:
        """Whether it compares two completions of a prompt."""
        return bool(getattr(self.function, "pairwise", False))

    @property
    def judges_samples(self) -> bool:
        """Whether it can judge a sample by itself: it compares no pairs, and reads no labels of a data set."""
        return not self.pairwise and not getattr(self.function, "labels_only", False)


def _own(value: Any) -> Any:
    """A copy that may be changed; an image's own `copy` is faster than a deep one."""
    return value.copy() if isinstance(value, Image.Image) else copy.deepcopy(value)


def call_reward(
    reward: Reward, prompts: list[str], completions: list[Any], columns: dict[str, list[Any]]
) -> list[float]:
    """Scores of one reward, NaN where it gives none. `opponents` of a pairwise reward are among the columns.

    Raises:
        RewardError: an exception inside the reward, a wrong number of scores, or something that is no number.
    """
    given = {"prompts": prompts, "completions": completions, **columns}
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # whatever the reward leaves it at
            values = list(reward.function(**{name: [_own(value) for value in given[name]] for name in given}))
    except (Exception, SystemExit) as error:  # a reward that ends the process is no success
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


def call_pairwise(
    reward: Reward,
    prompts: list[str],
    completions: list[Any],
    columns: dict[str, list[Any]],
    groups: Sequence[int] | None,
) -> list[float]:
    """Win rate of each completion against those of its group (Pref-GRPO, arXiv 2508.20751).

    Every pair is judged once; a pair without a score is left out, a completion without a judged pair has none.

    Raises:
        RewardError: no groups to compare in, or what `call_reward` raises.
    """
    if groups is None:
        raise RewardError(f"reward {reward.name!r} compares pairs, so it cannot judge images one by one")
    members = range(len(completions))
    pairs = [(i, j) for i, j in combinations(members, 2) if groups[i] == groups[j]]
    if not pairs:
        return [math.nan] * len(completions)
    first = [i for i, _ in pairs]
    given = {name: [values[i] for i in first] for name, values in columns.items()}
    given["opponents"] = [completions[j] for _, j in pairs]
    wins = call_reward(reward, [prompts[i] for i in first], [completions[i] for i in first], given)
    outside = [win for win in wins if not math.isnan(win) and not 0 <= win <= 1]
    if outside:
        raise RewardError(f"reward {reward.name!r} compares pairs: expected values in [0, 1], got {outside[0]}")
    total, judged = [0.0] * len(completions), [0] * len(completions)
    for (i, j), win in zip(pairs, wins, strict=True):
        if not math.isnan(win):
            for index, value in ((i, win), (j, 1 - win)):
                total[index] += value
                judged[index] += 1
    return [value / count if count else math.nan for value, count in zip(total, judged, strict=True)]


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

    def submit(
        self,
        prompts: list[str],
        completions: list[Any],
        columns: dict[str, list[Any]],
        groups: Sequence[int] | None = None,
    ) -> Future[torch.Tensor]:
        """Future of the table `(n, R)` float64. Pairwise rewards compare completions of equal `groups (n,)`."""
        future: Future[torch.Tensor] = Future()
        table = [
            call_pairwise(reward, prompts, completions, columns, groups)
            if reward.pairwise
            else call_reward(reward, prompts, completions, columns)
            for reward in self.rewards
        ]
        future.set_result(torch.tensor(table, dtype=torch.float64).reshape(len(self.rewards), len(completions)).T)
        return future


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

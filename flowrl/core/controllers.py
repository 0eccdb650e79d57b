"""Stateful schedules that read what an iteration measured and set a parameter of the next; saved in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Controller(Protocol):
    """Moves the weights of rewards; they multiply those of the config."""

    def weights(self) -> Mapping[str, float]:
        """Factor of each reward, for the next iteration."""
        ...

    def update(self, scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Takes the scores of an iteration (NaN = none), and returns figures worth logging."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a state."""
        ...


class SelfPaced:
    """Hands the weight over from easy rewards to hard ones as the model becomes competent (arXiv 2511.19356).

    The paper gives the idea, not the function; this is an interpretation. A running mean c_j of each reward says how
    competent the model is, g_j = sigmoid(sharpness (c_j - threshold)), and the weights break a stick: the first reward
    has 1 - g_1, the second g_1 (1 - g_2), ..., the last what is left. None falls below `floor`; they sum to 1.

    Args:
        names: rewards from easy to hard, each with values in [0, 1].
        others: rewards that keep the factor 1.
    """

    def __init__(
        self,
        names: Sequence[str],
        others: Sequence[str] = (),
        *,
        sharpness: float = 8.0,
        threshold: float = 0.75,
        decay: float = 0.9,
        floor: float = 0.05,
    ):
        self.names, self.others = list(names), list(others)
        self.sharpness, self.threshold, self.decay, self.floor = sharpness, threshold, decay, floor
        self.competence: dict[str, float] = {}

    def weights(self) -> dict[str, float]:
        """Factors: of `names` by the rule, of the others 1."""
        left, shares = 1.0, []
        for name in self.names[:-1]:
            value = self.competence.get(name, 0.0)
            passed = 1 / (1 + math.exp(min(500.0, -self.sharpness * (value - self.threshold))))
            shares.append(left * (1 - passed))
            left *= passed
        shares.append(left)
        floored = [self.floor + (1 - self.floor * len(shares)) * share for share in shares]
        return dict(zip(self.names, floored, strict=True)) | dict.fromkeys(self.others, 1.0)

    def update(self, scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Moves the running means; logs them and the weights that the iteration had."""
        logged = {f"reward_weight/{name}": value for name, value in self.weights().items()}
        for name in self.names:
            found = [score for score in scores[name] if not math.isnan(score)]
            if found:
                mean = sum(found) / len(found)
                old = self.competence.get(name, mean)
                self.competence[name] = self.decay * old + (1 - self.decay) * mean
            logged[f"competence/{name}"] = self.competence.get(name, math.nan)
        return logged

    def state_dict(self) -> dict[str, Any]:
        """The running means."""
        return {"competence": dict(self.competence)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the running means."""
        self.competence = dict(state["competence"])

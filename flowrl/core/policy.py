"""The contract between the trainer and a model of any modality."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from .types import SampleIds, UnitBatch, UnitOutput


class Rollout(Protocol):
    """Samples of one micro-batch with their stored units."""

    @property
    def ids(self) -> SampleIds:
        """Who the samples are."""
        ...

    @property
    def completions(self) -> list[Any]:
        """What rewards are given, one for each sample; filled by `Policy.decode`."""
        ...

    @property
    def num_units(self) -> int:
        """Stored units of each sample."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """Figures worth logging, for instance network evaluations."""
        ...

    def pick(self, rows: torch.Tensor, units: torch.Tensor, advantages: torch.Tensor) -> UnitBatch:
        """The units `(rows[i], units[i])`; all arguments `(B,)`."""
        ...


class Policy(Protocol):
    """A model that can sample and can score what it sampled."""

    model: nn.Module

    def decode(self, rollout: Any) -> Rollout:
        """The rollout with its completions."""
        ...

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and float32 parameters that the optimizer moves."""
        ...

    def rollout(self, ids: SampleIds, plan: Any, *, seed: int, iteration: int) -> Rollout:
        """Samples without gradient, keeping the units that `plan` trains."""
        ...

    def join(self, rollouts: list[Any]) -> Rollout:
        """Several micro-batches of one plan as one rollout."""
        ...

    def replay(self, batch: UnitBatch) -> UnitOutput:
        """Scores stored units with gradient."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Within it, `replay` answers for the model as it was before training."""
        ...


class Method(Protocol):
    """A published method: a config whose methods are pure hooks."""

    name: str

    def plan(self, num_steps: int, rng: Any) -> Any:
        """Which units of the next rollout are sampled how, and trained."""
        ...

    def advantages(self, rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        """Rewards `(N,)` (NaN = no score) to advantages `(N,)`."""
        ...

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss `(B,)` of the units, and metrics `(B,)`, detached."""
        ...

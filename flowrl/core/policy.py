"""The contract between the trainer and a model of any modality."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from .types import SampleIds, Scores, UnitBatch, UnitOutput

Score = Callable[[Any, torch.Tensor], torch.Tensor]
"""`(final latents (n, ...), prompt rows (n,)) -> rewards (n,)`, NaN = no score."""


class Rollout(Protocol):
    """Samples of one micro-batch with their stored units."""

    @property
    def ids(self) -> SampleIds:
        """Who the samples are."""
        ...

    @property
    def completions(self) -> list[Any]:
        """What rewards are given; filled by `Policy.decode`."""
        ...

    @property
    def owners(self) -> torch.Tensor:
        """`(M,)` rows of the samples that the completions are of."""
        ...

    @property
    def views(self) -> torch.Tensor:
        """`(n, V)` completions of each sample; the last is the sample itself."""
        ...

    @property
    def num_units(self) -> int:
        """Stored units of each sample."""
        ...

    def pick(self, rows: torch.Tensor, units: torch.Tensor, advantages: torch.Tensor) -> UnitBatch:
        """The units `(rows[i], units[i])`; all arguments `(B,)`."""
        ...


class Policy(Protocol):
    """A model that can sample and can score what it sampled."""

    model: nn.Module
    grid: torch.Tensor

    def render(self, latents: Any) -> list[Any]:
        """Completions of final latents."""
        ...

    @property
    def lagged_weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors of lagged copies of the weights, saved in checkpoints."""
        ...

    def take_counts(self) -> dict[str, int]:
        """Network evaluations by phase since the last call."""
        ...

    def decode(self, rollout: Any) -> Rollout:
        """The rollout with its completions."""
        ...

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and float32 parameters that the optimizer moves."""
        ...

    def rollout(self, ids: SampleIds, plan: Any, *, seed: int, iteration: int, noise: Any = None) -> Rollout:
        """Samples without gradient, keeping the units that `plan` trains; `noise` as of `Method.start`."""
        ...

    def join(self, rollouts: list[Any]) -> Rollout:
        """Several micro-batches as one rollout."""
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

    def plans(self, grid: torch.Tensor, *, iteration: int, rng: Any) -> list[Any]:
        """Which units of the next rollout are sampled how, and trained; the groups share out several plans."""
        ...

    def start(self, policy: Any, score: Score, ids: SampleIds, *, seed: int, iteration: int) -> torch.Tensor | None:
        """Initial noise of the samples `(n, ...)`, if it is not simply drawn."""
        ...

    def advantages(self, scores: Scores) -> torch.Tensor:
        """Scores to advantages of samples `(N, 1)` or units `(N, U)`."""
        ...

    def select(self, advantages: torch.Tensor, scores: Scores, rng: Any) -> torch.Tensor:
        """Which units `(N, U)` enter the loss, bool; `advantages (N, U)`."""
        ...

    def finish(self, policy: Any, iteration: int) -> None:
        """Called after the updates of an iteration, for instance to move lagged copies of the weights."""
        ...

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss `(B,)` of the units, and metrics `(B,)`, detached."""
        ...

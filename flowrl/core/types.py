"""What flows between the boxes of a run.

Legend of shapes, used everywhere: `N` samples, `G` group size, `P` prompts (N = P G), `U` units (denoising steps or
tokens), `V` views of a sample (completions that are scored), `R` reward columns, `B` rows of a micro-batch,
`C, H, W` a latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SampleIds:
    """Who each of `n` samples is. All tensors `(n,)` int64, on the CPU.

    `sample`: number within the iteration, 0..N-1, the same whatever the ranks and batches. `group`: equal for
    samples that are compared with each other. `prompt`: row of the prompt file.
    """

    sample: torch.Tensor
    group: torch.Tensor
    prompt: torch.Tensor

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, index: slice | torch.Tensor) -> SampleIds:
        return SampleIds(self.sample[index], self.group[index], self.prompt[index])

    @staticmethod
    def concatenate(parts: Sequence[SampleIds]) -> SampleIds:
        """All of several, in order."""
        return SampleIds(
            *(torch.cat([getattr(part, name) for part in parts]) for name in ("sample", "group", "prompt"))
        )


@dataclass(frozen=True)
class UnitOutput:
    """What the policy says of `B` units: `log_prob (B,)`, and the transition's `mean (B, ...)` and `std (B,)`."""

    log_prob: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor


@dataclass(frozen=True)
class UnitBatch:
    """`B` units picked for one forward pass.

    `inputs` is the policy's own record of them; `old_log_prob (B,)` and `advantages (B,)` are what losses need.
    """

    inputs: Any
    old_log_prob: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """All scores of an iteration, of all ranks.

    table: `(N, V, R)` float64, NaN = no score; the last view is the sample itself. weights: `(R,)`, 0 only monitors.
    group: `(N,)`, equal for samples that are compared with each other. num_units: U. compared: `(R,)` bool, columns of
    pairwise rewards, which are win rates already.
    """

    table: torch.Tensor
    weights: torch.Tensor
    group: torch.Tensor
    num_units: int = 1
    compared: torch.Tensor | None = None

"""What a flow policy's rollout carries to the update.

Shapes: `N` samples, `B` units picked for one forward pass, `D` different inputs among them, latents `(..., *latent)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from PIL import Image

from flowrl.core.types import SampleIds, UnitBatch

from .rollout import Trajectory, first_rows


@dataclass(frozen=True)
class Units:
    """Stored transitions picked for one forward pass.

    `x (D, *latent)`, `sigma`, `sigma_next`, `noise_level`, `sigma_top`, `cond (D,)` are inputs of the network, each
    once, `cond` rows of the prompt table; `source (B,)` says which of them each unit starts from. `x_next (B, *latent)`
    and the sampler's `mean (B, *latent)`, if kept, belong to units.
    """

    x: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    noise_level: torch.Tensor
    sigma_top: torch.Tensor
    cond: torch.Tensor
    source: torch.Tensor
    x_next: torch.Tensor
    mean: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> Units:
        """The units `index (B,)`, in that order."""
        mean = None if self.mean is None else self.mean[index]
        return replace(self, source=self.source[index], x_next=self.x_next[index], mean=mean)


@dataclass(frozen=True)
class FlowRollout:
    """Samples of an image policy. `completions` are `M` PIL images, see `Trajectory.clean`."""

    ids: SampleIds
    completions: list[Image.Image]
    trajectory: Trajectory

    @property
    def clean(self) -> torch.Tensor:
        """Clean latents of the completions, `(M, *latent)`."""
        return self.trajectory.clean

    @property
    def num_units(self) -> int:
        """Trained steps."""
        return self.trajectory.log_prob.shape[1]

    @property
    def owners(self) -> torch.Tensor:
        """Rows of the samples that the completions are of, `(M,)`."""
        return self.trajectory.owner

    @property
    def views(self) -> torch.Tensor:
        """`(N, V)` completions of each sample; the last is the sample itself."""
        return self.trajectory.views

    def pick(self, rows: torch.Tensor, units: torch.Tensor, advantages: torch.Tensor) -> UnitBatch:
        """The stored transitions `(rows[i], units[i])`; units that start from the same latent share its evaluation."""
        t = self.trajectory
        keys = torch.stack([t.shared[rows, units], units], 1)
        different, source = torch.unique(keys, dim=0, return_inverse=True)
        first = first_rows(source, len(different))
        r, u = rows[first], units[first]
        inputs = Units(
            x=t.states[r, t.before[r, u]].float(),
            sigma=t.sigma[r, u],
            sigma_next=t.sigma_next[r, u],
            noise_level=t.noise_level[r, u],
            sigma_top=t.sigma_top[r],
            cond=self.ids.prompt[r],
            source=source,
            x_next=t.states[rows, t.after[rows, units]].float(),
            mean=None if t.mean is None else t.mean[rows, units],
        )
        return UnitBatch(inputs, t.log_prob[rows, units], advantages)


def join(rollouts: list[FlowRollout]) -> FlowRollout:
    """Micro-batches as one rollout; their plans may differ in all but the number of stored units and states."""
    clean = num = 0
    shifted = []
    for rollout in rollouts:
        t = rollout.trajectory
        shifted.append(replace(t, views=t.views + clean, owner=t.owner + num))
        clean, num = clean + len(t.clean), num + len(t.views)
    values: dict[str, Any] = {field.name: [getattr(t, field.name) for t in shifted] for field in fields(Trajectory)}
    joined: dict[str, Any] = {name: None if v[0] is None else torch.cat(v) for name, v in values.items()}
    ids = SampleIds.concatenate([r.ids for r in rollouts])
    return FlowRollout(ids, [image for rollout in rollouts for image in rollout.completions], Trajectory(**joined))

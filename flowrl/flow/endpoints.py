"""Rollouts that keep clean endpoints only, for methods on the forward process.

Shapes: `N` samples, `k` draws of each endpoint, `B` units picked for one forward pass, latents `(..., *latent)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from PIL import Image

from flowrl.core.random import torch_generator
from flowrl.core.types import SampleIds, UnitBatch

from .matching import noised, stratified


@dataclass(frozen=True)
class EndpointPlan:
    """How endpoints are sampled and noised.

    num_draws: times and noises drawn for each endpoint. times: uniform numbers to sigmas, elementwise; `even`: the
    uniform numbers of an endpoint are stratified. solver: of the rollout. sampler: the lagged weights that sample, None
    for the trained ones.
    """

    num_draws: int
    times: Callable[[torch.Tensor], torch.Tensor]
    even: bool = True
    solver: str = "euler"
    sampler: str | None = None


@dataclass(frozen=True)
class NoisedUnits:
    """`x (B, *latent)` noised to `sigma (B,)` from `clean`; `line` is eps - x0; `cond (B,)` rows of prompts."""

    x: torch.Tensor
    clean: torch.Tensor
    line: torch.Tensor
    sigma: torch.Tensor
    cond: torch.Tensor


@dataclass(frozen=True)
class EndpointRollout:
    """Endpoints `clean (N, *latent)` of an image policy; units are draws of (sigma, eps), made when they are picked."""

    ids: SampleIds
    completions: list[Image.Image]
    clean: torch.Tensor
    plan: EndpointPlan
    key: tuple[int, int]

    @property
    def num_units(self) -> int:
        """Draws of each endpoint."""
        return self.plan.num_draws

    @property
    def owners(self) -> torch.Tensor:
        """Each completion is its sample's."""
        return torch.arange(len(self.ids))

    @property
    def views(self) -> torch.Tensor:
        """`(N, 1)`: one completion each."""
        return self.owners[:, None]

    def pick(self, rows: torch.Tensor, units: torch.Tensor, advantages: torch.Tensor) -> UnitBatch:
        """Draws `units[i]` of the endpoints `rows[i]`; a draw depends on (seed, iteration, sample, draw) alone."""
        seed, iteration = self.key
        noises, uniform = [], []
        for sample, unit in zip(self.ids.sample[rows].tolist(), units.tolist(), strict=True):
            generator = torch_generator(seed, "forward noise", iteration, sample, unit)
            noises.append(torch.randn(self.clean.shape[1:], generator=generator))
            generator = torch_generator(seed, "forward time", iteration, sample)
            order, u = torch.rand(2, self.plan.num_draws, generator=generator)
            uniform.append((stratified(order, u) if self.plan.even else u)[unit])
        sigma = self.plan.times(torch.stack(uniform)).float()
        clean, noise = self.clean[rows].cpu().float(), torch.stack(noises)
        inputs = NoisedUnits(noised(clean, noise, sigma), clean, noise - clean, sigma, self.ids.prompt[rows])
        return UnitBatch(inputs, torch.zeros(len(rows)), advantages)


def join_endpoints(rollouts: list[EndpointRollout]) -> EndpointRollout:
    """Micro-batches of one plan as one rollout."""
    ids = SampleIds.concatenate([r.ids for r in rollouts])
    images = [image for rollout in rollouts for image in rollout.completions]
    return replace(rollouts[0], ids=ids, completions=images, clean=torch.cat([r.clean for r in rollouts]))

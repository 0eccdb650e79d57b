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
from .paths import training_target


@dataclass(frozen=True)
class EndpointPlan:
    """How endpoints are sampled and noised.

    num_draws: times and noises drawn for each endpoint. times: uniform numbers to sigmas, elementwise; `even`: the
    uniform numbers of an endpoint are stratified. solver: of the rollout. sampler: the lagged weights that sample, None
    for the trained ones. shared: the samples of a group get the same times and noises. num_probes: directions of
    random signs for each draw.
    """

    num_draws: int
    times: Callable[[torch.Tensor], torch.Tensor]
    even: bool = True
    solver: str = "euler"
    sampler: str | None = None
    shared: bool = False
    num_probes: int = 0


@dataclass(frozen=True)
class NoisedUnits:
    """`x (B, *latent)` noised to `sigma (B,)` from `clean` by `noise`; `cond (B,)` rows of prompts.

    `target` is what the network should have predicted; for a rectified flow the velocity eps - x0. `group (B,)`: equal
    for the same draw of samples of the same group. `probes (K, B, *latent)`: random signs, on demand. `path`,
    `prediction`: of the network, see `flowrl.flow.paths`.
    """

    x: torch.Tensor
    clean: torch.Tensor
    noise: torch.Tensor
    target: torch.Tensor
    sigma: torch.Tensor
    cond: torch.Tensor
    group: torch.Tensor
    probes: torch.Tensor | None = None
    path: str = "rectified"
    prediction: str = "velocity"

    def rows(self, index: torch.Tensor) -> NoisedUnits:
        """The units `index (B,)`, in that order."""
        probes = None if self.probes is None else self.probes[:, index]
        names = ("x", "clean", "noise", "target", "sigma", "cond", "group")
        return replace(self, probes=probes, **{name: getattr(self, name)[index] for name in names})


@dataclass(frozen=True)
class EndpointRollout:
    """Endpoints `clean (N, *latent)` of an image policy; units are draws of (sigma, eps), made when they are picked.

    key: seed and iteration. path, prediction: of the network.
    """

    ids: SampleIds
    completions: list[Image.Image]
    clean: torch.Tensor
    plan: EndpointPlan
    key: tuple[int, int]
    path: str = "rectified"
    prediction: str = "velocity"

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
        plan, noises, probes, uniform = self.plan, [], [], []
        owner = self.ids.group if plan.shared else self.ids.sample
        for number, unit in zip(owner[rows].tolist(), units.tolist(), strict=True):
            generator = torch_generator(seed, "forward noise", iteration, number, unit)
            noises.append(torch.randn(self.clean.shape[1:], generator=generator))
            if plan.num_probes:
                generator = torch_generator(seed, "probes", iteration, number, unit)
                bits = torch.randint(2, (plan.num_probes, *self.clean.shape[1:]), generator=generator)
                probes.append(2.0 * bits - 1)
            generator = torch_generator(seed, "forward time", iteration, number)
            order, u = torch.rand(2, plan.num_draws, generator=generator)
            uniform.append((stratified(order, u) if plan.even else u)[unit])
        sigma = plan.times(torch.stack(uniform)).float()
        clean, noise = self.clean[rows].cpu().float(), torch.stack(noises)
        target = training_target(clean, noise, sigma, path=self.path, prediction=self.prediction)
        x, group = noised(clean, noise, sigma, path=self.path), self.ids.group[rows] * plan.num_draws + units
        inputs = NoisedUnits(
            x,
            clean,
            noise,
            target,
            sigma,
            self.ids.prompt[rows],
            group,
            torch.stack(probes, 1) if probes else None,
            self.path,
            self.prediction,
        )
        return UnitBatch(inputs, torch.zeros(len(rows)), advantages)


def join_endpoints(rollouts: list[EndpointRollout]) -> EndpointRollout:
    """Micro-batches of one plan as one rollout."""
    ids = SampleIds.concatenate([r.ids for r in rollouts])
    images = [image for rollout in rollouts for image in rollout.completions]
    return replace(rollouts[0], ids=ids, completions=images, clean=torch.cat([r.clean for r in rollouts]))

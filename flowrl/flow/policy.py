"""FlowPolicy: a pipeline adapter that samples by a transition and can score what it sampled.

Shapes: `N` samples, `B` units, latents `(..., *latent)`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from flowrl.core.gaussian import gaussian_log_prob
from flowrl.core.random import torch_generator
from flowrl.core.types import SampleIds, UnitBatch, UnitOutput
from flowrl.pipelines.base import Conditioning, PipelineAdapter

from .data import PairData, to_pixels
from .endpoints import EndpointPlan, EndpointRollout, join_endpoints
from .plans import StepPlan
from .rollout import integrate, sample_ode, sigma_path
from .solvers import Velocity
from .transitions import get_transition, noise_excess
from .units import FlowRollout, Units, join
from .weights import TrainedModel

logger = logging.getLogger("flowrl")
_WORTH_A_WARNING = 1.5  # times the noise that the path has


def to_pil(images: torch.Tensor) -> list[Image.Image]:
    """`(N, 3, H, W)` in [0, 1] to PIL images, rounded to 8 bits as diffusers does."""
    pixels = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return [Image.fromarray(picture) for picture in pixels]


class FlowPolicy(TrainedModel):
    """A flow-matching model under training.

    Args:
        adapter: the pipeline.
        prompts: texts of the prompt file; samples refer to them by row.
        transition: name of the stochastic step.
        num_inference_steps, guidance_scale: of rollouts; the update uses the same guidance.
        share_initial_noise: the `group_size` samples of a group start from the same noise, and are one until the
            first stochastic step.
        storage_dtype: of stored latents.
        reduction: of log-probs over latent elements, see `gaussian_log_prob`.
        keep_means: store the sampler's means, for methods that compare with them.
        batch_size: rows of the largest network call of a rollout and its completions.

    With `data` set, endpoints are the images of that data set. `base_fingerprint`, if known, is that of the model
    without what is trained.
    """

    def __init__(
        self,
        adapter: PipelineAdapter,
        prompts: Sequence[str],
        *,
        transition: str = "flow_sde",
        num_inference_steps: int = 10,
        guidance_scale: float = 1.0,
        share_initial_noise: bool = False,
        group_size: int = 1,
        storage_dtype: torch.dtype = torch.float32,
        reduction: str = "mean",
        keep_means: bool = False,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ):
        if share_initial_noise and group_size < 2:
            raise ValueError("sharing the initial noise needs group_size, the number of samples that share it")
        super().__init__(adapter)
        self.transition = get_transition(transition)
        self.guidance_scale = guidance_scale
        self.share_initial_noise, self.group_size, self.batch_size = share_initial_noise, group_size, batch_size
        self.storage_dtype, self.reduction, self.keep_means = storage_dtype, reduction, keep_means
        self.device = torch.device(device)
        self.grid = adapter.sigmas(num_inference_steps)
        self.prompts = list(prompts)
        self.counts: Counter[str] = Counter()
        self._warned = False
        self.data: PairData | None = None
        self.base_fingerprint = ""
        unique = sorted(set(self.prompts))
        adapter.pipe.to(self.device)
        self.table = Conditioning.concatenate([adapter.encode(unique[i : i + 64]) for i in range(0, len(unique), 64)])
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        self._table_row = torch.tensor([row_of[prompt] for prompt in self.prompts])
        self.negative = adapter.encode([""])

    def conditioning(self, prompt_rows: torch.Tensor) -> Conditioning:
        """Encoded prompts of rows of the prompt file."""
        return self.table.rows(self._table_row[prompt_rows])

    def _velocity(self, cond: Conditioning, guidance_scale: float, phase: str) -> Velocity:
        """The network with its conditioning, in calls of at most `batch_size` rows; counts the rows."""
        everything = torch.arange(len(cond))

        def velocity(x: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            self.counts[phase] += len(x) * (2 if guidance_scale > 1 else 1)
            whole = len(x) <= self.batch_size and torch.equal(rows, everything)
            parts = []
            for start in range(0, len(x), self.batch_size):
                part = slice(start, start + self.batch_size)
                own = cond if whole else cond.rows(rows[part])
                parts.append(self.adapter.velocity(x[part], sigma[part], own, self.negative, guidance_scale))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return velocity

    def take_counts(self) -> dict[str, int]:
        """Network evaluations (rows, both halves of guidance) by phase since the last call."""
        counts, self.counts = dict(self.counts), Counter()
        return {f"nfe/{phase}": counts.get(phase, 0) for phase in ("rollout", "completion", "search", "train")}

    def noise(self, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Initial latents, one row for each generator."""
        return self.adapter.initial_noise(generators).to(self.device)

    def starts(self, ids: SampleIds) -> torch.Tensor:
        """Number of the sample whose initial noise each has: its own, or the first of its group."""
        return ids.sample - ids.sample % self.group_size if self.share_initial_noise else ids.sample

    def draw(
        self, seed: int, iteration: int, numbers: Sequence[int], step: int, *, purpose: str = "noise"
    ) -> torch.Tensor:
        """Standard normal latents for states of an iteration; step -1 is the initial noise."""
        return self.noise([torch_generator(seed, purpose, iteration, number, step + 1) for number in numbers])

    @torch.no_grad()
    def rollout(
        self,
        ids: SampleIds,
        plan: StepPlan | EndpointPlan,
        *,
        seed: int,
        iteration: int,
        noise: torch.Tensor | None = None,
    ) -> FlowRollout | EndpointRollout:
        """Samples a micro-batch: trajectories or endpoints, as the plan says; `noise (N, *latent)` if not drawn."""
        cond = self.conditioning(ids.prompt)
        if isinstance(plan, EndpointPlan):
            return self._endpoints(ids, plan, cond, seed=seed, iteration=iteration, noise=noise)
        if self.share_initial_noise:
            plan = plan.sharing_noise(self.group_size)
        self._warn_of_excess(plan)
        trajectory = integrate(
            self._velocity(cond, self.guidance_scale, "rollout"),
            ids.sample,
            self.grid,
            plan,
            self.transition,
            lambda numbers, step: self.draw(seed, iteration, numbers, step),
            complete_velocity=self._velocity(cond, self.guidance_scale, "completion"),
            noise=noise,
            storage_dtype=self.storage_dtype,
            reduction=self.reduction,
            keep_means=self.keep_means,
            device=self.device,
        )
        return FlowRollout(ids, [], trajectory)

    def _endpoints(
        self,
        ids: SampleIds,
        plan: EndpointPlan,
        cond: Conditioning,
        *,
        seed: int,
        iteration: int,
        noise: torch.Tensor | None,
    ) -> EndpointRollout:
        """Clean latents by a deterministic solver, from the weights that the plan names; or those of the data set."""
        adapter = self.adapter
        space = {"path": adapter.path, "prediction": adapter.prediction}
        if self.data:
            images = self.data.images(ids)
            clean = adapter.encode_images(to_pixels(images, *adapter.image_size))
            return EndpointRollout(ids, images, clean, plan, (seed, iteration), **space)
        x = self.draw(seed, iteration, self.starts(ids).tolist(), -1) if noise is None else noise.to(self.device)
        velocity = self._velocity(cond, self.guidance_scale, "rollout")
        with self.lagged(plan.sampler) if plan.sampler else nullcontext():
            clean = sample_ode(velocity, x, self.grid, solver=plan.solver)
        return EndpointRollout(ids, [], clean, plan, (seed, iteration), **space)

    def predict_at(self, x: torch.Tensor, sigma: torch.Tensor, prompt_rows: torch.Tensor) -> torch.Tensor:
        """The network's output `(B, *latent)` without guidance, float32, under the present weights, with gradient."""
        self.counts["train"] += len(x)
        return self.adapter.predict(x, sigma, self.conditioning(prompt_rows)).float()

    def _warn_of_excess(self, plan: StepPlan) -> None:
        """Tells once where the sampler leaves most noise beyond what the path has."""
        if self._warned:
            return
        sigmas, top = sigma_path(self.grid, plan.path).tolist(), float(self.grid[1])
        factors = {
            step: noise_excess(self.transition, sigmas[step], sigmas[step + 1], level, top)
            for step, level in enumerate(plan.noise_levels)
            if level > 0 and sigmas[step + 1] > 0
        }
        worst = max(factors, key=factors.__getitem__, default=None)
        if worst is not None and factors[worst] > _WORTH_A_WARNING:
            self._warned = True
            logger.warning(
                "step %d, from sigma %.4f to %.4f, leaves %.1f times the noise that belongs there; keep it "
                "deterministic (method.steps), lower the noise level, or use method.transition=cps",
                worst,
                sigmas[worst],
                sigmas[worst + 1],
                factors[worst],
            )

    @torch.no_grad()
    def predict_clean(self, x: torch.Tensor, prompt_rows: torch.Tensor) -> torch.Tensor:
        """What one network evaluation at the initial noise `x (n, *latent)` says of the clean latents."""
        velocity = self._velocity(self.conditioning(prompt_rows), self.guidance_scale, "search")
        return sample_ode(velocity, x.to(self.device), self.grid[[0, -1]])

    def render(self, latents: torch.Tensor) -> list[Image.Image]:
        """Images of clean latents."""
        return [image for part in latents.split(self.batch_size) for image in to_pil(self.adapter.decode(part))]

    def decode(self, rollout: FlowRollout | EndpointRollout) -> FlowRollout | EndpointRollout:
        """The rollout with its images; those of a data set are there."""
        if rollout.completions:
            return rollout
        return replace(rollout, completions=self.render(rollout.clean))

    def join(self, rollouts: list[Any]) -> FlowRollout | EndpointRollout:
        """Micro-batches as one rollout."""
        return join_endpoints(rollouts) if isinstance(rollouts[0], EndpointRollout) else join(rollouts)

    def replay(self, batch: UnitBatch) -> UnitOutput:
        """Scores stored transitions under the present weights; a latent that several start from is evaluated once."""
        u: Units = batch.inputs
        x, x_next, source, *sigmas = (
            value.to(self.device)
            for value in (u.x, u.x_next, u.source, u.sigma, u.sigma_next, u.noise_level, u.sigma_top)
        )
        cond = self.conditioning(u.cond)
        self.counts["train"] += len(x) * (2 if self.guidance_scale > 1 else 1)
        velocity = self.adapter.velocity(x, sigmas[0], cond, self.negative, self.guidance_scale)
        mean, std = (value[source] for value in self.transition(x, velocity, *sigmas))
        return UnitOutput(gaussian_log_prob(x_next, mean, std, reduction=self.reduction), mean, std)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[str], noise: torch.Tensor, *, num_inference_steps: int, guidance_scale: float = 1.0
    ) -> torch.Tensor:
        """Images `(N, 3, H, W)` in [0, 1] by the deterministic sampler of the stock pipeline."""
        cond = self.adapter.encode(list(prompts))
        grid = self.adapter.sigmas(num_inference_steps)

        def velocity(x: torch.Tensor, sigma: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.adapter.velocity(x, sigma, cond, self.negative, guidance_scale)

        return self.adapter.decode(sample_ode(velocity, noise, grid))

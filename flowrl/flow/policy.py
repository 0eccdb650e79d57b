"""FlowPolicy: a pipeline adapter that samples by a transition and can score what it sampled.

Shapes: `N` samples, `B` units, latents `(..., *latent)`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from PIL import Image
from torch import nn

from flowrl.core.gaussian import gaussian_log_prob
from flowrl.core.random import torch_generator
from flowrl.core.types import SampleIds, UnitBatch, UnitOutput
from flowrl.errors import ConfigError
from flowrl.pipelines.base import Conditioning, PipelineAdapter, unmatched_targets

from .plans import StepPlan
from .rollout import Trajectory, integrate, sample_ode
from .transitions import get_transition


@dataclass(frozen=True)
class Units:
    """Stored transitions picked for one forward pass: tensors `(B, ...)`, and rows `cond` of the prompt table."""

    x: torch.Tensor
    x_next: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    noise_level: torch.Tensor
    sigma_top: torch.Tensor
    cond: torch.Tensor
    mean: torch.Tensor | None = None


@dataclass(frozen=True)
class FlowRollout:
    """Samples of an image policy. `completions` are PIL images."""

    ids: SampleIds
    completions: list[Image.Image]
    trajectory: Trajectory
    metrics: dict[str, float]

    @property
    def num_units(self) -> int:
        """Trained steps."""
        return self.trajectory.log_prob.shape[1]

    def pick(self, rows: torch.Tensor, units: torch.Tensor, advantages: torch.Tensor) -> UnitBatch:
        """The stored transitions `(rows[i], units[i])`."""
        t = self.trajectory
        inputs = Units(
            x=t.states[rows, t.before[units]].float(),
            x_next=t.states[rows, t.after[units]].float(),
            sigma=t.sigma[units],
            sigma_next=t.sigma_next[units],
            noise_level=t.noise_level[units],
            sigma_top=torch.full((len(rows),), t.sigma_top),
            cond=self.ids.prompt[rows],
            mean=None if t.mean is None else t.mean[rows, units],
        )
        return UnitBatch(inputs, t.log_prob[rows, units], advantages)


def to_pil(images: torch.Tensor) -> list[Image.Image]:
    """`(N, 3, H, W)` in [0, 1] to PIL images, rounded to 8 bits as diffusers does."""
    pixels = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return [Image.fromarray(picture) for picture in pixels]


class FlowPolicy:
    """A flow-matching model under training.

    Args:
        adapter: the pipeline.
        prompts: texts of the prompt file; samples refer to them by row.
        transition: name of the stochastic step.
        num_inference_steps, guidance_scale: of rollouts; the update uses the same guidance.
        share_initial_noise: the samples of a group start from the same noise.
        storage_dtype: of stored latents.
        reduction: of log-probs over latent elements, "mean" or "sum".
        keep_means: store the sampler's means, for methods that compare with them.
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
        storage_dtype: torch.dtype = torch.float32,
        reduction: str = "mean",
        keep_means: bool = False,
        device: torch.device | str = "cpu",
    ):
        self.adapter = adapter
        self.transition = get_transition(transition)
        self.guidance_scale, self.share_initial_noise = guidance_scale, share_initial_noise
        self.storage_dtype, self.reduction, self.keep_means = storage_dtype, reduction, keep_means
        self.device = torch.device(device)
        self.grid = adapter.sigmas(num_inference_steps)
        self.prompts = list(prompts)
        self._frozen: nn.Module | None = None
        self._lora = False
        unique = sorted(set(self.prompts))
        adapter.pipe.to(self.device)
        self.table = Conditioning.concatenate([adapter.encode(unique[i : i + 64]) for i in range(0, len(unique), 64)])
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        self._table_row = torch.tensor([row_of[prompt] for prompt in self.prompts])
        self.negative = adapter.encode([""])

    # what is trained

    @property
    def model(self) -> Any:
        """The denoiser."""
        return self.adapter.denoiser

    @model.setter
    def model(self, module: Any) -> None:
        self.adapter.denoiser = module

    def add_lora(self, rank: int, alpha: int, targets: list[str] | None = None, *, seed: int = 0) -> None:
        """Trains a LoRA (peft, Gaussian init); the model without it is the reference.

        Raises:
            ConfigError: a target matches no module.
        """
        from peft import LoraConfig

        targets = targets or self.adapter.lora_targets
        unmatched = unmatched_targets(self.model, targets)
        if unmatched:
            raise ConfigError(f"LoRA target {unmatched[0]!r} matches no module of {type(self.model).__name__}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model.add_adapter(
                LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets)
            )
        self._lora = True
        self._make_float32()

    def train_all(self, *, keep_reference: bool) -> None:
        """Trains every weight of the denoiser; the reference, if wanted, is a frozen copy."""
        if keep_reference:
            self._frozen = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.model.requires_grad_(True)
        self._make_float32()

    @property
    def is_lora(self) -> bool:
        """Whether a LoRA is trained, rather than all weights."""
        return self._lora

    def _make_float32(self) -> None:
        for _, parameter in self.trainable_parameters():
            parameter.data = parameter.data.float()

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer moves."""
        return ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The model as it was before training: adapter off, or the frozen copy."""
        if self._lora:
            module = getattr(self.model, "module", self.model)
            module.disable_adapters()
            try:
                yield
            finally:
                module.enable_adapters()
        elif self._frozen is not None:
            trained, self.model = self.model, self._frozen
            try:
                yield
            finally:
                self.model = trained
        else:
            raise RuntimeError("no reference was kept: full fine-tuning with beta 0 makes no copy of the model")

    # sampling and scoring

    def conditioning(self, prompt_rows: torch.Tensor) -> Conditioning:
        """Encoded prompts of rows of the prompt file."""
        return self.table.rows(self._table_row[prompt_rows])

    def _velocity(self, cond: Conditioning, guidance_scale: float) -> Any:
        return lambda x, sigma: self.adapter.velocity(x, sigma, cond, self.negative, guidance_scale)

    def noise(self, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Initial latents, one row for each generator."""
        return self.adapter.initial_noise(generators).to(self.device)

    @torch.no_grad()
    def rollout(self, ids: SampleIds, plan: StepPlan, *, seed: int, iteration: int) -> FlowRollout:
        """Samples a micro-batch, a trajectory and an image for each id."""
        generators = [torch_generator(seed, "rollout", iteration, int(sample)) for sample in ids.sample]
        starts = ids.group if self.share_initial_noise else ids.sample
        noise = self.noise([torch_generator(seed, "initial noise", iteration, int(start)) for start in starts])
        cond = self.conditioning(ids.prompt)
        trajectory = integrate(
            self._velocity(cond, self.guidance_scale),
            noise,
            self.grid,
            plan,
            self.transition,
            generators,
            storage_dtype=self.storage_dtype,
            reduction=self.reduction,
            keep_means=self.keep_means,
        )
        return FlowRollout(ids, [], trajectory, {"nfe": self._calls_per_step() * len(plan)})

    def _calls_per_step(self) -> int:
        return 2 if self.guidance_scale > 1 else 1

    def decode(self, rollout: FlowRollout) -> FlowRollout:
        """The rollout with its images."""
        return replace(rollout, completions=to_pil(self.adapter.decode(rollout.trajectory.latents)))

    def join(self, rollouts: list[FlowRollout]) -> FlowRollout:
        """Micro-batches of one plan as one rollout."""
        first = rollouts[0].trajectory
        per_sample: dict[str, Any] = {
            field.name: torch.cat([getattr(rollout.trajectory, field.name) for rollout in rollouts])
            for field in fields(Trajectory)
            if field.name in ("latents", "states", "log_prob") or (field.name == "mean" and first.mean is not None)
        }
        ids = SampleIds(
            *(torch.cat([getattr(r.ids, name) for r in rollouts]) for name in ("sample", "group", "prompt"))
        )
        images = [image for rollout in rollouts for image in rollout.completions]
        return FlowRollout(ids, images, replace(first, **per_sample), rollouts[0].metrics)

    def replay(self, batch: UnitBatch) -> UnitOutput:
        """Scores stored transitions under the present weights."""
        u: Units = batch.inputs
        x, x_next, *sigmas = (
            value.to(self.device) for value in (u.x, u.x_next, u.sigma, u.sigma_next, u.noise_level, u.sigma_top)
        )
        velocity = self._velocity(self.conditioning(u.cond), self.guidance_scale)(x, sigmas[0])
        mean, std = self.transition(x, velocity, *sigmas)
        return UnitOutput(gaussian_log_prob(x_next, mean, std, reduction=self.reduction), mean, std)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[str], noise: torch.Tensor, *, num_inference_steps: int, guidance_scale: float = 1.0
    ) -> torch.Tensor:
        """Images `(N, 3, H, W)` in [0, 1] by the deterministic sampler of the stock pipeline."""
        cond = self.adapter.encode(list(prompts))
        grid = self.adapter.sigmas(num_inference_steps)
        return self.adapter.decode(sample_ode(self._velocity(cond, guidance_scale), noise, grid))

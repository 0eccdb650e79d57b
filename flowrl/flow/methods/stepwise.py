"""What the Flow-GRPO family shares: policy gradient over the stochastic steps of a sampler.

A published method is a choice of parts: which steps are stochastic (`steps`), what each is credited with (`credit`),
how rewards become advantages, and the loss. Each method's file states its choice; a config can replace every part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from flowrl.config import RolloutSection, Section
from flowrl.flow.steps import AllSteps, PlanContext, Steps, TreeSteps

from .checks import stepwise_problems
from .rewarded import RewardedMethod

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowrl.core.policy import Policy, Score
    from flowrl.core.types import SampleIds, Scores, UnitBatch, UnitOutput
    from flowrl.flow.plans import StepPlan

NoiseLevel = Annotated[float, Field(ge=0, le=2)] | tuple[Annotated[float, Field(ge=0, le=2)], ...]
TransitionName = Literal["flow_sde", "dance_sde", "cps"]
Credit = Literal["image", "increments", "turning_points", "granularities", "tree"]
Surrogate = Literal["clip", "guard", "divergence"]


class NoiseSearch(Section):
    """Cross-entropy search over the initial noise of each prompt (arXiv 2510.02654; the constants are ours)."""

    rounds: int = Field(3, ge=0)
    """Rounds of drawing, scoring and refitting; 0 searches nothing."""
    candidates: int = Field(16, ge=2)
    """Noises tried in a round, each decoded after a single network evaluation."""
    elites: int = Field(4, ge=1)
    """The best of them, which the next law is fitted to."""
    std_floor: float = Field(0.3, gt=0)
    """Smallest std of that law."""

    @model_validator(mode="after")
    def _check(self) -> NoiseSearch:
        if self.elites >= self.candidates:
            raise ValueError(
                f"method.noise_search.elites={self.elites} must be fewer than its candidates={self.candidates}"
            )
        return self


class StepwiseMethod(RewardedMethod):
    """Policy gradient over the stochastic steps of a sampler."""

    shares_noise: ClassVar[bool] = False
    """Whether the samples of a group start from one noise, if `rollout.share_initial_noise` does not say."""

    transition: TransitionName = "flow_sde"
    """Stochastic step: Flow-GRPO's SDE, DanceGRPO's, or coefficients-preserving sampling (arXiv 2509.05952)."""
    noise_level: NoiseLevel = 0.7
    """`a` (`eta`) of the transition: one for all steps, or one for each but the last (`flowrl calibrate`)."""
    steps: Steps = AllSteps()
    """Which steps are stochastic and trained."""
    credit: Credit = "image"
    """What a step is credited with: the image's reward; what the step added to the reward of its ODE completion; that
    with turning points; the rewards at several granularities, summed after they are normalised; or the mean reward of
    the leaves below an edge of a tree."""
    completion_steps: int | None = Field(None, ge=1)
    """ODE steps of a completion; default: all that remain. The sample itself always has all of its steps, so with fewer
    the last increment also holds what the better solution is worth."""
    strides: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 3)
    """Granularities: strides through the steps after the stochastic one."""
    balance_turning_points: bool = True
    """Keep as many positive turning points as negative ones in a batch."""
    timestep_fraction: float = Field(1.0, gt=0, le=1)
    """Share of the trained steps that enter the loss, drawn anew for each sample."""
    keep_best: int | None = Field(None, ge=2)
    """Of each group only the best and the worst half of this many samples, by advantage, enter the loss."""
    surrogate: Surrogate = "clip"
    """Clipped ratio; ratio with its bias and scale corrected (GRPO-Guard); or masked by divergence (Flow-DPPO)."""
    clip_range: float = Field(1e-4, gt=0)
    """Ratios beyond 1 +- this carry no gradient. The ratio is of mean log-densities, so the useful range is small."""
    divergence_limit: float = Field(1e-5, gt=0)
    """Divergence from the sampler at which "divergence" masks."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference model."""
    log_prob_reduction: Literal["mean", "sum", "pseudo"] = "mean"
    """Log-densities are averaged over latent elements (clip ranges of the literature mean this) or summed. "pseudo" is
    what public code for cps calls a log-prob: the negative mean square, without variance."""
    noise_search: NoiseSearch | None = None
    """Draw initial noise from a law that is fitted to the best of many tries."""

    @field_validator("steps", mode="before")
    @classmethod
    def _default_kind(cls, value: Any) -> Any:
        """`steps: {size: 2}` changes a field of the method's own kind of steps; `steps: all` names a kind."""
        default = cls.model_fields["steps"].default
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, dict) and value.get("kind", default.kind) == default.kind:
            return {**default.model_dump(), **value}
        return value

    @classmethod
    def parts(cls) -> str:
        """The parts in which the method's defaults differ from those of plain policy gradient."""
        found = []
        for name in (
            "transition",
            "steps",
            "credit",
            "preference",
            "reward_aggregation",
            "advantage_scale",
            "surrogate",
        ):
            value, usual = cls.model_fields[name].default, StepwiseMethod.model_fields[name].default
            if value != usual:
                found.append(f"{name}={getattr(value, 'kind', value)}")
        if cls.model_fields["noise_search"].default is not None:
            found.append("noise_search")
        if cls.model_fields["timestep_fraction"].default != 1:
            found.append(f"timestep_fraction={cls.model_fields['timestep_fraction'].default:g}")
        return ", ".join([*found, "share_initial_noise"] if cls.shares_noise else found)

    @property
    def needs_reference(self) -> bool:
        """Only the KL term asks for the reference."""
        return self.beta > 0

    @property
    def skips_zero_advantages(self) -> bool:
        """The KL term needs all units."""
        return self.beta == 0

    @property
    def needs_means(self) -> bool:
        """Whether the loss compares with the sampler's means."""
        return self.surrogate in ("guard", "divergence")

    @property
    def ratio_limit(self) -> float:
        """How far a ratio may be off 1 before the loss takes notice."""
        return math.inf if self.surrogate == "divergence" else self.clip_range

    @property
    def judges_completions(self) -> bool:
        """Whether more is scored than the samples themselves, so that rewards must judge images one by one."""
        return self.credit not in ("image", "tree") or (self.noise_search is not None and self.noise_search.rounds > 0)

    def problems(self, rollout: RolloutSection) -> list[str]:
        """Parts that do not fit the grid, the group, or each other, and settings that nothing would read."""
        return stepwise_problems(self, rollout)

    # hooks

    def levels(self, num_steps: int) -> tuple[float, ...]:
        """Noise level of each step but the last."""
        return self.noise_level if isinstance(self.noise_level, tuple) else (self.noise_level,) * (num_steps - 1)

    def plans(self, grid: torch.Tensor, *, iteration: int, rng: np.random.Generator) -> list[StepPlan]:
        """The plans of an iteration, with the completions that the credit asks for."""
        from flowrl.flow.plans import dense_completions, granular_completions

        context = PlanContext(tuple(grid.tolist()), self.levels(len(grid) - 1), iteration, rng)
        plans = self.steps.plans(context)
        if self.credit in ("increments", "turning_points"):
            return [dense_completions(plan, num_steps=self.completion_steps) for plan in plans]
        if self.credit == "granularities":
            return [granular_completions(plan, self.strides) for plan in plans]
        return plans

    def start(self, policy: Any, score: Score, ids: SampleIds, *, seed: int, iteration: int) -> torch.Tensor | None:
        """Initial noise `(n, *latent)` from the searched law of each prompt; None where nothing is searched."""
        search = self.noise_search
        if search is None or search.rounds == 0:
            return None
        import torch

        from flowrl.flow.noise_search import on_shell, search_noise

        groups, index = torch.unique(ids.group, return_inverse=True)
        prompts = torch.stack([ids.prompt[index == number][0] for number in range(len(groups))])

        def draw(number: int, count: int) -> torch.Tensor:
            keys = [int(group) * count + member for group in groups for member in range(count)]
            z = policy.draw(seed, iteration, keys, number, purpose="noise search")
            return z.unflatten(0, (len(groups), count))

        def evaluate(candidates: torch.Tensor) -> torch.Tensor:
            rows = prompts.repeat_interleave(candidates.shape[1])
            return score(policy.predict_clean(candidates.flatten(0, 1), rows), rows).reshape(candidates.shape[:2])

        settings = search.model_dump(include={"candidates", "elites", "rounds", "std_floor"})
        mean, std = search_noise(draw, evaluate, len(groups), **settings)
        z = policy.draw(seed, iteration, policy.starts(ids).tolist(), -1)
        return on_shell(mean[index] + std[index] * z)

    def advantages(self, scores: Scores) -> torch.Tensor:
        """`(N, 1)` or `(N, U)`: credited, normalised within (group, column), clamped."""
        values = self._combined(scores, lambda rewards: self._credited(rewards, scores.num_units))
        if self.credit == "granularities":
            values = values.sum(1, keepdim=True)
        return values.clamp(-self.advantage_clip, self.advantage_clip)

    def _credited(self, rewards: torch.Tensor, num_units: int) -> torch.Tensor:
        from flowrl.flow import credit

        if self.credit == "increments":
            return credit.increments(rewards)
        if self.credit == "turning_points":
            return credit.turning_point_rewards(rewards, balance=self.balance_turning_points)[0]
        if self.credit == "tree":
            return credit.tree_rewards(rewards[:, -1], self._splits_until(num_units), len(self._splits()))
        return rewards if self.credit == "granularities" else rewards[:, -1:]

    def _splits(self) -> tuple[int, ...]:
        return self.steps.splits if isinstance(self.steps, TreeSteps) else ()

    def _splits_until(self, num_units: int) -> torch.Tensor:
        import torch

        return torch.tensor([sum(split <= unit for split in self._splits()) for unit in range(num_units)])

    def select(self, advantages: torch.Tensor, scores: Scores, rng: np.random.Generator) -> torch.Tensor:
        """Units `(N, U)` that enter the loss: of chosen samples, a share of the steps, each edge of a tree once."""
        import torch

        from flowrl.core.combine import weighted_sum

        num, units = advantages.shape
        keep = torch.ones(num, units, dtype=torch.bool)
        if self.keep_best:
            scored = weighted_sum(scores.table[:, -1], scores.weights).isfinite()
            ranks = torch.where(scored, advantages.mean(1), torch.nan)
            keep &= _extremes(ranks, scores.group, self.keep_best)[:, None]
        if self.timestep_fraction < 1:
            order = torch.from_numpy(rng.random((num, units))).argsort(1).argsort(1)
            keep &= order < int(units * self.timestep_fraction)
        if self.credit == "tree":
            below = 2 ** (len(self._splits()) - self._splits_until(units))
            keep &= torch.arange(num)[:, None] % below == 0
        return keep

    def loss(self, policy: Policy, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """The policy loss plus beta times the KL divergence, `(B,)`."""
        import torch

        from flowrl.core.gaussian import gaussian_kl

        out = policy.replay(batch)
        loss, metrics = self._policy_loss(out, batch)
        metrics["policy_loss"] = loss.detach()
        if self.beta > 0:
            with torch.no_grad(), policy.reference():
                reference = policy.replay(batch)
            reduction = "sum" if self.log_prob_reduction == "sum" else "mean"
            kl = gaussian_kl(out.mean, reference.mean, out.std, reduction=reduction)
            loss = loss + self.beta * kl
            metrics["kl"] = kl.detach()
        return loss, metrics

    def _policy_loss(self, out: UnitOutput, batch: UnitBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        from flowrl.core.surrogates import clipped_surrogate
        from flowrl.flow.losses import divergence_masked_surrogate, guarded_surrogate

        device = out.log_prob.device
        common = out.log_prob, batch.old_log_prob.to(device), batch.advantages.to(device)
        if self.surrogate == "clip":
            return clipped_surrogate(*common, clip_low=self.clip_range, clip_high=self.clip_range)
        gaussian = out.mean, batch.inputs.mean.to(device), out.std
        if self.surrogate == "divergence":
            return divergence_masked_surrogate(*common, *gaussian, limit=self.divergence_limit)
        u = batch.inputs
        step = (u.sigma - u.sigma_next)[u.source].to(device)
        return guarded_surrogate(*common, *gaussian, step, clip_range=self.clip_range)


def _extremes(ranks: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """The best and the worst `count / 2` samples of each group, those of rank NaN left out, `(N,)` bool."""
    import torch

    keep = torch.zeros_like(group, dtype=torch.bool)
    for number in torch.unique(group):
        rows = ((group == number) & ranks.isfinite()).nonzero()[:, 0]
        order = rows[ranks[rows].argsort(stable=True)]
        keep[order[: count // 2]] = True
        keep[order[max(0, len(order) - count // 2) :]] = True
    return keep

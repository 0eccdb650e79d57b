"""The loop: rollout, score, combine, advantage, loss, update. Knows no method, model or reward by name."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowrl.errors import ConfigError, RewardError

from .advantages import zero_std_fraction
from .checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from .combine import weighted_sum
from .controllers import Controller
from .distributed import gather_rows, shard
from .ema import EMA
from .groups import iteration_ids, plan_batches
from .policy import Method, Policy, Rollout
from .prompts import PromptSet
from .random import numpy_generator, torch_generator
from .scoring import Scorer
from .types import SampleIds, Scores

logger = logging.getLogger("flowrl")


@dataclass(frozen=True)
class Settings:
    """What the loop itself has to know; see the fields of the same names in `flowrl.config`."""

    seed: int
    iterations: int
    num_prompts: int
    group_size: int
    rollout_batch_size: int
    learning_rate: float
    update_batch_size: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    updates_per_rollout: int = 1
    epochs_per_rollout: int = 1
    ema_decay: float | None = None
    checkpoint_every: int = 0
    keep_checkpoints: int = 2


class Trainer:
    """Trains a policy with a method on rewards.

    Args:
        on_iteration: called with (iteration, metrics, seconds by phase) after each iteration, on every rank.
        folder: of the run; checkpoints go to `folder/checkpoints`.
        controller: moves the rewards' weights in the course of training; fixed weights by default.

    Raises:
        ConfigError: a pairwise reward, and batches that cut groups.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        method: Method,
        scorer: Scorer,
        prompts: PromptSet,
        accelerator: Accelerator,
        folder: Path,
        on_iteration: Callable[[int, dict[str, float], dict[str, float]], None] | None = None,
        controller: Controller | None = None,
    ):
        check_pairwise(settings, method, scorer, accelerator.num_processes)
        self.controller = controller
        self.settings, self.policy, self.method, self.scorer = settings, policy, method, scorer
        self.prompts, self.accelerator, self.folder = prompts, accelerator, folder
        self.on_iteration = on_iteration or (lambda iteration, metrics, seconds: None)
        self.iteration = 0
        self.reward_calls = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.parameters = dict(policy.trainable_parameters())
        optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._warned = False
        self.num_steps = 0  # optimizer steps so far, those skipped for a bad gradient included
        self.ema = EMA(self.parameters.items(), settings.ema_decay) if settings.ema_decay else None
        policy.model, self.optimizer = accelerator.prepare(policy.model, optimizer)

    def learning_rate(self, step: int) -> float:
        """Learning rate of the optimizer step number `step`, from 0."""
        s = self.settings
        total = s.iterations * s.updates_per_rollout * s.epochs_per_rollout
        if step < s.warmup_steps:
            return s.learning_rate * (step + 1) / (s.warmup_steps + 1)
        done = min(1.0, (step - s.warmup_steps) / max(1, total - s.warmup_steps))
        factors = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        return s.learning_rate * factors[s.schedule]

    # the loop

    def run(self) -> None:
        """Trains from `self.iteration` to the last one, and leaves a checkpoint."""
        every = self.settings.checkpoint_every
        while self.iteration < self.settings.iterations:
            self.seconds = defaultdict(float)
            metrics = self._iterate()
            self.iteration += 1
            self.on_iteration(self.iteration, metrics, dict(self.seconds))
            if self.iteration == self.settings.iterations or (every and self.iteration % every == 0):
                self.save()

    def _iterate(self) -> dict[str, float]:
        s = self.settings
        ids = iteration_ids(
            s.seed, self.iteration, num_rows=len(self.prompts), num_prompts=s.num_prompts, group_size=s.group_size
        )
        plans = self.method.plans(
            self.policy.grid, iteration=self.iteration, rng=numpy_generator(s.seed, "plan", self.iteration)
        )
        mine = shard(len(ids), self.accelerator.process_index, self.accelerator.num_processes)
        rollout, table = self._sample(ids[mine], plans)
        table = gather_rows(self.accelerator, table.flatten(1), len(ids)).unflatten(1, table.shape[1:])
        compared = torch.tensor([reward.pairwise for reward in self.scorer.rewards])
        scores = Scores(table, self._weights(), ids.group, rollout.num_units, compared)
        rewards = weighted_sum(table[:, -1], scores.weights)
        if rewards.isnan().all():
            raise RewardError(
                f"iteration {self.iteration + 1}: no sample got a score of {', '.join(self.scorer.names)}"
            )
        advantages = self.method.advantages(scores).expand(-1, rollout.num_units)
        keep = self.method.select(advantages, scores, numpy_generator(s.seed, "select", self.iteration))
        metrics = self._reward_metrics(table[:, -1], rewards, advantages, ids)
        missing = int(weighted_sum(table, scores.weights).isnan().sum())
        metrics["num_missing_scores"] = missing
        if missing and not advantages.any():
            logger.warning(
                "iteration %d: nothing to learn from, as %d of %d scores are missing",
                self.iteration + 1,
                missing,
                table.shape[0] * table.shape[1],
            )
        if self.controller:
            metrics |= self.controller.update(dict(zip(self.scorer.names, table[:, -1].T.tolist(), strict=True)))
        with self._clock("update"):
            metrics |= self._update(rollout, advantages[mine].float(), keep, mine)
            self.method.finish(self.policy, self.iteration)
        return metrics | self._counts()

    def _weights(self) -> torch.Tensor:
        weights = [reward.weight for reward in self.scorer.rewards]
        if self.controller:
            weights = [w * self.controller.weights()[name] for w, name in zip(weights, self.scorer.names, strict=True)]
        return torch.tensor(weights, dtype=torch.float64)

    def _sample(self, ids: SampleIds, plans: list[Any]) -> tuple[Rollout, torch.Tensor]:
        """This rank's samples and their scores `(n, V, R)`; the groups of an iteration share out the plans in order."""
        s = self.settings
        with self._clock("search"), self.accelerator.autocast():
            noise = self.method.start(self.policy, self._score, ids, seed=s.seed, iteration=self.iteration)
        rollouts, futures = [], []
        for plan, rows in plan_batches(ids, plans, s.num_prompts, s.rollout_batch_size, shift=self.iteration):
            with self._clock("rollout"), self.accelerator.autocast():
                start = None if noise is None else noise[rows]
                rollout = self.policy.rollout(ids[rows], plan, seed=s.seed, iteration=self.iteration, noise=start)
            with self._clock("decode"):
                rollouts.append(self.policy.decode(rollout))
            with self._clock("reward"):
                futures.append(self._submit(rollouts[-1]))
        with self._clock("reward"):
            table = torch.cat([future.result() for future in futures])
        rollout = self.policy.join(rollouts)
        return rollout, table[rollout.views]

    def _submit(self, rollout: Rollout) -> Future[torch.Tensor]:
        rows = self.prompts.rows(rollout.ids.prompt[rollout.owners].tolist())
        self.reward_calls += len(rollout.completions)
        groups = rollout.ids.group[rollout.owners].tolist() if rollout.views.shape[1] == 1 else None
        return self.scorer.submit(rows.prompts, rollout.completions, rows.columns, groups)

    def _score(self, latents: Any, prompt_rows: torch.Tensor) -> torch.Tensor:
        """Rewards of final latents, for methods that search before they sample."""
        rows = self.prompts.rows(prompt_rows.tolist())
        self.reward_calls += len(prompt_rows)
        table = self.scorer.submit(rows.prompts, self.policy.render(latents), rows.columns).result()
        return weighted_sum(table, self._weights())

    def _counts(self) -> dict[str, float]:
        """Network evaluations and scored completions of the iteration, of all ranks."""
        counts = {**self.policy.take_counts(), "reward_calls": self.reward_calls}
        self.reward_calls = 0
        own = torch.tensor(list(counts.values()), device=self.accelerator.device)
        total = self.accelerator.gather(own).reshape(-1, len(counts)).sum(0)
        return dict(zip(counts, total.tolist(), strict=True))

    def _update(self, rollout: Rollout, advantages: torch.Tensor, keep: torch.Tensor, mine: slice) -> dict[str, float]:
        """The optimizer steps on one rollout; each takes an equal share of all ranks' samples.

        Args:
            advantages: `(n, U)` of this rank's samples. keep: `(N, U)` units that enter the loss, of all ranks.
        """
        s, log = self.settings, _Averages()
        probe = _first_parameters(self.parameters.values(), 4_000_000)
        before = [parameter.detach().clone() for parameter in probe]
        for epoch in range(s.epochs_per_rollout):
            order = torch.randperm(len(keep), generator=torch_generator(s.seed, "update", self.iteration, epoch))
            order = order[keep.any(1)[order]]
            for number, share in enumerate(order.chunk(s.updates_per_rollout)):
                first = epoch == 0 and number == 0
                wanted = keep[mine] & torch.isin(rollout.ids.sample, share)[:, None]
                self._step(rollout, advantages, wanted, int(keep[share].sum()), log, first=first)
        moved = sum((p.detach() - b).square().sum() for p, b in zip(probe, before, strict=True))
        norm = sum(b.square().sum() for b in before)
        log.add("update_to_weight", math.sqrt(float(moved) / max(float(norm), 1e-30)))
        log.add("learning_rate", self.learning_rate(self.num_steps - 1))
        return log.result()

    def _step(
        self,
        rollout: Rollout,
        advantages: torch.Tensor,
        wanted: torch.Tensor,
        num_pairs: int,
        log: _Averages,
        *,
        first: bool,
    ) -> None:
        """One optimizer step on the units `wanted (n, U)`; `num_pairs` counts those of all ranks."""
        batches, size = self._micro_batches(wanted, advantages)
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(size):
            pairs, weight = (batches[index], 1.0) if index < len(batches) else (torch.tensor([[0, 0]]), 0.0)
            batch = rollout.pick(pairs[:, 0], pairs[:, 1], advantages[pairs[:, 0], pairs[:, 1]])
            last = index + 1 == size
            with nullcontext() if last else self.accelerator.no_sync(self.policy.model):
                with self.accelerator.autocast():
                    loss, metrics = self.method.loss(self.policy, batch)
                total = weight * self.accelerator.num_processes * loss.sum() / num_pairs
                self.accelerator.backward(total)
            if weight:
                log.add_units(metrics, first=first)
        self._apply(log, any_batch=size > 0)
        if first and log.peak("ratio_deviation_first") > getattr(self.method, "ratio_limit", math.inf):
            logger.warning(
                "before the first update the ratio is off 1 by %.1e, more than method.clip_range: rollout and update "
                "do not compute the same; use float32, or a larger clip range",
                log.peak("ratio_deviation_first"),
            )

    def _micro_batches(self, wanted: torch.Tensor, advantages: torch.Tensor) -> tuple[list[torch.Tensor], int]:
        """(row, unit) pairs `(B, 2)` of this rank, and how many batches every rank has to run.

        Units of advantage 0 are left out where the loss has no term but the surrogate.
        """
        if not getattr(self.method, "needs_reference", True):
            wanted = wanted & (advantages != 0)
        pairs = wanted.nonzero()
        batches = list(pairs.split(self.settings.update_batch_size)) if len(pairs) else []
        counts = self.accelerator.gather(torch.tensor([len(batches)], device=self.accelerator.device))
        return batches, int(counts.max())

    def _apply(self, log: _Averages, *, any_batch: bool) -> None:
        """Clips and steps, unless the gradient is not finite; schedule and EMA count the step in any case."""
        if any_batch:
            norm = float(self.accelerator.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm))
            log.add("grad_norm", norm)
            self._warn_of_tiny_gradients(norm)
            if math.isfinite(norm) or self.accelerator.scaler is not None:  # a scaler skips such steps itself
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate(self.num_steps)
                self.optimizer.step()
            if not math.isfinite(norm):
                logger.warning("iteration %d: gradient is not finite, optimizer step skipped", self.iteration + 1)
                log.add("skipped_steps", 1.0)
        self.num_steps += 1
        if self.ema:
            self.ema.update()

    def _warn_of_tiny_gradients(self, norm: float) -> None:
        rms = norm / math.sqrt(sum(parameter.numel() for parameter in self.parameters.values()))
        if 0 < rms < self.settings.eps and not self._warned:
            self._warned = True
            logger.warning(
                "the gradient's rms %.1e is below optimizer.eps=%.0e, so AdamW takes smaller steps than the learning "
                "rate says; lower optimizer.eps",
                rms,
                self.settings.eps,
            )

    def _reward_metrics(
        self, table: torch.Tensor, rewards: torch.Tensor, advantages: torch.Tensor, ids: SampleIds
    ) -> dict[str, float]:
        metrics = {"reward": rewards.nanmean().item(), "reward_std": _nan_std(rewards)}
        for name, column in zip(self.scorer.names, table.T, strict=True):
            metrics |= {f"rewards/{name}/mean": column.nanmean().item(), f"rewards/{name}/std": _nan_std(column)}
        return metrics | {
            "frac_reward_zero_std": zero_std_fraction(rewards, ids.group),
            "advantage_abs_mean": advantages.abs().mean().item(),
        }

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    # checkpoints

    @contextmanager
    def evaluation_weights(self) -> Iterator[str]:
        """Within it the policy carries the weights to judge and export; yields their name, "ema" or "raw"."""
        with self.ema.applied() if self.ema else nullcontext():
            yield "ema" if self.ema else "raw"

    def save(self) -> None:
        """Writes a checkpoint, on the main process."""
        if not self.accelerator.is_main_process:
            return
        weights: dict[str, Any] = {"policy": self.parameters}
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "num_steps": self.num_steps}
        if self.controller:
            state["controller"] = self.controller.state_dict()
        weights |= {f"lagged_{name}": tensors for name, tensors in self.policy.lagged_weights.items()}
        if self.ema:
            weights["ema"] = self.ema.shadow
            state["ema_updates"] = self.ema.num_updates
        folder = self.folder / "checkpoints"
        save_checkpoint(folder, self.iteration, weights, state, keep=self.settings.keep_checkpoints)

    def resume(self) -> None:
        """Goes back to the newest checkpoint of the folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it belongs to other parameters than those trained now.
        """
        checkpoints = list_checkpoints(self.folder / "checkpoints")
        if not checkpoints:
            raise FileNotFoundError(f"no complete checkpoint in {self.folder / 'checkpoints'}")
        weights, state = load_checkpoint(checkpoints[-1])
        _copy_into(self.parameters, weights["policy"], str(checkpoints[-1]))
        for name, tensors in self.policy.lagged_weights.items():
            _copy_into(tensors, weights[f"lagged_{name}"], str(checkpoints[-1]))
        if self.ema:
            _copy_into(self.ema.shadow, weights["ema"], str(checkpoints[-1]))
            self.ema.num_updates = state["ema_updates"]
        if self.controller:
            self.controller.load_state_dict(state["controller"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration, self.num_steps = state["iteration"], state["num_steps"]


@torch.no_grad()
def _copy_into(targets: dict[str, Any], values: dict[str, torch.Tensor], where: str) -> None:
    if targets.keys() != values.keys():
        different = sorted(targets.keys() ^ values.keys())
        raise ValueError(f"{where} holds other parameters than the run trains, for instance {different[0]!r}")
    for name, target in targets.items():
        target.copy_(values[name])


def check_pairwise(settings: Settings, method: Any, scorer: Scorer, num_processes: int) -> None:
    """Whether rewards that compare pairs can do so: within a batch, among samples.

    Raises:
        ConfigError: batches cut groups, or the method scores more than samples.
    """
    pairwise = [reward.name for reward in scorer.rewards if reward.pairwise]
    if not pairwise:
        return
    if getattr(method, "judges_completions", False):
        raise ConfigError(
            f"reward {pairwise[0]!r} compares the samples of a group, but method.name={method.name} also scores single "
            "completions; use method.credit=image and no noise_search, or a reward that judges images one by one"
        )
    if settings.rollout_batch_size % settings.group_size or settings.num_prompts % num_processes:
        raise ConfigError(
            f"reward {pairwise[0]!r} compares the samples of a group, so rollout.batch_size="
            f"{settings.rollout_batch_size} must be a multiple of rollout.group_size={settings.group_size}, and "
            f"rollout.num_prompts={settings.num_prompts} one of the {num_processes} processes"
        )


def _first_parameters(parameters: Iterable[torch.Tensor], num_elements: int) -> list[torch.Tensor]:
    """The first parameters that together have about `num_elements` numbers, to watch their movement cheaply."""
    chosen, total = [], 0
    for parameter in parameters:
        chosen.append(parameter)
        total += parameter.numel()
        if total >= num_elements:
            break
    return chosen


def _nan_std(values: torch.Tensor) -> float:
    found = values[~values.isnan()]
    return found.std(correction=0).item() if len(found) else math.nan


class _Averages:
    """Means of logged values within an iteration, and the largest deviation of the ratio from 1."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._peaks: dict[str, float] = defaultdict(float)

    def add(self, name: str, value: float) -> None:
        self._values[name].append(value)

    def add_units(self, metrics: dict[str, torch.Tensor], *, first: bool) -> None:
        """Adds metrics `(B,)` of a micro-batch; `ratio` also by its extremes."""
        for name, values in metrics.items():
            self._values[name].extend(values.float().flatten().tolist())
        if "ratio" in metrics:
            deviation = (metrics["ratio"] - 1).abs().max().item()
            for name in ["ratio_deviation", "ratio_deviation_first"] if first else ["ratio_deviation"]:
                self._peaks[name] = max(self._peaks[name], deviation)

    def peak(self, name: str) -> float:
        return self._peaks.get(name, 0.0)

    def result(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._values.items()} | dict(self._peaks)

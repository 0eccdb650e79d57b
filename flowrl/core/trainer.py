"""The loop: rollout, score, combine, advantage, loss, update. Knows no method, model or reward by name."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowrl.errors import ConfigError, RewardError

from .advantages import zero_std_fraction
from .checkpoint import forget_newer, load_newest, save_checkpoint
from .combine import weighted_sum
from .controllers import Controller
from .distributed import gather_rows, shard
from .groups import iteration_ids, plan_batches
from .manifest import list_checkpoints
from .policy import Method, Policy, Rollout
from .prompts import PromptSet
from .random import numpy_generator
from .scoring import Scorer
from .types import SampleIds, Scores
from .update import Updater

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
        made_of: what the run is made of, stored with its checkpoints; see `flowrl.core.manifest`.

    `check` and `between` may be set: the first is called where the run may be stopped by an exception, with
    `together=True` where all ranks do so; the second after `on_iteration`, for what can be done again. `dirty` says
    that an iteration's update is under way, so that there is nothing to save.

    Raises:
        ConfigError: what `check_groups` finds.
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
        made_of: Mapping[str, Any] | None = None,
    ):
        check_groups(settings, method, scorer, accelerator.num_processes)
        self.controller = controller
        self.settings, self.policy, self.method, self.scorer = settings, policy, method, scorer
        self.prompts, self.accelerator, self.folder = prompts, accelerator, folder
        self.on_iteration = on_iteration or (lambda iteration, metrics, seconds: None)
        self.made_of = made_of or {}
        self.check: Callable[..., None] = lambda together=False: None
        self.between: Callable[[], None] = lambda: None
        self.iteration = 0
        self.dirty = False
        self.reward_calls = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.updater = Updater(settings, policy, method, accelerator)

    # the loop

    def run(self) -> None:
        """Trains from `self.iteration` to the last one, and leaves a checkpoint."""
        every = self.settings.checkpoint_every
        while self.iteration < self.settings.iterations:
            self.check(together=True)
            self.seconds = defaultdict(float)
            with torch.enable_grad():  # whatever a reward's module left it at
                metrics = self._iterate()
            self.iteration += 1
            self.on_iteration(self.iteration, metrics, dict(self.seconds))
            self.dirty = False
            self.between()
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
        self.check()
        self.dirty = True
        if self.controller:
            metrics |= self.controller.update(dict(zip(self.scorer.names, table[:, -1].T.tolist(), strict=True)))
        with self._clock("update"):
            metrics |= self.updater.run(rollout, advantages[mine].float(), keep, ids, iteration=self.iteration)
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
            self.check()
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
        ema = self.updater.ema
        with ema.applied() if ema else nullcontext():
            yield "ema" if ema else "raw"

    def save(self) -> None:
        """Writes a checkpoint of this iteration, unless there is one, on the main process.

        Raises:
            CheckpointError: it cannot be written.
        """
        folder = self.folder / "checkpoints"
        if not self.accelerator.is_main_process or folder / f"{self.iteration:06d}" in list_checkpoints(folder):
            return
        weights, state = self.updater.state()
        if self.controller:
            state["controller"] = self.controller.state_dict()
        keep = self.settings.keep_checkpoints
        save_checkpoint(folder, self.iteration, weights, state, keep=keep, made_of=self.made_of)

    def resume(self) -> Path:
        """Goes back to the newest whole checkpoint of the folder, and returns it; broken newer ones are deleted.

        Raises:
            CheckpointError: there is none, or it belongs to other parameters than those trained now.
        """
        path, weights, state = load_newest(self.folder / "checkpoints")
        if self.accelerator.is_main_process:
            forget_newer(path)
        self.updater.load(weights, state, str(path))
        if self.controller:
            self.controller.load_state_dict(state["controller"])
        self.iteration = state["iteration"]
        return path


def check_groups(settings: Settings, method: Any, scorer: Scorer, num_processes: int) -> None:
    """Whether methods and rewards that compare the samples of a group find them together.

    Raises:
        ConfigError: processes or batches cut groups, or a pairwise reward would judge more than samples.
    """
    if getattr(method, "whole_groups", False) and settings.num_prompts % num_processes:
        raise ConfigError(
            f"method.name={method.name} needs whole groups on each process, so rollout.num_prompts="
            f"{settings.num_prompts} must be a multiple of the {num_processes} processes"
        )
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


def _nan_std(values: torch.Tensor) -> float:
    found = values[~values.isnan()]
    return found.std(correction=0).item() if len(found) else math.nan

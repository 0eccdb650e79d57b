"""The optimizer steps on one rollout: micro-batches, clipping, schedule, average of the weights.

Shapes: `N` samples of all ranks, `n` of this one, `U` units.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from flowrl.errors import CheckpointError

from .ema import EMA
from .policy import Method, Policy, Rollout
from .random import torch_generator
from .types import SampleIds

if TYPE_CHECKING:
    from .trainer import Settings

logger = logging.getLogger("flowrl")


class Updater:
    """Moves the trained weights of a policy by AdamW.

    A method with an attribute `whole_groups` gets, in each call of its loss, all units of a number of a group that
    enter the loss, in the order of their samples; nothing else is promised of how units fall into micro-batches.
    """

    def __init__(self, settings: Settings, policy: Policy, method: Method, accelerator: Accelerator):
        self.settings, self.policy, self.method, self.accelerator = settings, policy, method, accelerator
        self.whole_groups = bool(getattr(method, "whole_groups", False))
        self.parameters = dict(policy.trainable_parameters())
        optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.num_steps = 0  # optimizer steps so far, those skipped for a bad gradient included
        self.ema = EMA(self.parameters.items(), settings.ema_decay) if settings.ema_decay else None
        self._warned = False
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

    def run(
        self, rollout: Rollout, advantages: torch.Tensor, keep: torch.Tensor, ids: SampleIds, *, iteration: int
    ) -> dict[str, float]:
        """The optimizer steps on one rollout; each takes an equal share of all ranks' samples, or of their groups.

        Args:
            rollout: of this rank's samples. advantages: `(n, U)` of them.
            keep: `(N, U)` units that enter the loss, of all ranks. ids: of all `N` samples.
        """
        s, log = self.settings, _Averages()
        probe = _first_parameters(self.parameters.values(), 4_000_000)
        before = [parameter.detach().clone() for parameter in probe]
        mine = torch.isin(ids.sample, rollout.ids.sample)
        owner = ids.group if self.whole_groups else ids.sample
        for epoch in range(s.epochs_per_rollout):
            owners, generator = torch.unique(owner), torch_generator(s.seed, "update", iteration, epoch)
            order = owners[torch.randperm(len(owners), generator=generator)]
            order = order[torch.isin(order, owner[keep.any(1)])]
            for number, share in enumerate(order.chunk(s.updates_per_rollout)):
                first = epoch == 0 and number == 0
                wanted = keep & torch.isin(owner, share)[:, None]
                self._step(rollout, advantages, wanted[mine], int(wanted.sum()), log, iteration, first=first)
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
        num_units: int,
        log: _Averages,
        iteration: int,
        *,
        first: bool,
    ) -> None:
        """One optimizer step on the units `wanted (n, U)`; `num_units` counts those of all ranks."""
        batches, size = self._micro_batches(rollout.ids, wanted, advantages)
        self.optimizer.zero_grad(set_to_none=True)
        for index in range(size):
            pairs, weight = (batches[index], 1.0) if index < len(batches) else (torch.zeros(2, 2).long(), 0.0)
            batch = rollout.pick(pairs[:, 0], pairs[:, 1], advantages[pairs[:, 0], pairs[:, 1]])
            last = index + 1 == size
            with nullcontext() if last else self.accelerator.no_sync(self.policy.model):
                with self.accelerator.autocast():
                    loss, metrics = self.method.loss(self.policy, batch)
                total = weight * self.accelerator.num_processes * loss.sum() / num_units
                self.accelerator.backward(total)
            if weight:
                log.add_units(metrics, first=first)
        self._apply(log, iteration, any_batch=size > 0)
        if first and log.peak("ratio_deviation_first") > getattr(self.method, "ratio_limit", math.inf):
            logger.warning(
                "before the first update the ratio is off 1 by %.1e, more than method.clip_range: rollout and update "
                "do not compute the same; use float32, or a larger clip range",
                log.peak("ratio_deviation_first"),
            )

    def _micro_batches(
        self, ids: SampleIds, wanted: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[list[torch.Tensor], int]:
        """(row, unit) pairs `(B, 2)` of this rank, and how many batches every rank has to run.

        Units of advantage 0 are left out where the loss has no term but the surrogate.
        """
        size = self.settings.update_batch_size
        if not self.whole_groups and getattr(self.method, "skips_zero_advantages", False):
            wanted = wanted & (advantages != 0)
        pairs = wanted.nonzero()
        batches = list(pairs.split(size)) if len(pairs) else []
        if self.whole_groups and len(pairs):
            key = pairs[:, 1] * (int(ids.group.max()) + 1) + ids.group[pairs[:, 0]]
            order = key.argsort(stable=True)
            batches = list(pairs[order].split(_whole_sizes(torch.unique(key, return_counts=True)[1].tolist(), size)))
        counts = self.accelerator.gather(torch.tensor([len(batches)], device=self.accelerator.device))
        return batches, int(counts.max())

    def _apply(self, log: _Averages, iteration: int, *, any_batch: bool) -> None:
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
                logger.warning("iteration %d: gradient is not finite, optimizer step skipped", iteration + 1)
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

    # checkpoints

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights by file, and the rest."""
        weights: dict[str, Any] = {"policy": self.parameters}
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "num_steps": self.num_steps}
        weights |= {f"lagged_{name}": tensors for name, tensors in self.policy.lagged_weights.items()}
        if self.ema:
            weights["ema"] = self.ema.shadow
            state["ema_updates"] = self.ema.num_updates
        return weights, state

    def load(self, weights: dict[str, Any], state: dict[str, Any], where: str) -> None:
        """Goes back to what `state` gave.

        Raises:
            CheckpointError: it belongs to other parameters than those trained now; `where` says what.
        """
        copy_into(self.parameters, weights["policy"], where)
        for name, tensors in self.policy.lagged_weights.items():
            copy_into(tensors, weights[f"lagged_{name}"], where)
        if self.ema:
            copy_into(self.ema.shadow, weights["ema"], where)
            self.ema.num_updates = state["ema_updates"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]


def _whole_sizes(groups: list[int], limit: int) -> list[int]:
    """Sizes of batches of at most `limit` rows that cut none of the `groups`; a larger group is a batch of its own."""
    sizes = [0]
    for group in groups:
        if sizes[-1] and sizes[-1] + group > limit:
            sizes.append(0)
        sizes[-1] += group
    return sizes


@torch.no_grad()
def copy_into(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], where: str) -> None:
    """Copies tensors by name.

    Raises:
        CheckpointError: names or shapes differ; starts with `where`.
    """
    other = sorted(targets.keys() ^ values.keys())
    other += [name for name, target in targets.items() if name in values and target.shape != values[name].shape]
    if other:
        raise CheckpointError(f"{where} holds other parameters than are trained here, for instance {other[0]!r}")
    for name, target in targets.items():
        target.copy_(values[name])


def _first_parameters(parameters: Iterable[torch.Tensor], num_elements: int) -> list[torch.Tensor]:
    """The first parameters that together have about `num_elements` numbers, to watch their movement cheaply."""
    chosen, total = [], 0
    for parameter in parameters:
        chosen.append(parameter)
        total += parameter.numel()
        if total >= num_elements:
            break
    return chosen


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

"""Preference pairs from groups of samples of a model: the best and the worst by its rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from flowrl.build import build_accelerator, build_policy, load_weights, sample_and_score
from flowrl.catalog import find_prompts
from flowrl.config import Config
from flowrl.core.combine import weighted_sum
from flowrl.core.groups import iteration_ids
from flowrl.core.pairs import Pair, best_and_worst, check_new, write_pairs
from flowrl.core.prompts import PromptSet, read_prompts
from flowrl.core.scoring import Scorer
from flowrl.errors import ConfigError
from flowrl.flow.endpoints import EndpointPlan
from flowrl.flow.policy import FlowPolicy
from flowrl.rewards.base import build_rewards


def write_pairs_of(
    config: Config, folder: str | Path, *, run: str | Path | None = None, num_pairs: int, margin: float = 0.0
) -> int:
    """Builds pairs with the model of a config, or of a run's newest checkpoint; returns how many were written.

    Raises:
        ConfigError: the folder is not new, or the rewards cannot judge samples one by one.
    """
    check_new(folder)
    scorer = Scorer(build_rewards(config.rewards))
    others = [reward.name for reward in scorer.rewards if not reward.judges_samples]
    if others:
        raise ConfigError(f"reward {others[0]!r} cannot judge samples one by one, so it cannot order them")
    accelerator = build_accelerator(config)
    prompts = read_prompts(find_prompts(config.data.train))
    if run is None:
        policy = build_policy(config, prompts, accelerator.device)
    else:
        policy = load_weights(Path(run), config, "auto", accelerator.device, prompts)[0]
    found = build_pairs(policy, config, prompts, scorer, accelerator, num_pairs=num_pairs, margin=margin)
    return write_pairs(folder, found)


def build_pairs(
    policy: FlowPolicy,
    config: Config,
    prompts: PromptSet,
    scorer: Scorer,
    accelerator: Accelerator,
    *,
    num_pairs: int,
    margin: float = 0.0,
) -> Iterator[Pair]:
    """Pairs of the policy's samples, by the `rollout` section of the config: steps, guidance, group and batch sizes.

    Prompts come in shuffled passes over `prompts`; samples are deterministic (ODE) from noise that depends on the seed.

    Args:
        margin: the rewards of a pair differ by more than this.

    Raises:
        ConfigError: a whole pass over the prompts gave no pair.
    """
    r, number, iteration, found_at = config.rollout, 0, 0, 0
    weights = torch.tensor([reward.weight for reward in scorer.rewards], dtype=torch.float64)
    plan = EndpointPlan(num_draws=1, times=lambda u: u)
    while number < num_pairs:
        sizes = {"num_rows": len(prompts), "num_prompts": r.num_prompts, "group_size": r.group_size}
        ids = iteration_ids(config.seed, iteration, **sizes)
        scored = list(sample_and_score(policy, config, prompts, scorer, accelerator, ids, plan, iteration=iteration))
        images = [image for rollout, _ in scored for image in rollout.completions]
        rewards = torch.cat([weighted_sum(table[:, -1], weights) for _, table in scored])
        for best, worst in best_and_worst(rewards.tolist(), ids.group.tolist(), margin=margin)[: num_pairs - number]:
            row = prompts.rows([int(ids.prompt[best])])
            columns = {name: values[0] for name, values in row.columns.items() if values[0] is not None}
            ends = float(rewards[best]), float(rewards[worst])
            yield Pair(row.prompts[0], images[best], images[worst], *ends, columns)
            number, found_at = number + 1, iteration
        iteration += 1
        if (iteration - found_at) * r.num_prompts > len(prompts):
            raise ConfigError(
                f"{number} pairs, then none in a whole pass over the prompts: no group differs by more than {margin:g}"
            )

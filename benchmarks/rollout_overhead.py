"""What a rollout costs beside a stock pipeline call, and where an iteration spends its time.

    python benchmarks/rollout_overhead.py [--batch-size 64] [--iterations 10]

Both sides start from encoded prompts and the same noise, take 10 steps without guidance and end in PIL images; the
rollout draws noise, scores every step but the last and stores all latents. They alternate within one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from accelerate import Accelerator
from flowrl.rewards.base import build_rewards
from rich.console import Console
from rich.table import Table

from flowrl.build import build_policy, trainer_settings
from flowrl.catalog import find_prompts
from flowrl.config import load_config
from flowrl.core.prompts import read_prompts
from flowrl.core.random import torch_generator
from flowrl.core.scoring import Scorer
from flowrl.core.trainer import Trainer
from flowrl.core.types import SampleIds
from flowrl.flow.plans import all_steps

STEPS = 10


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rollout_over_stock(batch_size: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a rollout and of a stock call."""
    prompts = read_prompts(find_prompts("prompts/shapes_train.jsonl"))
    config = load_config(
        None,
        [f"rollout.num_inference_steps={STEPS}", "method={name: flow_grpo, transition: flow_sde}"],
    )
    policy = build_policy(config, prompts)
    rows = torch.arange(batch_size)
    ids, plan = SampleIds(rows, rows, rows), all_steps((0.7,) * (STEPS - 1))
    cond = policy.conditioning(rows).tensors
    noise = policy.noise([torch_generator(0, "noise", 0, row, 0) for row in range(batch_size)])

    def rollout() -> None:
        policy.decode(policy.rollout(ids, plan, seed=0, iteration=0))

    def stock() -> None:
        policy.adapter.pipe(
            prompt_embeds=cond["encoder_hidden_states"],
            pooled_prompt_embeds=cond["pooled_projections"],
            latents=noise,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
        )

    rollout()
    stock()
    times = [(seconds(rollout), seconds(stock)) for _ in range(repeats)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def iteration_phases(iterations: int) -> dict[str, float]:
    """Median seconds of each phase of an iteration of the default run."""
    config = load_config(None, [f"iterations={iterations + 1}", "log.checkpoint_every=0"])
    prompts = read_prompts(find_prompts(config.data.train))
    accelerator = Accelerator(cpu=True)
    policy = build_policy(config, prompts)
    found: dict[str, list[float]] = defaultdict(list)

    def record(iteration: int, metrics: dict[str, float], phases: dict[str, float]) -> None:
        if iteration > 1:
            for name, value in phases.items():
                found[name].append(value)

    with tempfile.TemporaryDirectory() as folder:
        scorer = Scorer(build_rewards(config.rewards))
        Trainer(
            trainer_settings(config), policy, config.method, scorer, prompts, accelerator, Path(folder), record
        ).run()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=10)
    args = parser.parse_args()
    ours, stock = rollout_over_stock(args.batch_size, args.repeats)
    table = Table("10 steps", "seconds", title=f"batch of {args.batch_size}, {torch.get_num_threads()} threads")
    table.add_row("rollout with log-probs", f"{ours:.3f}")
    table.add_row("stock pipeline call", f"{stock:.3f}")
    table.add_row("ratio", f"{ours / stock:.3f}")
    Console().print(table)
    phases = iteration_phases(args.iterations)
    table = Table("phase of an iteration", "seconds", "share", title="default run")
    for name, value in phases.items():
        table.add_row(name, f"{value:.3f}", f"{value / sum(phases.values()):.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()

"""What it saves to complete all stored states of a rollout together (DenseGRPO, TP-GRPO).

    python benchmarks/completions.py [--num-prompts 12] [--group-size 8] [--steps 10] [--repeats 3]

Both sides sample the same trajectories and complete every state between the stochastic steps by all remaining ODE
steps, on the shapes model. The plain way rolls out one group after another and completes one state of it after the
other, so a network call has a group of rows; ours fills calls of `--batch-size` rows. They alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from flowrl.build import build_policy
from flowrl.catalog import find_prompts
from flowrl.config import load_config
from flowrl.core.prompts import read_prompts
from flowrl.core.types import SampleIds
from flowrl.flow.plans import all_steps, dense_completions
from flowrl.flow.rollout import sample_ode


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    config = load_config(
        None,
        [f"rollout.num_inference_steps={args.steps}", f"rollout.batch_size={args.batch_size}", "method=dense_grpo"],
    )
    policy = build_policy(config, read_prompts(find_prompts("prompts/shapes_train.jsonl")))
    rows = torch.arange(args.num_prompts * args.group_size)
    ids = SampleIds(rows, rows // args.group_size, rows // args.group_size)
    plan = all_steps((0.7,) * (args.steps - 1))

    def together() -> torch.Tensor:
        parts = ids.sample.split(args.batch_size)
        found = [policy.rollout(ids[part], dense_completions(plan), seed=0, iteration=0).trajectory for part in parts]
        return torch.cat([t.clean[t.views[:, :-1]] for t in found])

    def one_by_one() -> torch.Tensor:
        completed = []
        for group in ids.sample.split(args.group_size):
            states = policy.rollout(ids[group], plan, seed=0, iteration=0).trajectory.states
            velocity = policy._velocity(policy.conditioning(ids.prompt[group]), 1.0, "completion")
            of_group = [sample_ode(velocity, states[:, k], policy.grid[k:]) for k in range(args.steps - 1)]
            completed.append(torch.stack(of_group, 1))
        return torch.cat(completed)

    gap = (together() - one_by_one()).abs().max()
    times = [(seconds(together), seconds(one_by_one)) for _ in range(args.repeats)]
    ours, plain = (statistics.median(side) for side in zip(*times, strict=True))
    table = Table(f"{args.num_prompts} x {args.group_size} samples, {args.steps} steps", "seconds")
    table.add_row(f"completed together, calls of {args.batch_size} rows", f"{ours:.2f}")
    table.add_row(f"state by state, calls of {args.group_size} rows", f"{plain:.2f}")
    table.add_row("ratio", f"{plain / ours:.2f}")
    Console().print(table)
    print(f"largest difference of the clean latents {gap:.1e}; {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()

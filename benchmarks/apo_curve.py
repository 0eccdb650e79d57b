"""Does APO's metric keep samples on the data manifold? `OMP_NUM_THREADS=1 python benchmarks/apo_curve.py`

Data lies on a sine curve in the plane, with little noise around it. A small network learns it by flow matching; pairs
of its samples are labelled by a Bradley-Terry judge who likes the right end of the curve. Every arm then starts from
the same weights, pairs, times and noises, at the same beta and learning rate, and differs in the error inside
Diffusion-DPO only. Arms are compared at equal preference accuracy (share of samples on the right half of the curve), by
interpolation along training, in the mean distance of samples to the curve.

Controls: "beta x 1.25" asks whether a larger beta for all directions would do as well; "turned" gives APO's directions
a quarter turn, so that it weighs errors along the curve; "random" takes directions that know nothing of the reference.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from itertools import pairwise

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from flowrl.flow.geometry import metric_error, metric_strength, sensitivities
from flowrl.flow.matching import mean_square, noised
from flowrl.flow.paths import predict_noise
from flowrl.flow.preferences import dpo_logit, dpo_loss

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SPREAD, BATCH, EVERY, FAR = 0.02, 512, 25, 0.1
POSITIONS = torch.linspace(-1, 1, 1001)
BOTH_SIGNS = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # in the plane these two probes give J J^T itself
ARMS = {  # name: (probes, relative strength), or a factor of beta for Diffusion-DPO
    "DPO": 1.0,
    "APO, strength 1": ("both", 1.0),
    "APO, strength 8": ("both", 8.0),
    "APO, 2 random probes, strength 1": ("signs", 1.0),
    "control: DPO, beta x 1.25": 1.25,
    "control: turned, strength 1": ("turned", 1.0),
    "control: random, strength 1": ("random", 1.0),
}
COLORS = {
    "DPO": "#d1495b",
    "APO, strength 8": "#2d5fe1",
    "APO, strength 1": "#8fb0f0",
    "control: turned, strength 1": "#999",
}


class Velocity(nn.Module):
    def __init__(self, width: int = 96):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(1, 5) * math.pi / 2)
        sizes = [11, width, width, width]
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.SiLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 2))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * self.frequencies
        return self.layers(torch.cat([x, t[:, None], angles.sin(), angles.cos()], 1))


def curve(position: torch.Tensor) -> torch.Tensor:
    return torch.stack([1.5 * position, 0.8 * torch.sin(math.pi * position)], -1)


def project(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance to the curve and position of the nearest point on it."""
    distance, index = torch.cdist(x, curve(POSITIONS)).min(1)
    return distance, POSITIONS[index]


def pretrained(seed: int, steps: int) -> Velocity:
    torch.manual_seed(seed)
    net = Velocity()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        clean = curve(2 * torch.rand(BATCH) - 1) + SPREAD * torch.randn(BATCH, 2)
        noise, t = torch.randn(BATCH, 2), torch.rand(BATCH)
        loss = mean_square(net(noised(clean, noise, t), t) - (noise - clean)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.requires_grad_(False)


@torch.no_grad()
def samples(net: Velocity, noise: torch.Tensor, steps: int = 30) -> torch.Tensor:
    x = noise
    for k in range(steps):
        x = x - net(x, torch.full((len(x),), 1 - k / steps)) / steps
    return x


def labelled_pairs(
    base: Velocity, seed: int, temperature: float, count: int = 4096
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = samples(base, torch.randn(2 * count, 2, generator=generator))
    first, second = project(x)[1].chunk(2)
    wins = torch.rand(count, generator=generator) < torch.sigmoid((first - second) / temperature)
    a, b = x.chunk(2)
    return torch.where(wins[:, None], a, b), torch.where(wins[:, None], b, a)


def directions(
    kind: str, base: Velocity, x: torch.Tensor, t: torch.Tensor, at_x: torch.Tensor, generator
) -> torch.Tensor:
    if kind == "random":
        return torch.randn(2, *x.shape, generator=generator)
    signs = torch.randint(0, 2, (2, *x.shape), generator=generator) * 2.0 - 1
    probes = signs if kind == "signs" else BOTH_SIGNS[:, None].expand_as(signs)
    u = sensitivities(lambda y: predict_noise(y, base(y, t.repeat(2)), t.repeat(2)), x, at_x, probes)
    return torch.stack([-u[..., 1], u[..., 0]], -1) if kind == "turned" else u


def aligned(base: Velocity, pairs, seed: int, arm, args) -> list[dict]:
    """Trains on the pairs; records samples, their share on the right and their distance every `EVERY` steps."""
    generator, own = torch.Generator().manual_seed(1000 + seed), torch.Generator().manual_seed(2000 + seed)
    start = torch.randn(2048, 2, generator=torch.Generator().manual_seed(3000))
    net = copy.deepcopy(base).requires_grad_(True)
    optimizer = torch.optim.Adam(net.parameters(), args.lr)
    trace = []
    for step in range(args.steps + 1):
        if step % EVERY == 0:
            x = samples(net, start)
            distance, position = project(x)
            share, off = (position > 0).float().mean().item(), distance.mean().item()
            trace.append({"step": step, "share": share, "distance": off, "x": x})
        rows = torch.randint(len(pairs[0]), (BATCH,), generator=generator)
        t = 0.02 + 0.98 * torch.rand(BATCH, generator=generator).repeat(2)
        noise = torch.randn(BATCH, 2, generator=generator).repeat(2, 1)
        x = noised(torch.cat([side[rows] for side in pairs]), noise, t)
        reference, found = predict_noise(x, base(x, t), t), predict_noise(x, net(x, t), t)
        if isinstance(arm, float):
            error, error_ref = mean_square(found - noise), mean_square(reference - noise)
        else:
            u = directions(arm[0], base, x, t, reference, own)
            lam = metric_strength(u, relative=arm[1], inside=t <= args.gate)
            error, error_ref = metric_error(found - noise, u, lam), metric_error(reference - noise, u, lam)
        beta = args.beta * (arm if isinstance(arm, float) else 1)
        logit = dpo_logit(*error.chunk(2), *error_ref.chunk(2), beta=beta)
        optimizer.zero_grad()
        dpo_loss(logit).mean().backward()
        optimizer.step()
    return trace


def at_accuracy(trace: list[dict], level: float) -> tuple[float, float]:
    """Distance and step where the share of preferred samples first reaches `level`; NaN if never."""
    for a, b in pairwise(trace):
        if a["share"] < level <= b["share"]:
            part = (level - a["share"]) / (b["share"] - a["share"])
            return tuple(a[key] + part * (b[key] - a[key]) for key in ("distance", "step"))
    return math.nan, math.nan


def draw(traces: dict[str, list[list[dict]]], level: float, path: str) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.7), layout="constrained", width_ratios=(1, 1, 1.25))
    for axis, name in zip(axes[:2], ("DPO", "APO, strength 8"), strict=True):
        point = next((p for p in traces[name][0] if p["share"] >= level), traces[name][0][-1])
        far = project(point["x"])[0] > FAR
        axis.plot(*curve(POSITIONS).T, color="#ccc", linewidth=1, zorder=0)
        axis.scatter(*point["x"][~far].T, s=2, color="#8a8a92")
        axis.scatter(*point["x"][far].T, s=6, color=COLORS[name])
        axis.set(xlim=(-2.1, 2.1), ylim=(-1.45, 1.45), aspect="equal")
        axis.set_title(f"{name}: {far.float().mean():.1%} further than {FAR} away", fontsize=9)
        axis.set_xlabel(f"seed 0, step {point['step']}, {point['share']:.0%} right of the middle", fontsize=9)
    right = axes[2]
    for name, color in COLORS.items():
        for index, trace in enumerate(traces[name]):
            added = [p["distance"] - trace[0]["distance"] for p in trace]
            right.plot(
                [p["share"] for p in trace], added, ".-", color=color, linewidth=1, ms=3, label=None if index else name
            )
    right.axvline(level, color="#ccc", linewidth=1, zorder=0)
    right.set(xlabel="share of samples on the preferred side", ylabel="added mean distance to the curve")
    right.set_title("along training, one line a seed", fontsize=9)
    right.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="docs/apo_curve.png")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--beta", type=float, default=15.0)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--gate", type=float, default=0.6, help="the metric acts at times up to this")
    parser.add_argument("--temperature", type=float, default=0.5, help="of the judge; the curve's positions span 2")
    parser.add_argument("--level", type=float, default=0.75, help="preference accuracy to compare at")
    parser.add_argument("--pretrain-steps", type=int, default=4000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, traces = time.perf_counter(), {name: [] for name in ARMS}
    for seed in args.seeds:
        base = pretrained(seed, args.pretrain_steps)
        pairs = labelled_pairs(base, seed, args.temperature)
        for name, arm in ARMS.items():
            traces[name].append(aligned(base, pairs, seed, arm, args))
    columns = [f"distance at {args.level:.0%}, mean", *(f"seed {seed}" for seed in args.seeds)]
    table = Table("arm", *columns, "steps to there", "final share", "final distance")
    before = [trace[0]["distance"] for trace in traces["DPO"]]
    table.add_row("before", *(f"{value:.4f}" for value in [statistics.fmean(before), *before]), "", "", "")
    for name, own in traces.items():
        distances, steps = zip(*(at_accuracy(trace, args.level) for trace in own), strict=True)
        distances = [f"{value:.4f}" for value in (statistics.fmean(distances), *distances)]
        share, distance = (statistics.fmean(trace[-1][key] for trace in own) for key in ("share", "distance"))
        table.add_row(name, *distances, f"{statistics.fmean(steps):.0f}", f"{share:.3f}", f"{distance:.4f}")
    Console(width=150).print(table)
    draw(traces, args.level, args.out)
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s on {torch.get_num_threads()} thread; beta {args.beta}; wrote {args.out}")


if __name__ == "__main__":
    main()

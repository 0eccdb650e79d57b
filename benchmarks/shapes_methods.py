"""What methods gain on the shapes world, and what they spend to get there.

    python benchmarks/shapes_methods.py run ram_shapes diffusion_nft_shapes --seeds 0 1 2     # one after the other
    python benchmarks/shapes_methods.py time ram_shapes diffusion_nft_shapes                  # on an idle machine
    python benchmarks/shapes_methods.py table                                                 # Markdown and a figure

`run` trains shipped configs and judges them on the way. `time` measures seconds an iteration, a few iterations of each
config in turn, so that the table can compare costs of runs that shared the machine. `table` reads both from --folder
and draws docs/shapes_methods.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import flowrl
from flowrl.core.tracking import read_metrics

STRICT = "eval/shapes_strict"
COSTS = ("nfe/rollout", "nfe/completion", "nfe/search", "nfe/train")


def run(configs: list[str], seeds: list[int], folder: Path, every: int) -> None:
    """Trains what is not there yet."""
    for seed in seeds:
        for name in configs:
            out = folder / f"{name}-{seed}"
            if not (out / "summary.json").exists():
                given = [f"seed={seed}", f"output_dir={out}", f"eval.every={every}", "log.grid_every=0"]
                flowrl.train(name, given)


def measure(configs: list[str], folder: Path, iterations: int, repeats: int) -> None:
    """Median seconds of an iteration, of runs of `iterations` that take turns; the first iteration warms up."""
    found = defaultdict(list)
    for _ in range(repeats):
        for name in configs:
            with TemporaryDirectory() as scratch:
                given = [f"output_dir={scratch}/run", "eval.num_prompts=1", "eval.num_images=1", "log.grid_every=0"]
                out = flowrl.train(name, [*given, f"iterations={iterations}", "optimizer.warmup_steps=0"])
                for record in read_metrics(out / "timing.jsonl")[1:]:
                    found[name].append(sum(value for key, value in record.items() if key.startswith("seconds/")))
    path = folder / "seconds.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(known | {name: statistics.median(values) for name, values in found.items()}, indent=1),
        encoding="utf-8",
        newline="\n",
    )
    print(f"{torch.get_num_threads()} threads:", path.read_text(encoding="utf-8"))


def curve(out: Path) -> list[tuple[int, float, float]]:
    """(iteration, network evaluations so far, strict accuracy) of a run's evaluations."""
    points, spent = [], 0.0
    for record in read_metrics(out / "metrics.jsonl"):
        spent += sum(record.get(name, 0.0) for name in COSTS)
        if STRICT in record:
            points.append((record["iteration"], spent, record[STRICT]))
    return points


def table(folder: Path, goal: str, figure: Path) -> None:
    """Prints a row for each config: gain on each seed, and what it takes to reach what `goal` ends with."""
    seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    runs = defaultdict(dict)
    for path in sorted(folder.glob("*-*/summary.json")):
        name, _, seed = path.parent.name.rpartition("-")
        runs[name][int(seed)] = path.parent
    goals = {seed: curve(out)[-1][2] for seed, out in runs[goal].items()}
    print("| config | strict, gain on seeds 0, 1, 2 | its | s/it | s | to the goal: its | evaluations | s |")
    print("|---" * 8 + "|")
    for name, by_seed in runs.items():
        gains, reached, length = [], [], 0
        for seed, out in sorted(by_seed.items()):
            rows = json.loads((out / "summary.json").read_text(encoding="utf-8"))
            row = next(r for r in rows if r["reward"] == "shapes_strict" and r["subset"] == "all")
            gains.append(f"{100 * row['difference']:+.1f} ({100 * row['standard_error']:.1f})")
            points = curve(out)
            length = points[-1][0]
            reached.append(next((point for point in points if point[2] >= goals[seed]), None))
        step, cells = seconds[name], ["not reached"] * 3
        if all(reached):
            cells = [
                ", ".join(str(point[0]) for point in reached),
                ", ".join(f"{point[1] / 1000:.0f} k" for point in reached),
                ", ".join(f"{point[0] * step:.0f}" for point in reached),
            ]
        print(
            f"| `{name}` | {', '.join(gains)} | {length} | {step:.2f} | {length * step:.0f} s | "
            + " | ".join(cells)
            + " |"
        )
    _figure(runs, seconds, figure)


def _figure(runs: dict[str, dict[int, Path]], seconds: dict[str, float], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for number, (name, by_seed) in enumerate(runs.items()):
        for seed, out in by_seed.items():
            points = curve(out)
            label = {"label": name.removesuffix("_shapes")} if seed == min(by_seed) else {}
            values = [100 * point[2] for point in points]
            style = {"color": f"C{number}", "alpha": 0.8, "lw": 1.4, "marker": "o", "ms": 2.5} | label
            panels[0].plot([point[0] * seconds[name] for point in points], values, **style)
            panels[1].plot([point[1] / 1000 for point in points], values, **style)
    panels[0].set(xlabel="seconds of training, two cores", ylabel="held-out strict accuracy, %")
    panels[1].set(xlabel="network evaluations, thousands")
    panels[0].legend(frameon=False)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "time", "table"])
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("runs/shapes_methods"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=5, help="iterations between evaluations")
    parser.add_argument("--iterations", type=int, default=6, help="of each timed run")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each config")
    parser.add_argument("--goal", default="flow_grpo_fast_shapes", help="config whose final accuracy is the goal")
    parser.add_argument("--figure", type=Path, default=Path("docs/shapes_methods.png"))
    args = parser.parse_args()
    if args.what == "run":
        run(args.configs, args.seeds, args.folder, args.every)
    elif args.what == "time":
        measure(args.configs, args.folder, args.iterations, args.repeats)
    else:
        table(args.folder, args.goal, args.figure)


if __name__ == "__main__":
    main()

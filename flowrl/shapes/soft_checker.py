"""A differentiable stand-in for `flowrl.shapes.checker`, and its training: `python -m flowrl.shapes.soft_checker`.

A small convolutional network says where in a picture it sees an object of each kind, or something else, as
densities whose sums over the picture are soft counts. It learns from readings of the exact checker.

Shapes: `N` pictures, `K = 19` kinds (color and shape, last "something else"), `G` cells a side, `C` clauses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from .checker import Reading, check_images, read
from .prompts import is_held_out
from .render import render
from .scenes import CANVAS, CATEGORIES, COLORS, RELATIONS, SHAPES, Placed, Scene, Spec, all_specs, parse, sample_scene

KINDS = tuple((color, shape) for shape in SHAPES for color in COLORS)
"""Kinds of objects; the network has one more output, for what is none of them."""

WEIGHTS = "model.safetensors"
_MOST = 5  # the highest count that is told apart, "five or more"
_WIDTH = 0.25  # of the distribution of a count around its soft value
_CELL = 2  # side of a cell in pixels


class SoftChecker(nn.Module):
    """Pictures `(N, 3, CANVAS, CANVAS)` in [0, 1] to densities `(N, K, G, G)`, each in [0, 1]."""

    def __init__(self, width: int = 48):
        super().__init__()

        def layer(channels: int, size: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
            conv = nn.Conv2d(channels, width, size, stride, dilation * (size // 2), dilation, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(width), nn.SiLU())

        self.layers = nn.Sequential(layer(3, 5, _CELL), layer(width), layer(width), layer(width, dilation=2))
        self.head = nn.Conv2d(width, len(KINDS) + 1, 1)
        nn.init.constant_(self.head.get_parameter("bias"), -6.0)  # nothing is seen, to start with

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Densities `(N, K, G, G)`."""
        hidden = self.layers[0](2 - 2 * pixels)  # white is 0, like the padding
        for layer in self.layers[1:]:
            hidden = hidden + layer(hidden)
        density: torch.Tensor = self.head(hidden).sigmoid()
        return density


def load_soft_checker(folder: str | Path) -> SoftChecker:
    """The trained network of a folder, in float32, without gradient of its weights."""
    model = SoftChecker()
    model.load_state_dict(load_file(Path(folder) / WEIGHTS))
    return model.float().requires_grad_(False).eval()


def count_log_grades(soft_counts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Logarithm of how well soft counts are the wanted counts, both of one shape: 0 if equal, then falling.

    It falls as a power of the distance, not exponentially, so that wrong pictures keep a gradient; and all the way,
    which a probability among whole counts would not: it has maxima near each half.
    """
    return -2 * torch.log1p(((soft_counts - wanted) / _WIDTH).square())


def count_log_probs(soft_counts: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `(..., 6)` of the counts 0 to 4 and "5 or more" for soft counts `(...)`."""
    levels = torch.arange(_MOST + 1, dtype=soft_counts.dtype, device=soft_counts.device)
    values = soft_counts[..., None].expand(*soft_counts.shape, _MOST + 1)
    values = torch.cat([values[..., :-1], values[..., -1:].clamp(max=_MOST)], -1)
    return count_log_grades(values, levels).log_softmax(-1)


def centroids(density: torch.Tensor) -> torch.Tensor:
    """Mean position x, y in pixels, `(..., 2)`, of densities `(..., G, G)`; the middle of the picture if empty."""
    size = density.shape[-1]
    middle = (torch.arange(size, dtype=density.dtype, device=density.device) + 0.5) * _CELL
    density = density + 1e-3 / size**2
    total = density.sum((-2, -1))
    return torch.stack([(density.sum(-2) * middle).sum(-1), (density.sum(-1) * middle).sum(-1)], -1) / total[..., None]


def soft_reward(density: torch.Tensor, specs: Sequence[Spec]) -> torch.Tensor:
    """How well the pictures show what they should and nothing else, `(N,)` in [0, 1].

    The geometric mean over the caption's clauses: the count of each group, the count 0 of everything else, and the
    probability of the relation between the two groups' centroids.

    Args:
        density: `(N, K, G, G)`.
        specs: what each picture was asked to show, N of them.

    Raises:
        ValueError: another number of specs.
    """
    if len(density) != len(specs):
        raise ValueError(f"{len(density)} pictures for {len(specs)} specs")
    members, wanted, relation = (values.to(density.device) for values in _clauses(specs))
    related, given = relation >= 0, wanted >= 0
    parts = torch.einsum("nck,nkyx->ncyx", members.to(density.dtype), density)
    grades = count_log_grades(parts.sum((-2, -1)), wanted) * given
    middle = centroids(parts[:, :2])
    dx, dy = (middle[:, 0] - middle[:, 1]).unbind(-1)
    directions = torch.stack([-dx, dx, -dy, dy], -1).log_softmax(-1)  # the order of RELATIONS
    relation_grade = directions.gather(-1, relation.clamp(min=0)[:, None])[:, 0] * related
    return ((grades.sum(-1) + relation_grade) / (given.sum(-1) + related)).exp()


def _clauses(specs: Sequence[Spec]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which kinds each clause counts `(N, 3, K)`, the count it wants `(N, 3)`, the number of the relation `(N,)`.

    Clauses are the first group, the second and the rest; -1 stands for none.
    """
    members = torch.zeros(len(specs), 3, len(KINDS) + 1, dtype=torch.bool)
    wanted = torch.full((len(specs), 3), -1)
    for row, spec in enumerate(specs):
        for index, group in enumerate(spec.groups):
            for k, (color, shape) in enumerate(KINDS):
                members[row, index, k] = shape == group.shape and group.color in (None, color)
            wanted[row, index] = group.count
        members[row, 2] = ~members[row, :2].any(0)
        wanted[row, 2] = 0
    relation = [RELATIONS.index(spec.relation) if spec.relation else -1 for spec in specs]
    return members, wanted, torch.tensor(relation)


# training


def reading_targets(readings: Sequence[Reading]) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts `(N, K)`, and positions `(N, K, 2)` where a kind is there once, else NaN."""
    counts = torch.zeros(len(readings), len(KINDS) + 1, dtype=torch.long)
    positions = torch.full((len(readings), len(KINDS) + 1, 2), torch.nan)
    for row, reading in enumerate(readings):
        for k, (color, shape) in enumerate(KINDS):
            found = reading.find(shape, color)
            counts[row, k] = len(found)
            if len(found) == 1:
                positions[row, k] = torch.tensor([found[0].x, found[0].y])
        counts[row, -1] = reading.num_unknown
    return counts, positions


def training_loss(density: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the counts of kinds, shapes and everything, and the error of the positions."""
    soft = density.sum((-2, -1))
    loss = torch.zeros((), device=density.device)
    for values, target in zip(_sums(soft), _sums(counts), strict=True):
        picked = count_log_probs(values).gather(-1, target.clamp(max=_MOST)[..., None])
        loss = loss - picked.sum() / len(density)
    once = ~positions.isnan().any(-1)
    error = F.smooth_l1_loss(centroids(density)[once], positions[once])
    return loss + 0.5 * error


def _sums(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts `(N, K)` by kind, by shape `(N, 3)` and of everything `(N, 1)`."""
    return counts, counts[:, :-1].unflatten(1, (len(SHAPES), -1)).sum(-1), counts.sum(-1, keepdim=True)


def random_scene(rng: np.random.Generator) -> Scene:
    """Half the time the scene of a caption, else up to seven objects anywhere: overlapping, cut off, too small."""
    if rng.random() < 0.5:
        table = list(all_specs(CATEGORIES[rng.integers(len(CATEGORIES))]))
        return sample_scene(table[rng.integers(len(table))], rng)
    palette = rng.choice(list(COLORS), size=rng.integers(1, 4))
    forms = rng.choice(SHAPES, size=rng.integers(1, 4))
    objects = []
    for _ in range(rng.integers(0, 8)):
        x, y = rng.uniform(1, CANVAS - 1, size=2)
        size = rng.uniform(1.5, 9) if rng.random() < 0.2 else rng.uniform(3.2, 6.5)
        objects.append(Placed(str(rng.choice(forms)), str(rng.choice(palette)), x, y, size))
    return Scene(tuple(objects))


def random_pictures(rng: np.random.Generator, size: int) -> torch.Tensor:
    """Drawn scenes, a fifth of them with parts erased or painted over, `(size, 3, CANVAS, CANVAS)` in [0, 1]."""
    pixels = np.stack([np.asarray(render(random_scene(rng))) for _ in range(size)])
    for row in np.flatnonzero(rng.random(size) < 0.2):
        x, y, w, h = rng.integers(0, CANVAS, 2).tolist() + rng.integers(2, 12, 2).tolist()
        pixels[row, y : y + h, x : x + w] = 255 if rng.random() < 0.6 else rng.integers(0, 256, 3)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def spoil(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Blurs an eighth of the pictures, adds noise to a quarter, `(N, 3, H, W)` in [0, 1]."""
    choice = torch.rand(len(pixels), 1, 1, 1, generator=generator)
    blurred = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    pixels = torch.where(choice < 0.125, blurred, pixels)
    level = 0.1 * torch.rand(len(pixels), 1, 1, 1, generator=generator)
    noise = torch.randn(pixels.shape, generator=generator) * level
    return torch.where(choice > 0.75, pixels + noise, pixels).clamp(0, 1)


def load_pipeline(folder: str | Path) -> Any:
    """The pipeline that draws shapes, quiet."""
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def round_trip(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Pictures in [0, 1] through the autoencoder."""
    decoded = [pipe.vae.decode(pipe.vae.encode(2 * p - 1).latent_dist.mode()).sample for p in pixels.split(100)]
    return (torch.cat(decoded) / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def sample_pictures(pipe: Any, captions: list[str], guidance: float, steps: int, seed: int) -> torch.Tensor:
    """The model's pictures of captions, `(N, 3, CANVAS, CANVAS)` in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    call = {"guidance_scale": guidance, "num_inference_steps": steps, "max_sequence_length": 0}
    parts = [captions[start : start + 100] for start in range(0, len(captions), 100)]
    return torch.cat([pipe(part, generator=generator, output_type="pt", **call).images for part in parts])


def training_pictures(
    pipe: Any, captions: list[str], num_drawn: int, num_sampled: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures `(N, 3, CANVAS, CANVAS)` of 8 bits and what `reading_targets` says of them.

    Two thirds of the drawn ones have been through the autoencoder; the sampled ones are of 4 to 8 steps, a third of
    them guided.
    """
    rng = np.random.default_rng((seed, 0))
    drawn = random_pictures(rng, num_drawn)
    drawn = torch.cat([drawn[: num_drawn // 3], round_trip(pipe, drawn[num_drawn // 3 :])])
    sampled = []
    for part in range(6):
        chosen = [captions[row] for row in rng.integers(len(captions), size=num_sampled // 6)]
        guidance, steps = (1.0, 1.0, 2.5)[part % 3], (8, 4, 6)[part % 3]
        sampled.append(sample_pictures(pipe, chosen, guidance, steps, seed * 1_000_003 + part))
    pixels = torch.cat([spoil(drawn, torch.Generator().manual_seed(seed)), *sampled])
    pixels = (pixels * 255).round().byte()
    counts, positions = reading_targets(read(pixels.permute(0, 2, 3, 1).contiguous().numpy()))
    return pixels, counts, positions


def train(
    pixels: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor, num_sampled: int, *, steps: int, seed: int = 0
) -> SoftChecker:
    """A network trained on pictures `(N, 3, CANVAS, CANVAS)` of 8 bits; each batch is half model samples, the last."""
    torch.manual_seed(seed)
    model = SoftChecker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    num_drawn = len(pixels) - num_sampled
    mirror = torch.tensor([float(CANVAS), 0.0]), torch.tensor([-1.0, 1.0])
    for step in range(steps):
        rows = torch.cat([torch.randint(num_drawn, (32,)), num_drawn + torch.randint(num_sampled, (32,))])
        flipped = torch.rand(len(rows)) < 0.5
        batch = pixels[rows].float() / 255
        batch = torch.where(flipped[:, None, None, None], batch.flip(-1), batch)
        where = torch.where(flipped[:, None, None], mirror[0] + mirror[1] * positions[rows], positions[rows])
        loss = training_loss(model(batch), counts[rows], where)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(json.dumps({"step": step + 1, "loss": round(loss.item(), 4)}), flush=True)
    return model.eval()


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a picture of label 1 scores above one of label 0, a tie counting half; NaN without both."""
    good, bad = scores[labels == 1], scores[labels == 0]
    return float((np.sign(good[:, None] - bad[None]) / 2 + 0.5).mean()) if len(good) and len(bad) else float("nan")


@torch.no_grad()
def evaluate(model: SoftChecker, pipe: Any, captions: list[str], *, steps: int = 10, seed: int = 1) -> dict[str, Any]:
    """How well the soft reward ranks fresh samples of captions, against the exact checker, for two guidances.

    Returns:
        for each, the strict accuracy; how often soft > 0.5 agrees with it; the area under the curve against it, in
        all, on held-out captions and by category; rank correlations with the strict and the partial grade; the mean
        soft reward of right and of wrong pictures.
    """
    specs = [parse(caption) for caption in captions]
    slices = {name: np.array([spec.category == name for spec in specs]) for name in CATEGORIES}
    slices["held_out"] = np.array([is_held_out(spec) for spec in specs])
    report: dict[str, Any] = {}
    for guidance in (1.0, 2.5):
        pixels = (sample_pictures(pipe, captions, guidance, steps, seed) * 255).round().byte()
        strict, partial = check_images(pixels.permute(0, 2, 3, 1).contiguous().numpy(), specs)
        soft = soft_reward(model(pixels.float() / 255), specs).numpy()
        report[f"guidance {guidance}"] = {
            "strict": float(strict.mean()),
            "agreement": float(((soft > 0.5) == (strict == 1)).mean()),
            "auc": auc(soft, strict),
            "auc_of": {name: auc(soft[rows], strict[rows]) for name, rows in slices.items()},
            "spearman_strict": _rank_correlation(soft, strict),
            "spearman_partial": _rank_correlation(soft, partial),
            "mean_right": float(soft[strict == 1].mean()),
            "mean_wrong": float(soft[strict == 0].mean()),
        }
    return report


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation, equal values sharing their mean rank."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/soft-checker"), help="folder of the weights")
    parser.add_argument("--model", type=Path, default=Path("assets/shapes-sd3"), help="pipeline that draws samples")
    parser.add_argument("--prompts", type=Path, default=Path("assets/prompts"), help="folder of the prompt files")
    parser.add_argument("--steps", type=int, default=2000, help="0 only measures the weights in --out")
    parser.add_argument("--drawn", type=int, default=9000, help="drawn pictures to train on")
    parser.add_argument("--sampled", type=int, default=2400, help="samples of the model to train on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipe = load_pipeline(args.model)
    if args.steps:
        started = time.monotonic()
        data = training_pictures(pipe, _captions(args.prompts, "train"), args.drawn, args.sampled, args.seed)
        print(json.dumps({"pictures": len(data[0]), "seconds": round(time.monotonic() - started)}), flush=True)
        model = train(*data, args.sampled, steps=args.steps, seed=args.seed)
        state = {name: x.half() if x.is_floating_point() else x for name, x in model.state_dict().items()}
        args.out.mkdir(parents=True, exist_ok=True)
        save_file(state, args.out / WEIGHTS)
        print(json.dumps({"seconds": round(time.monotonic() - started)}), flush=True)
    print(json.dumps(evaluate(load_soft_checker(args.out), pipe, _captions(args.prompts, "eval")), indent=1))


def _captions(folder: Path, name: str) -> list[str]:
    lines = (folder / f"shapes_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


if __name__ == "__main__":
    main()

"""Judges a policy on fixed prompts, and compares two judgements of the same prompts and noise.

Shapes: `N` prompts, `R` reward columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .distributed import gather_rows, shard
from .prompts import PromptSet
from .scoring import Scorer


@dataclass(frozen=True)
class Evaluation:
    """Scores of one evaluation.

    names: of the R columns. table: `(N, R)` float64, NaN = no score. completions: this rank's own.
    weights: which weights were judged, "raw" or "ema". diversity: see `mean_pairwise_distance`.
    """

    names: list[str]
    table: torch.Tensor
    completions: list[Any]
    weights: str
    diversity: float

    def means(self) -> dict[str, float]:
        """Mean of each column over the prompts that have a score."""
        return {name: column.nanmean().item() for name, column in zip(self.names, self.table.T, strict=True)}


def save_evaluation(path: Path, evaluation: Evaluation, made_of: Mapping[str, Any]) -> None:
    """Stores an evaluation, without its completions, and what it was made of: plain data."""
    kept = {name: getattr(evaluation, name) for name in ("names", "table", "weights", "diversity")}
    partial = path.with_suffix(".partial")
    torch.save(kept | {"made_of": dict(made_of)}, partial)
    partial.replace(path)


def load_evaluation(path: Path, made_of: Mapping[str, Any]) -> Evaluation | str:
    """A stored evaluation, or why it is of no use: it cannot be read, or was made of something else."""
    try:
        stored = torch.load(path, weights_only=True)
        old = stored.pop("made_of")
        evaluation = Evaluation(completions=[], **stored)
    except Exception as error:  # whatever a broken file leads to
        return f"{path.name} cannot be read ({type(error).__name__})"
    other = sorted(name for name in {**old, **made_of} if old.get(name) != made_of.get(name))
    return f"{', '.join(other)} changed since" if other else evaluation


def evaluate(
    sample: Callable[[Sequence[int]], tuple[list[Any], torch.Tensor]],
    prompts: PromptSet,
    scorer: Scorer,
    accelerator: Accelerator,
    *,
    batch_size: int,
    weights: str,
) -> Evaluation:
    """Samples and scores every prompt once.

    Args:
        sample: rows of `prompts` to their completions and a tensor `(n, ...)` to measure diversity on; the same
            rows must give the same noise every time.
    """
    mine = shard(len(prompts), accelerator.process_index, accelerator.num_processes)
    rows = list(range(len(prompts)))[mine]
    completions, tables, tensors = [], [], []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        made, tensor = sample(part)
        chosen = prompts.rows(part)
        tables.append(scorer.submit(chosen.prompts, made, chosen.columns).result())
        completions += made
        tensors.append(tensor.cpu())
    table = gather_rows(accelerator, torch.cat(tables), len(prompts))
    everything = gather_rows(accelerator, torch.cat(tensors), len(prompts))
    return Evaluation(scorer.names, table, completions, weights, mean_pairwise_distance(everything, prompts.prompts))


def mean_pairwise_distance(samples: torch.Tensor, prompts: Sequence[str]) -> float:
    """Root mean square distance between two samples `(N, ...)` of the same prompt, averaged over prompts.

    NaN if no prompt occurs twice.
    """
    flat, distances = samples.flatten(1).double(), []
    for prompt in sorted(set(prompts)):
        members = flat[[index for index, other in enumerate(prompts) if other == prompt]]
        if len(members) > 1:
            distances.append(torch.pdist(members).mean().item() / math.sqrt(flat.shape[1]))
    return sum(distances) / len(distances) if distances else math.nan


def paired_difference(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """Mean of `after - before` `(N,)` and its standard error, over prompts scored both times."""
    difference = (after - before)[~(after - before).isnan()]
    if len(difference) < 2:
        return difference.mean().item(), math.nan
    return difference.mean().item(), difference.std(correction=1).item() / math.sqrt(len(difference))

"""Checkpoints: complete or absent. Weights as safetensors, the rest for torch's safe loader."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_STATE = "state.pt"


def save_checkpoint(
    folder: Path,
    iteration: int,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Writes `folder/<iteration>`, built beside it and renamed last, then deletes all but the newest `keep`.

    Args:
        weights: named sets of tensors, each its own file, for instance `policy` and `ema`.
        state: whatever else; plain containers, numbers, text and tensors only.
    """
    target, partial = folder / f"{iteration:06d}", folder / f".partial-{iteration:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, tensors in weights.items():
        contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        save_file(contiguous, partial / f"{name}.safetensors")
    torch.save({"iteration": iteration, **state}, partial / _STATE)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdigit() and (path / _STATE).is_file())


def load_checkpoint(path: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Weights by name, and the rest, of one checkpoint.

    Raises:
        FileNotFoundError: `path` is not a complete checkpoint.
    """
    if not (path / _STATE).is_file():
        raise FileNotFoundError(f"{path} is not a checkpoint (no {_STATE} in it)")
    weights = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return weights, torch.load(path / _STATE, weights_only=True)

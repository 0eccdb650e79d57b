"""Checkpoints: whole or absent. Weights as safetensors, the rest for torch's safe loader."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flowrl.errors import CheckpointError

from .manifest import broken_checkpoints, flaw, list_checkpoints, write_manifest

logger = logging.getLogger("flowrl")
_STATE = "state.pt"


def save_checkpoint(
    folder: Path,
    iteration: int,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
    made_of: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `folder/<iteration>`, built beside it and renamed last, then deletes all but the newest `keep`.

    Args:
        weights: named sets of tensors, each its own file, for instance `policy` and `ema`.
        state: whatever else; plain containers, numbers, text and tensors only.
        made_of: what the run was made of, see `flowrl.core.manifest`; JSON.

    Raises:
        CheckpointError: it cannot be written, for instance because the disk is full; nothing is left of it.
    """
    target, partial = folder / f"{iteration:06d}", folder / f".partial-{iteration:06d}"
    clear_partial(folder)
    try:
        partial.mkdir(parents=True)
        for name, tensors in weights.items():
            contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            save_file(contiguous, partial / f"{name}.safetensors")
        torch.save({"iteration": iteration, **state}, partial / _STATE)
        write_manifest(partial, made_of or {})
    except (OSError, SafetensorError, RuntimeError) as error:
        clear_partial(folder)
        raise CheckpointError(f"cannot write the checkpoint {target}: {str(error).splitlines()[0]}") from error
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def clear_partial(folder: Path) -> None:
    """Deletes what is left of checkpoints that were never finished."""
    for partial in folder.glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def load_newest(folder: Path) -> tuple[Path, dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """The newest whole checkpoint: where it lies, its weights by name, and the rest. Broken ones are told.

    Raises:
        CheckpointError: there is none; says what is wrong with those that are there.
    """
    broken = broken_checkpoints(folder)
    for path in reversed(list_checkpoints(folder)):
        what = flaw(path, contents=True)
        if what is None:
            for newer in (other for other in broken if other > path):
                logger.warning("%s is broken (%s); going back to %s", newer, broken[newer], path)
            return path, *load_checkpoint(path)
        broken[path] = what
    reasons = "".join(f"; {path.name}: {reason}" for path, reason in broken.items())
    raise CheckpointError(f"no whole checkpoint in {folder}{reasons}")


def forget_newer(checkpoint: Path) -> None:
    """Deletes all that is newer than the checkpoint from which a run goes on."""
    for other in checkpoint.parent.iterdir():
        if other.name.isdecimal() and other.name > checkpoint.name:
            shutil.rmtree(other)


def load_checkpoint(path: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Weights by name, and the rest, of one checkpoint.

    Raises:
        CheckpointError: it is not whole; says why.
    """
    what = flaw(path)
    if what is not None:
        raise CheckpointError(f"{path} is not a whole checkpoint: {what}")
    weights = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return weights, torch.load(path / _STATE, weights_only=True)

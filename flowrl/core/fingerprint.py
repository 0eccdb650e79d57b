"""Short digests of what a run is made of, to tell whether something stored still belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

_LENGTH = 16


def of_data(value: Any) -> str:
    """Of plain data: containers, numbers, text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def of_tensors(tensors: Iterable[tuple[str, torch.Tensor]], *, most: int = 65536) -> str:
    """Of named tensors: names, dtypes, shapes, and at most about `most` evenly spaced elements of each."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().flatten()
        chosen = flat[:: max(1, len(flat) // most)].cpu().contiguous()
        digest.update(chosen.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_LENGTH]

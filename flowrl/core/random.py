"""Random numbers keyed by what they are for, so that a sample does not depend on batch size, rank or order."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def _sequence(seed: int, purpose: str, key: tuple[int, ...]) -> np.random.SeedSequence:
    tag = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    return np.random.SeedSequence([seed, tag, *key])


def torch_generator(seed: int, purpose: str, *key: int) -> torch.Generator:
    """A CPU generator for (run seed, purpose, key), for instance key = (iteration, sample id)."""
    state = _sequence(seed, purpose, key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


def numpy_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A numpy generator for (run seed, purpose, key)."""
    return np.random.default_rng(_sequence(seed, purpose, key))

"""What the ranks of a run share. With one process these are identities."""

from __future__ import annotations

import torch
from accelerate import Accelerator


def shard(num: int, rank: int, world: int) -> slice:
    """The contiguous share of `num` items of a rank; shares differ by at most one item."""
    return slice(num * rank // world, num * (rank + 1) // world)


def gather_rows(accelerator: Accelerator, values: torch.Tensor, num: int) -> torch.Tensor:
    """All ranks' `shard` of `num` rows, in order, on the CPU: `(num, ...)`; exactly one row for each item."""
    world = accelerator.num_processes
    if world == 1:
        return values.cpu()
    longest = -(-num // world)
    padded = torch.zeros(longest, *values.shape[1:], dtype=values.dtype)
    padded[: len(values)] = values.cpu()
    gathered = accelerator.gather(padded.to(accelerator.device)).cpu().reshape(world, longest, *values.shape[1:])
    shares = [shard(num, rank, world) for rank in range(world)]
    return torch.cat([gathered[rank, : share.stop - share.start] for rank, share in enumerate(shares)])

"""Which prompts an iteration samples, and which samples belong together. Stateless: a function of the iteration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch

from .random import numpy_generator
from .types import SampleIds


def iteration_ids(seed: int, iteration: int, *, num_rows: int, num_prompts: int, group_size: int) -> SampleIds:
    """The samples of an iteration: `num_prompts` groups of `group_size`.

    Prompts come from an endless stream of shuffled passes over the `num_rows` rows of the prompt file, so every row
    is used equally often, and a resumed run goes on where it was.
    """
    rows = []
    for position in range(iteration * num_prompts, (iteration + 1) * num_prompts):
        epoch, offset = divmod(position, num_rows)
        rows.append(int(numpy_generator(seed, "prompt order", epoch).permutation(num_rows)[offset]))
    prompt = torch.tensor(rows).repeat_interleave(group_size)
    group = torch.arange(num_prompts).repeat_interleave(group_size)
    return SampleIds(torch.arange(len(prompt)), group, prompt)


def plan_batches(
    ids: SampleIds, plans: list[Any], num_groups: int, batch_size: int, *, shift: int = 0
) -> Iterator[tuple[Any, slice]]:
    """(plan, rows) of micro-batches: at most `batch_size` consecutive samples whose groups follow the same plan.

    The groups of an iteration share out the plans evenly, in blocks; `shift` rotates the blocks, so that over the
    iterations every plan has its turn even where there are more plans than groups.
    """
    which = ((ids.group * len(plans) // num_groups + shift) % len(plans)).tolist()
    for number, run in groupby(range(len(ids)), key=which.__getitem__):
        rows = list(run)
        for start in range(rows[0], rows[-1] + 1, batch_size):
            yield plans[number], slice(start, min(start + batch_size, rows[-1] + 1))

"""Which prompts an iteration samples, and which samples belong together. Stateless: a function of the iteration."""

from __future__ import annotations

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

"""Clean samples from a data set instead of from the model: pairs, and single images for fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps

from flowrl.core.pairs import PairSet, open_image
from flowrl.core.types import SampleIds

LABEL = "preferred"
"""Key in the `info` of an image under which the data set's own judgement of it stands."""


@dataclass(frozen=True)
class PairData:
    """The images of a data set, `num_images` of each row: the winner, and the loser if 2."""

    pairs: PairSet
    num_images: int

    def images(self, ids: SampleIds) -> list[Image.Image]:
        """The image of each of `ids`, whose prompts are rows of the set; `info[LABEL]` holds its judgement.

        That is the set's reward where a row has both in the right order, else 1 for the winner and 0 for the loser.

        Raises:
            ConfigError: an image cannot be read; names file and row.
        """
        found = []
        for sample, row in zip(ids.sample.tolist(), ids.prompt.tolist(), strict=True):
            pair, lost = self.pairs[row], sample % self.num_images == 1
            image = open_image(pair.loser if lost and pair.loser is not None else pair.winner, pair.where)
            labels = (pair.reward_w, pair.reward_l)
            if labels[0] is None or labels[1] is None or labels[0] <= labels[1]:
                labels = (1.0, 0.0)
            image.info[LABEL] = labels[lost]
            found.append(image)
        return found


def to_pixels(images: Sequence[Image.Image], height: int, width: int) -> torch.Tensor:
    """Images cut to the aspect ratio and resized, `(N, 3, height, width)` float32 in [0, 1]."""
    fitted = [np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)) for image in images]
    return torch.from_numpy(np.stack(fitted)).permute(0, 3, 1, 2).float() / 255

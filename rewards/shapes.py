"""Rewards of the shapes world: does the picture show what its caption says? See `flowrl.shapes.checker`."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from flowrl.shapes.checker import check_images
from flowrl.shapes.scenes import parse


def _grades(prompts: list[str], completions: list[Image.Image]) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in completions])
    return check_images(pixels, [parse(prompt) for prompt in prompts])


class ShapesStrict:
    """1 where the picture shows exactly what the caption says and nothing else, else 0."""

    def __call__(self, prompts: list[str], completions: list[Image.Image], **columns: Any) -> list[float]:
        return _grades(prompts, completions)[0].tolist()


class ShapesPartial:
    """Share of the caption's clauses (counts, colors, relation, nothing else) that hold, in [0, 1]."""

    def __call__(self, prompts: list[str], completions: list[Image.Image], **columns: Any) -> list[float]:
        return _grades(prompts, completions)[1].tolist()

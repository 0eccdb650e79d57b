"""The judgement that comes with the images of a data set."""

from __future__ import annotations

from typing import Any

from PIL import Image


class Preferred:
    """What the data set says of its image: 1 for the winner, 0 for the loser, or the reward that stands in it."""

    labels_only = True

    def __call__(self, prompts: list[str], completions: list[Image.Image], **columns: Any) -> list[float | None]:
        return [image.info.get("preferred") for image in completions]

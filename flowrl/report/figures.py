"""Image grids and reward curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

_PAPER, _INK, _FRAME = (255, 255, 255), (40, 40, 46), (205, 205, 210)


def image_grid(
    images: Sequence[Image.Image],
    captions: Sequence[str],
    *,
    columns: int = 6,
    tile: int = 160,
    marks: Sequence[bool] | None = None,
) -> Image.Image:
    """Images in rows, each enlarged to `tile` pixels without smoothing, its caption below it.

    Args:
        marks: green frame where true, red where false; no frames if None.
    """
    font = ImageFont.load_default(size=12)
    gap, text_height = 10, 32
    rows = -(-len(images) // columns)
    size = (gap + columns * (tile + gap), gap + rows * (tile + text_height + gap))
    page = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(page)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x = gap + index % columns * (tile + gap)
        y = gap + index // columns * (tile + text_height + gap)
        color = (205, 205, 210) if marks is None else (40, 160, 70) if marks[index] else (222, 45, 45)
        draw.rectangle((x - 3, y - 3, x + tile + 2, y + tile + 2), fill=color)
        page.paste(
            image.resize((tile, tile), Image.Resampling.NEAREST if image.width < tile else Image.Resampling.LANCZOS),
            (x, y),
        )
        draw.multiline_text((x, y + tile + 6), _wrap(caption, font, tile), fill=_INK, font=font, spacing=1)
    return page


def _wrap(text: str, font: Any, width: int) -> str:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines[:2])


def save_atomically(image: Image.Image, path: Path) -> None:
    """Writes a PNG beside its place and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    image.save(partial, format="PNG")
    partial.replace(path)


def curves(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Plots the training reward, and what evaluations measured, over the iterations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train = [record for record in records if "reward" in record]
    judged = [record for record in records if any(name.startswith("eval/") for name in record)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    steps = [record["iteration"] for record in train]
    rewards = [float("nan") if record["reward"] is None else record["reward"] for record in train]
    left.plot(steps, rewards, color="#9db4e8", linewidth=1, label="each iteration")
    left.plot(steps, _smooth(rewards), color="#2d5fe1", linewidth=2, label="mean of 9")
    left.set(xlabel="iteration", ylabel="training reward")
    names = sorted({n for record in judged for n in record if n.startswith("eval/") and n.count("/") == 1})
    for name in names:
        points = [(record["iteration"], record[name]) for record in judged if record.get(name) is not None]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=name.removeprefix("eval/"))
    right.set(xlabel="iteration", ylabel="held-out prompts")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    partial = path.with_suffix(".partial")
    figure.savefig(partial, dpi=130, format="png")
    plt.close(figure)
    partial.replace(path)


def _smooth(values: Sequence[float], width: int = 9) -> list[float]:
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]

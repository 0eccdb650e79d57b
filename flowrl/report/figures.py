"""Image grids and reward curves."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WINDOW = 9
"""Iterations of the running mean."""
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
    partial = path.with_suffix(".partial")
    curves_figure(records, title=title).savefig(partial, dpi=130, format="png")
    partial.replace(path)


def curves_figure(records: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """The figure of `curves`; a panel without anything to show says so."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    train = [record for record in records if "reward" in record]
    steps, rewards = [record["iteration"] for record in train], [_number(record["reward"]) for record in train]
    _plot(left, steps, rewards, color="#9db4e8", linewidth=1, label="each iteration", every=len(steps) <= _WINDOW)
    if len(steps) > _WINDOW:
        _plot(left, steps, _smooth(rewards), color="#2d5fe1", linewidth=2, label=f"mean of {_WINDOW}")
    judged = [record for record in records if any(name.startswith("eval/") for name in record)]
    for name in sorted({n for record in judged for n in record if n.startswith("eval/") and n.count("/") == 1}):
        points = [(record["iteration"], value) for record in judged if isfinite(value := _number(record.get(name)))]
        at, values = [step for step, _ in points], [value for _, value in points]
        _plot(right, at, values, label=name.removeprefix("eval/"), every=True)
    last = max((record["iteration"] for record in (*train, *judged)), default=0)
    _finish(left, last, "training reward", "no iterations yet" if not train else "no iteration has a reward")
    _finish(right, last, "held-out prompts", "no evaluations yet" if not judged else "no evaluation has a score")
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def _number(value: float | None) -> float:
    return value if value is not None and isfinite(value) else nan


def _plot(axes: Axes, steps: Sequence[int], values: Sequence[float], *, every: bool = False, **style: Any) -> None:
    """A line, if there is a value; with a marker at `every` point, or where a point without a neighbor is no line."""
    around = [nan, *values, nan]
    there = [i for i, value in enumerate(values) if isfinite(value)]
    alone = [i for i in there if not isfinite(around[i]) and not isfinite(around[i + 2])]
    if there:
        (line,) = axes.plot(steps, values, marker="o" if every else "", markersize=5, **style)
        axes.plot([steps[i] for i in alone], [values[i] for i in alone], "o", markersize=5, color=line.get_color())


def _finish(axes: Axes, last: int, label: str, nothing: str) -> None:
    """Whole iterations from 0 to the last one, or the words `nothing` in place of empty axes."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="iteration", ylabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.lines:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center", color="gray")
        return
    margin = max(0.5, 0.03 * last)
    axes.set_xlim(-margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def _smooth(values: Sequence[float]) -> list[float]:
    """Running mean of the values there are."""
    half = _WINDOW // 2
    windows = ([v for v in values[max(0, i - half) : i + half + 1] if isfinite(v)] for i in range(len(values)))
    return [sum(window) / len(window) if window else nan for window in windows]

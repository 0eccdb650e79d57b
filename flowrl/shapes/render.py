"""Draws a scene: antialiased, on white, `CANVAS` pixels square."""

from __future__ import annotations

from PIL import Image, ImageDraw

from .scenes import CANVAS, COLORS, Placed, Scene

BACKGROUND = (255, 255, 255)
_OVERSAMPLING = 8


def render(scene: Scene) -> Image.Image:
    """The picture of a scene, RGB, `CANVAS` x `CANVAS`; each pixel is the mean of 8 x 8 samples."""
    side = CANVAS * _OVERSAMPLING
    image = Image.new("RGB", (side, side), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for placed in scene.objects:
        _draw(draw, placed)
    return image.reduce(_OVERSAMPLING)


def _draw(draw: ImageDraw.ImageDraw, placed: Placed) -> None:
    half_x, half_y = placed.half_extents
    left, top, right, bottom = (
        round(edge * _OVERSAMPLING)
        for edge in (placed.x - half_x, placed.y - half_y, placed.x + half_x, placed.y + half_y)
    )
    color = COLORS[placed.color]
    box = (left, top, right - 1, bottom - 1)  # pillow's boxes include their last pixel
    if placed.shape == "circle":
        draw.ellipse(box, fill=color)
    elif placed.shape == "square":
        draw.rectangle(box, fill=color)
    else:
        draw.polygon([((left + right - 1) / 2, top), (right - 1, bottom - 1), (left, bottom - 1)], fill=color)

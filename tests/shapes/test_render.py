"""Pictures of `flowrl.shapes.render` against geometry."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.shapes.render import render
from flowrl.shapes.scenes import CANVAS, COLORS, SHAPES, Placed, Scene

# of size 1: radius 1; side 1.8; base 2.4 and height 2.08
AREAS = {"circle": np.pi, "square": 1.8 * 1.8, "triangle": 2.4 * 2.08 / 2}


def draw(*objects: Placed) -> np.ndarray:
    return np.asarray(render(Scene(objects)))


def coverage(pixels: np.ndarray, color: str) -> np.ndarray:
    """Share of each pixel that has the color, by its mixture with white in the channel that differs most."""
    channel = int(np.argmin(COLORS[color]))
    return (255.0 - pixels[..., channel]) / (255 - COLORS[color][channel])


def test_size_mode_and_background():
    image = render(Scene(()))
    assert (image.size, image.mode) == ((CANVAS, CANVAS), "RGB") == ((32, 32), "RGB")
    assert (np.asarray(image) == 255).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_white_outside_the_bounding_box(shape):
    item = Placed(shape, "black", 12.3, 19.6, 5.2)
    half_x, half_y = item.half_extents
    pixels = draw(item)
    y, x = np.mgrid[0:CANVAS, 0:CANVAS]
    touched = (pixels < 255).any(-1)
    # 1/16 pixel: half a sample, by which edges are rounded
    outside = (x + 1 < item.x - half_x - 1 / 16) | (x > item.x + half_x + 1 / 16)
    outside |= (y + 1 < item.y - half_y - 1 / 16) | (y > item.y + half_y + 1 / 16)
    assert not (touched & outside).any()
    columns, rows = np.flatnonzero(touched.any(0)), np.flatnonzero(touched.any(1))
    assert np.allclose([columns[0], columns[-1] + 1], [item.x - half_x, item.x + half_x], atol=1)
    assert np.allclose([rows[0], rows[-1] + 1], [item.y - half_y, item.y + half_y], atol=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [3.6, 4.8, 6.2])
def test_area_and_center(shape, size):
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.uniform(10, CANVAS - 10, size=2)
        covered = coverage(draw(Placed(shape, "blue", x, y, size)), "blue")
        assert covered.sum() == pytest.approx(AREAS[shape] * size**2, rel=0.04)
        rows, columns = np.mgrid[0:CANVAS, 0:CANVAS] + 0.5
        # The centroid of a triangle lies a third of its height above the base, its box's middle a half.
        centroid_y = y + (2.08 * size * (1 / 2 - 1 / 3) if shape == "triangle" else 0)
        assert (covered * columns).sum() / covered.sum() == pytest.approx(x, abs=0.1)
        assert (covered * rows).sum() / covered.sum() == pytest.approx(centroid_y, abs=0.1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", COLORS)
def test_interior_has_the_exact_color_and_edges_mix_it_with_white(shape, color):
    pixels = draw(Placed(shape, color, 15.3, 16.9, 5.5))
    assert tuple(pixels[17, 15]) == COLORS[color]
    share = coverage(pixels, color)
    mixed = share[..., None] * COLORS[color] + (1 - share[..., None]) * 255
    assert np.abs(pixels - mixed).max() <= 1.5  # rounding
    assert ((share > 0.01) & (share < 0.99)).sum() >= 8


def test_a_triangle_points_up_and_corners_tell_shapes_apart():
    filled = {shape: coverage(draw(Placed(shape, "red", 16, 16, 6)), "red") > 0.5 for shape in SHAPES}
    widths = {shape: mask.sum(1) for shape, mask in filled.items()}
    rows = np.flatnonzero(widths["triangle"])
    assert (np.diff(widths["triangle"][rows]) >= 0).all()
    assert widths["triangle"][rows[-1]] >= 12
    assert set(widths["square"][np.flatnonzero(widths["square"])]) == {filled["square"].any(0).sum()}
    assert filled["square"][11, 11]
    assert not filled["circle"][11, 11]


def test_objects_do_not_mix():
    items = Placed("circle", "red", 8, 8, 4), Placed("square", "green", 22, 22, 4)
    both = draw(*items)
    assert (both == np.minimum(draw(items[0]), draw(items[1]))).all()

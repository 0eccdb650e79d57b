"""Accuracy, robustness and partial scores of `flowrl.shapes.checker`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowrl.shapes.checker import check_images, read
from flowrl.shapes.render import render
from flowrl.shapes.scenes import (
    CANVAS,
    CATEGORIES,
    COLORS,
    RELATIONS,
    SHAPES,
    Placed,
    Scene,
    Spec,
    all_specs,
    parse,
    sample_scene,
)

ALL = [spec for category in CATEGORIES for spec in all_specs(category)]


def draw(scenes: list[Scene]) -> np.ndarray:
    return np.stack([np.asarray(render(scene)) for scene in scenes])


def picture(*objects: tuple[str, str, float, float]) -> np.ndarray:
    """One picture of (color, shape, x, y), each of size 4."""
    return draw([Scene(tuple(Placed(shape, color, x, y, 4.0) for color, shape, x, y in objects))])


@pytest.fixture(scope="module")
def drawn() -> tuple[list[Spec], list[Scene], np.ndarray]:
    """2000 scenes, the categories equally often, and within them the captions."""
    rng = np.random.default_rng(11)
    tables = [list(all_specs(category)) for category in CATEGORIES]
    specs = [tables[row % 6][(row // 6) % len(tables[row % 6])] for row in range(2000)]
    scenes = [sample_scene(spec, rng) for spec in specs]
    return specs, scenes, draw(scenes)


def test_drawn_scenes_pass_their_own_caption(drawn):
    specs, _, pixels = drawn
    strict, partial = check_images(pixels, specs)
    assert strict.mean() >= 0.995
    assert (partial[strict == 1] == 1).all()
    for category in CATEGORIES:
        assert strict[[spec.category == category for spec in specs]].mean() >= 0.99


def test_objects_are_read_where_they_were_drawn(drawn):
    _, scenes, pixels = drawn
    for scene, reading in zip(scenes[:600], read(pixels[:600]), strict=True):
        assert reading.num_unknown == 0
        assert len(reading.objects) == len(scene.objects)
        left = list(reading.objects)
        for item in scene.objects:
            seen = min(left, key=lambda other, item=item: abs(other.x - item.x) + abs(other.y - item.y))
            left.remove(seen)
            assert (seen.shape, seen.color) == (item.shape, item.color)
            assert (seen.x, seen.y, seen.size) == pytest.approx((item.x, item.y, item.size), abs=0.25)


def with_other_color(spec: Spec, index: int, rng: np.random.Generator) -> Spec | None:
    if spec.groups[index].color is None:
        return None
    others = [color for color in COLORS if color != spec.groups[index].color]
    return change(spec, index, color=others[rng.integers(len(others))])


def with_other_shape(spec: Spec, index: int, rng: np.random.Generator) -> Spec | None:
    others = [shape for shape in SHAPES if shape not in [group.shape for group in spec.groups]]
    return change(spec, index, shape=others[rng.integers(len(others))])


def with_other_count(spec: Spec, index: int, rng: np.random.Generator) -> Spec | None:
    others = [count for count in (1, 2, 3, 4) if count != spec.groups[index].count]
    return change(spec, index, count=others[rng.integers(len(others))])


def with_other_relation(spec: Spec, index: int, rng: np.random.Generator) -> Spec | None:
    others = [relation for relation in RELATIONS if relation != spec.relation]
    return replace(spec, relation=others[rng.integers(len(others))]) if spec.relation else None


def change(spec: Spec, index: int, **values) -> Spec:
    groups = list(spec.groups)
    groups[index] = replace(groups[index], **values)
    return replace(spec, groups=tuple(groups))


@pytest.mark.parametrize("alter", [with_other_color, with_other_shape, with_other_count, with_other_relation])
def test_a_caption_with_one_other_attribute_fails(drawn, alter):
    specs, _, pixels = drawn
    rng = np.random.default_rng(12)
    altered = [alter(spec, rng.integers(len(spec.groups)), rng) for spec in specs]
    rows = [row for row, spec in enumerate(altered) if spec]
    assert len(rows) >= 300
    strict, partial = check_images(pixels[rows], [altered[row] for row in rows])
    assert strict.mean() <= 0.02
    assert (partial >= 0).all()
    assert (partial <= 1).all()


def graded_captions(specs: list[Spec]) -> list[Spec]:
    """Every other caption is a wrong one, so that both strict values occur."""
    return [spec if row % 2 else ALL[(row * 7) % len(ALL)] for row, spec in enumerate(specs)]


def truncated(pixels: np.ndarray) -> np.ndarray:
    """A float picture within half a level of the drawn one, cut instead of rounded: up to a level off."""
    noise = np.random.default_rng(13).uniform(-0.5, 0.5, pixels.shape)
    return np.clip(np.floor(pixels + noise), 0, 255).astype(np.uint8)


def through_half_precision(pixels: np.ndarray) -> np.ndarray:
    """What a float16 pipeline that works in [-1, 1] makes of it."""
    image = (pixels / 127.5 - 1).astype(np.float16) / 2 + np.float16(0.5)
    return np.round(image * np.float16(255)).clip(0, 255).astype(np.uint8)


def with_noise(pixels: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(14).normal(0, 8, pixels.shape)
    return np.clip(np.round(pixels + noise), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("distort", [truncated, through_half_precision, with_noise])
def test_rounding_and_noise_do_not_change_strict(drawn, distort):
    specs, _, pixels = drawn
    pixels, captions = pixels[:1200], graded_captions(specs[:1200])
    before, _ = check_images(pixels, captions)
    after, _ = check_images(distort(pixels), captions)
    assert 0.4 < before.mean() < 0.6
    assert (before != after).mean() <= 0.005


def garbage() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(15)
    y, x = np.mgrid[0:CANVAS, 0:CANVAS]
    maze = (y % 4 == 0) | ((x == 0) & (y % 8 < 4)) | ((x == CANVAS - 1) & (y % 8 >= 4))  # one winding line
    masks = {
        "blob": np.hypot(x - 15.5, y - 15.5) < 13,
        "maze": maze,
        "diagonals": (x + y) % 4 == 0,
        "checkerboard_1": (x + y) % 2 == 0,
        "checkerboard_4": (x // 4 + y // 4) % 2 == 0,
        "dots": (x % 3 < 1) & (y % 3 < 1),
        "squares_of_3": (x % 5 < 3) & (y % 5 < 3),
        "ring": abs(np.hypot(x - 15.5, y - 15.5) - 5) < 1,
        "frame": (x < 2) | (y < 2) | (x > 29) | (y > 29),
    }
    red = np.array(COLORS["red"], dtype=np.uint8)
    pictures = {name: np.where(mask[..., None], red, np.uint8(255)) for name, mask in masks.items()}
    for name, color in {"black": 0, "white": 255, "grey": 128, "red": red}.items():
        pictures[name] = np.broadcast_to(np.asarray(color, dtype=np.uint8), (CANVAS, CANVAS, 3))
    for sd in (30, 90):
        pictures[f"noise_{sd}"] = np.clip(rng.normal(128, sd, (CANVAS, CANVAS, 3)), 0, 255).astype(np.uint8)
    pictures["uniform_noise"] = rng.integers(0, 256, (CANVAS, CANVAS, 3), dtype=np.uint8)
    pictures["salt"] = np.where(rng.random((CANVAS, CANVAS, 1)) < 0.1, red, np.uint8(255))
    return pictures


@pytest.mark.parametrize("name", garbage())
def test_garbage_scores_nothing(name):
    specs = ALL[:36] + ALL[36::10]  # all captions of one group and of two_object, and some of the longer ones
    pixels = np.broadcast_to(garbage()[name], (len(specs), CANVAS, CANVAS, 3))
    strict, partial = check_images(pixels, specs)
    assert (strict == 0).all()
    assert (partial >= 0).all()
    assert (partial <= 0.5).all()


def test_pale_color_on_the_background_is_seen(drawn):
    """Too faint for an object, it must not pass as white: a policy would learn to hide objects there."""
    specs, _, pixels = drawn
    tinted = np.minimum(pixels[:60], 205)
    assert check_images(pixels[:60], specs[:60])[0].all()
    assert not check_images(tinted, specs[:60])[0].any()
    ghost = picture(("red", "circle", 8, 8))[0]
    y, x = np.mgrid[0:CANVAS, 0:CANVAS]
    ghost[np.hypot(x - 23, y - 23) < 5] = (200, 255, 200)
    strict, partial = check_images(ghost[None], [parse("a red circle")])
    # count 1, color 1, total 1 of 2 things
    assert (strict[0], partial[0]) == (0, pytest.approx(5 / 6))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((1, 32, 32, 3), np.float32), r"expected uint8 pixels \(N, 32, 32, 3\), got float32"),
        (np.zeros((1, 32, 32, 3), np.int64), "got int64"),
        (np.zeros((32, 32, 3), np.uint8), r"got uint8 \(32, 32, 3\)"),
        (np.zeros((1, 3, 32, 32), np.uint8), r"got uint8 \(1, 3, 32, 32\)"),
        (np.zeros((1, 64, 64, 3), np.uint8), r"got uint8 \(1, 64, 64, 3\)"),
        (np.zeros((1, 32, 32, 4), np.uint8), r"got uint8 \(1, 32, 32, 4\)"),
    ],
)
def test_other_pixels_are_refused(pixels, message):
    with pytest.raises(ValueError, match=message):
        read(pixels)


def test_as_many_specs_as_pictures():
    with pytest.raises(ValueError, match="2 pictures for 1 specs"):
        check_images(np.zeros((2, 32, 32, 3), np.uint8), [ALL[0]])


def test_no_pictures_no_scores():
    strict, partial = check_images(np.zeros((0, 32, 32, 3), np.uint8), [])
    assert strict.shape == partial.shape == (0,)


def test_scores_do_not_depend_on_the_batch(drawn):
    specs, _, pixels = drawn
    captions = graded_captions(specs)
    whole = check_images(pixels[:60], captions[:60])
    alone = [check_images(pixels[row : row + 1], captions[row : row + 1]) for row in range(60)]
    for index in (0, 1):
        assert np.concatenate([scores[index] for scores in alone]).tolist() == whole[index].tolist()


def test_partial_is_one_exactly_where_strict_is(drawn):
    """Each picture against many captions, also of numbers up to two groups of four."""
    _, _, pixels = drawn
    rng = np.random.default_rng(16)
    shown = pixels[rng.integers(len(pixels), size=2000)]
    extra = [parse(f"{a} circles and {b} squares") for a in ("two", "four") for b in ("three", "four")]
    captions = [(ALL + extra)[row] for row in rng.integers(len(ALL) + len(extra), size=len(shown))]
    strict, partial = check_images(shown, captions)
    assert set(np.unique(strict)) == {0.0, 1.0}
    assert ((partial == 1) == (strict == 1)).all()
    assert (partial >= 0).all()
    assert (partial <= 1).all()


RED_CIRCLE, BLUE_CIRCLE, GREEN_CIRCLE = ("red", "circle", 8, 8), ("blue", "circle", 24, 8), ("green", "circle", 8, 24)
BLUE_SQUARE, RED_SQUARE, SQUARE_BELOW = ("blue", "square", 24, 24), ("red", "square", 24, 24), ("red", "square", 8, 24)

GRID = [(x, y) for y in (6, 16, 26) for x in (6, 16, 26)]


@pytest.mark.parametrize(
    ("caption", "objects", "expected"),
    [
        # clauses: count, total
        ("a circle", [RED_CIRCLE], 1),  # 1, 1
        ("a circle", [], 0),  # 0/1, 0/1
        ("a circle", [RED_SQUARE], (0 + 1) / 2),  # no circle; one object, as asked
        ("a circle", [RED_CIRCLE, RED_SQUARE], (1 + 1 / 2) / 2),  # an object too many: 1/2
        ("two circles", [RED_CIRCLE, BLUE_CIRCLE, GREEN_CIRCLE], (2 / 3 + 2 / 3) / 2),  # one too many in both
        ("two circles", [RED_CIRCLE], (1 / 2 + 1 / 2) / 2),  # one too few in both
        ("three circles", [RED_CIRCLE, BLUE_CIRCLE, RED_SQUARE], (2 / 3 + 1) / 2),  # 2 of 3; 3 objects, as asked
        # clauses: count, color, total
        ("a red circle", [BLUE_CIRCLE], (1 + 0 + 1) / 3),  # only the color is wrong
        ("a red circle", [RED_CIRCLE, BLUE_CIRCLE], (1 / 2 + 1 + 1 / 2) / 3),  # circles 1/2, red ones 1/1, total 1/2
        ("a red circle", [RED_SQUARE], (0 + 0 + 1) / 3),  # red, but no circle: color of another shape earns nothing
        # clauses: count, count, total
        ("a circle and a square", [RED_CIRCLE, BLUE_SQUARE], 1),
        ("a circle and a square", [RED_CIRCLE], (1 + 0 + 1 / 2) / 3),
        ("a circle and a square", [RED_CIRCLE, BLUE_CIRCLE, RED_SQUARE], (1 / 2 + 1 + 2 / 3) / 3),
        # clauses: count, color, count, color, total
        ("a red circle and a blue square", [BLUE_CIRCLE, RED_SQUARE], (1 + 0 + 1 + 0 + 1) / 5),  # colors swapped
        ("a red circle and a blue square", [RED_CIRCLE], (1 + 1 + 0 + 0 + 1 / 2) / 5),
        # four red circles and three of four blue squares, the last is red: 4/4, 4/4, 4/4, 3/4, 8/8
        (
            "four red circles and four blue squares",
            [("red", "circle", x, y) for x, y in GRID[:4]]
            + [("blue", "square", x, y) for x, y in GRID[4:7]]
            + [("red", "square", *GRID[7])],
            (1 + 1 + 1 + 3 / 4 + 1) / 5,
        ),
        # clauses: count, count, relation, total
        ("a circle above a square", [RED_CIRCLE, SQUARE_BELOW], 1),
        ("a circle below a square", [RED_CIRCLE, SQUARE_BELOW], (1 + 1 + 0 + 1) / 4),  # only the relation is wrong
        ("a circle left of a square", [RED_CIRCLE, SQUARE_BELOW], (1 + 1 + 0 + 1) / 4),
        # Without its square the relation is one clause of value 0, not one for each object that lacks its partner.
        ("a circle above a square", [RED_CIRCLE], (1 + 0 + 0 + 1 / 2) / 4),
        # Two circles, one above the square and one to the right of it: half of the pairs.
        (
            "a circle above a square",
            [RED_CIRCLE, ("blue", "circle", 24, 24), SQUARE_BELOW],
            (1 / 2 + 1 + 1 / 2 + 2 / 3) / 4,
        ),
        # Seven circles for one: far too many earn little, never less than nothing.
        (
            "a circle",
            [("red", "circle", x, y) for x, y in GRID[:7]],
            (1 / 7 + 1 / 7) / 2,
        ),
        # Seven circles for a square: 0 squares; 1/7 of the objects.
        (
            "a square",
            [("red", "circle", x, y) for x, y in GRID[:7]],
            (0 + 1 / 7) / 2,
        ),
    ],
)
def test_hand_worked_scores(caption, objects, expected):
    pixels = picture(*objects)
    strict, partial = check_images(pixels, [parse(caption)])
    assert partial[0] == pytest.approx(expected, abs=1e-12)
    assert strict[0] == (expected == 1)


def test_an_unknown_thing_costs_like_an_extra_object():
    pixels = picture(RED_CIRCLE)
    pixels[0, 20:23, 4:28] = COLORS["blue"]  # a bar, neither shape
    # one circle: 1; total: 1 object of 1 seen + 1 unknown = 1/2
    strict, partial = check_images(pixels, [parse("a circle")])
    assert (strict[0], partial[0]) == (0, pytest.approx((1 + 1 / 2) / 2))


def test_few_specks_are_ignored_and_many_are_one_unknown_thing():
    pixels = picture(RED_CIRCLE)
    pixels[0, 16:26:4, 16] = COLORS["blue"]  # three single pixels
    assert check_images(pixels, [parse("a circle")])[1][0] == 1
    pixels[0, 16:30:4, 20:30:4] = COLORS["blue"]  # 4 x 3 more
    assert check_images(pixels, [parse("a circle")])[1][0] == pytest.approx((1 + 1 / 2) / 2)


@pytest.mark.parametrize("color", [(255, 105, 180), (128, 128, 128), (0, 200, 200)], ids=["pink", "grey", "cyan"])
def test_colors_outside_the_palette_are_no_objects(color):
    pixels = picture(RED_CIRCLE)
    pixels = np.where(pixels == 255, np.uint8(255), np.array(color, dtype=np.uint8))
    assert check_images(pixels, [parse("a circle")])[0][0] == 0


def test_a_shape_of_two_colors_is_no_object():
    pixels = picture(("red", "circle", 16, 16))
    half = picture(("blue", "circle", 16, 16))
    pixels[:, :, 16:] = half[:, :, 16:]
    assert check_images(pixels, [parse("a circle")])[0][0] == 0


def test_touching_objects_are_not_counted_apart():
    strict, partial = check_images(
        picture(("red", "circle", 10, 16), ("red", "circle", 18, 16)), [parse("two circles")]
    )
    assert strict[0] == 0
    assert partial[0] < 1

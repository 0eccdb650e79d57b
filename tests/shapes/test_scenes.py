"""Grammar of captions, and sampled layouts, of `flowrl.shapes.scenes`."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from flowrl.shapes.scenes import (
    CANVAS,
    CATEGORIES,
    COLORS,
    HALF_EXTENTS,
    Group,
    Placed,
    Spec,
    all_specs,
    parse,
    relation_between,
    sample_scene,
)

ALL = [spec for category in CATEGORIES for spec in all_specs(category)]
# 3 shapes; 3 x 2 ordered pairs; 3 counts x 3; 6 colors x 3; 4 relations x 6 pairs; 6 pairs x 6 x 5 color pairs
NUM_CAPTIONS = {"single_object": 3, "two_object": 6, "counting": 9, "colors": 18, "position": 24, "color_attr": 180}


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_caption_round_trips(category):
    specs = list(all_specs(category))
    captions = [spec.caption for spec in specs]
    assert len(set(captions)) == len(captions) == NUM_CAPTIONS[category]
    assert [parse(caption) for caption in captions] == specs
    assert [parse(f"  {caption.upper()}\n") for caption in captions] == specs
    assert {spec.category for spec in specs} == {category}


def test_captions_differ_between_categories():
    assert len({spec.caption for spec in ALL}) == len(ALL) == 240


@pytest.mark.parametrize(
    ("caption", "spec", "category", "num_objects"),
    [
        ("a circle", Spec((Group(1, "circle"),)), "single_object", 1),
        ("a circle and a square", Spec((Group(1, "circle"), Group(1, "square"))), "two_object", 2),
        ("four triangles", Spec((Group(4, "triangle"),)), "counting", 4),
        ("a purple triangle", Spec((Group(1, "triangle", "purple"),)), "colors", 1),
        (
            "a square right of a circle",
            Spec((Group(1, "square"), Group(1, "circle")), "right of"),
            "position",
            2,
        ),
        (
            "a red circle and a black square",
            Spec((Group(1, "circle", "red"), Group(1, "square", "black"))),
            "color_attr",
            2,
        ),
        # outside the six tables, but of the grammar
        ("two red squares", Spec((Group(2, "square", "red"),)), "counting", 2),
        ("two circles and a blue square", Spec((Group(2, "circle"), Group(1, "square", "blue"))), "color_attr", 3),
    ],
)
def test_meaning_of_captions(caption, spec, category, num_objects):
    parsed = parse(caption)
    assert parsed == spec
    assert parsed.caption == caption
    assert parsed.category == category
    assert parsed.num_objects == num_objects


@pytest.mark.parametrize(
    ("caption", "message"),
    [
        ("", "is not a caption of the shapes world; examples: 'a red circle'"),
        ("a hexagon", "'a hexagon' is not a caption of the shapes world"),
        ("a pink circle", "is not a caption of the shapes world"),
        ("five circles", "is not a caption of the shapes world"),
        ("a circle and", "is not a caption of the shapes world"),
        ("a circle near a square", "is not a caption of the shapes world"),
        ("a circle and a square and a triangle", "is not a caption of the shapes world"),
        ("a  circle", "is not a caption of the shapes world"),
        ("a photo of a circle", "is not a caption of the shapes world"),
        ("a circles", "'a circles': number and noun disagree, expected 'a circle'"),
        ("two red square", "number and noun disagree, expected 'two red squares'"),
        ("a circle and three square", "number and noun disagree, expected 'three squares'"),
        ("a red circle and a blue circle", "the two groups must have different shapes"),
    ],
)
def test_bad_captions_are_refused(caption, message):
    with pytest.raises(ValueError, match=message):
        parse(caption)


def test_unknown_category_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown category 'colours'; known: single_object, .*, color_attr"):
        list(all_specs("colours"))


@pytest.mark.parametrize(
    ("offset", "relation"),
    [
        ((-5, 3), "left of"),
        ((5, -3), "right of"),
        ((3, -5), "above"),
        ((-3, 5), "below"),
        ((4, 4), "right of"),  # ties go to the horizontal
        ((-4, 4), "left of"),
    ],
)
def test_relation_is_the_larger_offset_and_y_points_down(offset, relation):
    a, b = Placed("circle", "red", 16 + offset[0], 16 + offset[1], 4), Placed("square", "red", 16, 16, 4)
    assert relation_between(a, b) == relation


def test_sampled_scenes_satisfy_their_caption():
    rng = np.random.default_rng(1)
    for spec in ALL * 5:
        scene = sample_scene(spec, rng)
        shapes = [item.shape for item in scene.objects]
        assert len(shapes) == spec.num_objects
        for group in spec.groups:
            assert shapes.count(group.shape) == group.count
            if group.color:
                assert [item.color for item in scene.objects if item.shape == group.shape] == [group.color]
        if spec.relation:
            assert relation_between(*scene.objects) == spec.relation


def test_sampled_objects_stay_inside_and_apart():
    rng = np.random.default_rng(2)
    for spec in ALL * 5:
        boxes = []
        for item in sample_scene(spec, rng).objects:
            (half_x, half_y) = (half * item.size for half in HALF_EXTENTS[item.shape])
            boxes.append((item.x - half_x, item.y - half_y, item.x + half_x, item.y + half_y))
        for left, top, right, bottom in boxes:
            assert min(left, top, CANVAS - right, CANVAS - bottom) >= 1 - 1e-9
        for a, b in combinations(boxes, 2):
            gap_x, gap_y = max(a[0] - b[2], b[0] - a[2]), max(a[1] - b[3], b[1] - a[3])
            assert max(gap_x, gap_y) >= 2 - 1e-9


def test_colors_left_open_are_all_drawn():
    rng = np.random.default_rng(3)
    seen = {item.color for _ in range(60) for item in sample_scene(parse("two circles"), rng).objects}
    assert seen == set(COLORS)


def test_sampling_is_a_function_of_the_seed():
    first, again, other = ([sample_scene(spec, rng) for spec in ALL] for rng in map(np.random.default_rng, (4, 4, 5)))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_scenes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no layout of 8 objects"):
        sample_scene(parse("four circles and four squares"), np.random.default_rng(0))

"""Scene grammar: what a caption asks for (`Spec`), and one concrete layout of it (`Scene`).

Captions follow GenEval's six categories (arXiv 2310.11513). A caption names one or two groups of
equal objects, with a color each or none, and a spatial relation or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

CANVAS = 32
"""Side of a picture in pixels."""

SHAPES = ("circle", "square", "triangle")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (222, 45, 45),
    "green": (40, 160, 70),
    "blue": (45, 95, 225),
    "yellow": (245, 200, 30),
    "purple": (150, 60, 185),
    "black": (30, 30, 35),
}
RELATIONS = ("left of", "right of", "above", "below")
COUNTS = {"a": 1, "two": 2, "three": 3, "four": 4}
CATEGORIES = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

# Half extents (x, y) of the bounding box of each shape of size 1; the size of a circle is its radius.
HALF_EXTENTS = {"circle": (1.0, 1.0), "square": (0.9, 0.9), "triangle": (1.2, 1.04)}

_GAP = 2.0  # least distance in pixels between two bounding boxes, and from a box to the border of 1
_MOST_TRIES = 20_000
_DOMINANCE = 2.0  # |dx| - |dy| of a drawn "left of" is at least this many pixels
_WORDS = {count: word for word, count in COUNTS.items()}


@dataclass(frozen=True)
class Group:
    """`count` equal objects of one shape; `color` None means any color."""

    count: int
    shape: str
    color: str | None = None

    def __str__(self) -> str:
        words = [_WORDS[self.count], self.color, self.shape + ("s" if self.count > 1 else "")]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Spec:
    """What a caption asks for: one group, or two groups of different shapes, and their relation."""

    groups: tuple[Group, ...]
    relation: str | None = None

    @property
    def caption(self) -> str:
        """The text; `parse` reads it back."""
        return f" {self.relation or 'and'} ".join(str(group) for group in self.groups)

    @property
    def category(self) -> str:
        """GenEval's name of the kind of caption, one of `CATEGORIES`."""
        if self.relation:
            return "position"
        colored = any(group.color for group in self.groups)
        if len(self.groups) == 2:
            return "color_attr" if colored else "two_object"
        if self.groups[0].count > 1:
            return "counting"
        return "colors" if colored else "single_object"

    @property
    def num_objects(self) -> int:
        """Objects in all groups together."""
        return sum(group.count for group in self.groups)


@dataclass(frozen=True)
class Placed:
    """One drawn object: center of its bounding box and size, in pixels."""

    shape: str
    color: str
    x: float
    y: float
    size: float

    @property
    def half_extents(self) -> tuple[float, float]:
        """Half width and half height of the bounding box."""
        half_x, half_y = HALF_EXTENTS[self.shape]
        return half_x * self.size, half_y * self.size


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn."""

    objects: tuple[Placed, ...]


_GROUP = rf"({'|'.join(COUNTS)}) (?:({'|'.join(COLORS)}) )?({'|'.join(SHAPES)})(s?)"
_CAPTION = re.compile(rf"{_GROUP}(?: (and|{'|'.join(RELATIONS)}) {_GROUP})?")


def parse(caption: str) -> Spec:
    """The meaning of a caption of this grammar.

    Raises:
        ValueError: the caption is not of the grammar.
    """
    match = _CAPTION.fullmatch(caption.strip().lower())
    if match is None:
        raise ValueError(
            f"{caption!r} is not a caption of the shapes world; examples: 'a red circle', 'three squares', "
            "'a circle left of a triangle', 'a red circle and a blue square'"
        )
    count, color, shape, plural, joint, *second = match.groups()
    groups = [Group(COUNTS[count], shape, color)]
    plurals = [plural]
    if joint:
        groups.append(Group(COUNTS[second[0]], second[2], second[1]))
        plurals.append(second[3])
    for group, ending in zip(groups, plurals, strict=True):
        if (group.count > 1) != bool(ending):
            raise ValueError(f"{caption!r}: number and noun disagree, expected {str(group)!r}")
    if len({group.shape for group in groups}) < len(groups):
        raise ValueError(f"{caption!r}: the two groups must have different shapes")
    return Spec(tuple(groups), joint if joint in RELATIONS else None)


def all_specs(category: str) -> Iterator[Spec]:
    """Every caption of a category, in a fixed order.

    Raises:
        ValueError: `category` is not one of `CATEGORIES`.
    """
    pairs = list(permutations(SHAPES, 2))
    if category == "single_object":
        yield from (Spec((Group(1, shape),)) for shape in SHAPES)
    elif category == "two_object":
        yield from (Spec((Group(1, a), Group(1, b))) for a, b in pairs)
    elif category == "counting":
        yield from (Spec((Group(count, shape),)) for count, shape in product((2, 3, 4), SHAPES))
    elif category == "colors":
        yield from (Spec((Group(1, shape, color),)) for color, shape in product(COLORS, SHAPES))
    elif category == "position":
        yield from (Spec((Group(1, a), Group(1, b)), relation) for relation, (a, b) in product(RELATIONS, pairs))
    elif category == "color_attr":
        for (a, b), (color_a, color_b) in product(pairs, permutations(COLORS, 2)):
            yield Spec((Group(1, a, color_a), Group(1, b, color_b)))
    else:
        raise ValueError(f"unknown category {category!r}; known: {', '.join(CATEGORIES)}")


def relation_between(a: Placed, b: Placed) -> str:
    """Where `a` lies as seen from `b`: the sign of the larger of the two center offsets."""
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) >= abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


def sample_scene(spec: Spec, rng: np.random.Generator) -> Scene:
    """A random layout in which `spec` holds and no two objects touch.

    Colors that the caption leaves open are drawn anew for each object. Crowded scenes have smaller objects.

    Raises:
        ValueError: no layout was found; more than four objects hardly fit.
    """
    smallest, largest = (4.0, 6.2) if spec.num_objects <= 2 else (3.6, 4.8)
    names = list(COLORS)
    wanted = [
        (group.shape, group.color or names[rng.integers(len(names))])
        for group in spec.groups
        for _ in range(group.count)
    ]
    for _ in range(_MOST_TRIES):
        placed: list[Placed] = []
        for shape, color in wanted:
            size = rng.uniform(smallest, largest)
            half_x, half_y = (half * size + _GAP / 2 for half in HALF_EXTENTS[shape])
            x, y = rng.uniform(half_x, CANVAS - half_x), rng.uniform(half_y, CANVAS - half_y)
            candidate = Placed(shape, color, x, y, size)
            if any(_too_close(candidate, other) for other in placed):
                break
            placed.append(candidate)
        if len(placed) == len(wanted) and _holds(spec, placed):
            return Scene(tuple(placed))
    raise ValueError(f"{spec.caption!r}: no layout of {spec.num_objects} objects found in {_MOST_TRIES} tries")


def _too_close(a: Placed, b: Placed) -> bool:
    reach_x, reach_y = (p + q + _GAP for p, q in zip(a.half_extents, b.half_extents, strict=True))
    return abs(a.x - b.x) < reach_x and abs(a.y - b.y) < reach_y


def _holds(spec: Spec, placed: list[Placed]) -> bool:
    if spec.relation is None:
        return True
    a, b = placed
    clear = abs(abs(a.x - b.x) - abs(a.y - b.y)) >= _DOMINANCE
    return clear and relation_between(a, b) == spec.relation

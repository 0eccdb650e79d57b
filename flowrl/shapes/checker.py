"""Reads a scene back from pixels and grades it against what its caption asks for.

How it reads: pixels that differ clearly from white are grouped into connected components; each
component is explained as one palette color times a soft coverage (antialiased edges are mixtures
with white, so they lie on that line), and the coverage is compared with the analytic coverage of a
circle, a square and a triangle of the same area and centroid. What no shape explains is an unknown
object, and so is pale color on the background, too faint for a component but too strong for noise.
numpy only, whole batches at once.

Shapes: `N` pictures, `K` components, `H = W = CANVAS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .render import BACKGROUND
from .scenes import CANVAS, COLORS, HALF_EXTENTS, SHAPES, Group, Placed, Spec, relation_between

_FOREGROUND = 0.25  # least difference from white, of 1, in some channel
_PALE = 0.12  # least mean difference from white in a 3 x 3 window, where it should be white
_MOST_PALE_PIXELS = 12  # more such pixels, clear of all components, count as one unknown object
_LEAST_PIXELS = 6  # smaller components are specks
_MOST_SPECK_PIXELS = 6  # more pixels in specks than this count as one unknown object
_WORST_COLOR = 0.2  # rms distance from the line between white and the color, in units of 1
_LEAST_OVERLAP = 0.75  # soft intersection over union of coverage and shape
_SIZES = (2.5, 8.0)  # sizes of objects, in pixels, that are accepted
_CHUNK = 64  # pictures read at once; larger chunks fall out of the cache
_MOST_COMPONENTS = 12  # per picture; the rest are unknown without being fitted

_AREAS = {"circle": np.pi, "square": 1.8**2, "triangle": 0.5 * 2.4 * 2.08}  # of size 1
_PIXEL_Y, _PIXEL_X = np.mgrid[0:CANVAS, 0:CANVAS] + 0.5
_DIRECTIONS = (np.array(BACKGROUND) - np.array(list(COLORS.values()))) / 255.0  # (colors, 3)


@dataclass(frozen=True)
class Reading:
    """What is seen in one picture: recognised objects, and how many things are none of them."""

    objects: tuple[Placed, ...]
    num_unknown: int = 0

    def count(self, shape: str, color: str | None = None) -> int:
        """How many objects have this shape, and this color if one is given."""
        return len(self.find(shape, color))

    def find(self, shape: str, color: str | None = None) -> list[Placed]:
        """The objects of this shape, and of this color if one is given."""
        return [item for item in self.objects if item.shape == shape and color in (None, item.color)]


def read(pixels: np.ndarray) -> list[Reading]:
    """Reads pictures.

    Args:
        pixels: `(N, CANVAS, CANVAS, 3)` uint8.

    Raises:
        ValueError: another shape or dtype.
    """
    if pixels.ndim != 4 or pixels.shape[1:] != (CANVAS, CANVAS, 3) or pixels.dtype != np.uint8:
        raise ValueError(f"expected uint8 pixels (N, {CANVAS}, {CANVAS}, 3), got {pixels.dtype} {pixels.shape}")
    return [reading for start in range(0, len(pixels), _CHUNK) for reading in _read(pixels[start : start + _CHUNK])]


def _read(pixels: np.ndarray) -> list[Reading]:
    difference = (np.array(BACKGROUND, dtype=np.float32) - pixels) / 255.0
    foreground = np.abs(difference).max(-1) > _FOREGROUND
    labels = _components(foreground)
    picture, masks, num_unknown = _candidates(labels)
    num_unknown += _pale(difference, foreground)
    objects: list[list[Placed]] = [[] for _ in pixels]
    region = _dilate(masks) & (masks | ~foreground[picture])
    color, coverage, distance = _fit_color(difference[picture], region)
    shape, placement, overlap = _fit_shape(coverage)
    size = placement[:, 2]
    good = (distance <= _WORST_COLOR) & (overlap >= _LEAST_OVERLAP) & (size >= _SIZES[0]) & (size <= _SIZES[1])
    names = list(COLORS)
    for k in range(len(picture)):
        if good[k]:
            objects[picture[k]].append(Placed(SHAPES[shape[k]], names[color[k]], *map(float, placement[k])))
        else:
            num_unknown[picture[k]] += 1
    return [Reading(tuple(found), int(unknown)) for found, unknown in zip(objects, num_unknown, strict=True)]


def _window_max(values: np.ndarray) -> np.ndarray:
    """Largest value in the 3 x 3 neighbourhood, per picture."""
    rows = values.copy()
    np.maximum(rows[:, 1:], values[:, :-1], out=rows[:, 1:])
    np.maximum(rows[:, :-1], values[:, 1:], out=rows[:, :-1])
    result = rows.copy()
    np.maximum(result[:, :, 1:], rows[:, :, :-1], out=result[:, :, 1:])
    np.maximum(result[:, :, :-1], rows[:, :, 1:], out=result[:, :, :-1])
    return result


_dilate = _window_max


def _components(foreground: np.ndarray) -> np.ndarray:
    """Labels `(N, H, W)` of 8-connected components, 0 outside; unique within a picture.

    Each pixel takes the largest label around it until nothing changes. Mazes that need over 64 rounds stay in
    pieces, which is as good as unknown.
    """
    start = np.arange(1, CANVAS * CANVAS + 1, dtype=np.int16).reshape(CANVAS, CANVAS)
    labels = np.where(foreground, start, np.int16(0))
    open_pictures = np.arange(len(labels))
    for _ in range(64):
        before = labels[open_pictures]
        after = np.where(before > 0, _window_max(before), np.int16(0))
        labels[open_pictures] = after
        open_pictures = open_pictures[(after != before).any(axis=(1, 2))]
        if not len(open_pictures):
            break
    return labels


def _pale(difference: np.ndarray, foreground: np.ndarray) -> np.ndarray:
    """1 for each picture whose background is tinted in more than a few places, else 0, `(N,)`."""
    edges = ((0, 0), (1, 1), (1, 1))
    padded = np.pad(difference.max(-1), edges, mode="edge")
    blurred = sum(padded[:, y : y + CANVAS, x : x + CANVAS] for y in range(3) for x in range(3)) / 9
    background = ~_dilate(_dilate(foreground))
    return ((blurred > _PALE) & background).sum((1, 2)) > _MOST_PALE_PIXELS


def _candidates(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Picture `(K,)` and mask `(K, H, W)` of components worth fitting, and the unknowns so far `(N,)`."""
    num = CANVAS * CANVAS + 1
    keys, pixels = np.unique(labels + num * np.arange(len(labels))[:, None, None], return_counts=True)
    picture, label = keys // num, keys % num
    keep = label > 0
    picture, label, pixels = picture[keep], label[keep], pixels[keep]
    large = pixels >= _LEAST_PIXELS
    specks = np.bincount(picture[~large], weights=pixels[~large], minlength=len(labels))
    unknown = (specks > _MOST_SPECK_PIXELS).astype(int)
    picture, label = picture[large], label[large]
    rank = np.arange(len(picture)) - np.searchsorted(picture, picture)
    unknown += np.bincount(picture[rank >= _MOST_COMPONENTS], minlength=len(labels))
    picture, label = picture[rank < _MOST_COMPONENTS], label[rank < _MOST_COMPONENTS]
    return picture, labels[picture] == label[:, None, None], unknown


def _fit_color(difference: np.ndarray, region: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best palette color `(K,)`, coverage `(K, H, W)` and rms distance `(K,)` of each region."""
    difference = difference * region[..., None]
    coverage = np.clip(difference @ (_DIRECTIONS / (_DIRECTIONS**2).sum(1, keepdims=True)).T.astype(np.float32), 0, 1)
    # |d - a e|^2 summed over the region, for all colors at once: |d|^2 - 2 a d.e + a^2 |e|^2
    along = difference @ _DIRECTIONS.T.astype(np.float32)
    square = (difference**2).sum((1, 2, 3))[:, None]
    residual = square + (coverage**2 * (_DIRECTIONS**2).sum(1) - 2 * coverage * along).sum((1, 2))
    color = residual.argmin(1)
    rows = np.arange(len(color))
    distance = np.sqrt(np.maximum(residual[rows, color], 0) / region.sum((1, 2)))
    return color, coverage[rows, :, :, color], distance


def _fit_shape(coverage: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best shape `(K,)`, its x, y, size `(K, 3)` and overlap `(K,)`."""
    area = np.maximum(coverage.sum((1, 2)), 1e-6)
    x = (coverage * _PIXEL_X).sum((1, 2)) / area
    y = (coverage * _PIXEL_Y).sum((1, 2)) / area
    overlaps, placements = [], []
    for shape in SHAPES:
        size = np.sqrt(area / _AREAS[shape])
        middle = y - size * HALF_EXTENTS[shape][1] / 3 if shape == "triangle" else y  # centroid -> middle of the box
        template = _coverage(shape, x, middle, size)
        overlaps.append(np.minimum(coverage, template).sum((1, 2)) / np.maximum(coverage, template).sum((1, 2)))
        placements.append(np.stack([x, middle, size], 1))
    best = np.argmax(overlaps, axis=0)
    rows = np.arange(len(best))
    return best, np.stack(placements)[best, rows], np.stack(overlaps)[best, rows]


def _coverage(shape: str, x: np.ndarray, y: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Share of each pixel covered by a shape, `(K, H, W)`, from signed distances to its outline."""
    dx, dy = _PIXEL_X - x[:, None, None], _PIXEL_Y - y[:, None, None]
    half_x, half_y = (half * size[:, None, None] for half in HALF_EXTENTS[shape])

    def inside(distance: np.ndarray) -> np.ndarray:
        return np.clip(0.5 - distance, 0, 1)

    if shape == "circle":
        return inside(np.hypot(dx, dy) - half_x)
    if shape == "square":
        return inside(np.abs(dx) - half_x) * inside(np.abs(dy) - half_y)
    slant = (2 * half_y * np.abs(dx) - half_x * (dy + half_y)) / np.hypot(2 * half_y, half_x)
    return inside(slant) * inside(dy - half_y)


def clauses(spec: Spec, reading: Reading) -> dict[str, float]:
    """The parts that a caption is graded by, each in [0, 1].

    With `ratio(found, wanted) = min / max`, symmetric in too few and too many and never negative:
      * per group, the number of objects of its shape;
      * per group with a color, the number of those that have the color;
      * the relation: the share of pairs for which it holds, 0 where an object is missing (counted once);
      * the number of objects of any kind; unknown things are never credited and cost like extra objects.
    """
    result: dict[str, float] = {}
    for index, group in enumerate(spec.groups):
        result |= {f"{index}_{key}": value for key, value in _group_clauses(group, reading).items()}
    if spec.relation:
        pairs = [(a, b) for a in reading.find(spec.groups[0].shape) for b in reading.find(spec.groups[1].shape)]
        held = sum(relation_between(a, b) == spec.relation for a, b in pairs)
        result["relation"] = held / len(pairs) if pairs else 0.0
    seen = len(reading.objects)
    result["total"] = min(seen, spec.num_objects) / max(seen + reading.num_unknown, spec.num_objects)
    return result


def _group_clauses(group: Group, reading: Reading) -> dict[str, float]:
    result = {"count": _ratio(reading.count(group.shape), group.count)}
    if group.color:
        result["color"] = _ratio(reading.count(group.shape, group.color), group.count)
    return result


def _ratio(found: int, wanted: int) -> float:
    return min(found, wanted) / max(found, wanted)


def check_images(pixels: np.ndarray, specs: Sequence[Spec]) -> tuple[np.ndarray, np.ndarray]:
    """Grades pictures.

    Args:
        pixels: `(N, CANVAS, CANVAS, 3)` uint8.
        specs: what each was asked to show, N of them.

    Returns:
        strict `(N,)`: 1 where the picture shows exactly what the caption says and nothing else, else 0;
        partial `(N,)`: mean of `clauses`, in [0, 1]; 1 exactly where strict is 1.
    """
    if len(pixels) != len(specs):
        raise ValueError(f"{len(pixels)} pictures for {len(specs)} specs")
    readings = read(pixels)
    parts = [list(clauses(spec, reading).values()) for spec, reading in zip(specs, readings, strict=True)]
    partial = np.array([sum(values) / len(values) for values in parts])
    return (partial == 1.0).astype(float), partial

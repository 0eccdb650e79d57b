"""Makes the prompt files of the shapes world: `python -m flowrl.shapes.prompts`.

`shapes_train.jsonl` holds every caption that is not held out. A category has as many rows as the largest one,
color_attr, has captions, 126: captions of smaller categories are repeated, all equally often, give or take one.
`shapes_eval.jsonl` holds 80 rows a category. Where a category has held-out captions they are every second row.
In both, row i is of category `CATEGORIES[i % 6]`, and captions that differ little lie far apart, so that any
prefix is balanced.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from .scenes import CATEGORIES, Spec, all_specs

HELD_OUT_COLORS = {("red", "triangle"), ("blue", "circle"), ("yellow", "square")}
"""(color, shape) pairs that no training caption names."""

HELD_OUT_RELATIONS = {
    ("circle", "above", "square"),
    ("square", "below", "circle"),
    ("square", "left of", "triangle"),
    ("triangle", "right of", "square"),
    ("triangle", "left of", "circle"),
    ("circle", "right of", "triangle"),
}
"""(shape, relation, shape) that no training caption names, closed under mirroring: three meanings, two ways each."""

_EVAL_ROWS = 80  # per category


def is_held_out(spec: Spec) -> bool:
    """Whether a caption is kept for evaluation."""
    order = (spec.groups[0].shape, spec.relation, spec.groups[-1].shape)
    return order in HELD_OUT_RELATIONS or any((group.color, group.shape) in HELD_OUT_COLORS for group in spec.groups)


def train_rows() -> list[dict[str, Any]]:
    """The lines of the training file: `prompt`, `category` and `held_out`, which is False."""
    tables = [[spec for spec in all_specs(category) if not is_held_out(spec)] for category in CATEGORIES]
    num_rows = max(map(len, tables))
    return _interleave([_spread(table, num_rows) for table in tables])


def eval_rows() -> list[dict[str, Any]]:
    """The lines of the evaluation file, keys as in `train_rows`."""
    columns = []
    for category in CATEGORIES:
        known = [spec for spec in all_specs(category) if not is_held_out(spec)]
        held_out = [spec for spec in all_specs(category) if is_held_out(spec)]
        if held_out:
            half = _EVAL_ROWS // 2
            pairs = zip(_spread(known, half), _spread(held_out, half), strict=True)
            columns.append([spec for pair in pairs for spec in pair])
        else:
            columns.append(_spread(known, _EVAL_ROWS))
    return _interleave(columns)


def _spread(table: list[Spec], num_rows: int) -> list[Spec]:
    """`num_rows` entries, round and round the table in strides near the golden ratio."""
    stride = next(k for k in range(round(0.618 * len(table)), 2 * len(table)) if math.gcd(k, len(table)) == 1)
    return [table[row * stride % len(table)] for row in range(num_rows)]


def _interleave(columns: list[list[Spec]]) -> list[dict[str, Any]]:
    specs = [spec for row in zip(*columns, strict=True) for spec in row]
    return [{"prompt": spec.caption, "category": spec.category, "held_out": is_held_out(spec)} for spec in specs]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/prompts"), help="folder of the two files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("shapes_train", train_rows()), ("shapes_eval", eval_rows())):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

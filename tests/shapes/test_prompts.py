"""The committed prompt files: hold-outs by meaning, balance, and agreement with their builder."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from flowrl.shapes import prompts
from flowrl.shapes.scenes import CATEGORIES, Group, Spec, all_specs, parse

FOLDER = Path(__file__).parents[2] / "assets" / "prompts"
HELD_OUT_PHRASES = ("red triangle", "blue circle", "yellow square")
MIRROR = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"shapes_{name}.jsonl").read_text(encoding="utf-8").splitlines()]


TRAIN, EVAL = rows_of("train"), rows_of("eval")


def meaning(caption: str) -> tuple:
    """The layout that a position caption asks for, the same for 'a above b' and 'b below a'."""
    first, relation, second = re.fullmatch(r"a (\w+) (left of|right of|above|below) a (\w+)", caption).groups()
    return min((first, relation, second), (second, MIRROR[relation], first))


def test_the_committed_files_are_what_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prompts", "--out", str(tmp_path / "new")])
    prompts.main()
    for name in ("shapes_train.jsonl", "shapes_eval.jsonl"):
        assert (tmp_path / "new" / name).read_bytes() == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("rows", [TRAIN, EVAL], ids=["train", "eval"])
def test_rows_are_interleaved_and_labelled(rows):
    for index, row in enumerate(rows):
        assert list(row) == ["prompt", "category", "held_out"]
        assert row["category"] == CATEGORIES[index % 6] == parse(row["prompt"]).category
        assert parse(row["prompt"]).caption == row["prompt"]


def test_held_out_colors_appear_in_no_training_caption():
    for row in TRAIN:
        assert not any(phrase in row["prompt"] for phrase in HELD_OUT_PHRASES), row["prompt"]
        assert row["held_out"] is False
    for row in EVAL:
        if row["category"] != "position":
            assert row["held_out"] == any(phrase in row["prompt"] for phrase in HELD_OUT_PHRASES), row["prompt"]


def test_held_out_relations_appear_in_no_training_caption_nor_mirrored():
    rows = [row for row in TRAIN + EVAL if row["category"] == "position"]
    trained = {meaning(row["prompt"]) for row in rows if not row["held_out"]}
    held_out = {row["prompt"] for row in rows if row["held_out"]}
    assert len(held_out) == 6
    assert {parse(caption).relation for caption in held_out} == set(MIRROR)
    assert len({meaning(caption) for caption in held_out}) == 3
    assert not {meaning(caption) for caption in held_out} & trained


def test_words_of_held_out_captions_are_all_trained():
    trained = {word for row in TRAIN for word in row["prompt"].split()}
    assert {word for row in EVAL for word in row["prompt"].split()} <= trained
    for phrase in HELD_OUT_PHRASES:
        color, shape = phrase.split()
        assert sum(color in row["prompt"] for row in TRAIN) >= 20
        assert sum(shape in row["prompt"] for row in TRAIN) >= 20


def test_training_captions_are_all_the_others_equally_often():
    assert len(TRAIN) == 6 * 126
    for category in CATEGORIES:
        counts = Counter(row["prompt"] for row in TRAIN if row["category"] == category)
        held_out = {row["prompt"] for row in EVAL if row["held_out"]}
        everything = {spec.caption for spec in all_specs(category)}
        assert set(counts) <= everything - held_out
        # color_attr: for each of 6 ordered pairs of shapes, 5 + 5 - 1 of the 30 color pairs name a held-out color
        missing = {"colors": 3, "position": 6, "color_attr": 6 * 9}.get(category, 0)
        assert len(counts) == len(everything) - missing
        assert counts.total() == 126
        assert max(counts.values()) - min(counts.values()) <= 1


def test_eval_rows_are_spread_evenly():
    assert len(EVAL) == 480
    for category in CATEGORIES:
        known, held_out = (
            Counter(row["prompt"] for row in EVAL if row["category"] == category and row["held_out"] == flag)
            for flag in (False, True)
        )
        split = category in ("colors", "position", "color_attr")
        assert (known.total(), held_out.total()) == ((40, 40) if split else (80, 0))
        for counts in (known, held_out):
            assert not counts or max(counts.values()) - min(counts.values()) <= 1
    for phrase in HELD_OUT_PHRASES:
        assert sum(phrase in row["prompt"] for row in EVAL if row["category"] == "color_attr") >= 10


def test_prefixes_are_balanced():
    for stop in range(12, 481, 12):
        flags = Counter((row["category"], row["held_out"]) for row in EVAL[:stop])
        assert flags["colors", True] == flags["colors", False] == stop // 12
    assert len({row["prompt"] for row in TRAIN[:18]}) == 18  # no caption twice before the smallest table is through
    first = [parse(row["prompt"]).groups for row in TRAIN if row["category"] == "color_attr"][:12]
    assert len({tuple(group.shape for group in groups) for groups in first}) >= 5  # of 6
    assert len({group.color for groups in first for group in groups}) == 6


def test_is_held_out_looks_at_both_groups_and_at_the_order():
    assert prompts.is_held_out(parse("a red triangle"))
    assert prompts.is_held_out(parse("a black square and a red triangle"))
    assert not prompts.is_held_out(parse("a red circle and a blue triangle"))
    assert prompts.is_held_out(parse("a circle above a square"))
    assert prompts.is_held_out(parse("a square below a circle"))
    assert not prompts.is_held_out(parse("a square above a circle"))
    assert not prompts.is_held_out(Spec((Group(1, "circle"), Group(1, "square"))))

"""The soft checker's formulas by hand."""

import math

import numpy as np
import pytest
import torch

from flowrl.shapes.checker import Reading, read
from flowrl.shapes.pretrain import draw_batch
from flowrl.shapes.scenes import Placed, parse
from flowrl.shapes.soft_checker import (
    KINDS,
    SoftChecker,
    auc,
    centroids,
    count_log_grades,
    count_log_probs,
    reading_targets,
    soft_reward,
    train,
    training_loss,
)

KIND = {f"{color} {shape}": k for k, (color, shape) in enumerate(KINDS)}


def density(*objects, num=1):
    """Densities `(num, 19, 16, 16)` of (kind, column, row, amount)."""
    values = torch.zeros(num, len(KINDS) + 1, 16, 16)
    for kind, column, row, amount in objects:
        values[:, KIND.get(kind, -1), row, column] += amount
    return values


def score(values, caption):
    return soft_reward(values, [parse(caption)]).item()


def test_count_probabilities():
    probs = count_log_probs(torch.tensor([0.0, 2.0, 2.5, 9.0])).exp()
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))
    # at distance 1 the ratio is (1 + 16)^-2
    assert (probs[1, 1] / probs[1, 2]).item() == pytest.approx(1 / 289, rel=1e-4)
    assert probs[2, 2].item() == pytest.approx(probs[2, 3].item())
    assert probs[3].argmax() == 5 and probs[3, 5] > 0.99


def test_count_grades_fall_all_the_way():
    soft = torch.linspace(1.0, 6.0, 101, requires_grad=True)
    grades = count_log_grades(soft, torch.tensor(1.0))
    grades.sum().backward()
    assert grades[0] == 0 and (grades.diff() < 0).all()
    assert grades[20].exp().item() == pytest.approx(1 / 289, rel=1e-3)  # soft 2: (1 + 16)^-2
    assert (soft.grad[10:] < -0.7).all()  # near -4 / distance


def test_centroids_are_in_pixels():
    # cells are 2 pixels wide: column 3 is centered at 7, row 5 at 11
    values = density(("red circle", 3, 5, 1.0))
    torch.testing.assert_close(centroids(values)[0, 0], torch.tensor([7.0, 11.0]), atol=0.02, rtol=0)
    torch.testing.assert_close(centroids(values)[0, 1], torch.tensor([16.0, 16.0]))


def test_the_reward_is_near_one_where_all_holds_and_falls_with_each_clause():
    red, blue = ("red circle", 2, 8, 1.0), ("blue square", 12, 8, 1.0)
    right = score(density(red, blue), "a red circle and a blue square")
    assert 0.98 < right <= 1
    for wrong in [(red,), (blue,), (red, blue, ("green square", 5, 5, 1.0)), (red, blue, ("else", 5, 5, 1.0))]:
        assert score(density(*wrong), "a red circle and a blue square") < 0.25
    assert score(density(red, blue), "a red circle and a red square") < 0.1


def test_open_colors_add_up():
    three = density(("red circle", 2, 2, 1.0), ("black circle", 8, 8, 1.0), ("blue circle", 12, 12, 1.0))
    assert score(three, "three circles") > 0.98
    assert score(three, "four circles") < 0.15


def test_relations_follow_the_larger_offset():
    values = density(("red circle", 2, 8, 1.0), ("blue square", 12, 10, 1.0))
    by_relation = {r: score(values, f"a circle {r} a square") for r in ("left of", "right of", "above", "below")}
    assert by_relation["left of"] > 0.98
    assert max(by_relation, key=by_relation.get) == "left of"
    assert score(values, "a square right of a circle") == pytest.approx(by_relation["left of"])
    # 20 pixels against 4 the other way: the log-odds of left and right are 40, and one of four clauses
    assert math.log(by_relation["left of"] / by_relation["right of"]) == pytest.approx(10, abs=0.1)


def test_rows_are_independent(exact):
    values = torch.rand(3, len(KINDS) + 1, 16, 16, generator=torch.Generator().manual_seed(0)) / 100
    captions = ["a circle", "a red circle and a blue square", "a circle above a triangle"]
    together = soft_reward(values, [parse(caption) for caption in captions])
    alone = [score(values[row : row + 1], caption) for row, caption in enumerate(captions)]
    torch.testing.assert_close(together, torch.tensor(alone), rtol=0, atol=exact)
    with pytest.raises(ValueError, match="3 pictures for 1 specs"):
        soft_reward(values, [parse("a circle")])


def test_targets_of_a_reading():
    objects = (Placed("circle", "red", 5.0, 6.0, 4.0), *(Placed("square", "blue", x, 9.0, 4.0) for x in (3.0, 20.0)))
    counts, positions = reading_targets([Reading(objects, num_unknown=2)])
    assert counts.sum() == 5 and counts[0, KIND["blue square"]] == 2 and counts[0, -1] == 2
    assert positions[0, KIND["red circle"]].tolist() == [5.0, 6.0]
    assert positions.isnan().sum() == 2 * (len(KINDS) + 1 - 1)


def test_the_loss_prefers_the_truth():
    objects = (Placed("circle", "red", 7.0, 11.0, 4.0),)
    targets = reading_targets([Reading(objects)])
    right = training_loss(density(("red circle", 3, 5, 1.0)), *targets)
    assert right < 0.2
    for wrong in (("blue circle", 3, 5, 1.0), ("red circle", 10, 5, 1.0), ("red square", 3, 5, 1.0)):
        assert training_loss(density(wrong), *targets) > right + 1


def test_auc():
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == 0.75
    assert auc(np.array([0.5, 0.5]), np.array([0, 1])) == 0.5


def test_training_lowers_the_loss():
    _, pixels = draw_batch(np.random.default_rng(0), 40)
    pixels = (pixels * 127.5 + 127.5).round().byte()
    targets = reading_targets(read(pixels.permute(0, 2, 3, 1).contiguous().numpy()))
    before = training_loss(SoftChecker().eval()(pixels.float() / 255), *targets)
    after = training_loss(train(pixels, *targets, 20, steps=15)(pixels.float() / 255), *targets)
    assert after < 0.9 * before

import numpy as np
import pytest
from flowrl.rewards.base import build_reward, build_rewards, reward_status
from PIL import Image

from flowrl.catalog import REWARDS
from flowrl.config import RewardSection
from flowrl.core.scoring import check_reward
from flowrl.shapes.render import render
from flowrl.shapes.scenes import parse, sample_scene

PROMPTS = ["a red circle", "three squares", "a circle above a triangle"]


def pictures(prompts=PROMPTS):
    rng = np.random.default_rng(0)
    return [render(sample_scene(parse(prompt), rng)) for prompt in prompts]


@pytest.mark.parametrize("name", ["shapes_strict", "shapes_partial"])
def test_right_pictures_score_one(name):
    reward = build_reward(RewardSection(name=name))
    assert check_reward(reward.function, pictures(), PROMPTS) == [1, 1, 1]


def test_wrong_pictures_score_less():
    prompts = ["a red circle", "two squares", "a circle below a triangle"]
    strict, partial = build_rewards([RewardSection(name="shapes_strict"), RewardSection(name="shapes_partial")])
    assert strict.function(prompts=prompts, completions=pictures()) == [1, 0, 0]
    # "two squares" with three: count 2/3 and total 2/3; the relation is one of four clauses
    assert partial.function(prompts=prompts, completions=pictures()) == pytest.approx([1, 2 / 3, 3 / 4])


def test_other_sizes_are_refused_and_foreign_captions_named():
    reward = build_reward(RewardSection(name="shapes_strict")).function
    with pytest.raises(ValueError, match="expected uint8 pixels"):
        reward(prompts=["a circle"], completions=[Image.new("RGB", (64, 64))])
    with pytest.raises(ValueError, match="'a cat' is not a caption"):
        reward(prompts=["a cat"], completions=[Image.new("RGB", (32, 32))])


def test_building():
    assert all(reward_status(name) == "ok" for name in REWARDS)
    with pytest.raises(ValueError, match="cannot be built with"):
        build_reward(RewardSection(name="shapes_strict", params={"scale": 2}))
    with pytest.raises(ValueError, match="takes no params"):
        build_reward(RewardSection(name="math:sqrt", params={"x": 2}))

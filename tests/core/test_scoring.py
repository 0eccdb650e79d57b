import math
import sys

import pytest
from PIL import Image

from flowrl.core.scoring import Reward, Scorer, call_reward, check_reward
from flowrl.errors import RewardError


def length(prompts, completions, **columns):
    return [len(completion) for completion in completions]


def test_table_has_a_column_for_each_reward_and_sees_the_columns_of_the_file():
    def target(prompts, completions, wanted, **columns):
        return [float(completion == want) for completion, want in zip(completions, wanted, strict=True)]

    scorer = Scorer([Reward("length", length), Reward("target", target, 0.0)])
    table = scorer.submit(["p", "q"], ["a", "bcd"], {"wanted": ["a", "x"], "other": [1, 2]}).result()
    assert table.tolist() == [[1, 1], [3, 0]]
    assert scorer.names == ["length", "target"]


def test_no_score_is_nan_and_never_zero():
    reward = Reward("r", lambda **_: [None, math.nan, math.inf, 2])
    assert [str(score) for score in call_reward(reward, ["p"] * 4, ["c"] * 4, {})] == ["nan", "nan", "nan", "2.0"]


def test_each_reward_has_its_own_view():
    def greedy(prompts, completions, scene, **_):
        completions[0].thumbnail((2, 2))
        completions.reverse()
        prompts.clear()
        scene[0]["objects"].append("another")
        return [1.0] * len(completions)

    def opponents_too(completions, opponents, **_):
        opponents[0].thumbnail((1, 1))
        return [0.5] * len(completions)

    opponents_too.pairwise = True

    def careful(prompts, completions, scene, **_):
        return [image.width + len(s["objects"]) for image, s in zip(completions, scene, strict=True)]

    images = [Image.new("RGB", (8 * n, 8)) for n in (1, 2)]
    rewards = [Reward("greedy", greedy), Reward("pairs", opponents_too), Reward("careful", careful)]
    columns = {"scene": [{"objects": ["a"]}, {"objects": []}]}
    table = Scorer(rewards).submit(["p", "p"], images, columns, groups=[0, 0]).result()
    assert table[:, 2].tolist() == [9, 16]
    assert [image.width for image in images] == [8, 16]


def test_a_reward_that_ends_the_process_is_a_failure():
    def leave(**_):
        sys.exit(0)

    with pytest.raises(RewardError, match="'leave' failed: SystemExit"):
        call_reward(Reward("leave", leave), ["p"], ["c"], {})


def test_failures_name_the_reward():
    def broken(**_):
        raise KeyError("scene")

    with pytest.raises(RewardError, match="reward 'mine' failed: KeyError: 'scene'"):
        call_reward(Reward("mine", broken), ["p"], ["c"], {})
    with pytest.raises(RewardError, match="returned 1 scores for 4 completions"):
        call_reward(Reward("mine", lambda **_: [1.0]), ["p"] * 4, ["c"] * 4, {})
    with pytest.raises(RewardError, match="returned 'good' for prompt 'q'"):
        call_reward(Reward("mine", lambda **_: [1.0, "good"]), ["p", "q"], ["c"] * 2, {})


def test_check_reward():
    assert check_reward(length, ["a", "bb"], ["p", "q"]) == [1, 2]
    with pytest.raises(RewardError, match="unexpected keyword"):
        check_reward(lambda prompts, completions: [0.0, 0.0], ["a", "b"], ["p", "q"])
    with pytest.raises(RewardError, match="when the order changed"):
        check_reward(lambda completions, **_: range(len(completions)), ["a", "b"], ["p", "q"])

import json
import math

import pytest

from flowrl.core.controllers import SelfPaced

NAN = math.nan
NAMES = ["easy", "middle", "hard"]


def paced(easy=None, middle=None, hard=None, **options):
    """A controller whose competences are set by one update, which takes over the first means as they are."""
    controller = SelfPaced(NAMES, **options)
    scores = {"easy": easy, "middle": middle, "hard": hard}
    controller.update({name: [NAN if value is None else value] for name, value in scores.items()})
    return controller


def test_hand_worked_weights():
    # competences 0.75 at threshold 0.75: g = 0.5 each. Stick: 1 - 0.5, 0.5 (1 - 0.5), the rest 0.25.
    # floor 0.05 of three: 0.05 + 0.85 share
    weights = paced(0.75, 0.75, 0.1).weights()
    assert list(weights) == NAMES
    assert list(weights.values()) == pytest.approx([0.475, 0.2625, 0.2625])
    # without a floor the shares themselves; easy at 0.75 + ln(3) / 8: g = 3 / 4, so 1/4, 3/4 1/2, 3/4 1/2
    found = paced(0.75 + math.log(3) / 8, 0.75, 0.1, floor=0).weights()
    assert list(found.values()) == pytest.approx([0.25, 0.375, 0.375])


def test_before_any_score_the_easy_reward_leads():
    # competence 0: g = sigmoid(8 (0 - 0.75)) = sigmoid(-6); shares 1 - g, g (1 - g), g^2
    g = 1 / (1 + math.exp(6))
    found = SelfPaced(NAMES).weights()
    shares = [1 - g, g * (1 - g), g * g]
    assert list(found.values()) == pytest.approx([0.05 + 0.85 * share for share in shares])


@pytest.mark.parametrize("values", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.9, 0.2, 0.7), (0.1, 1.0, 0.5)])
@pytest.mark.parametrize("floor", [0.0, 0.05, 0.2])
def test_weights_sum_to_one_and_none_falls_below_the_floor(values, floor):
    found = paced(*values, floor=floor, sharpness=50).weights().values()
    assert sum(found) == pytest.approx(1, abs=1e-12)
    assert min(found) >= floor


def test_weight_is_handed_over_from_easy_to_hard():
    levels = [0.0, 0.3, 0.6, 0.75, 0.9, 1.0]
    rising = [paced(level, 0.7, 0.2).weights() for level in levels]
    for before, after in zip(rising, rising[1:], strict=False):
        assert after["easy"] < before["easy"]
        assert after["middle"] > before["middle"] and after["hard"] > before["hard"]
    rising = [paced(0.7, level, 0.2).weights() for level in levels]
    for before, after in zip(rising, rising[1:], strict=False):
        assert after["easy"] == before["easy"]
        assert after["middle"] < before["middle"]
        assert after["hard"] > before["hard"]
    # the last one hands over to nobody
    assert paced(0.7, 0.7, 0.0).weights() == paced(0.7, 0.7, 1.0).weights()


def test_competence_is_a_running_mean():
    # 0.75 at first, then 0.9 * 0.75 + 0.1 * 0.25 = 0.7: g = sigmoid(8 (0.7 - 0.75)) = 1 / (1 + e^0.4)
    controller = SelfPaced(["easy", "hard"], floor=0)
    controller.update({"easy": [0.5, 1.0], "hard": [0.0, 0.0]})
    logged = controller.update({"easy": [0.0, 0.5], "hard": [1.0, 1.0]})
    assert controller.competence == pytest.approx({"easy": 0.7, "hard": 0.1})
    passed = 1 / (1 + math.exp(0.4))
    assert controller.weights() == pytest.approx({"easy": 1 - passed, "hard": passed})
    # logged: the competences after the update, the weights that the iteration had, of competence 0.75
    assert logged == pytest.approx(
        {"reward_weight/easy": 0.5, "reward_weight/hard": 0.5, "competence/easy": 0.7, "competence/hard": 0.1}
    )


def test_other_rewards_keep_factor_one():
    controller = SelfPaced(["easy", "hard"], ["other"])
    for _ in range(3):
        controller.update({"easy": [1.0], "hard": [1.0], "other": [0.0]})
    assert controller.weights()["other"] == 1
    assert controller.weights()["easy"] + controller.weights()["hard"] == pytest.approx(1)
    assert "other" not in controller.competence


def test_missing_scores_are_no_zeros():
    controller = SelfPaced(["easy", "hard"])
    logged = controller.update({"easy": [1.0, NAN, 0.5], "hard": [NAN, NAN]})
    assert controller.competence == {"easy": 0.75}
    assert math.isnan(logged["competence/hard"])
    before = controller.weights()
    controller.update({"easy": [NAN, NAN], "hard": [NAN]})
    assert controller.weights() == before


def test_a_saved_state_gives_the_same_next_weights():
    controller = paced(0.8, 0.6, 0.2)
    saved = json.dumps(controller.state_dict())
    kept = controller.state_dict()
    scores = {"easy": [0.4], "middle": [0.9], "hard": [0.3]}
    controller.update(scores)
    resumed = SelfPaced(NAMES)
    resumed.load_state_dict(json.loads(saved))
    assert resumed.weights() != controller.weights()
    resumed.update(scores)
    assert resumed.weights() == controller.weights()
    assert json.dumps(kept) == saved  # a state that was taken does not move with the run
    assert resumed.state_dict() == controller.state_dict()

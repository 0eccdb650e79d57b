import math

import pytest
import torch

from flowrl.core.advantages import group_advantages
from flowrl.core.combine import combine_advantages, weighted_sum, win_rates
from flowrl.core.types import Scores

NAN = math.nan
HOWS = ["sum", "gdpo", "mo_grpo"]
GROUP = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def advantages(table, how, group=GROUP, weights=None, scale="group"):
    """Combined advantages of a table (N, V, R); the last view is credited."""
    weights = torch.ones(table.shape[-1], dtype=torch.float64) if weights is None else doubles(weights)
    return combine_advantages(
        Scores(table, weights, group),
        lambda rewards: rewards[:, -1:],
        lambda values: group_advantages(values, group, scale=scale, std_floor=0),
        how=how,
    )


def random_table(rewards=3):
    return torch.randn(8, 2, rewards, dtype=torch.float64)


def test_weighted_sum_takes_the_last_axis_and_a_missing_score_touches_only_its_own_view():
    # weights 2, -1, 0. (0, 0): 2 - 2 = 0. (0, 1): misses the first reward. (1, 0): only the monitor is missing, 6 - 4.
    table = doubles([[[1, 2, 7], [NAN, 1, 1]], [[3, 4, NAN], [5, 1, 0]]])
    found = weighted_sum(table, doubles([2, -1, 0]))
    torch.testing.assert_close(found, doubles([[0, NAN], [2, 9]]), equal_nan=True)
    with pytest.raises(ValueError, match="3 reward columns, 2 weights"):
        weighted_sum(table, doubles([1, 1]))


def test_sum_mo_grpo_and_gdpo_by_hand():
    # groups (0, 1) and (2, 3), weights 2 and 1.
    # first reward 0, 1 | 0, 10:  normalised -1, 1 | -1, 1
    # second       3, 1 | 5, 5:   normalised  1, -1 | 0, 0
    # "mo_grpo": (2 (first) + (second)) / 3 = -1, 1, -2, 2 thirds
    # "gdpo": that over its std, sqrt((1 + 1 + 4 + 4) / 4) = sqrt(2.5)
    # "sum": rewards 2 first + second = 3, 3 | 5, 25: normalised 0, 0 | -1, 1
    table, group = doubles([[[0, 3]], [[1, 1]], [[0, 5]], [[10, 5]]]), torch.tensor([0, 0, 1, 1])
    each = doubles([[-1], [1], [-2], [2]])
    torch.testing.assert_close(advantages(table, "mo_grpo", group, [2, 1]), each / 3)
    torch.testing.assert_close(advantages(table, "gdpo", group, [2, 1]), each / 2.5**0.5)
    torch.testing.assert_close(advantages(table, "sum", group, [2, 1]), doubles([[0], [0], [-1], [1]]))


@pytest.mark.parametrize("how", ["gdpo", "mo_grpo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_single_reward_is_normalised_plainly(how, scale):
    table = random_table(1)
    plain = group_advantages(table[:, -1], GROUP, scale=scale, std_floor=0)
    torch.testing.assert_close(advantages(table, how, scale=scale), plain)
    # a second reward that only monitors changes nothing, even where it is missing
    monitored = torch.cat([table, torch.full_like(table, NAN)], 2)
    torch.testing.assert_close(advantages(monitored, how, weights=[1, 0], scale=scale), plain)


@pytest.mark.parametrize("how", ["gdpo", "mo_grpo"])
def test_no_reward_drowns_the_others_by_its_scale(how):
    table = random_table()
    loud = table * doubles([1, 1000, 1])
    torch.testing.assert_close(advantages(loud, how), advantages(table, how), rtol=0, atol=1e-9)
    assert (advantages(loud, "sum") - advantages(table, "sum")).abs().max() > 0.1


def test_gdpo_advantages_have_std_one_whatever_the_number_of_rewards():
    for rewards in (2, 3, 5):
        table = random_table(rewards)
        found, each = advantages(table, "gdpo"), advantages(table, "mo_grpo")
        assert found.std(correction=0).item() == pytest.approx(1, abs=1e-12)
        torch.testing.assert_close(found * each.std(correction=0), each)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_constants_scales_and_order_change_nothing(how, scale):
    table, weights, order = random_table(), [1.0, 0.5, 2.0], torch.randperm(8)
    base = advantages(table, how, weights=weights, scale=scale)
    assert base.abs().max() > 0.5
    shifted = table + doubles([3, -7, 0.5])
    torch.testing.assert_close(advantages(shifted, how, weights=weights, scale=scale), base, rtol=0, atol=1e-9)
    scaled = 0.01 * table
    torch.testing.assert_close(advantages(scaled, how, weights=weights, scale=scale), base, rtol=0, atol=1e-9)
    permuted = advantages(table[order], how, GROUP[order], weights, scale)
    torch.testing.assert_close(permuted, base[order], rtol=0, atol=1e-9)


def test_a_negative_weight_turns_a_reward_around():
    table = random_table(2)
    for how in HOWS:
        turned = advantages(table * doubles([1, -1]), how)
        torch.testing.assert_close(advantages(table, how, weights=[1, -1]), turned)


def test_a_missing_score_of_one_reward_leaves_the_sample_out():
    # first reward 0, 2 and missing: normalised -1, 1, 0. second 0, 0, 3: mean 1, std sqrt(2).
    table, group = doubles([[[0, 0]], [[2, 0]], [[NAN, 3]]]), torch.zeros(3, dtype=torch.long)
    low = -1 / 2**0.5
    torch.testing.assert_close(advantages(table, "mo_grpo", group), doubles([[-1 + low], [1 + low], [0]]) / 2)
    torch.testing.assert_close(advantages(table, "sum", group), doubles([[-1], [1], [0]]))


def test_win_rates_by_hand():
    # 1, 3, 3, 7: beats none; beats one and ties with one, (1 + 0.5) / 3; beats all
    group = torch.zeros(4, dtype=torch.long)
    assert win_rates(torch.tensor([1.0, 3, 3, 7]), group).tolist() == [0, 0.5, 0.5, 1]
    # the one without a score takes no part: 1 against 2
    found = win_rates(torch.tensor([1.0, NAN, 2, 5]), torch.tensor([0, 0, 0, 1]))
    torch.testing.assert_close(found, doubles([0, NAN, 1, NAN]), equal_nan=True)  # the last has nobody to beat


def test_win_rates_sum_to_half_of_the_scored_members_of_each_group():
    group = torch.tensor([0, 1, 2] * 5)
    rewards = torch.randint(0, 4, (15, 2, 3)).double()  # many ties
    for number in range(3):
        sums = win_rates(rewards, group)[group == number].sum(0)
        torch.testing.assert_close(sums, torch.full((2, 3), 2.5, dtype=torch.float64))
    rewards[0] = NAN  # four scored members are left in group 0
    torch.testing.assert_close(
        win_rates(rewards, group)[group == 0].nansum(0), torch.full((2, 3), 2.0, dtype=torch.float64)
    )


def test_win_rates_see_only_the_order():
    rewards = torch.randint(-3, 4, (12, 2)).double()
    group = torch.tensor([0, 1, 2] * 4)
    base = win_rates(rewards, group)
    for transformed in (rewards.exp(), rewards**3 - 100, rewards * 1e-3, torch.atan(rewards)):
        assert torch.equal(win_rates(transformed, group), base)
    torch.testing.assert_close(win_rates(-rewards, group), 1 - base)  # a falling one turns them around


def test_win_rates_of_views_and_rewards_are_those_of_each_column():
    table, group = torch.randn(6, 2, 3), torch.tensor([0, 1, 1, 0, 0, 1])
    table[2, 1, 0] = NAN
    found = win_rates(table, group)
    assert found.shape == (6, 2, 3)
    for view in range(2):
        for reward in range(3):
            alone = win_rates(table[:, view, reward], group)
            torch.testing.assert_close(found[:, view, reward], alone, equal_nan=True)
    assert found.isnan().sum() == 1

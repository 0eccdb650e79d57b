import math

import pytest
import torch

from flowrl.flow.credit import balanced, increments, tree_rewards, turning_point_rewards, turning_points

NAN = math.nan
T, F = True, False

# R_0 .. R_5 of one sample; total change R_5 - R_0 = +4.
#   d_1 = +2    first step: R_5 - R_1 = +2 has its sign               -> turning point, worth R_5 - R_0 = 4
#   d_2 = -1    goes against the total                                -> no
#   d_3 = +2    d_2 against, d_3 with the total, R_5 - R_3 = +1 goes on -> turning point, worth R_5 - R_2 = 3
#   d_4 = -0.5  goes against the total                                -> no
#   d_5 = +1.5  d_4 against, d_5 with the total, but nothing follows  -> no
TURNING = [0.0, 2.0, 1.0, 3.0, 2.5, 4.0]
TURNING_D = [2.0, -1.0, 2.0, -0.5, 1.5]
# total change +2.5.
#   d_1 = -1    first step: R_5 - R_1 = +3.5 has the other sign       -> no
#   d_2 = +4    d_1 against, d_2 with the total, but R_5 - R_2 = -0.5: it overshoots -> no
#   d_3 = -2    goes against the total                                -> no
#   d_4 = +1    d_3 against, d_4 with the total, R_5 - R_4 = +0.5     -> turning point, worth R_5 - R_3 = 1.5
#   d_5 = +0.5  the last                                              -> no
OVERSHOOT = [0.0, -1.0, 3.0, 1.0, 2.0, 2.5]
OVERSHOOT_D = [-1.0, 4.0, -2.0, 1.0, 0.5]


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_increments_are_what_each_step_adds_and_telescope():
    same(increments(rows(TURNING, OVERSHOOT)), rows(TURNING_D, OVERSHOOT_D))
    rewards = torch.randint(-50, 50, (7, 10)).double()  # whole numbers, so that sums are exact
    found = increments(rewards)
    assert found.shape == (7, 9)
    same(found.sum(1), rewards[:, -1] - rewards[:, 0])


def test_a_missing_reward_spoils_only_the_two_increments_next_to_it():
    same(increments(rows([0.0, NAN, 3.0, 4.0], [0.0, 1.0, 3.0, 6.0])), rows([NAN, NAN, 1.0], [1.0, 2.0, 3.0]))


@pytest.mark.parametrize("sign", [1, -1])
def test_hand_worked_turning_points(sign):
    # mirrored rewards turn at the same steps, with values of the other sign
    selected, values = turning_points(sign * rows(TURNING, OVERSHOOT))
    assert selected.tolist() == [[T, F, T, F, F], [F, F, F, T, F]]
    same(values[selected], sign * torch.tensor([4.0, 3.0, 1.5], dtype=torch.float64))
    found, _ = turning_point_rewards(sign * rows(TURNING, OVERSHOOT), balance=False)
    same(found, sign * rows([4.0, -1.0, 3.0, -0.5, 1.5], [-1.0, 4.0, -2.0, 1.5, 0.5]))


def test_first_step_looks_at_what_follows_not_at_the_whole_change():
    # d_1 = +3 goes with the whole change +2, but what follows, -1, does not
    assert turning_points(rows([0.0, 3.0, 2.0]))[0].tolist() == [[F, F]]
    assert turning_points(rows([0.0, 1.0, 2.0]))[0].tolist() == [[T, F]]
    assert turning_points(rows([0.0, 0.0, 2.0]))[0].tolist() == [[F, F]]  # no step, no direction


def test_a_turning_point_is_worth_all_later_increments_and_its_own_and_the_last_step_is_never_one():
    rewards = torch.randint(-9, 9, (200, 7)).double()
    found, selected = turning_point_rewards(rewards, balance=False)
    steps = rewards.diff(dim=1)
    later = steps.flip(1).cumsum(1).flip(1)
    assert selected[:, :-1].any(0).all()
    assert not selected[:, -1].any()
    same(found[selected], later[selected])
    same(found[~selected], steps[~selected])


def test_turning_points_as_a_loop_over_the_definition():
    def sign(x):
        return (x > 0) - (x < 0)

    rewards = torch.randint(-4, 5, (300, 6))
    for row, found in zip(rewards.tolist(), turning_points(rewards.double())[0].tolist(), strict=True):
        last, total = row[-1], sign(row[-1] - row[0])
        d = [None] + [row[t] - row[t - 1] for t in range(1, 6)]
        expected = [sign(d[1]) * sign(last - row[1]) > 0]
        for t in range(2, 6):
            turns = sign(d[t - 1]) * total < 0 and sign(d[t]) * total > 0
            expected.append(turns and sign(d[t]) * sign(last - row[t]) > 0)
        assert found == expected, row


def test_without_turning_points_step_rewards_are_the_increments():
    # first steps go one way and what follows the other; no later step turns towards the whole change
    rewards = rows([0.0, 3.0, 2.0, 1.0], [0.0, -3.0, -2.0, -1.0], [1.0, 1.0, 1.0, 1.0])
    found, selected = turning_point_rewards(rewards)
    assert not selected.any()
    same(found, increments(rewards))


def test_balance_keeps_the_largest_of_each_sign_over_the_batch():
    # selected positives 5, 2, 4, negatives -1, -3: two of each stay, so 2 goes; 9 was not selected
    selected = torch.tensor([[T, T, T], [T, T, F]])
    values = rows([5.0, -1.0, 2.0], [-3.0, 4.0, 9.0])
    assert balanced(selected, values).tolist() == [[T, T, F], [T, T, F]]
    # mirrored: the smallest negative goes
    assert balanced(selected, -values).tolist() == [[T, T, F], [T, T, F]]
    # more of the other sign: positives 5, negatives -1, -3, -2: 5 and -3 stay
    assert balanced(selected, rows([5.0, -1.0, -2.0], [-3.0, 0.0, 9.0])).tolist() == [[T, F, F], [T, F, F]]


@pytest.mark.parametrize("sign", [1, -1])
def test_balance_keeps_all_where_one_sign_is_missing(sign):
    selected = torch.tensor([[T, F, T], [T, T, F]])
    # the only values of the other sign were not selected
    values = sign * rows([5.0, -1.0, 2.0], [3.0, 4.0, -9.0])
    assert torch.equal(balanced(selected, values), selected)


def test_balance_ranks_by_the_whole_change():
    # P: d = -4, +4.5, +0.5; step 2 turns: whole change +1, credit R_3 - R_1 = +5
    # Q: d = +2, 0, +1;      step 1 turns: whole change +3, credit +3
    # N: d = -1, 0, -1;      step 1 turns: whole change -2, credit -2
    # one positive stays beside the one negative: Q, by whole change; by credit it would be P
    rewards = rows([0.0, -4.0, 0.5, 1.0], [0.0, 2.0, 2.0, 3.0], [0.0, -1.0, -1.0, -2.0])
    found, selected = turning_point_rewards(rewards)
    assert selected.tolist() == [[F, F, F], [T, F, F], [T, F, F]]
    same(found, rows([-4.0, 4.5, 0.5], [3.0, 0.0, 1.0], [-2.0, 0.0, -1.0]))


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (0, [NAN, -1, 2, -0.5, 1.5]),  # the whole change is unknown, so nothing turns; d_1 is unknown
        (4, [4, -1, 3, NAN, NAN]),  # d_4 and d_5 are unknown; steps 1 and 3 turn as before
        (5, [2, -1, 2, -0.5, NAN]),  # where the reward ends is unknown, so nothing turns
    ],
)
def test_a_missing_reward_spreads_only_where_it_is_needed(missing, expected):
    rewards = rows(TURNING, OVERSHOOT)
    rewards[0, missing] = NAN
    found, _ = turning_point_rewards(rewards, balance=False)
    same(found[0], torch.tensor(expected, dtype=torch.float64))
    same(found[1], rows([-1.0, 4.0, -2.0, 1.5, 0.5])[0])  # the other sample does not notice


def test_hand_worked_tree():
    # 4 leaves 1, 3, 5, 11; splits at units 1 and 3. Unit 0 is above both splits: mean of all 5.
    # Units 1 and 2 are below one split: means 2 and 8. Unit 3 is below both: the leaves.
    splits_until = torch.tensor([0, 1, 1, 2])
    expected = rows([5.0, 2.0, 2.0, 1.0], [5.0, 2.0, 2.0, 3.0], [5.0, 8.0, 8.0, 5.0], [5.0, 8.0, 8.0, 11.0])
    leaves = torch.tensor([1.0, 3.0, 5.0, 11.0], dtype=torch.float64)
    same(tree_rewards(leaves, splits_until, 2), expected)
    # a second tree behind it does not mix in
    both = tree_rewards(torch.cat([leaves, leaves + 100]), splits_until, 2)
    same(both, torch.cat([expected, expected + 100]))


def test_a_missing_leaf_is_left_out_of_the_mean():
    # without the leaf 3: all (1 + 5 + 9) / 3 = 5, left 1, right (5 + 9) / 2 = 7; its own edge has no value
    found = tree_rewards(torch.tensor([1.0, NAN, 5.0, 9.0], dtype=torch.float64), torch.tensor([0, 1, 2]), 2)
    same(found, rows([5.0, 1.0, 1.0], [5.0, 1.0, NAN], [5.0, 7.0, 5.0], [5.0, 7.0, 9.0]))
    gone = tree_rewards(torch.tensor([NAN, NAN, 5.0, 9.0]), torch.tensor([1]), 2)[:, 0]
    assert gone.isnan().tolist() == [T, T, F, F]

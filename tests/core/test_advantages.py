import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.core.advantages import group_advantages, zero_std_fraction

NAN = math.nan


def test_hand_worked_group_and_batch_scale():
    # groups (1, 3) and (0, 0, 6): means 2 and 2; centered -1, 1 | -2, -2, 4.
    # group std: 1 | sqrt((4 + 4 + 16) / 3) = sqrt(8).
    # batch std around the batch's mean 2: sqrt((1 + 1 + 4 + 4 + 16) / 5) = sqrt(5.2).
    rewards, groups = torch.tensor([1.0, 3, 0, 0, 6]), torch.tensor([0, 0, 1, 1, 1])
    centered = torch.tensor([-1.0, 1, -2, -2, 4], dtype=torch.float64)
    std = torch.tensor([1, 1, 8**0.5, 8**0.5, 8**0.5], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards, groups, scale="none"), centered)
    torch.testing.assert_close(group_advantages(rewards, groups, std_floor=0), centered / std)
    torch.testing.assert_close(group_advantages(rewards, groups, std_floor=0.5), centered / (std + 0.5))
    torch.testing.assert_close(group_advantages(rewards, groups, scale="batch", std_floor=0), centered / 5.2**0.5)


def test_leave_one_out_is_rloo():
    rewards, groups = torch.tensor([1.0, 2, 6]), torch.zeros(3, dtype=torch.long)
    # others' means: 4, 3.5, 1.5
    expected = torch.tensor([-3.0, -1.5, 4.5], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards, groups, scale="none", leave_one_out=True), expected)


@pytest.mark.parametrize("value", [0.1, 0.2437, 0.3, 1 / 3, 0.95, -7.3, 1e6, 0.0])
@pytest.mark.parametrize("size", [2, 3, 8, 24])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(value, size, scale):
    rewards = torch.full((2 * size,), value)
    groups = torch.arange(2).repeat_interleave(size)
    assert (group_advantages(rewards, groups, scale=scale, std_floor=0) == 0).all()
    assert zero_std_fraction(rewards, groups) == 1


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_missing_score_touches_only_itself(scale, bad, exact):
    rewards = torch.tensor([0.1, bad, 0.5, 0.9, 0.2, 0.4, 0.4, 0.8])
    groups = torch.arange(2).repeat_interleave(4)
    keep = torch.tensor([0, 2, 3, 4, 5, 6, 7])
    found = group_advantages(rewards, groups, scale=scale)
    assert found[1] == 0
    without = group_advantages(rewards[keep], groups[keep], scale=scale)
    torch.testing.assert_close(found[keep], without, rtol=0, atol=exact)


def test_a_failed_score_is_not_zero():
    # with rewards -1, -2, -3 a failure recorded as 0 would look like the best sample
    found = group_advantages(torch.tensor([-1.0, -2, -3, NAN]), torch.zeros(4, dtype=torch.long), scale="none")
    assert found.tolist() == [1, 0, -1, 0]


def test_a_lone_sample_has_no_advantage():
    assert group_advantages(torch.tensor([5.0, NAN]), torch.zeros(2, dtype=torch.long)).tolist() == [0, 0]


def test_unit_columns_are_normalised_alone(exact):
    rewards, groups = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    together = group_advantages(rewards, groups)
    apart = torch.stack([group_advantages(column, groups) for column in rewards.T], 1)
    torch.testing.assert_close(together, apart, rtol=0, atol=exact)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6), st.permutations(range(6)), st.floats(-5, 5))
def test_invariances(values, order, shift):
    rewards, groups, order = torch.tensor(values).double(), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor(order)
    for scale in ("group", "batch", "none"):
        base = group_advantages(rewards, groups, scale=scale)
        assert abs(base[:3].sum()) < 1e-6
        torch.testing.assert_close(group_advantages(rewards[order], groups[order], scale=scale), base[order])
        if rewards[:3].std() > 0.1 and rewards[3:].std() > 0.1:  # clear of the threshold for "all equal"
            torch.testing.assert_close(group_advantages(rewards + shift, groups, scale=scale), base)


def test_wrong_shapes_and_names_are_refused():
    with pytest.raises(ValueError, match="expected rewards"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="unknown scale"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), scale="global")

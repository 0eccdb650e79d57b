"""Rewards that judge pairs, and how the groups of an iteration share out its plans."""

import math
from collections import Counter

import pytest
import torch

from flowrl.core.groups import iteration_ids, plan_batches
from flowrl.core.scoring import Reward, Scorer, call_pairwise
from flowrl.errors import RewardError

NAN = math.nan


class Judge:
    """Notes what it is asked; by default the larger completion wins and equal ones tie."""

    pairwise = True

    def __init__(self, answer=None):
        self.answer = answer or (lambda first, second: 0.5 + 0.5 * ((first > second) - (first < second)))
        self.asked = []

    def __call__(self, prompts, completions, opponents, **columns):
        seen = columns.get("wanted", [None] * len(prompts))
        self.asked += list(zip(prompts, completions, opponents, seen, strict=True))
        return [self.answer(first, second) for first, second in zip(completions, opponents, strict=True)]


def win_rates(judge, completions, groups):
    return call_pairwise(Reward("judge", judge), ["p"] * len(completions), completions, {}, groups)


def test_win_rates_by_hand_within_groups():
    # group 0: 1, 5, 5, 9 -> 0, (1 + 0.5) / 3, (1 + 0.5) / 3, 1; group 1, in between: 7, 3 -> 1, 0
    assert win_rates(Judge(), [1, 7, 5, 5, 3, 9], [0, 1, 0, 0, 1, 0]) == [0, 1, 0.5, 0.5, 0, 1]


def test_sure_and_unsure_verdicts_are_shared_out():
    # 0.8 for the first of each pair: a wins 0.8 twice, b 0.2 and 0.8, c 0.2 twice
    assert win_rates(Judge(lambda first, second: 0.8), ["a", "b", "c"], [0, 0, 0]) == pytest.approx([0.8, 0.5, 0.2])


def test_every_pair_is_judged_once_with_its_prompt_opponent_and_columns():
    judge = Judge()
    call_pairwise(
        Reward("judge", judge),
        ["p", "q", "p", "q", "p"],
        [1, 7, 5, 3, 9],
        {"wanted": list("abcde"), "unused": [0] * 5},
        [4, 2, 4, 2, 4],
    )
    # columns follow the first of the pair
    expected = [("p", 1, 5, "a"), ("p", 1, 9, "a"), ("q", 7, 3, "b"), ("p", 5, 9, "c")]
    assert sorted(judge.asked) == sorted(expected)


def test_a_pair_without_a_verdict_is_left_out():
    # no verdict on (1, 5): 1 lost to 9 only, 5 lost to 9 only, 9 won twice
    judge = Judge(lambda first, second: None if {first, second} == {1, 5} else float(first > second))
    assert win_rates(judge, [1, 5, 9], [0, 0, 0]) == [0, 0, 1]
    # no verdict on 1 at all: no score, and the others are compared with each other alone
    judge = Judge(lambda first, second: None if 1 in (first, second) else float(first > second))
    found = win_rates(judge, [1, 5, 9], [0, 0, 0])
    assert math.isnan(found[0])
    assert found[1:] == [0, 1]


def test_a_lone_completion_has_no_score():
    found = win_rates(Judge(), [1, 5, 9], [0, 0, 1])
    assert found[:2] == [0, 1]
    assert math.isnan(found[2])


@pytest.mark.parametrize("bad", [1.5, -0.1])
def test_verdicts_outside_zero_and_one_are_refused(bad):
    with pytest.raises(RewardError, match=rf"reward 'judge' compares pairs: expected values in \[0, 1\].*{bad}"):
        win_rates(Judge(lambda first, second: bad if first == 1 else 0.5), [1, 5, 9], [0, 0, 0])
    # the borders are allowed
    assert win_rates(Judge(lambda first, second: 1), [1, 5], [0, 0]) == [1, 0]


def test_without_groups_it_is_refused_by_name():
    scorer = Scorer([Reward("plain", lambda **_: [1.0, 2.0]), Reward("mine", Judge())])
    with pytest.raises(RewardError, match="reward 'mine' compares pairs"):
        scorer.submit(["p", "p"], [1, 2], {})


def test_a_wrong_number_of_verdicts_is_refused_by_name():
    class Short(Judge):
        def __call__(self, **_):
            return [1.0]

    with pytest.raises(RewardError, match="reward 'judge' returned 1 scores for 3 completions"):
        win_rates(Short(), [1, 5, 9], [0, 0, 0])


def test_pairwise_and_plain_rewards_stand_side_by_side_in_the_table():
    judge = Judge()
    scorer = Scorer([Reward("judge", judge), Reward("value", lambda completions, **_: completions, 0.0)])
    table = scorer.submit(["p", "q", "p", "q"], [4, 2, 3, 8], {"wanted": [0, 1, 2, 3]}, [0, 1, 0, 1]).result()
    assert table.dtype == torch.float64
    assert table.tolist() == [[1, 4], [0, 2], [0, 3], [1, 8]]
    assert sorted(judge.asked) == [("p", 4, 3, 0), ("q", 2, 8, 1)]


def ids_of(num_groups, group_size):
    return iteration_ids(0, 0, num_rows=50, num_prompts=num_groups, group_size=group_size)


def plan_of_groups(num_plans, num_groups, shift=0):
    """The plan of each group."""
    ids = ids_of(num_groups, 2)
    found = {}
    for plan, rows in plan_batches(ids, list(range(num_plans)), num_groups, 100, shift=shift):
        for group in ids.group[rows].tolist():
            assert found.setdefault(group, plan) == plan  # a group is never cut
    return [found[group] for group in range(num_groups)]


def test_groups_share_out_the_plans_in_even_blocks():
    assert plan_of_groups(4, 8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert plan_of_groups(1, 3) == [0, 0, 0]
    # where they do not divide, blocks differ by one at most
    for num_plans, num_groups in [(3, 7), (5, 8), (4, 9)]:
        counts = Counter(plan_of_groups(num_plans, num_groups))
        assert len(counts) == num_plans
        assert max(counts.values()) - min(counts.values()) == 1


def test_a_shift_rotates_the_blocks():
    assert plan_of_groups(4, 8, shift=1) == [1, 1, 2, 2, 3, 3, 0, 0]
    assert plan_of_groups(4, 8, shift=4) == plan_of_groups(4, 8)


@pytest.mark.parametrize(("num_plans", "num_groups"), [(5, 2), (8, 1), (8, 3), (3, 3)])
def test_every_plan_has_its_turn_over_the_iterations(num_plans, num_groups):
    # whatever its number, a group meets each plan once in as many iterations as there are plans
    turns = [plan_of_groups(num_plans, num_groups, shift) for shift in range(num_plans)]
    for group in zip(*turns, strict=True):
        assert sorted(group) == list(range(num_plans))
    assert len(set(turns[0])) == num_groups  # and the groups of an iteration have different ones


@pytest.mark.parametrize("batch_size", [1, 4, 5, 100])
@pytest.mark.parametrize(("num_plans", "num_groups"), [(1, 4), (3, 4), (4, 4), (7, 4)])
def test_batches_hold_every_row_once_in_order_and_one_plan_each(batch_size, num_plans, num_groups):
    ids = ids_of(num_groups, 3)
    batches = list(plan_batches(ids, list(range(num_plans)), num_groups, batch_size, shift=2))
    assert [row for _, rows in batches for row in range(len(ids))[rows]] == list(range(len(ids)))
    wanted = plan_of_groups(num_plans, num_groups, shift=2)
    for plan, rows in batches:
        assert 1 <= rows.stop - rows.start <= batch_size
        assert {wanted[group] for group in ids.group[rows].tolist()} == {plan}
    if batch_size == 100:  # no more batches than plans in use
        assert len(batches) == len(set(wanted))


def test_a_rank_follows_the_plans_of_its_samples():
    # rows 4.. 10 of 4 groups of 3, as of a rank in between: groups 1, 1, 2, 2, 2, 3
    ids = ids_of(4, 3)[slice(4, 10)]
    found = [(plan, rows.start, rows.stop) for plan, rows in plan_batches(ids, ["a", "b"], 4, 100)]
    assert found == [("a", 0, 2), ("b", 2, 6)]
